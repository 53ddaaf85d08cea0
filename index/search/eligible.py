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
from longtail.bundle.sets import distinct

Bits = npt.NDArray[np.uint8]
_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)


def _bytes_of(rows_R: Int64) -> tuple[Int64, Bits]:
    """Get the places of the bytes of a bitmap that hold some rows, ascending and not none, and the rows' bits there."""
    bytes_R = rows_R >> 3
    # An assignment by places writes a byte once, so the bits of rows that share a byte are joined.
    first = np.flatnonzero(np.append(True, bytes_R[1:] != bytes_R[:-1]))
    return bytes_R[first], np.bitwise_or.reduceat(_BITS[rows_R & 7], first)


def _rows_of(bits: Bits) -> Int64:
    """Get the rows of a bitmap, int64, ascending; bytes without a row cost little."""
    bytes_N = np.flatnonzero(bits)
    held_N8 = np.unpackbits(bits[bytes_N, None], axis=1, bitorder="little").view(np.bool_)
    rows_R: Int64 = (8 * bytes_N[:, None] + np.arange(8))[held_N8]
    return rows_R


class Eligible:
    """Immutable set of label rows, some of 0..L−1, of one index.

    Args:
        bits: uint8 [⌈L / 8⌉], little-endian; bits beyond L are 0.
        expression: Milvus's boolean expression of the set; empty: every row.
        admitted: bits of the rows that `expression` admits; None: every row.
        count: number of rows in the set; None: counted here.
    """

    def __init__(
        self,
        bits: Bits,
        labels: int,
        expression: str = "",
        admitted: Bits | None = None,
        count: int | None = None,
    ) -> None:
        self._bits = bits
        self.labels = labels
        self.expression, self._admitted = expression, admitted
        self.count = int(np.bitwise_count(bits).sum(dtype=np.int64)) if count is None else count
        self.share, self.whole = self.count / max(1, labels), self.count == labels
        self._parameters: tuple[Any, Any] | None = None
        self._per_list_C: Int64 | None = None
        self._earlier: Eligible | None = None
        """An earlier version of the set, of which something was computed."""

    @classmethod
    def from_mask(cls, mask_L: Bools) -> Eligible:
        """Create the set of rows where a mask, bool [L], is true."""
        return cls(np.packbits(mask_L, bitorder="little"), len(mask_L))

    def where(self, mask_L: Bools, expression: str | None = None) -> Eligible:
        """Intersect the set with a mask, bool [L]; `expression` is Milvus's for the result, if it changes."""
        passing = np.packbits(mask_L, bitorder="little")
        bits = self._bits & passing
        if expression is None:
            return Eligible(bits, self.labels, self.expression, self._admitted)
        admitted = passing if self._admitted is None else self._admitted & passing
        return Eligible(bits, self.labels, expression, admitted)

    def within(self, visible: Eligible) -> Eligible:
        """Intersect the set with the visible rows, a set without an expression."""
        if visible.whole:
            return self
        return Eligible(self._bits & visible._bits, self.labels, self.expression, self._admitted)

    def succeeding(self, earlier: Eligible | None) -> Eligible:
        """Return this set, knowing what was computed for an earlier version of it, which is returned if equal."""
        if earlier is None:
            return self
        if np.array_equal(self._bits, earlier._bits):
            return earlier
        self._earlier, earlier._earlier = earlier if earlier._per_list_C is not None else earlier._earlier, None
        return self

    def share_unlike(self, other: Eligible) -> float:
        """Compute the share of labels that are in one of two sets alone."""
        return int(np.bitwise_count(self._bits ^ other._bits).sum(dtype=np.int64)) / max(1, self.labels)

    def without(self, rows_R: Int64) -> Eligible:
        """Get the same set without some rows, int64 [R], which may repeat."""
        if rows_R.size == 0:
            return self
        # Lists that are sorted already, the usual case, need no sort.
        rising = len(rows_R) == 1 or bool((rows_R[1:] > rows_R[:-1]).all())
        rows_R = (rows_R if rising else distinct(rows_R)).astype(np.int64, copy=False)
        bits = self._bits.copy()
        bytes_N, bits_N = _bytes_of(rows_R)
        bits[bytes_N] &= ~bits_N
        count = self.count - int(np.count_nonzero(self.contains(rows_R)))
        return Eligible(bits, self.labels, self.expression, self._admitted, count)

    def changed(self, rows_R: Int64, held_R: Bools) -> Eligible:
        """Get a set without an expression that holds some distinct rows, ascending, or does not, and others as here."""
        bits = self._bits.copy()
        for rows, is_held in ((rows_R[held_R], True), (rows_R[~held_R], False)):
            if rows.size:
                bytes_N, bits_N = _bytes_of(rows)
                bits[bytes_N] = bits[bytes_N] | bits_N if is_held else bits[bytes_N] & ~bits_N
        return Eligible(bits, self.labels)

    def contains(self, rows: Int64) -> Bools:
        """Compute whether each row, in an array of any shape, is in the set; −1 never is."""
        # −1 >> 3 is −1, which reads the last byte; the next line discards what it says.
        held: Bools = (self._bits[rows >> 3] & _BITS[rows & 7]) != 0
        held &= rows >= 0
        return held

    def _changes(self, earlier: Eligible) -> tuple[Int64, Int64]:
        """Get the rows that an earlier version of the set lacks, and those that it alone has."""
        return _rows_of(self._bits & ~earlier._bits), _rows_of(earlier._bits & ~self._bits)

    @cached_property
    def rows_to_drop(self) -> Int64:
        """Get the rows outside the set that `expression` does not rule out, int64, ascending."""
        others_R = _rows_of(~self._bits if self._admitted is None else self._admitted & ~self._bits)
        return others_R[: np.searchsorted(others_R, self.labels)]

    @property
    def rows(self) -> Int64:
        """Get the rows of the set, int64, ascending."""
        return np.flatnonzero(np.unpackbits(self._bits, count=self.labels, bitorder="little"))

    def per_list(self, lists_L: Int32, lists: int) -> Int64:
        """Count the rows of the set in each inverted list, int64 [C].

        The result is cached: calls must always pass the same lists.
        """
        if self._per_list_C is None:
            earlier = self._earlier
            if earlier is None or earlier._per_list_C is None:
                self._per_list_C = np.bincount(lists_L[self.rows], minlength=lists)
            else:
                come_C, gone_C = (np.bincount(lists_L[rows], minlength=lists) for rows in self._changes(earlier))
                self._per_list_C = earlier._per_list_C + come_C - gone_C
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
