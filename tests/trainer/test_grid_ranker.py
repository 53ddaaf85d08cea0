"""Lists of many settings equal a sort of all scores, to the last tie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from longtail.bundle.arrays import Float32, Float64, Int32, Int64
from longtail.trainer.evaluation import grid_ranker
from longtail.trainer.evaluation.grid_ranker import GridRanker, Values

NOTHING = np.zeros((0, 2), np.int64)
GRID = np.linspace(0, 1, 11)[:, None]
TWO_LINES = np.array([*((at, 0) for at in (-1, 0, 0.5, 1)), *((0.5, at) for at in (-1, 0.25, 2))])


class RankingCase(NamedTuple):
    """Values float32 [B, L], columns [L, X], weights [G, X], list length, and excluded (query, label), int [n, 2]."""

    value_BL: Float32
    columns_LX: Float64
    weights_GX: Float64
    k: int
    excluded: Int64 = NOTHING


def zipf(labels: int) -> Float64:
    """Logarithms of 1 / rank, labels in no order, float64 [L, 1]."""
    return -np.log1p(np.random.default_rng(2).permutation(labels))[:, None]


def normal(labels: int, queries: int = 9) -> Float32:
    return np.random.default_rng(3).standard_normal((queries, labels)).astype(np.float32)


def steps(labels: int, queries: int = 9) -> Float32:
    """Few numbers, all exact: most scores are equal."""
    return np.random.default_rng(4).integers(-2, 3, (queries, labels)).astype(np.float32) / 4


def exclude_half(labels: int, queries: int = 9) -> Int64:
    return np.argwhere(np.random.default_rng(5).random((queries, labels)) < 0.5)


def exclude_rows(rows: slice, labels: int) -> Int64:
    """All labels of some of nine queries."""
    excluded = np.zeros((9, labels), bool)
    excluded[rows] = True
    return np.argwhere(excluded)


def normal_but_one_query(labels: int) -> Float32:
    """Normal values, but all labels are equal for one query."""
    value_BL = normal(labels)
    value_BL[4] = 0.25
    return value_BL


def crowded(labels: int) -> Float32:
    """High values are neighbours in the order of the column."""
    return np.tile(np.where(zipf(labels)[:, 0] > -np.log(33), np.float32(5), np.float32(-5)), (9, 1)) + steps(labels)


rounded = np.round(zipf(3000) * 4) / 4
two_columns = np.concatenate([zipf(3000), np.random.default_rng(6).standard_normal((3000, 1))], axis=1)
CASES = {
    "zipf": RankingCase(normal(3000), zipf(3000), GRID, 3),
    "2000 labels": RankingCase(normal(2000), zipf(2000), GRID, 7),
    "groups of one label": RankingCase(normal(100), zipf(100), GRID, 20),
    "last group not full": RankingCase(normal(3001), zipf(3001), GRID, 3),
    "fewer labels than k": RankingCase(normal(5), zipf(5), GRID, 9),
    "one label": RankingCase(normal(1), zipf(1), GRID, 1),
    "two lines": RankingCase(normal(3000), two_columns, TWO_LINES, 3),
    "one setting": RankingCase(normal(3000), zipf(3000), GRID[3:4], 3),
    "a column that moves nothing": RankingCase(normal(3000), zipf(3000), GRID[:1], 3),
    "far beyond the grid": RankingCase(normal(3000), zipf(3000), np.array([[-1e6], [-3.0], [0], [1e-9], [1e6]]), 3),
    "equal scores": RankingCase(steps(3000), rounded, GRID[[0, 5, 10]], 3),
    "all scores equal": RankingCase(np.zeros((9, 3000), np.float32), np.zeros((3000, 1)), GRID, 3),
    "one query of equal scores": RankingCase(normal_but_one_query(3000), np.zeros((3000, 1)), GRID, 3),
    "setting undoes the value": RankingCase(np.tile(np.float32(-rounded.T), (9, 1)), rounded, GRID[[0, 5, 10]], 3),
    "every label twice": RankingCase(np.tile(normal(1500), 2), np.tile(zipf(1500), (2, 1)), GRID, 3),
    "zeros of both signs": RankingCase(np.tile(np.float32([-1, -0.0, 0]), (9, 1000)), zipf(3000), GRID[:1], 5),
    "high values in one group": RankingCase(crowded(3000), zipf(3000), GRID, 3),
    "half excluded": RankingCase(normal(3000), zipf(3000), GRID, 3, exclude_half(3000)),
    "half excluded, few labels": RankingCase(steps(50), rounded[:50], GRID, 40, exclude_half(50)),
    "all excluded": RankingCase(normal(3000), zipf(3000), GRID, 3, exclude_rows(slice(9), 3000)),
    "all excluded for one query": RankingCase(normal(3000), zipf(3000), GRID, 3, exclude_rows(slice(4, 5), 3000)),
    "numbers far from 0": RankingCase(normal(3000) * np.float32(1e-3) + np.float32(4e3), zipf(3000) - 1e5, GRID, 3),
}  # fmt: skip


def compute_values(case: RankingCase, ranker: GridRanker) -> Values:
    def write(chunk: slice, values: Float32) -> None:
        values[:] = case.value_BL[:, ranker.order[chunk]].T

    return ranker.values(len(case.value_BL), write, case.excluded)


def sort_scores(case: RankingCase) -> Int32:
    """All labels by score, equal scores by row."""
    tops = []
    for weights_X in case.weights_GX:
        gain_L = sum(weight * column for weight, column in zip(weights_X, case.columns_LX.T, strict=True))
        scores_BL = (case.value_BL + gain_L).astype(np.float32)
        scores_BL[*case.excluded.T] = -np.inf
        order_BL = np.argsort(-scores_BL, axis=1, kind="stable")
        top_BL = np.where(np.isneginf(np.take_along_axis(scores_BL, order_BL, axis=1)), -1, order_BL)
        tops.append(np.pad(top_BL, ((0, 0), (0, case.k)), constant_values=-1)[:, : case.k])
    return np.stack(tops)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lists_equal_a_full_ranking(case: RankingCase) -> None:
    ranker = GridRanker(case.columns_LX, case.weights_GX, case.k)

    np.testing.assert_array_equal(ranker.lists(compute_values(case, ranker)), sort_scores(case))


def test_some_settings_of_a_second_block() -> None:
    """A second block has fewer queries and writes its values over those of the first."""
    case = CASES["two lines"]
    ranker = GridRanker(case.columns_LX, case.weights_GX, case.k)
    ranker.lists(compute_values(case, ranker))
    fewer = case._replace(value_BL=-case.value_BL[:4], excluded=exclude_half(3000, 4))

    top_GBK = ranker.lists(compute_values(fewer, ranker), slice(2, 5))

    np.testing.assert_array_equal(top_GBK, sort_scores(fewer)[2:5])


@pytest.mark.parametrize("chunk", [1024, 8])
def test_log_sum_exp_skips_excluded_labels(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_ranker, "_CHUNK", chunk)
    case = CASES["half excluded, few labels"]
    ranker = GridRanker(case.columns_LX, case.weights_GX, case.k)
    values = compute_values(case._replace(excluded=exclude_rows(slice(4), 50)), ranker)

    log_z_B = ranker.log_sum_exp(values, ranker.gain(7), 0.5)

    scores_BL = (case.value_BL + 0.7 * case.columns_LX[:, 0]) / 0.5
    np.testing.assert_allclose(log_z_B[4:], np.logaddexp.reduce(scores_BL, axis=1)[4:], rtol=1e-6)
    assert np.isneginf(log_z_B[:4]).all()
