"""Evaluate conditions on display columns, such as `{"category": {"in": ["a", "b"]}, "price": {"lt": 20}}`.

All conditions on all columns must hold. `ne` and `not_in` match every label that `eq` and `in` do not, including labels
without a value; `exists` tests whether a label has a value. In a column of lists, `eq` and `in` match if the list
contains the value.

Legend: `L` labels.
"""

from __future__ import annotations

import json
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from longtail.bundle.arrays import Bools, Float64
from longtail.bundle.dates import parse_time
from longtail.bundle.errors import LONGEST_NAME, ConditionError, describe
from longtail.bundle.filterable import FilterKind
from longtail.bundle.mapped_table import decode_chunks
from longtail.bundle.validation import did_you_mean

_DAY_US = 86_400 * 10**6
_COMPARE: dict[str, Callable[[Any, float], Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge
}  # fmt: skip
_EQUAL = ("eq", "ne", "in", "not_in")
_ELSEWHERE = {
    "lte": "le", "gte": "ge", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "=": "eq", "==": "eq", "!=": "ne",
    "<>": "ne", "nin": "not_in", "any": "in",
}  # fmt: skip
"""Operators by what other services call them."""
_VALUE_NAMES: dict[FilterKind, str] = {
    "string": "a string",
    "strings": "a string",
    "number": "a finite number",
    "boolean": "true or false",
    "date": "a date or time in ISO 8601",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Condition:
    """One operator on one display column, from a request's `filter`.

    Attributes:
        operator: eq, ne, in, not_in, lt, le, gt, ge or exists.
        values: operands: strings, numbers, dates as microseconds since 1970, `"true"` and `"false"` for booleans; for
            `exists`, True or False.
    """

    column: str
    operator: str
    values: tuple[Any, ...]


def operators(kind: FilterKind) -> list[str]:
    """List the operators that a column of a kind supports."""
    return [*_EQUAL, *(_COMPARE if kind in ("number", "date") else ()), "exists"]


class ValueColumn:
    """A column of strings, booleans or lists as codes of 4 bytes.

    Args:
        column: string, boolean or list of strings, [L]; null for a label without a value.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._labels = len(column)
        self._rows: npt.NDArray[Any] | None = None
        array = decode_chunks(column)
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            self._rows = pc.list_parent_indices(array).to_numpy(zero_copy_only=False)
            array = decode_chunks(pa.chunked_array([pc.list_flatten(array)]))
        if pa.types.is_boolean(array.type):
            array = pc.cast(array, pa.string())
        encoded = array.dictionary_encode()
        self._values = encoded.dictionary
        # Null gets a code of its own, one beyond the values.
        self._codes = pc.fill_null(encoded.indices, len(self._values)).to_numpy(zero_copy_only=False)

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        return self._mask(self._codes < len(self._values))

    def having(self, values: Iterable[str]) -> Bools:
        """Compute which labels have one of some values, alone or in a list, bool [L]."""
        has_value = pc.is_in(self._values, value_set=pa.array(values, self._values.type)).to_numpy(zero_copy_only=False)
        return self._mask(np.append(has_value, False)[self._codes])

    def _mask(self, matches: Bools) -> Bools:
        if self._rows is None:
            return matches
        mask_L: Bools = np.zeros(self._labels, np.bool_)
        mask_L[self._rows[matches]] = True
        return mask_L


class NumberColumn:
    """A column of numbers, read from the label table without a copy; decimals and dates take 8 bytes each.

    Args:
        column: integers, floats, decimals, dates or times, [L]; null or NaN for a label without a value.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        array, self._unit = decode_chunks(column), 1
        if pa.types.is_date(array.type) or pa.types.is_timestamp(array.type):
            array = pc.cast(pc.cast(array, pa.timestamp("us"), safe=False), pa.int64())
            self._unit = _DAY_US
        elif pa.types.is_decimal(array.type):
            # Through decimal digits: 3.30 becomes the same float as JSON's 3.3, which Arrow's direct cast may miss.
            array = pc.cast(pc.cast(array, pa.string()), pa.float64())
        self._array = array
        type_ = np.dtype(array.type.to_pandas_dtype())
        self._values_L = np.frombuffer(array.buffers()[1] or b"", type_)[array.offset :][: len(array)]

    @property
    def numbers(self) -> Float64:
        """Return the labels' numbers, dates as days since 1970, float64 [L]; NaN without a value."""
        numbers_L: Float64 = np.where(self.present, self._values_L.astype(np.float64) / self._unit, np.nan)
        return numbers_L

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        valid_L: Bools = pc.is_valid(self._array).to_numpy(zero_copy_only=False)
        return valid_L & ~np.isnan(self._values_L) if self._values_L.dtype.kind == "f" else valid_L

    def having(self, values: Iterable[float]) -> Bools:
        """Compute which labels have one of some numbers, bool [L]."""
        type_ = self._values_L.dtype
        if type_.kind == "f":
            numbers = [_as_float(value) for value in values]
        else:
            limits = np.iinfo(type_)
            numbers = [int(value) for value in values if value == value // 1 and limits.min <= value <= limits.max]
        with np.errstate(over="ignore"):
            matches_L: Bools = np.isin(self._values_L, np.array(numbers, type_))
        return matches_L & self.present

    def compare(self, sign: str, value: float) -> Bools:
        """Compare the labels' numbers with a value by `lt`, `le`, `gt` or `ge`, bool [L]."""
        limit: float = _as_float(value)
        if self._values_L.dtype.kind != "f":
            # Integers are compared as integers, because a float cannot represent all of them.
            limit = int(-(-value // 1) if sign in ("lt", "ge") else value // 1)
        with np.errstate(over="ignore"):
            matches_L: Bools = _COMPARE[sign](self._values_L, limit)
        return matches_L & self.present


class Attributes:
    """Columns that filters use, each read on first use. Thread-safe."""

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
        if (column := self._read.get(name)) is not None:
            return column
        # Reading a column takes long; threads that wait for it must not read it again.
        with self._reading:
            if name not in self._read:
                kind = NumberColumn if self._kinds[name] in ("number", "date") else ValueColumn
                self._read[name] = kind(self._column(name))
            return self._read[name]

    def forget(self) -> None:
        """Drop the columns read so far."""
        with self._reading:
            self._read = {}


def read_conditions(kinds: Mapping[str, FilterKind], filter_: Mapping[str, JsonValue], path: str) -> list[Condition]:
    """Get the conditions of a filter in a canonical order; raises ConditionError."""
    conditions = []
    for name in sorted(filter_):
        kind, field = kinds.get(name), f"{path}.{name[:LONGEST_NAME]}"
        if kind is None:
            raise ConditionError(unfilterable_message(name, list(kinds)), field=field)
        operators_json = filter_[name]
        for sign, value in sorted(
            (operators_json if isinstance(operators_json, dict) else {"eq": operators_json}).items()
        ):
            path_of_sign = field if not isinstance(operators_json, dict) else f"{field}.{sign[:LONGEST_NAME]}"
            conditions.append(Condition(name, sign, _values(kind, sign, value, path_of_sign)))
        # An empty object would quietly match every label.
        if operators_json == {}:
            raise ConditionError(
                f"expected a value or one of the operators {operators(kind)}, received none", field=field
            )
    return conditions


def unfilterable_message(name: str, columns: list[str]) -> str:
    """Return the message about a column that labels cannot be filtered by."""
    hint = (
        did_you_mean(name, columns) or "; data.display of the recipe and longtail-index build --filterable choose them"
    )
    return f"expected columns that this release can be filtered by, {columns}, received {describe(name)}{hint}"


def _values(kind: FilterKind, sign: str, value: JsonValue, field: str) -> tuple[Any, ...]:
    """Check and convert the operand of an operator for a kind of column; raises ConditionError."""
    if sign not in operators(kind):
        raise ConditionError(
            f"expected one of the operators {operators(kind)} of a column of kind {kind}, received {describe(sign)}"
            f"{did_you_mean(sign, operators(kind), _ELSEWHERE)}",
            field=field,
        )
    if sign == "exists":
        if not isinstance(value, bool):
            raise ConditionError(f"expected true or false, received {describe(value)}", field=field)
        return (value,)
    if sign not in ("in", "not_in"):
        return (_value(kind, value, field),)
    if not isinstance(value, list) or not value:
        raise ConditionError(f"expected a list of at least one value, received {describe(value)}", field=field)
    # Sorted and distinct, so that equal sets of values share a cached selection.
    return tuple(sorted({_value(kind, item, f"{field}.{i}") for i, item in enumerate(value)}))


def _value(kind: FilterKind, value: JsonValue, field: str) -> Any:
    """Check and convert one value for a kind of column; raises ConditionError."""
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
                since = parse_time(value) - _EPOCH
            except (ValueError, OverflowError):
                pass
            else:
                return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    raise ConditionError(
        f"expected {_VALUE_NAMES[kind]}, as the column is of kind {kind}, received {describe(value)}", field=field
    )


def _as_float(value: float) -> float:
    """Convert a number to a float; an integer beyond its range becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
