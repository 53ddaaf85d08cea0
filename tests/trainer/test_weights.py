import itertools
import math
from fractions import Fraction

import keras
import numpy as np
import pytest

from trainer.samplers import SAMPLERS, Catalogue
from trainer.weights import WEIGHTS, LogProbabilities

PI_POSITIVE, PI_NEGATIVE = [Fraction(1, 2), Fraction(1, 4)], [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]
Q_POSITIVE, Q_NEGATIVE = [Fraction(1, 3), Fraction(1, 6)], [Fraction(1, 3), Fraction(1, 6), Fraction(1, 2)]
M = [3, 2]

BY_HAND = {
    "unit": [[1, 1, 1], [1, 1, 1]],
    "constant": [[Fraction(1, 3)] * 3, [Fraction(1, 2)] * 3],
    "importance": [[1, 2, Fraction(2, 3)], [Fraction(3, 2), 3, 1]],
    "relative": [[1, 2, Fraction(2, 3)], [Fraction(1, 2), 1, Fraction(1, 3)]],
    "tail": [[1, 1, Fraction(1, 6)], [3, 3, Fraction(1, 2)]],
}

PI = [Fraction(4, 10), Fraction(3, 10), Fraction(2, 10), Fraction(1, 10)]
L = len(PI)
CELLS = [(sampler, weight) for sampler in ("in_batch", "uniform") for weight in BY_HAND]


def implicit(sampler: str, weight: str, *, m: int, positive: int, negative: int) -> float:
    """ρ of METHODS §2.2: what a negative weighs in the implicit loss of (sampler, weight)."""
    rho = {
        ("in_batch", "unit"): m * PI[negative],
        ("in_batch", "constant"): PI[negative],
        ("in_batch", "importance"): 1,
        ("in_batch", "relative"): m * PI[positive],
        ("in_batch", "tail"): PI[negative] / PI[positive],
        ("uniform", "unit"): Fraction(m, L),
        ("uniform", "constant"): Fraction(1, L),
        ("uniform", "importance"): 1,
        ("uniform", "relative"): Fraction(m, L),
        ("uniform", "tail"): PI[negative] / PI[positive],
    }
    return float(rho[sampler, weight])


def logs(values: list[Fraction]) -> np.ndarray:
    return np.log(np.array(values, np.float64)).astype(np.float32)


def weights_of(name: str, log: LogProbabilities) -> np.ndarray:
    """w_yy', [B, M]."""
    weight = WEIGHTS[name](log)
    row, col = np.asarray(weight.row), np.asarray(weight.col)
    return np.exp(row[:, None] + col)


def sampled_weights(name: str, log_q_L: np.ndarray, positive: int, drawn: list[int]) -> np.ndarray:
    """Weights of drawn labels for one positive under π = PI and the sampler's q."""
    log_pi_L = logs(PI)
    log = LogProbabilities(
        pi_positive=log_pi_L[[positive]], pi_negative=log_pi_L[drawn],
        q_positive=log_q_L[[positive]], q_negative=log_q_L[drawn], m=logs([Fraction(len(drawn))]),
    )  # fmt: skip
    return weights_of(name, log)[0]


def test_every_weight_is_worked_by_hand() -> None:
    assert sorted(WEIGHTS) == sorted(BY_HAND)


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
def test_weights_by_hand(name: str, per_row: bool) -> None:
    def negatives(values: list[Fraction]) -> np.ndarray:
        return np.stack([logs(values)] * 2) if per_row else logs(values)

    log = LogProbabilities(
        pi_positive=logs(PI_POSITIVE), pi_negative=negatives(PI_NEGATIVE),
        q_positive=logs(Q_POSITIVE), q_negative=negatives(Q_NEGATIVE), m=logs([Fraction(m) for m in M]),
    )  # fmt: skip

    np.testing.assert_allclose(weights_of(name, log), np.array(BY_HAND[name], np.float64), rtol=1e-6)


def test_a_label_of_one_in_a_billion_is_corrected_in_full() -> None:
    rare = np.float32([math.log(1e-9)])
    log = LogProbabilities(pi_positive=rare, pi_negative=rare, q_positive=rare, q_negative=rare, m=np.float32([0]))

    assert weights_of("importance", log).item() == pytest.approx(1e9, rel=1e-5)
    assert weights_of("tail", log).item() == pytest.approx(1e9, rel=1e-5)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
@pytest.mark.parametrize("m", [1, 2])
def test_the_expected_sum_over_all_draws_is_the_implicit_loss(sampler: str, weight: str, m: int) -> None:
    """Σ over every multiset of m draws of its probability × Σ w·e^f equals Σ ρ·e^f [R21, Lemma 2 and Table 2]."""
    arguments = {"negatives": m} if sampler == "uniform" else {}
    log_q_L = SAMPLERS[sampler](Catalogue(np.log(np.array(PI, np.float64)), 4), **arguments).log_q_L
    q_L = {"in_batch": PI, "uniform": [Fraction(1, L)] * L}[sampler]
    exp_f_L = np.array([0.5, 2.0, 1.25, 7.0])

    for positive in range(L):
        mean = sum(
            float(math.prod(q_L[label] for label in drawn))
            * (sampled_weights(weight, log_q_L, positive, list(drawn)) @ exp_f_L[list(drawn)])
            for drawn in itertools.product(range(L), repeat=m)
        )
        rho_L = [implicit(sampler, weight, m=m, positive=positive, negative=other) for other in range(L)]
        assert mean == pytest.approx(np.dot(rho_L, exp_f_L), rel=1e-5)


@pytest.mark.parametrize("weight", BY_HAND)
@pytest.mark.parametrize(
    ("sampler", "arguments"), [("uniform", {}), ("popularity", {"alpha": 0.75})], ids=["uniform", "popularity"]
)
def test_the_mean_over_the_sampler_s_own_draws_is_the_implicit_loss(
    sampler: str, arguments: dict[str, float], weight: str
) -> None:
    """As above by Monte Carlo, with what the sampler draws: ρ = m·q·w."""
    draws, m, positive = 40_000, 2, 1
    made = SAMPLERS[sampler](Catalogue(np.log(np.array(PI, np.float64)), draws), negatives=m, shared=False, **arguments)
    exp_f_L = np.array([0.5, 2.0, 1.25, 7.0])
    powers = np.array(PI, np.float64) ** {"uniform": 0, "popularity": 0.75}[sampler]
    q_L, pi_L = powers / powers.sum(), np.array(PI, np.float64)
    w_L = {
        "unit": np.ones(L),
        "constant": np.full(L, 1 / m),
        "importance": 1 / (m * q_L),
        "relative": q_L[positive] / q_L,
        "tail": pi_L / (m * q_L * pi_L[positive]),
    }[weight]

    drawn = np.asarray(made.draw(keras.random.SeedGenerator(5)))
    weight_L = sampled_weights(weight, made.log_q_L, positive, list(range(L))) * (
        L / m if weight in ("constant", "importance", "tail") else 1
    )
    sums = (weight_L * exp_f_L)[drawn].sum(axis=1)

    assert drawn.shape == (draws, m)
    np.testing.assert_allclose(sums.mean(), m * (q_L * w_L) @ exp_f_L, atol=4 * sums.std() / math.sqrt(draws))
