"""Score labels by what was chosen together with a query's last labels [METHODS §11].

`c(x, y) = Σ γ^age(j) · W[j, y]` over the last R entries j of a history, age 0 for the newest. W ≥ 0 has at most N
entries a row and no diagonal. All kinds of W have one form, `W[j, y] = scale · C[j, y] / (d_j^a · d_y^b)`, with d_j the
summed weights of j's pairs:

| kind | C[j, y] | a, b |
|---|---|---|
| `walk` | Σ_x X_xj X_xy / n_x, a walk over queries (RP3beta with α = 1, Christoffel et al. 2015) | 1, β |
| `cosine` | Σ_x X_xj X_xy | ½, ½ |
| `next` | Σ δ^(g−1) over places where y follows j by g ≤ G steps | 1, β |

X_xj is the root of the weight of x's pair with j, n_x the sum of x's weights. Of every query only its last `most` pairs
count.

Legend: `L` labels, `N` neighbours of a label, `H` entries of a history, `C` labels with c > 0, `P` pairs, `b` labels of
a block, `Q` queries, `R` remembered entries, `M` all neighbours of a history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Float32, Float64, Int32, Int64
from longtail.bundle.errors import require
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.mapped_table import read_table
from longtail.bundle.vocabulary import Vocabulary

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

FILES = ("cooccurrence.rows.npy", "cooccurrence.weights.npy", "cooccurrence.degrees.npy")
"""Files of a bundle with `rows_LN`, `weights_LN` and `degrees_L`."""
REMEMBERED, REMEMBERED_IDS = "remembered.npy", "remembered.arrow"

Kind = Literal["walk", "cosine", "next"]
NO_ENTRY = -1
MOST = 500
"""Last pairs of a query that count, so that no query costs or weighs more."""
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

    def matrix(self) -> csr_matrix:
        """Return W as a sparse matrix, float32 [L, L]."""
        from scipy.sparse import csr_matrix

        labels = len(self.rows_LN)
        there_LN = self.rows_LN != NO_ENTRY
        starts = np.append(0, np.cumsum(there_LN.sum(axis=1)))
        return csr_matrix((self.weights_LN[there_LN], self.rows_LN[there_LN], starts), (labels, labels))

    def scaled(self, factor: float, **settings: Any) -> Cooccurrence:
        """Multiply W by a factor, and replace some settings."""
        changed = self.settings.model_copy(update={"scale": self.settings.scale * factor, **settings})
        return replace(self, settings=changed, weights_LN=self.weights_LN * np.float32(factor))

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
        rows_QR: label rows, int32 [rows of `queries`, R], oldest first, at the end of each row; −1 before.
    """

    queries: Vocabulary
    rows_QR: Int32

    def history(self, query_id: str) -> Int64:
        """Return the label rows of a query, oldest first, int64 [H]; none of an unknown query."""
        rows_R = self.rows_QR[self.queries.lookup_all([query_id])[0]]
        history_H: Int64 = rows_R[rows_R != NO_ENTRY].astype(np.int64)
        return history_H

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
        check_histories(REMEMBERED, self.rows_QR, self.queries.rows, labels)

    def take(self, rows_M: Int64) -> Remembered:
        """Number the labels by the rows that stay, int64 [M]; see `Cooccurrence.take`."""
        return replace(self, rows_QR=taken_histories(self.rows_QR, rows_M))


def check_histories(file: str, rows_QR: Int32, queries: int, labels: int) -> None:
    """Check the label rows of queries, int32 [Q, R]; raises BundleInvariantError."""
    fits = rows_QR.dtype == np.int32 and rows_QR.ndim == 2 and len(rows_QR) == queries
    require(f"{file} has a row per query", fits, f"int32 ({queries}, R)", f"{rows_QR.dtype} {rows_QR.shape}")
    inside = bool(((rows_QR >= NO_ENTRY) & (rows_QR < labels)).all())
    require(f"{file} holds label rows, or -1", inside, f"-1..{labels - 1}", "others")


def taken_histories(rows_QR: Int32, rows_M: Int64) -> Int32:
    """Number the labels of histories by the rows that stay, int64 [M]; other labels leave them."""
    numbers_QR = _numbers_after(rows_M, int(rows_QR.max(initial=0)))[rows_QR]
    order_QR = np.argsort(numbers_QR != NO_ENTRY, axis=1, kind="stable")
    return np.take_along_axis(numbers_QR, order_QR, axis=1)


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
        labels: label rows [P].
        weights: float32 [P]; None for 1 each.
    """

    queries: npt.NDArray[np.integer]
    labels: npt.NDArray[np.integer]
    weights: Float32 | None = None


def cooccurrences(
    pairs: LogPairs, labels: int, settings: Sequence[CooccurrenceSettings], *, most: int = MOST
) -> list[Cooccurrence]:
    """Make W of several settings that share kind and steps, from one pass over the pairs; scales are 1.

    Memory grows with the pairs and with `labels · N`, not with all pairs of labels.
    """
    pairs = _last_of_each(pairs, most)
    weights_P = np.ones(len(pairs.labels), np.float32) if pairs.weights is None else pairs.weights
    degrees_L = np.bincount(pairs.labels, weights_P, labels).astype(np.float32)
    divisor_L = np.where(degrees_L > 0, degrees_L, 1).astype(np.float64)
    made = [
        Cooccurrence(
            each.model_copy(update={"scale": 1.0}),
            np.full((labels, each.neighbours), NO_ENTRY, np.int32),
            np.zeros((labels, each.neighbours), np.float32),
            degrees_L,
        )
        for each in settings
    ]
    for start, sums_bL in _sums(pairs, weights_P, labels, settings[0]):
        label_n = np.repeat(np.arange(start, start + sums_bL.shape[0]), np.diff(sums_bL.indptr))
        for one in made:
            own, other = powers_of(one.settings)
            weight_n = sums_bL.data / (divisor_L[label_n] ** own * divisor_L[sums_bL.indices] ** other)
            weight_n[label_n == sums_bL.indices] = 0
            end = start + sums_bL.shape[0]
            keep_largest(sums_bL.indptr, sums_bL.indices, weight_n, one.rows_LN[start:end], one.weights_LN[start:end])
    return made


def powers_of(settings: CooccurrenceSettings) -> tuple[float, float]:
    """Return a and b of `W[j, y] = C[j, y] / (d_j^a · d_y^b)`."""
    return (0.5, 0.5) if settings.kind == "cosine" else (1.0, settings.power)


def keep_largest(indptr: Int32, rows_n: Int32, weights_n: Float64, rows_bN: Int32, weights_bN: Float32) -> None:
    """Write the largest weights above 0 of every row of a sparse matrix, descending, equal ones by label row."""
    neighbours = rows_bN.shape[1]
    weights_n = weights_n.astype(np.float32)
    for place, (start, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        weights, rows = weights_n[start:end], rows_n[start:end]
        if end - start > neighbours:
            least = np.partition(weights, end - start - neighbours)[end - start - neighbours]
            enough = np.flatnonzero(weights >= least)
            weights, rows = weights[enough], rows[enough]
        order = np.lexsort((rows, -weights))[:neighbours]
        weights, rows = weights[order], rows[order]
        count = int(np.count_nonzero(weights > 0))
        rows_bN[place, :count], weights_bN[place, :count] = rows[:count], weights[:count]


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
    pairs: LogPairs, weights_P: Float32, labels: int, settings: CooccurrenceSettings
) -> Iterator[tuple[int, csr_matrix]]:
    """Yield C by blocks of labels: the first label, and float64 or float32 [b, L]."""
    from scipy.sparse import csr_matrix, diags

    if settings.kind == "next":
        sums_LL = _following(pairs, weights_P, labels, settings)
        for start in range(0, labels, 1 << 16):
            yield start, sums_LL[start : start + (1 << 16)]
        return
    number_P = np.cumsum(np.append(False, pairs.queries[1:] != pairs.queries[:-1])) if len(pairs.queries) else None
    queries = 0 if number_P is None else int(number_P[-1]) + 1
    # The largest weight of a repeated pair counts, once.
    key_P = (np.zeros(0, np.int64) if number_P is None else number_P) * labels + pairs.labels
    order_P = np.lexsort((-weights_P, key_P))
    first_P = order_P[np.append(True, np.diff(key_P[order_P]) > 0)] if len(key_P) else order_P
    shape = queries, labels
    places = (key_P[first_P] // labels, key_P[first_P] % labels)
    chosen_QL = csr_matrix((np.sqrt(weights_P[first_P]), places), shape, dtype=np.float32)
    per_query_Q = np.diff(chosen_QL.indptr)
    weighed_QL = chosen_QL
    if settings.kind == "walk":
        total_Q = np.asarray(chosen_QL.power(2).sum(axis=1)).ravel()
        weighed_QL = (diags(1 / np.where(total_Q > 0, total_Q, 1)) @ chosen_QL).tocsr()
    chosen_LQ = chosen_QL.T.tocsr()
    products_L = np.zeros(labels, np.int64)
    np.add.at(products_L, chosen_QL.indices, np.repeat(per_query_Q, per_query_Q))
    for start, end in _blocks(products_L):
        yield start, chosen_LQ[start:end] @ weighed_QL


def _blocks(products_L: Int64) -> Iterator[tuple[int, int]]:
    """Cut labels into ranges of at most `_PRODUCTS` products, or of one label."""
    ends, start = np.cumsum(products_L), 0
    while start < len(products_L):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + _PRODUCTS, side="right")), start + 1)
        yield start, end
        start = end


def _following(pairs: LogPairs, weights_P: Float32, labels: int, settings: CooccurrenceSettings) -> csr_matrix:
    """Sum what follows each label within some steps, float32 [L, L]."""
    from scipy.sparse import csr_matrix

    root_P, sums_LL = np.sqrt(weights_P), csr_matrix((labels, labels), dtype=np.float32)
    for step in range(1, settings.steps + 1):
        within = pairs.queries[step:] == pairs.queries[:-step]
        earlier, later = pairs.labels[:-step][within], pairs.labels[step:][within]
        values = root_P[:-step][within] * root_P[step:][within] * np.float32(settings.step_decay ** (step - 1))
        sums_LL = sums_LL + csr_matrix((values, (earlier, later)), (labels, labels), dtype=np.float32)
    return sums_LL


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
