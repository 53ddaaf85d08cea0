"""Turn filters by attribute into sets of labels, such as `{"category": {"in": ["a", "b"]}, "price": {"lt": 20}}`.

All conditions on all columns must hold. `ne` and `not_in` match every label that `eq` and `in` do not, including labels
without a value; `exists` tests whether a label has a value. In a column of lists, `eq` and `in` match if the list
contains the value.

The sets are cached, because most filters recur, and queries with the same set share a search.

Legend: `L` labels of the release, `M` of the overlay.
"""

from __future__ import annotations

import copy
import json
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from longtail.bundle.arrays import Bools
from longtail.bundle.dates import time_of
from longtail.bundle.display import DisplayColumns
from longtail.bundle.errors import describe
from longtail.bundle.filterable import FilterKind, filter_kind
from longtail.bundle.mapped_table import in_one_piece
from longtail.bundle.validation import did_you_mean
from longtail.index import Condition, Selection
from longtail.serving.core.overlay_rows import OverlayRows
from longtail.serving.errors import InvalidRequestError

_DISTINCT = 1 << 16
"""Most distinct strings of a column that can be filtered by without being declared; names and titles have more."""
_ENTRIES = 32
"""Most list entries per label of such a column, on average."""
_LONGEST_NAME = 100
_KEPT_BYTES, _MOST_KEPT = 1 << 25, 1_024
_BLOCK = 1 << 12
"""Rows of an overlay whose columns are read together, a multiple of 8; a change reads the last, partial block again."""
_COMPARE: dict[str, Callable[[Any, float], Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge
}  # fmt: skip
_EQUAL = ("eq", "ne", "in", "not_in")
_ELSEWHERE = {
    "lte": "le", "gte": "ge", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "=": "eq", "==": "eq", "!=": "ne",
    "<>": "ne", "nin": "not_in", "any": "in",
}  # fmt: skip
"""Operators by what other services call them."""
_WANTED: dict[FilterKind, str] = {
    "string": "a string",
    "strings": "a string",
    "number": "a finite number",
    "boolean": "true or false",
    "date": "a date or time in ISO 8601",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def operators(kind: FilterKind) -> list[str]:
    """List the operators that a column of a kind supports."""
    return [*_EQUAL, *(_COMPARE if kind in ("number", "date") else ()), "exists"]


class ValueColumn:
    """A column of strings, booleans or lists of strings, stored as codes of 4 bytes.

    Args:
        column: string, boolean or list of strings, [L]; null for a label without a value.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._labels = len(column)
        self._rows: npt.NDArray[Any] | None = None
        whole = _decoded(column)
        if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
            self._rows = pc.list_parent_indices(whole).to_numpy(zero_copy_only=False)
            whole = _decoded(pa.chunked_array([pc.list_flatten(whole)]))
        if pa.types.is_boolean(whole.type):
            whole = pc.cast(whole, pa.string())
        encoded = whole.dictionary_encode()
        self._values = encoded.dictionary
        # Null gets a code of its own, one beyond the values.
        self._codes = pc.fill_null(encoded.indices, len(self._values)).to_numpy(zero_copy_only=False)

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        return self._mask(self._codes < len(self._values))

    def having(self, values: Iterable[str]) -> Bools:
        """Compute which labels have one of some values, alone or in a list, bool [L]."""
        wanted = pc.is_in(self._values, value_set=pa.array(values, self._values.type)).to_numpy(zero_copy_only=False)
        return self._mask(np.append(wanted, False)[self._codes])

    def _mask(self, found: Bools) -> Bools:
        if self._rows is None:
            return found
        mask_L: Bools = np.zeros(self._labels, np.bool_)
        mask_L[self._rows[found]] = True
        return mask_L


class NumberColumn:
    """A column of numbers, read from the label table without a copy; decimals and dates take 8 bytes each.

    Args:
        column: integers, floats, decimals, dates or times, [L]; null or NaN for a label without a value.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        whole = _decoded(column)
        if pa.types.is_date(whole.type) or pa.types.is_timestamp(whole.type):
            whole = pc.cast(pc.cast(whole, pa.timestamp("us"), safe=False), pa.int64())
        elif pa.types.is_decimal(whole.type):
            # Through decimal digits: 3.30 becomes the same float as JSON's 3.3, which Arrow's direct cast may miss.
            whole = pc.cast(pc.cast(whole, pa.string()), pa.float64())
        self._whole = whole
        type_ = np.dtype(whole.type.to_pandas_dtype())
        self._values_L = np.frombuffer(whole.buffers()[1] or b"", type_)[whole.offset :][: len(whole)]

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        known_L: Bools = pc.is_valid(self._whole).to_numpy(zero_copy_only=False)
        return known_L & ~np.isnan(self._values_L) if self._values_L.dtype.kind == "f" else known_L

    def having(self, values: Iterable[float]) -> Bools:
        """Compute which labels have one of some numbers, bool [L]."""
        type_ = self._values_L.dtype
        if type_.kind == "f":
            asked = [_as_float(value) for value in values]
        else:
            limits = np.iinfo(type_)
            asked = [int(value) for value in values if value == value // 1 and limits.min <= value <= limits.max]
        with np.errstate(over="ignore"):
            found_L: Bools = np.isin(self._values_L, np.array(asked, type_))
        return found_L & self.present

    def compare(self, sign: str, value: float) -> Bools:
        """Compare the labels' numbers with a value by `lt`, `le`, `gt` or `ge`, bool [L]."""
        limit: float = _as_float(value)
        if self._values_L.dtype.kind != "f":
            # Integers are compared as integers, because a float cannot represent all of them.
            limit = int(-(-value // 1) if sign in ("lt", "ge") else value // 1)
        with np.errstate(over="ignore"):
            found_L: Bools = _COMPARE[sign](self._values_L, limit)
        return found_L & self.present


class Attributes:
    """Columns that labels may be filtered by, each read when it is first used. Thread-safe."""

    def __init__(self, kinds: Mapping[str, FilterKind], labels: int, column: Callable[[str], pa.ChunkedArray]) -> None:
        self._kinds = kinds
        self._labels = labels
        self._column = column
        self._read: dict[str, ValueColumn | NumberColumn] = {}
        self._reading = threading.Lock()

    def mask(self, conditions: Sequence[Condition]) -> Bools:
        """Compute which labels meet all conditions, bool."""
        mask = np.ones(self._labels, np.bool_)
        for condition in conditions:
            column, values = self.column(condition.column), condition.values
            match condition.operator:
                case "eq" | "in":
                    mask &= column.having(values)
                case "ne" | "not_in":
                    mask &= ~column.having(values)
                case "exists":
                    mask &= column.present == values[0]
                case sign:
                    assert isinstance(column, NumberColumn)
                    mask &= column.compare(sign, values[0])
        return mask

    def column(self, name: str) -> ValueColumn | NumberColumn:
        """Get a column, reading it at the first call."""
        if (found := self._read.get(name)) is not None:
            return found
        with self._reading:
            if name not in self._read:
                kind = NumberColumn if self._kinds[name] in ("number", "date") else ValueColumn
                self._read[name] = kind(self._column(name))
            return self._read[name]

    def forget(self) -> None:
        """Drop the columns read so far."""
        with self._reading:
            self._read = {}


class _Block:
    """The attributes of some rows of an overlay, and the labels that passed recent filters, as bits."""

    def __init__(
        self, kinds: Mapping[str, FilterKind], columns: DisplayColumns, display: Sequence[Mapping[str, JsonValue]]
    ) -> None:
        def column(name: str) -> pa.ChunkedArray:
            return pa.chunked_array([columns.column(name, [shown[name] for shown in display])])

        self._attributes = attributes = Attributes(kinds, len(display), column)
        self.bits = lru_cache(_most_kept(len(display)))(
            lambda conditions: np.packbits(attributes.mask(conditions), bitorder="little")
        )

    def forget(self) -> None:
        """Drop the columns read so far and the cached sets."""
        self._attributes.forget()
        self.bits.cache_clear()


def _most_kept(labels: int) -> int:
    """Return how many sets of labels are cached."""
    return min(_MOST_KEPT, max(16, _KEPT_BYTES // (labels // 4 + 1)))


def unfilterable(name: str, known: list[str], field: str) -> InvalidRequestError:
    """Return the error of a column that labels cannot be filtered by."""
    hint = did_you_mean(name, known) or "; data.display of the recipe and longtail-index build --filterable choose them"
    return InvalidRequestError(
        f"expected columns that this release can be filtered by, {known}, received {describe(name)}{hint}", field=field
    )


class LabelAttributes:
    """The attributes of a release's labels and of an overlay's labels.

    Args:
        display: `Labels.display`, L rows.
        declared: columns that may be filtered by; None: all columns of supported types, except strings with very many
            values.

    Attributes:
        kinds: kinds of the columns that may be filtered by, by name.
    """

    def __init__(self, display: pa.Table, declared: Sequence[str] | None = None) -> None:
        self.kinds: dict[str, FilterKind] = {}
        for name in display.column_names:
            kind = filter_kind(display.schema.field(name).type)
            if kind is not None and (name in declared if declared is not None else _bounded(kind, display[name])):
                self.kinds[name] = kind
        self._display, self._columns = display, DisplayColumns(display)
        self._of_labels = Attributes(self.kinds, len(display), display.column)
        self._selected = lru_cache(_most_kept(len(display)))(self._select)
        self._rows: OverlayRows | None = None
        self._full_blocks: tuple[_Block, ...] = ()
        self._of_overlay: Callable[[tuple[Condition, ...]], Selection] | None = None

    def with_overlay(self, rows: OverlayRows) -> LabelAttributes:
        """Return the attributes with an overlay's labels.

        Cached sets of the release's labels stay, and of the blocks of overlay rows that are full already.
        """
        attributes = copy.copy(self)
        continued = self._rows is not None and rows.origin is self._rows.origin
        full = list(self._full_blocks) if continued else []
        for begin in range(len(full) * _BLOCK, len(rows) - _BLOCK + 1, _BLOCK):
            full.append(_Block(self.kinds, self._columns, rows.added.display[begin : begin + _BLOCK]))
        rest = rows.added.display[len(full) * _BLOCK :]
        blocks = [*full, _Block(self.kinds, self._columns, rest)] if len(rest) else full

        def select(conditions: tuple[Condition, ...]) -> Selection:
            bits = np.concatenate([block.bits(conditions) for block in blocks])
            return Selection(np.unpackbits(bits, count=len(rows), bitorder="little").view(np.bool_))

        attributes._rows, attributes._full_blocks = rows, tuple(full)
        attributes._of_overlay = lru_cache(_most_kept(len(rows)))(select) if len(rows) else None
        return attributes

    def select(self, filter_: Mapping[str, JsonValue], where: str) -> tuple[Selection, Selection | None]:
        """Select the labels that pass a filter: of the release, and of the overlay (None without an overlay).

        The overlay's rows count from its first label. Equal filters get the same objects, so that their queries share a
        search.

        Args:
            where: prefix of the field in errors, such as `queries.0.filter`.

        Raises:
            InvalidRequestError: a column cannot be filtered by, or an operator or value does not fit the column.
        """
        return self.select_all(tuple(self.read(filter_, where)))

    def select_all(self, conditions: tuple[Condition, ...]) -> tuple[Selection, Selection | None]:
        """Select the labels that meet all conditions, like `select`."""
        return self._selected(conditions), None if self._of_overlay is None else self._of_overlay(conditions)

    def _select(self, conditions: tuple[Condition, ...]) -> Selection:
        return Selection.of(conditions, len(self._display), lambda: self._of_labels.mask(conditions))

    def read_columns(self, names: Iterable[str]) -> None:
        """Read columns in advance, before the first filter by them."""
        for name in names:
            self._of_labels.column(name)

    def forget(self) -> None:
        """Drop the columns read so far and the cached sets."""
        self._of_labels.forget()
        self._selected.cache_clear()
        for block in self._full_blocks:
            block.forget()
        if self._of_overlay is not None:
            self._of_overlay.cache_clear()  # type: ignore[attr-defined]

    def read(self, filter_: Mapping[str, JsonValue], where: str) -> list[Condition]:
        """Get the conditions of a filter in a canonical order."""
        conditions = []
        for name in sorted(filter_):
            kind, field = self.kinds.get(name), f"{where}.{name[:_LONGEST_NAME]}"
            if kind is None:
                raise unfilterable(name, list(self.kinds), field)
            asked = filter_[name]
            for sign, value in sorted((asked if isinstance(asked, dict) else {"eq": asked}).items()):
                at = field if not isinstance(asked, dict) else f"{field}.{sign[:_LONGEST_NAME]}"
                conditions.append(Condition(name, sign, _values(kind, sign, value, at)))
            if asked == {}:
                raise InvalidRequestError(
                    f"expected a value or one of the operators {operators(kind)}, received none", field=field
                )
        return conditions


def _bounded(kind: FilterKind, column: pa.ChunkedArray) -> bool:
    """Return whether a column may be filtered by without being declared."""
    if kind == "strings":
        flat = pc.list_flatten(column)
        return len(flat) <= _ENTRIES * len(column) and _bounded("string", flat)
    if kind != "string":
        return True
    column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
    # A column of names exceeds the limit in its first part already, which is counted faster than the whole.
    return all(int(pc.count_distinct(part).as_py()) <= _DISTINCT for part in (column.slice(0, 2 * _DISTINCT), column))


def _values(kind: FilterKind, sign: str, value: JsonValue, field: str) -> tuple[Any, ...]:
    """Check and convert the operand of an operator for a kind of column; raises InvalidRequestError."""
    if sign not in operators(kind):
        raise InvalidRequestError(
            f"expected one of the operators {operators(kind)} of a column of kind {kind}, received {describe(sign)}"
            f"{did_you_mean(sign, operators(kind), _ELSEWHERE)}",
            field=field,
        )
    if sign == "exists":
        if not isinstance(value, bool):
            raise InvalidRequestError(f"expected true or false, received {describe(value)}", field=field)
        return (value,)
    if sign not in ("in", "not_in"):
        return (_value(kind, value, field),)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"expected a list of at least one value, received {describe(value)}", field=field)
    return tuple(sorted({_value(kind, one, f"{field}.{place}") for place, one in enumerate(value)}))


def _value(kind: FilterKind, value: JsonValue, field: str) -> Any:
    """Check and convert one value for a kind of column; raises InvalidRequestError."""
    match kind, value:
        case "string" | "strings", str():
            return value
        case "boolean", bool():
            return json.dumps(value)
        case "number", int() | float() if not isinstance(value, bool) and (
            isinstance(value, int) or math.isfinite(value)
        ):
            return value
        case "date", str():
            try:
                since = time_of(value) - _EPOCH
            except (ValueError, OverflowError):
                pass
            else:
                return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    raise InvalidRequestError(
        f"expected {_WANTED[kind]}, as the column is of kind {kind}, received {describe(value)}", field=field
    )


def _as_float(value: float) -> float:
    """Convert a number to a float; an integer beyond its range becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _decoded(column: pa.ChunkedArray) -> pa.Array:
    whole = in_one_piece(column)
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole
