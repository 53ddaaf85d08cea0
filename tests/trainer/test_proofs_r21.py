"""Disentangling labeling and sampling bias [R21]: every cell of Tables 2 and 3, Lemmas 1 and 2, Theorem 3,
Propositions 4 and 5, of the losses as they are trained.

Hits are masked, so negatives follow q_y'/(1 − q_y), and a row has its own number m of them. All that is
expected is expected given m, row by row. Legend: `B` rows, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from longtail.trainer.losses import WEIGHTS, Objective
from longtail.trainer.sampling import SAMPLERS, SamplerSetup
from tests.trainer import toy
from tests.trainer.toy import LOGITS, OTHERS, PI, L, Sample, Y

ROWS, M = 30_000, 5

SAMPLES: dict[str, Callable[[], Sample]] = {
    "in_batch": lambda: toy.batches(rows=ROWS, size=M + 1),
    "uniform": lambda: toy.draw("uniform", rows=ROWS, negatives=M),
    "uniform but the positive": lambda: toy.draw("uniform", rows=ROWS, negatives=M, exclude_positive=True),
    "popularity": lambda: toy.draw("popularity", rows=ROWS, negatives=M, alpha=0.5),
}
Q = {
    "in_batch": PI,
    "uniform": np.full(L, 1 / 6),
    "uniform but the positive": np.full(L, 1 / 6),
    "popularity": np.sqrt(PI) / np.sqrt(PI).sum(),
}

Rho = Callable[[np.ndarray], np.ndarray]
"""ρ_Yy' of every label [L] or [B, L] from m [B, 1]."""

MARGINS: dict[str, np.ndarray] = {
    "importance": np.ones(L),
    "tail": PI / PI[Y],
    "logit_adjusted": PI / PI[Y],
    "equalised": PI,
    "adaptive": np.full(L, PI[Y] ** -0.25),
}
"""[R21 eq. 6]; `importance` is plain softmax and `tail` its row of Table 2. The same through any sampler."""

TABLES: dict[str, dict[str, Rho]] = {
    "in_batch": {
        "unit": lambda m: m * PI / (1 - PI[Y]),
        "constant": lambda _: PI / (1 - PI[Y]),
        "relative": lambda m: m * PI[Y] / (1 - PI[Y]) + 0 * PI,
    },
    "uniform": {
        "unit": lambda m: m / (L - 1) + 0 * PI,
        "constant": lambda _: np.full(L, 1 / (L - 1)),
        "relative": lambda m: m / (L - 1) + 0 * PI,
    },
    "popularity": {
        "unit": lambda m: m * toy.given_another(Q["popularity"]),
        "constant": lambda _: toy.given_another(Q["popularity"]),
        "relative": lambda m: m * Q["popularity"][Y] / (1 - Q["popularity"][Y]) + 0 * PI,
    },
}
"""[R21, Tables 2 and 3; METHODS §2.2] with q_y'/(1 − q_y) for q_y'."""
TABLES["uniform but the positive"] = TABLES["uniform"]

FAMILIES: dict[str, tuple[dict[str, float], Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "logistic": ({}, lambda f: np.log1p(np.exp(-f)), lambda f: np.log1p(np.exp(f))),
    "hinge": ({}, lambda f: np.maximum(1 - f, 0), lambda f: np.maximum(1 + f, 0)),
    "squared_hinge": ({}, lambda f: np.maximum(1 - f, 0) ** 2, lambda f: np.maximum(1 + f, 0) ** 2),
    "exponential": ({}, lambda f: np.exp(-f), np.exp),
    "contrastive": ({"margin": 0.25}, lambda f: (1 - f) ** 2, lambda f: np.maximum(f - 0.25, 0) ** 2),
    "ramp": ({"margin": 2.0}, lambda f: np.clip(1 - f / 2, 0, 1), lambda f: np.clip(1 + f / 2, 0, 1)),
}
"""Parameters, φ on the positive, ϕ on a negative [METHODS §2]."""

CELLS = [(sampler, weight) for sampler in SAMPLES for weight in WEIGHTS]


def rho(sampler: str, weight: str, m_B: np.ndarray) -> np.ndarray:
    """ρ of the labels other than Y, float64 [B, L − 1]."""
    margins = {name: (lambda _, margin_L=margin_L: margin_L) for name, margin_L in MARGINS.items()}
    made = (TABLES[sampler] | margins)[weight](m_B[:, None])
    return np.broadcast_to(made, (len(m_B), L))[:, OTHERS]


def with_negatives(sample: Sample, losses_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that have a negative, and their m."""
    has_B = sample.m_B >= 1
    return losses_B[has_B], sample.m_B[has_B].astype(np.float64)


def test_every_weight_has_its_cells() -> None:
    for sampler in SAMPLES:
        assert {*TABLES[sampler], *MARGINS} == set(WEIGHTS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_mean_and_variance_of_a_decoupled_loss(sampler: str, weight: str, family: str) -> None:
    """`E = φ(f_y) + Σ ρ ϕ(f_y')` and `V = Σ w ρ ϕ² − (Σ ρ ϕ)²/m` with w = ρ/(m·q) [R21 Lemma 1, eq. 10]."""
    arguments, phi, varphi = FAMILIES[family]
    sample = SAMPLES[sampler]()
    losses_B, m_B = with_negatives(sample, sample.losses(Objective(family, weight, arguments)))
    rho_BL, q_L = rho(sampler, weight, m_B), toy.given_another(Q[sampler])[OTHERS]
    terms_BL = rho_BL * varphi(LOGITS[OTHERS])
    mean_B = phi(LOGITS[Y]) + terms_BL.sum(axis=1)
    variance_B = (terms_BL**2 / q_L).sum(axis=1) / m_B - terms_BL.sum(axis=1) ** 2 / m_B

    toy.assert_mean(losses_B - mean_B, 0)
    toy.assert_mean((losses_B - mean_B) ** 2 - variance_B, 0)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_the_implicit_softmax_bounds_the_mean_and_its_bracket_is_exact(sampler: str, weight: str) -> None:
    """`E log[1 + Σ w e^(f_y' − f_y)] ≤ log[1 + Σ ρ e^(f_y' − f_y)]`, `=` inside the logarithm [R21 Lemma 2]."""
    sample = SAMPLES[sampler]()
    losses_B, m_B = with_negatives(sample, sample.losses(Objective("softmax", weight)))
    odds_B = rho(sampler, weight, m_B) @ np.exp(LOGITS[OTHERS] - LOGITS[Y])

    toy.assert_mean(np.expm1(losses_B) - odds_B, 0)
    gap_B = losses_B - np.log1p(odds_B)
    assert gap_B.mean() < 4 * gap_B.std() / np.sqrt(len(gap_B))


@pytest.mark.parametrize("family", ["softmax", *FAMILIES])
@pytest.mark.parametrize("sampler", ["in_batch", "uniform"])
def test_a_row_whose_every_draw_hits_has_the_positive_s_loss_alone(sampler: str, family: str) -> None:
    arguments, phi, _ = FAMILIES.get(family, ({}, np.zeros_like, None))
    sample = {
        "in_batch": toy.batches(rows=ROWS, size=3), "uniform": toy.draw("uniform", rows=ROWS, negatives=2),
    }[sampler]  # fmt: skip
    losses_B = sample.losses(Objective(family, "importance", arguments))

    share = {"in_batch": 0.25**2, "uniform": 1 / 36}[sampler]
    assert (sample.m_B == 0).mean() == pytest.approx(share, rel=0.1)
    np.testing.assert_allclose(losses_B[sample.m_B == 0], phi(LOGITS[Y]), rtol=1e-6)


@pytest.mark.parametrize("weight", ["constant", *MARGINS])
def test_the_squared_gap_to_the_implicit_softmax_falls_as_one_over_m(weight: str) -> None:
    """`E(ℓ − implicit)² → σ²/(m μ²)`, μ = e^f_y + Σ ρ e^f_y', σ² = V_q[ρ/q · e^f_y'] [R21 Theorem 3]."""
    rho_L = rho("uniform", weight, np.ones(1))[0]
    eta_L = rho_L * (L - 1) * np.exp(LOGITS[OTHERS])
    mu, variance = np.exp(LOGITS[Y]) + eta_L.mean(), eta_L.var()
    sizes, squares = np.array([8, 32, 128, 512]), []
    for m in sizes:
        sample = toy.draw("uniform", rows=4000, negatives=int(m), seed=7, exclude_positive=True)
        gap_B = sample.losses(Objective("softmax", weight)) - np.log1p(
            rho_L @ np.exp(LOGITS[OTHERS] - LOGITS[Y])
        )  # fmt: skip
        squares.append((gap_B**2).mean())

    slope, _ = np.polyfit(np.log(sizes), np.log(squares), 1)
    assert slope == pytest.approx(-1, abs=0.05)
    ratios = squares * sizes * mu**2 / variance
    np.testing.assert_allclose(ratios[1:], 1, atol=0.1, err_msg="4 √(2/4000) is 9 %; m = 8 is not yet large")


def test_sampling_by_the_model_itself_leaves_no_gap() -> None:
    """q ∝ e^f and importance weights: equality in [R21 eq. 11] for every sample, not only on average."""
    q_L = np.exp(LOGITS) / np.exp(LOGITS).sum()
    drawn_BM = np.random.default_rng(1).choice(L, (500, 3), p=q_L)
    sample = Sample(drawn_BM, np.log(q_L).astype(np.float32))
    losses_B, _ = with_negatives(sample, sample.losses(Objective("softmax", "importance")))

    np.testing.assert_allclose(losses_B, np.log(np.exp(LOGITS).sum()) - LOGITS[Y], rtol=1e-5)


PAIRWISE_MARGINS: dict[str, tuple[str, dict[str, float], np.ndarray]] = {
    "plain": ("logit_adjusted", {"tau": 0}, np.ones(L)),
    "logit-adjusted, τ = ½": ("logit_adjusted", {"tau": 0.5}, np.sqrt(PI / PI[Y])),
    "logit-adjusted, τ = 2": ("logit_adjusted", {"tau": 2}, (PI / PI[Y]) ** 2),
    "equalised, F = π²": ("equalised", {"power": 2}, PI**2),
    "equalised, F = [π ≥ 0.1]": ("equalised", {"power": 0, "threshold": 0.1}, np.array([1, 1, 1, 1, 0, 0])),
    "adaptive, π^−½": ("adaptive", {"exponent": 0.5}, np.full(L, 2)),
}
"""Weight, its parameters and ρ [R21 eq. 6]; π_Y = ¼."""

THROUGH: dict[str, Callable[[], Sample]] = SAMPLES | {
    "popularity(¾)": lambda: toy.draw("popularity", rows=ROWS, negatives=M, alpha=0.75, exclude_positive=True),
}


@pytest.mark.parametrize(("weight", "arguments", "margin_L"), PAIRWISE_MARGINS.values(), ids=PAIRWISE_MARGINS)
@pytest.mark.parametrize("sampler", THROUGH)
def test_any_margin_through_any_sampler(
    sampler: str, weight: str, arguments: dict[str, float], margin_L: np.ndarray
) -> None:
    """The bracket of the margin loss, `1 + Σ ρ e^(f_y' − f_y)`, whatever q [R21 Prop. 4]."""
    sample = THROUGH[sampler]()
    objective = Objective("softmax", weight, weight_arguments=arguments)
    losses_B, _ = with_negatives(sample, sample.losses(objective))

    toy.assert_mean(np.expm1(losses_B), margin_L[OTHERS] @ np.exp(LOGITS[OTHERS] - LOGITS[Y]))


@pytest.mark.parametrize(("weight", "arguments", "margin_L"), PAIRWISE_MARGINS.values(), ids=PAIRWISE_MARGINS)
def test_a_margin_with_every_label_is_the_margin_loss_itself(
    weight: str, arguments: dict[str, float], margin_L: np.ndarray
) -> None:
    log_q_L = SAMPLERS["full"](SamplerSetup(np.log(PI), 1)).log_q_L
    sample = Sample(np.arange(L)[None], log_q_L)
    loss = sample.losses(Objective("softmax", weight, weight_arguments=arguments)).item()

    assert loss == pytest.approx(np.log1p(margin_L[OTHERS] @ np.exp(LOGITS[OTHERS] - LOGITS[Y])), rel=1e-6)


@pytest.mark.parametrize(("weight", "arguments", "margin_L"), PAIRWISE_MARGINS.values(), ids=PAIRWISE_MARGINS)
def test_a_margin_through_the_mixture(weight: str, arguments: dict[str, float], margin_L: np.ndarray) -> None:
    """Of n labels of the batch and k uniform draws that are left, `E Σ w e^(…)` is exactly
    `Σ ρ e^(…) · (1 − q_y)/q_y' · [n π_y'/(1 − π_y) + k/(L − 1)]/(n + k)`; within 2 % of Prop. 4 at B + M = 64.
    """
    size, drawn = 32, 32
    batch = toy.batches(rows=ROWS, size=size)
    more = toy.draw("uniform", rows=ROWS, negatives=drawn)
    log_q_L = SAMPLERS["mixed"](SamplerSetup(np.log(PI), size), negatives=drawn).log_q_L
    sample = Sample(np.concatenate([batch.drawn_BM, more.drawn_BM], axis=1), log_q_L)
    odds_B = np.expm1(sample.losses(Objective("softmax", weight, weight_arguments=arguments)))

    q_L = (32 * PI + 32 / 6) / 64
    n_B, k_B = batch.m_B[:, None], more.m_B[:, None]
    factor_BL = (1 - q_L[Y]) / q_L * (n_B * PI / (1 - PI[Y]) + k_B / (L - 1)) / (n_B + k_B)
    terms_L = margin_L * np.exp(LOGITS - LOGITS[Y])
    toy.assert_mean(odds_B - (factor_BL * terms_L)[:, OTHERS].sum(axis=1), 0)
    assert odds_B.mean() == pytest.approx(terms_L[OTHERS].sum(), rel=0.02)


@pytest.mark.parametrize("weight", ["importance", "tail", "adaptive"])
def test_the_best_sampler_of_a_margin_draws_by_margin_times_loss(weight: str) -> None:
    """q* ∝ ρ ϕ(f) has the least variance: none at all for one positive [R21 Prop. 5]."""
    varphi_L = np.log1p(np.exp(LOGITS))
    best_L = MARGINS[weight] * varphi_L
    best_L = best_L / best_L.sum()
    others = {
        "uniform": np.full(L, 1 / L),
        "frequency": PI,
        "word2vec": PI**0.75 / (PI**0.75).sum(),
        "by loss alone or margin alone": (varphi_L if weight == "tail" else PI * varphi_L),
        "near the best": best_L * np.exp(np.random.default_rng(3).normal(0, 0.1, L)),
    }
    variances = {}
    for name, q_L in {"best": best_L, **others}.items():
        catalogue = SamplerSetup(np.log(q_L / q_L.sum()), 4000)
        sampler = SAMPLERS["popularity"](catalogue, negatives=M, shared=False)
        drawn_BM = np.random.default_rng(4).choice(L, (4000, M), p=np.exp(catalogue.log_pi_L))
        losses_B, _ = with_negatives(
            sample := Sample(drawn_BM, sampler.log_q_L), sample.losses(Objective("logistic", weight))
        )  # fmt: skip
        variances[name] = losses_B.var()

    assert variances.pop("best") < 1e-10
    assert all(variance > 1e-4 for variance in variances.values()), variances
