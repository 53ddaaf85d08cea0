"""Find the row of an id among millions, by bisection of a stored order.

A dictionary of Python strings takes about 150 bytes a row; the order takes 4, in a file that processes can share by
mapping it. Recently found ids are cached.

Legend: `L` rows of the table, `N` ids that are looked up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int32
from longtail.bundle.errors import require
from longtail.bundle.ids import respelled

_MAX_KEPT = 1 << 16
"""Size at which the cache of found ids is emptied."""
_ALL_KEPT = 1 << 13
"""Largest table whose ids are all cached, about 1 MB, so that unknown ids are not searched for."""
_CHUNK = 1 << 16
_STEP = 128
"""Every 128th id in order is kept in memory as bytes; a bisection starts between two of them."""
_SEVERAL = 128
"""Number of ids from which one bisection of all takes less time than one bisection each."""


class IdRows(Mapping[str, int]):
    """Map every id of a column to its row. Thread-safe.

    Args:
        ids: string or, beyond 2 GiB, large_string [L], distinct and not null.
        order_L: int32, rows in the order of their ids by code points; None: sorted when first needed.

    Attributes:
        first: row of the first id.
        unknown: row that `find_all` gives for an id that is not in the table.

    Example:
        >>> import pyarrow as pa
        >>> rows = IdRows(pa.array(["a", "b"]))
        >>> rows["b"], rows.get("c"), rows.find_all(["b", "c", "a"])
        (1, None, [1, -1, 0])
    """

    first, unknown = 0, -1

    def __init__(self, ids: pa.Array, order_L: Int32 | None = None) -> None:
        large = pa.types.is_large_string(ids.type)
        self.ids = ids if large or pa.types.is_string(ids.type) else ids.cast(pa.string())
        self._stored_order_L = order_L
        self._caches_all = len(ids) <= _ALL_KEPT
        self._cache = dict(zip(self.ids.to_pylist(), count(self.first))) if self._caches_all else {}
        _, offsets, text = self.ids.buffers()
        self._offsets = memoryview(offsets or b"").cast("B").cast("q" if large else "i")[self.ids.offset :]
        self._text = memoryview(text or b"").cast("B")

    @cached_property
    def order(self) -> Int32:
        """Get all rows in the order of their ids, int32 [L]."""
        if self._stored_order_L is not None:
            return self._stored_order_L
        order_L: Int32 = pc.sort_indices(self.ids).to_numpy().astype(np.int32)
        return order_L

    def check(self, file: str) -> None:
        """Check that the ids are distinct and in order; raises BundleInvariantError."""
        labels, order_L = len(self.ids), self.order
        inside = bool(((order_L >= 0) & (order_L < labels)).all()) and len(order_L) == labels
        for start in range(0, labels, _CHUNK):
            # Chunks overlap by one id, so that neighbours in different chunks are compared too.
            ids = self.ids.take(pa.array(order_L[start : start + _CHUNK + 1])) if inside else self.ids
            if not inside or pc.all(pc.less(ids[:-1], ids[1:])).as_py() is False:
                distinct = pc.count_distinct(self.ids).as_py()
                require(f"{file} holds distinct ids", distinct == labels, f"{labels} distinct", f"{distinct} distinct")
                require(f"{file} holds its rows in the order of their ids", False, "ascending ids", "others")

    def __getitem__(self, id_: str) -> int:
        row = self.get(id_)
        if row is None:
            raise KeyError(id_)
        return row

    def get(self, id_: str, default: int | None = None) -> int | None:  # type: ignore[override]
        """Get the row of an id, or the default."""
        row = self._cache.get(id_)
        if row is None and not self._caches_all:
            row = self._find(id_)
            if row is not None:
                self._remember({id_: row})
        return default if row is None else row

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and self.get(id_) is not None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.ids), _CHUNK):
            yield from self.ids[start : start + _CHUNK].to_pylist()

    def __len__(self) -> int:
        return len(self.ids)

    def find_all(self, ids: Sequence[str]) -> list[int]:
        """Get the rows of some ids, in order; `unknown` for an id that is not in the table.

        Such an id counts as the boolean or whole number that it spells, like in training.
        """
        rows = list(map(self._cache.get, ids))
        if None not in rows:
            return cast("list[int]", rows)
        missing = [i for i, row in enumerate(rows) if row is None]
        for i, row in zip(missing, self._find_stored([ids[i] for i in missing]), strict=True):
            rows[i] = row
        others = {i: other for i in missing if rows[i] is None and (other := respelled(ids[i])) != ids[i]}
        for i, row in zip(others, self._find_stored([*others.values()]), strict=True):
            rows[i] = row
        return [self.unknown if row is None else row for row in rows]

    def _find_stored(self, ids: Sequence[str]) -> list[int | None]:
        """Get the rows of ids as they are spelled; None for an id that is not in the table."""
        if self._caches_all:
            return list(map(self._cache.get, ids))
        rows = self._find_several(ids) if len(ids) >= _SEVERAL else list(map(self._find, ids))
        self._remember({id_: row for id_, row in zip(ids, rows, strict=True) if row is not None})
        return rows

    def forget(self) -> None:
        """Empty the cache of found ids."""
        if not self._caches_all:
            self._cache = {}

    def _remember(self, rows: dict[str, int]) -> None:
        # Emptied, not trimmed: that needs no order of use and no lock, and frequent ids are soon back.
        if len(self._cache) + len(rows) > _MAX_KEPT:
            self._cache = {}
        if len(rows) <= _MAX_KEPT:
            self._cache.update(rows)

    @cached_property
    def _ordered_rows(self) -> memoryview:
        # Reading single numbers from a memoryview takes a third of the time of an array.
        return self.order.data

    def _read_text(self, row: int) -> bytes:
        return self._text[self._offsets[row] : self._offsets[row + 1]].tobytes()

    @cached_property
    def _steps(self) -> list[bytes]:
        return [self._read_text(row) for row in self._ordered_rows[::_STEP]]

    def _find(self, id_: str) -> int | None:
        text = _bytes(id_)
        end = _STEP * bisect_left(self._steps, text)
        position = bisect_left(self._ordered_rows, text, max(0, end - _STEP), min(end, len(self)), key=self._read_text)
        if position == len(self) or self._read_text(row := self._ordered_rows[position]) != text:
            return None
        return self.first + row

    def _find_several(self, ids: Sequence[str]) -> list[int | None]:
        """Find several ids by one vectorised bisection."""
        binary = pa.large_binary() if pa.types.is_large_string(self.ids.type) else pa.binary()
        texts, column = pa.array(map(_bytes, ids), binary), self.ids.view(binary)
        ends_N = _STEP * np.array([bisect_left(self._steps, text) for text in map(_bytes, ids)])
        low_N, high_N = np.maximum(0, ends_N - _STEP), np.minimum(ends_N, len(self))
        while (open_N := low_N < high_N).any():
            middle_N = (low_N + high_N) // 2
            at_N = column.take(pa.array(self.order[np.minimum(middle_N, len(self) - 1)]))
            before_N = pc.less(at_N, texts).to_numpy(zero_copy_only=False) & open_N
            low_N, high_N = np.where(before_N, middle_N + 1, low_N), np.where(open_N & ~before_N, middle_N, high_N)
        if not len(self):
            return [None] * len(ids)
        rows_N = self.order[np.minimum(low_N, len(self) - 1)]
        matches_N = pc.equal(column.take(pa.array(rows_N)), texts).to_pylist()
        return [self.first + row if matches else None for row, matches in zip(rows_N.tolist(), matches_N, strict=True)]


def _bytes(id_: str) -> bytes:
    # JSON may contain a lone surrogate. It becomes bytes that are not UTF-8, so it equals no id of a column.
    return id_.encode("utf-8", "surrogatepass")
