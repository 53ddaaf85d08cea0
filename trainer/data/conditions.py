"""`data.filter`: which rows of a file meet all of some conditions.

Legend: `N` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools
from longtail.trainer.config.rows import Condition
from longtail.trainer.data.files import DataFile

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "in": lambda column, values: pc.is_in(column, value_set=values),
    "not in": lambda column, values: pc.invert(pc.is_in(column, value_set=values)),
}


def rows_that_meet(conditions: Sequence[Condition], table: pa.Table, file: DataFile) -> Bools:
    """Return rows that meet every condition, bool [N]; a null meets none.

    Args:
        conditions: `(column, operator, value)`.
    """
    meets_N = np.ones(table.num_rows, bool)
    for name, operator, operand in conditions:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        many = isinstance(operand, list)
        try:
            column, values = _alike(column, operand if many else [operand])
            found = _OPERATORS[operator](column, values if many else values[0])
        except (pa.ArrowNotImplementedError, ValueError, TypeError) as error:
            raise file.wrong(name, f"what can be compared with {operand!r} (data.filter)", column.type) from error
        meets_N &= np.asarray(pc.fill_null(pc.and_kleene(found, pc.is_valid(column)), False))
    return meets_N


def _alike(column: pa.ChunkedArray, operands: list[Any]) -> tuple[pa.ChunkedArray, pa.Array]:
    """Return a column and values of one type: text is read as numbers or times where the recipe has such."""
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if isinstance(operands[0], date):
        wanted = pa.timestamp("us", kind.tz if pa.types.is_timestamp(kind) else None)
        if not (text or pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
            raise ValueError("a date beside no times")
        times = [each if isinstance(each, datetime) else datetime(each.year, each.month, each.day) for each in operands]
        return column.cast(wanted, safe=False), pa.array(times).cast(wanted)
    if pa.types.is_null(kind):
        return column, pa.nulls(len(operands))
    if text and not isinstance(operands[0], str):
        return column.cast(pa.float64()), pa.array(operands, pa.float64())
    if pa.types.is_integer(kind) and any(isinstance(each, float) for each in operands):
        return column.cast(pa.float64(), safe=False), pa.array(operands, pa.float64())
    return column, pa.array(operands).cast(kind)
