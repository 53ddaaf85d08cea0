import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from longtail.trainer.losses import WEIGHTS, LogProbabilities
from longtail.trainer.sampling import SAMPLERS, SamplerSetup

PI_POSITIVE, PI_NEGATIVE = [Fraction(1, 2), Fraction(1, 4)], [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]
Q_POSITIVE, Q_NEGATIVE = [Fraction(1, 3), Fraction(1, 6)], [Fraction(1, 3), Fraction(1, 6), Fraction(1, 2)]
M = [3, 2]

F = Fraction
BY_HAND: dict[str, tuple[str, dict[str, float], list[list[Any]]]] = {
    "unit": ("unit", {}, [[1, 1, 1], [1, 1, 1]]),
    "constant": ("constant", {}, [[F(1, 3)] * 3, [F(1, 2)] * 3]),
    "relative": ("relative", {}, [[1, 2, F(2, 3)], [F(1, 2), 1, F(1, 3)]]),
    "importance: (1 − q_y)/m is 2/9 and 5/12": (
        "importance", {}, [[F(2, 3), F(4, 3), F(4, 9)], [F(5, 4), F(5, 2), F(5, 6)]],
    ),
    "tail": ("tail", {}, [[F(2, 3), F(2, 3), F(1, 9)], [F(5, 2), F(5, 2), F(5, 12)]]),
    "τ = 1": ("logit_adjusted", {}, [[F(2, 3), F(2, 3), F(1, 9)], [F(5, 2), F(5, 2), F(5, 12)]]),
    "τ = 2": ("logit_adjusted", {"tau": 2}, [[F(2, 3), F(1, 3), F(1, 36)], [5, F(5, 2), F(5, 24)]]),
    "equalised": ("equalised", {}, [[F(1, 3), F(1, 3), F(1, 18)], [F(5, 8), F(5, 8), F(5, 48)]]),
    "equalised, π² of labels from ¼ on": (
        "equalised", {"power": 2, "threshold": 0.25}, [[F(1, 6), F(1, 12), 0], [F(5, 16), F(5, 32), 0]],
    ),
    "adaptive": ("adaptive", {}, [
        [2 / 3 * 2**0.25, 4 / 3 * 2**0.25, 4 / 9 * 2**0.25], [5 / 4 * 4**0.25, 5 / 2 * 4**0.25, 5 / 6 * 4**0.25],
    ]),
    "adaptive, π_y^−1": ("adaptive", {"exponent": 1}, [[F(4, 3), F(8, 3), F(8, 9)], [5, 10, F(10, 3)]]),
}  # fmt: skip

PI = [Fraction(4, 10), Fraction(3, 10), Fraction(2, 10), Fraction(1, 10)]
L = len(PI)


def implicit(sampler: str, weight: str, *, m: int, positive: int, negative: int) -> float:
    """ρ of METHODS §2.2 for draws that are never the positive: what a negative weighs in the implicit loss."""
    pi, pi_negative, others = PI[positive], PI[negative], 1 - PI[positive]
    rho = {
        "in_batch": {
            "unit": m * pi_negative / others,
            "constant": pi_negative / others,
            "relative": m * pi / others,
        },
        "uniform": {"unit": Fraction(m, L - 1), "constant": Fraction(1, L - 1), "relative": Fraction(m, L - 1)},
    }[sampler] | {
        "importance": 1,
        "tail": pi_negative / pi,
        "logit_adjusted": pi_negative / pi,
        "equalised": pi_negative,
        "adaptive": float(pi) ** -0.25,
    }
    return float(rho[weight])


def logs(values: list[Fraction]) -> np.ndarray:
    return np.log(np.array(values, np.float64)).astype(np.float32)


def log_probabilities(**changes: np.ndarray) -> LogProbabilities:
    by_hand = {
        "pi_positive": logs(PI_POSITIVE), "pi_negative": logs(PI_NEGATIVE),
        "q_positive": logs(Q_POSITIVE), "q_negative": logs(Q_NEGATIVE),
        "miss": logs([1 - q for q in Q_POSITIVE]), "m": logs([Fraction(m) for m in M]),
    }  # fmt: skip
    return LogProbabilities(**(by_hand | changes))


def compute_weights(name: str, log: LogProbabilities, **arguments: float) -> np.ndarray:
    """w_yy', [B, M]."""
    weight = WEIGHTS[name](log, **arguments)
    return np.exp(np.asarray(weight.row)[:, None] + np.asarray(weight.col))


def test_every_weight_is_worked_by_hand() -> None:
    assert {name for name, _, _ in BY_HAND.values()} == set(WEIGHTS)


@pytest.mark.parametrize(("name", "arguments", "expected"), BY_HAND.values(), ids=BY_HAND)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
def test_weights_by_hand(name: str, arguments: dict[str, float], expected: list[list[Any]], per_row: bool) -> None:
    log = log_probabilities()
    if per_row:
        log = log._replace(pi_negative=np.stack([log.pi_negative] * 2), q_negative=np.stack([log.q_negative] * 2))

    np.testing.assert_allclose(compute_weights(name, log, **arguments), np.array(expected, np.float64), rtol=2e-6)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("sampler", ["in_batch", "uniform"])
@pytest.mark.parametrize("m", [1, 2])
def test_the_expected_sum_over_all_draws_is_the_implicit_loss(sampler: str, weight: str, m: int) -> None:
    """Σ over every sequence of m draws but the positive: its probability × Σ w·e^f equals Σ ρ·e^f [R21, Table 2]."""
    arguments = {"negatives": m} if sampler == "uniform" else {}
    log_q_L = SAMPLERS[sampler](SamplerSetup(np.log(np.array(PI, np.float64)), 4), **arguments).log_q_L
    q_L = {"in_batch": PI, "uniform": [Fraction(1, L)] * L}[sampler]
    log_pi_L, exp_f_L = logs(PI), np.array([0.5, 2.0, 1.25, 7.0])

    for positive in range(L):
        others = [label for label in range(L) if label != positive]
        log = LogProbabilities(
            pi_positive=log_pi_L[[positive]], pi_negative=log_pi_L, q_positive=log_q_L[[positive]], q_negative=log_q_L,
            miss=logs([1 - q_L[positive]]), m=logs([Fraction(m)]),
        )  # fmt: skip
        terms_L = compute_weights(weight, log)[0] * exp_f_L
        mean = sum(
            float(math.prod(q_L[label] / (1 - q_L[positive]) for label in drawn)) * terms_L[list(drawn)].sum()
            for drawn in itertools.product(others, repeat=m)
        )
        rho = [implicit(sampler, weight, m=m, positive=positive, negative=other) for other in others]
        assert mean == pytest.approx(np.dot(rho, exp_f_L[others]), rel=1e-5)


@pytest.mark.parametrize("pi", [0.04, 0.0001])
def test_the_margin_of_adaptive_with_a_scale_is_in_logits(pi: float) -> None:
    """LDAM's Δ_y = C n_y^−¼ of N = 10,000 pairs and C = 2 [Cao et al. 2019]: log ρ, not ρ, is a power of π."""
    row = np.log(np.float32([pi])), np.log(np.float32([0.5]))
    log = LogProbabilities(row[0], row[1], row[0], row[1], miss=np.float32([0]), m=np.float32([0]))
    margin = np.asarray(WEIGHTS["adaptive"](log, scale=2 * 10_000**-0.25).matrix()).item()

    assert margin == pytest.approx(2 * (10_000 * pi) ** -0.25 - np.log(0.5), rel=1e-5)
