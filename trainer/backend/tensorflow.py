"""TensorFlow: tables are resource variables, gathered and scattered in place; a step costs what it touches.

No function is converted by AutoGraph: our own have no control flow on tensors, and AutoGraph writes a Python file
for every function it rewrites to the temporary folder, where a killed process leaves it.

Legend: `N` ids, `U` distinct ids, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from longtail.bundle.arrays import Array
from longtail.trainer.backend.tensors import Step, Tensor

_Beside = TypeVar("_Beside")


def gather(table: keras.Variable, ids: Tensor) -> Tensor:
    """Rows of a variable without reading the rest of it, shape [*ids.shape, D]."""
    rows: Tensor = tf.gather(table.value, ids)
    return rows


def scatter(table: keras.Variable, ids_U: Tensor, rows_UD: Tensor) -> None:
    """Replace rows of a variable in place."""
    table.value.scatter_update(tf.IndexedSlices(rows_UD, ids_U))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks of them, in order and in place."""
    start = 0
    for rows_ND in blocks:
        scatter(table, tf.range(start, start + len(rows_ND)), rows_ND)
        start += len(rows_ND)


def unique(ids_N: Tensor, limit: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 (JAX needs the limit)
    """Distinct ids, [U], and the position of every id among them, [N]."""
    distinct = tf.unique(ids_N)
    return distinct.y, distinct.idx


def count(positions_N: Tensor, distinct_U: Tensor) -> Tensor:
    """How often every distinct id came, float32 [U]."""
    counts_U: Tensor = tf.math.unsorted_segment_sum(
        tf.ones(tf.shape(positions_N)), positions_N, tf.shape(distinct_U)[0]
    )
    return counts_U


def value_and_gradients(
    loss: Callable[[list[Tensor]], tuple[Tensor, _Beside]], rows: list[Tensor], variables: Sequence[keras.Variable]
) -> tuple[tuple[Tensor, _Beside], list[Tensor], list[Tensor]]:
    """The loss and what it returns beside it; its gradients with respect to `rows`, and to dense variables.

    Args:
        loss: of the rows to a scalar, and whatever else is wanted of it.
        rows: distinct rows of every table, float32 [U, D] each.
        variables: dense variables that the loss reads.
    """
    with tf.GradientTape() as tape:
        tape.watch(rows)
        value, auxiliary = loss(rows)
    gradients = tape.gradient(value, (rows, [variable.value for variable in variables]), unconnected_gradients="zero")
    of_rows, of_variables = ([tf.convert_to_tensor(gradient) for gradient in part] for part in gradients)
    return (value, auxiliary), of_rows, of_variables


def compile_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a pure function of fixed shapes with XLA: one kernel instead of a pass over memory per operation."""
    compiled: Callable[..., Any] = tf.function(function, jit_compile=True, autograph=False)
    return compiled


def compile_step(step: Step, variables: Sequence[keras.Variable]) -> Step:  # noqa: ARG001 (updated in place)
    """Compile a step that assigns to variables."""
    compiled: Step = tf.function(step, reduce_retracing=True, autograph=False)
    return compiled


def compile_tower(tower: keras.Model) -> Callable[[Mapping[str, Any]], Tensor]:
    """Nothing to do: operations of TensorFlow need no compiling."""
    return tower  # type: ignore[no-any-return]


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; whatever TensorFlow traces inside its calls, AutoGraph leaves as it is."""
    unconverted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def make_deterministic() -> None:
    """Let every operation give the same bits in every run."""
    tf.config.experimental.enable_op_determinism()
