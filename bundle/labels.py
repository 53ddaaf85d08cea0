"""labels.parquet: everything about a label but its embedding. Row i is embedding row i is index id i.

A release keeps the same table as an Arrow file, too: its columns lie there as they are read, so it is mapped, and takes
no memory of a process' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.arrays import Array, Float32, Int8, Int64
from longtail.bundle.errors import BundleInvariantError
from longtail.bundle.id_rows import IdRows
from longtail.bundle.lookup import Lookup
from longtail.bundle.mapped_table import in_one_piece, map_table, write_table

_COLUMNS = {
    "label_id": pa.string(),
    "count": pa.int64(),
    "log_pn": pa.float32(),
    "bucket": pa.int8(),
}
_OPTIONAL_COLUMNS = ("bias", "log_popularity")
RESERVED_COLUMNS = (*_COLUMNS, *_OPTIONAL_COLUMNS)


@dataclass(frozen=True)
class Labels:
    """The label table.

    Attributes:
        ids: string [L], distinct.
        counts: int64 [L], training pairs.
        log_pn: float32 [L], log ν in nats, logsumexp 0: the noise that training implied [METHODS §9].
        buckets: int8 [L], 0 head, 1 torso, 2 tail, 3 new.
        bias: float32 [L] in logits, or None.
        display: the user's own columns (title, …), L rows.
        log_popularity: float32 [L], log π in nats, logsumexp 0; None where `log_pn` is it.
    """

    ids: pa.Array
    counts: Int64
    log_pn: Float32
    buckets: Int8
    bias: Float32 | None
    display: pa.Table
    log_popularity: Float32 | None = None

    @cached_property
    def lookup(self) -> Lookup:
        """What finds labels by id."""
        return Lookup(self.ids)

    @property
    def row_of(self) -> IdRows:
        """Row of every label, by id."""
        return self.lookup.row_of

    @property
    def log_pi(self) -> Float32:
        """Natural log of the smoothed training frequency π, float32 [L], whichever column holds it."""
        return self.log_pn if self.log_popularity is None else self.log_popularity

    def write(self, path: Path) -> None:
        """Write as Parquet; raises ValueError if a display column takes a reserved name."""
        pq.write_table(self._table(), path)

    def write_mappable(self, path: Path) -> None:
        """Write as an Arrow file, for `map`; raises ValueError as `write`."""
        write_table(path, self._table())

    def _table(self) -> pa.Table:
        columns: dict[str, pa.Array | Array] = {
            "label_id": self.ids,
            "count": self.counts,
            "log_pn": self.log_pn,
            "bucket": self.buckets,
        }
        if self.bias is not None:
            columns["bias"] = self.bias
        if self.log_popularity is not None:
            columns["log_popularity"] = self.log_popularity
        for name in self.display.column_names:
            if name in RESERVED_COLUMNS:
                raise ValueError(f"display column {name!r}: expected a name other than {', '.join(RESERVED_COLUMNS)}")
            columns[name] = self.display[name]
        return pa.table(columns)

    @classmethod
    def read(cls, path: Path) -> Labels:
        """Read what `write` wrote.

        Raises:
            BundleInvariantError: a column is missing, has another type, or holds nulls.
        """
        # By this thread: others would keep some of what they took, and take no less time.
        return cls._of(pq.read_table(path, use_threads=False), path.name)

    @classmethod
    def map(cls, path: Path, *, lookup: Path | None = None, verify: bool = True) -> Labels:
        """Map what `write_mappable` wrote: its pages are shared with every process that does so.

        Args:
            path: labels.arrow.
            lookup: lookup.arrow of the same labels, as `Lookup.write` wrote it, to be mapped.
            verify: whether to read all of it, and see that no text ends beyond the file.

        Raises:
            BundleCorruptError: no Arrow file, or one whose columns point beyond it.
            BundleInvariantError: as `read`, or as `Lookup.map`.
        """
        labels = cls._of(map_table(path, verify=verify), path.name)
        if lookup is not None:
            # What the property would make; a table that is made of this one with other labels makes its own.
            vars(labels)["lookup"] = Lookup.map(lookup, labels.ids, verify=verify)
        return labels

    @classmethod
    def _of(cls, table: pa.Table, file: str) -> Labels:
        for name, expected in _COLUMNS.items():
            found = table.schema.field(name).type if name in table.column_names else "no such column"
            if found != expected:
                raise BundleInvariantError(f"{file} column {name!r}", expected=expected, found=found)
            if table[name].null_count:
                raise BundleInvariantError(
                    f"{file} column {name!r}", expected="no nulls", found=f"{table[name].null_count} nulls"
                )
        optional = [name for name in _OPTIONAL_COLUMNS if name in table.column_names]
        columns = {name: in_one_piece(table[name]) for name in (*_COLUMNS, *optional)}
        numbers = {
            name: column.to_numpy(zero_copy_only=False) for name, column in columns.items() if name != "label_id"
        }
        return cls(
            ids=columns["label_id"],
            counts=numbers["count"],
            log_pn=numbers["log_pn"],
            buckets=numbers["bucket"],
            bias=numbers.get("bias"),
            # In one piece, so that who takes it in one piece takes no copy.
            display=table.drop_columns([*_COLUMNS, *optional]).combine_chunks(),
            log_popularity=numbers.get("log_popularity"),
        )
