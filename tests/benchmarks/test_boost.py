"""Compare the patterns of `benchmarks.boost` with values by hand, and with the stores whose Python packages are there.

Qdrant's local mode and Milvus Lite are no part of `dev`: `pip install qdrant-client milvus-lite` first.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.boost import Goal, K, add, depth_for, fuse, min_max, scale, unite

TASTE_1L = np.array([[4.0, 3.0, 2.0, 0.0, -np.inf]], np.float32)
NEWER = Goal("newer", np.array([0.0, 2.0, 1.0, 9.0, 9.0], np.float32), {})
LABELS, QUERIES, DEPTH = 400, 30, 60


def test_fetched_labels_are_scored_again() -> None:
    (rows_1K,) = add(TASTE_1L, NEWER, depth=3)
    assert rows_1K[0, :4].tolist() == [1, 0, 2, -1]  # 5, 4, 3; label 3 would have 9


def test_min_max_scales_what_was_fetched() -> None:
    taste_1N, boost_1N, same_11 = scale(TASTE_1L, NEWER, np.array([[0, 2, 1]]))
    assert taste_1N.tolist() == [[1, 0, 0.5]]
    assert boost_1N.tolist() == [[0, 0.5, 1]]
    assert same_11.tolist() == [[0.5]]  # both ranges are 2
    assert {rows_1K[0, 0] for rows_1K in min_max(TASTE_1L, NEWER, depth=3)} == {1}


def test_a_missing_score_is_0() -> None:
    first, second = (next(unite(TASTE_1L, NEWER, depth=1, complete=complete)) for complete in (False, True))
    assert first[0, :3].tolist() == second[0, :3].tolist() == [3, 0, -1]
    by_query = Goal("second", np.array([[0, 2, 1, 3, 9]], np.float32), {})
    (rows_1K,) = unite(TASTE_1L, by_query, depth=1, complete=False)
    assert rows_1K[0, :2].tolist() == [0, 3]


def test_reciprocal_ranks_know_no_sizes() -> None:
    *_, last_1K = fuse(TASTE_1L, NEWER, depth=2)
    assert last_1K[0, :3].tolist() == [1, 3, 0]  # 1/62 + 3/62, 3/61, 1/61


def test_depth_is_where_the_exact_lists_are_fetched() -> None:
    taste_1L = -np.arange(100, dtype=np.float32)[None]
    assert depth_for(taste_1L, np.arange(30, 30 + K)[None], 1.0) == 50


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Label vectors, query vectors and log popularity."""
    rng = np.random.default_rng(0)
    vectors_LD, queries_BD = (rng.standard_normal((size, 8)) for size in (LABELS, QUERIES))
    steps_L = np.minimum(rng.geometric(0.5, LABELS) - 1, 5)  # few of the highest
    return vectors_LD.astype(np.float32), queries_BD.astype(np.float32), steps_L.astype(np.float32)


def assert_same_scores(ids: list[int], wanted_K: np.ndarray, scores_L: np.ndarray) -> None:
    np.testing.assert_allclose(scores_L[ids], scores_L[wanted_K], rtol=1e-5)


def test_qdrant_adds_as_the_pattern_does(arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    qdrant = pytest.importorskip("qdrant_client", reason="expected qdrant-client, which `dev` does not install")
    models = qdrant.models
    vectors_LD, queries_BD, steps_L = arrays
    client = qdrant.QdrantClient(":memory:")
    client.create_collection("labels", vectors_config=models.VectorParams(size=8, distance=models.Distance.DOT))
    payload = [{"popularity": float(step)} for step in steps_L]
    client.upload_collection("labels", vectors=vectors_LD, payload=payload, ids=range(LABELS))
    taste_BL, goal = queries_BD @ vectors_LD.T, Goal("λ = 1", steps_L, {})
    (wanted_BK,) = add(taste_BL, goal, depth=DEPTH)
    for query_D, taste_L, wanted_K in zip(queries_BD, taste_BL, wanted_BK, strict=True):
        points = client.query_points(
            "labels",
            prefetch=models.Prefetch(query=query_D.tolist(), limit=DEPTH),
            query=models.FormulaQuery(formula=models.SumExpression(sum=["$score", "popularity"])),
            limit=K,
        ).points
        assert_same_scores([point.id for point in points], wanted_K, taste_L + goal.boost)
    by_query = Goal("of a second vector", -taste_BL[::-1], {})
    (wanted_BK,) = unite(taste_BL, by_query, depth=DEPTH, complete=False)
    for query_D, second_D, wanted_K in zip(queries_BD, -queries_BD[::-1], wanted_BK, strict=True):
        points = client.query_points(
            "labels",
            prefetch=[models.Prefetch(query=vector_D.tolist(), limit=DEPTH) for vector_D in (query_D, second_D)],
            query=models.FormulaQuery(formula=models.SumExpression(sum=["$score[0]", "$score[1]"])),
            limit=K,
        ).points
        assert [point.id for point in points] == wanted_K.tolist()


def test_milvus_lite_boosts_ten_times_the_limit(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    pytest.importorskip("milvus_lite", reason="expected milvus-lite, which `dev` does not install")
    pymilvus = pytest.importorskip("pymilvus")
    vectors_LD, queries_BD, steps_L = arrays
    client = pymilvus.MilvusClient(str(tmp_path / "milvus.db"))
    schema, params = client.create_schema(), client.prepare_index_params()
    schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
    schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=8)
    schema.add_field("step", pymilvus.DataType.INT64)  # 3.2.2 does not boost by a field that only rows have
    params.add_index("vector", index_type="FLAT", metric_type="IP")
    client.create_collection("labels", schema=schema, index_params=params)
    rows = [{"id": i, "vector": vectors_LD[i].tolist(), "step": int(steps_L[i])} for i in range(LABELS)]
    client.insert("labels", rows)
    boosts = [
        pymilvus.Function(
            name=f"step{step}", input_field_names=[], function_type=pymilvus.FunctionType.RERANK,
            params={"reranker": "boost", "filter": f"step >= {step}", "weight": 4.0},
        )
        for step in range(1, 6)
    ]  # fmt: skip
    ranker = pymilvus.FunctionScore(functions=boosts, params={"boost_mode": "sum", "function_mode": "sum"})
    taste_BL, goal = queries_BD @ vectors_LD.T, Goal("λ = 4", 4 * steps_L, {})
    (wanted_BK,) = add(taste_BL, goal, depth=10 * K)
    for query_D, taste_L, wanted_K in zip(queries_BD, taste_BL, wanted_BK, strict=True):
        (hits,) = client.search("labels", [query_D.tolist()], limit=K, ranker=ranker)
        assert_same_scores([hit["id"] for hit in hits], wanted_K, taste_L + goal.boost)
