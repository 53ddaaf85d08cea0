import math

import numpy as np
import pytest
from keras import ops

from trainer import backend
from trainer.embedding import Direction, Table, WeightedBag, reading


@pytest.fixture
def table() -> Table:
    return Table(6, 3, scale=1.0, seed=4, name="table")


def test_a_table_gives_its_rows(table: Table) -> None:
    stored = ops.convert_to_numpy(table.table.value)

    np.testing.assert_array_equal(table(np.int32([[5, 0], [2, 2]])), stored[[[5, 0], [2, 2]]])
    assert (stored.shape, stored.dtype) == ((6, 3), np.float32)


def test_reading_distinct_rows_equals_reading_the_table(table: Table) -> None:
    ids = np.int32([4, 1, 4, 0])
    distinct, positions = backend.unique(ops.convert_to_tensor(ids), table.rows)

    with reading([table], [backend.gather(table.table, distinct)]):
        compact = ops.convert_to_numpy(table(positions))

    assert sorted(ops.convert_to_numpy(distinct).tolist()) == [0, 1, 4]
    np.testing.assert_array_equal(compact, table(ids))


def test_a_table_is_itself_again_after_reading_even_when_that_failed(table: Table) -> None:
    before = ops.convert_to_numpy(table(np.int32([3])))

    with pytest.raises(ZeroDivisionError), reading([table], [ops.zeros((1, 3))]):
        1 / 0  # noqa: B018

    np.testing.assert_array_equal(table(np.int32([3])), before)


def test_initial_values_follow_scale_and_seed() -> None:
    def values(scale: float, seed: int) -> np.ndarray:
        return ops.convert_to_numpy(Table(2000, 4, scale=scale, seed=seed, name="table").table.value)

    assert values(0.1, 1).std() == pytest.approx(0.1, rel=0.05)
    np.testing.assert_array_equal(values(0.1, 1), values(0.1, 1))
    assert (values(0.1, 1) != values(0.1, 2)).any()
    assert not values(0, 1).any()


@pytest.mark.parametrize(
    ("combiner", "expected"),
    [
        ("sum", [[2 * 1 - 1 * 3, 2 * 2 - 1 * 4], [0, 0]]),
        ("mean", [[-1 / 3, 0], [0, 0]]),
        ("sqrtn", [[-1 / math.sqrt(5), 0], [0, 0]]),
    ],
)
def test_bags_are_pooled_by_weight_and_empty_ones_are_zero(combiner: str, expected: list[list[float]]) -> None:
    embeddings = np.float32([[[1, 2], [3, 4], [9, 9]], [[7, 7], [7, 7], [7, 7]]])

    pooled = WeightedBag(combiner, name="bag")(embeddings, np.float32([[2, -1, 0], [0, 0, 0]]))

    np.testing.assert_allclose(pooled, expected, rtol=1e-6)


def test_directions_are_unit_rows_and_a_zero_row_is_the_first_axis() -> None:
    rows = ops.convert_to_numpy(
        Direction(name="direction")(np.array([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]], np.float32))
    )
    np.testing.assert_allclose(rows, [[0.6, 0.8], [1.0, 0.0], [0.0, -1.0]], atol=1e-7)
