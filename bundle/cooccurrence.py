"""Score labels by what was chosen together with a query's last labels [METHODS §11].

`c(x, y) = Σ γ^age(j) · W[j, y]` over the last R entries j of a history, age 0 for the newest. W ≥ 0 has at most N
entries a row and no diagonal. All kinds of W have one form, `W[j, y] = scale · C[j, y] / (d_j^a · d_y^b)`, with d_j the
summed weights of j's pairs:

| kind | C[j, y] | a, b |
|---|---|---|
| `walk` | Σ_x X_xj X_xy / n_x, a walk over queries (RP3beta with α = 1, Christoffel et al. 2015) | 1, β |
| `cosine` | Σ_x X_xj X_xy | ½, ½ |
| `next` | Σ_x max δ^(g−1) over places where y follows j by g ≤ G steps | 1, β |
| `mixed` | that of `walk` + (1 − δ) / (1 − δ^G) of `next`: about equal masses | 1, β |

X_xj is the root of the weight of x's pair with j, n_x the sum of x's weights. Of every query only its last `most` pairs
count, and a pair of labels counts once, at its largest weight.

Legend: `L` labels, `N` neighbours of a label, `H` entries of a history, `C` labels with c > 0, `P` pairs, `b` labels of
a block, `Q` queries, `R` remembered entries, `M` all neighbours of a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Bools, Float32, Float64, Int32, Int64
from longtail.bundle.errors import require
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.mapped_table import read_table
from longtail.bundle.one_line import one_line
from longtail.bundle.vocabulary import Vocabulary

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

FILES = ("cooccurrence.rows.npy", "cooccurrence.weights.npy", "cooccurrence.degrees.npy")
"""Files of a bundle with `rows_LN`, `weights_LN` and `degrees_L`."""
REMEMBERED, REMEMBERED_IDS = "remembered.npy", "remembered.arrow"

NO_ENTRY = -1
MOST = 500
"""Last pairs of a query that count, so that no query costs or weighs more."""
_ROWS = 1 << 16
_ROW_BITS = np.uint64((1 << 32) - 1)
_KEYS = 1 << 21
_PRODUCTS = 1 << 24
"""Products of pairs in a block of labels, unless one label has more: some 400 MB."""


class Term(NamedTuple):
    """The labels with c > 0, int64 [C], ascending, and their c, float32 [C]."""

    rows_C: Int64
    values_C: Float32


NO_TERM = Term(np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(frozen=True)
class Cooccurrence:
    """W of a bundle, with the settings of c.

    Attributes:
        rows_LN: label rows of every label's neighbours, int32, of descending weight; −1 beyond the last.
        weights_LN: their W, float32; 0 beyond the last.
        degrees_L: d, float32, from which later pairs recompute W.
    """

    settings: CooccurrenceSettings
    rows_LN: Int32
    weights_LN: Float32
    degrees_L: Float32

    __repr__ = one_line

    def term(self, history_H: npt.NDArray[np.integer]) -> Term:
        """Compute c of a history of label rows, oldest first."""
        entries_H = history_H[-self.settings.last :]
        if not len(entries_H):
            return NO_TERM
        halves_HN2 = np.empty((len(entries_H), self.settings.neighbours, 2), "<i4")
        halves_HN2[..., 1] = self.rows_LN.take(entries_H, axis=0)
        factors_H1 = self.factors(len(entries_H))[:, None]
        np.multiply(self.weights_LN.take(entries_H, axis=0), factors_H1, out=halves_HN2.view("<f4")[..., 0])
        # A row and its weight >= 0 are the halves of one integer, because sorting integers is quicker than argsort.
        halves_M2 = np.sort(halves_HN2.view("<i8"), axis=None).view("<i4").reshape(-1, 2)
        rows_M = halves_M2[:, 1]
        first_M = np.ones(len(rows_M), np.bool_)
        np.not_equal(rows_M[1:], rows_M[:-1], out=first_M[1:])
        starts_C = np.flatnonzero(first_M)
        values_C = np.add.reduceat(halves_M2.view("<f4")[:, 0], starts_C)
        rows_C = rows_M.take(starts_C).astype(np.int64)
        if rows_C[0] == NO_ENTRY:
            rows_C, values_C = rows_C[1:], values_C[1:]
        return Term(rows_C, values_C)

    def parts(self, history_H: npt.NDArray[np.integer], row: int) -> Float32:
        """Compute what each of the last entries adds to the c of one label, float32 [min(H, `last`)]."""
        entries_H = history_H[-self.settings.last :]
        there_HN = self.rows_LN[entries_H] == row
        parts_H: Float32 = (self.weights_LN[entries_H] * there_HN).sum(axis=1) * self.factors(len(entries_H))
        return parts_H

    def factors(self, entries: int) -> Float32:
        """Return γ^age of a history's last entries, oldest first, float32 [entries]; over their sum for a mean."""
        factors_H = self._all_factors[len(self._all_factors) - entries :]
        return factors_H / factors_H.sum() if self.settings.mean else factors_H

    @cached_property
    def _all_factors(self) -> Float32:
        return (self.settings.decay ** np.arange(self.settings.last - 1, -1, -1.0)).astype(np.float32)

    def matrix(self, labels_M: Int64 | slice = slice(None)) -> csr_matrix:
        """Return W, or its rows of some labels, as a sparse matrix, float32 [L, L] or [M, L]."""
        from scipy.sparse import csr_matrix

        rows_MN = self.rows_LN[labels_M]
        there_MN = rows_MN != NO_ENTRY
        starts = np.append(0, np.cumsum(there_MN.sum(axis=1)))
        shape = len(rows_MN), len(self.rows_LN)
        return csr_matrix((self.weights_LN[labels_M][there_MN], rows_MN[there_MN], starts), shape)

    def deviation(self, histories: Iterable[npt.NDArray[np.integer]]) -> float:
        """Compute the standard deviation of c over labels, as a mean over histories of label rows; 0 without any."""
        labels, deviations = len(self.rows_LN), list[float]()
        for history_H in histories:
            values_C = self.term(history_H).values_C.astype(np.float64)
            deviations.append(float(np.sqrt(values_C @ values_C / labels - (values_C.sum() / labels) ** 2)))
        return float(np.mean(deviations)) if deviations else 0.0

    def scaled(self, factor: float, **settings: Any) -> Cooccurrence:
        """Multiply W by a factor, and replace some settings."""
        changed = self.settings.model_copy(update={"scale": self.settings.scale * factor, **settings})
        return replace(self, settings=changed, weights_LN=self.weights_LN * np.float32(factor))

    def refreshed(
        self,
        pairs: LogPairs,
        ids_Q: pa.Array,
        remembered: Remembered | None,
        until: float | None,
        *,
        earlier: LogPairs | None = None,
        most: int = MOST,
    ) -> tuple[Cooccurrence, Remembered | None]:
        """Add the pairs of a later log to W, and to the last labels of its queries; `scale` stays.

        A later pair counts with the remembered or earlier labels of its query and with the query's other later pairs.
        So W is that of the whole log, but for five things: neighbours beyond N have lost their sums; pairs of a query
        before the remembered or earlier ones do not count; earlier pairs of `walk` keep their 1/n_x while n_x grows;
        remembered and earlier pairs weigh 1 in n_x and C; every refresh counts up to `most` later pairs of a query.

        Args:
            pairs: sorted by query, then time; a query is its position in `ids_Q`.
            ids_Q: strings; null for a query that no later log can name.
            remembered: the last labels of queries before; None where the bundle has none.
            until: time of the last pair, in seconds since 1970; None keeps the present one.
            earlier: pairs of these queries that W counts already, sorted alike; only queries without
                remembered labels, and queries with R earlier pairs or more, use them instead of remembered labels.
            most: last later pairs of a query that count in this refresh.
        """
        settings, labels = self.settings, len(self.rows_LN)
        rows_Q = np.zeros(len(ids_Q), np.int32) if remembered is None else remembered.queries.encode(ids_Q)
        earlier_QR = np.empty((len(ids_Q), 0), np.int32) if remembered is None else remembered.rows_QR[rows_Q]
        history, later_P = _after_remembered(earlier_QR, earlier, _last_of_each(pairs, most))
        added_L, sums = _added(history.chosen, later_P[history.labels >= 0], labels, settings)
        degrees_L = self.degrees_L + added_L
        before_L, divisor_L = _divisor(self.degrees_L), _divisor(degrees_L)
        # An entry whose sum stays changes by the growth of two degrees.
        row_power, column_power = degree_powers(settings)
        factor_L = before_L / divisor_L
        weights_LN = self.weights_LN * (factor_L**row_power)[:, None] * (factor_L**column_power)[self.rows_LN]
        order_LN = np.argsort(-weights_LN, axis=1, kind="stable")
        fresh = Cooccurrence(
            settings if until is None else settings.model_copy(update={"until": until}),
            np.take_along_axis(self.rows_LN, order_LN, axis=1),
            np.take_along_axis(weights_LN, order_LN, axis=1).astype(np.float32),
            degrees_L,
        )
        for start, sums_bL in sums:
            rows_M = np.flatnonzero(np.diff(sums_bL.indptr))
            labels_M, more_ML = start + rows_M, sums_bL[rows_M].astype(np.float64)
            more_ML.data = settings.scale * _weights(more_ML, labels_M, divisor_L, settings)
            all_ML = fresh.matrix(labels_M).astype(np.float64) + more_ML
            rows_MN = np.full((len(labels_M), settings.neighbours), NO_ENTRY, np.int32)
            weights_MN = np.zeros(rows_MN.shape, np.float32)
            keep_largest(all_ML.indptr, all_ML.indices, all_ML.data, rows_MN, weights_MN)
            fresh.rows_LN[labels_M], fresh.weights_LN[labels_M] = rows_MN, weights_MN
        return fresh, None if remembered is None else remembered.followed_by(history, ids_Q, rows_Q)

    def take(self, rows_M: Int64) -> Cooccurrence:
        """Take the labels of some rows, int64 [M]; −1 for a label without pairs. Others are neighbours of none."""
        there_M1 = rows_M[:, None] >= 0
        rows_MN = _numbers_after(rows_M, len(self.rows_LN))[np.where(there_M1, self.rows_LN[rows_M], NO_ENTRY)]
        order_MN = np.argsort(rows_MN == NO_ENTRY, axis=1, kind="stable")
        weights_MN = np.where(rows_MN == NO_ENTRY, np.float32(0), self.weights_LN[rows_M])
        return replace(
            self,
            rows_LN=np.take_along_axis(rows_MN, order_MN, axis=1),
            weights_LN=np.take_along_axis(weights_MN, order_MN, axis=1),
            degrees_L=np.where(there_M1[:, 0], self.degrees_L[rows_M], np.float32(0)),
        )

    def write(self, folder: Path) -> None:
        """Write `FILES` into a folder."""
        for name, array in zip(FILES, (self.rows_LN, self.weights_LN, self.degrees_L), strict=True):
            np.save(folder / name, array, allow_pickle=False)

    @classmethod
    def read(cls, folder: Path, settings: CooccurrenceSettings) -> Cooccurrence:
        """Map `FILES` of a folder."""
        # Plain arrays of the maps: every operation on a `memmap` takes microseconds more.
        rows_LN, weights_LN, degrees_L = (np.asarray(read_table(folder / name)) for name in FILES)
        return cls(settings, rows_LN, weights_LN, degrees_L)  # type: ignore[arg-type]  # the first is int32

    def check(self, labels: int) -> None:
        """Check the arrays; raises BundleInvariantError."""
        shape = labels, self.settings.neighbours
        expected = (np.int32, shape), (np.float32, shape), (np.float32, (labels,))
        for name, array, (type_, size) in zip(FILES, self._arrays, expected, strict=True):
            invariant = f"{name} is {np.dtype(type_)} {list(size)}"
            require(invariant, array.dtype == type_ and array.shape == size, size, f"{array.dtype} {array.shape}")
        rows_LN, weights_LN = self.rows_LN, self.weights_LN
        inside = bool(((rows_LN >= NO_ENTRY) & (rows_LN < labels)).all())
        require(f"{FILES[0]} holds label rows, or -1", inside, f"-1..{labels - 1}", f"{rows_LN.min()}..{rows_LN.max()}")
        itself = bool((rows_LN == np.arange(labels)[:, None]).any())
        require(f"{FILES[0]} has no label as its own neighbour", not itself, "other labels", "the label itself")
        sorted_LN = np.sort(rows_LN, axis=1)
        twice = bool(((sorted_LN[:, 1:] == sorted_LN[:, :-1]) & (sorted_LN[:, 1:] != NO_ENTRY)).any())
        require(f"{FILES[0]} has every neighbour of a label once", not twice, "distinct rows", "repeated ones")
        right = bool((np.isfinite(weights_LN) & (weights_LN >= 0)).all())
        require(f"{FILES[1]} is finite and >= 0", right, ">= 0", "others")
        none = bool((weights_LN[rows_LN == NO_ENTRY] == 0).all())
        require(f"{FILES[1]} is 0 where there is no neighbour", none, "0", "others")
        right = bool((np.isfinite(self.degrees_L) & (self.degrees_L >= 0)).all())
        require(f"{FILES[2]} is finite and >= 0", right, ">= 0", "others")

    @property
    def _arrays(self) -> tuple[Int32, Float32, Float32]:
        return self.rows_LN, self.weights_LN, self.degrees_L


@dataclass(frozen=True)
class Remembered:
    """The last labels of every query of training, for requests that give a query's id alone.

    Attributes:
        queries: ids of the queries; row 0 is an unknown query's.
        rows_QR: label rows, int32 [rows of `queries`, R], oldest first, at the end of each row; −1 before. A label
            that a query said no to has the entry `to_refusals` of its row.
    """

    queries: Vocabulary
    rows_QR: Int32

    __repr__ = one_line

    def history(self, query_id: str) -> Int64:
        """Return the label rows that a query chose, oldest first, int64 [H]; none of an unknown query."""
        rows_H = self._entries(query_id)
        rows_H = rows_H[rows_H >= 0]
        return rows_H[~np.isin(rows_H, refused_H)] if (refused_H := self.refused(query_id)).size else rows_H

    def refused(self, query_id: str) -> Int64:
        """Return the label rows that a query last said no to, int64, ascending."""
        newest_H = self._entries(query_id)[::-1]
        if not (newest_H < 0).any():
            return newest_H[:0]
        rows_H, last_H = np.unique(np.where(newest_H < 0, to_refusals(newest_H), newest_H), return_index=True)
        return rows_H[newest_H[last_H] < 0]

    def _entries(self, query_id: str) -> Int64:
        rows_R = self.rows_QR[self.queries.lookup_all([query_id])[0]]
        rows_H: Int64 = rows_R[rows_R != NO_ENTRY].astype(np.int64)
        return rows_H

    def by_label(self, ids_Q: pa.Array, labels: int, *, refused: bool = False) -> tuple[Int32, Int32]:
        """List which of some queries remember each label: positions, int32 [P], by label, and ends, int32 [L + 1].

        Args:
            refused: list only the queries that last said no to a label.
        """
        from scipy.sparse import csr_matrix

        number_Q = self.queries.encode(ids_Q)
        entries_QR = self.rows_QR[number_Q]
        refused_QR = entries_QR < NO_ENTRY
        rows_QR = np.where(refused_QR, to_refusals(entries_QR), entries_QR).astype(np.int32)
        inside_QR = (refused_QR if refused else rows_QR != NO_ENTRY) & (number_Q > 0)[:, None]
        if refused:
            queries_P, columns_P = np.nonzero(inside_QR)
            later_PR = np.arange(rows_QR.shape[1]) > columns_P[:, None]
            chosen_PR = entries_QR[queries_P] == rows_QR[queries_P, columns_P][:, None]
            inside_QR[queries_P, columns_P] = ~(later_PR & chosen_PR).any(axis=1)
        ends_Q = np.append(0, np.cumsum(inside_QR.sum(axis=1)))
        marks_P = np.ones(ends_Q[-1], np.int8)
        by_label = csr_matrix((marks_P, rows_QR[inside_QR], ends_Q), (len(ids_Q), labels)).tocsc()
        by_label.sum_duplicates()
        return by_label.indices, by_label.indptr

    def followed_by(self, history: LogPairs, ids_Q: pa.Array, rows_Q: Int32) -> Remembered:
        """Replace the labels of the queries of a log by their last ones, and append new queries.

        Args:
            history: remembered and later pairs, sorted by query, then time.
            ids_Q, rows_Q: ids and rows of the log's queries; null is not remembered, row 0 is a new query.
        """
        named_Q = np.asarray(ids_Q.is_valid())
        new_Q = named_Q & (rows_Q == 0)
        rows_Q = np.where(new_Q, self.queries.rows - 1 + np.cumsum(new_Q), rows_Q).astype(np.int32)
        ids = pa.concat_arrays([self.queries.ids, ids_Q.filter(pa.array(new_Q)).cast(self.queries.ids.type)])
        named_P = named_Q[history.queries]
        named = LogPairs(history.queries[named_P], history.labels[named_P])
        fresh = remember(named, Vocabulary(ids), rows_Q, self.rows_QR.shape[1])
        others_Q = np.ones(len(self.rows_QR), bool)
        others_Q[rows_Q[named_Q & ~new_Q]] = False
        fresh.rows_QR[: len(others_Q)][others_Q] = self.rows_QR[others_Q]
        return fresh

    def write(self, folder: Path) -> None:
        """Write both files into a folder."""
        np.save(folder / REMEMBERED, self.rows_QR, allow_pickle=False)
        self.queries.write(folder / REMEMBERED_IDS)

    @classmethod
    def read(cls, folder: Path, *, verify: bool = True) -> Remembered:
        """Map both files of a folder."""
        rows_QR: Int32 = read_table(folder / REMEMBERED)  # type: ignore[assignment]  # int32
        return cls(Vocabulary.read(folder / REMEMBERED_IDS, verify=verify), rows_QR)

    def check(self, labels: int) -> None:
        """Check the rows; raises BundleInvariantError."""
        check_histories(REMEMBERED, self.rows_QR, self.queries.rows, labels, least=NO_ENTRY - labels)
        self.queries.check(REMEMBERED_IDS)

    def take(self, rows_M: Int64) -> Remembered:
        """Number the labels by the rows that stay, int64 [M]; see `Cooccurrence.take`."""
        return replace(self, rows_QR=select_histories(self.rows_QR, rows_M))


def check_histories(file: str, rows_QR: Int32, queries: int, labels: int, *, least: int = NO_ENTRY) -> None:
    """Check the label rows of queries, int32 [Q, R]; raises BundleInvariantError."""
    fits = rows_QR.dtype == np.int32 and rows_QR.ndim == 2 and len(rows_QR) == queries
    require(f"{file} has a row per query", fits, f"int32 ({queries}, R)", f"{rows_QR.dtype} {rows_QR.shape}")
    inside = bool(((rows_QR >= least) & (rows_QR < labels)).all())
    require(f"{file} holds label rows, or -1", inside, f"{least}..{labels - 1}", "others")


def select_histories(rows_QR: Int32, rows_M: Int64) -> Int32:
    """Number the labels of histories by the rows that stay, int64 [M]; other labels leave them."""
    refused_QR = rows_QR < NO_ENTRY
    rows_QR = np.where(refused_QR, to_refusals(rows_QR), rows_QR)
    numbers_QR = _numbers_after(rows_M, int(rows_QR.max(initial=0)))[rows_QR]
    numbers_QR = np.where(refused_QR & (numbers_QR != NO_ENTRY), to_refusals(numbers_QR), numbers_QR)
    order_QR = np.argsort(numbers_QR != NO_ENTRY, axis=1, kind="stable")
    return np.take_along_axis(numbers_QR, order_QR, axis=1)


def to_refusals(rows: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Convert label rows to the entries of labels that a query said no to, or such entries to label rows."""
    return NO_ENTRY - 1 - rows


def _numbers_after(rows_M: Int64, last: int) -> Int32:
    """Return the new number of each row up to `last`, and −1 after them, for −1; −1 for rows that do not stay."""
    numbers = np.full(max(last, int(rows_M.max(initial=0))) + 2, NO_ENTRY, np.int32)
    stay_M = rows_M >= 0
    numbers[rows_M[stay_M]] = np.flatnonzero(stay_M)
    return numbers


class LogPairs(NamedTuple):
    """Pairs from which W is made, sorted by query, then time.

    Attributes:
        queries: int32 or int64 [P].
        labels: label rows [P]; `to_refusals` of them where a query said no.
        weights: float32 [P]; None for 1 each.
    """

    queries: npt.NDArray[np.integer]
    labels: npt.NDArray[np.integer]
    weights: Float32 | None = None

    @property
    def chosen(self) -> LogPairs:
        """Return the pairs in which the query did not say no."""
        chosen_P = self.labels >= 0
        if chosen_P.all():
            return self
        weights_P = None if self.weights is None else self.weights[chosen_P]
        return LogPairs(self.queries[chosen_P], self.labels[chosen_P], weights_P)


def cooccurrences(
    pairs: LogPairs, labels: int, settings: Sequence[CooccurrenceSettings], *, most: int = MOST
) -> list[Cooccurrence]:
    """Make W of several settings that share kind and steps, from one pass over the pairs; scales are 1.

    Memory grows with the pairs and with `labels · N`, not with all pairs of labels.
    """
    pairs = _last_of_each(pairs, most)
    weights_P = _weights_of(pairs)
    first_P = _once_each(pairs, weights_P, labels)
    once = LogPairs(pairs.queries[first_P], pairs.labels[first_P], weights_P[first_P])
    degrees_L = np.bincount(once.labels, _weights_of(once), labels).astype(np.float32)
    divisor_L = _divisor(degrees_L)
    matrices = [
        Cooccurrence(
            setting.model_copy(update={"scale": 1.0}),
            np.full((labels, setting.neighbours), NO_ENTRY, np.int32),
            np.zeros((labels, setting.neighbours), np.float32),
            degrees_L,
        )
        for setting in settings
    ]
    for start, sums_bL in _sums(pairs, once, labels, settings[0]):
        end = start + sums_bL.shape[0]
        for matrix in matrices:
            weights_n = _weights(sums_bL, np.arange(start, end), divisor_L, matrix.settings)
            rows_bN, weights_bN = matrix.rows_LN[start:end], matrix.weights_LN[start:end]
            keep_largest(sums_bL.indptr, sums_bL.indices, weights_n, rows_bN, weights_bN)
    return matrices


def _weights(sums_bL: csr_matrix, labels_b: Int64, divisor_L: Float64, settings: CooccurrenceSettings) -> Float64:
    """Divide the entries of C by powers of degrees, float64 [n]; 0 on the diagonal."""
    row_power, column_power = degree_powers(settings)
    label_n = np.repeat(labels_b, np.diff(sums_bL.indptr))
    weights_n: Float64 = sums_bL.data / ((divisor_L**row_power)[label_n] * (divisor_L**column_power)[sums_bL.indices])
    weights_n[label_n == sums_bL.indices] = 0
    return weights_n


def _divisor(degrees_L: Float32) -> Float64:
    return np.where(degrees_L > 0, degrees_L, 1).astype(np.float64)


def _weights_of(pairs: LogPairs) -> Float32:
    return np.ones(len(pairs.labels), np.float32) if pairs.weights is None else pairs.weights


def degree_powers(settings: CooccurrenceSettings) -> tuple[float, float]:
    """Return a and b of `W[j, y] = C[j, y] / (d_j^a · d_y^b)`."""
    return (0.5, 0.5) if settings.kind == "cosine" else (1.0, settings.power)


def keep_largest(indptr: Int32, rows_n: Int32, weights_n: Float64, rows_bN: Int32, weights_bN: Float32) -> None:
    """Write the largest weights above 0 of every row of a sparse matrix, descending, equal ones by label row."""
    # The bits of floats >= 0 are ordered as the floats, so one integer holds a weight and, reversed, its label row.
    bits_n = weights_n.astype(np.float32).view(np.uint32).astype(np.uint64)
    keys_n = bits_n << np.uint64(32) | (_ROW_BITS - rows_n.astype(np.uint64))
    neighbours, counts_b = rows_bN.shape[1], np.diff(indptr)
    # Rows of about the same length are padded to one matrix at a time.
    order_b, end = np.argsort(counts_b, kind="stable"), len(counts_b)
    while end:
        width = max(int(counts_b[order_b[end - 1]]), neighbours)
        begin = max(end - max(_KEYS // width, 1), 0)
        rows_g = order_b[begin:end]
        there_gw = np.arange(width) < counts_b[rows_g, None]
        keys_gw = np.zeros(there_gw.shape, np.uint64)
        keys_gw[there_gw] = keys_n[(indptr[rows_g, None] + np.arange(width))[there_gw]]
        keys_gN = np.partition(keys_gw, width - neighbours, axis=1)[:, width - neighbours :]
        keys_gN.sort(axis=1)
        keys_gN = keys_gN[:, ::-1]
        weights_gN = (keys_gN >> np.uint64(32)).astype(np.uint32).view(np.float32)
        rows_bN[rows_g] = np.where(weights_gN > 0, (_ROW_BITS - (keys_gN & _ROW_BITS)).astype(np.int32), NO_ENTRY)
        weights_bN[rows_g] = weights_gN
        end = begin


def _last_of_each(pairs: LogPairs, most: int) -> LogPairs:
    """Take the last `most` pairs of every query."""
    if not len(pairs.queries):
        return pairs
    firsts = np.flatnonzero(np.append(True, pairs.queries[1:] != pairs.queries[:-1]))
    counts = np.diff(np.append(firsts, len(pairs.queries)))
    from_end_P = np.repeat(firsts + counts, counts) - np.arange(len(pairs.queries))
    if counts.max() <= most:
        return pairs
    recent_P = from_end_P <= most
    return LogPairs(*(None if column is None else column[recent_P] for column in pairs))  # type: ignore[arg-type]


def _sums(
    pairs: LogPairs, once: LogPairs, labels: int, settings: CooccurrenceSettings
) -> Iterator[tuple[int, csr_matrix]]:
    """Yield C by blocks of labels: the first label, and float64 or float32 [b, L].

    Args:
        once: the pairs without repeats.
    """
    if settings.kind == "next":
        yield from _in_blocks(_following(pairs, labels, settings))
        return
    chosen_QL = _chosen(once, _weights_of(once), labels)
    sums = _products(chosen_QL, chosen_QL if settings.kind == "cosine" else _per_query(chosen_QL, chosen_QL))
    yield from sums if settings.kind != "mixed" else _plus(sums, _following(pairs, labels, settings), settings)


def _plus(
    sums: Iterator[tuple[int, csr_matrix]], following_LL: csr_matrix, settings: CooccurrenceSettings
) -> Iterator[tuple[int, csr_matrix]]:
    """Add what follows to C, with weights of the steps that sum to 1."""
    share = np.float32(1 / sum(settings.step_decay**step for step in range(settings.steps)))
    for start, sums_bL in sums:
        yield start, (sums_bL + share * following_LL[start : start + sums_bL.shape[0]]).tocsr()


def _once_each(pairs: LogPairs, weights_P: Float32, labels: int) -> Int64:
    """Select the pair of the largest weight of every query and label: rows, sorted by query, then label."""
    keys_P = _numbers(pairs.queries) * labels + pairs.labels
    order_P: Int64 = np.lexsort((-weights_P, keys_P))
    return order_P[np.diff(keys_P[order_P], prepend=-1) > 0]


def _numbers(queries_P: npt.NDArray[np.integer]) -> Int64:
    """Number sorted queries from 0, int64 [P]."""
    return np.cumsum(np.append(False, queries_P[1:] != queries_P[:-1])[: len(queries_P)])


def _chosen(pairs: LogPairs, weights_P: Float32, labels: int) -> csr_matrix:
    """Return X, the roots of the weights of distinct pairs, float32 [Q, L]."""
    from scipy.sparse import csr_matrix

    number_P = _numbers(pairs.queries)
    shape = int(number_P.max(initial=-1)) + 1, labels
    return csr_matrix((np.sqrt(weights_P), (number_P, pairs.labels)), shape, dtype=np.float32)


def _per_query(part_QL: csr_matrix, chosen_QL: csr_matrix) -> csr_matrix:
    """Divide the rows of a part of X by n, the sums of the weights of X."""
    from scipy.sparse import diags

    total_Q = np.asarray(chosen_QL.power(2).sum(axis=1)).ravel()
    return (diags(1 / np.where(total_Q > 0, total_Q, 1)) @ part_QL).tocsr()


def _products(left_QL: csr_matrix, right_QL: csr_matrix) -> Iterator[tuple[int, csr_matrix]]:
    """Yield the product of a transposed matrix and another by blocks of labels: the first label, and [b, L]."""
    products_n = np.repeat(np.diff(right_QL.indptr), np.diff(left_QL.indptr))
    products_L = np.bincount(left_QL.indices, products_n, left_QL.shape[1]).astype(np.int64)
    left_LQ = left_QL.T.tocsr()
    for start, end in _blocks(products_L):
        yield start, left_LQ[start:end] @ right_QL


def _blocks(products_L: Int64) -> Iterator[tuple[int, int]]:
    """Cut labels into ranges of at most `_PRODUCTS` products, or of one label."""
    ends, start = np.cumsum(products_L), 0
    while start < len(products_L):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + _PRODUCTS, side="right")), start + 1)
        yield start, end
        start = end


def _in_blocks(sums_LL: csr_matrix) -> Iterator[tuple[int, csr_matrix]]:
    for start in range(0, sums_LL.shape[0], _ROWS):
        yield start, sums_LL[start : start + _ROWS]


def _following(
    pairs: LogPairs, labels: int, settings: CooccurrenceSettings, later_P: Bools | None = None
) -> csr_matrix:
    """Sum what follows each label within some steps, float32 [L, L], once for each query, label and follower.

    Args:
        later_P: followers that count, as far as they are nearer than a query's other followers; None for all.
    """
    from scipy.sparse import csr_matrix

    parts_LL = [csr_matrix((labels, labels), dtype=np.float32)]
    number_P, root_P = _numbers(pairs.queries), np.sqrt(_weights_of(pairs))
    for rows in _whole_queries(number_P, _KEYS):
        query_n, label_n, root_n = number_P[rows] - number_P[rows.start], pairs.labels[rows], root_P[rows]
        keys, followers = list[Int64](), list[npt.NDArray[np.integer]]()
        values, decays, counted = list[Float32](), list[Float32](), list[Float32]()
        for step in range(1, settings.steps + 1):
            within = query_n[step:] == query_n[:-step]
            keys.append(query_n[step:][within] * labels + label_n[:-step][within])
            followers.append(label_n[step:][within])
            decay = np.float32(settings.step_decay ** (step - 1))
            values.append(root_n[:-step][within] * root_n[step:][within] * decay)
            if later_P is not None:
                decays.append(np.full(len(keys[-1]), decay))
                counted.append(np.where(later_P[rows][step:][within], np.float32(0), decay))
        key_T, follower_T, value_T = (np.concatenate(column) for column in (keys, followers, values))
        if not len(key_T):
            continue
        order_T = np.lexsort((follower_T, key_T))
        key_T, follower_T, value_T = key_T[order_T], follower_T[order_T], value_T[order_T]
        firsts_g = np.flatnonzero(np.diff(key_T, prepend=-1) | np.diff(follower_T, prepend=-1))
        value_g = np.maximum.reduceat(value_T, firsts_g)
        if later_P is not None:  # only steps are compared, because earlier followers are without their weights
            counted_g, decay_g = (
                np.maximum.reduceat(np.concatenate(parts)[order_T], firsts_g) for parts in (counted, decays)
            )
            value_g *= 1 - counted_g / np.maximum(decay_g, np.finfo(np.float32).tiny)
        cells = key_T[firsts_g] % labels, follower_T[firsts_g]
        parts_LL.append(csr_matrix((value_g, cells), (labels, labels), dtype=np.float32))
        # Only parts of a like size are added, so that no entry is copied for every later part.
        while len(parts_LL) > 1 and parts_LL[-2].nnz <= 2 * parts_LL[-1].nnz:
            parts_LL[-2:] = [parts_LL[-2] + parts_LL[-1]]
    sums_LL = reduce(add, reversed(parts_LL))
    sums_LL.eliminate_zeros()
    return sums_LL


def _whole_queries(number_P: Int64, size: int) -> Iterator[slice]:
    """Cut sorted query numbers into ranges of whole queries, of at most `size` pairs or one query."""
    begin = 0
    while begin < len(number_P):
        end = len(number_P)
        if end - begin > size:
            end = int(np.searchsorted(number_P, number_P[begin + size]))
            end = end if end > begin else int(np.searchsorted(number_P, number_P[begin], side="right"))
        yield slice(begin, end)
        begin = end


def _after_remembered(earlier_QR: Int32, earlier: LogPairs | None, pairs: LogPairs) -> tuple[LogPairs, Bools]:
    """Put each query's remembered or earlier labels before its pairs; returns both, and which are of the pairs."""
    query_n, column_n = np.nonzero(earlier_QR != NO_ENTRY)
    labels_n = earlier_QR[query_n, column_n]
    if earlier is not None:
        earlier = _last_of_each(earlier, MOST)
        # R earlier pairs reach back at least as far as R remembered labels; fewer labels are all that a query chose.
        remembered_Q, entries = (earlier_QR != NO_ENTRY).sum(axis=1), earlier_QR.shape[1]
        instead_Q = (remembered_Q == 0) | (np.bincount(earlier.queries, minlength=len(earlier_QR)) >= entries)
        remembered_n, earlier_n = ~instead_Q[query_n], instead_Q[earlier.queries]
        query_n = np.concatenate([query_n[remembered_n], earlier.queries[earlier_n]])
        labels_n = np.concatenate([labels_n[remembered_n], earlier.labels[earlier_n]])
    queries_P = np.concatenate([query_n, pairs.queries])
    order_P = np.argsort(queries_P, kind="stable")
    labels_P = np.concatenate([labels_n, pairs.labels])
    weights_P = np.concatenate([np.ones(len(query_n), np.float32), _weights_of(pairs)])
    return LogPairs(queries_P[order_P], labels_P[order_P], weights_P[order_P]), order_P >= len(query_n)


def _added(
    history: LogPairs, later_P: Bools, labels: int, settings: CooccurrenceSettings
) -> tuple[Float32, Iterator[tuple[int, csr_matrix]]]:
    """Compute the increase of the degrees, float32 [L], and of C, in blocks of rows, from later pairs."""
    from scipy.sparse import vstack

    weights_P = _weights_of(history)
    following_LL = None
    if settings.kind in ("next", "mixed"):
        following_LL = _following(history, labels, settings, later_P)
    # Remembered pairs were counted already: an infinite weight keeps each one ahead of its later repeats.
    first_P = _once_each(history, np.where(later_P, weights_P, np.inf).astype(np.float32), labels)
    history = LogPairs(history.queries[first_P], history.labels[first_P])
    weights_P, later_P = weights_P[first_P], later_P[first_P]
    if settings.kind == "next":
        sums = _in_blocks(following_LL)
    else:
        chosen_QL, later_QL, earlier_QL = (
            _chosen(history, weights_P * part_P, labels) for part_P in (np.float32(1), later_P, ~later_P)
        )
        later_QL.eliminate_zeros()
        earlier_QL.eliminate_zeros()
        rights = [chosen_QL, later_QL]
        if settings.kind != "cosine":
            rights = [_per_query(part_QL, chosen_QL) for part_QL in rights]
        # X'X of all pairs less that of the earlier ones.
        sums = _products(vstack([later_QL, earlier_QL]).tocsr(), vstack(rights).tocsr())
        sums = sums if following_LL is None else _plus(sums, following_LL, settings)
    added_L = np.bincount(history.labels[later_P], weights_P[later_P], labels).astype(np.float32)
    return added_L, sums


def remember(pairs: LogPairs, queries: Vocabulary, query_rows_Q: Int32, entries: int) -> Remembered:
    """Keep the last entries of every query.

    Args:
        query_rows_Q: row of `queries` by the pairs' query number, int32.
    """
    rows_QR = np.full((queries.rows, entries), NO_ENTRY, np.int32)
    recent = _last_of_each(pairs, entries)
    if len(recent.queries):
        firsts = np.flatnonzero(np.append(True, recent.queries[1:] != recent.queries[:-1]))
        counts = np.diff(np.append(firsts, len(recent.queries)))
        column_P = entries - np.repeat(firsts + counts, counts) + np.arange(len(recent.queries))
        rows_QR[query_rows_Q[recent.queries], column_P] = recent.labels
    return Remembered(queries, rows_QR)
