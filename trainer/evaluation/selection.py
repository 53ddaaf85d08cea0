"""The exact top-k of queries at many settings, from one pass over their values.

What a setting adds to a label's value is the same for every query: `score = value + Σ_x weight_x · column_x`. Labels
stand in the order of the columns, the widest first, so that neighbours gain alike, and the highest value of a group of
neighbours tells nearly as much at every setting: the K-th highest of `highest value + least gain` over groups is no
more than the K-th best score, and a value below that less the most that its group gains is in no list of that setting.
Groups of groups, then groups, then labels are looked into where a value may be in the list of any setting; the labels
that are left are ranked by themselves. Where bounds tell nothing, as of equal scores, that is every label: nothing is
estimated.

Legend: `L` labels, `P` places in their order, a whole number of groups, `X` columns, `B` queries, `b` some of them, `G`
settings, `K` list length, `F` groups, `C` groups of groups, `n` nodes (groups of groups, groups or labels) of all
queries, `N` the most nodes of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce

import numpy as np
from threadpoolctl import ThreadpoolController

from longtail.bundle.arrays import Array, Float32, Float64, Int32, Int64

Write = Callable[[slice, Float32], None]
"""Writes the values of the labels at some places, for all queries, into float32 [places, B]."""

_GROUP, _OF_GROUPS = 8, 16
"""Labels of a group, and groups of a group of groups, at most."""
_CHUNK = 2048
"""Places whose values are computed at a time, so that they are in the cache when the highest are looked for."""
_QUERIES = 256
"""Queries whose lists are made at a time, at most."""
_QUICK = 512
"""Values of a row up to which NumPy finds the K-th highest several times as fast for each."""
_LOOKED_INTO = 1 << 21
"""Most nodes that are expanded at a time, unless one query has more."""
_SLACK = np.float32(2.0**-20)
"""Relative margin of bounds, larger than the sum of their float32 roundings of 2⁻²⁴ each."""
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True)
class Values:
    """Values of labels in order, −inf for excluded labels; maxima of groups, and of groups of groups."""

    of_labels_PB: Float32
    of_groups_BF: Float32
    of_both_BC: Float32

    def below_both(self, row_n: Int64, node_n: Int64, within: int) -> Float32:
        """Return the maxima of the groups within n groups of groups, each of one query, float32 [n, within]."""
        both_n = row_n * self.of_both_BC.shape[1] + node_n
        below_nW: Float32 = self.of_groups_BF.reshape(-1, within).take(both_n, axis=0)
        return below_nW

    def below_groups(self, row_n: Int64, node_n: Int64, within: int) -> Float32:
        """Return the values of the labels within n groups, each of one query, float32 [n, within]."""
        queries = self.of_labels_PB.shape[1]
        first_n = node_n * (within * queries) + row_n
        place_nW = first_n[:, None] + np.arange(0, within * queries, queries)
        below_nW: Float32 = self.of_labels_PB.reshape(-1).take(place_nW)
        return below_nW


class Selection:
    """What makes lists of length K at some settings.

    Args:
        columns_LX: of every label, float64.
        weights_GX: of the columns at every setting, float64.

    Attributes:
        order: label at every place, int64 [P]; the last label again where labels are no whole number of groups.
    """

    def __init__(self, columns_LX: Float64, weights_GX: Float64, k: int) -> None:
        self._labels, self._k, self._weights_GX = len(columns_LX), k, weights_GX
        both = 1 << int(np.clip(np.log2(self._labels / (2 * k)), 0, np.log2(_GROUP * _OF_GROUPS)))
        self._sizes = both, min(both, _GROUP), 1
        spread_X = np.ptp(columns_LX, axis=0) * np.abs(weights_GX).max(axis=0)
        order_L = np.lexsort(columns_LX[:, spread_X.argsort()].T)  # equals of the widest column by the next
        self.order = np.pad(order_L, (0, -self._labels % both), mode="edge")
        self._place_L = np.empty(self._labels, np.int64)
        self._place_L[order_L] = np.arange(self._labels)
        self._columns_XP = np.ascontiguousarray(columns_LX[self.order].T)
        grouped = [self._columns_XP.reshape(len(self._columns_XP), -1, size) for size in self._sizes]
        self._low = [columns.min(axis=2).astype(np.float32) for columns in grouped]
        self._high = [columns.max(axis=2).astype(np.float32) for columns in grouped]
        self._largest_G = (np.abs(weights_GX) @ np.abs(columns_LX).max(axis=0)).astype(np.float32)
        self._buffer = np.empty(0, np.float32)
        self._blas = ThreadpoolController().select(user_api="blas")
        self._threads = max((library["num_threads"] for library in self._blas.info()), default=1)

    def values(self, queries: int, write: Write, without: Int64) -> Values:
        """Have values written, over those of an earlier call, and find the highest of every group.

        Args:
            without: what must not be in a list, (query of B, label), int [n, 2].
        """
        if len(self._buffer) < len(self.order) * queries:
            self._buffer = np.empty(len(self.order) * queries, np.float32)
        values_PB = self._buffer[: len(self.order) * queries].reshape(-1, queries)
        both, group, _ = self._sizes
        of_groups_BF = np.empty((queries, len(values_PB) // group), np.float32)
        of_both_BC = np.empty((queries, len(values_PB) // both), np.float32)
        place_n = self._place_L[without[:, 1]]
        by_place = np.argsort(place_n)
        place_n, query_n = place_n[by_place], without[by_place, 0]

        def fill(chunk: slice) -> None:
            values = values_PB[chunk]
            write(chunk, values)
            here = slice(*np.searchsorted(place_n, (chunk.start, chunk.stop)))
            values[place_n[here] - chunk.start, query_n[here]] = -np.inf
            values[max(self._labels - chunk.start, 0) :] = -np.inf
            of_groups = values.reshape(-1, group, queries).max(axis=1)
            of_groups_BF[:, chunk.start // group : chunk.stop // group] = of_groups.T
            of_both = of_groups.reshape(-1, both // group, queries).max(axis=1)
            of_both_BC[:, chunk.start // both : chunk.stop // both] = of_both.T

        self._each(fill, len(values_PB), max(_CHUNK, both))
        return Values(values_PB, of_groups_BF, of_both_BC)

    def lists(self, values: Values, settings: slice = slice(None)) -> Int32:
        """Return the labels of the highest scores, best first, equal ones by row, int32 [G, B, K]; −1 where −inf is
        left."""
        queries = len(values.of_both_BC)
        top_GBK = np.empty((len(self._weights_GX[settings]), queries, self._k), np.int32)
        self._each(lambda rows: self._rank(values, rows, settings, top_GBK), queries, _QUERIES)
        return top_GBK

    def gain(self, at: int) -> Float64:
        """Return what a setting adds to the values of the labels in their order, float64 [P]."""
        gain_P: Float64 = self._weights_GX[at] @ self._columns_XP
        return gain_P

    def places(self, label_n: Int64) -> Int64:
        """Return where labels stand in their order, int64 [n]."""
        return self._place_L[label_n]

    def log_sum_exp(self, values: Values, gain_P: Float64, temperature: float) -> Float64:
        """Of `(value + gain) / T` over all labels of every query, float64 [B]."""
        of_chunks = np.empty((-(-len(gain_P) // _CHUNK), values.of_labels_PB.shape[1]))

        def sum_up(chunk: slice) -> None:
            scores = (values.of_labels_PB[chunk] + gain_P[chunk, None].astype(np.float32)) / np.float32(temperature)
            highest_B = np.maximum(scores.max(axis=0), _LOWEST)
            total_B = np.exp(scores - highest_B).sum(axis=0, dtype=np.float64)
            with np.errstate(divide="ignore"):  # of a chunk that was all seen
                of_chunks[chunk.start // _CHUNK] = highest_B + np.log(total_B)

        self._each(sum_up, len(gain_P), _CHUNK)
        log_z_B: Float64 = np.logaddexp.reduce(of_chunks, axis=0)
        return log_z_B

    def _each(self, work: Callable[[slice], None], count: int, step: int) -> None:
        """Run `work` on slices of `step` rows in parallel, with BLAS limited to one thread in each."""
        slices = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        with self._blas.limit(limits=1), ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, slices))

    def _rank(self, values: Values, rows: slice, settings: slice, top_GBK: Int32) -> None:
        """Write the lists of some queries."""
        highest_bN, queries = values.of_both_BC[rows], rows.stop - rows.start
        node_bN = np.broadcast_to(np.arange(highest_bN.shape[1]), highest_bN.shape)
        for level, below in enumerate((values.below_both, values.below_groups)):
            needed_bN = self._needed(highest_bN, node_bN, level, settings)
            kept_n = np.flatnonzero(highest_bN >= needed_bN)
            row_n, within = kept_n // highest_bN.shape[1], self._sizes[level] // self._sizes[level + 1]
            if queries > 1 and np.bincount(row_n, minlength=queries).max() * queries * within > _LOOKED_INTO:
                middle = (rows.start + rows.stop) // 2
                self._rank(values, slice(rows.start, middle), settings, top_GBK)
                self._rank(values, slice(middle, rows.stop), settings, top_GBK)
                return
            node_n = node_bN.reshape(-1).take(kept_n)
            value_nW = below(rows.start + row_n, node_n, within)
            kept = np.flatnonzero(value_nW >= needed_bN.reshape(-1).take(kept_n)[:, None])
            of = kept // within
            node = node_n.take(of) * within + kept % within
            highest_bN = padded(row_n.take(of), value_nW.reshape(-1).take(kept), queries, -np.inf)
            node_bN = padded(row_n.take(of), node, queries, 0)
        columns_XbN, label_bN = self._columns_XP.take(node_bN, axis=1), self.order.take(node_bN)
        for weights_X, top_BK in zip(self._weights_GX[settings], top_GBK, strict=True):
            score_bN = (highest_bN + _weighted(weights_X, columns_XbN)).astype(np.float32)
            top_BK[rows] = best(score_bN, label_bN, self._k)

    def _needed(self, highest_bN: Float32, node_bN: Int64, level: int, settings: slice) -> Float32:
        """Return the least value with which something below a node may be in the list of a setting, float32 [b, N]."""
        if highest_bN.shape[1] < self._k:
            return np.full(highest_bN.shape, _LOWEST)
        nodes = node_bN[:1] if level == 0 else node_bN
        low_XbN, high_XbN = self._low[level].take(nodes, axis=1), self._high[level].take(nodes, axis=1)
        needed_bN = np.full(highest_bN.shape, np.inf, np.float32)
        for weights_X, largest in zip(
            self._weights_GX[settings].astype(np.float32), self._largest_G[settings], strict=True
        ):
            ends = [
                (low, high) if weight >= 0 else (high, low)
                for weight, low, high in zip(weights_X, low_XbN, high_XbN, strict=True)
            ]
            least_bN, most_bN = (_weighted(weights_X, columns) for columns in zip(*ends, strict=True))
            floor_b = _kth_highest(highest_bN + least_bN, self._k)
            floor_b -= _SLACK * (np.abs(floor_b) + largest)
            np.minimum(needed_bN, floor_b[:, None] - most_bN, out=needed_bN)
        return np.maximum(needed_bN, _LOWEST)


def _weighted(weights_X: Array, columns_X: Iterable[Array]) -> Array:
    """`Σ_x weight_x · column_x`."""
    return reduce(np.add, (weight * column for weight, column in zip(weights_X, columns_X, strict=True)))


def _kth_highest(bounds_bN: Float32, k: int) -> Float32:
    """Of every row, float32 [b], or of the higher ones of pairs, which is no more; the bounds change their places."""
    while (columns := bounds_bN.shape[1]) > max(_QUICK, 2 * k):
        half = max(_QUICK, -(-columns // 2))
        np.maximum(bounds_bN[:, : columns - half], bounds_bN[:, half:], out=bounds_bN[:, : columns - half])
        bounds_bN = bounds_bN[:, :half]
    bounds_bN.partition(columns - k, axis=1)
    return bounds_bN[:, columns - k]


def padded(row_n: Int64, of_n: Array, rows: int, fill: float) -> Array:
    """Return what rows have, in the order of rows, as [rows, N]."""
    counts = np.bincount(row_n, minlength=rows)
    if len(of_n) == rows * counts.max():
        return of_n.reshape(rows, counts.max())
    padded = np.full((rows, counts.max()), fill, of_n.dtype)
    padded[row_n, np.arange(len(row_n)) - np.repeat(np.cumsum(counts) - counts, counts)] = of_n
    return padded


def best(score_bN: Float32, label_bN: Int64, k: int) -> Int32:
    """Return the labels of the highest scores, equal ones by row, int32 [b, K]; −1 where −inf is left."""
    top_bK, k = np.full((len(score_bN), k), -1, np.int32), min(k, score_bN.shape[1])
    if not k:
        return top_bK
    kth_b = np.maximum(np.partition(score_bN, -k, axis=1)[:, -k], _LOWEST)
    kept = np.divmod(np.flatnonzero(score_bN >= kth_b[:, None]), score_bN.shape[1])
    bits = (score_bN[kept] + np.float32(0)).view(np.uint32)  # −0 is 0
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = falling << np.uint64(32) | label_bN[kept].astype(np.uint64)
    keys_bN = padded(kept[0], keys, len(top_bK), np.iinfo(np.uint64).max)
    keys_bN.sort(axis=1)
    found_bN = keys_bN[:, :k].astype(np.uint32).view(np.int32)  # of the padding, −1
    top_bK[:, : found_bN.shape[1]] = found_bN
    return top_bK
