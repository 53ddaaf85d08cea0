"""Hold the labels that a search may return: a bitmap over rows, FAISS's ids.

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


def _bytes_and_bits(rows_R: Int64) -> tuple[Int64, Bits]:
    """Compute the bytes of a bitmap that hold ascending rows, and the rows' bits."""
    bytes_R = rows_R >> 3
    # An assignment by positions writes a byte once, so the bits of rows that share a byte are joined.
    starts = np.flatnonzero(np.append(True, bytes_R[1:] != bytes_R[:-1]))
    return bytes_R[starts], np.bitwise_or.reduceat(_BITS[rows_R & 7], starts)


def _list_rows(bits: Bits) -> Int64:
    """Get the rows of a bitmap, int64, ascending; bytes without a row cost little."""
    bytes_N = np.flatnonzero(bits)
    is_set_N8 = np.unpackbits(bits[bytes_N, None], axis=1, bitorder="little").view(np.bool_)
    rows_R: Int64 = (8 * bytes_N[:, None] + np.arange(8))[is_set_N8]
    return rows_R


class Eligible:
    """Immutable set of label rows, some of 0..L−1, of one index.

    Args:
        bits: uint8 [⌈L / 8⌉], little-endian; bits beyond L are 0.
        count: number of rows in the set; None: counted here.
    """

    def __init__(self, bits: Bits, labels: int, count: int | None = None) -> None:
        self._bits = bits
        self.labels = labels
        self.count = int(np.bitwise_count(bits).sum(dtype=np.int64)) if count is None else count
        self.share, self.is_complete = self.count / max(1, labels), self.count == labels
        self._parameters: tuple[Any, Any] | None = None
        self._per_list_C: Int64 | None = None
        self._earlier: Eligible | None = None
        """An earlier version of the set, of which something was computed."""

    @classmethod
    def from_mask(cls, mask_L: Bools) -> Eligible:
        """Create the set of rows where a mask, bool [L], is true."""
        return cls(np.packbits(mask_L, bitorder="little"), len(mask_L))

    def intersect(self, visible: Eligible) -> Eligible:
        """Intersect the set with another set."""
        return self if visible.is_complete else Eligible(self._bits & visible._bits, self.labels)

    def succeeding(self, earlier: Eligible | None) -> Eligible:
        """Return this set with what an earlier version computed; the earlier one if equal."""
        if earlier is None:
            return self
        if np.array_equal(self._bits, earlier._bits):
            return earlier
        # The earlier set lets go of its own predecessor, or all versions would stay in memory.
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
        bytes_N, bits_N = _bytes_and_bits(rows_R)
        bits[bytes_N] &= ~bits_N
        count = self.count - int(np.count_nonzero(self.contains(rows_R)))
        return Eligible(bits, self.labels, count)

    def changed(self, rows_R: Int64, is_member_R: Bools) -> Eligible:
        """Add or remove distinct rows, ascending."""
        bits = self._bits.copy()
        for rows, is_member in ((rows_R[is_member_R], True), (rows_R[~is_member_R], False)):
            if rows.size:
                bytes_N, bits_N = _bytes_and_bits(rows)
                bits[bytes_N] = bits[bytes_N] | bits_N if is_member else bits[bytes_N] & ~bits_N
        return Eligible(bits, self.labels)

    def contains(self, rows: Int64) -> Bools:
        """Compute whether each row, in an array of any shape, is in the set; −1 never is."""
        # −1 >> 3 is −1, which reads the last byte; the next line discards that bit.
        is_member: Bools = (self._bits[rows >> 3] & _BITS[rows & 7]) != 0
        is_member &= rows >= 0
        return is_member

    def minus(self, other: Eligible) -> Int64:
        """Get the rows of this set that another set lacks, int64, ascending."""
        return _list_rows(self._bits & ~other._bits)

    @cached_property
    def excluded_rows(self) -> Int64:
        """Get the rows outside the set, int64, ascending."""
        rows_R = _list_rows(~self._bits)
        return rows_R[: np.searchsorted(rows_R, self.labels)]

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
                added_C, removed_C = (
                    np.bincount(lists_L[rows_R], minlength=lists)
                    for rows_R in (self.minus(earlier), earlier.minus(self))
                )
                self._per_list_C = earlier._per_list_C + added_C - removed_C
        return self._per_list_C

    def parameters(self, kind: type, **knobs: int) -> Any:
        """Create FAISS's search parameters that admit only the set; any number of threads may read them.

        The last parameters are cached: making them costs as much as searching a thousand rows.
        """
        key = kind, tuple(knobs.items())
        # Key and parameters are one tuple, read once: a thread never gets the parameters of another key.
        last = self._parameters
        if last is None or last[0] != key:
            last = self._parameters = key, kind(**knobs) if self.is_complete else kind(**knobs, sel=self._selector)
        return last[1]

    @cached_property
    def _selector(self) -> Any:
        return faiss.IDSelectorBitmap(self._bits)
