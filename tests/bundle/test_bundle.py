import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

from longtail.bundle import (
    Bundle,
    BundleCorruptError,
    BundleExistsError,
    BundleInvariantError,
    BundleVersionError,
    Labels,
)
from longtail.bundle.integrity import read_manifest
from longtail.bundle.mapped_table import write_table
from tests.bundles import make_bundle

FILES = [
    "calibration_queries.npy",
    "embeddings.npy",
    "label_tower.onnx",
    "labels.arrow",
    "metrics.json",
    "query_tower.onnx",
    "vocabularies/items.arrow",
    "vocabularies/users.arrow",
]


def replace_manifest(bundle: Bundle, **changes: Any) -> Bundle:
    return replace(bundle, manifest=bundle.manifest.model_copy(update=changes))


def replace_labels(bundle: Bundle, **changes: Any) -> Bundle:
    return replace(bundle, labels=replace(bundle.labels, **changes))


def replace_entry(array: np.ndarray, index: object, value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / "manifest.json").read_text())
    edit(content)
    (path / "manifest.json").write_text(json.dumps(content))
    (path / "manifest.sha256").write_text(sha256((path / "manifest.json").read_bytes()).hexdigest())


@pytest.mark.parametrize("cosine", [True, False], ids=["cosine", "dot"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("popularity", [True, False], ids=["popularity", "one coordinate"])
def test_write_and_load_round_trip(tmp_path: Path, cosine: bool, bias: bool, popularity: bool) -> None:
    built = make_bundle(labels=12, dim=4, users=5, cosine=cosine, bias=bias, popularity=popularity)

    built.write(tmp_path / "bundle")
    loaded = Bundle.load(str(tmp_path / "bundle"))

    assert loaded.path == tmp_path / "bundle"
    assert loaded.manifest.model_copy(update={"files": {}}) == built.manifest
    np.testing.assert_array_equal(loaded.embeddings, built.embeddings)
    np.testing.assert_array_equal(loaded.calibration_queries, built.calibration_queries)
    assert isinstance(loaded.embeddings, np.memmap)
    assert loaded.query_tower == built.query_tower
    assert loaded.label_tower is None
    assert loaded.labels.ids.to_pylist() == built.labels.ids.to_pylist()
    assert loaded.labels.display.equals(built.labels.display)
    for column in ("counts", "log_pn", "buckets", "bias", "log_popularity"):
        np.testing.assert_array_equal(getattr(loaded.labels, column), getattr(built.labels, column))
    assert {name: vocabulary.ids.to_pylist() for name, vocabulary in loaded.vocabularies.items()} == {
        "users": ["u0", "u1", "u2", "u3", "u4"],
        "items": [f"item-{row}" for row in range(12)],
    }


def test_manifest_lists_every_file_with_size(written: Path) -> None:
    records = read_manifest(written).files

    assert sorted(records) == FILES
    assert {name: record.bytes for name, record in records.items()} == {
        name: (written / name).stat().st_size for name in FILES
    }
    assert Bundle.load(written).label_tower == b"a label tower"


def test_rows_of_the_index_are_the_served_scores(written: Path) -> None:
    bundle = Bundle.load(written)
    query = bundle.augmentation.queries(bundle.calibration_queries[:1], 0.5)[0]

    scores = bundle.embeddings @ bundle.calibration_queries[0] / 0.1 + bundle.labels.bias + 0.5 * bundle.labels.log_pn
    np.testing.assert_allclose(bundle.rows() @ query, 0.1 * scores, atol=1e-5)


def test_moved_bundle_loads_and_existing_bundle_is_not_overwritten(written: Path, tmp_path: Path) -> None:
    moved = written.rename(tmp_path / "moved")

    assert Bundle.load(moved).manifest.name == "synthetic"
    with pytest.raises(BundleExistsError):
        make_bundle(labels=5).write(moved)
    assert len(Bundle.load(moved).labels.ids) == 12


INVARIANTS: dict[str, tuple[Callable[[Bundle], Bundle], str]] = {
    "embeddings of another shape": (
        lambda b: replace(b, embeddings=b.embeddings[:-1]),
        r"embeddings.npy is float32 \[labels, dim\]: expected float32 \(12, 4\), found float32 \(11, 4\)",
    ),
    "embeddings of another type": (
        lambda b: replace(b, embeddings=b.embeddings.astype(np.float64)),
        r"embeddings.npy .*: expected float32 \(12, 4\), found float64 \(12, 4\)",
    ),
    "embeddings with NaN": (
        lambda b: replace(b, embeddings=replace_entry(b.embeddings, (3, 1), np.nan)),
        r"embeddings.npy is finite: expected finite values, found \[.*nan.*\] in row 3",
    ),
    "embeddings off the unit sphere": (
        lambda b: replace(b, embeddings=replace_entry(b.embeddings, 7, 0.6)),
        r"embeddings.npy has unit rows when similarity is cosine: expected norm 1 ± 0.001, found norm 1.2 in row 7",
    ),
    "calibration queries of another width": (
        lambda b: replace(b, calibration_queries=b.calibration_queries[:, :3]),
        r"calibration_queries.npy is float32 \[C, dim\]: expected float32 \(C, 4\), found float32 \(50, 3\)",
    ),
    "no calibration query": (
        lambda b: replace(b, calibration_queries=b.calibration_queries[:0]),
        "calibration_queries.npy has a row: expected 1 or more, found 0",
    ),
    "calibration queries with infinity": (
        lambda b: replace(b, calibration_queries=replace_entry(b.calibration_queries, (2, 0), np.inf)),
        r"calibration_queries.npy is finite: expected finite values, found \[.*inf.*\] in row 2",
    ),
    "calibration queries off the unit sphere": (
        lambda b: replace(b, calibration_queries=replace_entry(b.calibration_queries, 4, 0.25)),
        r"calibration_queries.npy has unit rows .*: expected norm 1 ± 0.001, found norm 0.5 in row 4",
    ),
    "seen labels of another type": (
        lambda b: replace(b, calibration_seen=np.array([[0, 1]])),
        r"calibration_seen.npy is int32 \[N, pair\]: expected int32 \(N, 2\), found int64 \(1, 2\)",
    ),
    "seen labels that do not exist": (
        lambda b: replace(b, calibration_seen=np.array([[0, 1], [49, 12]], np.int32)),
        "calibration_seen.npy names calibration queries and labels: expected rows that exist, found 1 others",
    ),
    "seen labels twice": (
        lambda b: replace(b, calibration_seen=np.array([[0, 1], [0, 1]], np.int32)),
        "calibration_seen.npy is ascending: expected distinct pairs, ascending, found others",
    ),
    "histories of too few queries": (
        lambda b: replace(b, calibration_histories=np.zeros((3, 2), np.int32)),
        r"calibration_histories.npy is int32 \[queries, R\]: expected int32 \(50, R\), found int32 \(3, 2\)",
    ),
    "histories of labels that do not exist": (
        lambda b: replace(b, calibration_histories=np.full((50, 2), 12, np.int32)),
        "calibration_histories.npy holds label rows, or -1: expected -1..11, found others",
    ),
    "too few labels": (
        lambda b: replace_labels(b, ids=b.labels.ids[:-1]),
        "labels.arrow has a row per label: expected 12 rows, found 11 rows",
    ),
    "a label twice": (
        lambda b: replace_labels(b, ids=pa.array(["item-1", *b.labels.ids.to_pylist()[1:]])),
        "labels.arrow holds distinct ids: expected 12 distinct, found 11 distinct",
    ),
    "a negative count": (
        lambda b: replace_labels(b, counts=replace_entry(b.labels.counts, 5, -4)),
        "counts are >= 0: expected >= 0, found -4",
    ),
    "log_pn without a number": (
        lambda b: replace_labels(b, log_pn=replace_entry(b.labels.log_pn, 6, -np.inf)),
        "labels.arrow column log_pn is finite: expected finite values, found -inf in row 6",
    ),
    "log_pn in bits": (
        lambda b: replace_labels(b, log_pn=np.full(12, -np.log2(12), np.float32)),
        r"log_pn is a distribution \(natural log\): expected logsumexp 0 ± 0.0001, found -1.1",
    ),
    "a label in another bucket": (
        lambda b: replace_labels(b, buckets=(b.labels.buckets + (np.arange(12) == 2)) % 3),
        r"buckets follow the manifest's thresholds: expected .*, found 1 rows that differ, the first \[2\]",
    ),
    "no bias though there should be": (
        lambda b: replace_labels(b, bias=None),
        "labels.arrow has a bias column when label_bias is set: expected True, found False",
    ),
    "bias with NaN": (
        lambda b: replace_labels(b, bias=replace_entry(b.labels.bias, 1, np.nan)),
        "labels.arrow column bias is finite: expected finite values, found nan in row 1",
    ),
    "a vocabulary missing": (
        lambda b: replace(b, vocabularies={"users": b.vocabularies["users"]}),
        r"every feature's vocabulary is in vocabularies/: expected \['items', 'users'\], found \['users'\]",
    ),
    "a popularity without its coordinate": (
        lambda b: replace_labels(b, log_popularity=b.labels.log_pn),
        "labels.arrow has a log_popularity column when kappa_popularity is set: expected False, found True",
    ),
    "a coordinate without popularity": (
        lambda b: replace_manifest(b, kappa_popularity=1.0),
        "labels.arrow has a log_popularity column when kappa_popularity is set: expected True, found False",
    ),
    "a popularity that is no distribution": (
        lambda b: replace_labels(replace_manifest(b, kappa_popularity=1.0), log_popularity=b.labels.log_pn - 1),
        r"log_popularity is a distribution \(natural log\): expected logsumexp 0 ± 0.0001, found -1",
    ),
    "display columns of another name": (
        lambda b: replace_manifest(b, display=["name"]),
        r"display names the user's columns of labels.arrow: expected \['name'\], found \['title'\]",
    ),
}


@pytest.mark.parametrize(("break_it", "message"), INVARIANTS.values(), ids=INVARIANTS)
def test_invalid_bundle_is_not_written(break_it: Callable[[Bundle], Bundle], message: str, tmp_path: Path) -> None:
    broken = break_it(make_bundle(labels=12, dim=4, users=5, bias=True))

    with pytest.raises(BundleInvariantError, match=f"^bundle invariant broken: {message}"):
        broken.write(tmp_path / "bundle")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("source", ["first", "middle", "last"])
def test_flipped_bit_is_refused(written: Path, name: str, source: str) -> None:
    content = bytearray((written / name).read_bytes())
    content[{"first": 0, "middle": len(content) // 2, "last": -1}[source]] ^= 1
    (written / name).write_bytes(content)

    with pytest.raises(BundleCorruptError, match=f"{name}: expected sha256 [0-9a-f]{{64}}, found [0-9a-f]{{64}}"):
        Bundle.load(written)


@pytest.mark.parametrize("name", ["labels.arrow", "embeddings.npy", "calibration_queries.npy", "query_tower.onnx"])
def test_manifest_without_a_required_file_is_refused(written: Path, name: str) -> None:
    edit_manifest(written, lambda content: content["files"].pop(name))

    with pytest.raises(BundleCorruptError, match=f"expected '{name}' among its files, found"):
        Bundle.load(written)


@pytest.mark.parametrize("name", ["../outside", "vocabularies/../../outside", "/etc/hostname"])
def test_files_outside_the_directory_are_refused(written: Path, name: str) -> None:
    (written.parent / "outside").write_bytes(b"secret")
    record = {"sha256": "0" * 64, "bytes": 6}
    edit_manifest(written, lambda content: content["files"].update({name: record}))

    with pytest.raises(BundleCorruptError, match=f"expected file names below the directory, found '{name}'"):
        Bundle.load(written)


def test_unknown_schema_version_is_refused(written: Path) -> None:
    edit_manifest(written, lambda content: content.update(schema_version=5, something_old=True))

    with pytest.raises(
        BundleVersionError,
        match=r"expected schema version 1, found 5: made by another version of Longtail; export the model again",
    ):
        Bundle.load(written)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe\x00"], ids=["empty", "cut", "list", "{}", "null", "binary"]
)
def test_a_garbled_manifest_is_refused(written: Path, content: bytes) -> None:
    (written / "manifest.json").write_bytes(content)

    with pytest.raises(BundleCorruptError, match=r"manifest.json: expected JSON with a schema_version, found b'"):
        Bundle.load(written)


@pytest.mark.parametrize("make", [lambda _: None, Path.touch, Path.mkdir], ids=["nothing", "file", "empty"])
def test_load_refuses_other_directories(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "thing")

    with pytest.raises(BundleCorruptError, match=r"thing: expected a bundle \(a directory with manifest.json\)"):
        Bundle.load(tmp_path / "thing")


LABEL_TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "no column": (lambda t: t.drop_columns(["count"]), "'count': expected int64, found no such column"),
    "another type": (
        lambda t: t.set_column(2, "log_pn", t["log_pn"].cast(pa.float64())),
        "'log_pn': expected float, found double",
    ),
    "a null": (
        lambda t: t.set_column(0, "label_id", pa.array([None, *t["label_id"].to_pylist()[1:]], pa.string())),
        "'label_id': expected no nulls, found 1 nulls",
    ),
}


@pytest.mark.parametrize(("edit", "message"), LABEL_TABLES.values(), ids=LABEL_TABLES)
def test_a_label_table_of_another_form_is_refused(
    tmp_path: Path, edit: Callable[[pa.Table], pa.Table], message: str
) -> None:
    path = tmp_path / "labels.arrow"
    make_bundle(labels=5, bias=True).labels.write(path)
    write_table(path, edit(feather.read_table(path)))

    with pytest.raises(BundleInvariantError, match=message):
        Labels.read(path)


@pytest.mark.parametrize("name", ["label_id", "count", "log_pn", "bucket", "bias", "log_popularity"])
def test_display_columns_cannot_take_a_reserved_name(tmp_path: Path, name: str) -> None:
    labels = replace(make_bundle(labels=2).labels, display=pa.table({name: ["a", "b"]}))

    with pytest.raises(ValueError, match=f"display column '{name}': expected a name other than"):
        labels.write(tmp_path / "labels.arrow")


def test_every_byte_of_the_manifest_counts(written: Path) -> None:
    content = (written / "manifest.json").read_bytes()
    assert b'"temperature": 0.1,' in content
    (written / "manifest.json").write_bytes(content.replace(b'"temperature": 0.1,', b'"temperature": 0.9,'))
    with pytest.raises(BundleCorruptError, match=r"manifest.json: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        Bundle.load(written)

    (written / "manifest.sha256").unlink()
    with pytest.raises(BundleCorruptError, match=r"manifest.sha256: expected the manifest's sha256, found no file"):
        Bundle.load(written)


NOT_SHOWN = {
    "times in lists": pa.array([[datetime(2026, 1, 1)]] * 11 + [None], pa.list_(pa.timestamp("us"))),
    "dates in structs": pa.array([{"since": date(2026, 1, 1)}] * 12, pa.struct({"since": pa.date32()})),
    "maps": pa.array([[("a", 1)]] * 12, pa.map_(pa.string(), pa.int64())),
    "bytes, in the last row": pa.array([b"text"] * 11 + [b"\xff"], pa.binary()),
    "text that is damaged": pa.array([b"text"] * 11 + [b"\xff"], pa.binary()).view(pa.string()),
    "lists of damaged text": pa.ListArray.from_arrays(
        pa.array(range(13), pa.int32()), pa.array([b"text"] * 11 + [b"\xff"], pa.binary()).view(pa.string())
    ),
}


@pytest.mark.parametrize("column", NOT_SHOWN.values(), ids=NOT_SHOWN)
def test_undisplayable_columns_are_not_written(column: pa.Array, tmp_path: Path) -> None:
    built = replace_manifest(make_bundle(labels=12), display=["odd"])
    broken = replace(built, labels=replace(built.labels, display=pa.table({"odd": column})))

    with pytest.raises(BundleInvariantError, match=r"column 'odd' can be displayed: expected text in UTF-8, numbers"):
        broken.write(tmp_path / "bundle")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"text"] * 12, pa.binary()),
        pa.array([Decimal("1.50")] * 12),
        pa.array([date(2026, 1, 1)] * 12).dictionary_encode(),
        pa.array([[{"a": [True, None]}]] * 12),
        pa.nulls(12),
    ],
)
def test_displayable_columns_are_written(column: pa.Array, tmp_path: Path) -> None:
    built = replace_manifest(make_bundle(labels=12), display=["shown"])
    replace(built, labels=replace(built.labels, display=pa.table({"shown": column}))).write(tmp_path / "bundle")
    Bundle.load(tmp_path / "bundle")
