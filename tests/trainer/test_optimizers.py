import math

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer.model.embedding import Table
from longtail.trainer.optimizers import ROW_OPTIMIZERS, LazyAdam, RowOptimizer, RowwiseAdagrad

RATE = 0.5


def ones() -> Table:
    table = Table(4, 2, scale=0.0, seed=0, name="table")
    table.table.assign(np.ones((4, 2)))
    return table


def step(optimizer: RowOptimizer, ids: list[int], gradients: list[list[float]], *, number: int) -> np.ndarray:
    """Applies one step; returns the whole table."""
    table = optimizer.table
    rows = ops.take(table.table.value, np.int32(ids), axis=0)
    optimizer.apply(
        ops.convert_to_tensor(ids, "int32"), rows, ops.convert_to_tensor(gradients, "float32"),
        rate=RATE, step=ops.convert_to_tensor(float(number)),
    )  # fmt: skip
    return ops.convert_to_numpy(table.table.value)


def test_row_wise_adagrad_by_hand() -> None:
    optimizer = RowwiseAdagrad(ones())

    after_one = step(optimizer, [2], [[3, 4]], number=1)
    after_two = step(optimizer, [2, 0], [[1, -1], [0, 2]], number=2)

    first = (9 + 16) / 2
    np.testing.assert_allclose(
        after_one[2], [1 - RATE * 3 / math.sqrt(first), 1 - RATE * 4 / math.sqrt(first)], rtol=1e-6
    )
    second = first + (1 + 1) / 2
    np.testing.assert_allclose(after_two[2], after_one[2] - RATE * np.array([1, -1]) / math.sqrt(second), rtol=1e-6)
    np.testing.assert_allclose(after_two[0], [1, 1 - RATE * 2 / math.sqrt(4 / 2)], rtol=1e-6)
    np.testing.assert_allclose(ops.convert_to_numpy(optimizer.accumulator.value)[:, 0], [2, 0, 13.5, 0], rtol=1e-6)


def test_lazy_adam_by_hand() -> None:
    optimizer = LazyAdam(ones())

    after_one = step(optimizer, [2], [[3, -4]], number=1)
    after_two = step(optimizer, [2], [[1, 0]], number=2)

    np.testing.assert_allclose(after_one[2], [1 - RATE, 1 + RATE], rtol=1e-5)
    mean = np.array([0.9 * 0.1 * 3 + 0.1 * 1, 0.9 * 0.1 * -4])
    square = np.array([0.999 * 0.001 * 9 + 0.001 * 1, 0.999 * 0.001 * 16])
    update = (mean / (1 - 0.9**2)) / np.sqrt(square / (1 - 0.999**2))
    np.testing.assert_allclose(after_two[2], after_one[2] - RATE * update, atol=1e-5)


def test_the_bias_correction_of_lazy_adam_follows_the_global_step() -> None:
    rows = step(LazyAdam(ones()), [1], [[3, 3]], number=10)

    update = (0.1 * 3 / (1 - 0.9**10)) / math.sqrt(0.001 * 9 / (1 - 0.999**10))
    np.testing.assert_allclose(rows[1], [1 - RATE * update] * 2, rtol=1e-5)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_only_touched_rows_and_their_state_change(name: str) -> None:
    optimizer = ROW_OPTIMIZERS[name](ones())

    rows = step(optimizer, [3, 1], [[1, 2], [3, 4]], number=1)

    for values in (rows - 1, *(ops.convert_to_numpy(slot.value) for slot in optimizer.variables)):
        assert not values[[0, 2]].any()
        assert values[[1, 3]].all()


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_gradient_of_zero_moves_nothing(name: str) -> None:
    assert step(ROW_OPTIMIZERS[name](ones()), [0], [[0, 0]], number=1).tolist() == [[1, 1]] * 4


def test_lazy_adam_is_adam_when_every_row_is_touched() -> None:
    rng = np.random.default_rng(0)
    optimizer, dense = LazyAdam(ones()), keras.Variable(np.ones((4, 2), np.float32))
    adam = keras.optimizers.Adam(RATE)
    adam.build([dense])

    for number in range(1, 6):
        gradients = rng.standard_normal((4, 2)).astype(np.float32)
        rows = step(optimizer, [2, 0, 3, 1], gradients[[2, 0, 3, 1]].tolist(), number=number)
        adam.apply([ops.convert_to_tensor(gradients)], [dense])

    np.testing.assert_allclose(rows, ops.convert_to_numpy(dense.value), rtol=1e-5)
