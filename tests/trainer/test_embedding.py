import math

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.backend import Tensor
from longtail.trainer.model.embedding import EmbeddingTable, compact_rows
from longtail.trainer.model.pooling import WeightedBag


@pytest.fixture
def table() -> EmbeddingTable:
    return EmbeddingTable(6, 3, scale=1.0, seed=4, name="table")


def test_reading_distinct_rows_equals_reading_the_table(table: EmbeddingTable) -> None:
    ids = np.int32([4, 1, 4, 0])
    distinct, positions = backend.unique(ops.convert_to_tensor(ids), table.rows)

    with compact_rows([table], [backend.gather(table.table, distinct)]):
        compact = ops.convert_to_numpy(table(positions))

    assert sorted(ops.convert_to_numpy(distinct).tolist()) == [0, 1, 4]
    np.testing.assert_array_equal(compact, table(ids))


def test_compact_rows_end_with_the_block_even_after_an_error(table: EmbeddingTable) -> None:
    before = ops.convert_to_numpy(table(np.int32([3])))

    with pytest.raises(ZeroDivisionError), compact_rows([table], [ops.zeros((1, 3))]):
        1 / 0  # noqa: B018

    np.testing.assert_array_equal(table(np.int32([3])), before)


@pytest.mark.parametrize(
    ("combiner", "expected"),
    [
        ("sum", [[2 * 1 - 1 * 3, 2 * 2 - 1 * 4], [0, 0]]),
        ("mean", [[-1 / 3, 0], [0, 0]]),
        ("sqrtn", [[-1 / math.sqrt(5), 0], [0, 0]]),
    ],
)
def test_bags_are_pooled_by_weight_and_empty_ones_are_zero(combiner: str, expected: list[list[float]]) -> None:
    table = EmbeddingTable(4, 2, scale=0.0, seed=0, name="table")
    rows = np.float32([[9, 9], [1, 2], [3, 4], [7, 7]])
    ids, weights = np.int32([[1, 2, 0], [3, 3, 3]]), np.float32([[2, -1, 0], [0, 0, 0]])
    table.table.assign(rows)
    bag = WeightedBag(table, combiner, name="bag")

    np.testing.assert_allclose(bag(ids, weights), expected, rtol=1e-6)
    with compact_rows([table], [ops.convert_to_tensor(rows[1:])]):
        compact = bag(ops.convert_to_tensor(np.int32([[0, 1, 1], [2, 2, 2]])), ops.convert_to_tensor(weights))
    np.testing.assert_allclose(compact, expected, rtol=1e-6)


def test_sums_of_bags_differentiate_by_every_entry_of_a_row() -> None:
    """Row 0 is in both bags, once with 2 and twice with 1 and 4; row 2 is in none; padding has weight 0."""
    rows = ops.convert_to_tensor(np.float32([[1, 2], [3, 5], [7, 7]]))
    positions, weights = np.int32([[0, 1, 0], [0, 2, 0]]), np.float32([[2, -1, 0], [1, 0, 4]])
    upstream = np.float32([[1, 10], [100, 1000]])

    def loss(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        sums_BD = backend.bag_sums(rows[0], ops.convert_to_tensor(positions), ops.convert_to_tensor(weights))
        return ops.sum(sums_BD * upstream), sums_BD

    (_, sums), (gradient,), _ = backend.value_and_gradients(loss, [rows], [])
    np.testing.assert_allclose(sums, [[2 - 3, 4 - 5], [1 + 4, 2 + 8]])
    np.testing.assert_allclose(gradient, [[2 + 100 + 400, 20 + 1000 + 4000], [-1, -10], [0, 0]])


def test_damping_adds_zero_entries_to_a_mean() -> None:
    table = EmbeddingTable(3, 2, scale=0.0, seed=0, name="table")
    table.table.assign([[9, 9], [1, 2], [3, 4]])
    bag = WeightedBag(table, "mean", name="bag", damping=1.5)
    ids, weights = np.int32([[1, 2, 0], [1, 1, 1]]), np.float32([[2, 0.5, 0], [0, 0, 0]])
    np.testing.assert_allclose(bag(ids, weights), [[(2 + 1.5) / 4, (4 + 2) / 4], [0, 0]])


def test_attention_begins_as_the_mean_and_weighs_by_exponentials() -> None:
    """e·a is log 3 of the first row and 0 of the second: weights 2·3 and −1 are 6/7 and −1/7."""
    table = EmbeddingTable(3, 2, scale=0.0, seed=0, name="table")
    table.table.assign([[9, 9], [np.log(3), 2], [0, 4]])
    bag = WeightedBag(table, "attention", name="bag")
    ids, weights = np.int32([[1, 2, 0], [1, 1, 1]]), np.float32([[2, -1, 0], [0, 0, 0]])
    np.testing.assert_allclose(bag(ids, weights), [[2 * np.log(3) / 3, 0], [0, 0]], atol=1e-6)

    bag.attention.assign([1, 0])
    expected = [[6 / 7 * np.log(3), (6 * 2 - 4) / 7], [0, 0]]
    np.testing.assert_allclose(bag(ids, weights), expected, rtol=1e-5)
    with compact_rows([table], [ops.convert_to_tensor(table.table)]):
        compact = bag(ops.convert_to_tensor(ids), ops.convert_to_tensor(weights))
    np.testing.assert_allclose(compact, expected, rtol=1e-5)
