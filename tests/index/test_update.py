"""A release over the lists of one before: what it answers, what stays where it was, what it refuses."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, BundleError, Hide, Upsert
from longtail.index import (
    Limits,
    LongtailIndexError,
    PriorsError,
    PriorTable,
    Release,
    Releases,
    build,
    update,
)
from longtail.index.construct import refill
from longtail.index.manifests import Effort
from longtail.state import LabelStore
from tests.bundles import make_bundle
from tests.index.test_cli import run

L = 700
AT = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    made = make_bundle(labels=L, cosine=False, bias=True, popularity=True, label_tower=True)
    return made.write(tmp_path_factory.mktemp("bundle") / "model")


def changed(bundle: Bundle, folder: Path, *, without: int = 20, moved: int = 15, added: int = 30) -> Bundle:
    """A bundle without some labels from the middle, others embedded anew, and copies of embeddings under new ids,
    stretched, so that they are somebody's best; rows in another order."""
    rng = np.random.default_rng(4)
    kept = np.delete(np.arange(L), np.arange(300, 300 + without))
    source = np.concatenate([kept, np.arange(added)])
    embeddings = bundle.embeddings[source].copy()
    embeddings[100 : 100 + moved] = rng.normal(size=(moved, embeddings.shape[1]))
    embeddings[len(kept) :] *= 1.5
    ids = [*bundle.labels.ids.take(pa.array(kept)).to_pylist(), *(f"new-{row}" for row in range(added))]
    order = rng.permutation(len(source))
    labels, at = bundle.labels, source[order]
    labels = replace(
        labels,
        ids=pa.array([ids[row] for row in order]), counts=labels.counts[at], log_pn=normalised(labels.log_pn[at]),
        buckets=labels.buckets[at], bias=labels.bias[at], display=labels.display.take(pa.array(at)),
        log_popularity=normalised(labels.log_popularity[at]),
    )  # fmt: skip
    manifest = bundle.manifest.model_copy(update={"labels": len(at)})
    vectors = {name: values[at] for name, values in bundle.label_vectors.items()}
    other = replace(bundle, manifest=manifest, labels=labels, embeddings=embeddings[order], label_vectors=vectors)
    return replace(other, path=None).write(folder / "changed")


def normalised(log_p: Any) -> Any:
    return (log_p - np.logaddexp.reduce(log_p.astype(np.float64))).astype(np.float32)


def cells(release: Release) -> dict[str, int]:
    """The inverted list of every label, by its id."""
    return dict(zip(release.bundle.labels.ids.to_pylist(), release.searcher.index.lists.tolist(), strict=True))


@pytest.mark.parametrize("spec", ["flat", "ivf_flat", "ivf_sq", "ivf_fastscan", "hnsw", "IVF8,Flat"])
def test_it_answers_as_exact_search_over_the_new_labels_does(spec: str, bundle: Bundle, tmp_path: Path) -> None:
    built = build(bundle, tmp_path / "r", spec=spec, name="first")
    Releases(tmp_path / "r").publish("first")
    after = changed(bundle, tmp_path)
    manifest = update(after, tmp_path / "r", name="second")

    assert (manifest.kind, manifest.spec, manifest.labels) == (built.kind, built.spec, L + 10)
    assert min(at.recall for at in manifest.recall) >= 0.95
    release = Releases(tmp_path / "r").verify("second")
    for dials in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
        queries = release.bundle.augmentation.queries(after.calibration_queries[:40], *dials)
        scores, rows = release.searcher.search(queries, 10)
        exact = queries @ after.rows().T
        assert (scores >= np.sort(exact)[:, -10:-9] - 1e-3).mean() >= 0.95
        np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, 1), rtol=1e-4, atol=1e-4)
    new = np.array([id_.startswith("new-") for id_ in release.bundle.labels.ids.to_pylist()])
    assert new[rows].any(), "labels that came are found"


def test_labels_that_are_what_they_were_stay_in_their_lists_and_the_head(bundle: Bundle, tmp_path: Path) -> None:
    build(bundle, tmp_path / "r", spec="ivf_flat", name="first")
    after = changed(bundle, tmp_path)
    update(after, tmp_path / "r", source="first", name="second")
    first, second = (Releases(tmp_path / "r").open(name) for name in ("first", "second"))

    (head, before), (head_now, now) = (
        ({release.bundle.labels.ids[row].as_py() for row in release.searcher.index.head.rows_H}, cells(release))
        for release in (first, second)
    )
    there = set(after.labels.ids.to_pylist())
    assert head_now == head & there
    rows = dict(zip(after.labels.ids.to_pylist(), after.embeddings.tolist(), strict=True))
    old = dict(zip(bundle.labels.ids.to_pylist(), bundle.embeddings.tolist(), strict=True))
    same = [id_ for id_ in now if rows[id_] == old.get(id_)]
    assert len(same) > 500
    assert [now[id_] for id_ in same] == [before[id_] for id_ in same]
    assert set(now) - set(before) == {f"new-{row}" for row in range(30)}
    centroids = [release.searcher.index.index.quantizer.reconstruct_n() for release in (first, second)]
    np.testing.assert_array_equal(*centroids)
    sought = sorted(set(now) - set(same))
    at = {id_: row for row, id_ in enumerate(after.labels.ids.to_pylist())}
    nearest = (after.rows()[[at[id_] for id_ in sought]] @ centroids[0].T).argmax(axis=1)
    assert [now[id_] for id_ in sought] == nearest.tolist()
    assert any(not id_.startswith("new-") for id_ in sought), "one that was there and moved"


def test_the_release_says_whose_cells_it_has_and_how_many_labels_are_newer(bundle: Bundle, tmp_path: Path) -> None:
    build(bundle, tmp_path / "r", spec="ivf_flat", name="first")
    after = changed(bundle, tmp_path)
    update(after, tmp_path / "r", source="first", name="second")
    update(bundle, tmp_path / "r", source="second", name="third")
    partitions = [Releases(tmp_path / "r").open(name).manifest.partition for name in ("first", "second", "third")]

    assert partitions[0] is None
    second, third = partitions[1:]
    assert second is not None
    assert third is not None
    assert (second.trained_by, second.newer) == ("first", 30 + 15)
    assert (third.trained_by, third.newer) == ("first", 45 + 20 + 15), "20 are back, 15 are what they were before"
    sizes = np.bincount(list(cells(Releases(tmp_path / "r").open("second")).values()), minlength=1)
    assert second.imbalance == pytest.approx(len(sizes) * (sizes**2).sum() / sizes.sum() ** 2, abs=1e-3)
    assert third.imbalance_trained == second.imbalance_trained


def test_by_commands_what_was_merged_is_published_with_the_priors_that_it_came_with(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"label_id": bundle.labels.ids, "recent": np.arange(L, dtype=np.float32)}), table)
    limits = PriorTable(table, {"recent": Limits(0, 1)}, missing=-7.0)
    build(bundle, tmp_path / "r", spec="ivf_flat", name="first", priors=limits)
    Releases(tmp_path / "r").publish("first")
    with closing(LabelStore(tmp_path)) as store:
        store.append(
            [
                Upsert(id="new-1", at=AT, features={"genres": ["g1"]}, display={}, priors={"recent": 99.0}),
                Upsert(id="new-2", at=AT, features={"genres": ["g2"]}, display={}),
                Upsert(id="item-5", at=AT, features={"genres": ["g3"]}, display={}),
                Hide(id="item-7", at=AT),
            ]
        )
    assert run("merge", tmp_path / "r/first/bundle", tmp_path, "--out", tmp_path / "merged") == 0
    capsys.readouterr()

    words = "update", tmp_path / "merged", "--releases", tmp_path / "r", "--name", "second"
    assert run(*words, "--log", tmp_path, "--publish") == 0

    out = capsys.readouterr().out
    assert "second: ivf_flat over 701 labels\nlists of first: 2 labels added, 1 embedded anew, 1 removed\n" in out
    assert "lists trained by first: 3 labels came or were embedded anew since, imbalance 1." in out
    assert "published: second" in out
    release = Releases(tmp_path / "r").open("second")
    assert release.bundle.priors is not None
    values = dict(
        zip(release.bundle.labels.ids.to_pylist(), release.bundle.priors.values_LP[:, 0].tolist(), strict=True)
    )
    assert (values["new-1"], values["new-2"], values["item-5"], values["item-9"]) == (99, -7, 5, 9)
    assert "item-7" not in values

    pq.write_table(pa.table({"label_id": ["new-2"], "recent": [1.0]}), table)
    assert run(*words[:-1], "third", "--priors", table, "--missing", "min") == 0
    assert Releases(tmp_path / "r").open("third").bundle.priors.values_LP[:, 0].tolist() == [1.0] * 701


def test_what_cannot_be_updated_is_refused_and_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    build(bundle, tmp_path / "r", spec="ivf_flat", name="first")
    shelf = Releases(tmp_path / "r")
    with pytest.raises(LongtailIndexError, match="expected a published release, or --from NAME, found nothing"):
        update(bundle, tmp_path / "r")
    other = make_bundle(labels=L, dim=4, popularity=True).write(tmp_path / "narrow")
    message = (
        r"update: expected embeddings of 8 dimensions and 3 more coordinates, for λ, μ and label biases, as first has "
        r"them, received 4 dimensions and 2 more coordinates: build a release of their own"
    )
    with pytest.raises(LongtailIndexError, match=message):
        update(other, tmp_path / "r", source="first")
    with pytest.raises(PriorsError, match="first: expected a release that was built with priors, found one without"):
        update(bundle, tmp_path / "r", source="first", priors=tmp_path / "t.parquet")
    strangers = replace(bundle.labels, ids=pa.array([f"other-{row}" for row in range(L)]))
    other = replace(bundle, labels=strangers, path=None).write(tmp_path / "strangers")
    update(other, tmp_path / "r", source="first", name="strangers")
    assert shelf.open("strangers").searcher.index.head is None
    build(bundle, tmp_path / "r", spec="flat", name="filtered", filterable=["title"])
    other = replace(bundle, labels=replace(bundle.labels, display=pa.table({"name": ["x"] * L})), path=None)
    with pytest.raises(BundleError, match="title"):
        update(other.write(tmp_path / "untitled"), tmp_path / "r", source="filtered")
    assert shelf.names() == ["filtered", "first", "strangers"]


def test_effort_grows_until_recall_is_enough(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(bundle, tmp_path / "r", spec="ivf_sq", name="first")
    least = Releases(tmp_path / "r").open("first").manifest.effort
    tried: list[Effort] = []
    trial_at = refill.trial_at

    def watched(*arguments: Any) -> Any:
        trial = trial_at(*arguments)
        tried.append(trial.effort)
        low = [at.model_copy(update={"recall": at.recall if len(tried) > 1 else 0.5}) for at in trial.recall]
        return trial.model_copy(update={"recall": low})

    harder = Effort(probes=least.probes, refine=least.refine + 1)
    monkeypatch.setattr(refill, "trial_at", watched)
    monkeypatch.setattr(refill, "efforts_of", lambda _: [least, harder])
    update(changed(bundle, tmp_path), tmp_path / "r", source="first", name="second")
    assert tried == [least, harder]
    assert harder == Releases(tmp_path / "r").open("second").manifest.effort
