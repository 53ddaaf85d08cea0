"""Check the loss of a batch's logits by hand, beyond the proofs of single papers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.losses import LOSSES, MASKED, WEIGHTS, Mining, Objective, SampledLogits, balance
from tests.trainer import toy
from tests.trainer.toy import LOGITS, OTHERS, L, Y

POSITIVE, NEGATIVE = np.float32([0.3, -0.4]), np.float32([[0.75, -0.2, 0.4, 0.1], [0.5, 0.15, -0.35, 0.65]])
HITS = np.array([[False, False, True, False], [False] * 4])
LOG_PI = np.float32(np.log([0.2, 0.05])), np.float32(np.log([0.1, 0.2, 0.3, 0.05]))
LOG_Q = np.float32(np.log([0.25, 0.1])), np.float32(np.log([0.15, 0.25, 0.2, 0.1]))
BRACKET = math.log(np.exp(LOGITS - LOGITS[Y]).sum())
"""Full softmax cross-entropy of the toy's pair."""

FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LOSSES),
    *((name, {"pairwise": True}) for name in LOSSES if "pairwise" in inspect.signature(LOSSES[name].loss).parameters),
    ("contrastive", {"margin": 0.3}),
    ("ramp", {"margin": 3.0}),
]


def evaluated(
    objective: Objective, positive_B: np.ndarray, negative_BM: np.ndarray, *, dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses [B], and the gradients of their sum by positives and negatives; hits and log-probabilities of two rows
    in turn."""
    turns = len(positive_B) // 2
    hits, log_pi_B, log_q_B = (np.concatenate([part] * turns) for part in (HITS, LOG_PI[0], LOG_Q[0]))
    logs = log_pi_B, LOG_PI[1], log_q_B, LOG_Q[1]

    def total(logits: list[Any]) -> tuple[Any, Any]:
        sides = [ops.cast(side, dtype) for side in logits]
        if LOSSES[objective.family].stateful:
            state = {"log_eta_B": ops.convert_to_tensor(np.float32([1.0, 2.0])), "rate": np.float32(0.5)}
            losses_B, _ = objective.compute_losses(SampledLogits(*sides, hits, *logs), **state)
        else:
            losses_B = objective(SampledLogits(*sides, hits, *logs))
        return ops.sum(losses_B), losses_B

    logits = [ops.convert_to_tensor(np.float32(side)) for side in (positive_B, negative_BM)]
    (_, losses_B), gradients, _ = backend.value_and_gradients(total, logits, [])
    return tuple(ops.convert_to_numpy(array).astype(np.float64) for array in (losses_B, *gradients))


def choose_weight(family: str, default: str) -> str:
    return (LOSSES[family].weights or (default,))[0]


@pytest.mark.slow
@pytest.mark.parametrize("mining", [None, Mining(keep=2, power=1.0)], ids=["", "mined"])
@pytest.mark.parametrize("default", ["unit", "tail"])
@pytest.mark.parametrize(("family", "arguments"), [form for form in FORMS if not LOSSES[form[0]].stateful])
def test_gradients_are_central_differences(
    family: str, arguments: dict[str, Any], default: str, mining: Mining | None
) -> None:
    objective = Objective(family, choose_weight(family, default), arguments, mining=mining, regularizer=0.01)
    _, by_positive, by_negative = evaluated(objective, POSITIVE, NEGATIVE)

    step, logits = 1 / 64, np.column_stack([POSITIVE, NEGATIVE])
    moved = logits + step * np.eye(logits.size).reshape(-1, *logits.shape) * np.array([1, -1])[:, None, None, None]
    rows = moved.reshape(-1, 1 + NEGATIVE.shape[1])
    up, down = evaluated(objective, rows[:, 0], rows[:, 1:])[0].reshape(2, logits.size, len(logits)).sum(axis=-1)
    gradient = np.column_stack([by_positive, by_negative])
    np.testing.assert_allclose(gradient.ravel(), (up - down) / (2 * step), rtol=2e-3, atol=2e-4)
    assert by_negative[0, 2] == 0, "masked"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("family", "arguments"), FORMS)
def test_huge_logits_of_any_precision_stay_finite(family: str, arguments: dict[str, Any], dtype: str) -> None:
    """Logits go up to the largest that the gradient's type holds: 65504 in float16, e^88 in float32."""
    huge = {"exponential": 3.0, "squared_hinge": 1e3, "contrastive": 1e3}.get(family, 3e4)
    if dtype != "float16" and family == "exponential":
        huge = 40.0
    for sign in (1, -1):
        objective = Objective(family, choose_weight(family, "tail"), arguments)
        positive, negative = sign * huge * np.float32([1, -1]), sign * huge * np.float32([[-1, 1, 1, 0], [1, 1, 1, -1]])
        losses_B, by_positive, by_negative = evaluated(objective, positive, negative, dtype=dtype)
        assert np.isfinite(losses_B).all()
        assert np.isfinite(by_positive).all()
        assert np.isfinite(by_negative).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_summed_in_full_precision(dtype: str) -> None:
    """Logits that half precision holds exactly give float32's loss to the digit."""
    exact = np.float32([0.25, -0.5]), np.float32([[0.75, -0.25, 0.5, 0.125], [0.5, 0.125, -0.375, 0.625]])

    assert evaluated(Objective(), *exact, dtype=dtype)[0].tolist() == evaluated(Objective(), *exact)[0].tolist()


@pytest.mark.parametrize(("family", "arguments"), FORMS)
def test_without_negatives_the_positive_s_loss_is_left(family: str, arguments: dict[str, Any]) -> None:
    objective = Objective(family, choose_weight(family, "importance"), arguments)
    everything = SampledLogits(ops.convert_to_tensor(POSITIVE), NEGATIVE + 70, np.ones((2, 4), bool), *LOG_PI, *LOG_Q)
    if LOSSES[family].stateful:
        log_eta_B = np.float32([0.0, 0.0])
        losses_B = objective.compute_losses(everything, log_eta_B=log_eta_B, rate=np.float32(0.5))[0]
    else:
        losses_B = objective(everything)

    u = POSITIVE - np.log([4 * 0.25, 4 * 0.1]) if family == "nce" else POSITIVE
    slope = arguments.get("margin", 1)
    phi = {
        "logistic": np.log1p(np.exp(-u)), "nce": np.log1p(np.exp(-u)), "hinge": 1 - u, "squared_hinge": (1 - u) ** 2,
        "exponential": np.exp(-u), "contrastive": (1 - u) ** 2, "ramp": np.clip(1 - u / slope, 0, 1),
        "bilateral_softmax": -u,
    }.get(family, np.zeros(2))  # fmt: skip
    np.testing.assert_allclose(losses_B, 0 * u if "pairwise" in arguments else phi, rtol=1e-5)


@pytest.mark.parametrize("weight", ["importance", "tail", "logit_adjusted", "relative"])
@pytest.mark.parametrize("rare", ["positive", "negative", "both"])
def test_a_label_of_one_in_a_billion_is_corrected_as_any_other(weight: str, rare: str) -> None:
    """A floor of 1e-6 under probabilities would be wrong by a factor of a thousand."""
    pi, other = (1e-9 if rare in (which, "both") else 0.01 for which in ("positive", "negative"))
    logs = np.float32(np.log([pi])), np.float32(np.log([[other, 0.3]]))
    loss = Objective("softmax", weight)(
        SampledLogits(np.float32([0.5]), np.float32([[-6, 0.25]]), np.zeros((1, 2), bool), *logs, *logs)
    )

    adjusted = [1 / (2 * pi)] * 2
    weights = {
        "importance": [1 / (2 * other), 1 / 0.6], "relative": [pi / other, pi / 0.3], "tail": adjusted,
        "logit_adjusted": adjusted,
    }[weight]  # fmt: skip
    expected = math.log1p(weights[0] * math.exp(-6.5) + weights[1] * math.exp(-0.25))
    assert np.asarray(loss).item() == pytest.approx(expected, rel=1e-5)


def test_nce_by_hand() -> None:
    """`−log σ(f_y − log(m q_y)) − Σ log(1 − σ(f_y' − log(m q_y')))`, with m = 2 and a q of 1e-9."""
    logs = np.float32(np.log([0.25])), np.float32(np.log([[0.5, 1e-9]]))
    loss = Objective("nce")(
        SampledLogits(np.float32([-1]), np.float32([[-2, -20]]), np.zeros((1, 2), bool), *logs, *logs)
    )

    shifted = -1 - math.log(0.5), -2 - math.log(1), -20 - math.log(2e-9)
    expected = math.log1p(math.exp(-shifted[0])) + sum(math.log1p(math.exp(f)) for f in shifted[1:])
    assert np.asarray(loss).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_regularizer_by_hand(dtype: str) -> None:
    """`λ[(f_y + log q_y)² + mean over unmasked negatives of (f_y' + log q_y')²]` [BM20 eq. 6]."""
    positive, negative = np.float32([1, -2]), np.float32([[0.5, 2, 90, 1], [90, 90, 90, 90]])
    hits = np.array([[False, False, True, False], [True] * 4])
    log_q = np.float32([-1, -3]), np.float32([[-2, -1, -1, -4]] * 2)
    logits = SampledLogits(ops.cast(positive, dtype), ops.cast(negative, dtype), hits, *LOG_PI, *log_q)
    added = np.asarray(Objective("logistic", regularizer=0.1)(logits)) - np.asarray(Objective("logistic")(logits))

    np.testing.assert_allclose(added, [0.1 * (0 + (1.5**2 + 1 + 3**2) / 3), 0.1 * 25], rtol=1e-5)


def test_the_regularizer_of_nce_by_hand() -> None:
    """`λ[f_y² + mean f_y'²]`, where f excludes the offset, as in the authors' code."""
    logs = np.float32([-1]), np.float32([[-2, -1]])
    logits = SampledLogits(np.float32([1]), np.float32([[0.5, 2]]), np.zeros((1, 2), bool), *logs, *logs)
    losses_B = [np.asarray(Objective("nce", regularizer=strength, offset=-3.0)(logits)) for strength in (0.0, 0.1)]

    np.testing.assert_allclose(losses_B[1] - losses_B[0], [0.1 * (1 + (0.25 + 4) / 2)], rtol=1e-5)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("sampler", ["in_batch", "uniform", "full"])
def test_at_logits_of_zero_a_positive_balances_its_negatives(sampler: str, weight: str) -> None:
    """The offset's σ pulls up in expectation what it pushes down: `1 − σ(o) = σ(o)·E Σ w` over pairs and draws."""
    pi_L = np.array([0.5, 0.25, 0.125, 0.125])
    log_q_L = np.log(pi_L if sampler == "in_batch" else np.full(4, 1 / 4)).astype(np.float32)
    m = 4 if sampler == "full" else 7
    sigma = 1 / (1 + np.exp(-balance(Objective("logistic", weight), np.log(pi_L), log_q_L, m=m)))
    q_L = np.exp(log_q_L)
    weights_LL = {
        "unit": np.ones((4, 4)), "constant": np.full((4, 4), 1 / m), "relative": q_L[:, None] / q_L,
        "importance": 1 / (m * q_L) + np.zeros((4, 1)), "tail": pi_L / (m * q_L * pi_L[:, None]),
        "logit_adjusted": pi_L / (m * q_L * pi_L[:, None]), "equalised": pi_L / (m * q_L) + np.zeros((4, 1)),
        "adaptive": pi_L[:, None] ** -0.25 / (m * q_L),
    }[weight]  # fmt: skip

    assert 1 - sigma == pytest.approx(sigma * m * (pi_L @ weights_LL @ q_L), rel=1e-5)


def test_only_logits_that_are_log_odds_have_an_offset() -> None:
    pi_L = np.log([0.5, 0.25, 0.125, 0.125])
    offsets = {name: balance(Objective(name, "unit"), pi_L, None, m=8) for name in LOSSES}

    assert {name: offset for name, offset in offsets.items() if offset} == pytest.approx(
        {"logistic": -math.log(8), "nce": -math.log(4)}
    )
    assert balance(Objective("logistic", "unit", {"pairwise": True}), pi_L, None, m=8) == 0
    assert balance(Objective("logistic", "unit", mining=Mining(keep=2)), pi_L, None, m=8) == 0


def augmented(sample: toy.Sample, log_eta: float, *, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Losses and new log η of a sample's rows."""
    rows = len(sample.drawn_BM)
    log_pi, log_q = np.zeros(L, np.float32), sample.log_q_L
    outputs = Objective("augment_and_reduce", "importance").compute_losses(
        SampledLogits(
            np.full(rows, LOGITS[Y], np.float32), LOGITS.astype(np.float32)[sample.drawn_BM], sample.drawn_BM == Y,
            log_pi[np.full(rows, Y)], log_pi[sample.drawn_BM], log_q[np.full(rows, Y)], log_q[sample.drawn_BM],
            log_miss_B=None if sample.log_miss is None else np.full(rows, sample.log_miss, np.float32),
        ),
        log_eta_B=np.full(rows, log_eta, np.float32), rate=np.float32(rate),
    )  # fmt: skip
    return ops.convert_to_numpy(outputs[0]).astype(np.float64), ops.convert_to_numpy(outputs[1]).astype(np.float64)


EVERY = toy.Sample(np.arange(L)[None], np.full(L, -math.log(L), np.float32))


def test_augment_and_reduce_is_unbiased_in_the_sample() -> None:
    """Linear in the sum over negatives, unlike the logarithm: any number of draws will do."""
    for m in (1, 5):
        losses_B, _ = augmented(toy.draw("uniform", rows=30_000, negatives=m, exclude_positive=True), 1.7, rate=1e-30)
        toy.assert_mean(losses_B, 1.7 + math.exp(BRACKET - 1.7) - 1)


@pytest.mark.slow
def test_eta_goes_to_the_bracket() -> None:
    """At once with every label and rate → 1; from samples with a falling rate, and the loss to the softmax."""
    assert augmented(EVERY, 5.0, rate=1 - 1e-6)[1].item() == pytest.approx(BRACKET, abs=1e-4)
    assert augmented(EVERY, 5.0, rate=0.25)[1].item() == pytest.approx(
        math.log(0.75 * math.exp(5) + 0.25 * math.exp(BRACKET)), rel=1e-6
    )  # fmt: skip

    log_eta = math.log(L)
    rows = toy.draw("uniform", rows=400, negatives=5, seed=9, exclude_positive=True)
    for step in range(400):
        row = toy.Sample(rows.drawn_BM[step : step + 1], rows.log_q_L, log_miss=rows.log_miss)
        log_eta = augmented(row, log_eta, rate=min((1 + step) ** -0.9, 1 - 1e-6))[1].item()
    assert log_eta == pytest.approx(BRACKET, abs=0.05)
    assert augmented(EVERY, log_eta, rate=1e-30)[0].item() == pytest.approx(BRACKET, abs=0.002)


@pytest.mark.parametrize("exclude_positive", [False, True])
def test_one_vs_each_is_the_pairwise_logistic(exclude_positive: bool) -> None:
    """`E = Σ_{y' ≠ y} −log σ(f_y − f_y')`, which bounds the softmax (Titsias 2016)."""
    sample = toy.draw("uniform", rows=30_000, negatives=3, exclude_positive=exclude_positive)
    losses_B = sample.losses(Objective("logistic", "importance", {"pairwise": True}))

    one_vs_each = np.log1p(np.exp(LOGITS[OTHERS] - LOGITS[Y])).sum()
    toy.assert_mean(losses_B, one_vs_each)
    assert EVERY.losses(Objective("logistic", "importance", {"pairwise": True})).item() == pytest.approx(one_vs_each)
    assert one_vs_each > BRACKET


def build_phi(name: str, margin: float | None = None) -> Callable[[float], float]:
    width = margin or 1
    return {
        "logistic": lambda u: math.log1p(math.exp(-u)), "hinge": lambda u: max(1 - u, 0),
        "squared_hinge": lambda u: max(1 - u, 0) ** 2, "exponential": lambda u: math.exp(-u),
        "ramp": lambda u: min(max(1 - u / width, 0), 1),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        form
        for form in FORMS
        if not (form[0].endswith("softmax") or LOSSES[form[0]].shifted or LOSSES[form[0]].stateful)
    ],
)
def test_decoupled_losses_by_hand(family: str, arguments: dict[str, Any]) -> None:
    """One positive of 0.5; negatives 2 and −1.5 of weight 3 and ½, one masked."""
    weights = np.float32([[math.log(3), math.log(0.5), MASKED]])
    loss = LOSSES[family].loss(np.float32([0.5]), np.float32([[2, -1.5, 50]]), weights, **arguments)

    if family == "contrastive":
        expected = 0.25 + 3 * (2 - arguments.get("margin", 0)) ** 2
    else:
        phi = build_phi(family, arguments.get("margin"))
        if arguments.get("pairwise"):
            expected = 3 * phi(0.5 - 2) + 0.5 * phi(0.5 + 1.5)
        else:
            expected = phi(0.5) + 3 * phi(-2) + 0.5 * phi(1.5)
    assert np.asarray(loss).item() == pytest.approx(expected, rel=1e-6)
