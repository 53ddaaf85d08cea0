"""The rows that a model is compared with: their lists worked out otherwise, and what is said of the difference."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import Buckets
from longtail.trainer.choice import create_hit_counter
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.baselines import (
    BASELINES,
    FULL_READING,
    READINGS,
    Interactions,
    SameForAll,
    Scores,
    _select_unseen,
    attribute_share,
    ease,
    format_settings,
    item_knn,
    recent_popularity,
    rp3beta,
    skip_reason,
    top_labels,
    turbo_cf,
)
from longtail.trainer.evaluation.comparison import Comparison, compare, tuned
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.metrics import LabelFacts
from longtail.trainer.evaluation.task import Task
from longtail.trainer.results import Selection, finish
from tests.trainer import tiny
from tests.trainer.conftest import Finished

QUERIES, L, K = 60, 24, 5


def planted() -> tuple[Pairs, Pairs]:
    """Queries of three tastes with eight labels each; a fifth of every query's six pairs goes astray. Half are held
    out; the last two queries have no pair but held-out ones.
    """
    rng = np.random.default_rng(3)
    query = np.repeat(np.arange(QUERIES), 8)
    favourite = (query % 3) * 8 + np.minimum(rng.geometric(0.3, len(query)), 8) - 1
    label = np.where(rng.random(len(query)) < 0.1, rng.integers(L, size=len(query)), favourite)
    pairs = Pairs(query.astype(np.int32), label.astype(np.int32), None, rng.permutation(len(query)).astype(np.float64))
    is_held_out = (np.arange(len(query)) % 2 == 0) | (query >= QUERIES - 2)
    return pairs.take(~is_held_out).sorted(), pairs.take(is_held_out).sorted()


TRAIN, HELD_OUT = planted()
PAST = Past.fixed(TRAIN, queries=QUERIES)
DATA = Interactions(TRAIN, PAST, queries=QUERIES, labels=L, seed=0, ordered=False)
CONFIG = tiny.recipe(evaluation={"ks": [2, K], "metric": f"recall@{K}"}).evaluation
TASK = Task.create(HELD_OUT, PAST, CONFIG, labels=L, seed=0)
COUNTS = np.bincount(TRAIN.labels, minlength=L)
SIDE = LabelSide.build(
    np.zeros((L, 2), np.float32), None, COUNTS, training_queries=QUERIES, temperature=1.0,
    log_pn=np.zeros(L, np.float32), buckets=Buckets.by_quantile(COUNTS),
)  # fmt: skip
FACTS = SIDE.facts(CONFIG)


def dense(pairs: Pairs) -> np.ndarray:
    matrix = np.zeros((QUERIES, L))
    np.add.at(matrix, (pairs.queries, pairs.labels), 1)
    return matrix


def sorted_lists(scores_QL: np.ndarray) -> list[list[int]]:
    """Best first, by score, then popularity, then row; unseen labels alone, and popularity for the two newcomers."""
    seen_QL, lists = dense(TRAIN) > 0, []
    for query in TASK.rows_N:
        scores = scores_QL[query] if seen_QL[query].any() else COUNTS
        ranking = sorted(range(L), key=lambda label: (-scores[label], -COUNTS[label], label))
        lists.append([label for label in ranking if not seen_QL[query, label]][:K])
    return lists


def answers(name: str, data: Interactions = DATA, **settings: float) -> np.ndarray:
    baseline = BASELINES[name]
    return top_labels(TASK, data, baseline.fit(data, baseline.settings | settings))


def test_recent_popularity_counts_the_latest_share() -> None:
    latest = np.argsort(-TRAIN.times)[: len(TRAIN) // 4]
    counts = np.bincount(TRAIN.labels[latest], minlength=L)

    scores = np.tile(counts, (QUERIES, 1))
    scores[-2:] = COUNTS
    assert answers("recent popularity", share=0.25).tolist() == sorted_lists(scores)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
def test_pairs_of_one_time_are_cut_by_order(share: float) -> None:
    rng = np.random.default_rng(3)
    times, weights = rng.integers(5, size=200).astype(np.float64), rng.random(200).astype(np.float32)
    labels = rng.integers(L, size=200).astype(np.int32)
    pairs = Pairs(np.sort(rng.integers(QUERIES, size=200)).astype(np.int32), labels, times=times, weights=weights)
    latest = np.argsort(-times, kind="stable")[: round(share * 200)]

    scores = recent_popularity(Interactions(pairs, PAST, QUERIES, L, 0, ordered=True), {"share": share})
    assert isinstance(scores, SameForAll)
    counts = np.bincount(labels[latest], weights[latest], minlength=L)
    np.testing.assert_allclose(scores.scores_L, counts, rtol=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.25, 0.0])
def test_attribute_share_is_taste_for_a_value_times_popularity_within(share: float) -> None:
    colours, shapes = np.arange(L) % 5, np.arange(L) // 7
    prior = np.random.default_rng(1).random(L)
    data = dataclasses.replace(DATA, columns={"shape": shapes, "colour": colours}, prior_L=prior)
    latest = np.argsort(-TRAIN.times)[: len(TRAIN) // 4]
    within = {1.0: COUNTS, 0.25: np.bincount(TRAIN.labels[latest], minlength=L), 0.0: prior}[share]
    scores = np.zeros((QUERIES, L))
    for query in range(QUERIES):
        history = TRAIN.labels[TRAIN.queries == query]
        for label in range(L):
            same = colours == colours[label]
            of_log = COUNTS[same].sum() / COUNTS.sum()
            taste = (same[history].sum() + 5 * of_log) / (len(history) + 5)
            scores[query, label] = taste * within[label] / within[same].sum()

    settings = {"column": "colour", "smoothing": 5, "share": share}
    computed = attribute_share(data, settings)(np.arange(QUERIES, dtype=np.int32))
    np.testing.assert_allclose(computed, scores, rtol=1e-5)
    planted_columns = dataclasses.replace(data, columns={"noise": shapes, "taste": np.arange(L) // 8})
    chosen = tuned(BASELINES["attribute share"], TASK, planted_columns, f"recall@{K}", FACTS)
    assert chosen["column"] == "taste"
    assert format_settings(chosen).startswith("column taste, smoothing ")


def weighted(rng: np.random.Generator) -> Interactions:
    """40 queries × 15 labels, with weights that tie nowhere; label 14 has no pair, query 39 none in training."""
    query, label = np.nonzero(rng.random((39, 14)) < 0.3)
    pairs = Pairs(
        query.astype(np.int32), label.astype(np.int32), weights=rng.random(len(query)).astype(np.float32) + 0.1
    )
    known_pairs = Pairs(np.append(pairs.queries, np.int32([39, 39])), np.append(pairs.labels, np.int32([2, 7])))
    return Interactions(pairs, Past.fixed(known_pairs, queries=40), queries=40, labels=15, seed=0, ordered=False)


def summed(data: Interactions, similarity_LL: np.ndarray, most: int) -> np.ndarray:
    """Scores of queries: of each label its `most` nearest others, looked up by loops."""
    scores_QL = np.zeros((data.queries, data.labels))
    for label in range(data.labels):
        others = [other for other in range(data.labels) if other != label]
        near = sorted(others, key=lambda other: -similarity_LL[label, other])[:most]
        for query, entry in zip(data.past.known_pairs.queries, data.past.known_pairs.labels, strict=True):
            scores_QL[query, label] += similarity_LL[label, entry] if entry in near else 0
    return scores_QL


@pytest.mark.parametrize("shrink", [0, 3])
@pytest.mark.parametrize("most", [1, 4, 14, 40])
def test_item_knn_sums_the_nearest_of_each_candidate(most: int, shrink: float) -> None:
    data = weighted(np.random.default_rng(most))
    x_QL = data.pairs_of_training.toarray().astype(np.float64)
    x_QL /= np.maximum(np.linalg.norm(x_QL, axis=1, keepdims=True), 1e-12)
    similarity = np.zeros((15, 15))
    for label in range(14):
        for neighbour in range(14):
            norms = np.linalg.norm(x_QL[:, label]) * np.linalg.norm(x_QL[:, neighbour])
            similarity[label, neighbour] = x_QL[:, label] @ x_QL[:, neighbour] / (norms + shrink)

    computed = item_knn(data, {"neighbours": most, "shrink": shrink} | FULL_READING)(np.arange(40, dtype=np.int32))
    np.testing.assert_allclose(computed, summed(data, similarity, most), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (1, 0.6), (0.5, 0.8), (1.5, 0.2)])
@pytest.mark.parametrize("most", [2, 14])
def test_rp3beta_walks_three_steps_and_divides_by_degree(most: int, alpha: float, beta: float) -> None:
    data = weighted(np.random.default_rng(5))
    x_QL = data.pairs_of_training.toarray().astype(np.float64)
    of_query, of_label = x_QL.sum(axis=1), x_QL.sum(axis=0)
    walk = np.zeros((15, 15))
    for entry in range(14):
        for query in range(39):
            for label in range(14):
                back = x_QL[query, entry] / of_label[entry]
                forth = x_QL[query, label] / of_query[query] if of_query[query] else 0
                walk[label, entry] += back**alpha * forth**alpha / of_label[label] ** beta

    computed = rp3beta(data, {"neighbours": most, "alpha": alpha, "beta": beta} | FULL_READING)(
        np.arange(40, dtype=np.int32)
    )
    np.testing.assert_allclose(computed, summed(data, walk, most), rtol=1e-5, atol=1e-7)


def test_ease_is_the_ridge_regression_of_each_label_on_the_others() -> None:
    data, l2 = weighted(np.random.default_rng(6)), 2.0
    x_QL = data.pairs_of_training.toarray().astype(np.float64)
    weights = np.zeros((15, 15))
    for label in range(15):
        others = np.delete(np.arange(15), label)
        x = x_QL[:, others]
        weights[others, label] = np.linalg.solve(x.T @ x + l2 * np.eye(14), x.T @ x_QL[:, label])

    computed = ease(data, {"l2": l2} | FULL_READING)(np.arange(40, dtype=np.int32))
    known_QL = np.zeros((40, 15))
    known_QL[data.past.known_pairs.queries, data.past.known_pairs.labels] = 1
    np.testing.assert_allclose(computed, known_QL @ weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("alpha", "power", "most"), [(0.6, 0.7, 14), (0.5, 1, 14), (0.3, 1.4, 3)])
def test_turbo_cf_is_a_power_of_the_normalised_item_graph(alpha: float, power: float, most: int) -> None:
    data = weighted(np.random.default_rng(8))
    x_QL = data.pairs_of_training.toarray().astype(np.float64)
    degree_Q, degree_L = np.maximum(x_QL.sum(axis=1), 1e-12), np.maximum(x_QL.sum(axis=0), 1e-12)
    normalised = x_QL * degree_Q[:, None] ** -alpha * degree_L ** (alpha - 1)

    scores = turbo_cf(data, {"neighbours": most, "alpha": alpha, "power": power} | FULL_READING)(
        np.arange(40, dtype=np.int32)
    )
    np.testing.assert_allclose(scores, summed(data, (normalised.T @ normalised) ** power, most), rtol=1e-4, atol=1e-7)


def test_ease_in_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    data, rows = weighted(np.random.default_rng(7)), np.arange(40, dtype=np.int32)
    by_knn, by_ease = {"neighbours": 3, "shrink": 0} | FULL_READING, {"l2": 2} | FULL_READING
    fits = [item_knn(data, by_knn)(rows), ease(data, by_ease)(rows)]
    monkeypatch.setattr("longtail.trainer.evaluation.baselines._AT_A_TIME", 4)
    for expected, parts in zip(fits, (item_knn(data, by_knn), ease(data, by_ease)), strict=True):
        np.testing.assert_allclose(parts(rows), expected, rtol=1e-4, atol=1e-5)


def test_histories_have_the_newest_pairs_with_decay() -> None:
    pairs = tiny.pairs((0, 1), (0, 0), (0, 1), (0, 2), (2, 3), weights=[16, 4, 2, 8, 1])
    data = Interactions(pairs, Past.fixed(pairs, queries=3), queries=3, labels=4, seed=0, ordered=True)

    def read(last: int, decay: float) -> list[list[float]]:
        return data.histories(np.int32([2, 0, 1]), last, decay).toarray().tolist()

    assert read(0, 1) == [[0, 0, 0, 1], [4, 18, 8, 0], [0, 0, 0, 0]]
    assert read(2, 1) == [[0, 0, 0, 1], [0, 2, 8, 0], [0, 0, 0, 0]]
    assert read(2, 0.5) == [[0, 0, 0, 1], [0, 1, 8, 0], [0, 0, 0, 0]]
    assert read(0, 0.5) == [[0, 0, 0, 1], [1, 1 + 2, 8, 0], [0, 0, 0, 0]], "16/8 + 2/2 of the repeated label"
    unit = dataclasses.replace(data, past=Past.fixed(dataclasses.replace(pairs, weights=None), queries=3))
    assert unit.histories(np.int32([0]), 0, 0.5).toarray().tolist() == [[0.25, 0.125 + 0.5, 1, 0]]


CHAIN = Interactions(
    tiny.pairs((0, 0), (0, 1), (1, 1), (1, 2)), Past.fixed(tiny.pairs((2, 0), (2, 2), (2, 1)), queries=3), queries=3,
    labels=3, seed=0, ordered=True,
)  # fmt: skip
"""Labels 0 and 1 occur together, and 1 and 2; query 2 knows 0, then 2, then 1."""


@pytest.mark.parametrize(
    ("name", "settings", "all_scores", "newest_scores"),
    [
        # Similarities of 0 and 1, of 1 and 2: (½) / (√½ · 1) = √½.
        ("item-kNN", {"neighbours": 2, "shrink": 0}, [0.5**0.5, 2**0.5, 0.5**0.5], [0.5**0.5, 0.5**1.5, 0.5**0.5]),
        # Walks of ½ to 1 from 0 and from 2, of ½ · ½ to 0 and to 2 from 1.
        ("RP3beta", {"neighbours": 2, "alpha": 1, "beta": 0}, [1 / 4, 1 / 2 + 1 / 2, 1 / 4], [1 / 4, 1 / 4, 1 / 4]),
        # P of 0 and 1, of 1 and 2: ½ / √(1 · 2), squared by the power.
        ("Turbo-CF", {"neighbours": 2, "alpha": 0.5, "power": 2}, [1 / 8, 1 / 4, 1 / 8], [1 / 8, 1 / 16, 1 / 8]),
        # XᵀX + I = [[2, 1, 0], [1, 3, 1], [0, 1, 2]], whose inverse is [[5, −2, 1], [−2, 4, −2], [1, −2, 5]] / 8.
        ("EASE", {"l2": 1}, [2 / 5 - 1 / 5, 1 / 2 + 1 / 2, 2 / 5 - 1 / 5], [2 / 5 - 1 / 10, 1 / 4, 2 / 5]),
    ],
)  # fmt: skip
def test_scores_of_two_pairs_with_decay(
    name: str, settings: dict[str, float], all_scores: list[float], newest_scores: list[float]
) -> None:
    fit, row = BASELINES[name].fit, np.int32([2])
    np.testing.assert_allclose(fit(CHAIN, settings | FULL_READING)(row), [all_scores], rtol=1e-5)
    np.testing.assert_allclose(fit(CHAIN, settings | {"last": 2, "decay": 0.5})(row), [newest_scores], rtol=1e-5)


@pytest.mark.parametrize("name", ["item-kNN", "RP3beta", "EASE", "Turbo-CF"])
def test_labels_of_equal_scores_are_listed_by_popularity(name: str) -> None:
    settings = BASELINES[name].settings | {"last": 1}
    scores_QL = BASELINES[name].fit(DATA, settings)(np.arange(QUERIES, dtype=np.int32))
    assert (scores_QL[:-2] == 0).any(), "labels that never occur with the last one"
    assert answers(name, last=1).tolist() == sorted_lists(scores_QL)


def moved() -> tuple[Interactions, Task]:
    """30 queries with six pairs of one taste, then one of another, from which the held-out pair comes."""
    rng, rows = np.random.default_rng(4), []
    for query in range(30):
        old, new = rng.permutation(3)[:2] * 8
        rows += [(query, old + label) for label in rng.permutation(8)[:6]] + [(query, new + query % 4)]
    held_out = tiny.pairs(*((query, label // 8 * 8 + 4 + query % 4) for query, label in rows[6::7]))
    # Other queries know all labels of one taste.
    pairs = tiny.pairs(*rows, *((30 + taste, taste * 8 + label) for taste in range(3) for label in range(8)))
    past = Past.fixed(pairs, queries=33)
    data = Interactions(pairs, past, queries=33, labels=24, seed=0, ordered=True)
    return data, Task.create(held_out, past, CONFIG, labels=24, seed=0)


def test_validation_pairs_choose_the_reading_of_histories_by_one_fit() -> None:
    data, task = moved()
    metric, fits = f"recall@{K}", []

    def fit(data: Interactions, settings: dict[str, float]) -> Scores:
        fits.append(settings)
        return item_knn(data, settings)

    baseline = dataclasses.replace(BASELINES["item-kNN"], fit=fit)
    values = []
    for reading in READINGS:
        top_NK = top_labels(task, data, item_knn(data, baseline.settings | reading))
        values.append(task.metrics(top_NK, FACTS)[metric].value)

    settings = tuned(baseline, task, data, metric, FACTS, grid=False)
    assert settings == {"neighbours": 200, "shrink": 1} | READINGS[int(np.argmax(values))]
    assert values[0] < max(values), "all pairs alike are worse"
    assert fits == [{"neighbours": 200, "shrink": 1, "last": 0, "decay": 1}]

    reading = {name: settings[name] for name in ("last", "decay")}
    everything = tuned(baseline, task, data, metric, FACTS)
    assert [{**tried, **reading} for tried in fits[2:-1]] == fits[2:-1], "the grid is tried at the best reading"
    assert len(fits) == 1 + 1 + 15 + 1
    assert {name: everything[name] for name in ("neighbours", "shrink")} in baseline.grid
    unordered = dataclasses.replace(data, ordered=False)
    assert tuned(baseline, task, unordered, metric, FACTS, grid=False) == baseline.settings


def test_fewer_queries_choose_a_reading_among_many_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    data, task = moved()
    sizes = []

    def top(task: Task, data: Interactions, scores: Scores) -> np.ndarray:
        sizes.append(len(task.rows_N))
        return top_labels(task, data, scores)

    monkeypatch.setattr("longtail.trainer.evaluation.comparison.top_labels", top)
    monkeypatch.setattr("longtail.trainer.evaluation.comparison._READING_QUERIES", 7)
    for scores, queries in ((24 * 12, 12), (24 * 2, 7), (24 * 1000, 30)):
        monkeypatch.setattr("longtail.trainer.evaluation.comparison._READING_SCORES", scores)
        sizes.clear()
        tuned(BASELINES["RP3beta"], task, data, f"recall@{K}", FACTS, grid=False)
        assert sizes == [queries] * len(READINGS)
        sizes.clear()
        columns = dataclasses.replace(data, columns={"parity": np.arange(24) % 2})
        tuned(BASELINES["attribute share"], task, columns, f"recall@{K}", FACTS)
        assert sizes == [queries] * 3  # one column and three smoothings; without times, all pairs


def test_a_reading_is_chosen_in_every_comparison_of_ordered_pairs() -> None:
    data, task = moved()
    config = CONFIG.model_copy(update={"baselines": ["popularity", "EASE", "iALS"]})
    ours = np.zeros((len(task.rows_N), K), np.int32)

    result, _ = compare(task, ours, FACTS, data, config, tuning=(task, data))
    blind, _ = compare(task, ours, FACTS, data, config, tuning=None)
    unordered, _ = compare(task, ours, FACTS, dataclasses.replace(data, ordered=False), config, tuning=None)

    assert result is not None
    assert blind is not None
    assert unordered is not None
    assert result.settings["EASE"].keys() == {"l2", "last", "decay"}
    assert 0 < result.settings["EASE"]["last"] <= 50
    assert result.settings["iALS"].keys() == {"confidence", "regularization"}
    value, alike = (comparison.baselines["EASE"][f"recall@{K}"].value for comparison in (result, blind))
    assert value > alike
    assert blind.settings["EASE"] == unordered.settings["EASE"] == {"l2": 200, "last": 0, "decay": 1}
    assert result.notes == unordered.notes == []
    assert blind.notes == ["EASE was not tuned, for want of validation data: it reads all pairs of a history alike."]


def test_settings_in_words() -> None:
    assert format_settings({"l2": 200, "last": 0, "decay": 1}) == "l2 200, last all, decay 1"
    assert format_settings({"last": 10, "decay": 0.6}) == "last 10, decay 0.6"
    assert format_settings({}) == ""


def test_ease_refuses_singular_matrices() -> None:
    with pytest.raises(ValueError, match=r"EASE is not allowed with 60,000 labels.*use at most 50,000"):
        ease(dataclasses.replace(DATA, labels=60_000), {"l2": 1})
    with pytest.raises(ValueError, match="l2 = -1 is too small"):
        ease(DATA, {"l2": -1})


def test_ials_solves_the_normal_equations() -> None:
    """Alternating least squares of 64 factors in numpy, from other first factors: the same problem, the same lists but
    for a few; and the query's factors exactly those of its row.
    """
    matrix, (confidence, l2), factors = dense(TRAIN), (5.0, 1.0), 64
    rng = np.random.default_rng(8)
    items = rng.random((L, factors)) * 0.01

    def solved(rows: np.ndarray, other: np.ndarray) -> np.ndarray:
        """min Σ c (p − x·y)² + l2 |x|², where c = confidence·r and p = 1 at r > 0, and c = 1, p = 0 elsewhere."""
        solutions = []
        for row in rows:
            weight = np.where(row > 0, confidence * row, 1.0)
            gram = (other.T * weight) @ other + l2 * np.eye(factors)
            solutions.append(np.linalg.solve(gram, other.T @ np.where(row > 0, weight, 0.0)))
        return np.array(solutions)

    for _ in range(15):
        users = solved(matrix, items)
        items = solved(matrix.T, users)
    expected = sorted_lists(solved(matrix, items) @ items.T)
    top_lists = answers("iALS")

    agreement = np.mean([len(set(a) & set(b)) / K for a, b in zip(expected, top_lists.tolist(), strict=True)])
    assert agreement > 0.9
    ours, theirs = (TASK.metrics(np.int32(lists), FACTS)[f"recall@{K}"].value for lists in (top_lists, expected))
    assert ours == pytest.approx(theirs, abs=0.02)


def compared(ours: np.ndarray, **evaluation: object) -> Comparison:
    config = CONFIG.model_copy(update=evaluation)
    result, left_out = compare(TASK, ours, FACTS, DATA, config, tuning=(TASK, DATA))
    assert result is not None
    assert left_out == []
    return result


def test_requests_of_one_query_share_lists_and_differ_in_positives() -> None:
    """Query 0 is asked in two contexts, and 1 in one; baselines know no context, and all leave out what 0 has seen."""
    train = tiny.pairs((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3))
    held_out = Pairs(np.int32([0, 0, 1]), np.int32([1, 3, 2]), requests=np.int32([0, 1, 2]))
    past = Past.fixed(train, queries=3, requests=np.int32([0, 0, 1]))
    data = Interactions(train, past, queries=3, labels=4, seed=0, ordered=False)
    config = tiny.recipe(evaluation={"ks": [1, 2], "metric": "recall@2"}).evaluation
    task = Task.create(held_out, past, config, labels=4, seed=0)

    for name in ("popularity", "item-kNN", "RP3beta", "EASE", "Turbo-CF", "iALS"):
        lists = top_labels(task, data, BASELINES[name].fit(data, BASELINES[name].settings))
        assert lists[0].tolist() == lists[1].tolist(), name
        assert 0 not in lists[:2], "seen in both"
        assert not {0, 1} & set(lists[2].tolist())
    # Popularity answers 1, 2 in both contexts of query 0, of which the first wants 1 and the second 3; and 2, 3 to 1.
    popular = top_labels(task, data, BASELINES["popularity"].fit(data, {}))
    assert popular.tolist() == [[1, 2], [1, 2], [2, 3]]
    found_N, wanted_N = task.ratio("recall@2", popular, LabelFacts(np.array([3, 2, 1, 1]), np.zeros(4, np.int8)))
    assert (found_N.tolist(), wanted_N.tolist()) == ([1, 0, 1], [1, 1, 1])


def test_model_worse_than_a_baseline_is_reported() -> None:
    worst = np.tile(np.argsort(COUNTS)[:K].astype(np.int32), (len(TASK.rows_N), 1))

    result = compared(worst)

    assert list(result.baselines) == [name for name in BASELINES if name != "attribute share"]
    assert all(result.seconds[name] > 0 for name in result.baselines)
    assert result.behind
    assert result.sentence.startswith(f"The model is behind {result.best}: recall@{K} ")
    values = {name: metrics[f"recall@{K}"].value for name, metrics in result.baselines.items()}
    assert values[result.best] == max(values.values())
    ours = result.model[f"recall@{K}"].value
    assert result.difference.value == pytest.approx(ours - values[result.best])
    for name, metrics in result.baselines.items():
        differences = result.differences[name]
        assert {"ndcg@5", "hit_rate@5", "recall@5/tail"} < differences.keys()
        for metric, interval in differences.items():
            assert interval.value == pytest.approx(result.model[metric].value - metrics[metric].value, abs=1e-9)
            assert interval.low <= interval.value <= interval.high
    assert result.notes == [
        "2 of the 59 queries have no history: item-kNN, RP3beta, EASE, Turbo-CF, iALS answer them by popularity."
    ]


def test_tuning_takes_the_best_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASELINES, "item-kNN", dataclasses.replace(BASELINES["item-kNN"], tuned=True))
    chosen = compared(answers("popularity"), baselines=["item-kNN"])

    metric, grid = f"recall@{K}", BASELINES["item-kNN"].grid
    tried = [TASK.metrics(answers("item-kNN", **settings), FACTS)[metric].value for settings in grid]
    assert chosen.baselines["item-kNN"][metric].value == max(tried) > min(tried)


def test_skipped_baselines_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.trainer.evaluation.baselines._MOST_UPDATES", 10)
    monkeypatch.setattr("longtail.trainer.evaluation.baselines._MOST_PRODUCTS", 10)
    monkeypatch.setattr("longtail.trainer.evaluation.baselines._QUICK_LABELS", L - 1)
    untimed = dataclasses.replace(TRAIN, times=None)
    data = Interactions(untimed, PAST, queries=QUERIES, labels=L, seed=0, ordered=False)

    reasons = {name: skip_reason(name, data) for name in BASELINES}

    assert reasons["popularity"] is None
    assert reasons["recent popularity"] == "the pairs have no times"
    for name in ("item-kNN", "RP3beta", "EASE", "Turbo-CF", "iALS"):
        assert "would take many minutes" in str(reasons[name]), name
    config = CONFIG.model_copy(update={"baselines": ["iALS", "recent popularity"]})
    result, left_out = compare(TASK, answers("popularity"), FACTS, data, config, tuning=None)
    assert result is None
    assert left_out == [f"{name} was left out: {reasons[name]}." for name in config.baselines]


def test_fit_explains_skipped_baselines(finished: Finished, tmp_path: Path) -> None:
    """A trained model without times of its pairs, and a baseline that needs them."""
    trained, (reporter, screen) = finished.trained, tiny.record_output()
    recipe = trained.recipe.model_copy(
        update={"evaluation": trained.recipe.evaluation.model_copy(update={"baselines": ["recent popularity"]})}
    )
    untimed = dataclasses.replace(trained.dataset.train, times=None)
    of_pairs = dataclasses.replace(trained.dataset, train=untimed)
    again = dataclasses.replace(trained, recipe=recipe, dataset=of_pairs)
    dial = Dial(tiny.read_curve(finished.out))

    selection = Selection(dial, dial.default, trained.history, None, create_hit_counter(again))
    finish(again, trained.dataset, selection, {}, reporter, tmp_path / "b")

    note = "recent popularity was left out: the pairs have no times."
    assert note in screen.getvalue()
    figures = json.loads((tmp_path / "b" / "metrics.json").read_text())
    assert figures["baseline_notes"] == [note]
    assert "baselines" not in figures


def test_unseen_labels_are_found_at_any_depth() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        labels, queries = (int(count) for count in rng.integers(1, 60, 2))
        k, order_L = int(rng.integers(1, min(labels, 3) + 1)), rng.permutation(labels)
        seen_cells = np.unique(rng.integers(0, 10 * labels, int(rng.integers(0, 20 * labels))))
        request_queries = rng.integers(0, 10, queries).astype(np.int32)
        known_pairs = Pairs((seen_cells // labels).astype(np.int32), (seen_cells % labels).astype(np.int32))
        past = Past.fixed(known_pairs, queries=10, requests=request_queries)
        top_lists = _select_unseen(dataclasses.replace(TASK, rows_N=np.arange(queries), past=past, k=k), order_L)
        for asker, top in zip(request_queries, top_lists, strict=True):
            unseen = [label for label in order_L if asker * labels + label not in seen_cells][:k]
            assert top.tolist() == unseen + [-1] * (k - len(unseen))
