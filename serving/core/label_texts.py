"""The ids and texts of a label table, to look through: in the order of the ids, and for what holds a text.

Legend: `L` labels, `N` some of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Int64


class LabelTexts:
    """Ids and display columns of labels. Arrow sorts and searches them, which leaves the interpreter to others.

    Args:
        ids: string [L], distinct.
        columns: of types that JSON has, each [L]; what is searched of them is text, lists of text and whole numbers.
    """

    def __init__(self, ids: pa.Array, columns: Iterable[pa.Array]) -> None:
        self._ids = ids
        self._columns = [ids, *(column for column in columns if _is_searched(column.type))]

    @cached_property
    def rows_by_id(self) -> npt.NDArray[np.int32]:
        """All rows in the order of their ids, by code points, int32 [L]; sorted when first asked for."""
        rows_L: npt.NDArray[np.int32] = pc.sort_indices(self._ids).to_numpy().astype(np.int32)
        return rows_L

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
