"""The labels that a search may return, resolved against the bands of one index.

A `Filter` says what one query asks for, in label rows. `EligibleLabels` is what that comes to in an index: of every
band an `IdSet`, the bitmap that FAISS reads.

Legend: `L` labels, `N` labels of one band, `R` label rows, `I` index ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Int32, Int64

_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)


class IdSet:
    """Some of the ids 0..N−1 of one FAISS index; its members never change.

    Args:
        bits: uint8 [⌈N / 8⌉], little-endian; those beyond N are 0.
        size: N.

    Attributes:
        count: ids in the set.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], size: int) -> None:
        self._bits = bits
        self._size = size
        self._last: tuple[Any, Any] | None = None
        self._counts_C: Int64 | None = None
        self.count = int(np.bitwise_count(bits).sum(dtype=np.int64))

    @classmethod
    def from_mask(cls, mask_N: Bools) -> IdSet:
        """The ids where the mask, bool [N], is true."""
        return cls(np.packbits(mask_N, bitorder="little"), len(mask_N))

    def where(self, mask_N: Bools) -> IdSet:
        """The ids of the set where the mask, bool [N], is true."""
        masked = IdSet.from_mask(mask_N)
        return masked if self.whole else IdSet(self._bits & masked._bits, self._size)

    def without(self, ids_I: Int64) -> IdSet:
        """The same set but for some ids, int64 [I], which may repeat."""
        if ids_I.size == 0:
            return self
        bits = self._bits.copy()
        np.bitwise_and.at(bits, ids_I >> 3, ~_BITS[ids_I & 7])
        return IdSet(bits, self._size)

    def followed_by(self, other: IdSet) -> IdSet:
        """The ids of both, the other's counted on from the first multiple of eight that is N or more.

        Ids between N and there, of which an index has none, are in the set where every other of this one is.
        """
        bits = self._bits.copy()
        if self.whole and self._size % 8:
            bits[-1] = 0xFF
        return IdSet(np.concatenate([bits, other._bits]), 8 * len(bits) + other._size)

    def contains(self, ids: Int64) -> Bools:
        """Whether each id, in an array of any shape, is in the set; −1 never is."""
        held: Bools = (self._bits[ids >> 3] & _BITS[ids & 7]) != 0
        held &= ids >= 0
        return held

    @property
    def ids(self) -> Int64:
        """The ids in the set, int64, ascending."""
        return np.flatnonzero(np.unpackbits(self._bits, count=self._size, bitorder="little"))

    def counted(self, cells_N: Int32, cells: int) -> Int64:
        """How many ids of the set stand in each cell, int64 [cells]; kept, so that the index must always be the same.

        Args:
            cells_N: the cell of every id of the index, int32 [N].
            cells: how many there are.
        """
        if self._counts_C is None:
            self._counts_C = np.bincount(cells_N[self.ids], minlength=cells)
        return self._counts_C

    @property
    def whole(self) -> bool:
        """Whether every id is in the set."""
        return self.count == self._size

    @property
    def share(self) -> float:
        """Ids in the set per id of the index."""
        return self.count / self._size

    def parameters(self, kind: type, **knobs: int) -> Any:
        """FAISS's search parameters of a kind that rule out every other id; read by any number of threads.

        The last ones are kept, for a set of labels is mostly searched with one effort, and making them costs as much
        as to search a thousand rows.
        """
        key = kind, tuple(knobs.items())
        last = self._last
        if last is None or last[0] != key:
            last = self._last = key, kind(**knobs) if self.whole else kind(**knobs, sel=self._selector)
        return last[1]

    @cached_property
    def _selector(self) -> Any:
        return faiss.IDSelectorBitmap(self._bits)


class EligibleLabels:
    """Labels of one index that may be returned, as a set of ids for each band. Immutable; begin with `every`.

    Args:
        band_rows: label rows of every band, int64 [N] each; a row stands in one band only.
        id_sets: the ids that may be returned, of every band.
        positions: every label's id, int32 [L], counted on from one band to the next.

    Attributes:
        count: labels in the set.
    """

    def __init__(self, band_rows: Sequence[Int64], id_sets: Sequence[IdSet], positions: Callable[[], Int32]) -> None:
        self.count = sum(ids.count for ids in id_sets)
        self._band_rows = band_rows
        self._id_sets = id_sets
        self._positions = positions

    @classmethod
    def every(cls, band_rows: Sequence[Int64], positions_L: Int32 | None = None) -> EligibleLabels:
        """All labels of an index.

        Args:
            band_rows: label rows of every band, int64 [N] each.
            positions_L: of `positions_of` the same; None: made when they are first asked for.
        """
        id_sets = [IdSet.from_mask(np.ones(len(rows_N), np.bool_)) for rows_N in band_rows]
        # Four bytes a label, so only when asked for, and once for all the sets of an index.
        return cls(band_rows, id_sets, cache(lambda: positions_of(band_rows) if positions_L is None else positions_L))

    def where(self, mask_L: Bools) -> EligibleLabels:
        """Those of them where the mask, bool [L], is true."""
        id_sets = [ids.where(mask_L[rows_N]) for ids, rows_N in zip(self._id_sets, self._band_rows, strict=True)]
        return EligibleLabels(self._band_rows, id_sets, self._positions)

    def without(self, rows_R: Int64) -> EligibleLabels:
        """The same set but for some label rows, int64 [R]: the work is these, and a copy of one bit for each label."""
        if rows_R.size == 0:
            return self
        id_sets = [ids.without(ids_I) for ids, ids_I in zip(self._id_sets, self.ids_of(rows_R), strict=True)]
        return EligibleLabels(self._band_rows, id_sets, self._positions)

    def ids_of(self, rows_R: Int64) -> list[Int64]:
        """The ids of label rows, int64 [R], in each band, int64 [I], for those that stand there, eligible or not."""
        positions_R = self._positions()[rows_R].astype(np.int64)
        ends = np.cumsum([len(rows_N) for rows_N in self._band_rows]).tolist()
        return [
            positions_R[(positions_R >= start) & (positions_R < end)] - start
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    @cached_property
    def parts(self) -> list[tuple[int, IdSet]]:
        """The bands that hold some of them, by place, and which ids."""
        return [(band, ids) for band, ids in enumerate(self._id_sets) if ids.count]

    @cached_property
    def joined(self) -> IdSet:
        """The ids of two bands in one set: the second's, followed by the first's."""
        first, second = self._id_sets
        return second.followed_by(first)

    @cached_property
    def rows(self) -> Int64:
        """Their label rows, int64, ascending."""
        found = [self._band_rows[band][ids.ids] for band, ids in self.parts]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)


def positions_of(band_rows: Sequence[Int64]) -> Int32:
    """Every label's id, int32 [L], counted on from one band to the next.

    Args:
        band_rows: label rows of every band, int64 [N] each.
    """
    positions_L = np.empty(sum(len(rows_N) for rows_N in band_rows), np.int32)
    start = 0
    for rows_N in band_rows:
        positions_L[rows_N] = np.arange(start, start + len(rows_N), dtype=np.int32)
        start += len(rows_N)
    return positions_L
