"""Exposures of a large catalogue are counted for a part of its labels, which tells of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.bundle.exposure import coverage, coverage_by_bucket, gini
from longtail.serving.monitoring import counted_labels
from longtail.serving.monitoring.counted_labels import CountedLabels
from longtail.serving.monitoring.release_figures import WINDOWS, ReleaseFigures
from tests.serving.monitoring.shop import answered

BUCKETS_L = np.repeat(np.array([0, 1, 2], np.int8), [30, 400, 9570])
SIZES = np.bincount(BUCKETS_L, minlength=4)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> CountedLabels:
    """A thousand of ten thousand labels: all of the head, and half of what is left of each of the others."""
    monkeypatch.setattr(counted_labels, "_MOST", 1000)
    return CountedLabels(BUCKETS_L)


def test_small_buckets_are_counted_whole_and_large_ones_evenly(part: CountedLabels) -> None:
    assert part.rows_S is not None
    assert np.bincount(BUCKETS_L[part.rows_S]).tolist() == [30, 400, 570]
    assert (np.diff(part.rows_S) > 0).all()
    tail = part.rows_S[part.rows_S >= 430]
    assert set(np.diff(tail).tolist()) == {16, 17}
    assert len(part) == 1000


def test_a_small_catalogue_is_counted_whole_and_exactly() -> None:
    whole, exposures_L = CountedLabels(BUCKETS_L), np.random.default_rng(0).poisson(0.3, 10_000)
    assert whole.rows_S is None
    rows = np.array([3, 3, 9999])
    assert whole.places(rows) is rows
    assert whole.coverage(exposures_L) == coverage(exposures_L)
    assert whole.coverage_by_bucket(exposures_L) == coverage_by_bucket(exposures_L, BUCKETS_L, SIZES)
    assert whole.gini(exposures_L) == gini(exposures_L)


def test_places_are_those_of_the_labels_counted(part: CountedLabels) -> None:
    assert part.rows_S is not None
    rows_N = np.random.default_rng(0).integers(0, 10_000, 5000)
    counted = [row for row in rows_N.tolist() if row in set(part.rows_S.tolist())]
    assert part.rows_S[part.places(rows_N)].tolist() == counted
    assert part.places(np.empty(0, np.int64)).tolist() == []


def test_figures_of_a_part_are_near_those_of_all(part: CountedLabels) -> None:
    """Means over many catalogues leave no bias, and a single one strays as far as its standard error says."""
    rng = np.random.default_rng(1)
    found, true, ginis = [], [], []
    for _ in range(300):
        popular_L = rng.lognormal(0, 1, 10_000) / np.arange(1, 10_001)
        exposures_L = rng.poisson(2000 * popular_L / popular_L.sum())
        exposures_S = exposures_L[part.rows_S]
        found.append([*part.coverage_by_bucket(exposures_S)[:3], part.coverage(exposures_S)])
        true.append([*coverage_by_bucket(exposures_L, BUCKETS_L, SIZES)[:3], coverage(exposures_L)])
        ginis.append((part.gini(exposures_S), gini(exposures_L)))
    errors = np.array(found) - np.array(true)
    assert (errors[:, :2] == 0).all()
    share = np.mean(true, axis=0)[2]
    standard_error = np.sqrt(share * (1 - share) / 570 * (1 - 570 / 9570))
    assert abs(errors[:, 2].mean()) < 4 * standard_error / np.sqrt(300)
    assert errors[:, 2].std() == pytest.approx(standard_error, rel=0.2)
    assert abs(errors[:, 3].mean()) < 4 * errors[:, 3].std() / np.sqrt(300)
    estimated, exact = np.array(ginis).T
    assert abs((estimated - exact).mean()) < 0.005


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=40))
def test_a_label_that_stands_for_several_counts_as_they_would(labels: list[tuple[int, int]]) -> None:
    exposures, each = np.array(labels).T
    alone = np.repeat(exposures, each)
    assert gini(exposures, each.astype(np.float64)) == (
        None if not alone.any() else pytest.approx(gini(alone), abs=1e-9)
    )
    assert coverage(exposures, each.astype(np.float64)) == pytest.approx(coverage(alone))


def test_files_are_of_the_labels_counted(part: CountedLabels, tmp_path: Path) -> None:
    assert part.rows_S is not None
    figures = ReleaseFigures(tmp_path, 0, BUCKETS_L, None)
    counted, other = int(part.rows_S[500]), int(part.rows_S[500]) + 1
    figures.count_answers(answered([[counted, counted], [other, 3]]), 1000.0)
    exposures_S = figures.exposures_in(WINDOWS[0], 1000.0)
    assert (len(exposures_S), exposures_S[500], exposures_S[3], exposures_S.sum()) == (1000, 2, 1, 3)
    assert sum(path.stat().st_size for path in tmp_path.glob("labels-*.ring")) < 100_000
