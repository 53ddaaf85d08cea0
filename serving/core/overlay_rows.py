"""Append rows of changed labels to arrays that later overlays share.

A label that changes again gets a new row, and its earlier row is retired. No row is written twice, so an overlay of a
running request keeps its rows while later overlays append to the same arrays.

Legend: `M` rows, `B` appended rows, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle.added_labels import AddedLabels
from longtail.bundle.arrays import Bools, Float32, Int64

_Columns = dict[str, npt.NDArray[Any]]

_MOST_RETIRED = 256
"""Retired rows that searches score in vain; beyond, at most one in four of the rows in use."""
_AUGMENTED = "augmented"


class _Arrays:
    """Growing columns, and the rows of each label."""

    def __init__(self, columns: _Columns, length: int) -> None:
        self.length = length
        self.columns = columns
        self.newest: dict[str, int] = {id_: row for row, id_ in enumerate(columns["ids"][:length])}
        self.older: dict[int, int] = {}
        """Row of the same label before a row, where there is one."""

    def append(self, more: _Columns) -> None:
        """Append rows behind the last; earlier views stay valid."""
        begin, self.length = self.length, self.length + len(more["ids"])
        if self.length > len(self.columns["ids"]):
            room = (2 * self.length,)
            self.columns = {name: _resized(column, begin, *room) for name, column in self.columns.items()}
        for name, column in self.columns.items():
            column[begin : self.length] = more[name]
        for row, id_ in enumerate(more["ids"], start=begin):
            if id_ in self.newest:
                self.older[row] = self.newest[id_]
            self.newest[id_] = row


@dataclass(frozen=True)
class OverlayRows:
    """Rows of changed labels, retired ones included. Immutable.

    Attributes:
        added: ids, embeddings, counts, log p_n, buckets, biases, priors and display columns, M rows.
        augmented_ME: augmented rows, float32.
        in_use_M: bool, false for retired rows.
        count: number of rows in use.
        origin: the same object for rows that continue each other.
    """

    added: AddedLabels
    augmented_ME: Float32
    in_use_M: Bools
    count: int
    origin: _Arrays

    @classmethod
    def of(cls, added: AddedLabels, augmented_ME: Float32) -> OverlayRows:
        """Create rows that are all in use."""
        return cls._all_of(_Arrays(_columns_of(added, augmented_ME), len(added)), np.ones(len(added), np.bool_))

    @classmethod
    def _all_of(cls, arrays: _Arrays, in_use_M: Bools) -> OverlayRows:
        """Create views of all rows that arrays hold now."""
        columns = {name: column[: arrays.length] for name, column in arrays.columns.items()}
        augmented_ME = columns.pop(_AUGMENTED)
        added: Any = {field.name: columns.get(field.name) for field in fields(AddedLabels)}
        return cls(AddedLabels(**added), augmented_ME, in_use_M, int(np.count_nonzero(in_use_M)), arrays)

    def __len__(self) -> int:
        return len(self.in_use_M)

    def row_of(self, id_: str) -> int | None:
        """Get the row in use of a label, 0 .. M − 1; None without one."""
        row = self.origin.newest.get(id_)
        while row is not None and row >= len(self):  # appended since
            row = self.origin.older.get(row)
        return None if row is None or not self.in_use_M[row] else row

    def changed(self, retired: Sequence[int], more: AddedLabels, augmented_BE: Float32) -> OverlayRows:
        """Append rows, and retire others by their numbers."""
        arrays, columns = self.origin, _columns_of(more, augmented_BE)
        in_use_M = np.append(self.in_use_M, np.ones(len(more), np.bool_))
        in_use_M[np.array(retired, np.int64)] = False
        count = self.count - len(retired) + len(more)
        if len(self) != arrays.length:  # another overlay continued these rows
            arrays = self._copy(np.arange(len(self)))
        arrays.append(columns)
        rows = OverlayRows._all_of(arrays, in_use_M)
        if len(rows) - count <= max(_MOST_RETIRED, count // 4):
            return rows
        return OverlayRows._all_of(rows._copy(np.flatnonzero(in_use_M)), np.ones(count, np.bool_))

    def _copy(self, rows_B: Int64) -> _Arrays:
        """Copy some rows to arrays of their own."""
        return _Arrays({name: column[rows_B] for name, column in self.origin.columns.items()}, len(rows_B))


def _columns_of(added: AddedLabels, augmented_ME: Float32) -> _Columns:
    columns: _Columns = {_AUGMENTED: augmented_ME}
    for name, column in vars(added).items():
        if isinstance(column, list):
            columns[name] = np.empty(len(column), np.object_)
            columns[name][:] = column
        elif column is not None:
            columns[name] = column
    return columns


def _resized(column: npt.NDArray[Any], length: int, room: int) -> npt.NDArray[Any]:
    """Copy the first rows of a column into a longer one."""
    longer = np.empty((room, *column.shape[1:]), column.dtype)
    longer[:length] = column[:length]
    return longer
