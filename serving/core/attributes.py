"""Filters by attribute, `{"category": {"in": ["a", "b"]}, "price": {"lt": 20}, "in_stock": true}`, as sets of labels.

All columns and all operators of a filter hold together. `ne` and `not_in` are all that `eq` and `in` are not, labels
without a value among them; `exists` asks for one. Of lists, `eq` and `in` want the value among the list's.

What a filter comes to is kept, for most filters come again and again, and queries that share it share a search.

Legend: `L` labels of the release, `M` of the overlay.
"""

from __future__ import annotations

import copy
import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from longtail.bundle.added_labels import AddedLabels
from longtail.bundle.arrays import Bools
from longtail.bundle.display import DisplayColumns
from longtail.bundle.errors import describe
from longtail.bundle.filterable import FilterKind, filter_kind
from longtail.bundle.mapped_table import in_one_piece
from longtail.index import Condition, Selection
from longtail.serving.errors import InvalidRequestError

_DISTINCT = 1 << 16
"""Strings of a column up to which it can be filtered by without being declared: names and titles have more."""
_ENTRIES = 32
"""Strings of the lists of such a column, for each label."""
_LONGEST_NAME = 100
_KEPT_BYTES, _MOST_KEPT = 1 << 25, 1_024
_ORDER = ("lt", "le", "gt", "ge")
_EQUAL = ("eq", "ne", "in", "not_in")
_WANTED: dict[FilterKind, str] = {
    "string": "a string",
    "strings": "a string",
    "number": "a finite number",
    "boolean": "true or false",
    "date": "a date or time in ISO 8601",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Side = Literal["left", "right"]


def operators(kind: FilterKind) -> list[str]:
    """Names of the operators that a column of a kind takes."""
    return [*_EQUAL, *(_ORDER if kind in ("number", "date") else ()), "exists"]


class ValueColumn:
    """Strings, booleans or lists of strings, as codes: 4 bytes for each value.

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
        order = pc.sort_indices(encoded.dictionary).to_numpy()
        self._values = encoded.dictionary.take(pa.array(order))
        # The last one stands for null.
        ranks = np.full(len(order) + 1, -1, np.int32)
        ranks[order] = np.arange(len(order))
        self._codes = ranks[pc.fill_null(encoded.indices, len(order)).to_numpy(zero_copy_only=False)]

    @property
    def present(self) -> Bools:
        """Labels that have a value, bool [L]."""
        return self._mask(self._codes >= 0)

    def having(self, values: Iterable[str]) -> Bools:
        """Return the labels that have one of these values, of lists among others, bool [L]."""
        codes = []
        for value in values:
            code = bisect_left(self._values, value, key=_text)
            if code < len(self._values) and _text(self._values[code]) == value:
                codes.append(code)
        return self._mask(np.isin(self._codes, codes))

    def _mask(self, found: Bools) -> Bools:
        if self._rows is None:
            return found
        mask_L: Bools = np.zeros(self._labels, np.bool_)
        mask_L[self._rows[found]] = True
        return mask_L


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


class Attributes:
    """The columns of some labels that may be filtered by. Thread-safe; a column is read when it is first asked for.

    Args:
        kinds: of the columns, by name.
        labels: how many labels there are.
        column: gives a column, [L], by name.
    """

    def __init__(self, kinds: Mapping[str, FilterKind], labels: int, column: Callable[[str], pa.ChunkedArray]) -> None:
        self._kinds = kinds
        self._labels = labels
        self._column = column
        self._read: dict[str, ValueColumn | NumberColumn] = {}
        self._reading = threading.Lock()

    def mask(self, conditions: Sequence[Condition]) -> Bools:
        """The labels that meet all conditions, bool."""
        mask = np.ones(self._labels, np.bool_)
        for condition in conditions:
            mask &= self._meeting(condition)
        return mask

    def column(self, name: str) -> ValueColumn | NumberColumn:
        """A column, read by now."""
        column = self._read.get(name)
        if column is None:
            with self._reading:
                column = self._read.get(name)
                if column is None:
                    kind = NumberColumn if self._kinds[name] in ("number", "date") else ValueColumn
                    column = self._read[name] = kind(self._column(name))
        return column

    def forget(self) -> None:
        """Let go of the columns that were read."""
        with self._reading:
            self._read = {}

    def _meeting(self, condition: Condition) -> Bools:
        column, values = self.column(condition.column), condition.values
        match condition.operator:
            case "eq" | "in":
                return column.having(values)
            case "ne" | "not_in":
                return ~column.having(values)
            case "exists":
                return column.present if values[0] else ~column.present
        assert isinstance(column, NumberColumn)
        match condition.operator:
            case "lt":
                return column.between(None, "left", values[0], "left")
            case "le":
                return column.between(None, "left", values[0], "right")
            case "gt":
                return column.between(values[0], "right", None, "right")
        return column.between(values[0], "left", None, "right")


class LabelAttributes:
    """The attributes of a release's labels, and of those of an overlay on it.

    Args:
        display: `Labels.display`, L rows.
        declared: columns that may be filtered by; None: all that filters are for, but for strings of very many values.

    Attributes:
        kinds: of the columns that may be filtered by, by name.
    """

    def __init__(self, display: pa.Table, declared: Sequence[str] | None = None) -> None:
        self.kinds: dict[str, FilterKind] = {}
        for name in display.column_names:
            kind = filter_kind(display.schema.field(name).type)
            if kind is not None and (name in declared if declared is not None else _bounded(kind, display[name])):
                self.kinds[name] = kind
        self._display = display
        self._of_labels = Attributes(self.kinds, len(display), display.column)
        kept = min(_MOST_KEPT, max(16, _KEPT_BYTES // (len(display) // 4 + 1)))
        self._selected = lru_cache(kept)(self._select)
        self._added: Callable[[tuple[Condition, ...]], Selection] | None = None

    def with_added(self, added: AddedLabels) -> LabelAttributes:
        """These labels and those of an overlay; what filters come to among these stays known."""
        attributes = copy.copy(self)
        attributes._added = None
        if len(added):
            columns = DisplayColumns(self._display)
            of_added = Attributes(
                self.kinds,
                len(added),
                lambda name: pa.chunked_array([columns.column(name, [shown[name] for shown in added.display])]),
            )
            attributes._added = lru_cache(_MOST_KEPT)(lambda conditions: Selection(of_added.mask(conditions)))
        return attributes

    def select(self, filter_: Mapping[str, JsonValue], where: str) -> tuple[Selection, Selection | None]:
        """The rows of the release that pass, and the overlay's, counted from its first; None without one.

        The same filter is answered with the same objects.

        Args:
            filter_: conditions by column.
            where: leads the fields of errors, such as `queries.0.filter`.

        Raises:
            InvalidRequestError: a column that cannot be filtered by, an operator or a value that does not fit it.
        """
        conditions = tuple(self.read(filter_, where))
        return self._selected(conditions), None if self._added is None else self._added(conditions)

    def _select(self, conditions: tuple[Condition, ...]) -> Selection:
        return Selection.of(conditions, len(self._display), lambda: self._of_labels.mask(conditions))

    def read_columns(self, names: Iterable[str]) -> None:
        """Read columns now, and not with the first filter by them."""
        for name in names:
            self._of_labels.column(name)

    def forget(self) -> None:
        """Let go of the columns that were read, and of what filters came to."""
        self._of_labels.forget()
        self._selected.cache_clear()

    def read(self, filter_: Mapping[str, JsonValue], where: str) -> list[Condition]:
        """The conditions of a filter, in one order however it is written.

        Args:
            filter_: conditions by column.
            where: leads the fields of errors.

        Raises:
            InvalidRequestError: as `select`.
        """
        conditions = []
        for name in sorted(filter_):
            kind, field = self.kinds.get(name), f"{where}.{name[:_LONGEST_NAME]}"
            if kind is None:
                raise InvalidRequestError(
                    f"expected columns that this release can be filtered by, {list(self.kinds)}, "
                    f"received {describe(name)}",
                    field=field,
                )
            asked = filter_[name]
            for operator, value in sorted((asked if isinstance(asked, dict) else {"eq": asked}).items()):
                at = field if not isinstance(asked, dict) else f"{field}.{operator[:_LONGEST_NAME]}"
                conditions.append(Condition(name, operator, _values(kind, operator, value, at)))
            if asked == {}:
                raise InvalidRequestError(
                    f"expected a value or one of the operators {operators(kind)}, received none", field=field
                )
        return conditions


def _bounded(kind: FilterKind, column: pa.ChunkedArray) -> bool:
    """Whether a column may be filtered by although nobody declared it."""
    if kind == "strings":
        flat = pc.list_flatten(column)
        return len(flat) <= _ENTRIES * len(column) and _bounded("string", flat)
    if kind != "string":
        return True
    column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
    # Of names a part tells, and is counted in less time.
    return all(int(pc.count_distinct(part).as_py()) <= _DISTINCT for part in (column.slice(0, 2 * _DISTINCT), column))


def _values(kind: FilterKind, operator: str, value: JsonValue, field: str) -> tuple[Any, ...]:
    """What an operator compares with, by the kind of its column."""
    if operator not in operators(kind):
        raise InvalidRequestError(
            f"expected one of the operators {operators(kind)} of a column of kind {kind}, received "
            f"{describe(operator)}",
            field=field,
        )
    if operator == "exists":
        if not isinstance(value, bool):
            raise InvalidRequestError(f"expected true or false, received {describe(value)}", field=field)
        return (value,)
    if operator not in ("in", "not_in"):
        return (_value(kind, value, field),)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"expected a list of at least one value, received {describe(value)}", field=field)
    return tuple(sorted({_value(kind, one, f"{field}.{place}") for place, one in enumerate(value)}))


def _value(kind: FilterKind, value: JsonValue, field: str) -> Any:
    """A value as the columns of a kind compare it."""
    match kind, value:
        case "string" | "strings", str():
            return value
        case "boolean", bool():
            return json.dumps(value)
        case "number", int() | float() if not isinstance(value, bool) and np.isfinite(_as_float(value)):
            return value
        case "date", str():
            try:
                at = datetime.fromisoformat(value)
                since = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH
            except (ValueError, OverflowError):
                pass
            else:
                return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    raise InvalidRequestError(
        f"expected {_WANTED[kind]}, as the column is of kind {kind}, received {describe(value)}", field=field
    )


def _as_float(value: float) -> float:
    """Finite for any integer."""
    return value if isinstance(value, float) else 0.0


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
