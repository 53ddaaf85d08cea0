"""Filters as Milvus's boolean expressions over the scalar fields of a collection.

A column is a field of its values and another that says whether a label has one: up to Milvus 2.4 no field may be null.
Values are compared as `serving` compares them: integers as integers, whatever number is asked for; float32 as float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from longtail.bundle.arrays import Int64
from longtail.index.manifests import CollectionColumn
from longtail.index.search.filters import Condition

ROW, BUCKET = "row", "bucket"
"""Fields of a label's row and bucket."""
_NOTHING, _EVERYTHING = f"{ROW} < 0", f"{ROW} >= 0"
_LONG = np.iinfo(np.int64)
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}


def both(*expressions: str) -> str:
    """What meets all of some expressions; empty ones rule out nothing."""
    given = [expression for expression in expressions if expression]
    return given[0] if len(given) == 1 else " and ".join(f"({expression})" for expression in given)


def in_buckets(buckets: Iterable[int]) -> str:
    """Labels of some buckets."""
    return f"{BUCKET} in {sorted(buckets)}" if buckets else _NOTHING


def among(rows_R: Int64) -> str:
    """Labels of some rows."""
    return f"{ROW} in {rows_R.tolist()}" if rows_R.size else _NOTHING


def but(rows_R: Int64) -> str:
    """Labels of all rows but some."""
    return f"{ROW} not in {rows_R.tolist()}" if rows_R.size else ""


def meeting(conditions: Sequence[Condition], columns: Mapping[str, CollectionColumn]) -> str | None:
    """Labels that meet all conditions; None if one is of a column that the collection has not.

    Args:
        conditions: of a filter.
        columns: of the collection, by name.
    """
    if any(condition.column not in columns for condition in conditions):
        return None
    return both(*(_of(condition, columns[condition.column]) for condition in conditions))


def _of(condition: Condition, column: CollectionColumn) -> str:
    match condition.operator:
        case "exists":
            return f"{column.known} == {str(condition.values[0]).lower()}"
        case "eq" | "in":
            return _having(column, condition.values)
        case "ne" | "not_in":
            return f"not ({_having(column, condition.values)})"
    compare = _compared_integer if column.type == "int64" else _compared_float
    return f"{column.known} == true and {compare(column, condition.operator, condition.values[0])}"


def _having(column: CollectionColumn, values: Sequence[Any]) -> str:
    """Labels that have one of some values, of lists among others."""
    match column.type:
        case "bool":
            held = [f"{column.field} == {value}" for value in values]
            return f"{column.known} == true and ({' or '.join(held)})"
        case "varchar" | "array":
            texts = [json.dumps(value, ensure_ascii=False) for value in values if _is_text(value)]
            if not texts:
                return _NOTHING
            if column.type == "array":
                return f"array_contains_any({column.field}, [{', '.join(texts)}])"
            return f"{column.known} == true and {column.field} in [{', '.join(texts)}]"
    if column.type == "int64":
        whole = sorted({int(value) for value in values if value == value // 1 and _LONG.min < value <= _LONG.max})
        equal = [f"{column.field} in {whole}"] if whole else []
        if _LONG.min in values:  # of which Milvus reads no literal
            equal.append(f"{column.field} < {_LONG.min + 1}")
    else:
        equal = [_compared_float(column, "eq", value) for value in dict.fromkeys(values)]
    if not equal:
        return _NOTHING
    return f"{column.known} == true and ({' or '.join(equal)})"


def _compared_integer(column: CollectionColumn, operator: str, value: float) -> str:
    # Of integers x <= 6.5 is x < 7, and x > 6.5 is x >= 7.
    bound = math.ceil(value) if operator in ("lt", "ge") else math.floor(value) + 1
    below = operator in ("lt", "le")
    if bound <= _LONG.min or bound > _LONG.max:
        return _EVERYTHING if below == (bound > _LONG.max) else _NOTHING
    return f"{column.field} {'<' if below else '>='} {bound}"


def _compared_float(column: CollectionColumn, operator: str, value: float) -> str:
    number = _float(column, value)
    if math.isfinite(number):
        return f"{column.field} {_ORDER[operator]} {number!r}"
    # A column may hold infinities, of which Milvus reads no literal: they are what lies beyond the largest number.
    most = repr(float(np.finfo(np.float64).max))
    if number > 0:
        infinite, finite = f"{column.field} > {most}", f"{column.field} <= {most}"
        return {"lt": finite, "le": _EVERYTHING, "gt": _NOTHING, "ge": infinite, "eq": infinite}[operator]
    infinite, finite = f"{column.field} < -{most}", f"{column.field} >= -{most}"
    return {"lt": _NOTHING, "le": infinite, "gt": finite, "ge": _EVERYTHING, "eq": infinite}[operator]


def _float(column: CollectionColumn, value: float) -> float:
    """A number in the precision of the column; infinite where that has no room for it."""
    kind: Any = {"half": np.float16, "float": np.float32, "double": np.float64}[column.type]
    try:
        with np.errstate(over="ignore"):
            return float(kind(value))
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_text(value: str) -> bool:
    """Whether a string can be in UTF-8; no label has one that cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
