"""What finds labels by their ids. A release keeps it as a file that processes map, where making it again would take
each of them seconds and memory.

Legend: `L` labels, `N` ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int32
from longtail.bundle.errors import require
from longtail.bundle.id_rows import IdHashes, IdRows
from longtail.bundle.mapped_table import check_rows, map_table, numbers_of, write_table

UInt32 = npt.NDArray[np.uint32]

_BY_ID, _FINGERPRINT = "row_by_id", "fingerprint"
_CHUNK = 1 << 16


class Lookup:
    """Rows of labels by id, in the order of the ids, and the ids' fingerprints.

    Args:
        ids: string [L], distinct and not null.
        table: what `write` wrote of the same ids; None: each part is made when it is first asked for.
    """

    def __init__(self, ids: pa.Array, table: pa.Table | None = None) -> None:
        self.ids = ids
        self._table = table

    @cached_property
    def row_of(self) -> IdRows:
        """Row of every label, by id."""
        return IdRows(self.ids, None if self._table is None else IdHashes.from_table(self._table, len(self.ids)))

    @cached_property
    def rows_by_id(self) -> Int32:
        """All rows in the order of their ids, by code points, int32 [L]."""
        if self._table is not None:
            return numbers_of(self._table, _BY_ID, np.int32, len(self.ids))
        rows_L: Int32 = pc.sort_indices(self.ids).to_numpy().astype(np.int32)
        return rows_L

    @property
    def distinct(self) -> int:
        """How many different ids there are: as many as labels, where each stands once."""
        return len(self.ids) if self._table is not None and self._ascending else pc.count_distinct(self.ids).as_py()

    @cached_property
    def _ascending(self) -> bool:
        """Whether the ids in the order of `rows_by_id` are strictly ascending: a twentieth of the work of counting."""
        rows_L = self.rows_by_id
        for start in range(0, len(rows_L), _CHUNK):
            # The last of one chunk is the first of the next.
            ids = self.ids.take(pa.array(rows_L[start : start + _CHUNK + 1]))
            if pc.all(pc.less(ids[:-1], ids[1:])).as_py() is False:
                return False
        return True

    @cached_property
    def fingerprints(self) -> UInt32:
        """`fingerprints` of all ids, uint32 [L]."""
        if self._table is not None:
            return numbers_of(self._table, _FINGERPRINT, np.uint32, len(self.ids))
        found_L = np.empty(len(self.ids), np.uint32)
        # In chunks, so that a release loading beside a live one never holds the interpreter for long.
        for start in range(0, len(self.ids), _CHUNK):
            ids = self.ids[start : start + _CHUNK].to_pylist()
            found_L[start : start + len(ids)] = fingerprints(ids)
        return found_L

    def write(self, path: Path) -> None:
        """Write all of it, for `map`."""
        table = self.row_of.hashes.table()
        for name, numbers_L in ((_BY_ID, self.rows_by_id), (_FINGERPRINT, self.fingerprints)):
            table = table.append_column(name, pa.array(numbers_L))
        write_table(path, table)

    @classmethod
    def map(cls, path: Path, ids: pa.Array, *, verify: bool = True) -> Lookup:
        """Map what `write` wrote of the same ids.

        Args:
            path: lookup.arrow.
            ids: string [L].
            verify: whether to look at every number.

        Raises:
            BundleCorruptError: no Arrow file.
            BundleInvariantError: columns that are not those of `write`, of so many labels.
        """
        lookup = cls(ids, map_table(path, verify=verify))
        if verify:
            lookup.row_of.hashes.check(path.name)
            check_rows(f"{path.name} column {_BY_ID!r}", lookup.rows_by_id)
            require(
                f"{path.name} has the labels in the order of their ids", lookup._ascending, "ascending ids", "others"
            )
        return lookup


def fingerprints(ids: Iterable[str]) -> UInt32:
    """CRC-32 of every id, uint32 [N]: a label that is not among 20 answered ones passes for one of them once in
    2·10^8.
    """
    return np.array([zlib.crc32(id_.encode("utf-8", "replace")) for id_ in ids], np.uint32)
