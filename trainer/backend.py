"""The few operations for which Keras has no backend-neutral form: sparse table access and compiled steps.

On TensorFlow, tables are resource variables that are gathered and scattered in place, so a step's
cost does not grow with the table. On JAX, a step is a pure function of all variables, compiled with
donated buffers, which XLA updates in place.

Legend: `N` ids, `U` distinct ids, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensor = Any
"""A backend tensor; shapes are in the names."""
Step = Callable[[dict[str, Any]], Any]

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def gather(table: keras.Variable, ids: Tensor) -> Tensor:
        """Rows of a variable without reading the rest of it, shape [*ids.shape, D]."""
        return tf.gather(table.value, ids)

    def scatter(table: keras.Variable, ids_U: Tensor, rows_UD: Tensor) -> None:
        """Replace rows of a variable in place."""
        table.value.scatter_update(tf.IndexedSlices(rows_UD, ids_U))

    def unique(ids_N: Tensor, limit: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 (JAX needs the limit)
        """Distinct ids, [U], and the position of every id among them, [N]."""
        distinct = tf.unique(ids_N)
        return distinct.y, distinct.idx

    def count(positions_N: Tensor, distinct_U: Tensor) -> Tensor:
        """How often every distinct id came, float32 [U]."""
        ones_N = tf.ones(tf.shape(positions_N))
        return tf.math.unsorted_segment_sum(ones_N, positions_N, tf.shape(distinct_U)[0])

    def value_and_gradients(
        loss: Callable[[list[Tensor]], tuple[Tensor, Tensor]], rows: list[Tensor], variables: Sequence[keras.Variable]
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor], list[Tensor]]:
        """The loss and what comes beside it; its gradients with respect to `rows`, and to dense variables."""
        with tf.GradientTape() as tape:
            tape.watch(rows)
            value, beside = loss(rows)
        gradients = tape.gradient(
            value, (rows, [variable.value for variable in variables]), unconnected_gradients="zero"
        )
        return (value, beside), [tf.convert_to_tensor(gradient) for gradient in gradients[0]], gradients[1]

    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a pure function of fixed shapes with XLA: one kernel instead of a pass over memory per operation."""
        fused: Callable[..., Any] = tf.function(function, jit_compile=True)
        return fused

    def make_deterministic() -> None:
        """Let every operation give the same bits in every run."""
        tf.config.experimental.enable_op_determinism()

    def compile_step(step: Step, variables: Sequence[keras.Variable]) -> Step:  # noqa: ARG001 (updated in place)
        """Compile a step that assigns to variables."""
        compiled: Step = tf.function(step, reduce_retracing=True)
        return compiled

elif keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp

    def gather(table: keras.Variable, ids: Tensor) -> Tensor:
        """Rows of a variable, shape [*ids.shape, D]."""
        return jnp.take(table.value, ids, axis=0, mode="clip")

    def scatter(table: keras.Variable, ids_U: Tensor, rows_UD: Tensor) -> None:
        """Replace rows of a variable; ids past its end are dropped."""
        table.assign(table.value.at[ids_U].set(rows_UD, mode="drop"))

    def unique(ids_N: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Distinct ids padded to a fixed length with `limit`, an id past every table's end; positions, [N]."""
        distinct, positions = jnp.unique(ids_N, return_inverse=True, size=min(ids_N.shape[0], limit), fill_value=limit)
        return distinct, positions.reshape(ids_N.shape)

    def count(positions_N: Tensor, distinct_U: Tensor) -> Tensor:
        """How often every distinct id came, float32 [U]."""
        return jnp.zeros(distinct_U.shape).at[positions_N].add(1.0)

    def value_and_gradients(
        loss: Callable[[list[Tensor]], tuple[Tensor, Tensor]], rows: list[Tensor], variables: Sequence[keras.Variable]
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor], list[Tensor]]:
        """The loss and what comes beside it; its gradients with respect to `rows`, and to dense variables."""

        def pure(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return loss(rows)

        values = [variable.value for variable in variables]
        value, (row_gradients, gradients) = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(rows, values)
        return value, row_gradients, gradients

    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing to do: the whole step is compiled with XLA."""
        return function

    def make_deterministic() -> None:
        """Nothing to do: XLA's CPU programs are; on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true."""

    def compile_step(step: Step, variables: Sequence[keras.Variable]) -> Step:
        """Compile a step that assigns to variables."""

        def pure(values: list[Tensor], batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
                result = step(batch)
            return result, [scope.get_current_value(variable) for variable in variables]

        compiled = jax.jit(pure, donate_argnums=0)

        def run(batch: dict[str, Any]) -> Any:
            result, values = compiled([variable.value for variable in variables], batch)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            return result

        return run

else:
    raise ImportError(f"Keras backend: expected tensorflow or jax, found {keras.backend.backend()}")
