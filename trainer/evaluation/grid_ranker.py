"""Compute exact top-k lists at many settings from one pass over values.

A setting adds the same gain to a label for every query: `score = value + Σ_x weight_x · column_x`. Labels are sorted by
the columns, so that a group of neighbours gains almost alike. The K-th highest `highest value + least gain` of a
query's groups is at most its K-th best score, so a value below this bound less the group's largest gain is in no list
of the setting. All labels that no setting excludes are ranked. With equal scores these may be all labels.

Legend: `L` labels, `P` sorted positions, padded to groups, `X` columns, `B` queries, `G` settings, `K` list length,
`F` groups, `C` most candidates of a query, `n` candidates of all queries, `w` labels of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from longtail.bundle.arrays import Array, Float32, Float64, Int32, Int64

Write = Callable[[slice, Float32], None]
"""Writes the values of the labels at some positions, for all queries, into float32 [positions, B]."""

_GROUP = 32
"""Most labels of a group."""
_CHUNK = 2048
"""Positions whose values are computed at a time; their group maxima are then read from the cache."""
_SCORES = 1 << 21
"""Most scores of a block of queries, so that the arrays stay small if no label can be excluded."""
_SLACK = np.float32(2.0**-20)
"""Relative margin of bounds, larger than the sum of their float32 roundings of 2⁻²⁴ each."""
_LOWEST = np.finfo(np.float32).min


class Values(NamedTuple):
    """Hold values of sorted labels and the maxima of groups."""

    labels_PB: Float32
    groups_BF: Float32


class GridRanker:
    """Rank labels at several settings.

    Args:
        columns_LX: columns of every label, float64.
        weights_GX: weights of the columns at every setting, float64.

    Attributes:
        order: label at every position, int64 [P]; the last label repeats if the last group is not full.
    """

    def __init__(self, columns_LX: Float64, weights_GX: Float64, k: int) -> None:
        self._labels, self._k, self._weights_GX = len(columns_LX), k, weights_GX
        # At least 2·K groups, because the K-th highest group gives the bound.
        self._group = group = 1 << int(np.clip(np.log2(self._labels / (2 * k)), 0, np.log2(_GROUP)))
        spread_X = np.ptp(columns_LX, axis=0) * np.abs(weights_GX).max(axis=0)
        order_L = np.lexsort(columns_LX[:, spread_X.argsort()].T)  # equals of the widest column by the next
        self.order = np.pad(order_L, (0, -self._labels % group), mode="edge")
        self._position_L = np.empty(self._labels, np.int64)
        self._position_L[order_L] = np.arange(self._labels)
        self._columns_XP = np.ascontiguousarray(columns_LX[self.order].T)
        gains = [self.gain(g).reshape(-1, group) for g in range(len(weights_GX))]
        self._least_GF = np.stack([gain_Fw.min(axis=1).astype(np.float32) for gain_Fw in gains])
        self._most_GF = np.stack([gain_Fw.max(axis=1).astype(np.float32) for gain_Fw in gains])
        self._largest_G = (np.abs(weights_GX) @ np.abs(columns_LX).max(axis=0)).astype(np.float32)
        self._buffer = np.empty(0, np.float32)
        self._blas = ThreadpoolController().select(user_api="blas")
        self._threads = max((library["num_threads"] for library in self._blas.info()), default=1)

    def values(self, queries: int, write: Write, excluded: Int64) -> Values:
        """Compute values and group maxima, reusing the array of an earlier call.

        Args:
            excluded: (query of B, label) that may not be in a list, int [n, 2].
        """
        if len(self._buffer) < len(self.order) * queries:
            self._buffer = np.empty(len(self.order) * queries, np.float32)
        values_PB = self._buffer[: len(self.order) * queries].reshape(-1, queries)
        groups_BF = np.empty((queries, len(values_PB) // self._group), np.float32)
        position_n = self._position_L[excluded[:, 1]]
        by_position = np.argsort(position_n)
        position_n, query_n = position_n[by_position], excluded[by_position, 0]

        def fill(chunk: slice) -> None:
            values = values_PB[chunk]
            write(chunk, values)
            in_chunk = slice(*np.searchsorted(position_n, (chunk.start, chunk.stop)))
            values[position_n[in_chunk] - chunk.start, query_n[in_chunk]] = -np.inf
            values[max(self._labels - chunk.start, 0) :] = -np.inf
            highest = values.reshape(-1, self._group, queries).max(axis=1)
            groups_BF[:, chunk.start // self._group : chunk.stop // self._group] = highest.T

        self._run(fill, len(values_PB), _CHUNK)
        return Values(values_PB, groups_BF)

    def lists(self, values: Values, settings: slice = slice(None)) -> Int32:
        """Return the best labels, equal scores by row, int32 [G, B, K]; −1 if only −inf is left."""
        queries = len(values.groups_BF)
        top_GBK = np.empty((len(self._weights_GX[settings]), queries, self._k), np.int32)
        step = int(np.clip(_SCORES // len(self.order), 1, 256))
        self._run(lambda rows: self._rank(values, rows, settings, top_GBK), queries, step)
        return top_GBK

    def gain(self, g: int) -> Float64:
        """Return a setting's gain by position, float64 [P]."""
        gain_P: Float64 = _weigh(self._weights_GX[g], self._columns_XP)
        return gain_P

    def positions(self, label_n: Int64) -> Int64:
        """Return the sorted positions of labels, int64 [n]."""
        return self._position_L[label_n]

    def log_sum_exp(self, values: Values, gain_P: Float64, temperature: float) -> Float64:
        """Compute log Σ exp((value + gain) / T) of every query, float64 [B]."""
        chunks_CB = np.empty((-(-len(gain_P) // _CHUNK), values.labels_PB.shape[1]))

        def sum_up(chunk: slice) -> None:
            scores = (values.labels_PB[chunk] + gain_P[chunk, None].astype(np.float32)) / np.float32(temperature)
            highest_B = np.maximum(scores.max(axis=0), _LOWEST)
            total_B = np.exp(scores - highest_B).sum(axis=0, dtype=np.float64)
            with np.errstate(divide="ignore"):  # all labels of the chunk may be excluded
                chunks_CB[chunk.start // _CHUNK] = highest_B + np.log(total_B)

        self._run(sum_up, len(gain_P), _CHUNK)
        log_z_B: Float64 = np.logaddexp.reduce(chunks_CB, axis=0)
        return log_z_B

    def _run(self, work: Callable[[slice], None], count: int, step: int) -> None:
        """Run `work` on slices in parallel, with one BLAS thread each."""
        slices = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        with self._blas.limit(limits=1), ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, slices))

    def _rank(self, values: Values, rows: slice, settings: slice, top_GBK: Int32) -> None:
        """Write the lists of some queries."""
        groups_BF = values.groups_BF[rows]
        needed_BF = self._needed(groups_BF, settings)
        row_n, group_n = np.nonzero(groups_BF >= needed_BF)
        position_nw = group_n[:, None] * self._group + np.arange(self._group)
        value_nw = values.labels_PB[:, rows][position_nw, row_n[:, None]]
        listed_nw = value_nw >= needed_BF[row_n, group_n][:, None]
        row_n = row_n.repeat(listed_nw.sum(axis=1))
        value_BC = padded(row_n, value_nw[listed_nw], len(groups_BF), -np.inf)
        position_BC = padded(row_n, position_nw[listed_nw], len(groups_BF), 0)
        columns_XBC, label_BC = self._columns_XP.take(position_BC, axis=1), self.order.take(position_BC)
        for weights_X, top_BK in zip(self._weights_GX[settings], top_GBK, strict=True):
            score_BC = (value_BC + _weigh(weights_X, columns_XBC)).astype(np.float32)
            top_BK[rows] = best(score_BC, label_BC, self._k)

    def _needed(self, groups_BF: Float32, settings: slice) -> Float32:
        """Compute the least value that may be listed, by group, float32 [B, F]."""
        if groups_BF.shape[1] < self._k:
            return np.full(groups_BF.shape, _LOWEST)
        needed_BF = np.full(groups_BF.shape, np.inf, np.float32)
        for least_F, most_F, largest in zip(
            self._least_GF[settings], self._most_GF[settings], self._largest_G[settings], strict=True
        ):
            floor_B = np.partition(groups_BF + least_F, -self._k, axis=1)[:, -self._k]
            floor_B -= _SLACK * (np.abs(floor_B) + largest)
            np.minimum(needed_BF, floor_B[:, None] - most_F, out=needed_BF)
        # Above −∞, the value of excluded labels, which are never candidates.
        return np.maximum(needed_BF, _LOWEST)


def _weigh(weights_X: Float64, columns_X: Iterable[Array]) -> Float64:
    """Compute `Σ_x weight_x · column_x`."""
    return reduce(np.add, (weight * column for weight, column in zip(weights_X, columns_X, strict=True)))


def padded(row_n: Int64, value_n: Array, rows: int, fill: float) -> Array:
    """Pad values by row to [rows, most of a row]."""
    counts = np.bincount(row_n, minlength=rows)
    if len(value_n) == rows * counts.max():
        return value_n.reshape(rows, counts.max())
    padded = np.full((rows, counts.max()), fill, value_n.dtype)
    padded[row_n, np.arange(len(row_n)) - np.repeat(np.cumsum(counts) - counts, counts)] = value_n
    return padded


def best(score_BC: Float32, label_BC: Int64, k: int) -> Int32:
    """Select the best labels, equal scores by row, int32 [B, K]; −1 if only −inf is left."""
    top_BK, k = np.full((len(score_BC), k), -1, np.int32), min(k, score_BC.shape[1])
    if not k:
        return top_BK
    kth_B = np.maximum(np.partition(score_BC, -k, axis=1)[:, -k], _LOWEST)
    listed = np.divmod(np.flatnonzero(score_BC >= kth_B[:, None]), score_BC.shape[1])
    bits = (score_BC[listed] + np.float32(0)).view(np.uint32)  # −0 is 0
    # As integers these bits fall where scores rise, so that one sort orders by score, then by label.
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = falling << np.uint64(32) | label_BC[listed].astype(np.uint64)
    keys_BC = padded(listed[0], keys, len(top_BK), np.iinfo(np.uint64).max)
    keys_BC.sort(axis=1)
    sorted_BC = keys_BC[:, :k].astype(np.uint32).view(np.int32)  # of the padding, −1
    top_BK[:, : sorted_BC.shape[1]] = sorted_BC
    return top_BK
