"""labels.arrow: everything about a label but its embedding. Row i is embedding row i is FAISS id i.

The columns lie in the file as they are read, so it is mapped: processes share its pages, and none has a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa

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

    stored_lookup: Lookup | None = field(default=None, repr=False, compare=False)

    @cached_property
    def lookup(self) -> Lookup:
        """Get what finds labels by id: what a release keeps of these very ids, or a new one."""
        stored = self.stored_lookup
        return stored if stored is not None and stored.ids is self.ids else Lookup(self.ids)

    @property
    def row_of(self) -> IdRows:
        """Row of every label, by id."""
        return self.lookup.row_of

    @property
    def log_pi(self) -> Float32:
        """Natural log of the smoothed training frequency π, float32 [L], whichever column holds it."""
        return self.log_pn if self.log_popularity is None else self.log_popularity

    def write(self, path: Path) -> None:
        """Write as an Arrow file; raises ValueError if a display column takes a reserved name."""
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
    def read(cls, path: Path, *, lookup: Path | None = None, verify: bool = True) -> Labels:
        """Map what `write` wrote.

        Args:
            path: labels.arrow.
            lookup: lookup.arrow of the same labels, as `Lookup.write` wrote it, to be mapped.
            verify: whether to read all of it, and see that no text ends beyond the file.

        Raises:
            BundleCorruptError: no Arrow file, or one whose columns point beyond it.
            BundleInvariantError: a column is missing, has another type, or holds nulls, or the lookup is of other ids.
        """
        labels = cls._of(map_table(path, verify=verify), path.name)
        if lookup is None:
            return labels
        return replace(labels, stored_lookup=Lookup.map(lookup, labels.ids, verify=verify))

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
            # Combine chunks once, so later `combine_chunks` calls do not copy.
            display=table.drop_columns([*_COLUMNS, *optional]).combine_chunks(),
            log_popularity=numbers.get("log_popularity"),
        )
