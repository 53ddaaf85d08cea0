"""Rows of a table by id, for tables of millions: two arrays beside the column of ids, and the ids asked for lately.

Legend: `L` rows of the table, `N` ids that are looked up.

A dictionary of Python strings takes about 150 bytes a row. Here stand the ids' hashes, ascending, and the row of each;
what stands there is compared with the id itself. That takes 12 bytes a row, which may be a file's that any number of
processes map, and what is asked for again and again costs what it did in a dictionary. The hash is keyed, with a key
that is drawn for each table: nobody can make ids that have one hash.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.errors import require
from longtail.bundle.mapped_table import check_rows, numbers_of

_MAX_KEPT = 1 << 16
"""Ids kept as Python strings, at most; then all are forgotten and those asked for found again."""
_CHUNK = 1 << 16
_SEVERAL = 128
"""Ids from which on they are found together in less time than one after the other."""
_HASH_BYTES, _KEY_BYTES = 8, 16
_HASH, _ROW, _KEY = "hash", "row", b"key"


@dataclass(frozen=True)
class IdHashes:
    """The hashes of a column's ids, and where each stands in it.

    Attributes:
        key: of the hash, 16 bytes.
        hashes_L: uint64, ascending.
        rows_L: int32, the row of each.
    """

    key: bytes
    hashes_L: npt.NDArray[np.uint64]
    rows_L: Int32

    @classmethod
    def of(cls, ids: pa.Array) -> IdHashes:
        """Of a column, string [L], under a key of its own."""
        key = os.urandom(_KEY_BYTES)
        hashes_L = np.empty(len(ids), np.uint64)
        # In chunks, so that a release loading beside a live one never holds the interpreter for long.
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK].to_pylist()
            hashes_L[start : start + len(chunk)] = hashes_of(chunk, key)
        rows_L = np.argsort(hashes_L, kind="stable").astype(np.int32)
        return cls(key, hashes_L[rows_L], rows_L)

    @classmethod
    def from_table(cls, table: pa.Table, rows: int) -> IdHashes:
        """Of a table that `table` made, perhaps with further columns; raises BundleInvariantError."""
        key = (table.schema.metadata or {}).get(_KEY, b"")
        require("a key of the ids' hashes", len(key) == 2 * _KEY_BYTES, f"{2 * _KEY_BYTES} digits", f"{len(key)}")
        return cls(
            bytes.fromhex(key.decode()),
            numbers_of(table, _HASH, np.uint64, rows),
            numbers_of(table, _ROW, np.int32, rows),
        )

    def table(self) -> pa.Table:
        """The hashes and their rows as columns, the key beside them."""
        columns = {_HASH: pa.array(self.hashes_L), _ROW: pa.array(self.rows_L)}
        return pa.table(columns).replace_schema_metadata({_KEY: self.key.hex()})

    def check(self, file: str) -> None:
        """Look at every number; raises BundleInvariantError."""
        require(f"{file} column {_HASH!r}", bool((self.hashes_L[:-1] <= self.hashes_L[1:]).all()), "ascending", "not")
        check_rows(f"{file} column {_ROW!r}", self.rows_L)


class IdRows(Mapping[str, int]):
    """The row of every id of a column, a mapping. Thread-safe.

    Args:
        ids: string [L], distinct and not null.
        hashes: theirs, made by `IdHashes.of` of the same column; None: made now, in a second a million ids.

    Example:
        >>> import pyarrow as pa
        >>> rows = IdRows(pa.array(["a", "b"]))
        >>> rows["b"], rows.get("c"), rows.of(["b", "c", "a"])
        (1, None, [1, None, 0])
    """

    def __init__(self, ids: pa.Array, hashes: IdHashes | None = None) -> None:
        self.ids = ids if pa.types.is_string(ids.type) else ids.cast(pa.string())
        self.hashes = hashes = IdHashes.of(self.ids) if hashes is None else hashes
        self._digest = _digest_under(hashes.key)
        self._kept: dict[str, int] = {}
        self._hashes_L, self._rows_L = hashes.hashes_L, hashes.rows_L
        # Single numbers are read from a memoryview in a third of the time that an array takes.
        self._hash_at, self._row_at = self._hashes_L.data, self._rows_L.data
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
        text = _bytes(id_)
        asked = int.from_bytes(self._digest(text), "little")
        for place in range(bisect_left(self._hash_at, asked), len(self._hash_at)):
            if self._hash_at[place] != asked:
                break
            row = self._row_at[place]
            if self._text[self._offset_of[row] : self._offset_of[row + 1]] == text:
                return row
        return None

    def _find_several(self, ids: Sequence[str]) -> list[int | None]:
        """`_find` of each: all hashes are looked up together, and then every id is compared with the one of its own."""
        rows: list[int | None] = [None] * len(ids)
        if not len(self):
            return rows
        hashes_N = hashes_of(ids, self.hashes.key)
        at_N = np.minimum(np.searchsorted(self._hashes_L, hashes_N), len(self) - 1)
        found_N: Int64 = np.flatnonzero(self._hashes_L[at_N] == hashes_N)
        rows_N = self._rows_L[at_N[found_N]]
        here = self.ids.take(pa.array(rows_N)).to_pylist()
        for place, row, id_ in zip(found_N.tolist(), rows_N.tolist(), here, strict=True):
            # Another id of the same hash, which nobody will see.
            rows[place] = row if id_ == ids[place] else self._find(ids[place])
        return rows


def hashes_of(ids: Iterable[str], key: bytes) -> npt.NDArray[np.uint64]:
    """Keyed BLAKE2b of every id, uint64 [N]."""
    digest = _digest_under(key)
    return np.frombuffer(b"".join([digest(_bytes(id_)) for id_ in ids]), "<u8")


def _digest_under(key: bytes) -> Callable[[bytes], bytes]:
    keyed = blake2b(digest_size=_HASH_BYTES, key=key)

    def digest(text: bytes) -> bytes:
        hashing = keyed.copy()
        hashing.update(text)
        return hashing.digest()

    return digest


def _bytes(id_: str) -> bytes:
    # A lone surrogate, which JSON may hold and no column of strings, becomes bytes that are no UTF-8.
    return id_.encode("utf-8", "surrogatepass")
