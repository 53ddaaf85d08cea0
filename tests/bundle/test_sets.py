"""Compare sets as ascending arrays with NumPy's."""

import numpy as np
import pytest

from longtail.bundle.sets import distinct, is_in


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
@pytest.mark.parametrize("size", [0, 1, 7, 5000])
def test_sets_equal_numpy(dtype: type, size: int) -> None:
    rng = np.random.default_rng(size)
    values, others = (rng.integers(-9, size // 2 + 1, count).astype(dtype) for count in (size, 3 * size))
    result = distinct(values)
    assert result.dtype == dtype
    assert np.array_equal(result, np.unique(values))
    assert np.array_equal(distinct(values.reshape(1, -1)), result)
    for members in (distinct(others), distinct(others[:0])):
        assert np.array_equal(is_in(values, members), np.isin(values, members))
        assert np.array_equal(result[~is_in(result, members)], np.setdiff1d(values, members))
