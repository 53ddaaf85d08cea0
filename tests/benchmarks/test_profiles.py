import numpy as np
import pytest

from benchmarks.seeds.data import profile


@pytest.mark.parametrize(("classes", "per_class", "total"), [(100, 500, 10_847), (10, 5_000, 12_406)])
def test_exp_makes_the_cifar_lt_of_the_literature(classes: int, per_class: int, total: int) -> None:
    """CIFAR-100-LT and CIFAR-10-LT at ratio 100 are published with these sizes."""
    rows = profile(classes, per_class, "exp")
    counts = np.bincount(rows // per_class)

    assert (np.diff(rows) > 0).all()
    assert counts.sum() == total
    assert (counts[0], counts[-1]) == (per_class, per_class / 100)
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(("classes", "head"), [(100, 50), (5, 2)])
def test_step_has_two_counts(classes: int, head: int) -> None:
    counts = np.bincount(profile(classes, 500, "step") // 500)

    assert counts.tolist() == [500] * head + [5] * (classes - head)
