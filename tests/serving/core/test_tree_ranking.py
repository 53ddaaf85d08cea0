"""Bias removal with a tree p_n(y|x), against log p_n(y|x) walked label by label and scores of the whole catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longtail.bundle import BUCKET_NAMES, Bundle, Proposal, Tower
from longtail.index import Filter, IndexSpec, Searcher
from longtail.index.building.tuning import tune_index
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from longtail.serving.core.ranking import Batch
from longtail.serving.core.tree_ranking import TreeRanker
from longtail.serving.errors import InvalidRequestError
from tests.bundles import log_p_n, make_bundle
from tests.serving.plane import ExactSearcher, make_retriever, read_results

LABELS = 90
FEATURES: list[dict[str, Any]] = [
    {"user_id": "u3", "history": ["item-1", "item-2"]},
    {"user_id": "u4", "history": []},
    {"user_id": "never seen", "history": ["item-7", "nothing"]},
    {"user_id": "u5", "history": None},
]
SELECTIONS: list[dict[str, Any]] = [
    {},
    {"exclude": [f"item-{row}" for row in range(0, LABELS, 2)]},
    {"exclude": ["item-5", "nobody"], "buckets": ["head", "tail"]},
    {"buckets": ["torso"]},
    {"allow": [f"item-{row}" for row in range(20)]},
    {"allow": ["item-3"]},
    {"allow": []},
    {"allow": [f"item-{row}" for row in range(50)], "buckets": ["tail"], "exclude": ["item-8", "item-9"]},
]


class Blind:
    """An index that finds nothing: what is answered then, the tree found."""

    def __init__(self, bundle: Bundle) -> None:
        self.labels = bundle.manifest.labels

    def search(self, queries_BE: np.ndarray, k: int, filters: object = None) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG002
        return np.full((len(queries_BE), k), -np.inf, np.float32), np.full((len(queries_BE), k), -1)


def log_pi(bundle: Bundle) -> np.ndarray:
    """log π of every label from its count, float64 [L]."""
    counts = bundle.labels.counts + 0.5
    return np.log(counts / counts.sum())


def parts(bundle: Bundle, features: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """f and log p_n(y|x) of every label, float64 [L]."""
    manifest, tree = bundle.manifest, bundle.proposal
    assert tree is not None
    encoder = Tower(bundle.query_tower, manifest.query_features, bundle.vocabularies, manifest.dim)
    query_D = encoder.embed(encoder.read([features]))[0].astype(np.float64)
    user = bundle.vocabularies["users"].find_all([features.get("user_id") or ""])[0]
    z_K = tree.offset.astype(np.float64) + tree.projection["user_id"][user]
    for item in features["history"] or []:
        z_K += tree.projection["history"][bundle.vocabularies["items"].find_all([item])[0]]
    bias_L = 0 if bundle.labels.bias is None else bundle.labels.bias
    f_L = bundle.embeddings.astype(np.float64) @ query_D / manifest.temperature + bias_L
    return f_L, log_p_n(tree, z_K)


def eligible(bundle: Bundle, selection: dict[str, Any]) -> np.ndarray:
    ids = [f"item-{row}" for row in range(bundle.manifest.labels)]
    buckets = [BUCKET_NAMES[bucket] for bucket in bundle.labels.buckets]
    return np.array(
        [
            id_ not in selection.get("exclude", [])
            and id_ in selection.get("allow", ids)
            and bucket in selection.get("buckets", BUCKET_NAMES)
            for id_, bucket in zip(ids, buckets, strict=True)
        ]
    )


def check(result: dict[str, Any], scores_L: np.ndarray, eligible_L: np.ndarray, k: int) -> None:
    """The k best eligible labels and their scores; labels that rounding tells apart stand in order."""
    expected = np.sort(scores_L[eligible_L])[::-1][:k]
    rows = [int(label["id"].removeprefix("item-")) for label in result["labels"]]
    assert len(set(rows)) == len(rows) == len(expected)
    assert eligible_L[rows].all()
    np.testing.assert_allclose(scores_L[rows], expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose([label["score"] for label in result["labels"]], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["index and tree", "tree alone"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cosine", [True, False])
def test_every_dial_and_filter_of_a_small_catalogue_is_exact(cosine: bool, bias: bool, sources: str) -> None:
    bundle = make_bundle(labels=LABELS, cosine=cosine, bias=bias, proposal=True)
    retriever = make_retriever(bundle, Blind(bundle) if sources == "tree alone" else ExactSearcher(bundle))
    query = [
        (features, selection, bias_removal, popularity, k)
        for features in FEATURES
        for selection in SELECTIONS
        for bias_removal in (0.0, 0.5, 1.0, 2.0)
        for popularity in (-1.0, 0.0, 1.5)
        for k in (3, LABELS)
        if bias_removal or sources != "tree alone"
    ]
    queries = [
        RetrieveQuery(features=features, k=k, bias_removal=bias_removal, popularity=popularity, **selection)
        for features, selection, bias_removal, popularity, k in query
    ]
    results = read_results(retriever.retrieve(queries))
    of_query = {id(features): parts(bundle, features) for features in FEATURES}
    prior_L = log_pi(bundle)
    for (features, selection, bias_removal, popularity, k), result in zip(query, results, strict=True):
        f_L, log_p_L = of_query[id(features)]
        check(result, f_L + bias_removal * log_p_L + popularity * prior_L, eligible(bundle, selection), k)


def test_below_zero_is_refused_and_says_why() -> None:
    bundle = make_bundle(labels=LABELS, proposal=True)
    retriever = make_retriever(bundle)
    for dials in ({"bias_removal": -0.01}, {"bias_removal": -1.0, "popularity": 1.0}):
        with pytest.raises(
            InvalidRequestError, match=r"expected 0.0 <= bias_removal <= 2.0, received -.*all but rules"
        ):
            retriever.retrieve([RetrieveQuery(features=FEATURES[0]), RetrieveQuery(features=FEATURES[0], **dials)])
    # A label has no tree to be looked up in: its neighbours are ranked by log π, which the index holds.
    by_noise, by_prior = (
        read_results(retriever.similar([SimilarQuery(id="item-1", k=20, **{dial: -0.5})]))
        for dial in ("bias_removal", "popularity")
    )
    assert by_noise[0]["labels"] == by_prior[0]["labels"]


def test_at_zero_the_index_answers_alone_in_mixed_batches() -> None:
    bundle = make_bundle(labels=LABELS, proposal=True)
    with_tree, without = (
        make_retriever(bundle, Blind(bundle)),
        make_retriever(replace(bundle, proposal=None), Blind(bundle)),
    )
    zero, first = (RetrieveQuery(features=FEATURES[0], k=5, bias_removal=value) for value in (0.0, 1.0))
    assert [len(result["labels"]) for result in read_results(with_tree.retrieve([zero, first, zero]))] == [0, 5, 0]
    exact, alone = (make_retriever(model) for model in (bundle, replace(bundle, proposal=None)))
    assert read_results(exact.retrieve([zero])) == read_results(alone.retrieve([zero]))
    mixed = read_results(exact.retrieve([first, zero]))
    assert mixed[1] == read_results(alone.retrieve([zero]))[0]
    assert mixed[0] != read_results(alone.retrieve([first]))[0]
    assert read_results(without.retrieve([first]))[0]["labels"] == []


def test_similar_labels_keep_the_label_frequencies() -> None:
    bundle = make_bundle(labels=LABELS, proposal=True)
    exact, alone = (make_retriever(model) for model in (bundle, replace(bundle, proposal=None)))
    request = SimilarQuery(ids=["item-1", "item-2"], k=10, bias_removal=1.0)
    assert read_results(exact.similar([request])) == read_results(alone.similar([request]))


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_the_smallest_catalogues(labels: int) -> None:
    bundle = make_bundle(labels=labels, proposal=True)
    retriever = make_retriever(bundle)
    (result,) = read_results(retriever.retrieve([RetrieveQuery(features=FEATURES[0], k=labels, bias_removal=1.0)]))
    check(result, sum(parts(bundle, FEATURES[0])), np.ones(labels, bool), labels)


def number_ranker() -> TreeRanker:
    """Two labels; σ(3x − 1) is the second's probability."""
    bundle = make_bundle(labels=2)
    tree = Proposal(
        projection={"x": np.array([[1]], np.float32)},
        offset=np.zeros(1, np.float32),
        weights=np.array([[0], [3]], np.float32),
        biases=np.array([0, -1], np.float32),
        leaf_labels=np.array([0, 1], np.int32),
    )
    searcher = ExactSearcher(bundle)
    return TreeRanker(searcher, bundle, tree)


def number_batch(*numbers: float, bias_removal: float = 1.0) -> Batch:
    count = len(numbers)
    inputs = {"x": np.array(numbers, np.float32)}
    zeros = np.zeros(count, np.float32)
    return Batch(np.zeros((count, 8), np.float32), inputs, zeros + np.float32(bias_removal), zeros, [None] * count, 2)


def test_a_number_moves_log_p_n_by_hand() -> None:
    scores, rows = number_ranker().rank(number_batch(1.0, -100.0, 3e4))
    assert rows.tolist() == [[1, 0], [0, 1], [1, 0]]
    odds = np.array([2.0, 301.0, 9e4 - 1])
    np.testing.assert_allclose(scores[:, 0], -np.log1p(np.exp(-odds)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(scores[:, 1], scores[:, 0] - odds, rtol=1e-6)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 3e38])
def test_features_that_overflow_in_the_tree_are_the_clients_error(number: float) -> None:
    ranker = number_ranker()
    with pytest.raises(InvalidRequestError, match="overflow") as caught:
        ranker.rank(number_batch(1.0, number))
    assert caught.value.field == "queries.1.features"
    scores, _ = ranker.rank(number_batch(1.0, number, bias_removal=0.0))
    assert np.isfinite(scores).all()


@pytest.fixture(scope="module")
def large() -> tuple[Bundle, Searcher, Batch, np.ndarray, np.ndarray]:
    """20,000 labels in an exact index; 200 queries, their f and log p_n of every label."""
    bundle = make_bundle(labels=20_000, dim=32, users=200, proposal=True)
    manifest, tree = bundle.manifest, bundle.proposal
    assert tree is not None
    built = tune_index(bundle, IndexSpec("flat"), lambda _: None)
    rng = np.random.default_rng(0)
    encoder = Tower(bundle.query_tower, manifest.query_features, bundle.vocabularies, manifest.dim)
    inputs = encoder.read(
        [
            {"user_id": f"u{user}", "history": [f"item-{row}" for row in rng.integers(20_000, size=3)]}
            for user in range(200)
        ]
    )
    queries_BD = encoder.embed(inputs)
    f_BL = queries_BD @ bundle.embeddings.T / manifest.temperature
    batch = Batch(queries_BD, inputs, np.zeros(200, np.float32), np.zeros(200, np.float32), [None] * 200, 20)
    searcher = Searcher(bundle, built.index, built.chosen.params)
    return bundle, searcher, batch, f_BL, tree.all_log_probabilities(tree.project(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("bias_removal", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("filtered", ["no filter", "tail", "500 excluded", "3,000 excluded", "6,000 allowed"])
def test_recall_at_20_of_the_union_against_exact_scores_of_the_catalogue(
    large: tuple[Bundle, Searcher, Batch, np.ndarray, np.ndarray], bias_removal: float, filtered: str
) -> None:
    bundle, searcher, batch, f_BL, log_p_BL = large
    tree = bundle.proposal
    assert tree is not None
    rows = np.random.default_rng(1).permutation(20_000)
    filter_ = {
        "no filter": None,
        "tail": Filter(buckets=frozenset({2})),
        "500 excluded": Filter(exclude=rows[:500]),
        "3,000 excluded": Filter(exclude=rows[:3000]),
        "6,000 allowed": Filter(allow=rows[:6000]),
    }[filtered]
    ranker = TreeRanker(searcher, bundle, tree)
    picked = np.arange(0, 200, 4)
    query = batch.subset(picked)._replace(bias_removal_B=np.full(50, bias_removal, np.float32), filters=[filter_] * 50)
    found_BK, rows_BK = ranker.rank(query)
    exact_BL = f_BL[picked] + bias_removal * log_p_BL[picked]
    if filter_ is not None:
        exact_BL[:, ~filter_.mask(bundle.labels.buckets)] = -np.inf
    least_B1 = np.sort(exact_BL, axis=1)[:, -20, None] - 1e-3
    np.testing.assert_allclose(found_BK, np.take_along_axis(exact_BL, rows_BK, axis=1), rtol=1e-4, atol=1e-3)
    assert (found_BK >= least_B1).mean() >= 0.99
