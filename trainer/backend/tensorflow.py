"""The backend on TensorFlow: tables are resource variables, which a step gathers and scatters in place.

AutoGraph converts no function: ours have no control flow on tensors, and AutoGraph writes a Python file for every
function to the temporary folder, where a killed process leaves it.

Legend: `N` ids, `U` distinct ids, `D` dimensions, `B` bags, `P` positions of a bag, `n` entries of all bags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from longtail.bundle.arrays import Array
from longtail.trainer.backend.tensors import BlockLoss, Step, Tensor, Tensors

_Auxiliary = TypeVar("_Auxiliary")

__all__ = [
    "bag_sums", "compile_loss", "compile_step", "compile_tower", "count", "distinct", "fill", "gather",
    "make_deterministic", "on_cpu", "rows_variable", "scatter", "sum_of_blocks", "sums", "take", "unique",
    "value_and_gradients",
]  # fmt: skip


def rows_variable(rows: int, width: int, *, name: str, initializer: Any = "zeros") -> keras.Variable:
    """Create a variable that is read and written by rows, float32 [rows, width]; its attribute `rows` counts them."""
    variable = keras.Variable(initializer, shape=(rows, width), dtype="float32", trainable=False, name=name)
    variable.rows = rows
    return variable


def gather(table: keras.Variable, ids: Tensor) -> Tensor:
    """Return rows of a variable without reading its other rows, shape [*ids.shape, D]."""
    rows: Tensor = tf.gather(table.value, ids)
    return rows


def scatter(table: keras.Variable, ids_U: Tensor, rows_UD: Tensor) -> None:
    """Replace rows of a variable in place."""
    table.value.scatter_update(tf.IndexedSlices(rows_UD, ids_U))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks, [N, D] each, in order and in place."""
    start = 0
    for rows_ND in blocks:
        scatter(table, tf.range(start, start + len(rows_ND)), rows_ND)
        start += len(rows_ND)


def unique(ids_N: Tensor, limit: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 (JAX needs the limit)
    """Return distinct ids, [U], and the position of every id among them, [N]."""
    distinct = tf.unique(ids_N)
    return distinct.y, distinct.idx


def distinct(ids: Sequence[Tensor], limit: int, *, shared: bool = False) -> tuple[Tensor, list[Tensor]]:  # noqa: ARG001
    """Return the distinct ids of tensors, [U], and positions in them, in each tensor's shape.

    Args:
        shared: all devices get the ids of the whole batch; otherwise each device gets those of its part.
    """
    ids_U, positions_N = tf.unique(tf.concat([tf.reshape(tensor, (-1,)) for tensor in ids], axis=0))
    positions = tf.split(positions_N, [tf.size(tensor) for tensor in ids])
    return ids_U, [tf.reshape(flat, tf.shape(tensor)) for flat, tensor in zip(positions, ids, strict=True)]


def take(rows_UD: Tensor, positions: Tensor, *, shared: bool = False) -> Tensor:  # noqa: ARG001
    """Return rows by positions among the ids of `distinct`, shape [*positions.shape, D]."""
    rows: Tensor = keras.ops.take(rows_UD, positions, axis=0)
    return rows


def bag_sums(rows_UD: Tensor, positions_BP: Tensor, weights_BP: Tensor, *, shared: bool = False) -> Tensor:
    """Sum the rows of every bag by constant weights, float32 [B, D]; positions are those of `distinct`.

    On a CPU, a sparse matrix of weights [B, U] costs what its entries cost. B must be at least 1, because TensorFlow's
    product without rows ends the process.
    """
    if not on_cpu():
        gathered_BPD = take(rows_UD, positions_BP, shared=shared)
        sums_BD: Tensor = keras.ops.einsum("bpd,bp->bd", gathered_BPD, weights_BP)
        return sums_BD
    entries_n2 = tf.where(tf.not_equal(weights_BP, 0))
    columns_n = tf.cast(tf.gather_nd(positions_BP, entries_n2), tf.int64)
    size = tf.cast([tf.shape(positions_BP)[0], tf.shape(rows_UD)[0]], tf.int64)
    weights_BU = tf.raw_ops.SparseTensorToCSRSparseMatrix(
        indices=tf.stack([entries_n2[:, 0], columns_n], axis=1),
        values=tf.gather_nd(weights_BP, entries_n2),
        dense_shape=size,
    )

    def product(rows_UD: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        def backward(upstream_BD: Tensor) -> Tensor:
            # Transposed by an operation of its own: `transpose_a` would sum in the order in which threads end.
            weights_UB = tf.raw_ops.SparseMatrixTranspose(input=weights_BU, type=tf.float32)
            gradients_UD: Tensor = tf.raw_ops.SparseMatrixMatMul(a=weights_UB, b=upstream_BD)
            return gradients_UD

        return tf.raw_ops.SparseMatrixMatMul(a=weights_BU, b=rows_UD), backward

    products_BD: Tensor = tf.custom_gradient(product)(rows_UD)
    return products_BD


def sums(
    table: keras.Variable, parts: Sequence[tuple[Tensor, Tensor]], gradients: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum gradients by distinct id: ids, [U], their rows, and sums, [U, D].

    Args:
        parts: distinct ids of each part, [U], and their rows, float32 [U, D].
        gradients: float32 [U, D] of each part.
    """
    ids_U, positions_N = unique(tf.concat([ids for ids, _ in parts], axis=0), table.rows)
    sums_UD = tf.math.unsorted_segment_sum(tf.concat(gradients, axis=0), positions_N, tf.shape(ids_U)[0])
    return ids_U, gather(table, ids_U), sums_UD


def count(positions_N: Tensor, distinct_U: Tensor) -> Tensor:
    """Count the occurrences of every distinct id, float32 [U]."""
    counts_U: Tensor = tf.math.unsorted_segment_sum(
        tf.ones(tf.shape(positions_N)), positions_N, tf.shape(distinct_U)[0]
    )
    return counts_U


def value_and_gradients(
    loss: Callable[[list[Tensor]], tuple[Tensor, _Auxiliary]], rows: list[Tensor], variables: Sequence[keras.Variable]
) -> tuple[tuple[Tensor, _Auxiliary], list[Tensor], list[Tensor]]:
    """Compute a loss, its auxiliary output, and gradients by `rows`, float32 [U, D], and variables."""
    with tf.GradientTape() as tape:
        tape.watch(rows)
        value, auxiliary = loss(rows)
    # A table that no feature of the batch reads would get None for a gradient.
    gradients = tape.gradient(value, (rows, [variable.value for variable in variables]), unconnected_gradients="zero")
    # Gradients of gathered rows come as indexed slices, which an update cannot add.
    by_row, by_variable = ([tf.convert_to_tensor(gradient) for gradient in part] for part in gradients)
    return (value, auxiliary), by_row, by_variable


def sum_of_blocks(
    loss: BlockLoss, shared: Tensors, rows: Tensors, fixed: Any, fixed_shared: Any, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """Sum a loss over blocks of rows, differentiated block by block; concatenate the rows' state.

    Args:
        loss: function of `shared`, and of a block of `rows` and `fixed`, and of `fixed_shared`, to losses and state of
            the block's rows.
        shared: float tensors that every block reads whole.
        rows: float tensors with one row per row of the batch.
        fixed: further tensors of the rows without gradient, in dicts of any depth.
        fixed_shared: further tensors without gradient that every block reads whole.
    """
    row_count = next(iter(rows.values())).shape[0]
    height = -(-row_count // blocks)
    real = tf.reshape(tf.range(height * blocks) < row_count, (blocks, height))

    def cut(column: Tensor) -> Tensor:
        if height * blocks != row_count:  # fill the last block with repeats of the last row
            column = tf.gather(column, tf.minimum(tf.range(height * blocks), row_count - 1))
        stacked: Tensor = tf.reshape(column, (blocks, height, *column.shape[1:]))
        return stacked

    fixed_blocks = keras.tree.map_structure(cut, fixed)

    def total(*values: Tensor) -> tuple[tuple[Tensor, Tensors], Callable[..., list[Tensor]]]:
        inputs = dict(zip((*shared, *rows), values, strict=True))
        # XLA multiplies the gradient of a matrix [M, D] three times as fast if the gradient is [D, M].
        turned = {name: tf.transpose(inputs[name]) for name in shared}
        row_blocks = {name: cut(inputs[name]) for name in rows}

        def run_block(i: Tensor) -> tuple[list[Tensor], list[Tensor], Tensors]:
            block = {name: column[i] for name, column in row_blocks.items()}
            with tf.GradientTape() as tape:
                tape.watch([turned, block])
                fixed_block = keras.tree.map_structure(lambda column: column[i], fixed_blocks)
                original = {name: tf.transpose(tensor) for name, tensor in turned.items()}
                losses, state = loss(original, block, fixed_block, fixed_shared)
                value = tf.reduce_sum(tf.where(real[i], losses, 0.0))
            by_shared, by_row = tape.gradient(value, (turned, block), unconnected_gradients="zero")
            sums = [value, *(tf.convert_to_tensor(by_shared[name]) for name in turned)]
            return sums, [tf.convert_to_tensor(by_row[name]) for name in block], state

        def add(i: Tensor, sums: list[Tensor], arrays: list[Any]) -> tuple[Tensor, list[Tensor], list[Any]]:
            more, columns, state = run_block(i)
            columns = [*columns, *state.values()]
            arrays = [array.write(i, column) for array, column in zip(arrays, columns, strict=True)]
            return i + 1, [total + term for total, term in zip(sums, more, strict=True)], arrays

        start = tf.constant(0)
        sums, columns, state = run_block(start)
        columns = [*columns, *state.values()]
        arrays = [
            tf.TensorArray(column.dtype, blocks, element_shape=column.shape).write(start, column) for column in columns
        ]
        if blocks > 1:
            _, sums, arrays = tf.while_loop(lambda i, *_: i < blocks, add, (tf.constant(1), sums, arrays))
        stacked = [array.stack() for array in arrays]
        columns = [tf.reshape(column, (-1, *column.shape[2:]))[:row_count] for column in stacked]
        gradients = [*sums[1:], *columns[: len(rows)]]
        row_state = dict(zip(state, columns[len(rows) :], strict=True))

        # Transposed back in the backward function, because XLA would undo the above in this one.
        def backward(upstream: Tensor, *_: Tensor) -> list[Tensor]:
            by_shared, by_row = gradients[: len(shared)], gradients[len(shared) :]
            return [
                *(upstream * tf.transpose(gradient) for gradient in by_shared),
                *(upstream * gradient for gradient in by_row),
            ]

        return (sums[0], row_state), backward

    value, row_state = tf.custom_gradient(total)(*shared.values(), *rows.values())
    return value, {name: tf.stop_gradient(column) for name, column in row_state.items()}


def on_cpu() -> bool:
    """Return whether tensors are in this machine's memory."""
    return not tf.config.list_logical_devices("GPU")


def compile_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a pure function of fixed shapes with XLA: one kernel instead of a pass over memory per operation."""
    compiled: Callable[..., Any] = tf.function(function, jit_compile=True, autograph=False)
    return compiled


def compile_step(step: Step, variables: Sequence[keras.Variable]) -> Step:  # noqa: ARG001 (updated in place)
    """Compile a step that assigns to variables."""
    # The width of histories differs by batch, and each width would be traced again.
    compiled: Step = tf.function(step, reduce_retracing=True, autograph=False)
    return compiled


def compile_tower(tower: keras.Model) -> Callable[[Mapping[str, Any]], Tensor]:
    """Return the tower itself: TensorFlow compiles each operation."""
    embed: Callable[[Mapping[str, Any]], Tensor] = tower
    return embed


def make_deterministic() -> None:
    """Make every operation give the same bits in every run."""
    tf.config.experimental.enable_op_determinism()
