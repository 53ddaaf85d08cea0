"""Store pairs of a log, and the last labels of every query.

Legend: `Q` queries, `R` remembered entries of each, `H` entries of a history, `L` labels, `P` pairs, `M` labels that
stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.errors import require, require_array
from longtail.bundle.mapped_table import read_table
from longtail.bundle.one_line import one_line
from longtail.bundle.vocabulary import Vocabulary

REMEMBERED, REMEMBERED_IDS = "remembered.npy", "remembered.arrow"
NO_ENTRY = -1


class LogPairs(NamedTuple):
    """Pairs from which W is made, sorted by query, then time.

    Attributes:
        queries: int32 or int64 [P].
        labels: label rows [P]; entries of `to_refusals` where a query said no.
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
        return self.select(chosen_P)

    @property
    def filled_weights(self) -> Float32:
        """Return the weights, float32 [P]; 1 for each without any."""
        return np.ones(len(self.labels), np.float32) if self.weights is None else self.weights

    def select(self, rows: npt.NDArray[np.generic]) -> LogPairs:
        """Select pairs by a mask or by rows, in order."""
        weights_P = None if self.weights is None else self.weights[rows]
        return LogPairs(self.queries[rows], self.labels[rows], weights_P)

    def last_of_each(self, most: int) -> LogPairs:
        """Select the last `most` pairs of every query."""
        from_end_P = self.ranks_from_end()
        return self if from_end_P.max(initial=0) <= most else self.select(from_end_P <= most)

    def ranks_from_end(self) -> Int64:
        """Rank the pairs of every query from its last one, 1, int64 [P]."""
        firsts = np.flatnonzero(np.append(True, self.queries[1:] != self.queries[:-1])[: len(self.queries)])
        counts = np.diff(np.append(firsts, len(self.queries)))
        ranks_P: Int64 = np.repeat(firsts + counts, counts) - np.arange(len(self.queries))
        return ranks_P


@dataclass(frozen=True)
class Remembered:
    """The last labels of every query, for requests that give its id alone.

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
        # Newest first: `np.unique` finds the first entry of a label, and the newest one decides.
        newest_H = self._entries(query_id)[::-1]
        if not (newest_H < 0).any():
            return newest_H[:0]
        rows_H, last_H = np.unique(np.where(newest_H < 0, to_refusals(newest_H), newest_H), return_index=True)
        return rows_H[newest_H[last_H] < 0]

    def _entries(self, query_id: str) -> Int64:
        rows_R = self.rows_QR[self.queries.find_all([query_id])[0]]
        rows_H: Int64 = rows_R[rows_R != NO_ENTRY].astype(np.int64)
        return rows_H

    def by_label(self, ids_Q: pa.Array, labels: int, *, refused: bool = False) -> tuple[Int32, Int32]:
        """List which of some queries remember each label: positions, int32 [P], by label, and ends, int32 [L + 1].

        Args:
            refused: list only the queries that last said no to a label.
        """
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

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

    def append_log(self, history: LogPairs, ids_Q: pa.Array, rows_Q: Int32) -> Remembered:
        """Replace the labels of a log's queries by their last ones.

        Args:
            history: remembered and later pairs, sorted by query, then time.
            ids_Q, rows_Q: ids and rows of the log's queries; null is not remembered, row 0 is a new query.
        """
        named_Q = np.asarray(ids_Q.is_valid())
        new_Q = named_Q & (rows_Q == 0)
        rows_Q = np.where(new_Q, self.queries.rows - 1 + np.cumsum(new_Q), rows_Q).astype(np.int32)
        ids = pa.concat_arrays([self.queries.ids, ids_Q.filter(pa.array(new_Q)).cast(self.queries.ids.type)])
        named_P = named_Q[history.queries]
        fresh = remember(history.select(named_P), Vocabulary(ids), rows_Q, self.rows_QR.shape[1])
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
    require_array(file, rows_QR, np.int32, queries=queries, R=None)
    inside = bool(((rows_QR >= least) & (rows_QR < labels)).all())
    require(f"{file} holds label rows, or -1", inside, f"{least}..{labels - 1}", "others")


def select_histories(rows_QR: Int32, rows_M: Int64) -> Int32:
    """Number the labels of histories by the rows that stay, int64 [M]; other labels leave them."""
    refused_QR = rows_QR < NO_ENTRY
    rows_QR = np.where(refused_QR, to_refusals(rows_QR), rows_QR)
    numbers_QR = renumber(rows_M, int(rows_QR.max(initial=0)))[rows_QR]
    numbers_QR = np.where(refused_QR & (numbers_QR != NO_ENTRY), to_refusals(numbers_QR), numbers_QR)
    order_QR = np.argsort(numbers_QR != NO_ENTRY, axis=1, kind="stable")
    return np.take_along_axis(numbers_QR, order_QR, axis=1)


def to_refusals(rows: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Convert label rows to entries of refused labels, and back."""
    return NO_ENTRY - 1 - rows


def remember(pairs: LogPairs, queries: Vocabulary, query_rows_Q: Int32, entries: int) -> Remembered:
    """Keep the last entries of every query.

    Args:
        query_rows_Q: row of `queries` by the pairs' query number, int32.
    """
    rows_QR = np.full((queries.rows, entries), NO_ENTRY, np.int32)
    recent = pairs.last_of_each(entries)
    rows_QR[query_rows_Q[recent.queries], entries - recent.ranks_from_end()] = recent.labels
    return Remembered(queries, rows_QR)


def renumber(rows_M: Int64, last: int) -> Int32:
    """Return the new number of each row; −1 for rows that do not stay."""
    numbers = np.full(max(last, int(rows_M.max(initial=0))) + 2, NO_ENTRY, np.int32)
    stay_M = rows_M >= 0
    numbers[rows_M[stay_M]] = np.flatnonzero(stay_M)
    return numbers
