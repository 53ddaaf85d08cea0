"""Sparse optimizers, which read and write only the rows that a batch touches [DESIGN, Budgets]; penalty and average.

Legend: `U` touched rows, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, keras, ops


class OptimizedTable(Protocol):
    """Define the part of an `EmbeddingTable` that an optimizer needs: its rows, float32 [rows, D]."""

    name: str
    rows: int
    dim: int
    table: keras.Variable


class RowOptimizer(Protocol):
    """Update touched rows of one table; `slots` are the optimizer's state by name, [rows, …] each."""

    slots: dict[str, keras.Variable]

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:
        """Write `rows − update` at distinct row numbers, int32.

        Args:
            ids_U: ids for `backend.gather` and `scatter`; on several devices a pair that compares with numbers.
            rows_UD: the present values of these rows, float32.
            gradients_UD: gradients of the loss with respect to these rows, float32.
            rate, step: learning rate and number (from 1) of this step, float32 scalars.
        """


class Adagrad:
    """Apply Adagrad: `a ← a + g²;  row ← row − η·g / √(a + ε)`, from a = 0.

    With `rowwise`, a row has one accumulator, of the mean of g². Otherwise it has one per number (Duchi et al. 2011),
    as in [BM20 §5] and `keras.optimizers.Adagrad`. A row without a gradient does not change under dense Adagrad either,
    so this is exact. The scale of gradients does not affect the step unless they are near √ε.
    """

    def __init__(self, table: OptimizedTable, *, rowwise: bool, epsilon: float) -> None:
        self.table, self.rowwise, self.epsilon = table, rowwise, epsilon
        width = 1 if rowwise else table.dim
        self.accumulator = backend.rows_variable(table.rows, width, name=f"{table.name}_accumulator")
        self.slots = {"accumulator": self.accumulator}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:  # noqa: ARG002
        """Write `rows − update` at distinct row numbers (see `RowOptimizer.apply`)."""
        squares = ops.square(gradients_UD)
        if self.rowwise:
            squares = ops.mean(squares, axis=1, keepdims=True)
        accumulated = backend.gather(self.accumulator, ids_U) + squares
        backend.scatter(self.accumulator, ids_U, accumulated)
        backend.scatter(self.table.table, ids_U, rows_UD - rate * gradients_UD / ops.sqrt(accumulated + self.epsilon))


class LazyAdam:
    """Apply Adam with moments that change only for touched rows; bias correction uses the global step."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7  # those of `keras.optimizers.Adam`

    def __init__(self, table: OptimizedTable) -> None:
        self.table = table
        self.mean, self.square = (
            backend.rows_variable(table.rows, table.dim, name=f"{table.name}_{slot}") for slot in ("mean", "square")
        )
        self.slots = {"mean": self.mean, "square": self.square}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:
        """Write `rows − update` at distinct row numbers (see `RowOptimizer.apply`)."""
        mean_UD = self.beta_1 * backend.gather(self.mean, ids_U) + (1 - self.beta_1) * gradients_UD
        square_UD = self.beta_2 * backend.gather(self.square, ids_U) + (1 - self.beta_2) * ops.square(gradients_UD)
        backend.scatter(self.mean, ids_U, mean_UD)
        backend.scatter(self.square, ids_U, square_UD)
        correction = ops.sqrt(1 - ops.power(self.beta_2, step)) / (1 - ops.power(self.beta_1, step))
        update_UD = rate * correction * mean_UD / (ops.sqrt(square_UD) + self.epsilon)
        backend.scatter(self.table.table, ids_U, rows_UD - update_UD)


class LazySGD:
    """Apply gradient descent, with row velocities that change only in touched rows.

    `v ← momentum·v − η·g;  row ← row + v`, as `keras.optimizers.SGD` for rows of the batch. Dense momentum would also
    move a row by its velocity in steps that do not touch the row. In both cases a gradient finally moves its row by
    η·g / (1 − momentum), but here over touches instead of steps.
    """

    def __init__(self, table: OptimizedTable, *, momentum: float = 0.0) -> None:
        self.table, self.momentum = table, momentum
        self.velocity, self.slots = None, dict[str, keras.Variable]()
        if momentum:
            self.velocity = backend.rows_variable(table.rows, table.dim, name=f"{table.name}_velocity")
            self.slots = {"velocity": self.velocity}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:  # noqa: ARG002
        """Write `rows − update` at distinct row numbers (see `RowOptimizer.apply`)."""
        update_UD = -rate * gradients_UD
        if self.velocity is not None:
            update_UD = self.momentum * backend.gather(self.velocity, ids_U) + update_UD
            backend.scatter(self.velocity, ids_U, update_UD)
        backend.scatter(self.table.table, ids_U, rows_UD + update_UD)


ROW_OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {
    "adagrad": partial(Adagrad, rowwise=True, epsilon=1e-7),
    "adagrad_elementwise": partial(Adagrad, rowwise=False, epsilon=1e-10),
    "adam": LazyAdam,
    "sgd": LazySGD,
}
"""Optimizers of embedding tables, by their names in a recipe's `[optimizer] embeddings`."""


def dense_optimizer(name: str, rate: Callable[[Tensor], Tensor], *, momentum: float) -> keras.optimizers.Optimizer:
    """Create the Keras optimizer of dense parameters: `adam`, `sgd` or `adagrad` (from a = 0)."""
    if name == "sgd":
        return keras.optimizers.SGD(rate, momentum=momentum)
    if name == "adagrad":
        return keras.optimizers.Adagrad(rate, initial_accumulator_value=0.0, epsilon=1e-10)
    return keras.optimizers.Adam(rate)


class LazyL2:
    """Compute the gradient of l2·‖table‖² for a step that touches only some rows.

    A row that is touched in step t, and before that in step s (0 if never), gets 2·l2·(t − s)·row for all steps since
    s. The expectation is the gradient 2·l2·row of the full objective, for frequent and rare rows alike. Three things
    differ: the row has its value at step t, rows are not penalised after their last touch, and optimizers that divide
    by past gradients see few large gradients. The term is at most row/rate, which moves a row to 0 but not beyond.
    """

    def __init__(self, table: OptimizedTable, l2: float) -> None:
        self.table, self.l2 = table, l2
        self.touched = backend.rows_variable(table.rows, 1, name=f"{table.name}_touched")
        """Step of the last touch, [rows, 1]; exact below 2^24 steps."""

    def gradients(self, ids_U: Tensor, rows_UD: Tensor, *, rate: Tensor, step: Tensor) -> Tensor:
        """Compute the penalty's gradients, float32 [U, D], and mark the rows as touched; 0 past the table's end."""
        gap_U1 = step - backend.gather(self.touched, ids_U)
        # JAX pads ids past the end of the table, where no row may move.
        inside_U1 = ops.cast(ids_U < self.table.rows, "float32")[:, None]
        backend.scatter(self.touched, ids_U, ops.zeros_like(gap_U1) + step)
        # A schedule may end at rate 0.
        due_U1 = ops.minimum(2 * self.l2 * gap_U1, 1 / ops.maximum(rate, 1e-30))
        return inside_U1 * due_U1 * rows_UD


class LazyAverage:
    """Average a table's rows exponentially over steps that touch only some of the rows.

    `m_t = d·m_{t−1} + (1 − d)·row_t` from m = 0, where step 0 has the initial rows; the mean is m_T / (1 − d^(T+1)). A
    row that steps s and t touch had the value row_s in all steps s … t − 1. Hence
    `m_{t−1} = d^(t−s)·m_{s−1} + (1 − d^(t−s))·row_s`, which is exact.
    """

    def __init__(self, table: OptimizedTable, decay: float) -> None:
        self.table, self.decay = table, decay
        self.sum = backend.rows_variable(table.rows, table.dim, name=f"{table.name}_average")
        self.touched = backend.rows_variable(table.rows, 1, name=f"{table.name}_averaged")
        """Step of the last touch, [rows, 1]; exact below 2^24 steps."""

    def touch(self, ids_U: Tensor, rows_UD: Tensor, *, step: Tensor) -> None:
        """Add the present values of rows for all steps before this step, which changes them."""
        weight_U1 = ops.power(self.decay, step - backend.gather(self.touched, ids_U))
        backend.scatter(self.sum, ids_U, weight_U1 * backend.gather(self.sum, ids_U) + (1 - weight_U1) * rows_UD)
        backend.scatter(self.touched, ids_U, ops.zeros_like(weight_U1) + step)

    def mean(self, step: Tensor) -> Tensor:
        """Return the average after a step, float32 [rows, D]; after step 0 it is the table itself."""
        weight_R1 = ops.power(self.decay, step - self.touched.value + 1)
        sum_RD = weight_R1 * self.sum.value + (1 - weight_R1) * self.table.table.value
        average_RD: Tensor = sum_RD / (1 - ops.power(self.decay, step + 1))
        return average_RD


class DenseAverage:
    """Average a weight exponentially over steps: `m ← decay·m + (1 − decay)·weight`, from m = 0."""

    def __init__(self, weight: keras.Variable, decay: float, *, name: str) -> None:
        self.weight, self.decay = weight, decay
        self.sum = keras.Variable("zeros", shape=weight.shape, trainable=False, name=name)

    def touch(self) -> None:
        """Add the present value, before a step changes it."""
        self.sum.assign(self._next())

    def mean(self, step: Tensor) -> Tensor:
        """Return the average after a step, the present value included."""
        # As in Adam: the sum began at 0, so after n values their weights add up to 1 − decay^n.
        return self._next() / (1 - ops.power(self.decay, step + 1))

    def _next(self) -> Tensor:
        next_sum: Tensor = self.decay * self.sum.value + (1 - self.decay) * self.weight.value
        return next_sum


def learning_rate(rate: float, schedule: str, total_steps: int) -> Callable[[Tensor], Tensor]:
    """Create a schedule over steps from 0: `constant`, or `linear` or `cosine` down to 0 at `total_steps`."""
    schedules = keras.optimizers.schedules
    end = rate if schedule == "constant" else 0.0
    rates: Callable[[Tensor], Tensor] = (
        schedules.CosineDecay(rate, max(total_steps, 1))
        if schedule == "cosine"
        else schedules.PolynomialDecay(rate, max(total_steps, 1), end)
    )
    return rates
