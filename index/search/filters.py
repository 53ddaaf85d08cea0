"""Describe the filter of one query: rows to exclude or allow, buckets, and a set that queries may share.

Legend: `L` labels, `R` label rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Bools, Int8, Int64
from longtail.bundle.conditions import Condition
from longtail.bundle.one_line import one_line
from longtail.bundle.sets import distinct, is_in
from longtail.index.errors import QueryError

_NO_ROWS = np.empty(0, np.int64)


def check_rows(field: str, rows_R: Int64, labels: int) -> None:
    """Refuse anything but an array of existing label rows, any integer type [R]; an empty array passes."""
    if rows_R.size == 0:
        return
    if rows_R.dtype.kind not in "iu" or rows_R.ndim != 1:
        raise QueryError(f"{field}: expected label rows, int64 [R], received {rows_R.dtype} {list(rows_R.shape)}")
    low, high = int(rows_R.min()), int(rows_R.max())
    if low < 0 or high >= labels:
        raise QueryError(f"{field}: expected label rows 0..{labels - 1}, received {low if low < 0 else high}")


class FilterMask:
    """Immutable set of an index's labels that any number of queries may share.

    Masks are compared by identity: queries whose filters hold the same `FilterMask` share a search, and the searcher
    caches its `Eligible` while the mask lives.

    Args:
        mask_L: bool [L], true for the labels of the set.

    Attributes:
        labels: L.
        conditions: conditions that all hold, for an engine that stores the columns; None if only the mask is known.
    """

    def __init__(self, mask_L: Bools) -> None:
        self.labels = len(mask_L)
        self.conditions: tuple[Condition, ...] | None = None
        self._read: Callable[[], Bools] | None = None
        self._bits: npt.NDArray[np.uint8] | None = np.packbits(mask_L, bitorder="little")

    @classmethod
    def from_conditions(cls, conditions: Sequence[Condition], labels: int, read: Callable[[], Bools]) -> FilterMask:
        """Create the set of labels that meet conditions; `read` computes the mask, bool [L], when needed."""
        mask = cls.__new__(cls)
        mask.labels, mask.conditions = labels, tuple(conditions)
        mask._read, mask._bits = read, None
        return mask

    @property
    def mask(self) -> Bools:
        """Get the mask of the labels, bool [L]."""
        return np.unpackbits(self._packed(), count=self.labels, bitorder="little").view(np.bool_)

    def contains(self, rows_R: Int64) -> Bools:
        """Compute which label rows, int64 [R], are in the set, bool [R]."""
        bits_R = self._packed()[rows_R >> 3] >> (rows_R & 7).astype(np.uint8)
        is_member_R: Bools = (bits_R & 1).astype(np.bool_)
        return is_member_R

    def _packed(self) -> npt.NDArray[np.uint8]:
        bits = self._bits
        if bits is None:
            assert self._read is not None
            bits = self._bits = np.packbits(self._read(), bitorder="little")
        return bits


@dataclass(frozen=True)
class Filter:
    """Labels that one query excludes or wants; all given conditions must hold.

    Args:
        exclude: int64 label rows that must not be returned.
        allow: int64 label rows; only these may be returned.
        buckets: only labels in these buckets may be returned: 0 head, 1 torso, 2 tail, 3 new.
        selection: only labels of this set may be returned.
        beyond: like `selection`, for labels added after the build; row 0 is the first added label.
    """

    exclude: Int64 | None = None
    allow: Int64 | None = None
    buckets: frozenset[int] | None = None
    selection: FilterMask | None = None
    beyond: FilterMask | None = None

    __repr__ = one_line

    @property
    def excluded(self) -> Int64:
        """Return the label rows that must not be returned, possibly none."""
        return _NO_ROWS if self.exclude is None else self.exclude

    def check(self, labels: int, query: int) -> None:
        """Refuse rows and buckets that do not exist."""
        for name, rows_R in (("exclude", self.exclude), ("allow", self.allow)):
            if rows_R is not None:
                check_rows(f"query {query}, filter {name}", rows_R, labels)
        if self.buckets is not None and not self.buckets <= set(range(len(BUCKET_NAMES))):
            raise QueryError(
                f"query {query}, filter buckets: expected some of 0 head, 1 torso, 2 tail, 3 new, "
                f"received {sorted(self.buckets)}"
            )

    def mask(self, buckets_L: Int8) -> Bools:
        """Compute which labels pass, bool [L], from every label's bucket."""
        if self.allow is None:
            mask_L = np.ones(len(buckets_L), np.bool_)
        else:
            mask_L = np.zeros(len(buckets_L), np.bool_)
            mask_L[self.allow] = True
        if self.buckets is not None:
            mask_L &= self._in_buckets(buckets_L)
        if self.selection is not None:
            mask_L &= self.selection.mask
        if self.exclude is not None:
            mask_L[self.exclude] = False
        return mask_L

    def allowed(self, buckets_L: Int8) -> Int64:
        """Get the labels that pass a filter with `allow`, int64, ascending.

        The cost grows with the lists of the filter, not with the catalogue.
        """
        rows_R = without_rows(_NO_ROWS if self.allow is None else self.allow, self.excluded)
        if self.selection is not None:
            rows_R = rows_R[self.selection.contains(rows_R)]
        return rows_R if self.buckets is None else rows_R[self._in_buckets(buckets_L[rows_R])]

    def _in_buckets(self, buckets_R: Int8) -> Bools:
        # Four answers, looked up by bucket, are quicker than `isin` over all rows.
        return np.isin(np.arange(len(BUCKET_NAMES)), list(self.buckets or ()))[buckets_R]


NO_FILTER = Filter()


def without_rows(rows_R: Int64, excluded: Int64) -> Int64:
    """Get the distinct rows of int64 [R], ascending, that `excluded` (int64) lacks."""
    rows_R = distinct(rows_R).astype(np.int64, copy=False)
    return rows_R[~is_in(rows_R, np.sort(excluded))] if rows_R.size and excluded.size else rows_R
