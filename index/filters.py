"""Which labels a query may be answered with.

Legend: `L` labels, `N` labels of one band, `R` label rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bundle import BUCKET_NAMES
from index.band import Band, Selection
from index.errors import QueryError
from index.exact import Int64


@dataclass(frozen=True)
class Filter:
    """What one query excludes or asks for; all three conditions hold together.

    Args:
        exclude: int64 label rows that must not be returned.
        allow: int64 label rows; only these may be returned.
        buckets: only labels in these buckets: 0 head, 1 torso, 2 tail.
    """

    exclude: Int64 | None = None
    allow: Int64 | None = None
    buckets: frozenset[int] | None = None

    def check(self, labels: int, query: int) -> None:
        """Refuse rows and buckets that do not exist.

        Raises:
            QueryError: names the query, the field and the value.
        """
        for name, rows_R in (("exclude", self.exclude), ("allow", self.allow)):
            if rows_R is None or rows_R.size == 0:
                continue
            if rows_R.dtype.kind not in "iu" or rows_R.ndim != 1:
                raise QueryError(
                    f"query {query}, filter {name}: expected label rows, int64 [R], "
                    f"received {rows_R.dtype} {list(rows_R.shape)}"
                )
            low, high = int(rows_R.min()), int(rows_R.max())
            if low < 0 or high >= labels:
                raise QueryError(
                    f"query {query}, filter {name}: expected label rows 0..{labels - 1}, "
                    f"received {low if low < 0 else high}"
                )
        if self.buckets is not None and not self.buckets <= set(range(len(BUCKET_NAMES))):
            raise QueryError(
                f"query {query}, filter buckets: expected some of 0 head, 1 torso, 2 tail, "
                f"received {sorted(self.buckets)}"
            )

    def mask(self, buckets_L: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
        """The labels that pass, bool [L].

        Args:
            buckets_L: every label's bucket.
        """
        if self.allow is None:
            mask_L = np.ones(len(buckets_L), np.bool_)
        else:
            mask_L = np.zeros(len(buckets_L), np.bool_)
            mask_L[self.allow] = True
        if self.buckets is not None:
            mask_L &= np.isin(np.arange(len(BUCKET_NAMES)), list(self.buckets))[buckets_L]
        if self.exclude is not None:
            mask_L[self.exclude] = False
        return mask_L


class Eligible:
    """A set of labels that may be returned, and its part of every band.

    Args:
        bands: the bands that are searched.
        mask_L: bool [L].
    """

    def __init__(self, bands: Sequence[Band], mask_L: npt.NDArray[np.bool_]) -> None:
        self.mask_L = mask_L
        self.count = int(np.count_nonzero(mask_L))
        self._bands = bands
        self._parts: list[tuple[Band, Selection | None]] | None = None

    @property
    def parts(self) -> list[tuple[Band, Selection | None]]:
        """Bands that hold eligible labels; no selection where the whole band is eligible."""
        if self._parts is None:
            selections = [(band, Selection(self.mask_L[band.rows_N])) for band in self._bands]
            self._parts = [
                (band, None if selection.share == 1 else selection) for band, selection in selections if selection.count
            ]
        return self._parts

    def rows(self) -> Int64:
        """The eligible label rows, int64, ascending."""
        return np.flatnonzero(self.mask_L)
