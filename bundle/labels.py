"""labels.parquet: everything about a label but its embedding. Row i is embedding row i is index id i."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.arrays import Array, Float32, Int8, Int64
from longtail.bundle.errors import BundleInvariantError
from longtail.bundle.id_rows import IdRows

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
    def row_of(self) -> IdRows:
        """Row of every label, by id."""
        return IdRows(self.ids)

    @property
    def log_pi(self) -> Float32:
        """Natural log of the smoothed training frequency π, float32 [L], whichever column holds it."""
        return self.log_pn if self.log_popularity is None else self.log_popularity

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
        if self.log_popularity is not None:
            columns["log_popularity"] = self.log_popularity
        for name in self.display.column_names:
            if name in RESERVED_COLUMNS:
                raise ValueError(f"display column {name!r}: expected a name other than {', '.join(RESERVED_COLUMNS)}")
            columns[name] = self.display[name]
        pq.write_table(pa.table(columns), path)

    @classmethod
    def read(cls, path: Path, display: Collection[str] = ()) -> Labels:
        """Read what `write` wrote.

        Args:
            path: labels.parquet.
            display: the user's columns, for before version 3 one of them could be called `log_popularity`.

        Raises:
            BundleInvariantError: a column is missing, has another type, or holds nulls.
        """
        # By this thread: others would keep some of what they took, and take no less time.
        table = pq.read_table(path, use_threads=False)
        for name, expected in _COLUMNS.items():
            found = table.schema.field(name).type if name in table.column_names else "no such column"
            if found != expected:
                raise BundleInvariantError(f"labels.parquet column {name!r}", expected=expected, found=found)
            if table[name].null_count:
                raise BundleInvariantError(
                    f"labels.parquet column {name!r}", expected="no nulls", found=f"{table[name].null_count} nulls"
                )
        optional = [name for name in _OPTIONAL_COLUMNS if name in table.column_names and name not in display]
        return cls(
            ids=table["label_id"].combine_chunks(),
            counts=table["count"].to_numpy(),
            log_pn=table["log_pn"].to_numpy(),
            buckets=table["bucket"].to_numpy(),
            bias=table["bias"].to_numpy() if "bias" in optional else None,
            # In one piece, so that who takes it in one piece takes no copy.
            display=table.drop_columns([*_COLUMNS, *optional]).combine_chunks(),
            log_popularity=table["log_popularity"].to_numpy() if "log_popularity" in optional else None,
        )
