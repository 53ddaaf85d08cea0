"""Read and write labels.arrow: all data of labels but their embeddings. Row i is embedding row i and FAISS id i.

The columns have the same layout in the file and in memory, so the file is mapped, and processes share its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Array, Float32, Int8, Int32, Int64
from longtail.bundle.id_rows import IdRows
from longtail.bundle.lifetimes import NO_LIMITS, read_lifetimes
from longtail.bundle.mapped_table import ORDER, map_columns, write_table
from longtail.bundle.one_line import one_line

_NUMBERS = {"count": np.int64, "log_pn": np.float32, "bucket": np.int8, ORDER: np.int32}
_OPTIONAL = {"bias": np.float32, "log_popularity": np.float32}
RESERVED_COLUMNS = ("label_id", *_NUMBERS, *_OPTIONAL)


@dataclass(frozen=True)
class Labels:
    """The label table.

    Attributes:
        ids: string or, beyond 2 GiB of text, large_string [L], distinct.
        counts: int64 [L], training pairs.
        log_pn: float32 [L], log ν in nats, logsumexp 0: the noise that training implied [METHODS §9].
        buckets: int8 [L], 0 head, 1 torso, 2 tail, 3 new.
        bias: float32 [L] in logits.
        display: the user's own columns (title, …), L rows.
        log_popularity: float32 [L], log π in nats, logsumexp 0; None where `log_pn` is it.
        stored_order: ids of the file, and rows in their order; None: sorted when first needed.
    """

    ids: pa.Array
    counts: Int64
    log_pn: Float32
    buckets: Int8
    bias: Float32 | None
    display: pa.Table
    log_popularity: Float32 | None = None
    stored_order: tuple[pa.Array, Int32] | None = field(default=None, repr=False, compare=False)

    __repr__ = one_line

    @cached_property
    def rows_by_id(self) -> IdRows:
        """Get the row of every label by id, with the order of the ids."""
        ids, order_L = self.stored_order or (None, None)
        return IdRows(self.ids, order_L if ids is self.ids else None)  # `replace` may have set other ids

    @cached_property
    def lifetimes(self) -> Int64 | None:
        """Get when labels are available, in seconds since 1970, int64 [L, 2]; None: always.

        Raises BundleInvariantError.
        """
        has_lifetimes = not NO_LIMITS.keys().isdisjoint(self.display.column_names)
        return read_lifetimes(self.display, self.ids) if has_lifetimes else None

    @property
    def log_pi(self) -> Float32:
        """Return the logarithm of the smoothed training frequency π in nats, float32 [L]."""
        return self.log_pn if self.log_popularity is None else self.log_popularity

    def write(self, path: Path) -> None:
        """Write as an Arrow file; raises ValueError if a display column takes a reserved name."""
        columns: dict[str, pa.Array | Array] = {
            "label_id": self.ids,
            "count": self.counts,
            "log_pn": self.log_pn,
            "bucket": self.buckets,
            ORDER: self.rows_by_id.order,
        }
        if self.bias is not None:
            columns["bias"] = self.bias
        if self.log_popularity is not None:
            columns["log_popularity"] = self.log_popularity
        for name in self.display.column_names:
            if name in RESERVED_COLUMNS:
                raise ValueError(f"display column {name!r}: expected a name other than {', '.join(RESERVED_COLUMNS)}")
            columns[name] = self.display[name]
        write_table(path, pa.table(columns))

    @classmethod
    def read(cls, path: Path, *, verify: bool = True) -> Labels:
        """Map a file of `write`; `verify` checks that no text ends beyond the file."""
        ids, numbers, display = map_columns(path, "label_id", _NUMBERS, _OPTIONAL, verify=verify)
        return cls(
            ids=ids,
            counts=numbers["count"],
            log_pn=numbers["log_pn"],
            buckets=numbers["bucket"],
            bias=numbers.get("bias"),
            # Combine chunks once, so later `combine_chunks` calls do not copy.
            display=display.combine_chunks(),
            log_popularity=numbers.get("log_popularity"),
            stored_order=(ids, numbers[ORDER]),
        )
