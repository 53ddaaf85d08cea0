"""Vectors that another library trained, as a release with the dial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper

from longtail.bundle import (
    Bundle,
    BundleInvariantError,
    Feature,
    OnnxTower,
    Tower,
    TowerError,
    TrainingFacts,
    Vocabulary,
    bundle_from_vectors,
)
from longtail.index import open_releases
from longtail.index.building.build import build_from_vectors
from longtail.index.building.vectors import VectorFiles
from longtail.index.cli import app
from longtail.index.errors import VectorsError
from tests.bundles import make_bundle

LABELS, DIM = 300, 8
LAMBDAS = np.linspace(-0.5, 1.5, 11)


def draw_vectors(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(LABELS, DIM)).astype(np.float32)


def written(folder: Path, **columns: Any) -> Path:
    """Write a table of labels; a column of None is left out."""
    table = {
        "label_id": [f"i{row}" for row in range(LABELS)], "count": np.arange(LABELS)[::-1] ** 2,
        "vector": list(draw_vectors()), "title": [f"Item {row}" for row in range(LABELS)],
    } | columns  # fmt: skip
    pq.write_table(
        pa.table({name: value for name, value in table.items() if value is not None}), folder / "labels.parquet"
    )
    return folder / "labels.parquet"


def read(labels: Path, **options: Any) -> Bundle:
    return VectorFiles(labels, **options).read("given", lambda _: None)


def scores(bundle: Bundle, queries: np.ndarray, bias_removal: float) -> np.ndarray:
    """Scores in logits of all labels, by the rows that an index holds."""
    rows = bundle.augmentation.queries(queries.astype(np.float32), bias_removal) @ bundle.rows().T
    return rows / bundle.manifest.temperature


def test_a_bundle_of_its_vectors_answers_the_same(tmp_path: Path) -> None:
    before = make_bundle()
    labels, manifest = before.labels, before.manifest
    table = {"label_id": labels.ids, "count": labels.counts, "vector": list(before.embeddings)}
    columns = {name: labels.display[name] for name in labels.display.column_names}
    pq.write_table(pa.table(table | columns), tmp_path / "labels.parquet")
    np.save(tmp_path / "queries.npy", before.calibration_queries)

    after = read(
        tmp_path / "labels.parquet", queries=tmp_path / "queries.npy", similarity=manifest.similarity,
        temperature=manifest.temperature,
    )  # fmt: skip

    assert after.labels.display.equals(labels.display)
    np.testing.assert_array_equal(after.labels.buckets, labels.buckets)
    for bias_removal in LAMBDAS:
        bundle_scores, expected = (
            scores(scored_bundle, before.calibration_queries, bias_removal) for scored_bundle in (after, before)
        )
        np.testing.assert_allclose(bundle_scores, expected, atol=1e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine", "l2"])
def test_scores_equal_vectors_plus_log_pi(tmp_path: Path, similarity: str) -> None:
    bundle = read(written(tmp_path), similarity=similarity, temperature=0.5)
    bundle.write(tmp_path / "bundle")
    queries, vectors = draw_vectors(1)[:20], draw_vectors()
    counts = np.arange(LABELS)[::-1] ** 2 + 0.5
    if similarity == "cosine":
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    of_vectors = queries @ vectors.T
    if similarity == "l2":
        of_vectors = -((queries[:, None] - vectors) ** 2).sum(axis=2)
    for bias_removal in LAMBDAS:
        expected = of_vectors / 0.5 + bias_removal * np.log(counts / counts.sum())
        bundle_scores = scores(bundle, queries, bias_removal)
        np.testing.assert_allclose(bundle_scores - bundle_scores[:, :1], expected - expected[:, :1], atol=2e-4)


def test_noise_may_differ_from_popularity(tmp_path: Path) -> None:
    noise = np.linspace(1, 5, LABELS)
    bundle = read(written(tmp_path, noise=noise))

    np.testing.assert_allclose(bundle.labels.log_pn, np.log(noise / noise.sum()), atol=1e-6)
    assert bundle.labels.log_popularity is not None
    assert bundle.manifest.display == ["title"]
    bundle.write(tmp_path / "bundle")


def test_the_command_writes_a_release_that_answers_vectors(tmp_path: Path) -> None:
    query = f"SELECT * FROM '{written(tmp_path, vector=None)}'"
    np.save(tmp_path / "vectors.npy", draw_vectors().astype(np.float16))
    arguments = ["from-vectors", query, "--vectors", str(tmp_path / "vectors.npy"), "--name", "first"]
    app([*arguments, "--releases", str(tmp_path / "releases"), "--publish"], standalone_mode=False)

    release = open_releases(tmp_path / "releases").open("first")
    assert open_releases(tmp_path / "releases").current() == "first"
    assert {at.recall for at in release.manifest.recall} == {1.0}
    bundle = release.bundle
    tower = Tower(bundle.query_model, bundle.manifest.query_features, {}, DIM)
    vector = draw_vectors(2)[0]
    np.testing.assert_array_equal(tower.embed(tower.read([{"vector": vector.tolist()}]))[0], vector)


def tower(inputs: dict[str, list[Any]], kind: int = TensorProto.FLOAT) -> bytes:
    """An ONNX model that scales its first input, [B, 8], by its second, [B], where there is one."""
    names = [*inputs]
    nodes = [helper.make_node("Identity", names[:1], ["embedding"])]
    if len(names) > 1:
        nodes = [
            helper.make_node("Unsqueeze", [names[1], "first"], ["column"]),
            helper.make_node("Mul", [names[0], "column"], ["embedding"]),
        ]
    first = onnx.numpy_helper.from_array(np.array([1], np.int64), "first")
    graph = helper.make_graph(
        nodes, "tower", [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("embedding", kind, ["B", 8])], [first],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def test_a_vector_is_a_feature_without_a_tower(tmp_path: Path) -> None:
    bundle = read(written(tmp_path), similarity="cosine")
    served = Tower(bundle.query_model, bundle.manifest.query_features, {}, DIM)
    embeddings = served.embed(served.read([{"vector": [3.0, 4.0] + [0.0] * 6}, {}]))
    np.testing.assert_allclose(embeddings[:, :2], [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_towers_of_vectors_and_numbers_are_served(tmp_path: Path) -> None:
    (tmp_path / "tower.onnx").write_bytes(tower({"profile": ["N", 8], "scale": ["N"]}))
    bundle = read(written(tmp_path), query_tower=tmp_path / "tower.onnx", label_tower=tmp_path / "tower.onnx")

    assert [(feature.name, feature.kind) for feature in bundle.manifest.label_features] == [
        ("profile", "vector"),
        ("scale", "number"),
    ]
    served = Tower(bundle.query_model, bundle.manifest.query_features, {}, DIM)
    embeddings = served.embed(served.read([{"profile": [1.0] * 8, "scale": 3.0}, {"scale": 3.0}]))
    assert embeddings.tolist() == [[3.0] * 8, [0.0] * 8]


def test_towers_may_have_other_ids() -> None:
    rows = onnx.numpy_helper.from_array(np.eye(3, DIM, dtype=np.float32), "rows")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["rows", "user"], ["embedding"])], "tower",
        [helper.make_tensor_value_info("user", TensorProto.INT32, ["B"])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", DIM])], [rows],
    )  # fmt: skip
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    feature = Feature(name="user", kind="id", vocabulary="user")
    by_id = OnnxTower(content, [feature], {"user": Vocabulary(pa.array(["a", "b"]))}, own_id="user")
    facts = TrainingFacts(pa.array([f"i{row}" for row in range(LABELS)]), np.ones(LABELS, np.int64))

    bundle = bundle_from_vectors(draw_vectors(), facts, name="by id", query_tower=by_id, label_tower=by_id)
    bundle.validate()

    assert bundle.manifest.own_id == "user"
    served = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, DIM)
    embeddings = served.embed(served.read([{"user": "b"}, {"user": "?"}]))
    np.testing.assert_array_equal(embeddings, np.eye(3, DIM, dtype=np.float32)[[2, 0]])
    swapped = by_id._replace(vocabularies={"user": Vocabulary(pa.array(["b", "a"]))})
    both = bundle_from_vectors(draw_vectors(), facts, name="both", query_tower=by_id, label_tower=swapped)
    assert [both.vocabularies[name].ids.to_pylist() for name in ("user", "label_user")] == [["a", "b"], ["b", "a"]]
    assert both.manifest.label_features[0].vocabulary == "label_user"


REFUSED = {
    "fractions": (
        {"count": np.full(LABELS, 0.5)},
        {},
        "expected whole numbers from 0 on, such as pairs, found 0.5 in row 0",
    ),
    "words": ({"count": ["many"] * LABELS}, {}, "column 'count': expected a number in every row, found 300 without"),
    "no counts": ({"count": None}, {}, "expected a column 'count', found .*: SELECT … AS count FROM … names another"),
    "an id missing": ({"label_id": [None, *(f"i{row}" for row in range(1, LABELS))]}, {}, "found 1 nulls"),
    "lengths": ({"vector": [[1.0]] + [[1.0, 2.0]] * (LABELS - 1)}, {}, "expected lists of one length and no nulls"),
    "text in vectors": ({"vector": [["a"]] * LABELS}, {}, "column 'vector': expected lists of numbers"),
    "huge": ({"count": np.full(LABELS, 2**60)}, {}, "expected whole numbers from 0 on"),
    "a reserved name": ({"bucket": ["x"] * LABELS}, {}, r"columns \['bucket'\] are not allowed to be shown"),
    "no vectors": ({"vector": [1.0] * LABELS}, {}, "column 'vector': expected lists of numbers"),
}


@pytest.mark.parametrize(("columns", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_vectors_are_refused(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(VectorsError, match=message):
        read(written(tmp_path, **columns), **options)


def test_several_label_files_are_refused_with_a_vector_file(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for part in range(12):
        pq.write_table(pa.table({"label_id": [f"i{part}"], "count": [1]}), tmp_path / f"parts/part-{part}.parquet")
    np.save(tmp_path / "vectors.npy", draw_vectors()[:12])
    with pytest.raises(
        VectorsError, match=r"12 files are not allowed with vectors in .*, from .*part-0.parquet to .*-9"
    ):
        read(tmp_path / "parts", vectors=tmp_path / "vectors.npy")


def test_unfitting_rows_and_models_are_refused(tmp_path: Path) -> None:
    ids, vectors, counts = pa.array([f"i{row}" for row in range(LABELS)]), draw_vectors(), np.ones(LABELS, np.int64)
    infinite = vectors.copy()
    infinite[[7, 9], 3] = np.nan
    zero = np.where(np.arange(LABELS)[:, None] == 7, 0, vectors)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"vectors": vectors[:-1]}, "every label has an id, a vector and a count"),
        ({"vectors": zero, "similarity": "cosine"}, r"labels: a vector has a direction.* in row 7"),
        ({"noise": np.zeros(LABELS)}, "ν is above 0 and finite"),
        ({"query_tower": tower({"user": ["N", 8]}, TensorProto.INT64)}, "use its library's export"),
        ({"vectors": vectors[:, :4], "query_tower": tower({"profile": ["N", 8]})}, "computes one vector"),
        (
            {"vectors": infinite},
            r"labels: a vector is finite.* found nan at position 3 in row 7, id 'i7', and in 1 more$",
        ),
        ({"ids": pa.array(["i1", *ids.to_pylist()[1:]])}, r"ids are distinct: expected every id once, found 'i1' more"),
        (
            {"ids": pa.array(["", *ids.to_pylist()[1:]])},
            "ids are not empty: expected an id in every row, found an empty",
        ),
        ({"queries": infinite}, r"queries: a vector is finite.* found nan at position 3 in row 7, and in 1 more$"),
        ({"counts": counts + 0.5}, r"a count is a whole number from 0 to 2⁵³.*1\.5 in row 0"),
        ({"noise": np.ones(3)}, "rows of each, 1 or more, found .*'noise': 3"),
        ({"similarity": "euclid"}, "similarity is known"),
        ({"ids": pa.array(range(LABELS))}, "ids are strings"),
        ({"query_tower": tower({"profile": ["N", 8]}), "similarity": "cosine"}, "gives vectors of length 1"),
        ({"query_tower": tower({"user vec": ["N", 8]})}, "by names of letters, digits and _"),
    ]
    for changes, message in wrong:
        arguments = {"vectors": vectors, "ids": ids, "counts": counts} | changes
        of_bundle = {name: arguments.pop(name) for name in ("vectors", "queries", "query_tower") if name in arguments}
        with pytest.raises(BundleInvariantError, match=message):
            bundle_from_vectors(facts=TrainingFacts(**arguments), name="wrong", **of_bundle)
    facts = TrainingFacts(ids, counts)
    with pytest.raises(TowerError, match="batches of any size"):
        bundle_from_vectors(vectors, facts, name="one", query_tower=tower({"profile": [1, 8]}))
    np.save(tmp_path / "narrow.npy", vectors[:, :4])
    with pytest.raises(VectorsError, match="expected vectors of 8 numbers, the labels', found 4"):
        read(written(tmp_path), queries=tmp_path / "narrow.npy")
    with pytest.raises(VectorsError, match="expected vectors of 8 numbers"):
        build_from_vectors(VectorFiles(written(tmp_path), queries=tmp_path / "narrow.npy"), tmp_path / "releases")
    assert not [*(tmp_path / "releases").iterdir()]
