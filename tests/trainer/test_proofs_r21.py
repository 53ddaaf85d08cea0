"""Disentangling labeling and sampling bias [R21]: every cell of Tables 2 and 3, Lemmas 1 and 2, Theorem 3,
Propositions 4 and 5, of the losses as they are trained.

The positive is masked where it is drawn, or never drawn in the first place; m counts what is drawn. Legend: `B` rows,
`L` labels.
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
    "uniform without replacement": lambda: toy.draw("uniform", rows=ROWS, negatives=M, replace=False),
    "popularity": lambda: toy.draw("popularity", rows=ROWS, negatives=M, alpha=0.5),
}
Q = {
    "in_batch": PI,
    "uniform": np.full(L, 1 / 6),
    "uniform but the positive": np.where(np.arange(L) == Y, 0, 1 / 5),
    "uniform without replacement": np.full(L, 1 / 6),
    "popularity": np.sqrt(PI) / np.sqrt(PI).sum(),
}
"""Of a draw."""

MARGINS: dict[str, np.ndarray] = {
    "importance": np.ones(L),
    "tail": PI / PI[Y],
    "logit_adjusted": PI / PI[Y],
    "equalised": PI,
    "adaptive": np.full(L, PI[Y] ** -0.25),
}
"""[R21 eq. 6]; `importance` is plain softmax and `tail` its row of Table 2. The same through any sampler."""

TABLES: dict[str, dict[str, np.ndarray]] = {
    "in_batch": {"unit": M * PI, "constant": PI, "relative": np.full(L, M * PI[Y])},
    "uniform": {"unit": np.full(L, M / 6), "constant": np.full(L, 1 / 6), "relative": np.full(L, M / 6)},
    "uniform but the positive": {
        "unit": np.full(L, M / 5), "constant": np.full(L, 1 / 5), "relative": np.full(L, M / 5),
    },
    "popularity": {
        "unit": M * Q["popularity"], "constant": Q["popularity"], "relative": np.full(L, M * Q["popularity"][Y]),
    },
}  # fmt: skip
"""ρ_Yy' of every label, literally as [R21, Tables 2 and 3; METHODS §2.2] have it."""
TABLES["uniform without replacement"] = TABLES["uniform"]

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


def rho(sampler: str, weight: str) -> np.ndarray:
    """ρ of the labels other than Y, float64 [L − 1]."""
    return (TABLES[sampler] | MARGINS)[weight][OTHERS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_mean_and_variance_of_a_decoupled_loss(sampler: str, weight: str, family: str) -> None:
    """`E = φ(f_y) + Σ ρ ϕ(f_y')` and `V = Σ w ρ ϕ² − (Σ ρ ϕ)²/m` with w = ρ/(m·q) [R21 Lemma 1, eq. 10].

    Without replacement V is (L − m)/(L − 1) times that.
    """
    arguments, phi, varphi = FAMILIES[family]
    losses_B = SAMPLES[sampler]().losses(Objective(family, weight, arguments))
    terms_L = rho(sampler, weight) * varphi(LOGITS[OTHERS])
    mean = phi(LOGITS[Y]) + terms_L.sum()
    variance = (terms_L**2 / Q[sampler][OTHERS]).sum() / M - terms_L.sum() ** 2 / M
    if sampler == "uniform without replacement":
        variance *= (L - M) / (L - 1)

    toy.assert_mean(losses_B, mean)
    toy.assert_mean((losses_B - mean) ** 2, variance)


@pytest.mark.parametrize(("sampler", "weight"), CELLS)
def test_the_implicit_softmax_bounds_the_mean_and_its_bracket_is_exact(sampler: str, weight: str) -> None:
    """`E log[1 + Σ w e^(f_y' − f_y)] ≤ log[1 + Σ ρ e^(f_y' − f_y)]`, `=` inside the logarithm [R21 Lemma 2]."""
    losses_B = SAMPLES[sampler]().losses(Objective("softmax", weight))
    odds = rho(sampler, weight) @ np.exp(LOGITS[OTHERS] - LOGITS[Y])

    toy.assert_mean(np.expm1(losses_B), odds)
    gap_B = losses_B - np.log1p(odds)
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
    all_hit_B = (sample.drawn_BM == Y).all(axis=1)
    assert all_hit_B.mean() == pytest.approx(share, rel=0.1)
    np.testing.assert_allclose(losses_B[all_hit_B], phi(LOGITS[Y]), rtol=1e-6)


@pytest.mark.parametrize("weight", ["constant", *MARGINS])
def test_the_squared_gap_to_the_implicit_softmax_falls_as_one_over_m(weight: str) -> None:
    """`E(ℓ − implicit)² → σ²/(m μ²)`, μ = e^f_y + Σ ρ e^f_y', σ² = V_q[ρ/q · e^f_y'] [R21 Theorem 3]."""
    rho_L = rho("uniform but the positive", weight)
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


def never_the_positive(q_L: np.ndarray, *, rows: int, seed: int) -> Sample:
    """M draws a row from q_y'/(1 − q_Y): q_y = 0, as [R21 §3] assumes."""
    drawn_BM = np.random.default_rng(seed).choice(L, (rows, M), p=toy.condition_on_others(q_L))
    return Sample(drawn_BM, np.log(q_L).astype(np.float32), log_miss=np.log1p(-q_L[Y]))


def test_sampling_by_the_model_itself_leaves_no_gap() -> None:
    """q ∝ e^f and importance weights: equality in [R21 eq. 11] for every sample, not only on average."""
    sample = never_the_positive(np.exp(LOGITS) / np.exp(LOGITS).sum(), rows=500, seed=1)
    losses_B = sample.losses(Objective("softmax", "importance"))

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

    toy.assert_mean(np.expm1(sample.losses(objective)), margin_L[OTHERS] @ np.exp(LOGITS[OTHERS] - LOGITS[Y]))


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
    """`E Σ w e^(…) = Σ ρ e^(…)`, exactly, in batches so small that a row's own place counts [R21 Prop. 4]."""
    size, drawn = 4, 3
    batch = toy.batches(rows=ROWS, size=size)
    more = toy.draw("uniform", rows=ROWS, negatives=drawn)
    log_q_L = SAMPLERS["mixed"](SamplerSetup(np.log(PI), size), negatives=drawn).log_q_L
    sample = Sample(np.concatenate([batch.drawn_BM, more.drawn_BM], axis=1), log_q_L, undrawn=1)
    odds_B = np.expm1(sample.losses(Objective("softmax", weight, weight_arguments=arguments)))

    toy.assert_mean(odds_B, margin_L[OTHERS] @ np.exp(LOGITS[OTHERS] - LOGITS[Y]))


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
        sample = never_the_positive(q_L / q_L.sum(), rows=4000, seed=4)
        variances[name] = sample.losses(Objective("logistic", weight)).var()

    assert variances.pop("best") < 1e-10
    assert all(variance > 1e-4 for variance in variances.values()), variances
