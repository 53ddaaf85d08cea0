from __future__ import annotations

import math

import numpy as np
import pytest

from longtail.bundle.exposure import coverage, coverage_by_bucket, gini, psi


def test_coverage_by_hand() -> None:
    assert coverage(np.array([0, 2, 0, 1, 1])) == pytest.approx(3 / 5)
    assert coverage(np.array([0, 0])) == 0
    assert coverage(np.array([], np.int64)) == 0


def test_coverage_by_bucket_by_hand() -> None:
    """Two of three labels of bucket 0, one of two of bucket 1; bucket 2 has none."""
    exposures, buckets = np.array([4, 0, 1, 0, 9]), np.array([0, 0, 0, 1, 1], np.int8)
    assert coverage_by_bucket(exposures, buckets, np.array([3, 2, 0])) == pytest.approx([2 / 3, 1 / 2, 0])


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
