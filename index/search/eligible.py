"""A set of labels that may be returned, as each band's index has to be told.

Legend: `L` labels, `N` labels of one band, `R` label rows, `I` index ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from longtail.bundle.arrays import Bools, Int32, Int64
from longtail.index.search.band import Band
from longtail.index.search.selection import Selection


class Places:
    """In which band a label row stands, and under which id.

    Args:
        bands: every label row stands in exactly one.
        labels: L.
    """

    def __init__(self, bands: Sequence[Band], labels: int) -> None:
        self.bands = list(bands)
        self._ends = np.cumsum([len(band.rows_N) for band in bands]).tolist()
        self._labels = labels

    @cached_property
    def _by_row(self) -> Int32:
        """The ids of all bands counted on from one band to the next; four bytes a label, so only when asked for."""
        places_L = np.empty(self._labels, np.int32)
        for band, end in zip(self.bands, self._ends, strict=True):
            places_L[band.rows_N] = np.arange(end - len(band.rows_N), end, dtype=np.int32)
        return places_L

    def ids(self, rows_R: Int64) -> list[Int64]:
        """The rows' ids in each band, int64, for those that stand there."""
        places_R = self._by_row[rows_R].astype(np.int64)
        starts = [end - len(band.rows_N) for band, end in zip(self.bands, self._ends, strict=True)]
        return [
            places_R[(places_R >= start) & (places_R < end)] - start
            for start, end in zip(starts, self._ends, strict=True)
        ]


class Eligible:
    """A set of labels that may be returned, and its part of every band.

    Args:
        places: of every label.
        selections: the set's part of every band.
        make_mask: makes the set's mask, bool [L], should it be needed.
    """

    def __init__(self, places: Places, selections: Sequence[Selection], make_mask: Callable[[], Bools]) -> None:
        self.count = sum(selection.count for selection in selections)
        self._places = places
        self._selections = selections
        self._make_mask = make_mask

    @classmethod
    def of(cls, places: Places, mask_L: Bools) -> Eligible:
        """The labels where the mask, bool [L], is true."""
        return cls(places, [Selection.of(mask_L[band.rows_N]) for band in places.bands], lambda: mask_L)

    def without(self, rows_R: Int64) -> Eligible:
        """The same set but for some label rows, in time for these and a copy of one bit for each label."""
        if rows_R.size == 0:
            return self

        def make_mask() -> Bools:
            mask_L = self.mask.copy()
            mask_L[rows_R] = False
            return mask_L

        ids = self._places.ids(rows_R)
        rest = [selection.without(ids_I) for selection, ids_I in zip(self._selections, ids, strict=True)]
        return Eligible(self._places, rest, make_mask)

    @cached_property
    def parts(self) -> list[tuple[Band, Selection]]:
        """The bands that hold some of them, and which."""
        pairs = zip(self._places.bands, self._selections, strict=True)
        return [(band, selection) for band, selection in pairs if selection.count]

    @property
    def exact(self) -> bool:
        """Whether every band that holds some of them is searched exactly."""
        return all(band.kind == "flat" for band, _ in self.parts)

    @cached_property
    def mask(self) -> Bools:
        """bool [L], true for them."""
        return self._make_mask()

    @cached_property
    def rows(self) -> Int64:
        """The eligible label rows, int64, ascending."""
        return np.flatnonzero(self.mask)
