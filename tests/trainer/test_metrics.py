import math

import numpy as np
import pytest

from longtail.bundle import Interval
from longtail.trainer.evaluation.metrics import (
    Bootstrap,
    LabelFacts,
    Positives,
    compute_metrics,
    interval_of_difference,
    interval_of_share,
    inverse_propensity,
)

HEAD, TORSO, TAIL = 0, 1, 2
BUCKETS = np.array([HEAD, HEAD, TORSO, TAIL, TAIL], np.int8)
COUNTS = np.array([10, 6, 3, 1, 0])
TEST_PAIRS = [(0, 0), (0, 3), (1, 2), (2, 4), (2, 1), (0, 3)]
TOP = np.array([[0, 1, 3], [0, 1, 2], [3, 0, -1]], np.int32)
IDEAL_OF_TWO = 1 + 1 / math.log2(3)

FACTS = LabelFacts(COUNTS, BUCKETS)


def measure(
    top: list[list[int]], pairs: list[tuple[int, int]], facts: LabelFacts, ks: tuple[int, ...] = (1,)
) -> dict[str, Interval]:
    queries, labels = np.array(pairs).T
    positives = Positives.collect(queries, labels, queries=len(top), labels=len(facts.counts_L))
    bootstrap = Bootstrap(len(top), resamples=50, seed=0)
    return compute_metrics(np.array(top, np.int32), positives, facts, ks=ks, bootstrap=bootstrap)


BY_HAND = {
    "recall@1": (1 / 2 + 0 + 0) / 3,
    "recall@3": (2 / 2 + 1 / 1 + 0 / 2) / 3,
    "precision@1": 1 / 3,
    "precision@3": (2 / 3 + 1 / 3 + 0) / 3,
    "ndcg@1": (1 + 0 + 0) / 3,
    "ndcg@3": ((1 + 1 / 2) / IDEAL_OF_TWO + 1 / 2 + 0) / 3,
    "mrr@1": 1 / 3,
    "mrr@3": (1 + 1 / 3 + 0) / 3,
    "hit_rate@1": 1 / 3,
    "hit_rate@3": 2 / 3,
    "recall@3/head": 1 / 2,
    "recall@3/torso": 1 / 1,
    "recall@3/tail": 1 / 2,
    "recall@1/tail": 0 / 2,
    "exposure@3/head": 5 / 8,
    "exposure@3/torso": 1 / 8,
    "exposure@3/tail": 2 / 8,
    "exposure@1/head": 2 / 3,
    "balanced_error@1": 1 - (1 + 0 + 0 + 0 + 0) / 5,
    "balanced_error@3": 1 - (1 + 0 + 1 + 1 + 0) / 5,
    "balanced_error@1/head": 1 - (1 + 0) / 2,
    "balanced_error@3/head": 1 - (1 + 0) / 2,
    "balanced_error@1/torso": 1 - 0,
    "balanced_error@3/torso": 1 - 1,
    "balanced_error@1/tail": 1 - (0 + 0) / 2,
    "balanced_error@3/tail": 1 - (1 + 0) / 2,
    "coverage@1": 2 / 5,
    "coverage@3": 4 / 5,
    "coverage@3/head": 2 / 2,
    "coverage@3/torso": 1 / 1,
    "coverage@3/tail": 1 / 2,
    "popularity@1": (10 + 10 + 1) / 3,
    "popularity@3": (10 + 6 + 1 + 10 + 6 + 3 + 1 + 10) / 8,
    "gini@3": 28 / (2 * 5 * 8),
}
"""The last: Σ|x_i − x_j| over ordered pairs of the exposures 3, 2, 1, 2, 0 is 28."""


def test_metrics_by_hand() -> None:
    metrics = measure(TOP.tolist(), TEST_PAIRS, FACTS, (1, 3))
    assert {name: metrics[name].value for name in BY_HAND} == pytest.approx(BY_HAND, rel=1e-6)
    for name, figure in metrics.items():
        if name.partition("@")[0] in ("balanced_error", "gini", "coverage"):
            assert (figure.low, figure.high) == (None, None), name
        else:
            assert figure.low <= figure.value <= figure.high, name


def test_interval_of_a_share_equals_the_textbook() -> None:
    hits = np.arange(400) % 10 < 3
    interval = Bootstrap(400, resamples=2000, seed=0).interval(hits.astype(float), np.ones(400))

    error = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert interval.value == pytest.approx(0.3)
    assert (interval.low, interval.high) == pytest.approx((0.3 - error, 0.3 + error), abs=0.005)


@pytest.mark.parametrize("queries", [100, 500])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("truth", [0.02, 0.1, 0.5])
def test_interval_of_a_small_bucket_covers_the_truth(queries: int, truth: float, alike: bool) -> None:
    """A twentieth of the queries have tail pairs, 1 or 2; the pairs of a query are found alike or each by itself."""
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(500):
        pairs = np.where(rng.random(queries) < 0.05, rng.integers(1, 3, queries), 0)
        hits = np.where(alike, pairs * (rng.random(queries) < truth), rng.binomial(pairs, truth)).astype(np.float64)
        interval = interval_of_share(hits, pairs.astype(np.float64))
        covered.append(pairs.sum() == 0 or interval.low <= truth <= interval.high)
    assert np.mean(covered) > 0.93


def test_the_interval_of_a_bucket_by_hand() -> None:
    """Clopper and Pearson's of 0 of 5, 5 of 5 and 3 of 10 pairs, a query each; twice each pair tells no more."""
    none = interval_of_share(np.zeros(5), np.ones(5))
    assert (none.value, none.low, none.high) == pytest.approx((0, 0, 1 - 0.025 ** (1 / 5)))
    of_one = interval_of_share(np.zeros(1), np.full(1, 100.0))
    assert (of_one.low, of_one.high) == pytest.approx((0, 0.975))
    every = interval_of_share(np.ones(5), np.ones(5))
    assert (every.value, every.low, every.high) == pytest.approx((1, 0.025 ** (1 / 5), 1))
    hits = np.array([1.0] * 3 + [0.0] * 7)
    once, twice = interval_of_share(hits, np.ones(10)), interval_of_share(2 * hits, 2 * np.ones(10))
    assert (once.low, once.high) == pytest.approx((0.066740, 0.652453), abs=1e-5)
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high))
    facts = LabelFacts(np.ones(2, np.int64), np.full(2, TAIL, np.int8))
    missed = measure([[1], [1]], [(0, 0), (1, 0)], facts)["recall@1/tail"]
    assert missed.high == pytest.approx(1 - 0.025 ** (1 / 2)), "no hit of two is no certainty"


SHARES = [(30, 0.02, 0.01), (30, 0.05, 0.03), (30, 0.2, 0.2), (150, 0.3, 0.2), (900, 0.05, 0.03)]


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("pairs", "ours", "theirs"), SHARES)
def test_interval_of_a_difference_covers_the_truth(pairs: int, ours: float, theirs: float, alike: float) -> None:
    """A share `alike` of what the worse model finds is found by both; each query has three pairs, which correlate."""
    rng, covered = np.random.default_rng(8), list[bool]()
    both = alike * theirs
    for _ in range(400):
        of_query, of_pair = rng.random((pairs // 3, 1)), rng.random((pairs // 3, 3))
        draws = np.where(rng.random((pairs // 3, 3)) < 0.5, of_query, of_pair)
        hits = draws < ours, (draws < both) | ((draws >= ours) & (draws < ours + theirs - both))
        interval = interval_of_difference(
            *(model_hits.sum(axis=1).astype(np.float64) for model_hits in hits), np.full(len(draws), 3.0)
        )
        covered.append(interval.low <= ours - theirs <= interval.high)
    assert np.mean(covered) > 0.92


def test_the_interval_of_a_difference_by_hand() -> None:
    """Shares that are found by disjoint queries, by the same, and never."""
    ours, theirs = np.array([1.0] * 3 + [0.0] * 7), np.array([0.0] * 9 + [1.0])
    ours_share, theirs_share = interval_of_share(ours, np.ones(10)), interval_of_share(theirs, np.ones(10))
    difference = interval_of_difference(ours, theirs, np.ones(10))
    correlation = -0.3 / np.sqrt(2.1 * 0.9)  # Σ (x − .3)(y − .1) = 0 − 10 · .03 over √(10 · .21 · 10 · .09)
    below, above = 0.3 - ours_share.low, theirs_share.high - 0.1
    assert difference.value == pytest.approx(0.2)
    assert difference.low == pytest.approx(0.2 - np.sqrt(below**2 - 2 * correlation * below * above + above**2))
    same = interval_of_difference(ours, ours, np.ones(10))
    margin = (ours_share.high - 0.3) - (0.3 - ours_share.low)
    assert (same.low, same.high) == pytest.approx((-margin, margin))
    never = interval_of_difference(np.zeros(5), np.zeros(5), np.ones(5))
    limit = 1 - 0.025 ** (1 / 5)
    assert (never.value, never.low, never.high) == pytest.approx((0, -limit, limit))


def test_balanced_error_averages_tested_labels() -> None:
    """Of the tail's three labels one is tested four times and found thrice, one once and missed, one never."""
    facts = LabelFacts(np.ones(3, np.int64), np.full(3, TAIL, np.int8))
    metrics = measure([[0], [0], [0], [2], [2]], [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)], facts)

    assert metrics["balanced_error@1/tail"].value == 1 - (3 / 4 + 0) / 2
    assert metrics["balanced_error@1/tail"].value == metrics["balanced_error@1"].value
    assert metrics["recall@1/tail"].value == pytest.approx(3 / 5), "over pairs"
    assert metrics["balanced_error@1/head"].value == 0, "nothing to divide by"


def test_positives_are_distinct_pairs() -> None:
    queries, labels = np.array(TEST_PAIRS).T
    positives = Positives.collect(queries, labels, queries=3, labels=5)

    assert list(zip(positives.query_rows.tolist(), positives.label_rows.tolist(), strict=True)) == [
        (0, 0), (0, 3), (1, 2), (2, 1), (2, 4)
    ]  # fmt: skip
    assert positives.hits(TOP).tolist() == [[True, False, True], [False, False, True], [False, False, False]]


def test_padding_is_no_hit_of_the_previous_query() -> None:
    """The key of (query 1, −1) is that of (query 0, last label)."""
    positives = Positives.collect(np.array([0, 1]), np.array([4, 0]), queries=2, labels=5)

    assert positives.hits(np.array([[1], [-1]], np.int32)).tolist() == [[False], [False]]


INVERSE_PROPENSITY = np.array([2.0, 3, 4, 6, 8])
LOG2_3 = math.log2(3)
SCORED_BY_HAND = {
    "psp@1": 2 / (6 + 4 + 8),
    "psp@3": (2 + 6 + 4) / ((6 + 2) + 4 + (8 + 3)),
    "psndcg@1": 2 / (6 + 4 + 8),
    "psndcg@3": ((2 + 6 / 2) / IDEAL_OF_TWO + 4 / 2)
    / ((6 + 2 / LOG2_3) / IDEAL_OF_TWO + 4 + (8 + 3 / LOG2_3) / IDEAL_OF_TWO),
}


def test_propensity_scored_metrics_by_hand() -> None:
    metrics = measure(TOP.tolist(), TEST_PAIRS, LabelFacts(COUNTS, BUCKETS, INVERSE_PROPENSITY), (1, 3))
    scores = {name: figure.value for name, figure in metrics.items() if name.startswith("ps")}
    assert scores == pytest.approx(SCORED_BY_HAND)


def test_inverse_propensities_by_hand() -> None:
    """With a = b = 1: 1 + 2 (ln N − 1) / (N_y + 1), and ln 100 = 4.605170186."""
    weights = inverse_propensity(np.array([0, 1, 3]), queries=100, a=1, b=1)
    assert weights == pytest.approx([8.210340372, 4.605170186, 2.802585093])

    amazon = inverse_propensity(np.array([5]), queries=1_186_239, a=0.6, b=2.6)
    assert amazon == pytest.approx([1 + 12.986298 * (3.6 / 7.6) ** 0.6], rel=1e-6)
    assert inverse_propensity(np.array([0, 2]), queries=2, a=1, b=1).tolist() == [1, 1], "never below 1"
