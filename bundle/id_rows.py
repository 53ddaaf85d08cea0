"""Rows of a table by id, for tables of millions: three arrays beside the column of ids, and the ids asked for lately.

Legend: `L` rows of the table, `S` slots, `N` ids that are looked up.

A dictionary of Python strings takes about 150 bytes a row. Here rows stand in the order of their ids' slots, where a
slot is some bits of Python's hash of a string, which no client can foresee; what stands there is compared with the id
itself. That takes 12 to 16 bytes a row, and what is asked for again and again costs what it did in a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Int32, Int64

ABSENT = -1
"""Row of an id that the table does not have."""
_MAX_KEPT = 1 << 16
"""Ids kept as Python strings, at most; then all are forgotten and those asked for found again."""
_CHUNK = 1 << 16
_SEVERAL = 128
"""Ids from which on they are found together in less time than one after the other."""


class IdRows(Mapping[str, int]):
    """The row of every id of a column, a mapping that is made in a third of a second a million ids. Thread-safe.

    Args:
        ids: string [L], distinct and not null.

    Example:
        >>> import pyarrow as pa
        >>> rows = IdRows(pa.array(["a", "b"]))
        >>> rows["b"], rows.get("c"), rows.of(["b", "c", "a"])
        (1, None, [1, None, 0])
    """

    def __init__(self, ids: pa.Array) -> None:
        self.ids = ids if pa.types.is_string(ids.type) else ids.cast(pa.string())
        self._kept: dict[str, int] = {}
        slots = 1 << max(0, len(ids) - 1).bit_length()
        self._mask = slots - 1
        hashes_L = np.empty(len(ids), np.int64)
        # In chunks, so that a release loading beside a live one never holds the interpreter for long.
        for start in range(0, len(ids), _CHUNK):
            chunk = self.ids[start : start + _CHUNK].to_pylist()
            hashes_L[start : start + len(chunk)] = _hashes(chunk)
        slots_L = hashes_L & self._mask
        self._ends_S: Int32 = np.zeros(slots + 1, np.int32)
        np.cumsum(np.bincount(slots_L, minlength=slots), out=self._ends_S[1:])
        self._rows_L: Int32 = np.argsort(slots_L, kind="stable").astype(np.int32)
        self._tags_L = _tags(hashes_L[self._rows_L])
        # Single numbers are read from a memoryview in a third of the time that an array takes.
        self._end_of, self._row_at = self._ends_S.data, self._rows_L.data
        _, offsets, text = self.ids.buffers()
        self._offset_of = memoryview(offsets or b"").cast("B").cast("i")[self.ids.offset :]
        self._text = memoryview(text or b"").cast("B")

    def __getitem__(self, id_: str) -> int:
        row = self._kept.get(id_)
        if row is None:
            row = self._find(id_)
            if row is None:
                raise KeyError(id_)
            self._keep({id_: row})
        return row

    def get(self, id_: str, default: int | None = None) -> int | None:  # type: ignore[override]
        """The row of an id, or the default."""
        try:
            return self[id_]
        except KeyError:
            return default

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and self.get(id_) is not None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.ids), _CHUNK):
            yield from self.ids[start : start + _CHUNK].to_pylist()

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, ids: Sequence[str]) -> list[int | None]:
        """The rows of some ids, in order; None of one that is not in the table."""
        kept = self._kept.get
        rows = [kept(id_) for id_ in ids]
        if None not in rows:
            return rows
        places = [place for place, row in enumerate(rows) if row is None]
        missing = [ids[place] for place in places]
        found = self._find_several(missing) if len(missing) >= _SEVERAL else list(map(self._find, missing))
        self._keep({id_: row for id_, row in zip(missing, found, strict=True) if row is not None})
        for place, row in zip(places, found, strict=True):
            rows[place] = row
        return rows

    def forget(self) -> None:
        """Let go of the ids asked for lately; they are found again where they are asked for again."""
        self._kept = {}

    def _keep(self, rows: dict[str, int]) -> None:
        if len(self._kept) + len(rows) > _MAX_KEPT:
            self._kept = {}
        if len(rows) <= _MAX_KEPT:
            self._kept.update(rows)

    def _find(self, id_: str) -> int | None:
        slot = hash(id_) & self._mask
        start, end = self._end_of[slot], self._end_of[slot + 1]
        if start == end:
            return None
        # A lone surrogate, which JSON may hold and no column of strings, becomes bytes that are no UTF-8.
        text = id_.encode("utf-8", "surrogatepass")
        for row in self._row_at[start:end]:
            if self._text[self._offset_of[row] : self._offset_of[row + 1]] == text:
                return row
        return None

    def _find_several(self, ids: Sequence[str]) -> list[int | None]:
        """`_find` of each: all hashes are compared together, and then every id with the one that has its hash."""
        hashes_N = _hashes(ids)
        slots_N, tags_N = hashes_N & self._mask, _tags(hashes_N)
        at_N, ends_N = self._ends_S[slots_N], self._ends_S[slots_N + 1]
        rows_N: Int64 = np.full(len(ids), ABSENT)
        open_N = np.flatnonzero(at_N < ends_N)
        while open_N.size:
            at = at_N[open_N]
            same = self._tags_L[at] == tags_N[open_N]
            rows_N[open_N[same]] = self._rows_L[at[same]]
            at_N[open_N] = at + 1
            open_N = open_N[~same & (at + 1 < ends_N[open_N])]
        found_N = np.flatnonzero(rows_N != ABSENT)
        here = self.ids.take(pa.array(rows_N[found_N])).to_pylist()
        rows: list[int | None] = [None] * len(ids)
        for place, row, id_ in zip(found_N.tolist(), rows_N[found_N].tolist(), here, strict=True):
            # Another id of the same hash, once in billions: perhaps not the only one.
            rows[place] = row if id_ == ids[place] else self._find(ids[place])
        return rows


def _hashes(ids: Sequence[str]) -> Int64:
    return np.fromiter(map(hash, ids), np.int64, len(ids))


def _tags(hashes_N: Int64) -> npt.NDArray[np.uint32]:
    """The half of the hashes that no slot is made of, uint32 [N]."""
    return (hashes_N >> 32).astype(np.uint32)
