"""A batch in parts, for one update by the mean of their gradients.

Legend: `U` distinct rows of a table, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.model.embedding import Table


class Gradients(NamedTuple):
    """What an update needs of a batch, or of a part of one.

    Attributes:
        value: mean loss, float32 scalar.
        distinct: distinct ids that were read of every table, int32 [U], and their rows, float32 [U, D].
        rows: gradients by these rows, float32 [U, D] each.
    """

    value: Tensor
    distinct: list[tuple[Tensor, Tensor]]
    rows: list[Tensor]
    dense: list[Tensor]


def parts_of(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Return the batch in some parts of equal size, in its order; every column of it is [B] or [B, …]."""
    size = batch["_positive"].shape[0] // parts
    return [{name: column[at * size : (at + 1) * size] for name, column in batch.items()} for at in range(parts)]


def mean_gradients(tables: Mapping[str, Table], made: Sequence[Gradients]) -> Gradients:
    """Return the mean over parts, by the distinct rows of them all."""
    if len(made) == 1:
        return made[0]
    distinct, rows = [], []
    for at, table in enumerate(tables.values()):
        ids_U, places_N = backend.unique(ops.concatenate([part.distinct[at][0] for part in made]), table.rows)
        gradients_ND = ops.concatenate([part.rows[at] for part in made])
        total_UD = ops.segment_sum(gradients_ND, places_N, num_segments=ops.shape(ids_U)[0])
        distinct.append((ids_U, backend.gather(table.table, ids_U)))
        rows.append(total_UD / len(made))
    dense = [sum(parts[1:], parts[0]) / len(made) for parts in zip(*(part.dense for part in made), strict=True)]
    value = sum((part.value for part in made[1:]), made[0].value) / len(made)
    return Gradients(value, distinct, rows, dense)
