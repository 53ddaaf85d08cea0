"""One column of labels that conditions ask: strings by value, numbers as they are.

A column of few strings keeps a roaring bitmap for each, a column of many the rows in order of value, from which a
bitmap is made when it is asked for.

Legend: `L` labels, `V` distinct values, `R` rows that have a value, in order of it.
"""

from __future__ import annotations

import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import AbstractBitMap, BitMap, FrozenBitMap

from longtail.bundle.arrays import Bools
from longtail.bundle.filterable import FilterKind
from longtail.bundle.mapped_table import in_one_piece

Rows = npt.NDArray[np.uint32]
Side = Literal["left", "right"]
_BITMAPS_UPTO = 4_096
"""Values of a column up to which each has a bitmap of its own."""


class Column(Protocol):
    """What conditions on one column ask of it."""

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""

    def having(self, values: Iterable[Any]) -> Bools:
        """Labels that have one of these values, bool [L]."""


def bitmap(rows_R: Rows) -> BitMap:
    """The set of some rows, uint32 [R], of any order."""
    # An array of Python's is read as it lies there, an array of NumPy's number by number.
    return BitMap(array.array("I", rows_R.tobytes()))


class ValueColumn:
    """Strings, booleans or lists of strings.

    Args:
        column: string, boolean or list of strings, [L]; null for a label without a value.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._labels = len(column)
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
        self._present = FrozenBitMap(bitmap(rows_R))
        self._bitmaps: list[FrozenBitMap] | None = None
        self._rows_R, self._ends_V = rows_R, ends_V
        if len(order) <= _BITMAPS_UPTO:
            self._bitmaps = [FrozenBitMap(self._slice(code)) for code in range(len(order))]
            self._rows_R, self._ends_V = rows_R[:0], ends_V[:0]

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        return self._mask(self._present)

    def having(self, values: Iterable[str]) -> Bools:
        """Labels that have one of these values, of lists among others, bool [L]."""
        found = BitMap()
        for value in values:
            code = bisect_left(self._values, value, key=_text)
            if code < len(self._values) and _text(self._values[code]) == value:
                found |= self._slice(code) if self._bitmaps is None else self._bitmaps[code]
        return self._mask(found)

    def _mask(self, rows: AbstractBitMap) -> Bools:
        mask_L: Bools = np.zeros(self._labels, np.bool_)
        mask_L[np.frombuffer(rows.to_array(), np.uint32)] = True
        return mask_L

    def _slice(self, code: int) -> BitMap:
        return bitmap(self._rows_R[self._ends_V[code - 1] if code else 0 : self._ends_V[code]])


class NumberColumn:
    """Numbers, or dates as microseconds since 1970: compared as they lie in the label table, which takes hundredths of
    a second of ten million, and no memory beside it; decimals, dates and times take 8 bytes a label.

    Args:
        column: integers, floats, decimals, dates or times, [L]; null or NaN for a label without a value.

    Attributes:
        type: in which values are compared.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        whole = _decoded(column)
        if pa.types.is_date(whole.type) or pa.types.is_timestamp(whole.type):
            whole = pc.cast(pc.cast(whole, pa.timestamp("us"), safe=False), pa.int64())
        elif pa.types.is_decimal(whole.type):
            # By way of their digits: 3.30 is then the float that JSON's 3.3 is, which Arrow's own cast may miss.
            whole = pc.cast(pc.cast(whole, pa.string()), pa.float64())
        self._whole = whole
        self._values_L = _values_of(whole)
        self.type: np.dtype[Any] = self._values_L.dtype

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        known_L: Bools = ~np.isnan(self._values_L) if self.type.kind == "f" else np.ones(len(self._values_L), np.bool_)
        if self._whole.null_count:
            known_L &= pc.is_valid(self._whole).to_numpy(zero_copy_only=False)
        return known_L

    def having(self, values: Iterable[float]) -> Bools:
        """Labels whose number is one of these, bool [L]."""
        with np.errstate(over="ignore"):
            asked = {self._as_held(value) for value in values} - {None}
        if not asked or not len(self._values_L):
            return np.zeros(len(self._values_L), np.bool_)
        asked_V = np.sort(np.array([*asked], self.type))
        nearest_L = asked_V[np.minimum(np.searchsorted(asked_V, self._values_L), len(asked_V) - 1)]
        found_L: Bools = (nearest_L == self._values_L) & self.present
        return found_L

    def _as_held(self, value: float) -> Any:
        """A number as the column's type has it; None of one that no integer is."""
        if self.type.kind == "f":
            return _float(value, self.type)
        whole, limits = int(value // 1), np.iinfo(self.type)
        return whole if whole == value and limits.min <= whole <= limits.max else None

    def between(self, low: float | None, low_side: Side, high: float | None, high_side: Side) -> Bools:
        """Labels from one number to another, bool [L].

        Args:
            low: where they begin; None: with the least.
            low_side: `left` with labels of that number, `right` after them.
            high: where they end; None: with the greatest.
            high_side: `left` before labels of that number, `right` with them.
        """
        found_L = self.present
        if low is not None:
            found_L &= ~self._before(low, low_side)
        if high is not None:
            found_L &= self._before(high, high_side)
        return found_L

    def _before(self, value: float, side: Side) -> Bools:
        """Labels whose number stands left or right of the place before, or after, those that are the value."""
        limit: Any = value
        if self.type.kind == "f":
            with np.errstate(over="ignore"):
                limit = _float(value, self.type)
        else:
            # Integers are compared as such: a float has not room for all of them.
            whole, limits = int(value // 1), np.iinfo(self.type)
            if whole != value:
                whole, side = whole + 1, "left"
            if not limits.min <= whole <= limits.max:
                return np.full(len(self._values_L), whole > limits.max)
            limit = self.type.type(whole)
        before_L: Bools = self._values_L < limit if side == "left" else self._values_L <= limit
        return before_L


def column_of(kind: FilterKind, column: pa.ChunkedArray) -> ValueColumn | NumberColumn:
    """A column of labels, ready to be filtered by.

    Args:
        kind: what its values are compared as.
        column: of that kind, [L].
    """
    return NumberColumn(column) if kind in ("number", "date") else ValueColumn(column)


def _values_of(whole: pa.Array) -> npt.NDArray[Any]:
    """The numbers of a column of integers or floats as they lie in its memory, [L]; any where it is null."""
    type_ = np.dtype(whole.type.to_pandas_dtype())
    return np.frombuffer(whole.buffers()[1] or b"", type_)[whole.offset :][: len(whole)]


def _decoded(column: pa.ChunkedArray) -> pa.Array:
    whole = in_one_piece(column)
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole


def _text(value: pa.Scalar) -> str:
    return str(value.as_py())


def _float(value: float, type_: np.dtype[Any]) -> Any:
    """A number as the column's type has it; infinite where that has no room for it."""
    try:
        return type_.type(value)
    except OverflowError:
        return type_.type(np.inf if value > 0 else -np.inf)
