"""Merge label changes into the rows of a bundle."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Bundle, BundleExistsError, Hide, LabelRecord, TowerError, Upsert
from longtail.bundle.added_labels import LabelAdder
from longtail.index import LongtailIndexError, merge_labels
from longtail.state import LabelStore, read_label_changes
from tests.bundles import make_bundle

AT = datetime(2026, 6, 1, tzinfo=UTC)
L = 60


def upsert(id_: str, at: datetime = AT, display: dict[str, Any] | None = None, **features: Any) -> Upsert:
    return Upsert(id=id_, at=at, features=features, display=display or {})


def hide(id_: str) -> Hide:
    return Hide(id=id_, at=AT)


def append_changes(state: Path, *records: LabelRecord) -> None:
    with closing(LabelStore(state)) as store:
        store.append(records)


def written(tmp_path: Path, *records: LabelRecord, **variant: Any) -> tuple[Path, Path, Bundle]:
    bundle = make_bundle(labels=L, **({"label_tower": True} | variant))
    seen_pairs = np.array([[0, 5], [0, 7], [2, 0], [2, 59]], np.int32)
    reports = {"report.html": b"<p>", "metrics.json": b"{}"}
    histories = np.array([[-1, 7, 5], [59, 7, 8], [-1, -1, -1]] + [[-1, -1, 0]] * 47, np.int32)
    histories = histories if bundle.cooccurrence else None
    bundle = replace(bundle, reports=reports, calibration_seen=seen_pairs, calibration_histories=histories)
    bundle = bundle.write(tmp_path / "bundle")
    append_changes(tmp_path, *records)
    return tmp_path / "bundle", tmp_path, bundle


@pytest.mark.parametrize("variant", [{}, {"cosine": False, "bias": True}, {"popularity": True}])
def test_added_labels_become_rows_and_hidden_ones_lose_theirs(tmp_path: Path, variant: dict[str, bool]) -> None:
    records = [
        upsert("new-1", genres=["g1"], display={"title": "New"}),
        upsert("item-5", genres=["g2"], year=3, display={"title": "Renamed"}),
        hide("item-7"),
        hide("new-9"),
        upsert("new-2", genres={"g3": 2}, year=-1),
        upsert("new-3"),
        hide("new-3"),
    ]
    path, log, before = written(tmp_path, *records, **variant)
    since = read_label_changes(log)
    report = merge_labels(path, log, tmp_path / "merged")
    after = Bundle.load(tmp_path / "merged")
    ids = after.labels.ids.to_pylist()
    assert ids == [f"item-{row}" for row in range(L) if row != 7] + ["new-1", "new-2"]
    assert (report.labels, report.added, report.reembedded, report.removed) == (61, 2, 1, 1)
    assert report.skipped == {}
    assert after.calibration_seen.tolist() == [[0, 5], [2, 0], [2, 58]]
    remaining_rows = np.delete(np.arange(L), 7)
    old, new = before.labels, after.labels
    assert new.counts.tolist() == [*old.counts[remaining_rows], 0, 0]
    assert new.buckets.tolist() == [*old.buckets[remaining_rows], 3, 3]
    assert new.display["title"].to_pylist() == ["Renamed" if row == 5 else f"Title {row}" for row in remaining_rows] + [
        "New",
        None,
    ]
    p = np.exp(np.append(old.log_pn[remaining_rows], [old.log_pn.min()] * 2).astype(np.float64))
    np.testing.assert_allclose(np.exp(new.log_pn), p / p.sum(), rtol=1e-5)
    if "popularity" in variant:
        pi = np.exp(np.append(old.log_popularity[remaining_rows], [old.log_popularity.min()] * 2).astype(np.float64))
        np.testing.assert_allclose(np.exp(new.log_popularity), pi / pi.sum(), rtol=1e-5)
        assert after.rows().shape == (61, 8 + 2)
    unchanged = remaining_rows != 5
    np.testing.assert_array_equal(after.embeddings[:59][unchanged], before.embeddings[remaining_rows][unchanged])
    adder = LabelAdder(before)
    added, _ = adder.add([records[0], records[4], records[1]])
    np.testing.assert_array_equal(after.embeddings[[59, 60, 5]], added.embeddings)
    if old.bias is not None:
        assert new.bias is not None
        assert new.bias.tolist() == [*old.bias[remaining_rows], 0, 0]
    assert after.manifest.training_data == before.manifest.training_data | {
        "read_at": "2026-06-01T00:00:00+00:00",
        "labels_added": 2,
        "labels_reembedded": 1,
        "labels_removed": 1,
    }
    for name in ("query_tower.onnx", "label_tower.onnx", "report.html", "metrics.json", "calibration_queries.npy"):
        assert after.manifest.files[name] == before.manifest.files[name]
    assert read_label_changes(log) == since


def test_merging_twice_changes_no_label(tmp_path: Path) -> None:
    path, log, _ = written(tmp_path, upsert("new-1", year=1), upsert("item-5", year=2), hide("item-6"))
    merge_labels(path, log, tmp_path / "merged")
    again = merge_labels(tmp_path / "merged", log, tmp_path / "again")
    assert (again.labels, again.added, again.reembedded, again.removed) == (60, 0, 0, 0)
    first, second = Bundle.load(tmp_path / "merged"), Bundle.load(tmp_path / "again")
    np.testing.assert_array_equal(first.embeddings, second.embeddings)
    assert first.labels.ids == second.labels.ids
    append_changes(log, upsert("new-1", at=AT + timedelta(seconds=1), year=5), upsert("new-2", at=AT, year=5))
    later = merge_labels(tmp_path / "merged", log, tmp_path / "later")
    assert (later.labels, later.added, later.reembedded) == (61, 1, 1)
    assert Bundle.load(tmp_path / "later").manifest.own_id == "item_id"


def test_a_bundle_without_a_label_tower_can_lose_labels(tmp_path: Path) -> None:
    path, log, _ = written(tmp_path, upsert("new-1", year=1), hide("item-1"), label_tower=False)
    report = merge_labels(path, log, tmp_path / "merged")
    assert (report.labels, report.removed) == (59, 1)
    assert "without label_tower.onnx" in report.skipped["new-1"]


def test_columns_keep_their_types(tmp_path: Path) -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    display = pa.table(
        {
            "day": pa.array([datetime(2020, 1, 1, tzinfo=UTC).date()] * L),
            "tags": pa.array([["a"]] * L),
            "kind": pa.array(["film"] * L).dictionary_encode(),
        }
    )
    manifest = bundle.manifest.model_copy(update={"display": display.column_names})
    bundle = replace(bundle, manifest=manifest, labels=replace(bundle.labels, display=display))
    bundle.write(tmp_path / "bundle")
    new_display = {"day": "2021-02-03", "tags": ["b", "c"], "kind": "song"}
    append_changes(tmp_path, upsert("new", display=new_display), upsert("item-0", display={"kind": "play"}))
    merge_labels(tmp_path / "bundle", tmp_path, tmp_path / "merged")
    merged = Bundle.load(tmp_path / "merged").labels.display
    assert merged.schema.field("day").type == pa.date32()
    assert merged["day"][60].as_py() == datetime(2021, 2, 3, tzinfo=UTC).date()
    assert merged["tags"][60].as_py() == ["b", "c"]
    assert merged["kind"].to_pylist() == ["play"] + ["film"] * 59 + ["song"]
    assert merged["day"].null_count == 0


def test_impossible_merges_are_refused_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log, _ = written(tmp_path, upsert("new-1", year=1))
    with pytest.raises(LongtailIndexError, match=r"none\.log: expected label changes of a service, found none"):
        merge_labels(path, tmp_path / "none.log", tmp_path / "merged")
    with pytest.raises(BundleExistsError):
        merge_labels(path, log, path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(TowerError, match="expected ONNX Runtime to run it with; install it with `pip install"):
            merge_labels(path, log, tmp_path / "merged")
    append_changes(log, *(hide(f"item-{row}") for row in range(L)), hide("new-1"))
    with pytest.raises(LongtailIndexError, match="expected a label that is left, found all 60 hidden"):
        merge_labels(path, log, tmp_path / "merged")
    make_bundle(labels=L, label_tower=True, proposal=True).write(tmp_path / "tree")
    with pytest.raises(
        LongtailIndexError, match=r"tree: expected a bundle whose labels can change, found one with a tree p_n"
    ):
        merge_labels(tmp_path / "tree", log, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_merged_cooccurrence_keeps_its_labels(tmp_path: Path) -> None:
    records = [upsert("new-1", genres=["g1"]), upsert("item-5", genres=["g2"], year=3), hide("item-7")]
    path, log, before = written(tmp_path, *records, cooccurrence=True)
    merge_labels(path, log, tmp_path / "merged")
    after = Bundle.load(tmp_path / "merged")
    assert before.cooccurrence is not None
    assert after.cooccurrence is not None
    ids, old_ids = after.labels.ids.to_pylist(), before.labels.ids.to_pylist()
    assert (old_ids[7] in ids, "new-1" in ids) == (False, True)

    def weights(bundle: Bundle, of: list[str]) -> dict[tuple[str, str], float]:
        matrix = bundle.cooccurrence.matrix().tocoo()
        return {(of[row], of[column]): weight for row, column, weight in zip(*matrix.coords, matrix.data, strict=True)}

    expected = weights(before, old_ids)
    lost = {pair for pair in expected if "item-7" in pair}
    assert {pair[0] for pair in lost} > {"item-7"}, "no label has the hidden one as its neighbour"
    assert weights(after, ids) == {pair: weight for pair, weight in expected.items() if pair not in lost}
    assert after.cooccurrence.degrees_L.tolist() == [*np.delete(before.cooccurrence.degrees_L, 7), 0]
    assert (np.diff(after.cooccurrence.weights_LN, axis=1) <= 0).all()

    assert after.calibration_histories is not None
    assert after.calibration_histories[:3].tolist() == [[-1, -1, 5], [-1, 58, 7], [-1, -1, -1]]
    assert before.remembered is not None
    assert after.remembered is not None
    for user in ("u3", "u6", "u12", "nobody"):
        remaining_ids = [old_ids[row] for row in before.remembered.history(user) if row != 7]
        assert [ids[row] for row in after.remembered.history(user)] == remaining_ids
