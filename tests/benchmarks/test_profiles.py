import numpy as np
import pytest

from benchmarks.seeds.profiles import profile


def kept_counts(labels: np.ndarray, kind: str, **arguments: float) -> np.ndarray:
    return np.bincount(labels[profile(labels, kind, **arguments)])


@pytest.mark.parametrize(("classes", "each", "total"), [(100, 500, 10_847), (10, 5_000, 12_406)])
def test_exp_makes_the_cifar_lt_of_the_literature(classes: int, each: int, total: int) -> None:
    """CIFAR-100-LT and CIFAR-10-LT at ratio 100 are published with these sizes."""
    counts = kept_counts(np.repeat(np.arange(classes), each), "exp")

    assert counts.sum() == total
    assert (counts[0], counts[-1]) == (each, each / 100)
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(("classes", "head"), [(100, 50), (5, 2)])
def test_step_has_two_counts(classes: int, head: int) -> None:
    counts = kept_counts(np.repeat(np.arange(classes), 500), "step")

    assert counts.tolist() == [500] * head + [5] * (classes - head)


def test_labels_of_unequal_counts_keep_their_order_and_none_is_asked_for_more_than_it_has() -> None:
    """Counts 9, 40, 20 by label; ratio 4, so shares 1, ½, ¼ of n = min(40, 20 · 2, 9 · 4) = 36."""
    labels = np.repeat(["c", "a", "b"], [9, 40, 20])
    rows = profile(labels, "exp", ratio=4)

    assert dict(zip(*np.unique(labels[rows], return_counts=True), strict=True)) == {"a": 36, "b": 18, "c": 9}


def test_rows_are_distinct_and_repeat_under_a_seed() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 300))
    rows = profile(labels, "exp", seed=1)

    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, profile(labels, "exp", seed=1))
    other = profile(labels, "exp", seed=2)
    assert rows.tolist() != other.tolist()
    np.testing.assert_array_equal(np.bincount(labels[rows]), np.bincount(labels[other]))


@pytest.mark.parametrize(
    ("labels", "kind", "ratio", "message"),
    [
        ([0, 0], "exp", 2, "expected two labels and ratio >= 1, received 1 and 2"),
        ([0, 1], "exp", 0.5, "received 2 and 0.5"),
        ([0, 1], "exp", float("nan"), "received 2 and nan"),
        ([0, 1], "linear", 1, "expected kind exp or step, received 'linear'"),
        ([0, 0, 0, 1, 1, 1], "step", 4, "expected rows for a largest count of 4 or more, found 3"),
    ],
)
def test_what_cannot_be_made_is_refused(labels: list[int], kind: str, ratio: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile(np.array(labels), kind, ratio=ratio)
