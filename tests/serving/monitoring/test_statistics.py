from __future__ import annotations

import math

import numpy as np
import pytest

from longtail.serving.monitoring.counters import LATENCY_EDGES
from longtail.serving.monitoring.intervals import binomial_interval
from longtail.serving.monitoring.report import latency_ms


def test_latency_quantiles_are_within_a_bin() -> None:
    durations = np.random.default_rng(0).lognormal(math.log(0.004), 0.7, 10_000)
    bins = np.bincount(np.searchsorted(LATENCY_EDGES, durations), minlength=42)
    for quantile in (0.5, 0.99):
        expected = float(np.quantile(durations, quantile)) * 1000
        assert latency_ms(bins, quantile) == pytest.approx(expected, rel=0.05)
    assert latency_ms(np.zeros(42), 0.5) is None


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (1, 1), (3, 10), (0, 200), (20, 20_000), (19_000, 20_000)])
@pytest.mark.parametrize("confidence", [0.95, 0.999])
def test_binomial_intervals_are_exact(hits: int, trials: int, confidence: float) -> None:
    from scipy.stats import binomtest  # which takes seconds, of every process that collects tests

    expected = binomtest(hits, trials).proportion_ci(confidence, "exact")
    assert binomial_interval(hits / trials, trials, confidence) == pytest.approx(
        (expected.low, expected.high), abs=1e-7
    )


def test_interval_without_trials_is_0_to_1() -> None:
    assert binomial_interval(0.0, 0, 0.95) == (0.0, 1.0)
