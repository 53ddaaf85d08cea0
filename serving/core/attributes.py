"""Turn filters by attribute into sets of labels, such as `{"category": {"in": ["a", "b"]}, "price": {"lt": 20}}`.

`longtail.bundle.conditions` says what conditions mean. The sets are cached, because most filters recur, and queries
with the same set share a search.

Legend: `L` labels of the release, `M` of the overlay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from longtail.bundle.conditions import Attributes, Condition, read_conditions
from longtail.bundle.display import DisplayColumns
from longtail.bundle.errors import ConditionError
from longtail.bundle.filterable import FilterKind, filter_kind
from longtail.index import FilterMask
from longtail.serving.core.overlay import OverlayRows
from longtail.serving.errors import InvalidRequestError

_DISTINCT = 1 << 16
"""Most distinct strings of a column that can be filtered by without being declared; names and titles have more."""
_ENTRIES = 32
"""Most list entries per label of such a column, on average."""
_KEPT_BYTES, _MOST_KEPT = 1 << 25, 1_024
_BLOCK = 1 << 12
"""Rows of an overlay whose columns are read together, a multiple of 8; a change reads the last, partial block again."""


class _Block:
    """Attributes of some overlay rows, with cached filter results."""

    def __init__(
        self, kinds: Mapping[str, FilterKind], catalogue: pa.Table, display: Sequence[Mapping[str, JsonValue]]
    ) -> None:
        columns = DisplayColumns(catalogue)

        def column(name: str) -> pa.ChunkedArray:
            return pa.chunked_array([columns.column(name, [label[name] for label in display])])

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
        self._display = display
        self._of_labels = Attributes(self.kinds, len(display), display.column)
        # Copies with overlays share this cache, which concerns the release's labels alone.
        self._selected = lru_cache(_most_kept(len(display)))(self._select)
        self._rows: OverlayRows | None = None
        self._full_blocks: tuple[_Block, ...] = ()
        self._of_overlay: Callable[[tuple[Condition, ...]], FilterMask] | None = None

    def with_overlay(self, rows: OverlayRows) -> LabelAttributes:
        """Return the attributes with an overlay's labels.

        Cached sets of the release's labels stay, and of the blocks of overlay rows that are full already.
        """
        attributes = copy.copy(self)
        continued = self._rows is not None and rows.origin is self._rows.origin
        full = list(self._full_blocks) if continued else []
        for begin in range(len(full) * _BLOCK, len(rows) - _BLOCK + 1, _BLOCK):
            # A full block never changes, so all later overlays share its columns and sets.
            full.append(_Block(self.kinds, self._display, rows.added.display[begin : begin + _BLOCK]))
        rest = rows.added.display[len(full) * _BLOCK :]
        blocks = [*full, _Block(self.kinds, self._display, rest)] if len(rest) else full

        def select(conditions: tuple[Condition, ...]) -> FilterMask:
            bits = np.concatenate([block.bits(conditions) for block in blocks])
            return FilterMask(np.unpackbits(bits, count=len(rows), bitorder="little").view(np.bool_))

        attributes._rows, attributes._full_blocks = rows, tuple(full)
        attributes._of_overlay = lru_cache(_most_kept(len(rows)))(select) if len(rows) else None
        return attributes

    def select(self, filter_: Mapping[str, JsonValue], field: str) -> tuple[FilterMask, FilterMask | None]:
        """Select the labels that pass a filter: of the release, and of the overlay (None without one).

        The overlay's rows count from its first label. Equal filters get the same objects, so that their queries share a
        search.

        Args:
            field: path of the filter in errors, such as `queries.0.filter`.

        Raises:
            InvalidRequestError: a column cannot be filtered by, or an operator or value does not fit the column.
        """
        return self.select_all(self.read(filter_, field))

    def read(self, filter_: Mapping[str, JsonValue], field: str) -> tuple[Condition, ...]:
        """Read the conditions of a filter in a canonical order; raises like `select`."""
        try:
            return tuple(read_conditions(self.kinds, filter_, field))
        except ConditionError as error:
            raise InvalidRequestError(error.message, field=error.field) from error

    def select_all(self, conditions: tuple[Condition, ...]) -> tuple[FilterMask, FilterMask | None]:
        """Select the labels that meet all conditions, like `select`."""
        return self._selected(conditions), None if self._of_overlay is None else self._of_overlay(conditions)

    def _select(self, conditions: tuple[Condition, ...]) -> FilterMask:
        return FilterMask.from_conditions(conditions, len(self._display), lambda: self._of_labels.mask(conditions))

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
