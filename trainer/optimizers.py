"""Sparse optimisers, which read and write only the rows a batch touched [DESIGN, Budgets]; penalty, average, rates.

Legend: `U` touched rows, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, keras, ops


class Table(Protocol):
    """What an optimiser needs of an embedding table, as `model.embedding.Table`: its rows, float32 [rows, D]."""

    name: str
    rows: int
    dim: int
    table: keras.Variable


class RowOptimizer(Protocol):
    """Updates touched rows of one table; `slots` are its state by name, [rows, …] each."""

    slots: dict[str, keras.Variable]

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:
        """Write `rows − update` at distinct row numbers, int32.

        Args:
            ids_U: what `backend.gather` and `scatter` take; on several devices no tensor, which compares with numbers.
            rows_UD: what the table holds there, float32.
            gradients_UD: gradients of the loss by those rows, float32.
            rate, step: learning rate and number, from 1, of this step, float32 scalars.
        """


class RowwiseAdagrad:
    """Adagrad with one accumulator per row, the mean of its squared gradients.

    `a ← a + mean_d g²;  row ← row − η·g / √(a + ε)`. One float of state per row.
    """

    def __init__(self, table: Table, *, epsilon: float = 1e-7) -> None:
        self.table, self.epsilon = table, epsilon
        self.accumulator = backend.rows_variable(table.rows, 1, name=f"{table.name}_accumulator")
        self.slots = {"accumulator": self.accumulator}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:  # noqa: ARG002
        """As `RowOptimizer.apply`."""
        grown_U1 = backend.gather(self.accumulator, ids_U) + ops.mean(ops.square(gradients_UD), axis=1, keepdims=True)
        backend.scatter(self.accumulator, ids_U, grown_U1)
        backend.scatter(self.table.table, ids_U, rows_UD - rate * gradients_UD / ops.sqrt(grown_U1 + self.epsilon))


class LazyAdam:
    """Adam whose moments move only for touched rows; bias correction follows the global step."""

    def __init__(self, table: Table, *, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> None:
        self.table = table
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.mean, self.square = _slot(table, "mean"), _slot(table, "square")
        self.slots = {"mean": self.mean, "square": self.square}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:
        """As `RowOptimizer.apply`."""
        mean_UD = self.beta_1 * backend.gather(self.mean, ids_U) + (1 - self.beta_1) * gradients_UD
        square_UD = self.beta_2 * backend.gather(self.square, ids_U) + (1 - self.beta_2) * ops.square(gradients_UD)
        backend.scatter(self.mean, ids_U, mean_UD)
        backend.scatter(self.square, ids_U, square_UD)
        correction = ops.sqrt(1 - ops.power(self.beta_2, step)) / (1 - ops.power(self.beta_1, step))
        update_UD = rate * correction * mean_UD / (ops.sqrt(square_UD) + self.epsilon)
        backend.scatter(self.table.table, ids_U, rows_UD - update_UD)


class ElementwiseAdagrad:
    """Adagrad with an accumulator for every number of a row (Duchi et al. 2011), as [BM20 §5] trains.

    `a ← a + g²;  row ← row − η·g / √(a + ε)`, Keras' Adagrad from a = 0. A row without a gradient stays as it is under
    dense Adagrad too, so nothing is approximated. As a starts at 0, a gradient's scale has no effect on the
    step until it is near √ε: the mean over a batch trains as its sum does.
    """

    def __init__(self, table: Table, *, epsilon: float = 1e-10) -> None:
        self.table, self.epsilon = table, epsilon
        self.accumulator = _slot(table, "accumulator")
        self.slots = {"accumulator": self.accumulator}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:  # noqa: ARG002
        """As `RowOptimizer.apply`."""
        grown_UD = backend.gather(self.accumulator, ids_U) + ops.square(gradients_UD)
        backend.scatter(self.accumulator, ids_U, grown_UD)
        backend.scatter(self.table.table, ids_U, rows_UD - rate * gradients_UD / ops.sqrt(grown_UD + self.epsilon))


class LazySGD:
    """Gradient descent; with momentum a velocity per row, which moves only when the row is touched.

    `v ← momentum·v − η·g;  row ← row + v`, Keras' SGD for the rows of the batch. Dense momentum would also, in every
    step that does not touch a row, move it by its velocity and shrink that by `momentum`. Here the velocity waits,
    and its rest goes into the next steps that touch the row: a gradient moves its row by η·g / (1 − momentum) in the
    end either way, but over as many touches, not steps. Without momentum there is no state and no difference.
    """

    def __init__(self, table: Table, *, momentum: float = 0.0) -> None:
        self.table, self.momentum = table, momentum
        self.velocity = _slot(table, "velocity") if momentum else None
        self.slots = {} if self.velocity is None else {"velocity": self.velocity}

    def apply(self, ids_U: Tensor, rows_UD: Tensor, gradients_UD: Tensor, *, rate: Tensor, step: Tensor) -> None:  # noqa: ARG002
        """As `RowOptimizer.apply`."""
        update_UD = -rate * gradients_UD
        if self.velocity is not None:
            update_UD = self.momentum * backend.gather(self.velocity, ids_U) + update_UD
            backend.scatter(self.velocity, ids_U, update_UD)
        backend.scatter(self.table.table, ids_U, rows_UD + update_UD)


def _slot(table: Table, kind: str) -> keras.Variable:
    return backend.rows_variable(table.rows, table.dim, name=f"{table.name}_{kind}")


ROW_OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {
    "adagrad": RowwiseAdagrad,
    "adagrad_elementwise": ElementwiseAdagrad,
    "adam": LazyAdam,
    "sgd": LazySGD,
}
"""Optimisers of embedding tables by the name that a recipe's `[optimizer] embeddings` calls them."""


def dense_optimizer(name: str, rate: Callable[[Tensor], Tensor], *, momentum: float) -> keras.optimizers.Optimizer:
    """Create Keras' optimiser of everything that is no embedding table: `adam`, `sgd` or `adagrad` (from a = 0)."""
    if name == "sgd":
        return keras.optimizers.SGD(rate, momentum=momentum)
    if name == "adagrad":
        return keras.optimizers.Adagrad(rate, initial_accumulator_value=0.0, epsilon=1e-10)
    return keras.optimizers.Adam(rate)


class LazyL2:
    """Gradient of l2·‖table‖² for a step that touches only some rows.

    A row that is touched in step t and was last touched in step s (0 if never) gets 2·l2·(t − s)·row, its due for all
    steps since. The factors of a row sum to the number of steps until its last touch, so by the step they are 1 on
    average: the expectation is the gradient 2·l2·row of the full objective, whatever chance a row has to be drawn.
    With every row touched in every step it is that gradient itself. What differs: the row is taken as it is at t,
    rows are not penalised after their last touch, and optimisers that divide by past gradients see few large ones.

    The due is at most row/rate, by which gradient descent brings a row to 0 and not past it, however long it waited.
    """

    def __init__(self, table: Table, l2: float) -> None:
        self.table, self.l2 = table, l2
        self.touched = backend.rows_variable(table.rows, 1, name=f"{table.name}_touched")
        """Step of the last touch, [rows, 1]; exact below 2^24 steps."""

    def gradients(self, ids_U: Tensor, rows_UD: Tensor, *, rate: Tensor, step: Tensor) -> Tensor:
        """Compute what to add to the gradients, float32 [U, D], and touch the rows; 0 past the table's end."""
        gap_U1 = step - backend.gather(self.touched, ids_U)
        inside_U1 = ops.cast(ids_U < self.table.rows, "float32")[:, None]
        backend.scatter(self.touched, ids_U, ops.zeros_like(gap_U1) + step)
        due_U1 = ops.minimum(2 * self.l2 * gap_U1, 1 / ops.maximum(rate, 1e-30))
        return inside_U1 * due_U1 * rows_UD


class LazyAverage:
    """Exponential moving average of a table's rows over steps that touch only some of them.

    `m_t = d·m_{t−1} + (1 − d)·row_t` over all steps, the initial rows being step 0, from m = 0; the mean is
    m_T / (1 − d^(T+1)). A row that is touched in step t and was last touched in step s was row_s in all of s … t − 1,
    so that `m_{t−1} = d^(t−s)·m_{s−1} + (1 − d^(t−s))·row_s`: nothing is approximated.
    """

    def __init__(self, table: Table, decay: float) -> None:
        self.table, self.decay = table, decay
        self.sum = _slot(table, "average")
        self.touched = backend.rows_variable(table.rows, 1, name=f"{table.name}_averaged")
        """Step of the last touch, [rows, 1]; exact below 2^24 steps."""

    def touch(self, ids_U: Tensor, rows_UD: Tensor, *, step: Tensor) -> None:
        """Count rows for all steps before this one, which changes them; arguments as `RowOptimizer.apply`."""
        weight_U1 = ops.power(self.decay, step - backend.gather(self.touched, ids_U))
        backend.scatter(self.sum, ids_U, weight_U1 * backend.gather(self.sum, ids_U) + (1 - weight_U1) * rows_UD)
        backend.scatter(self.touched, ids_U, ops.zeros_like(weight_U1) + step)

    def mean(self, step: Tensor) -> Tensor:
        """Return the average after a step, float32 [rows, D]; step 0 has the table itself."""
        weight_R1 = ops.power(self.decay, step - self.touched.value + 1)
        sum_RD = weight_R1 * self.sum.value + (1 - weight_R1) * self.table.table.value
        mean_RD: Tensor = sum_RD / (1 - ops.power(self.decay, step + 1))
        return mean_RD


def learning_rate(rate: float, schedule: str, total_steps: int) -> Callable[[Tensor], Tensor]:
    """Return the rate of a step by its number from 0: `constant`, or `linear` or `cosine` to 0 at `total_steps`."""
    schedules = keras.optimizers.schedules
    made: Callable[[Tensor], Tensor] = (
        schedules.CosineDecay(rate, max(total_steps, 1))
        if schedule == "cosine"
        else schedules.PolynomialDecay(rate, max(total_steps, 1), rate if schedule == "constant" else 0.0)
    )
    return made
