"""Audiences: the queries that chose a label, for label features of kind `audience`.

Legend: `N` training pairs, `L` labels, `Q` queries, `B` some labels, `P` positions of a padded audience.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int32, Int64
from longtail.trainer.data.pairs import Pairs

_BLOCK = 4096
"""Largest number of labels in a block."""
_ENTRIES = 1 << 18
"""Largest number of entries in a block, padding included; a single label may have more."""


@dataclass(frozen=True)
class Audience:
    """Hold the training pairs by label: label y has entries `offsets[y]:offsets[y + 1]`, sorted by query row.

    Attributes:
        offsets: int64 [L + 1].
        ids: vocabulary rows of the entries' queries by feature name, int32 [N] each.
        entry_ranges: for each training pair, the first entry of its query among its label's entries, and the number of
            entries of this query, int32 [N, 2].
    """

    offsets: Int64
    ids: dict[str, Int32]
    entry_ranges: Int32

    @classmethod
    def build(cls, pairs: Pairs, rows: Mapping[str, Int32], *, labels: int) -> Audience:
        """Group the training pairs by label.

        Args:
            pairs: sorted by query.
            rows: vocabulary rows of every query, int32 [Q], by feature name.
        """
        order = np.argsort(pairs.labels, kind="stable")
        queries_N, labels_N = pairs.queries[order], pairs.labels[order]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(labels_N, minlength=labels))])
        # A run is the entries of one query with one label, which are neighbours in this order.
        begins_N = np.ones(len(order), bool)
        begins_N[1:] = (np.diff(labels_N) != 0) | (np.diff(queries_N) != 0)
        begins = np.flatnonzero(begins_N)
        of_run_N = np.cumsum(begins_N) - 1
        entry_ranges = np.empty((len(order), 2), np.int32)
        entry_ranges[order, 0] = begins[of_run_N] - offsets[labels_N]
        entry_ranges[order, 1] = np.diff(np.append(begins, len(order)))[of_run_N]
        return cls(offsets, {name: rows_Q[queries_N] for name, rows_Q in rows.items()}, entry_ranges)

    @property
    def nbytes(self) -> int:
        """Return the size of all arrays, bytes."""
        return self.offsets.nbytes + self.entry_ranges.nbytes + sum(ids.nbytes for ids in self.ids.values())

    @property
    def longest(self) -> int:
        """Return the number of entries of the longest audience, at least 1."""
        return max(int(np.diff(self.offsets).max(initial=0)), 1)

    def inputs(self, rows_B: Int32) -> Inputs:
        """Return the label tower's inputs with whole audiences.

        Each feature has `name` int32 [B, P] and `name__weight` float32 [B, P]. P is the length of the longest audience,
        rounded up to a power of two, because a tower is compiled again for every new shape.
        """
        starts_B, sizes_B = self.offsets[rows_B], np.diff(self.offsets)[rows_B]
        slots_P = np.arange(_width(sizes_B))
        inside_BP = slots_P < sizes_B[:, None]
        at_BP = np.where(inside_BP, starts_B[:, None] + slots_P, 0)
        inputs: Inputs = {}
        for name, ids_N in self.ids.items():
            inputs[name] = np.where(inside_BP, ids_N[at_BP], np.int32(0))
            inputs[f"{name}__weight"] = inside_BP.astype(np.float32)
        return inputs

    def blocks(self) -> Iterator[Int32]:
        """Yield all labels in blocks of bounded size, labels with long audiences first.

        Copies of the last label fill up the last block, because a tower is compiled again for every new shape.
        """
        sizes_L = np.diff(self.offsets)
        order, start = np.argsort(-sizes_L, kind="stable").astype(np.int32), 0
        while start < len(order):
            count = min(max(_ENTRIES // _width(sizes_L[order[start : start + 1]]), 1), _BLOCK, len(order))
            rows = order[start : start + count]
            yield np.pad(rows, (0, count - len(rows)), mode="edge")  # labels embedded twice get the same values
            start += count

    def first_rows(self, limit: int) -> Int32:
        """Return the first label rows whose audiences fit a block, at most `limit`."""
        rows = np.arange(min(limit, len(self.offsets) - 1), dtype=np.int32)
        while len(rows) > 1 and len(rows) * _width(np.diff(self.offsets)[rows]) > _ENTRIES:
            rows = rows[: len(rows) // 2]
        return rows


def _width(sizes_B: Int64) -> int:
    return 1 << int(max(int(sizes_B.max(initial=1)), 1) - 1).bit_length()
