"""Vectors of queries and labels, handed out and taken in place of features, against the formula and the towers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pytest
from pydantic import JsonValue
from starlette.applications import Starlette

from longtail.bundle import TrainingFacts, Upsert, bundle_from_vectors
from longtail.serving import Retriever
from longtail.serving.core.queries import QueryFeatures, RetrieveQuery, SimilarQuery, ToEmbed
from longtail.serving.errors import InvalidRequestError, UnknownLabelError
from longtail.serving.http.schemas.retrieval import EmbedAnswer
from tests.bundles import make_bundle
from tests.serving.core.test_overlay import AT
from tests.serving.core.test_tree_ranking import FEATURES
from tests.serving.plane import make_retriever, read_results

UNIT = {"user_id": "u3", "history": ["item-1", "item-2"]}


def vectors(retriever: Retriever, queries: Sequence[JsonValue] = (), labels: Sequence[str] = ()) -> np.ndarray:
    return np.float32(retriever.embed([*map(QueryFeatures.model_validate, queries), *labels]))


def read_scores(result: dict[str, Any]) -> dict[str, float]:
    return {label["id"]: label["score"] for label in result["labels"]}


def retrieve(client: httpx.Client, *queries: dict[str, Any]) -> list[Any]:
    response = client.post("/v1/retrieve", json={"queries": queries, "answer_ids": False})
    assert response.status_code == 200, response.text
    results: list[Any] = response.json()["results"]
    return results


def test_a_vector_is_answered_by_the_same_formula(client: httpx.Client) -> None:
    options = [{"k": 4, "bias_removal": 0.25}, {"k": 3, "exclude": ["a"], "popularity": 0.5}, {"buckets": ["tail"]}]
    for option in options:
        by_features, by_vector, again = retrieve(
            client,
            {"features": {"user": "east"}, **option},
            {"vector": [1, 0], **option},
            {"vector": [1.0, 0], **option},
        )
        assert by_features == by_vector == again
        (alone,) = retrieve(client, {"vector": [1, 0], **option})
        assert read_scores(alone) == pytest.approx(read_scores(by_features), abs=1e-6)
    (half,) = retrieve(client, {"vector": [0.5, 0.25], "k": 4, "bias_removal": 0})
    assert read_scores(half) == pytest.approx({"c/é": 2 * (0.375 + 0.225), "a": 1, "b": 0.5, "4": -1.25}, abs=1e-6)
    # Nothing makes it a unit vector, nor finite scores of what is large.
    (large,) = retrieve(client, {"vector": [6e11, -8e11], "k": 1})
    assert large["labels"][0]["score"] == pytest.approx(1.2e12)
    (zero,) = retrieve(client, {"vector": [0, 0], "k": 1, "bias_removal": -1})
    assert zero["labels"][0]["score"] == pytest.approx(np.log(8))


def retrieve_both_ways(
    retriever: Retriever, queries_BD: np.ndarray, k: int, bias_removal: float
) -> list[list[dict[str, Any]]]:
    """The results of queries that give their vectors as `vector`, and of the same that give them as a feature."""
    inputs = [[{"vector": vector}, {"features": {"vector": vector}}] for vector in queries_BD.tolist()]
    return [
        read_results(retriever.retrieve([RetrieveQuery(k=k, bias_removal=bias_removal, **way) for way in ways]))
        for ways in zip(*inputs, strict=True)
    ]


def test_a_vector_of_any_length_is_scaled_under_cosine() -> None:
    """Scores of 80 queries at each λ are those that NumPy computes from vectors of length 1."""
    rng = np.random.default_rng(0)
    vectors_LD, queries_BD = rng.normal(size=(60, 8)).astype(np.float32), rng.normal(size=(80, 8)) * 7
    counts_L = np.arange(60)[::-1] ** 2
    retriever = make_retriever(
        bundle_from_vectors(
            vectors_LD, TrainingFacts(pa.array([f"i{row}" for row in range(60)]), counts_L, "cosine"), name="c"
        )
    )
    cosines_BL = (queries_BD / np.linalg.norm(queries_BD, axis=1, keepdims=True)) @ (
        vectors_LD / np.linalg.norm(vectors_LD, axis=1, keepdims=True)
    ).T
    for bias_removal in (0, 0.5, 1):
        expected_BL = cosines_BL + bias_removal * np.log((counts_L + 0.5) / (counts_L + 0.5).sum())
        for results in retrieve_both_ways(retriever, queries_BD, 60, bias_removal):
            for result, expected_L in zip(results, expected_BL, strict=True):
                scores = read_scores(result)
                np.testing.assert_allclose([scores[f"i{row}"] for row in range(60)], expected_L, atol=3e-6)


@pytest.mark.parametrize("offset", [0, 100, 1000])
def test_distances_far_from_the_origin_equal_float64(offset: float) -> None:
    rng = np.random.default_rng(0)
    vectors_LD = (rng.normal(size=(500, 8)) + offset).astype(np.float32)
    queries_BD = (rng.normal(size=(40, 8)) + offset).astype(np.float32)
    counts_L = np.arange(500)[::-1]
    facts = TrainingFacts(pa.array([f"i{row}" for row in range(500)]), counts_L, "l2", temperature=2.0)
    bundle = bundle_from_vectors(vectors_LD, facts, name="l2")
    bundle.validate()
    assert (bundle.manifest.centre is not None) == (offset > 0)
    retriever = make_retriever(bundle)
    exact_BL = -np.square(queries_BD[:, None].astype(np.float64) - vectors_LD).sum(axis=2) / 2
    for bias_removal in (0, 1):
        exact_BL = exact_BL + bias_removal * np.log((counts_L + 0.5) / (counts_L + 0.5).sum())
        for results in retrieve_both_ways(retriever, queries_BD, 500, bias_removal):
            for result, exact_L in zip(results, exact_BL, strict=True):
                scores = read_scores(result)
                served_L = np.array([scores[f"i{row}"] for row in range(500)])
                # One number for each query is not served.
                np.testing.assert_allclose(served_L - served_L[0], exact_L - exact_L[0], atol=5e-5)
                assert [*scores][:20] == [f"i{row}" for row in np.argsort(-exact_L)[:20]]
    np.testing.assert_array_equal(vectors(retriever, labels=["i7"])[0], vectors_LD[7])
    np.testing.assert_array_equal(
        vectors(retriever, queries=[{"features": {"vector": queries_BD[0].tolist()}}])[0], queries_BD[0]
    )
    (similar,) = read_results(retriever.similar([SimilarQuery(id="i7", k=20)]))
    nearest = np.argsort(np.square(vectors_LD.astype(np.float64) - vectors_LD[7]).sum(axis=1))
    assert [label["id"] for label in similar["labels"]] == [f"i{row}" for row in nearest[1:21]]


@pytest.mark.parametrize("cosine", [True, False])
def test_what_embed_gives_is_answered_as_its_features_are(cosine: bool) -> None:
    retriever = make_retriever(make_bundle(labels=90, cosine=cosine, bias=True))
    vectors_BD = retriever.embed([QueryFeatures(features=features) for features in FEATURES])
    for explore in ({}, {"tail": 2}):
        options = {"k": 9, "explore": explore}
        by_features = read_results(retriever.retrieve([RetrieveQuery(features=item, **options) for item in FEATURES]))
        by_vector = read_results(
            retriever.retrieve([RetrieveQuery(vector=item.tolist(), **options) for item in vectors_BD])
        )
        if explore:
            by_features, by_vector = (
                [result["exploration"] for result in of_one] for of_one in (by_features, by_vector)
            )
        for result in (*by_features, *by_vector):
            result.pop("unknown", None)  # a vector names no ids
        assert by_features == by_vector
    if cosine:
        np.testing.assert_allclose(np.linalg.norm(vectors_BD, axis=1), 1, rtol=1e-6)


def test_labels_have_the_vectors_they_are_answered_by() -> None:
    bundle = make_bundle(labels=60, label_tower=True)
    np.testing.assert_array_equal(
        vectors(make_retriever(bundle), labels=["item-7", "item-3"]), bundle.embeddings[[7, 3]]
    )
    records = [Upsert(id=id_, at=AT, features={"genres": ["g1"], "year": 1.0}) for id_ in ("item-7", "new")]
    adding = make_retriever(bundle, "exact", *records)
    embedded = vectors(adding, labels=["new", "item-7", "item-3"])
    np.testing.assert_array_equal(embedded, [*adding.overlay.added.embeddings[[1, 0]], bundle.embeddings[3]])
    query = RetrieveQuery(features=UNIT, k=61, bias_removal=0)
    (result,) = read_results(adding.retrieve([query]))
    scores = read_scores(result)
    u = vectors(adding, queries=[{"features": UNIT}])[0]
    assert [scores[id_] for id_ in ("new", "item-7", "item-3")] == pytest.approx(list(embedded @ u / 0.1), abs=1e-5)


def test_a_tree_has_nothing_to_say_of_a_vector() -> None:
    retriever = make_retriever(make_bundle(labels=90, proposal=True))
    (u,) = vectors(retriever, queries=[{"features": UNIT}]).tolist()
    default = retriever.manifest.bias_removal.default
    for dial, received in (({}, f"{default}, this release's default"), ({"bias_removal": 0.25}, "0.25")):
        with pytest.raises(InvalidRequestError) as raised:
            retriever.retrieve([RetrieveQuery(features=UNIT), RetrieveQuery(vector=u, **dial)])
        assert raised.value.field == "queries.1.bias_removal"
        assert raised.value.message == (
            "expected bias_removal 0 with a vector: the tree p_n(y|x) of this release looks at a query's features, "
            f"which a vector has not; received {received}"
        )
    zero = {"bias_removal": 0, "popularity": 0.5}
    queries = [
        RetrieveQuery(features=UNIT, k=9),
        RetrieveQuery(vector=u, k=9, **zero),
        RetrieveQuery(features=UNIT, k=9, **zero),
    ]
    dialled, by_vector, by_features = read_results(retriever.retrieve(queries))
    assert by_vector == by_features
    for result, query in ((by_vector, queries[1]), (dialled, queries[0])):
        (alone,) = read_results(retriever.retrieve([query]))
        assert read_scores(result) == pytest.approx(read_scores(alone), abs=1e-5)


def test_embed_over_http(client: httpx.Client) -> None:
    requests: tuple[tuple[dict[str, Any], list[list[float]]], ...] = (
        ({"queries": [{"features": {"user": "north"}}, {"features": {}}]}, [[0, 1], [0, 0]]),
        ({"labels": ["c/é", 4, "a"], "release": "plane-1"}, [[0.75, 0.9], [-1, -0.5], [1, 0]]),
    )
    for body, expected in requests:
        response = client.post("/v1/embed", json=body)
        EmbedAnswer.model_validate_json(response.content, strict=True)
        answer = response.json()
        np.testing.assert_array_equal(np.float32(answer.pop("vectors")), np.float32(expected))
        assert answer.pop("request_id") == response.headers["x-request-id"]
        assert answer == {"dim": 2, "similarity": "dot", "temperature": 0.5, "release": "plane-1"}
    client.delete("/v1/labels/a")
    assert client.post("/v1/embed", json={"labels": ["a"]}).status_code == 404
    metrics = client.get("/metrics").text
    assert "longtail_queries_total 0.0" in metrics
    assert "longtail_batch_queries_sum 5.0" in metrics


@pytest.mark.usefixtures("client")
def test_requests_share_a_batch_and_a_bad_one_costs_only_itself(app: Starlette) -> None:
    service = app.state.service
    retriever, batches = service.retriever(), []
    embed = retriever.embed

    def counted(items: Sequence[Any]) -> list[np.ndarray]:
        batches.append(len(items))
        return embed(items)

    retriever.embed = counted
    requests = [
        ToEmbed(labels=["b"]),
        ToEmbed(labels=["a", "nobody"]),
        ToEmbed(queries=[{"features": {"user": "east"}}]),
        ToEmbed(queries=[{"features": {}}, {"features": {"age": "x"}}]),
    ]

    async def together() -> list[Any]:
        first, *rest = [
            asyncio.create_task(service.searches.embed(request, retriever)) for request in (requests[0], *requests)
        ]
        return await asyncio.gather(first, *rest, return_exceptions=True)

    _, b, unknown, east, unreadable = asyncio.run(together())
    assert (np.float32(b).tolist(), np.float32(east).tolist()) == ([[0, 1]], [[1, 0]])
    assert isinstance(unknown, UnknownLabelError)
    assert unknown.field == "labels.1"
    assert isinstance(unreadable, InvalidRequestError)
    assert unreadable.field == "queries.1.features.age"
    assert max(batches) > 1
