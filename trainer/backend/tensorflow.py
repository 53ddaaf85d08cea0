"""TensorFlow: tables are resource variables, gathered and scattered in place; a step costs what it touches.

No function is converted by AutoGraph: our own have no control flow on tensors, and AutoGraph writes a Python file
for every function it rewrites to the temporary folder, where a killed process leaves it.

Legend: `N` ids, `U` distinct ids, `D` dimensions, `B` bags, `P` places of a bag, `n` entries of all bags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from longtail.bundle.arrays import Array
from longtail.trainer.backend.tensors import BlockLoss, Step, Tensor, Tensors

_Beside = TypeVar("_Beside")


def devices() -> int:
    """Return how many devices compute together."""
    return 1


def rows_variable(rows: int, width: int, *, name: str, initializer: Any = "zeros") -> keras.Variable:
    """Get a variable that is read and written by rows, float32 [rows, width]. Its attribute `rows` is their number."""
    variable = keras.Variable(initializer, shape=(rows, width), dtype="float32", trainable=False, name=name)
    variable.rows = rows
    return variable


def gather(table: keras.Variable, ids: Tensor) -> Tensor:
    """Return rows of a variable without reading the rest of it, shape [*ids.shape, D]."""
    rows: Tensor = tf.gather(table.value, ids)
    return rows


def scatter(table: keras.Variable, ids_U: Tensor, rows_UD: Tensor) -> None:
    """Replace rows of a variable in place."""
    table.value.scatter_update(tf.IndexedSlices(rows_UD, ids_U))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks of them, [N, D] each, in order and in place."""
    start = 0
    for rows_ND in blocks:
        scatter(table, tf.range(start, start + len(rows_ND)), rows_ND)
        start += len(rows_ND)


def unique(ids_N: Tensor, limit: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 (JAX needs the limit)
    """Return distinct ids, [U], and the position of every id among them, [N]."""
    distinct = tf.unique(ids_N)
    return distinct.y, distinct.idx


def distinct(ids: Sequence[Tensor], limit: int, *, shared: bool = False) -> tuple[Tensor, list[Tensor]]:  # noqa: ARG001
    """Return the distinct ids of several tensors, [U], and the positions of each tensor's, shaped as it is.

    Args:
        shared: of the whole batch on every device, where there are several; else of each device's part.
    """
    ids_U, positions_N = unique(tf.concat([tf.reshape(each, (-1,)) for each in ids], axis=0), limit)
    positions = tf.split(positions_N, [tf.size(each) for each in ids])
    return ids_U, [tf.reshape(at, tf.shape(each)) for at, each in zip(positions, ids, strict=True)]


def take(rows_UD: Tensor, positions: Tensor, *, shared: bool = False) -> Tensor:  # noqa: ARG001
    """Return rows by positions among the ids of `distinct`, shape [*positions.shape, D]."""
    rows: Tensor = keras.ops.take(rows_UD, positions, axis=0)
    return rows


def bag_sums(rows_UD: Tensor, positions_BP: Tensor, weights_BP: Tensor, *, shared: bool = False) -> Tensor:
    """Sum the rows of every bag by constant weights, float32 [B, D]; positions are those of `distinct`.

    A sparse matrix of weights [B, U] costs what its entries cost. Its transpose is made for the gradient, because the
    product with a matrix that is only read as transposed sums in the order in which threads end. There must be a bag:
    TensorFlow's product of none ends the process.
    """
    if not on_cpu():
        gathered_BPD = take(rows_UD, positions_BP, shared=shared)
        return keras.ops.einsum("bpd,bp->bd", gathered_BPD, weights_BP)  # type: ignore[no-any-return]
    places_n2 = tf.where(tf.not_equal(weights_BP, 0))
    columns_n = tf.cast(tf.gather_nd(positions_BP, places_n2), tf.int64)
    size = tf.cast([tf.shape(positions_BP)[0], tf.shape(rows_UD)[0]], tf.int64)
    weights_BU = tf.raw_ops.SparseTensorToCSRSparseMatrix(
        indices=tf.stack([places_n2[:, 0], columns_n], axis=1),
        values=tf.gather_nd(weights_BP, places_n2),
        dense_shape=size,
    )

    def product(rows_UD: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        def backward(upstream_BD: Tensor) -> Tensor:
            weights_UB = tf.raw_ops.SparseMatrixTranspose(input=weights_BU, type=tf.float32)
            gradient_UD: Tensor = tf.raw_ops.SparseMatrixMatMul(a=weights_UB, b=upstream_BD)
            return gradient_UD

        return tf.raw_ops.SparseMatrixMatMul(a=weights_BU, b=rows_UD), backward

    sums_BD: Tensor = tf.custom_gradient(product)(rows_UD)
    return sums_BD


def sums(
    table: keras.Variable, read: Sequence[tuple[Tensor, Tensor]], gradients: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids that were read together, [U], their rows, and the sums of their gradients, [U, D].

    Args:
        read: distinct ids, [U], and their rows, float32 [U, D], of each reading.
        gradients: float32 [U, D] of each.
    """
    if len(read) == 1:
        return *read[0], gradients[0]
    ids_U, positions_N = unique(tf.concat([ids for ids, _ in read], axis=0), table.rows)
    sums_UD = tf.math.unsorted_segment_sum(tf.concat(gradients, axis=0), positions_N, tf.shape(ids_U)[0])
    return ids_U, gather(table, ids_U), sums_UD


def count(positions_N: Tensor, distinct_U: Tensor) -> Tensor:
    """Return how often every distinct id came, float32 [U]."""
    counts_U: Tensor = tf.math.unsorted_segment_sum(
        tf.ones(tf.shape(positions_N)), positions_N, tf.shape(distinct_U)[0]
    )
    return counts_U


def value_and_gradients(
    loss: Callable[[list[Tensor]], tuple[Tensor, _Beside]], rows: list[Tensor], variables: Sequence[keras.Variable]
) -> tuple[tuple[Tensor, _Beside], list[Tensor], list[Tensor]]:
    """Compute the loss and what it returns with it; its gradients by `rows`, float32 [U, D], and by variables."""
    with tf.GradientTape() as tape:
        tape.watch(rows)
        value, auxiliary = loss(rows)
    gradients = tape.gradient(value, (rows, [variable.value for variable in variables]), unconnected_gradients="zero")
    of_rows, of_variables = ([tf.convert_to_tensor(gradient) for gradient in part] for part in gradients)
    return (value, auxiliary), of_rows, of_variables


def sum_of_blocks(
    loss: BlockLoss, shared: Tensors, rows: Tensors, fixed: Any, seen: Any, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """Compute the sum of a loss over blocks of rows, differentiated block by block, and what it keeps of all rows.

    Args:
        loss: of `shared`, of a block of `rows` and `fixed`, and of `seen`: of every row its loss, and what is kept.
        shared: float tensors that every block sees whole.
        rows: float tensors.
        fixed: further tensors of the rows, in dicts of any depth.
        seen: further tensors that every block sees whole, alike.
    """
    every = next(iter(rows.values())).shape[0]
    each = -(-every // blocks)
    places = tf.minimum(tf.range(each * blocks), every - 1)
    real = tf.reshape(tf.range(each * blocks) < every, (blocks, each))

    def parted(columns: Any) -> Any:
        def cut(column: Tensor) -> Tensor:
            equal = column if each * blocks == every else tf.gather(column, places)
            of_blocks: Tensor = tf.reshape(equal, (blocks, each, *column.shape[1:]))
            return of_blocks

        return keras.tree.map_structure(cut, columns)

    fixed_blocks = parted(fixed)

    def transposed(tensor: Tensor) -> Tensor:
        """Transpose a matrix; return any other tensor as it is."""
        return tf.transpose(tensor) if len(tensor.shape) == 2 else tensor

    def total(*values: Tensor) -> tuple[tuple[Tensor, Tensors], Callable[..., list[Tensor]]]:
        given = dict(zip((*shared, *rows), values, strict=True))
        # XLA multiplies the gradient of a matrix [M, D] three times as fast if the gradient is [D, M].
        whole = {name: transposed(given[name]) for name in shared}
        row_blocks = parted({name: given[name] for name in rows})

        def block_at(at: Tensor) -> tuple[list[Tensor], list[Tensor], Tensors]:
            here = {name: column[at] for name, column in row_blocks.items()}
            with tf.GradientTape() as tape:
                tape.watch([whole, here])
                fixed_here = keras.tree.map_structure(lambda column: column[at], fixed_blocks)
                original = {name: transposed(each) for name, each in whole.items()}
                losses, kept = loss(original, here, fixed_here, seen)
                value = tf.reduce_sum(tf.where(real[at], losses, 0.0))
            of_whole, of_here = tape.gradient(value, (whole, here), unconnected_gradients="zero")
            sums = [value, *(tf.convert_to_tensor(of_whole[name]) for name in whole)]
            return sums, [tf.convert_to_tensor(of_here[name]) for name in here], kept

        def add(at: Tensor, sums: list[Tensor], arrays: list[Any]) -> tuple[Tensor, list[Tensor], list[Any]]:
            more, columns, kept = block_at(at)
            both = [*columns, *kept.values()]
            arrays = [array.write(at, column) for array, column in zip(arrays, both, strict=True)]
            return at + 1, [one + other for one, other in zip(sums, more, strict=True)], arrays

        first = tf.constant(0)
        sums, columns, kept = block_at(first)
        both = [*columns, *kept.values()]
        arrays = [tf.TensorArray(each.dtype, blocks, element_shape=each.shape).write(first, each) for each in both]
        if blocks > 1:
            _, sums, arrays = tf.while_loop(lambda at, *_: at < blocks, add, (tf.constant(1), sums, arrays))
        stacked = [array.stack() for array in arrays]
        both = [tf.reshape(column, (-1, *column.shape[2:]))[:every] for column in stacked]
        gradients = [*sums[1:], *both[: len(columns)]]
        of_all = dict(zip(kept, both[len(columns) :], strict=True))

        # `transposed` is in the backward function, because XLA would undo the above in this one.
        def backward(upstream: Tensor, *_: Tensor) -> list[Tensor]:
            of_shared, of_rows = gradients[: len(shared)], gradients[len(shared) :]
            return [*(upstream * transposed(each) for each in of_shared), *(upstream * each for each in of_rows)]

        return (sums[0], of_all), backward

    value, kept = tf.custom_gradient(total)(*shared.values(), *rows.values())
    return value, {name: tf.stop_gradient(column) for name, column in kept.items()}


def on_cpu() -> bool:
    """Return whether tensors are in this machine's memory."""
    return not tf.config.list_logical_devices("GPU")


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


def make_deterministic() -> None:
    """Let every operation give the same bits in every run."""
    tf.config.experimental.enable_op_determinism()
