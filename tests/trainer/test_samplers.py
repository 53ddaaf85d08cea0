import math

import keras
import numpy as np
import pytest
from hypothesis import given, strategies as st
from keras import ops

from longtail.bundle import log_frequencies
from longtail.trainer.sampling import SAMPLERS, DrawContext, SamplerSetup
from longtail.trainer.sampling.independent import alias_table, distinct

LOG_PI = np.log([0.5, 0.3, 0.2])
POSITIVE = 1
"""The positive of every row, where draws depend on it."""


def drawn(name: str, log_pi: np.ndarray, *, batch_size: int = 4, seed: int = 3, **arguments: object) -> np.ndarray:
    sampler = SAMPLERS[name](SamplerSetup(log_pi, batch_size), **arguments)
    context = DrawContext(ops.full((batch_size,), POSITIVE, "int32"), {}, None)
    return np.asarray(sampler.draw(keras.random.SeedGenerator(seed), context))


def reconstructed(probability: np.ndarray) -> np.ndarray:
    """What an alias table draws: cells are equally likely; each gives itself or its alias."""
    keep, alias = alias_table(probability)
    mass = keep.astype(np.float64)
    np.add.at(mass, alias, 1 - keep.astype(np.float64))
    return mass / len(probability)


@given(st.lists(st.integers(0, 10**9) | st.just(0), min_size=1, max_size=60))
def test_the_alias_table_draws_its_probabilities(counts: list[int]) -> None:
    probability = np.exp(log_frequencies(np.array(counts, np.int64)))

    np.testing.assert_allclose(reconstructed(probability), probability, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [1.0] * 7,
        1 / np.arange(1, 100_001),
        [1e-9, 1 - 1e-9],
        [1e-9] * 1000 + [1.0],
        [0.25, 0.75, 0.0, 1.0],
        [2.0, 0.5, 0.5],
    ],
    ids=["one label", "equal", "Zipf", "one in a billion", "many rare", "a zero", "exact shares"],
)
def test_the_alias_table_of_special_shapes(weights: list[float]) -> None:
    probability = np.array(weights, np.float64) / np.sum(weights)
    keep, alias = alias_table(probability)

    assert keep.min() >= 0
    assert keep.max() <= 1
    assert alias.min() >= 0
    assert alias.max() < len(probability)
    np.testing.assert_allclose(reconstructed(probability), probability, rtol=1e-6, atol=1e-7 / len(probability))


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("in_batch", {}, [0.5, 0.3, 0.2]),
        ("uniform", {"negatives": 2}, [1 / 3] * 3),
        ("popularity", {"negatives": 2}, [0.5, 0.3, 0.2]),
        ("popularity", {"negatives": 2, "alpha": 2}, [25 / 38, 9 / 38, 4 / 38]),
        ("popularity", {"negatives": 2, "alpha": 0}, [1 / 3] * 3),
        ("mixed", {"negatives": 2}, [(1.5 + 2 / 3) / 5, (0.9 + 2 / 3) / 5, (0.6 + 2 / 3) / 5]),
    ],
)
def test_q_by_hand(name: str, arguments: dict[str, object], expected: list[float]) -> None:
    sampler = SAMPLERS[name](SamplerSetup(LOG_PI, 4), **arguments)

    assert sampler.log_q_L.dtype == np.float32
    np.testing.assert_allclose(np.exp(sampler.log_q_L), expected, rtol=1e-6)


def test_full_is_every_label_once_so_that_importance_weights_are_one() -> None:
    """1/(m·q_y') = 1/(3·⅓)."""
    q = np.exp(SAMPLERS["full"](SamplerSetup(LOG_PI, 4)).log_q_L)

    assert drawn("full", LOG_PI).tolist() == [0, 1, 2]
    np.testing.assert_allclose(1 / (3 * q), [1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("name", ["uniform", "popularity"])
def test_draws_are_shared_by_the_batch_or_one_set_per_row(name: str) -> None:
    assert drawn(name, LOG_PI, negatives=5).shape == (5,)
    assert drawn(name, LOG_PI, negatives=5, shared=False).shape == (4, 5)
    assert drawn(name, LOG_PI, negatives=5, exclude_positive=True).shape == (4, 5)
    assert drawn("mixed", LOG_PI, negatives=5).shape == (5,)


@pytest.mark.parametrize("shape", [(1, 5), (7, 5)], ids=["shared", "per row"])
@pytest.mark.parametrize("labels", [5, 6, 200_000])
def test_draws_without_replacement_differ(shape: tuple[int, int], labels: int) -> None:
    seed = keras.random.SeedGenerator(5)
    draws = np.concatenate([np.asarray(distinct(shape, labels, seed)) for _ in range(5)])

    assert draws.dtype == np.int32
    assert draws.min() >= 0
    assert draws.max() < labels
    assert all(len(set(row)) == 5 for row in draws.tolist())
    assert len(np.unique(draws, axis=0)) > 1


def test_every_ordered_choice_without_replacement_is_equally_likely() -> None:
    """5·4·3 of them, the references of one swap to another included."""
    draws = np.asarray(distinct((60_000, 3), 5, keras.random.SeedGenerator(6)))

    counts = np.unique(draws @ [25, 5, 1], return_counts=True)[1]
    assert len(counts) == 60
    assert ((counts - 1000) ** 2 / 1000).sum() < 98.32, "the 99.9 % quantile of χ² with 59 degrees of freedom"


@pytest.mark.parametrize(
    ("name", "arguments", "q"),
    [
        ("uniform", {}, [0.25] * 4),
        ("popularity", {}, [0.4, 0.35, 0.05, 0.2]),
        ("popularity", {"alpha": 0.5}, np.sqrt([0.4, 0.35, 0.05, 0.2]) / np.sqrt([0.4, 0.35, 0.05, 0.2]).sum()),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_draws_follow_q(name: str, arguments: dict[str, float], q: list[float], shared: bool) -> None:
    size = 100_000
    draws = drawn(
        name, np.log([0.4, 0.35, 0.05, 0.2]), batch_size=10, negatives=size if shared else size // 10, shared=shared,
        **arguments,
    )  # fmt: skip

    counts, expected = np.bincount(draws.ravel(), minlength=4), size * np.array(q)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 16.27, "the 99.9 % quantile of χ² with 3 degrees of freedom"


@pytest.mark.parametrize(("name", "q"), [("uniform", [0.25] * 4), ("popularity", [0.4, 0.35, 0.05, 0.2])])
def test_without_the_positive_draws_follow_q_given_another_label(name: str, q: list[float]) -> None:
    """q_y'/(1 − q_y) on the others. Popularity draws five times at most, so 0.35⁵ of its draws still hit."""
    size = 100_000
    draws = drawn(
        name, np.log([0.4, 0.35, 0.05, 0.2]), batch_size=10, negatives=size // 10, exclude_positive=True,
    )  # fmt: skip

    counts, others = np.bincount(draws.ravel(), minlength=4), [0, 2, 3]
    hits = {"uniform": 0, "popularity": 0.35**5}[name] * size
    assert counts[POSITIVE] == pytest.approx(hits, abs=4 * math.sqrt(hits))
    expected = (size - counts[POSITIVE]) * np.array(q)[others] / (1 - q[POSITIVE])
    chi_squared = ((counts[others] - expected) ** 2 / expected).sum()
    assert chi_squared < 13.82, "the 99.9 % quantile of χ² with 2 degrees of freedom"


@pytest.mark.parametrize("name", ["uniform", "popularity"])
def test_every_row_excludes_its_own_positive(name: str) -> None:
    positive_B = np.int32([0, 1, 2, 1])
    sampler = SAMPLERS[name](SamplerSetup(LOG_PI, 4), negatives=2000, exclude_positive=True)
    draws = np.asarray(
        sampler.draw(keras.random.SeedGenerator(2), DrawContext(ops.convert_to_tensor(positive_B), {}, None))
    )

    shares = (draws[:, :, None] == np.arange(3)).mean(axis=1)
    assert (shares[np.arange(4), positive_B] <= {"uniform": 0, "popularity": 0.05}[name]).all()
    assert (np.sort(shares, axis=1)[:, 1] > 0.2).all(), "both other labels come"


def test_uniform_without_replacement_is_shared_or_per_row_and_may_exclude_the_positive() -> None:
    shared = drawn("uniform", LOG_PI, negatives=3, replace=False)
    assert sorted(shared.tolist()) == [0, 1, 2], "all of them"
    per_row = drawn("uniform", LOG_PI, negatives=2, replace=False, shared=False)
    assert per_row.shape == (4, 2)
    assert (per_row[:, 0] != per_row[:, 1]).all()
    others = drawn("uniform", LOG_PI, negatives=2, replace=False, exclude_positive=True)
    assert np.sort(others, axis=1).tolist() == [[0, 2]] * 4
