import math

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer.model.embedding import EmbeddingTable
from longtail.trainer.optimizers import (
    ROW_OPTIMIZERS,
    LazyAdam,
    LazyL2,
    LazySGD,
    RowOptimizer,
    dense_optimizer,
    learning_rate,
)  # fmt: skip

RATE = 0.5


def ones() -> EmbeddingTable:
    table = EmbeddingTable(4, 2, scale=0.0, seed=0, name="table")
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
    optimizer = ROW_OPTIMIZERS["adagrad"](ones())

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


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_only_touched_rows_and_their_state_change(name: str) -> None:
    optimizer = ROW_OPTIMIZERS[name](ones())

    rows = step(optimizer, [3, 1], [[1, 2], [3, 4]], number=1)

    for values in (rows - 1, *(ops.convert_to_numpy(slot) for slot in optimizer.slots.values())):
        assert not values[[0, 2]].any()
        assert values[[1, 3]].all()


def test_element_wise_adagrad_by_hand() -> None:
    optimizer = ROW_OPTIMIZERS["adagrad_elementwise"](ones())

    after_one = step(optimizer, [2], [[3, -1e-3]], number=1)
    after_two = step(optimizer, [2, 0], [[4, 0], [0, 2]], number=2)

    np.testing.assert_allclose(after_one[2], [1 - RATE, 1 + RATE], rtol=1e-4)
    np.testing.assert_allclose(after_two[2], [1 - RATE - RATE * 4 / 5, 1 + RATE], rtol=1e-4)
    np.testing.assert_allclose(after_two[0], [1, 1 - RATE], rtol=1e-6)


def test_momentum_of_an_untouched_row_waits_where_dense_momentum_would_move_it() -> None:
    """Steps 1 and 3 touch row 1, step 2 row 0. Dense: v is −½, −¼, −⅛ − ½."""
    optimizer = LazySGD(ones(), momentum=0.5)

    after_one = step(optimizer, [1], [[1, 0]], number=1)
    after_two = step(optimizer, [0], [[0, 1]], number=2)
    after_three = step(optimizer, [1], [[1, 0]], number=3)

    assert after_one[1].tolist() == [1 - RATE, 1]
    assert after_two[1].tolist() == [1 - RATE, 1], "dense: 1 − ½ − ¼"
    assert after_two[0].tolist() == [1, 1 - RATE]
    assert after_three[1].tolist() == [0.5 - (0.5 * 0.5 + RATE), 1], "the whole velocity −½ is still there"


EQUAL_TO_KERAS = {
    "adam": (LazyAdam, lambda: keras.optimizers.Adam(RATE)),
    "sgd": (LazySGD, lambda: keras.optimizers.SGD(RATE)),
    "sgd with momentum": (
        lambda table: LazySGD(table, momentum=0.9), lambda: keras.optimizers.SGD(RATE, momentum=0.9)
    ),
    "adagrad_elementwise": (
        ROW_OPTIMIZERS["adagrad_elementwise"],
        lambda: keras.optimizers.Adagrad(RATE, initial_accumulator_value=0, epsilon=1e-10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL_TO_KERAS)
def test_rows_move_as_by_keras_when_every_row_is_touched(name: str) -> None:
    """On ‖(θ − target) · scale‖² / 2, so that the gradients follow the steps."""
    rng = np.random.default_rng(0)
    target, scale = rng.standard_normal((2, 4, 2)).astype(np.float32)
    sparse, dense = EQUAL_TO_KERAS[name]
    optimizer, other, variable = sparse(ones()), dense(), keras.Variable(np.ones((4, 2), np.float32))
    other.build([variable])
    rows = np.ones((4, 2), np.float32)

    for number in range(1, 21):
        gradients = (rows - target) * scale**2
        rows = step(optimizer, [2, 0, 3, 1], gradients[[2, 0, 3, 1]].tolist(), number=number)
        other.apply([(variable.value - target) * scale**2], [variable])

    np.testing.assert_allclose(rows, ops.convert_to_numpy(variable.value), rtol=2e-5, atol=2e-6)
    assert np.abs(rows - 1).min() > 0.01


@pytest.mark.parametrize(("name", "sparse"), [("sgd", LazySGD), ("adagrad", ROW_OPTIMIZERS["adagrad_elementwise"])])
def test_the_dense_optimiser_is_the_row_optimiser_of_one_table(name: str, sparse: type) -> None:
    gradients = [[1, -2], [3, 0.5], [0, 1], [1e-4, 1]]
    arguments = {"momentum": 0.9} if name == "sgd" else {}
    optimizer, variable = sparse(ones(), **arguments), keras.Variable(np.ones((4, 2), np.float32))
    dense = dense_optimizer(name, learning_rate(RATE, "constant", 10), momentum=0.9)
    dense.build([variable])

    for number in (1, 2, 3):
        rows = step(optimizer, [0, 1, 2, 3], gradients, number=number)
        dense.apply([ops.convert_to_tensor(gradients, "float32")], [variable])

    np.testing.assert_allclose(rows, ops.convert_to_numpy(variable.value), rtol=1e-5)


def test_l2_of_a_touched_row_is_due_for_every_step_since_its_last_touch() -> None:
    table = ones()
    penalty = LazyL2(table, l2=0.1)

    def added(ids: list[int], number: int) -> list[list[float]]:
        rows = ops.convert_to_tensor([[3.0, -1.0]] * len(ids))
        gradients = penalty.gradients(
            ops.convert_to_tensor(ids, "int32"), rows, rate=0.1, step=ops.convert_to_tensor(number)
        )
        return ops.convert_to_numpy(gradients).tolist()

    assert added([0, 2], 1.0) == pytest.approx(np.array([[0.6, -0.2]] * 2))
    assert added([2], 2.0) == pytest.approx(np.array([[0.6, -0.2]])), "the full objective's, touched in every step"
    assert added([0, 3], 5.0) == pytest.approx(np.array([[2.4, -0.8], [3.0, -1.0]]))
    assert ops.convert_to_numpy(penalty.touched.value)[:, 0].tolist() == [5, 0, 2, 5]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow's ids are not padded")
def test_padding_past_the_table_s_end_has_no_l2_that_would_shrink_a_clipped_step() -> None:
    rows = np.ones((3, 2), np.float32)

    gradients = LazyL2(ones(), l2=0.5).gradients(np.int32([3, 4, 4]), rows, rate=np.float32(0.1), step=np.float32(1))

    assert ops.convert_to_numpy(gradients).tolist() == [[1, 1], [0, 0], [0, 0]]


def test_sampled_l2_is_unbiased_for_any_row_frequency() -> None:
    """Rows drawn with chances from 0.05 to 1 and held at 1: l2 = ½ adds 1 a step until a row's last draw."""
    rng, chances = np.random.default_rng(0), np.array([1, 0.5, 0.2, 0.05])
    penalty, sums, last = LazyL2(ones(), l2=0.5), np.zeros(4), np.zeros(4)

    for number in range(1, 151):
        ids = np.flatnonzero(rng.random(4) < chances).astype(np.int32)
        gradients = penalty.gradients(
            ids, np.ones((len(ids), 2), np.float32), rate=np.float32(1e-3), step=np.float32(number)
        )
        sums[ids] += ops.convert_to_numpy(gradients)[:, 0]
        last[ids] = number

    assert sums.tolist() == last.tolist()
    assert last.min() > 130, "and every row is drawn now and then"


RATES = {
    "constant": [8, 8, 8, 8, 8],
    "linear": [8, 6, 4, 2, 0],
    "cosine": [8 * (1 + math.cos(math.pi * share)) / 2 for share in (0, 0.25, 0.5, 0.75, 1)],
}


@pytest.mark.parametrize("schedule", RATES)
def test_rates_by_step(schedule: str) -> None:
    """Of eight steps, every other."""
    rate = learning_rate(8.0, schedule, 8)

    rates = [float(rate(ops.convert_to_tensor(number, "int32"))) for number in (0, 2, 4, 6, 8)]
    assert rates == pytest.approx(RATES[schedule], abs=1e-5)


def test_the_bias_correction_of_lazy_adam_follows_the_global_step() -> None:
    rows = step(LazyAdam(ones()), [1], [[3, 3]], number=10)

    update = (0.1 * 3 / (1 - 0.9**10)) / math.sqrt(0.001 * 9 / (1 - 0.999**10))
    np.testing.assert_allclose(rows[1], [1 - RATE * update] * 2, rtol=1e-5)
