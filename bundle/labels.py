"""labels.parquet: everything about a label but its embedding. Row i is embedding row i is index id i."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.arrays import Array, Float32, Int8, Int64
from longtail.bundle.errors import BundleInvariantError

_COLUMNS = {
    "label_id": pa.string(),
    "count": pa.int64(),
    "log_pn": pa.float32(),
    "bucket": pa.int8(),
}
RESERVED_COLUMNS = (*_COLUMNS, "bias")


@dataclass(frozen=True)
class Labels:
    """The label table.

    Attributes:
        ids: string [L], distinct.
        counts: int64 [L], training pairs.
        log_pn: float32 [L], natural log of the smoothed training frequency, logsumexp 0.
        buckets: int8 [L], 0 head, 1 torso, 2 tail.
        bias: float32 [L] in logits, or None.
        display: the user's own columns (title, …), L rows.
    """

    ids: pa.Array
    counts: Int64
    log_pn: Float32
    buckets: Int8
    bias: Float32 | None
    display: pa.Table

    def write(self, path: Path) -> None:
        """Write as Parquet; raises ValueError if a display column takes a reserved name."""
        columns: dict[str, pa.Array | Array] = {
            "label_id": self.ids,
            "count": self.counts,
            "log_pn": self.log_pn,
            "bucket": self.buckets,
        }
        if self.bias is not None:
            columns["bias"] = self.bias
        for name in self.display.column_names:
            if name in RESERVED_COLUMNS:
                raise ValueError(f"display column {name!r}: expected a name other than {', '.join(RESERVED_COLUMNS)}")
            columns[name] = self.display[name]
        pq.write_table(pa.table(columns), path)

    @classmethod
    def read(cls, path: Path) -> Labels:
        """Read what `write` wrote.

        Raises:
            BundleInvariantError: a column is missing, has another type, or holds nulls.
        """
        table = pq.read_table(path)
        for name, expected in _COLUMNS.items():
            found = table.schema.field(name).type if name in table.column_names else "no such column"
            if found != expected:
                raise BundleInvariantError(f"labels.parquet column {name!r}", expected=expected, found=found)
            if table[name].null_count:
                raise BundleInvariantError(
                    f"labels.parquet column {name!r}", expected="no nulls", found=f"{table[name].null_count} nulls"
                )
        return cls(
            ids=table["label_id"].combine_chunks(),
            counts=table["count"].to_numpy(),
            log_pn=table["log_pn"].to_numpy(),
            buckets=table["bucket"].to_numpy(),
            bias=table["bias"].to_numpy() if "bias" in table.column_names else None,
            display=table.drop_columns([name for name in RESERVED_COLUMNS if name in table.column_names]),
        )
