"""Sparse optimisers, which read and write only the rows a batch touched [DESIGN, Budgets]; rates and clipping.

Legend: `U` touched rows, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, keras, ops


class Table(Protocol):
    """What an optimiser needs of an embedding table; `model.embedding.Table` is one."""

    name: str
    rows: int
    dim: int
    table: keras.Variable
    """The rows, float32 [rows, D]."""


class RowOptimizer(Protocol):
    """Updates touched rows of one table."""

    @property
    def variables(self) -> list[keras.Variable]:
        """Slots, for checkpoints."""

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:
        """Write `rows − update` at `ids`.

        Args:
            ids_U: distinct row numbers, int32.
            rows_UD: what the table holds there, float32.
            gradients_UD: gradients of the loss by those rows, float32.
            rate: learning rate of this step, float32 scalar.
            step: number of this step, from 1, float32 scalar.
        """


class RowwiseAdagrad:
    """Adagrad with one accumulator per row, the mean of its squared gradients.

    `a ← a + mean_d g²;  row ← row − η·g / √(a + ε)`. One float of state per row.
    """

    def __init__(self, table: Table, *, epsilon: float = 1e-7) -> None:
        self.table, self.epsilon = table, epsilon
        self.accumulator = keras.Variable(
            "zeros", shape=(table.rows, 1), dtype="float32", trainable=False, name=f"{table.name}_accumulator"
        )

    @property
    def variables(self) -> list[keras.Variable]:
        """The accumulator, [rows, 1]."""
        return [self.accumulator]

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:  # noqa: ARG002
        """As `RowOptimizer.apply`."""
        grown_U1 = backend.gather(self.accumulator, ids_U) + ops.mean(ops.square(gradients_UD), axis=1, keepdims=True)
        backend.scatter(self.accumulator, ids_U, grown_U1)
        backend.scatter(self.table.table, ids_U, rows_UD - rate * gradients_UD / ops.sqrt(grown_U1 + self.epsilon))


class LazyAdam:
    """Adam whose moments move only for touched rows; bias correction follows the global step."""

    def __init__(
        self,
        table: Table,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        self.table = table
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        shape = (table.rows, table.dim)
        self.mean = keras.Variable("zeros", shape=shape, dtype="float32", trainable=False, name=f"{table.name}_mean")
        self.square = keras.Variable(
            "zeros", shape=shape, dtype="float32", trainable=False, name=f"{table.name}_square"
        )

    @property
    def variables(self) -> list[keras.Variable]:
        """First and second moments, both [rows, D]."""
        return [self.mean, self.square]

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:
        """As `RowOptimizer.apply`."""
        mean_UD = self.beta_1 * backend.gather(self.mean, ids_U) + (1 - self.beta_1) * gradients_UD
        square_UD = self.beta_2 * backend.gather(self.square, ids_U) + (1 - self.beta_2) * ops.square(gradients_UD)
        backend.scatter(self.mean, ids_U, mean_UD)
        backend.scatter(self.square, ids_U, square_UD)
        correction = ops.sqrt(1 - ops.power(self.beta_2, step)) / (1 - ops.power(self.beta_1, step))
        update_UD = rate * correction * mean_UD / (ops.sqrt(square_UD) + self.epsilon)
        backend.scatter(self.table.table, ids_U, rows_UD - update_UD)


ROW_OPTIMIZERS: dict[str, type[RowwiseAdagrad] | type[LazyAdam]] = {"adagrad": RowwiseAdagrad, "adam": LazyAdam}
"""Optimisers of embedding tables by the name that a recipe's `[optimizer] embeddings` calls them."""


def learning_rate(rate: float, schedule: str, total_steps: int) -> Callable[[Tensor], Tensor]:
    """The rate of a step by its number from 0: `constant`, or `linear` to 0 at `total_steps`."""
    end = rate if schedule == "constant" else 0.0
    decay: Callable[[Tensor], Tensor] = keras.optimizers.schedules.PolynomialDecay(rate, total_steps, end)
    return decay


def clip_scale(gradients: list[Tensor], limit: float) -> Tensor:
    """Factor, at most 1, that brings the norm of all gradients together down to `limit`; float32 scalar."""
    norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
    return ops.minimum(1.0, limit / ops.maximum(norm, 1e-12))
