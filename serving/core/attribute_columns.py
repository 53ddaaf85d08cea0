"""One column of labels as sets of rows: by value, or in order of a number.

Sets are roaring bitmaps. A column of few values keeps one for each, a column of many the rows in order of value, from
which a bitmap is made when it is asked for.

Legend: `L` labels, `V` distinct values, `R` rows that have a value, in order of it.
"""

from __future__ import annotations

import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import AbstractBitMap, BitMap, FrozenBitMap

from longtail.bundle.arrays import Int64
from longtail.bundle.filterable import FilterKind

Rows = npt.NDArray[np.uint32]
_BITMAPS_UPTO = 4_096
"""Values of a column up to which each has a bitmap of its own."""


class Column(Protocol):
    """What conditions on one column ask of it."""

    present: AbstractBitMap
    """Rows that have a value."""

    def having(self, values: Iterable[Any]) -> BitMap:
        """Rows that have one of these values."""


def bitmap(rows_R: Rows) -> BitMap:
    """The set of some rows, uint32 [R], of any order."""
    # An array of Python's is read as it lies there, an array of NumPy's number by number.
    return BitMap(array.array("I", rows_R.tobytes()))


class ValueColumn:
    """Strings, booleans or lists of strings.

    Args:
        column: string, boolean or list of strings, [L]; null for a label without a value.

    Attributes:
        present: rows that have a value.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        whole = _decoded(column)
        if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
            rows = pc.list_parent_indices(whole).to_numpy(zero_copy_only=False)
            whole = _decoded(pa.chunked_array([pc.list_flatten(whole)]))
        else:
            rows = np.arange(len(whole))
        if pa.types.is_boolean(whole.type):
            whole = pc.cast(whole, pa.string())
        known = pc.is_valid(whole).to_numpy(zero_copy_only=False)
        encoded = whole.filter(pa.array(known)).dictionary_encode()
        order = pc.sort_indices(encoded.dictionary).to_numpy()
        self._values = encoded.dictionary.take(pa.array(order))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        codes = ranks[encoded.indices.to_numpy(zero_copy_only=False)]
        rows_R = rows[known].astype(np.uint32)[np.argsort(codes, kind="stable")]
        ends_V = np.cumsum(np.bincount(codes, minlength=len(order)))
        self.present: AbstractBitMap = FrozenBitMap(bitmap(rows_R))
        self._bitmaps: list[FrozenBitMap] | None = None
        self._rows_R, self._ends_V = rows_R, ends_V
        if len(order) <= _BITMAPS_UPTO:
            self._bitmaps = [FrozenBitMap(self._slice(code)) for code in range(len(order))]
            self._rows_R, self._ends_V = rows_R[:0], ends_V[:0]

    def having(self, values: Iterable[str]) -> BitMap:
        """Rows that have one of these values; of lists, among others."""
        found = BitMap()
        for value in values:
            code = bisect_left(self._values, value, key=_text)
            if code < len(self._values) and _text(self._values[code]) == value:
                found |= self._slice(code) if self._bitmaps is None else self._bitmaps[code]
        return found

    def _slice(self, code: int) -> BitMap:
        return bitmap(self._rows_R[self._ends_V[code - 1] if code else 0 : self._ends_V[code]])


class NumberColumn:
    """Numbers, or dates as microseconds since 1970.

    Args:
        column: integers, floats, decimals, dates or times, [L]; null or NaN for a label without a value.

    Attributes:
        present: rows that have a value.
        type: in which values are compared.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        whole = _decoded(column)
        if pa.types.is_date(whole.type) or pa.types.is_timestamp(whole.type):
            whole = pc.cast(pc.cast(whole, pa.timestamp("us"), safe=False), pa.int64())
        elif pa.types.is_decimal(whole.type):
            # By way of their digits: 3.30 is then the float that JSON's 3.3 is, which Arrow's own cast may miss.
            whole = pc.cast(pc.cast(whole, pa.string()), pa.float64())
        known = pc.is_valid(whole).to_numpy(zero_copy_only=False)
        values = whole.filter(pa.array(known)).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(known).astype(np.uint32)
        if values.dtype.kind == "f":
            number = ~np.isnan(values)
            values, rows = values[number], rows[number]
        order = np.argsort(values, kind="stable")
        self._values_R, self._rows_R = values[order], rows[order]
        self.type: np.dtype[Any] = values.dtype
        self.present: AbstractBitMap = FrozenBitMap(bitmap(self._rows_R))

    def having(self, values: Iterable[float]) -> BitMap:
        """Rows whose number is one of these."""
        found = BitMap()
        for value in values:
            found |= self.between(value, "left", value, "right")
        return found

    def between(self, low: float | None, low_side: str, high: float | None, high_side: str) -> BitMap:
        """Rows from one number to another.

        Args:
            low: where they begin; None: with the least.
            low_side: `left` with rows of that number, `right` after them.
            high: where they end; None: with the greatest.
            high_side: `left` before rows of that number, `right` with them.
        """
        start = 0 if low is None else self._place(low, low_side)
        end = len(self._rows_R) if high is None else self._place(high, high_side)
        return bitmap(self._rows_R[start:end])

    def _place(self, value: float, side: Any) -> int:
        if self.type.kind == "f":
            with np.errstate(over="ignore"):
                return int(np.searchsorted(self._values_R, _float(value, self.type), side))
        # Integers are compared as such: a float has not room for all of them.
        whole, limits = int(value // 1), np.iinfo(self.type)
        if whole != value:
            whole, side = whole + 1, "left"
        if not limits.min <= whole <= limits.max:
            return 0 if whole < limits.min else len(self._values_R)
        return int(np.searchsorted(self._values_R, self.type.type(whole), side))


def column_of(kind: FilterKind, column: pa.ChunkedArray) -> ValueColumn | NumberColumn:
    """A column of labels, ready to be filtered by.

    Args:
        kind: what its values are compared as.
        column: of that kind, [L].
    """
    return NumberColumn(column) if kind in ("number", "date") else ValueColumn(column)


def rows_of(found: AbstractBitMap) -> Int64:
    """The rows of a set, int64, ascending."""
    return np.frombuffer(found.to_array(), np.uint32).astype(np.int64)


def _decoded(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole


def _text(value: pa.Scalar) -> str:
    return str(value.as_py())


def _float(value: float, type_: np.dtype[Any]) -> Any:
    """A number as the column's type has it; infinite where that has no room for it."""
    try:
        return type_.type(value)
    except OverflowError:
        return type_.type(np.inf if value > 0 else -np.inf)
