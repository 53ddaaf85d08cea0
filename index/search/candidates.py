"""Merge candidates of several sources, given as scores and label rows, into the k best.

Legend: `B` queries, `C` candidates, `K` results.
"""

from __future__ import annotations

import numpy as np

from longtail.bundle.arrays import Float32, Int64

_COLUMNS_A_GROUP = 16
"""Columns whose largest score `best_columns` looks at first; a group's maximum is quicker to find than its order."""
NO_ROW = -1
"""Row that fills an answer with fewer candidates than requested; its score is −inf."""


def no_results(queries: int, k: int) -> tuple[Float32, Int64]:
    """Create an empty answer: scores −inf, float32 [queries, k], and rows −1, int64 [queries, k]."""
    return np.full((queries, k), -np.inf, np.float32), np.full((queries, k), NO_ROW, np.int64)


def top_k(scores: list[Float32], rows: list[Int64], k: int) -> tuple[Float32, Int64]:
    """Merge candidates of several sources, float32 and int64 [B, C_i], into each query's k best.

    A score of −inf does not count. Returns scores float32 [B, k], descending, and rows int64 [B, k]; −inf and −1 fill
    the places of missing results.
    """
    scores_BC, rows_BC = scores[0], rows[0]
    if len(scores) > 1:
        scores_BC, rows_BC = np.concatenate(scores, axis=1), np.concatenate(rows, axis=1)
    if scores_BC.shape[1] < k:
        blank_scores, blank_rows = no_results(len(scores_BC), k - scores_BC.shape[1])
        scores_BC, rows_BC = np.append(scores_BC, blank_scores, axis=1), np.append(rows_BC, blank_rows, axis=1)
    # Of many candidates a partition finds the k best in linear time; only those k are then sorted.
    if scores_BC.shape[1] > 4 * k:
        best_BK = np.argpartition(scores_BC, -k, axis=1)[:, -k:] + _offsets(*scores_BC.shape)
        scores_BC, rows_BC = scores_BC.take(best_BK), rows_BC.take(best_BK)
    # FAISS's answer to a single query is usually sorted and complete: there is nothing to do.
    has_k_columns = len(scores_BC) == 1 and scores_BC.shape[1] == k
    if has_k_columns and scores_BC[0, -1] > -np.inf and (scores_BC[0, 1:] <= scores_BC[0, :-1]).all():
        return scores_BC, rows_BC
    order_BK = np.argsort(-scores_BC, axis=1, kind="stable")[:, :k] + _offsets(*scores_BC.shape)
    scores_BK, rows_BK = scores_BC.take(order_BK), rows_BC.take(order_BK)
    if (scores_BK[:, -1] == -np.inf).any():
        rows_BK[scores_BK == -np.inf] = NO_ROW
    return scores_BK, rows_BK


def best_columns(scores_BL: Float32, k: int) -> tuple[Float32, Int64]:
    """Find the k best columns of every row: scores float32 [B, k], descending; columns int64 [B, k].

    Equal scores are in the order of their columns. −inf and −1 fill the places of missing results.
    """
    queries, columns = scores_BL.shape
    scores_BK, columns_BK = np.full((queries, k), -np.inf, np.float32), np.full((queries, k), NO_ROW, np.int64)
    groups = columns // _COLUMNS_A_GROUP
    least_B = None
    if groups > k:  # k columns at least reach the k-th best of the groups' maxima
        grouped = scores_BL[:, : groups * _COLUMNS_A_GROUP].reshape(queries, _COLUMNS_A_GROUP, groups)
        least_B = np.partition(grouped.max(axis=1), groups - k, axis=1)[:, groups - k]
    for query, scores_L in enumerate(scores_BL):
        # Written so that NaN, which compares with nothing, is among the candidates.
        columns_C = np.arange(columns) if least_B is None else (~(scores_L < least_B[query])).nonzero()[0]
        scores_C = scores_L.take(columns_C)
        order_K = (-scores_C).argsort(kind="stable")[:k]
        scores_BK[query, : len(order_K)], columns_BK[query, : len(order_K)] = scores_C[order_K], columns_C[order_K]
    if scores_BK[:, -1].min() == -np.inf:
        columns_BK[scores_BK == -np.inf] = NO_ROW
    return scores_BK, columns_BK


def has_blank(rows_BK: Int64, column: int = -1) -> bool:
    """Return whether a query of [B, K] rows, int64, B >= 1, lacks a result."""
    # Reading a number takes a tenth of the time of a reduction.
    return bool((rows_BK[0, column] if len(rows_BK) == 1 else rows_BK[:, column].min()) < 0)


def kth_best(scores_BC: Float32, k: int) -> Float32:
    """Compute the k-th highest score of each query, float32 [B]; −inf where candidates are fewer."""
    candidates = scores_BC.shape[1]
    if candidates < k:
        return np.full(len(scores_BC), -np.inf, np.float32)
    least_B: Float32
    least_B = scores_BC.min(axis=1) if candidates == k else np.partition(scores_BC, -k, axis=1)[:, -k]
    return least_B


def _offsets(rows: int, columns: int) -> Int64:
    """Compute the flat position where each row of an array begins, int64 [rows, 1]."""
    return np.arange(0, rows * columns, columns)[:, None]
