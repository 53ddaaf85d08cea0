import numpy as np
import pytest

from longtail.index.search.candidates import best_columns


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (3, 5), (100, 7), (1_000, 10), (1_682, 20), (1_682, 400)])
@pytest.mark.parametrize("levels", [3, 10_000])
def test_the_best_columns_equal_a_stable_sort(columns: int, k: int, levels: int) -> None:
    rng = np.random.default_rng(columns + k + levels)
    scores_BL = rng.integers(0, levels, (4, columns)).astype(np.float32)
    scores_BL[1] = -np.inf
    scores_BL[2, rng.random(columns) < 0.99] = -np.inf
    scores_BK, rows_BK = best_columns(scores_BL, k)
    assert scores_BK.shape == rows_BK.shape == (4, k)
    for scores_L, scores_K, rows_K in zip(scores_BL, scores_BK, rows_BK, strict=True):
        expected = np.argsort(-scores_L, kind="stable")[:k]
        expected = expected[scores_L[expected] > -np.inf]
        assert rows_K.tolist() == [*expected, *[-1] * (k - len(expected))]
        np.testing.assert_array_equal(scores_K[: len(expected)], scores_L[expected])
        assert np.isneginf(scores_K[len(expected) :]).all()


def test_scores_that_overflow_are_not_hidden() -> None:
    scores_1L = np.zeros((1, 500), np.float32)
    scores_1L[0, 7], scores_1L[0, 9] = np.nan, np.inf
    assert not np.isfinite(best_columns(scores_1L, 3)[0]).all()
