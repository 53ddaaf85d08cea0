"""Hold the labels that a search may return as a bitmap over catalogue rows, which are FAISS's ids.

Legend: `L` labels, `R` label rows, `C` inverted lists.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Int32, Int64
from longtail.bundle.sets import distinct, with_members

_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)
_NO_ROWS = np.empty(0, np.int64)


class Eligible:
    """Immutable set of label rows, some of 0..L−1, of one index.

    Args:
        bits: uint8 [⌈L / 8⌉], little-endian; bits beyond L are 0.
        expression: Milvus's boolean expression of the set; empty: every row.
        but_R: int64, ascending, rows outside the set that `expression` does not rule out.
        count: number of rows in the set; None: counted here.
    """

    def __init__(
        self,
        bits: npt.NDArray[np.uint8],
        labels: int,
        expression: str = "",
        but_R: Int64 = _NO_ROWS,
        count: int | None = None,
    ) -> None:
        self._bits = bits
        self.labels = labels
        self.expression, self.but_R = expression, but_R
        self.count = int(np.bitwise_count(bits).sum(dtype=np.int64)) if count is None else count
        self.share, self.whole = self.count / max(1, labels), self.count == labels
        self._parameters: tuple[Any, Any] | None = None
        self._per_list_C: Int64 | None = None
        self._in_head_H: Bools | None = None
        self._count_in_head: int | None = None

    @classmethod
    def from_mask(cls, mask_L: Bools) -> Eligible:
        """Create the set of rows where a mask, bool [L], is true."""
        return cls(np.packbits(mask_L, bitorder="little"), len(mask_L))

    def where(self, mask_L: Bools, expression: str | None = None) -> Eligible:
        """Intersect the set with a mask, bool [L]; `expression` is Milvus's for the result, if it changes."""
        bits = self._bits & np.packbits(mask_L, bitorder="little")
        return Eligible(bits, self.labels, self.expression if expression is None else expression, self.but_R)

    def within(self, visible: Eligible) -> Eligible:
        """Intersect the set with the visible rows, a set without an expression."""
        if visible.whole:
            return self
        return Eligible(self._bits & visible._bits, self.labels, self.expression, visible.but_R)

    def without(self, rows_R: Int64) -> Eligible:
        """Get the same set without some rows, int64 [R], which may repeat."""
        if rows_R.size == 0:
            return self
        # Lists that are sorted already, the usual case, need no sort.
        rising = len(rows_R) == 1 or bool((rows_R[1:] > rows_R[:-1]).all())
        rows_R = (rows_R if rising else distinct(rows_R)).astype(np.int64, copy=False)
        bits, bytes_R = self._bits.copy(), rows_R >> 3
        # `bits[…] &= …` writes a byte once, so the bits of rows that share a byte are joined first.
        first = np.flatnonzero(np.append(True, bytes_R[1:] != bytes_R[:-1]))
        bits[bytes_R[first]] &= ~np.bitwise_or.reduceat(_BITS[rows_R & 7], first)
        but_R = with_members(self.but_R, rows_R) if self.but_R.size else rows_R
        count = self.count - int(np.count_nonzero(self.contains(rows_R)))
        return Eligible(bits, self.labels, self.expression, but_R, count)

    def contains(self, rows: Int64) -> Bools:
        """Compute whether each row, in an array of any shape, is in the set; −1 never is."""
        # −1 >> 3 is −1, which reads the last byte; the next line discards what it says.
        held: Bools = (self._bits[rows >> 3] & _BITS[rows & 7]) != 0
        held &= rows >= 0
        return held

    def in_head(self, rows_H: Int64) -> Bools:
        """Compute which rows of an exact head are in the set, bool [H].

        The result is cached: calls must always pass the same head.
        """
        if self._in_head_H is None:
            self._in_head_H = self.contains(rows_H)
        return self._in_head_H

    def count_in_head(self, rows_H: Int64) -> int:
        """Count the rows of an exact head in the set; cached like `in_head`."""
        if self._count_in_head is None:
            self._count_in_head = int(np.count_nonzero(self.in_head(rows_H)))
        return self._count_in_head

    @property
    def rows(self) -> Int64:
        """Get the rows of the set, int64, ascending."""
        return np.flatnonzero(np.unpackbits(self._bits, count=self.labels, bitorder="little"))

    def per_list(self, lists_L: Int32, lists: int) -> Int64:
        """Count the rows of the set in each inverted list, int64 [C].

        The result is cached: calls must always pass the same lists.
        """
        if self._per_list_C is None:
            self._per_list_C = np.bincount(lists_L[self.rows], minlength=lists)
        return self._per_list_C

    def parameters(self, kind: type, **knobs: int) -> Any:
        """Create FAISS's search parameters that admit only the set; any number of threads may read them.

        The last parameters are cached: making them costs as much as searching a thousand rows.
        """
        key = kind, tuple(knobs.items())
        # Key and parameters are one tuple, read once: a thread never gets the parameters of another key.
        last = self._parameters
        if last is None or last[0] != key:
            last = self._parameters = key, kind(**knobs) if self.whole else kind(**knobs, sel=self._selector)
        return last[1]

    @cached_property
    def _selector(self) -> Any:
        return faiss.IDSelectorBitmap(self._bits)
