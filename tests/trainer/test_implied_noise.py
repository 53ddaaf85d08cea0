"""The dial's coordinate log ν, cell by cell: what the least expected loss of every family × weight × sampler is, and
that λ puts p(y|x) back [METHODS §9; BM20 Theorem 1; R21 Lemma 2].

Logits are free, one for every (x, y). A row's negatives are every label as often as it is drawn on average, of M
draws, so that the real `Objective` computes the expectation over draws: exactly for decoupled losses; for softmax,
whose logarithm is outside, the limit of many draws. All these losses are convex: where the gradient is 0 the loss is
least. Legend: `X` queries, `L` labels, `M` draws, `N` rows, `S` tables of logits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from keras import ops
from scipy.optimize import minimize
from scipy.special import expit

from longtail.trainer import backend
from longtail.trainer.config import LossConfig
from longtail.trainer.losses import WEIGHTS, Objective, SampledLogits
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.implied_noise import (
    compute_q_exponent,
    compute_slope,
    implied_noise,
    name_tree_noise,
)
from longtail.trainer.losses.weights import LogProbabilities
from longtail.trainer.sampling import SAMPLERS, SamplerSetup

PI = np.array([144, 64, 36, 16, 9, 4, 1]) / 274
L = len(PI)
DATA = np.array([
    [0.30, 0.05, 0.20, 0.08, 0.15, 0.12, 0.10],
    [0.10, 0.25, 0.04, 0.18, 0.06, 0.16, 0.21],
])  # fmt: skip
"""p(y|x), in another order than π and than p/π."""
X = len(DATA)

DRAWS: dict[str, np.ndarray] = {
    "in_batch": np.array([144, 64, 36, 16, 9, 4, 1]),
    "uniform": np.full(L, 40),
    "popularity": np.array([12, 8, 6, 4, 3, 2, 1]) * 8,
    "mixed": np.array([144, 64, 36, 16, 9, 4, 1]) + 40,
    "full": np.ones(L, int),
}
"""How often every label is drawn on average: π·274, 280/L, (π^½ ∝ √144 : √64 : …)·288, π·274 + 280/L, once."""
ARGUMENTS: dict[str, dict[str, float]] = {
    "logit_adjusted": {"tau": 0.5}, "equalised": {"power": 2}, "adaptive": {"exponent": 0.5},
}  # fmt: skip
COLUMN: dict[str, np.ndarray] = {
    "importance": np.ones(L), "relative": np.ones(L), "tail": PI, "logit_adjusted": PI**0.5, "equalised": PI**2,
    "adaptive": np.ones(L),
}  # fmt: skip
"""q·col of weights that divide by q [R21 Prop. 4]; that of `unit` and `constant` is q."""
CELLS = [(sampler, weight) for sampler in DRAWS for weight in WEIGHTS]


def compute_q(sampler: str) -> np.ndarray:
    return DRAWS[sampler] / DRAWS[sampler].sum()


def expect_noise(sampler: str, weight: str) -> np.ndarray:
    """ν of all but pairwise losses."""
    return compute_column(sampler, weight) / compute_column(sampler, weight).sum()


def compute_row(sampler: str, weight: str) -> np.ndarray:
    """r of the expected loss `φ(f_y) + r_y Σ_y' q_y' col_y' φ(−f_y')`; with hits masked, over y' ≠ y [METHODS §2.2]."""
    return {
        "unit": np.full(L, DRAWS[sampler].sum()), "relative": DRAWS[sampler].astype(float), "tail": 1 / PI,
        "logit_adjusted": PI**-0.5, "adaptive": PI**-0.5,
    }.get(weight, np.ones(L))  # fmt: skip


def compute_column(sampler: str, weight: str) -> np.ndarray:
    """q·col, not normalised."""
    return COLUMN.get(weight, compute_q(sampler))


def build_objective(family: str, weight: str, **arguments: Any) -> Objective:
    return Objective(family, weight, arguments, ARGUMENTS.get(weight, {}))


def measure_noise(sampler: str, objective: Objective) -> np.ndarray:
    batch, more = (275, {"negatives": 280}) if sampler == "mixed" else (300, {"negatives": 280})
    arguments = {"popularity": more | {"alpha": 0.5}, "uniform": more, "mixed": more}.get(sampler, {})
    log_q_L = SAMPLERS[sampler](SamplerSetup(np.log(PI), batch), **arguments).log_q_L
    return np.exp(implied_noise(objective, np.log(PI), log_q_L))


@functools.cache
def list_rows(sampler: str) -> tuple[np.ndarray, ...]:
    """x, y of all rows [N], their chance [N], and the labels of the M draws."""
    x, y = np.repeat(np.arange(X), L), np.tile(np.arange(L), X)
    return x, y, DATA[x, y].astype(np.float32), np.repeat(np.arange(L), DRAWS[sampler])


def gradients(scores_SXL: np.ndarray, sampler: str, objective: Objective, *, mask: bool) -> np.ndarray:
    """Of the expected losses of several tables of logits, by every logit, float64 [S, X, L]."""
    x, y, chance_N, drawn_M = list_rows(sampler)
    tables = len(scores_SXL)
    x, y, chance_N = (np.arange(tables)[:, None] * X + x).ravel(), np.tile(y, tables), np.tile(chance_N, tables)
    log_pi_L, log_q_L = np.log(PI).astype(np.float32), np.log(compute_q(sampler)).astype(np.float32)
    hits_NM = (y[:, None] == drawn_M) & mask

    def expected(rows: list[Any]) -> tuple[Any, Any]:
        flat = ops.reshape(rows[0], (-1,))
        logits = ops.take(flat, x * L + y), ops.take(flat, x[:, None] * L + drawn_M)
        losses_N = objective(
            SampledLogits(*logits, hits_NM, log_pi_L[y], log_pi_L[drawn_M], log_q_L[y], log_q_L[drawn_M])
        )
        return ops.sum(losses_N * chance_N), losses_N

    _, (gradient,), _ = backend.value_and_gradients(
        expected, [ops.convert_to_tensor(scores_SXL.astype(np.float32))], []
    )
    return ops.convert_to_numpy(gradient).astype(np.float64)


def assert_least(scores_XL: np.ndarray, sampler: str, objective: Objective, *, mask: bool) -> None:
    """The gradient is 0, to what float32 leaves of the sums that cancel there."""
    tables_SXL = np.stack([scores_XL, scores_XL + 0.25 * np.cos(np.arange(L))])
    found_XL, apart_XL = gradients(tables_SXL, sampler, objective, mask=mask)
    np.testing.assert_allclose(found_XL / np.abs(apart_XL).max(), 0, atol=2e-4)


def assert_dial(scores_XL: np.ndarray, sampler: str, objective: Objective, learned_XL: np.ndarray = DATA) -> None:
    """λ of the theory ranks by p, λ = 0 by p/ν; where odds are learned, by odds/ν."""
    noise_L = measure_noise(sampler, objective)
    removed_XL = scores_XL + compute_slope(objective) * np.log(noise_L)
    np.testing.assert_array_equal(removed_XL.argsort(axis=1), DATA.argsort(axis=1))
    np.testing.assert_array_equal(scores_XL.argsort(axis=1), (learned_XL / noise_L).argsort(axis=1))


def remove_noise(scores_XL: np.ndarray, sampler: str, objective: Objective) -> np.ndarray:
    """`f + λ·log ν` at the λ of the theory, less its mean over labels."""
    return centred(scores_XL + compute_slope(objective) * np.log(measure_noise(sampler, objective)))


def centred(scores_XL: np.ndarray) -> np.ndarray:
    return scores_XL - scores_XL.mean(axis=1, keepdims=True)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_the_noise_is_q_times_the_weight_s_column(sampler: str, weight: str) -> None:
    for family in ("softmax", "logistic", "exponential", "hinge", "contrastive"):
        found_L = measure_noise(sampler, build_objective(family, weight))
        np.testing.assert_allclose(found_L, expect_noise(sampler, weight), rtol=1e-5)
        assert found_L.sum() == pytest.approx(1)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_a_pairwise_loss_has_the_row_in_its_noise(sampler: str, weight: str) -> None:
    """Two labels meet as (y, y') and as (y', y): `f_y − f_y' = link·log[p r/(q col)]_y − the same of y'`, exactly."""
    expected_L = compute_column(sampler, weight) / compute_row(sampler, weight)
    for family, link in (("logistic", 1.0), ("exponential", 0.5)):
        objective = build_objective(family, weight, pairwise=True)
        scores_XL = link * np.log(DATA / expected_L)

        np.testing.assert_allclose(measure_noise(sampler, objective), expected_L / expected_L.sum(), rtol=1e-4)
        assert_least(scores_XL, sampler, objective, mask=True)
        assert_dial(scores_XL, sampler, objective)
        np.testing.assert_allclose(remove_noise(scores_XL, sampler, objective), centred(link * np.log(DATA)), atol=1e-4)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_decoupled_losses_that_keep_hits_are_exact(sampler: str, weight: str) -> None:
    """`f = link·[log(p/ν) − log E_y[r_y|x]]`, a constant of the query away: [BM20 Theorem 1] for any weight."""
    row_X1 = (DATA @ compute_row(sampler, weight))[:, None]
    for family, link in (("logistic", 1.0), ("exponential", 0.5)):
        objective = build_objective(family, weight)
        scores_XL = link * np.log(DATA / compute_column(sampler, weight) / row_X1)

        assert_least(scores_XL, sampler, objective, mask=False)
        assert_dial(scores_XL, sampler, objective)
        np.testing.assert_allclose(remove_noise(scores_XL, sampler, objective), centred(link * np.log(DATA)), atol=1e-4)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_the_bilateral_softmax_is_exact_for_every_weight(sampler: str, weight: str) -> None:
    """`f = log(p/ν)`, a constant of the query away: the weight's row is a constant of the loss."""
    objective = build_objective("bilateral_softmax", weight)
    scores_XL = np.log(DATA / compute_column(sampler, weight))

    assert_least(scores_XL, sampler, objective, mask=False)
    assert_dial(scores_XL, sampler, objective)
    np.testing.assert_allclose(remove_noise(scores_XL, sampler, objective), centred(np.log(DATA)), atol=1e-4)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_decoupled_losses_that_mask_hits_learn_odds(sampler: str, weight: str) -> None:
    """`f = link·[log(p/ν) − log(E_y[r_y|x] − p r)]`. Where r is the same for every label that is the log-odds of p, in
    the order of p. For other weights it is off by that second term's spread, and in p's order only where p r ≪ E[r].
    """
    row_L = compute_row(sampler, weight)
    rest_XL = (DATA @ row_L)[:, None] - DATA * row_L
    for family, link in (("logistic", 1.0), ("exponential", 0.5)):
        objective = build_objective(family, weight)
        scores_XL = link * np.log(DATA / compute_column(sampler, weight) / rest_XL)

        assert_least(scores_XL, sampler, objective, mask=True)
        np.testing.assert_allclose(
            remove_noise(scores_XL, sampler, objective), centred(link * np.log(DATA / rest_XL)), atol=1e-4
        )
        if np.ptp(row_L) < 1e-9:
            odds_XL = DATA / (1 - DATA)
            np.testing.assert_allclose(
                remove_noise(scores_XL, sampler, objective), centred(link * np.log(odds_XL)), atol=1e-4
            )
            assert_dial(scores_XL, sampler, objective, odds_XL)


def softmax_scores(sampler: str, weight: str, *, mask: bool, times: int = 1) -> np.ndarray:
    """f of least `Σ_y p_y log[1 + Σ_y' ρ_yy' e^(f_y' − f_y)]`, in float64; the sum over y' ≠ y with hits masked."""
    row_L, col_L = compute_row(sampler, weight) * times, compute_column(sampler, weight)
    rho_LL = row_L[:, None] * col_L * (1 - np.eye(L) if mask else 1)

    def loss(f_L: np.ndarray, p_L: np.ndarray) -> tuple[float, np.ndarray]:
        terms_LL = rho_LL * np.exp(f_L[None] - f_L[:, None])
        chance_LL = p_L[:, None] * terms_LL / (1 + terms_LL.sum(axis=1, keepdims=True))
        return p_L @ np.log1p(terms_LL.sum(axis=1)), chance_LL.sum(axis=0) - chance_LL.sum(axis=1)

    scores = [minimize(loss, np.log(p_L / col_L), args=(p_L,), jac=True, method="BFGS", options={"gtol": 1e-9}).x
             for p_L in DATA]  # fmt: skip
    return np.array(scores)


@pytest.mark.parametrize("mask", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["mask", "keep"])
@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_softmax_is_exact_up_to_the_knee(sampler: str, weight: str, mask: bool) -> None:
    """With s = softmax(f + log ν) and a = r·q·col, what a label weighs as a negative of itself, the least loss is at
    `s·(1 + (1/a − [masked])·s) ∝ p`. With hits masked that is s = p exactly where a = 1: `importance`, `tail` and
    `logit_adjusted` through any sampler. It is in the order of p where a is the same for every label. Elsewhere the
    bracket, the knee of softplus, is what λ does not remove; it is 1 as far as p ≪ a and, masked, p ≪ 1.
    """
    objective = build_objective("softmax", weight)
    scores_XL = softmax_scores(sampler, weight, mask=mask)
    a_L = compute_row(sampler, weight) * compute_column(sampler, weight)
    share_XL = np.exp(scores_XL) * compute_column(sampler, weight)
    share_XL /= share_XL.sum(axis=1, keepdims=True)
    knee_XL = 1 + (1 / a_L - mask) * share_XL

    assert_least(scores_XL, sampler, objective, mask=mask)
    np.testing.assert_allclose(centred(np.log(share_XL * knee_XL)), centred(np.log(DATA)), atol=1e-4)
    np.testing.assert_allclose(remove_noise(scores_XL, sampler, objective), centred(np.log(DATA / knee_XL)), atol=1e-4)
    if np.ptp(a_L) < 1e-9:
        found_XL = remove_noise(scores_XL, sampler, objective)
        np.testing.assert_array_equal(found_XL.argsort(axis=1), DATA.argsort(axis=1))
    if mask and weight in ("importance", "tail", "logit_adjusted"):
        assert_dial(scores_XL, sampler, objective)


@pytest.mark.parametrize("sampler", DRAWS)
def test_nce_learns_the_probabilities_themselves(sampler: str) -> None:
    """`f = log p`, nothing to remove (Gutmann and Hyvärinen 2010)."""
    objective = build_objective("nce", "unit")

    assert_least(np.log(DATA), sampler, objective, mask=False)
    np.testing.assert_allclose(measure_noise(sampler, objective), 1 / L)


def test_a_sampler_that_never_draws_the_positive_draws_the_others_more_often() -> None:
    """q_y'/(1 − q_y), or (1 − q_y⁵)/(1 − q_y) where five draws in a row may hit: a factor of the row, which only
    pairwise losses keep.
    """
    sampler = SAMPLERS["popularity"](SamplerSetup(np.log(PI), 300), negatives=280, exclude_positive=True)
    log_miss_L = ops.convert_to_numpy(sampler.log_miss(ops.convert_to_tensor(sampler.log_q_L)))

    for pairwise, expected_L in ((True, PI * (1 - PI) / (1 - PI**5)), (False, PI)):
        for weight in ("unit", "constant"):
            objective = build_objective("logistic", weight, pairwise=pairwise)
            found_L = np.exp(implied_noise(objective, np.log(PI), sampler.log_q_L, log_miss_L))
            np.testing.assert_allclose(found_L, expected_L / expected_L.sum(), rtol=1e-5)
        objective = build_objective("logistic", "importance", pairwise=pairwise)
        found_L = np.exp(implied_noise(objective, np.log(PI), sampler.log_q_L, log_miss_L))
        np.testing.assert_allclose(found_L, 1 / L, rtol=1e-5)


@pytest.mark.parametrize("sampler", DRAWS)
def test_weights_of_pairs_are_in_the_noise(sampler: str) -> None:
    """p(y|x)·π_y^−e in place of p(y|x): with reweight e, ν has the factor π^e, whatever else is in it."""
    for family, weight, column_L in (("softmax", "importance", np.ones(L)), ("logistic", "unit", compute_q(sampler))):
        objective = build_objective(family, weight)
        found_L = np.exp(implied_noise(objective, np.log(PI), np.log(compute_q(sampler)), reweight=0.5))
        expected_L = column_L * PI**0.5
        np.testing.assert_allclose(found_L, expected_L / expected_L.sum(), rtol=1e-5)


_NEEDED = {key: {"negatives": 280} for key in ("uniform", "popularity", "mixed")}


@pytest.mark.parametrize("pairwise", [False, True], ids=["", "pairwise"])
@pytest.mark.parametrize("family", ["logistic", "softmax"])
@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_recipes_know_constant_noise_without_keras(sampler: str, weight: str, family: str, pairwise: bool) -> None:
    """`LossConfig.calibrated_at` goes by names what the noise says in numbers: 0 where ν is uniform."""
    if pairwise and family == "softmax":
        return
    arguments = {"pairwise": True} if pairwise else {}
    loss = LossConfig.model_validate({
        "family": {"name": family, **arguments}, "sampler": {"name": sampler, **_NEEDED.get(sampler, {})},
        "weight": {"name": weight, **ARGUMENTS.get(weight, {})},
    })  # fmt: skip
    log_nu_L = implied_noise(
        Objective(family, weight, arguments, ARGUMENTS.get(weight, {})), np.log(PI), np.log(compute_q(sampler))
    )
    assert loss.calibrated_at == (0.0 if np.ptp(log_nu_L) < 1e-6 else 1.0)


@pytest.mark.parametrize("reweight", [0.0, 1.0])
@pytest.mark.parametrize("pairwise", [False, True], ids=["", "pairwise"])
@pytest.mark.parametrize(
    ("weight", "arguments"),
    [
        ("logit_adjusted", {"tau": 0}), ("logit_adjusted", {"tau": -0.5}), ("equalised", {"power": 0}),
        ("adaptive", {"exponent": 0}), ("adaptive", {"exponent": 0, "scale": 2}), ("adaptive", {"scale": 2}),
        ("tail", {}), ("relative", {}),
    ],
)  # fmt: skip
def test_constant_noise_with_parameters_reweighting_and_a_tree(
    weight: str, arguments: dict[str, float], pairwise: bool, reweight: float
) -> None:
    """Beside a tree scores are log-probabilities at λ = the power of q where that is all of ν; otherwise at none."""
    family = {"name": "logistic", **({"pairwise": True} if pairwise else {})}
    objective = Objective("logistic", weight, {"pairwise": True} if pairwise else {}, arguments)

    def loss(**sampler: Any) -> LossConfig:
        return LossConfig.model_validate(
            {"family": family, "sampler": sampler, "weight": {"name": weight, **arguments}, "reweight": reweight}
        )

    log_nu_L = implied_noise(objective, np.log(PI), np.log(compute_q("mixed")), reweight=reweight)
    assert loss(name="mixed", negatives=280).calibrated_at == (0.0 if np.ptp(log_nu_L) < 1e-6 else 1.0)

    beside_L, power = implied_noise(objective, np.log(PI), None, reweight=reweight), compute_q_exponent(objective)
    tree = loss(name="adversarial", negatives=1)
    assert (tree.explain_uncalibrated() is None) == (np.ptp(beside_L) < 1e-6 and power in (0, 1))
    if tree.explain_uncalibrated() is None:
        assert tree.calibrated_at == power


def test_the_name_of_tree_noise_has_power_and_label_noise() -> None:
    """The dial is the tree's whatever training divided by; what μ has to remove stands behind it."""
    pairwise = Objective("logistic", "relative", {"pairwise": True})
    for objective, reweight, name in [
        (Objective("logistic", "unit"), 0, "p_n(y|x)"), (Objective("nce", "unit"), 0, "p_n(y|x)^0"),
        (Objective("logistic", "unit"), 0.5, "p_n(y|x) · π^0.5"), (Objective("softmax", "tail"), 0, "p_n(y|x)^0 · π"),
        (pairwise, 0, "p_n(y|x)^-1"),
    ]:  # fmt: skip
        assert name_tree_noise(objective, np.log(PI), reweight=reweight) == name


def test_in_batch_negatives_of_unit_weight_have_pi_to_the_bit() -> None:
    log_pi_L = np.log(PI)
    log_q_L = SAMPLERS["in_batch"](SamplerSetup(log_pi_L, 300)).log_q_L

    assert implied_noise(Objective("softmax", "unit"), log_pi_L, log_q_L).tolist() == log_pi_L.tolist()


def test_labels_that_are_no_negatives_have_the_least_noise_of_the_others() -> None:
    objective = Objective("softmax", "equalised", weight_arguments={"threshold": 0.04})
    expected_L = np.array([144, 64, 36, 16, 16, 16, 16])

    np.testing.assert_allclose(np.exp(implied_noise(objective, np.log(PI), None)), expected_L / 308, rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "power"),
    [
        (Objective("logistic", "unit"), 1), (Objective("softmax", "constant"), 1), (Objective("logistic", "tail"), 0),
        (Objective("nce", "unit"), 0), (Objective("logistic", "relative", {"pairwise": True}), -1),
    ],
)  # fmt: skip
def test_the_tree_is_in_the_noise_unless_the_weight_cancels_it(objective: Objective, power: float) -> None:
    assert compute_q_exponent(objective) == power


TREE = np.array([[5, 3, 8, 2, 4, 1, 7], [2, 6, 1, 9, 3, 5, 4]]) / 30
"""q of `adversarial` and, at its optimum, what stands for that of `model`: a distribution for each query."""
ENUMERATED: dict[str, tuple[dict[str, Any], np.ndarray, float]] = {
    "in_batch": ({}, np.stack([PI, PI]), 274), "cross_batch": ({"negatives": 280}, np.stack([PI, PI]), 274),
    "uniform": ({"negatives": 280}, np.full((X, L), 1 / L), 280), "full": ({}, np.full((X, L), 1 / L), L),
    "popularity": ({"negatives": 280, "alpha": 0.5}, np.stack([compute_q("popularity")] * X), 280),
    "mixed": ({"negatives": 280}, np.stack([compute_q("mixed")] * X), 554),
    "uniform, others": ({"negatives": 280, "exclude_positive": True}, np.full((X, L), 1 / L), 280),
    "popularity, others": (
        {"negatives": 280, "alpha": 0.5, "exclude_positive": True}, np.stack([compute_q("popularity")] * X), 280,
    ),
    "adversarial": ({"negatives": 280}, TREE, 280), "model": ({"negatives": 280}, TREE, 280),
    "minimum_variance": ({"negatives": 280}, TREE, 280),
}  # fmt: skip
"""`[loss.sampler]` beside its name, q of every query, and draws of a row."""


def optimum(loss: LossConfig, p_L: np.ndarray, q_L: np.ndarray, m: float, *, never: bool) -> np.ndarray:
    """f of least expected loss of a query in float64, its gradient by hand; the limit of many draws for softmax."""
    log_pi_L, log_q_L = np.log(PI).astype(np.float32), np.log(q_L).astype(np.float32)
    log_miss_L = np.log1p(-q_L) if never else np.zeros(L)
    log_probabilities = LogProbabilities(
        log_pi_L, log_pi_L, log_q_L, log_q_L, log_miss_L.astype(np.float32), np.full(L, np.log(m))
    )
    weight = WEIGHTS[loss.weight.name](log_probabilities, **loss.weight.arguments)
    row_L, col_L = (ops.convert_to_numpy(part).astype(np.float64) for part in weight)
    rho_LL = m * np.exp(row_L[:, None] + col_L + np.log(q_L) - log_miss_L[:, None])
    if loss.resolved_hits == "mask" or loss.family.pairwise:
        rho_LL *= 1 - np.eye(L)
    share_L = p_L * PI**-loss.reweight
    shift_L = np.log(m * q_L) if loss.family.name == "nce" else np.zeros(L)
    kind = "pairwise" if loss.family.pairwise else "decoupled" if loss.family.name in ("logistic", "nce") else "softmax"
    return least(kind, rho_LL.tobytes(), share_L.tobytes(), shift_L.tobytes())


@functools.cache
def least(kind: str, *arrays: bytes) -> np.ndarray:
    """f where the expected loss of a query is least; many settings of a recipe are one loss."""
    rho_LL, share_L, shift_L = (np.frombuffer(array) for array in arrays)
    rho_LL = rho_LL.reshape(L, L)

    def value(f_L: np.ndarray) -> tuple[float, np.ndarray]:
        gaps_LL, g_L = f_L[None] - f_L[:, None], f_L - shift_L
        if kind == "pairwise":
            losses_L1, pull_LL = (
                share_L[:, None] * rho_LL * np.logaddexp(0, gaps_LL),
                share_L[:, None] * rho_LL * expit(gaps_LL),
            )
        elif kind == "decoupled":
            push_L = share_L @ rho_LL
            total = share_L @ np.logaddexp(0, -g_L) + push_L @ np.logaddexp(0, g_L)
            return total, push_L * expit(g_L) - share_L * expit(-g_L)
        else:
            terms_LL = rho_LL * np.exp(gaps_LL)
            total_L1 = 1 + terms_LL.sum(axis=1, keepdims=True)
            losses_L1, pull_LL = share_L[:, None] * np.log(total_L1), share_L[:, None] * terms_LL / total_L1
        return losses_L1.sum(), pull_LL.sum(axis=0) - pull_LL.sum(axis=1)

    return np.asarray(minimize(value, np.zeros(L), jac=True, method="BFGS", options={"gtol": 1e-10}).x)


def list_losses(sampler: str) -> Iterator[LossConfig]:
    """Every weight × family × pairwise form × hits × reweight that a recipe may have with it."""
    for weight, family, pairwise, hits, reweight in itertools.product(
        WEIGHTS, LOSSES, (False, True), ("mask", "keep", "mask_known"), (0.0, 0.5)
    ):
        sections = {
            "sampler": ENUMERATED[sampler][0] | {"name": sampler.partition(",")[0]}, "reweight": reweight, "hits": hits,
            "weight": {"name": weight, **ARGUMENTS.get(weight, {})},
            "family": {"name": family} | ({"pairwise": True} if pairwise else {}),
        }  # fmt: skip
        with contextlib.suppress(ValueError):
            yield LossConfig.model_validate(sections)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ENUMERATED)
def test_exactly_calibrated_recipes_recover_probabilities(sampler: str) -> None:
    """`f + λ·log ν = log p` at the λ of `calibrated_at`, to 1e-4 nats, of every cell that
    `explain_uncalibrated` lets pass; and
    of the losses that are minimised here, no other."""
    passed, off = 0, list[str]()
    for loss in list_losses(sampler):
        reason, (_, q_XL, m) = loss.explain_uncalibrated(), ENUMERATED[sampler]
        plain = loss.family.name in ("softmax", "logistic", "nce", "augment_and_reduce")
        if reason is not None and (not plain or loss.resolved_hits == "mask_known" or sampler == "model"):
            continue
        assert plain, loss
        never = loss.sampler.never_the_positive
        f_XL = np.array([optimum(loss, p_L, q_L, m, never=never) for p_L, q_L in zip(DATA, q_XL, strict=True)])
        of_query = sampler in ("adversarial", "model", "minimum_variance")
        log_nu_L = implied_noise(
            loss.objective(), np.log(PI), None if of_query else np.log(q_XL[0]),
            np.log1p(-q_XL[0]) if never and not of_query else None, reweight=loss.reweight,
        )  # fmt: skip
        removed_XL = f_XL + loss.calibrated_at * (np.log(q_XL) if sampler == "adversarial" else log_nu_L)
        error = np.abs(centred(removed_XL - np.log(DATA))).max()
        passed += reason is None
        if (error < 1e-4) != (reason is None):
            off.append(f"{loss}: {error:.1e} nats, {reason}")
    assert not off, "\n".join(off)
    assert passed >= 6


def test_the_slope_where_negatives_are_drawn_by_the_model_itself() -> None:
    """q ∝ e^(s·f): f = k·log(p/q^power) has f on both sides. At the fixed point the expected loss is least."""
    for family, weight, s, slope in (
        ("logistic", "unit", 1, 1 / 2), ("logistic", "constant", 1, 1 / 2), ("exponential", "unit", 1, 1 / 3),
        ("logistic", "unit", 0.25, 0.8), ("logistic", "importance", 1, 1), ("hinge", "unit", 1, 0),
    ):  # fmt: skip
        objective = build_objective(family, weight)
        assert compute_slope(objective, power_of_scores=s) == pytest.approx(slope)
        if family == "logistic":
            loss = LossConfig.model_validate(
                {"family": family, "weight": weight, "sampler": {"name": "model", "negatives": 280}}
            )
            for p_L in DATA:
                q_L = p_L ** (slope * s) / (p_L ** (slope * s)).sum()
                f_L = optimum(loss, p_L, q_L, 280, never=False)
                np.testing.assert_allclose(centred(f_L[None]), centred(slope * np.log(p_L)[None]), atol=1e-5)
    relative = build_objective("logistic", "relative", pairwise=True)  # f = log p + f has no solution
    assert compute_slope(relative, power_of_scores=1.0) == 0
