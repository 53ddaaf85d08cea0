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
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from longtail.bundle.added_labels import AddedLabels
from longtail.bundle.arrays import Bools
from longtail.bundle.display import DisplayColumns
from longtail.bundle.errors import describe
from longtail.bundle.filterable import FilterKind, filter_kind
from longtail.index import Condition, Selection
from longtail.serving.core.attribute_columns import Column, NumberColumn, column_of
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

Value = TypeVar("Value")


def operators(kind: FilterKind) -> list[str]:
    """Names of the operators that a column of a kind takes."""
    return [*_EQUAL, *(_ORDER if kind in ("number", "date") else ()), "exists"]


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
        self._read: dict[str, Column] = {}
        self._reading = threading.Lock()

    def mask(self, conditions: Sequence[Condition]) -> Bools:
        """The labels that meet all conditions, bool."""
        mask = np.ones(self._labels, np.bool_)
        for condition in conditions:
            mask &= self._meeting(condition)
        return mask

    def column(self, name: str) -> Column:
        """A column, read by now."""
        column = self._read.get(name)
        if column is None:
            with self._reading:
                column = self._read.get(name)
                if column is None:
                    column = self._read[name] = column_of(self._kinds[name], self._column(name))
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
        self._selections: _Kept[Selection] = _Kept(kept)
        self._of_added: Attributes | None = None
        self._added_selections: _Kept[Selection] = _Kept(kept)

    def with_added(self, added: AddedLabels) -> LabelAttributes:
        """These labels and those of an overlay; what filters come to among these stays known."""
        attributes = copy.copy(self)
        attributes._of_added = None
        if len(added):
            columns = DisplayColumns(self._display)
            attributes._of_added = Attributes(
                self.kinds,
                len(added),
                lambda name: pa.chunked_array([columns.column(name, [shown[name] for shown in added.display])]),
            )
            attributes._added_selections = _Kept(self._selections.most)
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
        conditions = self.read(filter_, where)
        key = blake2b(repr(conditions).encode("utf-8", "replace"), digest_size=16).digest()
        rows = self._selections.get(
            key, lambda: Selection.of(conditions, len(self._display), lambda: self._of_labels.mask(conditions))
        )
        if (attributes := self._of_added) is None:
            return rows, None
        return rows, self._added_selections.get(key, lambda: Selection(attributes.mask(conditions)))

    def read_columns(self, names: Iterable[str]) -> None:
        """Read columns now, and not with the first filter by them."""
        for name in names:
            self._of_labels.column(name)

    def forget(self) -> None:
        """Let go of the columns that were read, and of what filters came to."""
        self._of_labels.forget()
        self._selections.forget()

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


class _Kept(Generic[Value]):
    """The values asked for last, by key; thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._changing = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made unless it is kept."""
        with self._changing:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._changing:
            value = self._values.setdefault(key, made)
            while len(self._values) > self.most:
                self._values.popitem(last=False)
        return value

    def forget(self) -> None:
        """Keep none of them."""
        with self._changing:
            self._values.clear()


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
