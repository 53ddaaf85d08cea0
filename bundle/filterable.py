"""Decide which display columns labels may be filtered by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from longtail.bundle.errors import BundleInvariantError

FilterKind = Literal["string", "number", "boolean", "date", "strings"]
"""Type in which a column's values are compared; `strings` are lists of strings."""


def filter_kind(type_: pa.DataType) -> FilterKind | None:
    """Return how a column of an Arrow type is compared; None if filters do not support the type."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return "strings" if filter_kind(type_.value_type) == "string" else None
    kinds: list[tuple[FilterKind, tuple[str, ...]]] = [
        ("string", ("is_string", "is_large_string")),
        ("number", ("is_integer", "is_floating", "is_decimal")),
        ("boolean", ("is_boolean",)),
        ("date", ("is_date", "is_timestamp")),
    ]
    for kind, tests in kinds:
        if any(getattr(pa.types, test)(type_) for test in tests):
            return kind
    return None


def check_filterable(display: pa.Table, names: Sequence[str]) -> tuple[str, ...]:
    """Check that columns can be filtered by, and return the distinct names."""
    kinds = {field.name: filter_kind(field.type) for field in display.schema}
    absent = "no such column: data.display of a recipe names the columns of a bundle"
    for name in names:
        if kinds.get(name) is None:
            raise BundleInvariantError(
                f"labels.arrow column {name!r} can be filtered by",
                expected=f"one of {[column for column, kind in kinds.items() if kind is not None]}",
                actual=f"a column of {display.schema.field(name).type}" if name in kinds else absent,
            )
    return tuple(dict.fromkeys(names))
