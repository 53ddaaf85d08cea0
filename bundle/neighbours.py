"""Make W, the weights of labels that were chosen together [METHODS §11].

All kinds of W have one form, `W[j, y] = scale · C[j, y] / (d_j^a · d_y^b)`, with d_j the summed weights of j's pairs:

| kind | C[j, y] | a, b |
|---|---|---|
| `walk` | Σ_x X_xj X_xy / n_x, a walk over queries (RP3beta with α = 1, Christoffel et al. 2015) | 1, β |
| `cosine` | Σ_x X_xj X_xy | ½, ½ |
| `next` | Σ_x max δ^(g−1) over positions at which y follows j by g ≤ G steps | 1, β |
| `mixed` | that of `walk` + (1 − δ) / (1 − δ^G) of `next`: about equal masses | 1, β |

X_xj is the root of the weight of x's pair with j, n_x the sum of x's weights. Of every query only its last `most` pairs
count, and a pair of labels counts once, at its largest weight.

Legend: `L` labels, `N` neighbours of a label, `P` pairs, `b` labels of a block, `Q` queries, `R` remembered entries,
`M` labels with later pairs, `T` pairs of a label and a follower, `g` groups of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Bools, Float32, Float64, Int32, Int64
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.histories import NO_ENTRY, LogPairs, Remembered
from longtail.bundle.manifest import CooccurrenceSettings

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

MOST = 500
"""Last pairs of a query that count, so that no query costs or weighs more."""
_ROWS = 1 << 16
_ROW_BITS = np.uint64((1 << 32) - 1)
_KEYS = 1 << 21
_PRODUCTS = 1 << 24
"""Products of pairs in a block of labels, unless one label has more: some 400 MB."""


def cooccurrences(
    pairs: LogPairs, labels: int, settings: Sequence[CooccurrenceSettings], *, most: int = MOST
) -> list[Cooccurrence]:
    """Make W for several settings of the same kind and steps; scales are 1.

    Memory grows with the pairs and with `labels · N`, not with all pairs of labels.
    """
    # A query of n pairs adds n² products: a few robots would cost more than all people.
    pairs = pairs.last_of_each(most)
    weights_P = pairs.filled_weights
    first_P = _once_each(pairs, weights_P, labels)
    once = pairs.select(first_P)
    degrees_L = np.bincount(once.labels, once.filled_weights, labels).astype(np.float32)
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


def refresh_term(
    term: Cooccurrence,
    pairs: LogPairs,
    ids_Q: pa.Array,
    remembered: Remembered | None,
    until: float | None,
    *,
    earlier: LogPairs | None = None,
    most: int = MOST,
) -> tuple[Cooccurrence, Remembered | None]:
    """Add the pairs of a later log to W and to the remembered labels; `scale` stays.

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
    settings, labels = term.settings, len(term.rows_LN)
    rows_Q = np.zeros(len(ids_Q), np.int32) if remembered is None else remembered.queries.encode(ids_Q)
    earlier_QR = np.empty((len(ids_Q), 0), np.int32) if remembered is None else remembered.rows_QR[rows_Q]
    history, later_P = _after_remembered(earlier_QR, earlier, pairs.last_of_each(most))
    added_L, sums = _added(history.chosen, later_P[history.labels >= 0], labels, settings)
    degrees_L = term.degrees_L + added_L
    before_L, divisor_L = _divisor(term.degrees_L), _divisor(degrees_L)
    # An entry whose sum stays changes by the growth of two degrees.
    row_power, column_power = degree_powers(settings)
    factor_L = before_L / divisor_L
    weights_LN = term.weights_LN * (factor_L**row_power)[:, None] * (factor_L**column_power)[term.rows_LN]
    order_LN = np.argsort(-weights_LN, axis=1, kind="stable")
    fresh = Cooccurrence(
        settings if until is None else settings.model_copy(update={"until": until}),
        np.take_along_axis(term.rows_LN, order_LN, axis=1),
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
    return fresh, None if remembered is None else remembered.append_log(history, ids_Q, rows_Q)


def _sparse() -> Any:
    """Import SciPy on first use, because a service needs it for none of its answers."""
    import scipy.sparse  # type: ignore[import-untyped]

    return scipy.sparse


def _weights(sums_bL: csr_matrix, labels_b: Int64, divisor_L: Float64, settings: CooccurrenceSettings) -> Float64:
    """Divide the entries of C by powers of degrees, float64 [n]; 0 on the diagonal."""
    row_power, column_power = degree_powers(settings)
    label_n = np.repeat(labels_b, np.diff(sums_bL.indptr))
    weights_n: Float64 = sums_bL.data / ((divisor_L**row_power)[label_n] * (divisor_L**column_power)[sums_bL.indices])
    weights_n[label_n == sums_bL.indices] = 0
    return weights_n


def _divisor(degrees_L: Float32) -> Float64:
    return np.where(degrees_L > 0, degrees_L, 1).astype(np.float64)


def degree_powers(settings: CooccurrenceSettings) -> tuple[float, float]:
    """Return the powers a and b of the degrees."""
    return (0.5, 0.5) if settings.kind == "cosine" else (1.0, settings.power)


def keep_largest(indptr: Int32, rows_n: Int32, weights_n: Float64, rows_bN: Int32, weights_bN: Float32) -> None:
    """Write the largest positive weights of each row, descending, equal ones by label row."""
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
        is_entry_gw = np.arange(width) < counts_b[rows_g, None]
        keys_gw = np.zeros(is_entry_gw.shape, np.uint64)
        keys_gw[is_entry_gw] = keys_n[(indptr[rows_g, None] + np.arange(width))[is_entry_gw]]
        keys_gN = np.partition(keys_gw, width - neighbours, axis=1)[:, width - neighbours :]
        keys_gN.sort(axis=1)
        keys_gN = keys_gN[:, ::-1]
        weights_gN = (keys_gN >> np.uint64(32)).astype(np.uint32).view(np.float32)
        rows_bN[rows_g] = np.where(weights_gN > 0, (_ROW_BITS - (keys_gN & _ROW_BITS)).astype(np.int32), NO_ENTRY)
        weights_bN[rows_g] = weights_gN
        end = begin


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
    chosen_QL = _chosen(once, once.filled_weights, labels)
    sums = _products(chosen_QL, chosen_QL if settings.kind == "cosine" else _per_query(chosen_QL, chosen_QL))
    yield from sums if settings.kind != "mixed" else _plus(sums, _following(pairs, labels, settings), settings)


def _plus(
    sums: Iterator[tuple[int, csr_matrix]], following_LL: csr_matrix, settings: CooccurrenceSettings
) -> Iterator[tuple[int, csr_matrix]]:
    """Add followers to C, with weights that sum to 1."""
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
    number_P = _numbers(pairs.queries)
    shape = int(number_P.max(initial=-1)) + 1, labels
    return _sparse().csr_matrix((np.sqrt(weights_P), (number_P, pairs.labels)), shape, dtype=np.float32)


def _per_query(part_QL: csr_matrix, chosen_QL: csr_matrix) -> csr_matrix:
    """Divide rows of X by n."""
    total_Q = np.asarray(chosen_QL.power(2).sum(axis=1)).ravel()
    return (_sparse().diags(1 / np.where(total_Q > 0, total_Q, 1)) @ part_QL).tocsr()


def _products(left_QL: csr_matrix, right_QL: csr_matrix) -> Iterator[tuple[int, csr_matrix]]:
    """Yield a matrix product by blocks of labels: the first label, and [b, L]."""
    products_n = np.repeat(np.diff(right_QL.indptr), np.diff(left_QL.indptr))
    products_L = np.bincount(left_QL.indices, products_n, left_QL.shape[1]).astype(np.int64)
    left_LQ = left_QL.T.tocsr()
    for start, end in _blocks(products_L):
        yield start, left_LQ[start:end] @ right_QL


def _blocks(products_L: Int64) -> Iterator[tuple[int, int]]:
    """Cut labels into ranges of at most `_PRODUCTS` products."""
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
    """Sum what follows each label, float32 [L, L], once per query and follower.

    Args:
        later_P: followers that count, as far as they are nearer than a query's other followers; None for all.
    """
    parts_LL = [_sparse().csr_matrix((labels, labels), dtype=np.float32)]
    number_P, root_P = _numbers(pairs.queries), np.sqrt(pairs.filled_weights)
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
        parts_LL.append(_sparse().csr_matrix((value_g, cells), (labels, labels), dtype=np.float32))
        # Only parts of a like size are added, so that no entry is copied for every later part.
        while len(parts_LL) > 1 and parts_LL[-2].nnz <= 2 * parts_LL[-1].nnz:
            parts_LL[-2:] = [parts_LL[-2] + parts_LL[-1]]
    sums_LL = reduce(add, reversed(parts_LL))
    sums_LL.eliminate_zeros()
    return sums_LL


def _whole_queries(number_P: Int64, size: int) -> Iterator[slice]:
    """Cut sorted query numbers into ranges of whole queries."""
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
        earlier = earlier.last_of_each(MOST)
        # R earlier pairs reach back at least as far as R remembered labels; fewer labels are all that a query chose.
        remembered_Q, entries = (earlier_QR != NO_ENTRY).sum(axis=1), earlier_QR.shape[1]
        instead_Q = (remembered_Q == 0) | (np.bincount(earlier.queries, minlength=len(earlier_QR)) >= entries)
        remembered_n, earlier_n = ~instead_Q[query_n], instead_Q[earlier.queries]
        query_n = np.concatenate([query_n[remembered_n], earlier.queries[earlier_n]])
        labels_n = np.concatenate([labels_n[remembered_n], earlier.labels[earlier_n]])
    queries_P = np.concatenate([query_n, pairs.queries])
    order_P = np.argsort(queries_P, kind="stable")
    labels_P = np.concatenate([labels_n, pairs.labels])
    weights_P = np.concatenate([np.ones(len(query_n), np.float32), pairs.filled_weights])
    return LogPairs(queries_P[order_P], labels_P[order_P], weights_P[order_P]), order_P >= len(query_n)


def _added(
    history: LogPairs, later_P: Bools, labels: int, settings: CooccurrenceSettings
) -> tuple[Float32, Iterator[tuple[int, csr_matrix]]]:
    """Compute the increase of degrees, float32 [L], and C, in blocks of rows."""
    weights_P = history.filled_weights
    following_LL = None
    if settings.kind in ("next", "mixed"):
        following_LL = _following(history, labels, settings, later_P)
    # Remembered pairs were counted already: an infinite weight keeps each one ahead of its later repeats.
    first_P = _once_each(history, np.where(later_P, weights_P, np.inf).astype(np.float32), labels)
    history, weights_P, later_P = history.select(first_P), weights_P[first_P], later_P[first_P]
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
        sums = _products(_sparse().vstack([later_QL, earlier_QL]).tocsr(), _sparse().vstack(rights).tocsr())
        sums = sums if following_LL is None else _plus(sums, following_LL, settings)
    added_L = np.bincount(history.labels[later_P], weights_P[later_P], labels).astype(np.float32)
    return added_L, sums
