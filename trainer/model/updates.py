"""The update of a step: penalties, optimizers of tables and of dense weights, learning rates, averages.

Legend: `U` distinct rows of a table, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import keras

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config import OptimizerConfig
from longtail.trainer.model.embedding import EmbeddingTable
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.optimizers import (
    ROW_OPTIMIZERS,
    DenseAverage,
    LazyAverage,
    LazyL2,
    RowOptimizer,
    dense_optimizer,
    learning_rate,
)


class Gradients(NamedTuple):
    """Hold loss and gradients of a batch, or of a part of one.

    Attributes:
        distinct: distinct ids that were read from every table, int32 [U], and their rows, float32 [U, D].
        rows: gradients of these rows, float32 [U, D] each.
    """

    value: Tensor
    distinct: list[tuple[Tensor, Tensor]]
    rows: list[Tensor]
    dense: list[Tensor]


def cut_batch(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Cut a batch into parts of equal size, in its order; every column is [B] or [B, …]."""
    if parts == 1:
        return [batch]
    size = batch["_positive"].shape[0] // parts
    return [{name: column[i * size : (i + 1) * size] for name, column in batch.items()} for i in range(parts)]


def mean_gradients(tables: Mapping[str, EmbeddingTable], parts: Sequence[Gradients]) -> Gradients:
    """Average gradients over parts, over the distinct rows of all parts."""
    distinct, rows = [], []
    for i, table in enumerate(tables.values()):
        # Needed for one part too: on several devices this sends gradients to the rows' owners.
        ids_U, rows_UD, total_UD = backend.sums(
            table.table, [part.distinct[i] for part in parts], [part.rows[i] for part in parts]
        )
        distinct.append((ids_U, rows_UD))
        rows.append(total_UD / len(parts))
    if len(parts) == 1:
        return parts[0]._replace(distinct=distinct, rows=rows)
    dense = [sum(terms[1:], terms[0]) / len(parts) for terms in zip(*(part.dense for part in parts), strict=True)]
    value = sum((part.value for part in parts[1:]), parts[0].value) / len(parts)
    return Gradients(value, distinct, rows, dense)


class Updates:
    """Hold the optimizers of one job and their state.

    Attributes:
        steps_done: number of steps of this run, int32 scalar, for schedules.
    """

    def __init__(self, model: TwoTower, config: OptimizerConfig, *, total_steps: int) -> None:
        self._model, self.config = model, config
        self.steps_done = keras.Variable(0, dtype="int32", trainable=False, name="step_count")
        self._row_rate, dense_rate = (
            learning_rate(rate, config.schedule, total_steps)
            for rate in (config.embedding_learning_rate, config.dense_learning_rate)
        )
        tables = model.tables
        arguments = {}
        if config.embeddings == "sgd":
            arguments["momentum"] = config.momentum if config.embedding_momentum is None else config.embedding_momentum
        self.rows: dict[str, RowOptimizer] = {
            name: ROW_OPTIMIZERS[config.embeddings](table, **arguments) for name, table in tables.items()
        }
        self.l2 = {name: LazyL2(table, config.l2) for name, table in tables.items()} if config.l2 else {}
        self._dense = model.dense_variables
        if self._dense:
            self.dense = dense_optimizer(config.dense, dense_rate, momentum=config.momentum)
            self.dense.build(self._dense)
        self.averages: dict[str, LazyAverage] = {}
        self._dense_averages: list[DenseAverage] = []
        if decay := config.average:
            self.averages = {name: LazyAverage(table, decay) for name, table in tables.items()}
            self._dense_averages = [
                DenseAverage(variable, decay, name=f"dense_average_{i}") for i, variable in enumerate(self._dense)
            ]
        self.variables: list[keras.Variable] = [
            self.steps_done,
            *(slot for optimizer in self.rows.values() for slot in optimizer.slots.values()),
            *(self.dense.variables if self._dense else []),
            *(penalty.touched for penalty in self.l2.values()),
            *(variable for average in self.averages.values() for variable in (average.sum, average.touched)),
            *(average.sum for average in self._dense_averages),
        ]
        """The variables of a checkpoint that are not in the model, in a fixed order."""

    def apply(self, gradients: Gradients) -> None:
        """Add the penalty to the gradients, and update tables and dense weights."""
        rate = self._row_rate(self.steps_done.value)
        self.steps_done.assign(self.steps_done.value + 1)
        step = ops.cast(self.steps_done.value, "float32")
        distinct, row_gradients, dense_gradients = gradients.distinct, gradients.rows, gradients.dense
        if self.averages:
            # Averages take in the present weights before the update changes them.
            for average, (ids_U, rows_UD) in zip(self.averages.values(), distinct, strict=True):
                average.touch(ids_U, rows_UD, step=step)
            for dense_average in self._dense_averages:
                dense_average.touch()
        if self.l2:
            row_gradients = [
                gradient + penalty.gradients(ids_U, rows_UD, rate=rate, step=step)
                for penalty, (ids_U, rows_UD), gradient in zip(self.l2.values(), distinct, row_gradients, strict=True)
            ]
            dense_gradients = [
                # A penalty on log T would pull T towards 1.
                gradient if variable is self._model.log_temperature else gradient + 2 * self.config.l2 * variable.value
                for gradient, variable in zip(dense_gradients, self._dense, strict=True)
            ]
        for optimizer, (ids_U, rows_UD), gradients_UD in zip(self.rows.values(), distinct, row_gradients, strict=True):
            optimizer.apply(ids_U, rows_UD, gradients_UD, rate=rate, step=step)
        if self._dense:
            self.dense.apply(dense_gradients, self._dense)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Give the model the moving averages of its weights inside the block, with `optimizer.average`."""
        values = [ops.copy(weight.value) for weight, _ in self._averages()]
        try:
            self.take_averages()
            yield
        finally:
            for (weight, _), value in zip(self._averages(), values, strict=True):
                weight.assign(value)

    def take_averages(self) -> None:
        """Replace the weights by their moving averages, with `optimizer.average`; training then ends."""
        step = ops.cast(self.steps_done.value, "float32")
        # All means are computed first, because they read the weights that `assign` replaces.
        for weight, mean in [(weight, average.mean(step)) for weight, average in self._averages()]:
            weight.assign(mean)

    def _averages(self) -> list[tuple[keras.Variable, LazyAverage | DenseAverage]]:
        """List the averaged weights with their averages."""
        tables = [(average.table.table, average) for average in self.averages.values()]
        return [*tables, *((average.weight, average) for average in self._dense_averages)]
