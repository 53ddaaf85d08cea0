"""The ids and texts of a label table, to look through for what holds a text.

Legend: `N` some labels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Int64


class LabelTexts:
    """Ids and display columns of labels. Arrow searches them, which leaves the interpreter to others.

    Args:
        ids: string [L], distinct.
        columns: of types that JSON has, each [L]; what is searched of them is text, lists of text and whole numbers.
    """

    def __init__(self, ids: pa.Array, columns: Iterable[pa.Array]) -> None:
        self._columns = [ids, *(column for column in columns if _is_searched(column.type))]

    def containing(self, text: str, rows_N: Int64) -> Bools:
        """Whether the id or a column of each of these labels holds a text, in upper case or lower, bool [N]."""
        found_N: Bools = np.zeros(len(rows_N), np.bool_)
        rows = pa.array(rows_N)
        for column in self._columns:
            taken = column.take(rows)
            if _is_list(taken.type):
                parents = pc.list_parent_indices(taken).to_numpy()
                found_N[parents[_contains(taken.flatten(), text)]] = True
            else:
                found_N |= _contains(taken, text)
        return found_N


def _contains(column: pa.Array, text: str) -> Bools:
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    found_N: Bools = pc.match_substring(column, text, ignore_case=True).fill_null(False).to_numpy(zero_copy_only=False)
    return found_N


def _is_searched(type_: pa.DataType) -> bool:
    if _is_list(type_):
        return _is_text(type_.value_type)
    return _is_text(type_) or bool(pa.types.is_integer(type_))


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))
