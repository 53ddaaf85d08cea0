"""The confidence sequence holds the truth at every look, of users who come back; a fixed-size interval does not.

`LONGTAIL_EXPERIMENTS=4000 pytest tests/serving/monitoring/test_sequential.py -s` makes so many and prints the shares.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from longtail.serving.monitoring.sequential import (
    CLUSTERS,
    Rate,
    boundary,
    difference_interval,
    rate_interval,
    sample_ratio_evidence,
)

EXPERIMENTS = int(os.environ.get("LONGTAIL_EXPERIMENTS", "400"))


def looks(experiments: int, *, units: int, looks: int, click: float, spread: float, lift: float, seed: int):
    """Hits and answers of every unit up to each look, [X, T, U]; the first half of the units is control.

    A unit has a click rate of its own (a gamma of shape 1/`spread`) and an activity of its own; most are there from the
    start, others arrive. So a unit's answers depend on each other, and what it does later is like what it did.
    """
    chance = np.random.default_rng(seed)
    shape = (experiments, 1, units)
    rate = click * (chance.gamma(1 / spread, spread, shape) if spread else np.ones(shape))
    rate = np.minimum(rate * np.where(np.arange(units) < units // 2, 1.0, 1.0 + lift), 1.0)
    activity = chance.gamma(1.0, 0.4, shape)
    present = np.arange(looks)[None, :, None] >= chance.integers(-looks // 2, looks, shape)
    answers = chance.poisson(np.broadcast_to(activity * present, (experiments, looks, units)))
    hits = chance.binomial(answers, np.broadcast_to(rate, answers.shape))
    return hits.cumsum(axis=1), answers.cumsum(axis=1)


def ever_left_out(hits: np.ndarray, answers: np.ndarray, truth: float = 0.0) -> tuple[float, float]:
    """Shares of the experiments whose difference, at some look, was outside: the sequence's, the fixed-size interval's.

    Both have the same variance by unit; the first look is at 5 hits in each arm.
    """
    half = hits.shape[2] // 2
    sequence, fixed = np.zeros(len(hits), bool), np.zeros(len(hits), bool)
    parts = [(hits[..., :half], answers[..., :half]), (hits[..., half:], answers[..., half:])]
    (H0, N0), (H1, N1) = [(h.sum(axis=2), n.sum(axis=2)) for h, n in parts]
    enough = (H0 >= 5) & (H1 >= 5)
    p0, p1 = H0 / np.maximum(N0, 1), H1 / np.maximum(N1, 1)
    V0, V1 = [((h - p[..., None] * n) ** 2).sum(axis=2) for (h, n), p in zip(parts, (p0, p1), strict=True)]
    w0, w1 = N0 / (N0 + N1), N1 / (N0 + N1)
    V, size = V1 * w0**2 + V0 * w1**2, np.maximum(N1 * w0, 1e-9)
    off = np.abs(p1 - p0 - truth)
    reach = np.vectorize(boundary)(V) / size
    sequence = (off > reach) & enough
    fixed = (off > 1.959963984540054 * np.sqrt(V) / size) & enough
    return float(sequence.any(axis=1).mean()), float(fixed.any(axis=1).mean())


@pytest.mark.parametrize(
    ("click", "spread"), [(0.02, 1.0), (0.3, 0.0), (0.3, 1.0)], ids=["rare clicks", "users alike", "users differ"]
)
def test_the_truth_is_inside_at_every_look(click: float, spread: float) -> None:
    found = looks(EXPERIMENTS, units=300, looks=60, click=click, spread=spread, lift=0.0, seed=1)
    sequence, fixed = ever_left_out(*found)
    print(f"click {click}, spread {spread}: left out at some look {sequence:.3f}, of fixed size {fixed:.3f}")
    # Three standard errors of a share of 5 %.
    assert sequence <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)
    assert fixed > 0.12, "an interval of fixed size is no use here"


def test_a_difference_that_is_there_is_found() -> None:
    found = looks(100, units=600, looks=60, click=0.3, spread=0.1, lift=0.25, seed=2)
    sequence, _ = ever_left_out(*found)
    assert sequence > 0.9


def rate(hits: list[float], trials: list[float]) -> Rate:
    return Rate(np.array(hits, np.float64), np.array(trials, np.float64))


def test_the_bounds_by_hand() -> None:
    # Two units: 3 of 10 and 1 of 10, p̂ = 0.2, V = 1 + 1.
    arm, control = rate([3, 1], [10, 10]), rate([0, 2, 0], [10, 10, 20])
    assert (arm.value, arm.variance) == (0.2, 2)
    reach = math.sqrt(2 * 66 * math.log(math.sqrt(66 / 64) / 0.05 + 1))
    assert boundary(2) == pytest.approx(reach)
    found = rate_interval(arm, highest=1.0)
    assert found is not None
    assert (found.value, found.low, found.high) == (0.2, 0.0, pytest.approx(min(1.0, 0.2 + reach / 20)))
    # p̂₀ = 0.05, V₀ = 0.25 + 2.25 + 1; N₁ = 20 and N₀ = 40 weigh V₁ by (2/3)² and V₀ by (1/3)², H = 40/3.
    assert control.variance == pytest.approx(3.5)
    difference = difference_interval(arm, control)
    assert difference is not None
    variance = 2 * 4 / 9 + 3.5 / 9
    assert difference.value == pytest.approx(0.15)
    assert difference.high - difference.value == pytest.approx(boundary(variance) / (40 / 3))
    assert not difference.leaves_out_zero
    assert rate_interval(rate([], [])) is None
    assert difference_interval(rate([1], [1]), rate([0], [0])) is None


def test_the_boundary_is_above_the_exact_one_sided_mixture() -> None:
    """2 √(ρ/(V + ρ)) exp(z²/2) Φ(z) >= 1/α at the boundary z √(V + ρ): Ville's inequality holds there."""
    for variance in (0.0, 1.0, 100.0, 1e6):
        for alpha in (0.001, 0.05, 0.5):
            z = boundary(variance, alpha) / math.sqrt(variance + 64)
            normal = 0.5 * math.erfc(-z / math.sqrt(2))
            mixture = 2 * math.sqrt(64 / (variance + 64)) * math.exp(z * z / 2) * normal
            assert mixture >= 1 / (alpha / 2)
    assert boundary(500) < 3.1 * math.sqrt(500), "and not far above what one look would take, 1.96"


def test_clusters_of_units_have_the_variance_of_units() -> None:
    chance = np.random.default_rng(3)
    answers = chance.poisson(3, 20_000).astype(float)
    hits = chance.binomial(answers.astype(int), chance.beta(1, 9, 20_000)).astype(float)
    clusters = chance.integers(0, CLUSTERS, 20_000)
    by_unit = Rate(hits, answers)
    added = Rate(*(np.bincount(clusters, counts, CLUSTERS) for counts in (hits, answers)))
    assert added.value == pytest.approx(by_unit.value)
    assert added.variance == pytest.approx(by_unit.variance, rel=4 * math.sqrt(2 / CLUSTERS))
    # As if every answer were a unit of its own, it would be too small.
    p = by_unit.value or 0
    assert by_unit.trials * p * (1 - p) < 0.9 * by_unit.variance


def test_a_sample_ratio_that_is_off_is_seen_and_one_that_is_right_is_not() -> None:
    assert sample_ratio_evidence([0, 0], [0.5, 0.5]) == 1
    # Two units, both in the first of two equal arms: Γ(102)/Γ(100) · Γ(200)/Γ(202) · 4 = 4 · 100 · 101 / (200 · 201).
    assert sample_ratio_evidence([2, 0], [0.5, 0.5]) == pytest.approx(4 * 100 * 101 / (200 * 201))
    assert sample_ratio_evidence([5000, 4500], [0.5, 0.5]) > 1000
    assert sample_ratio_evidence([5050, 4950], [0.5, 0.5]) < 1
    assert sample_ratio_evidence([10**8, 2 * 10**7], [0.5, 0.5]) == math.inf
    assert sample_ratio_evidence([10, 0, 1], [0.5, 0.5, 0.0]) == math.inf
    chance = np.random.default_rng(4)
    alarms = 0
    for _ in range(200):
        counts = np.cumsum(chance.multinomial(1, [0.6, 0.3, 0.1], 400), axis=0)[::4]
        alarms += any(sample_ratio_evidence(look.tolist(), [0.6, 0.3, 0.1]) >= 20 for look in counts)
    assert alarms / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
