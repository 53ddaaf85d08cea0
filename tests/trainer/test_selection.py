"""Lists of many settings at once are those of a sort of every score.

Values are given, so that both sides add the same numbers: equal to the last tie, whatever the bounds tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from longtail.bundle.arrays import Float32, Float64, Int32, Int64
from longtail.trainer.evaluation import selection
from longtail.trainer.evaluation.selection import Selection, Values

NOTHING = np.zeros((0, 2), np.int64)
GRID = np.linspace(0, 1, 11)[:, None]
TWO_LINES = np.array([*((at, 0) for at in (-1, 0, 0.5, 1)), *((0.5, at) for at in (-1, 0.25, 2))])


class Case(NamedTuple):
    """Values float32 [B, L], columns [L, X], weights [G, X], the list length, and what is left out, int [n, 2]."""

    value_BL: Float32
    columns_LX: Float64
    weights_GX: Float64
    k: int
    without: Int64 = NOTHING


def zipf(labels: int) -> Float64:
    """Logarithms of 1 / rank, labels in no order, float64 [L, 1]."""
    return -np.log1p(np.random.default_rng(2).permutation(labels))[:, None]


def normal(labels: int, queries: int = 9) -> Float32:
    return np.random.default_rng(3).standard_normal((queries, labels)).astype(np.float32)


def steps(labels: int, queries: int = 9) -> Float32:
    """Few numbers, all exact: most scores are equal."""
    return np.random.default_rng(4).integers(-2, 3, (queries, labels)).astype(np.float32) / 4


def half(labels: int, queries: int = 9) -> Int64:
    return np.argwhere(np.random.default_rng(5).random((queries, labels)) < 0.5)


def of_queries(rows: slice, labels: int) -> Int64:
    """All labels of some of nine queries."""
    left_out = np.zeros((9, labels), bool)
    left_out[rows] = True
    return np.argwhere(left_out)


def one_of_equals(labels: int) -> Float32:
    """Normal values, but for one query that finds all labels alike."""
    value_BL = normal(labels)
    value_BL[4] = 0.25
    return value_BL


def crowded(labels: int) -> Float32:
    """All that is high stands together in the order of the column, a step lower from label to label."""
    return np.tile(np.where(zipf(labels)[:, 0] > -np.log(33), np.float32(5), np.float32(-5)), (9, 1)) + steps(labels)


whole = np.round(zipf(3000) * 4) / 4
two = np.concatenate([zipf(3000), np.random.default_rng(6).standard_normal((3000, 1))], axis=1)
CASES = {
    "like an evaluation": Case(normal(3000), zipf(3000), GRID, 3),
    "groups of four groups": Case(normal(2000), zipf(2000), GRID, 7),
    "groups of one label": Case(normal(100), zipf(100), GRID, 20),
    "no whole number of groups": Case(normal(3001), zipf(3001), GRID, 3),
    "fewer labels than places": Case(normal(5), zipf(5), GRID, 9),
    "one label": Case(normal(1), zipf(1), GRID, 1),
    "two lines": Case(normal(3000), two, TWO_LINES, 3),
    "one setting": Case(normal(3000), zipf(3000), GRID[3:4], 3),
    "a column that moves nothing": Case(normal(3000), zipf(3000), GRID[:1], 3),
    "far beyond the grid": Case(normal(3000), zipf(3000), np.array([[-1e6], [-3.0], [0], [1e-9], [1e6]]), 3),
    "equal scores": Case(steps(3000), whole, GRID[[0, 5, 10]], 3),
    "all scores equal": Case(np.zeros((9, 3000), np.float32), np.zeros((3000, 1)), GRID, 3),
    "one query of equal scores": Case(one_of_equals(3000), np.zeros((3000, 1)), GRID, 3),
    "equal where the setting undoes the value": Case(np.tile(np.float32(-whole.T), (9, 1)), whole, GRID[[0, 5, 10]], 3),
    "labels that stand twice": Case(np.tile(normal(1500), 2), np.tile(zipf(1500), (2, 1)), GRID, 3),
    "zeros of both signs": Case(np.tile(np.float32([-1, -0.0, 0]), (9, 1000)), zipf(3000), GRID[:1], 5),
    "all that is high in one group": Case(crowded(3000), zipf(3000), GRID, 3),
    "half is left out": Case(normal(3000), zipf(3000), GRID, 3, half(3000)),
    "half is left out, few labels": Case(steps(50), whole[:50], GRID, 40, half(50)),
    "all is left out": Case(normal(3000), zipf(3000), GRID, 3, of_queries(slice(9), 3000)),
    "all is left out for one": Case(normal(3000), zipf(3000), GRID, 3, of_queries(slice(4, 5), 3000)),
    "numbers far from 0": Case(normal(3000) * np.float32(1e-3) + np.float32(4e3), zipf(3000) - 1e5, GRID, 3),
}  # fmt: skip


def written(value_BL: Float32, order: Int64) -> Callable[[slice, Float32], None]:
    def write(places: slice, values: Float32) -> None:
        values[:] = value_BL[:, order[places]].T

    return write


def values_of(case: Case, selection: Selection) -> Values:
    return selection.values(len(case.value_BL), written(case.value_BL, selection.order), case.without)


def a_sort(case: Case) -> Int32:
    """Every score, sorted; equal ones by row."""
    tops = []
    for weights_X in case.weights_GX:
        gain_L = sum(weight * column for weight, column in zip(weights_X, case.columns_LX.T, strict=True))
        scores_BL = (case.value_BL + gain_L).astype(np.float32)
        scores_BL[*case.without.T] = -np.inf
        order_BL = np.argsort(-scores_BL, axis=1, kind="stable")
        top_BL = np.where(np.isneginf(np.take_along_axis(scores_BL, order_BL, axis=1)), -1, order_BL)
        tops.append(np.pad(top_BL, ((0, 0), (0, case.k)), constant_values=-1)[:, : case.k])
    return np.stack(tops)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lists_are_those_of_a_sort(case: Case) -> None:
    made = Selection(case.columns_LX, case.weights_GX, case.k)

    np.testing.assert_array_equal(made.lists(values_of(case, made)), a_sort(case))


def test_some_settings_and_other_values() -> None:
    """Of a next block, of fewer queries, whose values are written over the first's."""
    case = CASES["two lines"]
    made = Selection(case.columns_LX, case.weights_GX, case.k)
    made.lists(values_of(case, made))
    fewer = case._replace(value_BL=-case.value_BL[:4], without=half(3000, 4))

    top_GBK = made.lists(values_of(fewer, made), slice(2, 5))

    np.testing.assert_array_equal(top_GBK, a_sort(fewer)[2:5])


@pytest.mark.parametrize("chunk", [1024, 8])
def test_the_sum_of_exponentials_is_over_all_that_may_be_listed(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_CHUNK", chunk)
    case = CASES["half is left out, few labels"]
    made = Selection(case.columns_LX, case.weights_GX, case.k)
    values = values_of(case._replace(without=of_queries(slice(4), 50)), made)

    log_z_B = made.log_sum_exp(values, made.gain(7), 0.5)

    scores_BL = (case.value_BL + 0.7 * case.columns_LX[:, 0]) / 0.5
    np.testing.assert_allclose(log_z_B[4:], np.logaddexp.reduce(scores_BL, axis=1)[4:], rtol=1e-6)
    assert np.isneginf(log_z_B[:4]).all()
