from __future__ import annotations

import math

import numpy as np
import pytest

from longtail.serving.monitoring.statistics import gini, latency_bin, latency_ms, psi, wilson


def test_psi_by_hand() -> None:
    # Shares 0.8, 0.1, 0.1 against 0.5, 0.25, 0.25: 0.3·ln 1.6 + 2·(−0.15)·ln 0.4.
    expected = 0.3 * math.log(1.6) - 0.3 * math.log(0.4)
    assert psi(np.array([800, 100, 100]), (0.5, 0.25, 0.25)) == pytest.approx(expected)
    assert psi(np.array([500, 250, 250]), (0.5, 0.25, 0.25)) == 0


def test_psi_of_an_empty_cell_is_finite() -> None:
    # 1 and 0 (taken as 0.0001) against ½ and ½.
    expected = 0.5 * math.log(2) + (0.0001 - 0.5) * math.log(0.0002)
    assert psi(np.array([1000, 0]), (0.5, 0.5)) == pytest.approx(expected)
    # The other side's empty cell weighs the same.
    assert psi(np.array([500, 500]), (1.0, 0.0)) == pytest.approx(expected)


def test_psi_of_few_observations_is_undefined() -> None:
    assert psi(np.array([199, 0]), (0.5, 0.5)) is None
    assert psi(np.array([200, 0]), (0.5, 0.5)) is not None


def test_gini_by_hand() -> None:
    assert gini(np.array([3, 3, 3, 3], np.uint32)) == pytest.approx(0)
    assert gini(np.array([0, 7, 0, 0], np.uint32)) == pytest.approx(3 / 4)
    # 0, 1, 2, 5: 2·(2·1 + 3·2 + 4·5) / (4·8) − 5/4.
    assert gini(np.array([5, 0, 2, 1], np.uint32)) == pytest.approx(2 * 28 / 32 - 5 / 4)
    assert gini(np.zeros(4, np.uint32)) is None


def test_gini_is_half_the_relative_mean_difference() -> None:
    counts = (np.random.default_rng(0).zipf(1.5, 300) - 1).clip(max=10**6)
    difference = np.abs(counts[:, None] - counts[None, :]).mean()
    assert gini(counts.astype(np.uint32)) == pytest.approx(difference / (2 * counts.mean()))


def test_wilson_by_hand() -> None:
    # 8 of 10, a textbook case: 0.490 … 0.943.
    low, high = wilson(8, 10) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.4902, abs=5e-5), pytest.approx(0.9433, abs=5e-5))
    # None of n: from 0 to z² / (n + z²), z = 1.96.
    assert wilson(0, 10) == (0.0, pytest.approx(3.8415 / 13.8415, abs=1e-4))
    assert wilson(10, 10) == (pytest.approx(10 / 13.8415, abs=1e-4), pytest.approx(1))
    assert wilson(0, 0) is None


def test_latency_quantiles_are_right_to_a_bin() -> None:
    durations = np.random.default_rng(0).lognormal(math.log(0.004), 0.7, 10_000)
    bins = np.bincount([latency_bin(seconds) for seconds in durations], minlength=42)
    for quantile in (0.5, 0.99):
        expected = float(np.quantile(durations, quantile)) * 1000
        assert latency_ms(bins, quantile) == pytest.approx(expected, rel=0.05)
    assert latency_ms(np.zeros(42), 0.5) is None


@pytest.mark.parametrize(
    ("seconds", "low", "high"), [(0.0, 0, 0.1), (0.00005, 0, 0.1), (0.0001, 0.1, 0.134), (0.02, 17.7, 23.8)]
)
def test_one_duration_is_inside_its_bin(seconds: float, low: float, high: float) -> None:
    bins = np.zeros(42)
    bins[latency_bin(seconds)] = 1
    assert low <= (latency_ms(bins, 0.5) or 0) <= high


def test_a_duration_beyond_the_bins_counts_as_the_last() -> None:
    bins = np.zeros(42)
    bins[latency_bin(60)] = 1
    assert latency_ms(bins, 0.99) == 10_000
