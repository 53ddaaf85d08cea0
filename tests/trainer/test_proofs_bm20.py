"""Extreme classification via adversarial softmax approximation [BM20]: Theorems 1 and 2, and NCE (§5).

Scores are free, one for every (x, y): the nonparametric limit. Expectations over (x, y) ~ p_D and y' ~ p_n are
sums over every triple. Legend: `X` queries, `L` labels, `T` triples (x, y, y').
"""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.model import step
from tests.trainer import tiny

X, L = 3, 5
RNG = np.random.default_rng(11)
DATA = RNG.dirichlet(np.ones(L), X)
"""p_D(y|x); every x as likely."""
FREQUENCY = np.broadcast_to(DATA.mean(axis=0), (X, L))
NOISE = {
    "uniform": np.full((X, L), 1 / L),
    "frequency": FREQUENCY,
    "conditional": RNG.dirichlet(np.ones(L), X),
    "the data's own": DATA,
}
TRIPLES = np.array(list(itertools.product(range(X), range(L), range(L))))


def losses(scores_XL: Any, objective: Objective, noise_XL: np.ndarray, *, mask: bool = False) -> Any:
    """The loss of every triple, one negative each, [T]."""
    x, y, other = TRIPLES.T
    flat, log_noise_XL = ops.reshape(scores_XL, (-1,)), np.log(noise_XL).astype(np.float32)
    logits = ops.take(flat, x * L + y), ops.take(flat, x * L + other)[:, None]
    hits = (y == other)[:, None] if mask else np.zeros((len(x), 1), bool)
    log_q = ops.convert_to_tensor(log_noise_XL[x, y]), ops.convert_to_tensor(log_noise_XL[x, other][:, None])
    return objective(SampledLogits(*logits, ops.convert_to_tensor(hits), *log_q, *log_q))


def minimiser(objective: Objective, noise_XL: np.ndarray, *, mask: bool = False, steps: int = 20) -> np.ndarray:
    """Scores of least expected loss, by gradient descent, every score at the pace of its curvature without masks."""
    x, y, other = TRIPLES.T
    chance_T = (DATA[x, y] * noise_XL[x, other]).astype(np.float32)
    shift_XL = np.log(noise_XL) if objective.family == "nce" else np.zeros((X, L))
    scores_XL = shift_XL.copy()
    weight_XL = 1 if objective.weight == "unit" else 1 / noise_XL

    def expected(rows: list[Any]) -> tuple[Any, Any]:
        losses_T = losses(rows[0], objective, noise_XL, mask=mask)
        return ops.sum(losses_T * ops.convert_to_tensor(chance_T)), losses_T

    for _ in range(steps):
        rows = [ops.convert_to_tensor(scores_XL.astype(np.float32))]
        _, (gradient_XL,), _ = backend.value_and_gradients(expected, rows, [])
        chance_XL = 1 / (1 + np.exp(shift_XL - scores_XL))
        scores_XL -= ops.convert_to_numpy(gradient_XL) / ((DATA + weight_XL * noise_XL) * chance_XL * (1 - chance_XL))
    return scores_XL


@pytest.mark.parametrize("noise", NOISE)
def test_removing_the_noise_s_bias_gives_the_softmax_s_scores(noise: str) -> None:
    """`f + log p_n = log p_D + const(x)`, the minimiser of the full softmax [BM20 Theorem 1]; const is 0 here."""
    scores_XL = minimiser(Objective("logistic"), NOISE[noise])

    np.testing.assert_allclose(scores_XL + np.log(NOISE[noise]), np.log(DATA), atol=1e-3)


def test_the_full_softmax_is_at_rest_there() -> None:
    constant_X1 = np.array([[1], [-2], [0.5]])
    rows = [ops.convert_to_tensor((np.log(DATA) + constant_X1).astype(np.float32))]
    y = np.arange(L)

    def expected(rows: list[Any]) -> tuple[Any, Any]:
        logits = ops.repeat(rows[0], L, axis=0)
        log_q = np.full((X * L, L), -np.log(L), np.float32)
        hits = np.tile(y[:, None] == y[None], (X, 1))
        losses_B = Objective("softmax", "importance")(
            SampledLogits(ops.reshape(rows[0], (-1,)), logits, hits, log_q[:, 0], log_q, log_q[:, 0], log_q)
        )
        return ops.sum(losses_B * DATA.ravel().astype(np.float32)), losses_B

    (value, _), (gradient_XL,), _ = backend.value_and_gradients(expected, rows, [])

    assert float(value) == pytest.approx(-(DATA * np.log(DATA)).sum(), rel=1e-5), "the entropy: nothing is better"
    np.testing.assert_allclose(ops.convert_to_numpy(gradient_XL), 0, atol=1e-6)


@pytest.mark.parametrize("noise", NOISE)
def test_with_hits_masked_they_are_log_odds_in_the_softmax_s_order(noise: str) -> None:
    """`f + log p_n = log(p_D/(1 − p_D))`: negatives of y' come from rows of other labels only. An increasing
    function of the softmax's score, so every ranking is the same."""
    scores_XL = minimiser(Objective("logistic"), NOISE[noise], mask=True) + np.log(NOISE[noise])

    np.testing.assert_allclose(scores_XL, np.log(DATA) - np.log1p(-DATA), atol=5e-3)
    np.testing.assert_array_equal(scores_XL.argsort(axis=1), DATA.argsort(axis=1))


AT_REST: dict[str, tuple[Objective, bool, Any]] = {
    "logistic, kept": (Objective("logistic"), False, lambda p, q: np.log(p / q)),
    "logistic, masked": (Objective("logistic"), True, lambda p, q: np.log(p / (1 - p) / q)),
    "logistic, pairwise": (Objective("logistic", "unit", {"pairwise": True}), True, lambda p, q: np.log(p / q)),
    "exponential, kept": (Objective("exponential"), False, lambda p, q: np.log(p / q) / 2),
    "contrastive, kept": (Objective("contrastive"), False, lambda p, q: p / (p + q)),
}


@pytest.mark.parametrize(("objective", "mask", "optimum"), AT_REST.values(), ids=AT_REST)
@pytest.mark.parametrize("noise", NOISE)
def test_families_converge_as_documented(noise: str, objective: Objective, mask: bool, optimum: Any) -> None:
    """The gradient is 0 at the scores that a family's docstring names, and not half a nat beside them."""
    x, y, other = TRIPLES.T
    chance_T = (DATA[x, y] * NOISE[noise][x, other]).astype(np.float32)

    def expected(rows: list[Any]) -> tuple[Any, Any]:
        losses_T = losses(rows[0], objective, NOISE[noise], mask=mask)
        return ops.sum(losses_T * ops.convert_to_tensor(chance_T)), losses_T

    def slope(scores_XL: np.ndarray) -> float:
        rows = [ops.convert_to_tensor(scores_XL.astype(np.float32))]
        return float(np.abs(ops.convert_to_numpy(backend.value_and_gradients(expected, rows, [])[1][0])).max())

    scores_XL = optimum(DATA, NOISE[noise])
    assert slope(scores_XL) < 1e-6
    assert slope(scores_XL + 0.5 * np.eye(X, L)) > 1e-3


def signal_to_noise(noise_XL: np.ndarray) -> float:
    """`η = 1/Tr[Cov[ĝ, ĝ] H⁻¹]` at the minimum [BM20 eq. 12], from gradients and their slopes, triple by triple."""
    scores_XL = np.log(DATA / noise_XL)
    x, y, other = TRIPLES.T
    chance_T = DATA[x, y] * noise_XL[x, other] / X

    at_T, nothing_T1 = np.arange(len(x)) * X * L, np.zeros((len(x), 1), np.float32)

    def total(rows: list[Any]) -> tuple[Any, Any]:
        flat = ops.reshape(rows[0], (-1,))
        logits = ops.take(flat, at_T + x * L + y), ops.take(flat, at_T + x * L + other)[:, None]
        logs = (nothing_T1[:, 0], nothing_T1)
        losses_T = Objective("logistic")(SampledLogits(*logits, nothing_T1 > 0, *logs, *logs))
        return ops.sum(losses_T), losses_T

    def gradients(scores_XL: np.ndarray) -> np.ndarray:
        """ĝ of every triple, float64 [T, X·L]; each triple has a copy of the scores."""
        copies_TXL = np.repeat(scores_XL[None].astype(np.float32), len(x), axis=0)
        _, (gradients_TXL,), _ = backend.value_and_gradients(total, [ops.convert_to_tensor(copies_TXL)], [])
        return ops.convert_to_numpy(gradients_TXL).reshape(len(x), -1).astype(np.float64)

    gradients_TP = gradients(scores_XL)
    mean_P = chance_T @ gradients_TP
    np.testing.assert_allclose(mean_P, 0, atol=1e-6)
    covariance_PP = (gradients_TP * chance_T[:, None]).T @ gradients_TP
    hessian_PP = np.zeros((X * L, X * L))
    for at in range(X * L):
        shift_XL = np.zeros(X * L)
        shift_XL[at] = 1e-2
        up, down = (chance_T @ gradients(scores_XL + sign * shift_XL.reshape(X, L)) for sign in (1, -1))
        hessian_PP[at] = (up - down) / 2e-2
    return 1 / np.trace(covariance_PP @ np.linalg.inv(hessian_PP))


@pytest.mark.slow
def test_the_signal_is_clearest_when_the_noise_is_the_data() -> None:
    """[BM20 Theorem 2]. There α sums to ½ for every x, so 1/η = X·(L − 1) [eq. 15, per draw of x]."""
    best = signal_to_noise(DATA)
    others = {
        **{name: NOISE[name] for name in ("uniform", "frequency", "conditional")},
        "nearly the data": 0.9 * DATA + 0.1 / L,
        "sharper": DATA**1.2 / (DATA**1.2).sum(axis=1, keepdims=True),
    }

    assert 1 / best == pytest.approx(X * (L - 1), rel=1e-3)
    for name, noise_XL in others.items():
        odds = DATA / noise_XL
        alpha = (noise_XL * odds / (1 + odds)).sum(axis=1)
        ratio = signal_to_noise(noise_XL)
        assert 1 / ratio == pytest.approx((L - 2 * alpha).sum(), rel=1e-3), name
        assert ratio < best, name


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("family", "weight"), [("nce", "unit"), ("logistic", "importance")])
def test_a_model_of_log_odds_learns_from_its_first_steps(
    family: str, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 pairs, 4 uniform negatives each of 5000 labels, each with a row: after ten steps every pair's label is the
    first of all. From logits of 0, which say one half of every label, the first steps go to bringing them all down."""
    rows, wide = tiny.pairs(*[(row, row) for row in range(64)]), {"dim": 16}
    counted = tiny.dataset(tiny.pairs(*[(label % 64, label) for label in range(5000)]), queries=64, labels=5000)
    recipe = tiny.recipe(
        query={"features": [tiny.USER | wide]}, label={"features": [tiny.ITEM | wide]},
        model={"similarity": "dot", "temperature": 1.0, "label_bias": True} | wide,
        loss={
            "family": family, "weight": weight, "sampler": {"name": "uniform", "negatives": 4, "shared": False}
        },
        optimizer={"embedding_learning_rate": 0.05},
    )  # fmt: skip

    def found_after(steps: int) -> float:
        model = tiny.model(recipe, counted, batch_size=64)
        for _ in range(steps):
            model.train_step(tiny.batch(rows))
        scores_BL = model.embed_queries({"user_id": rows.queries + 1}) @ model.embed_labels().T + model.label_biases()
        return float((scores_BL.argmax(axis=1) == rows.labels).mean())

    assert found_after(10) == 1
    monkeypatch.setattr(step, "balance", lambda *_, **__: 0.0)
    assert found_after(10) < 0.7


@pytest.mark.parametrize("noise", NOISE)
def test_importance_weights_learn_the_log_probability_itself(noise: str) -> None:
    """Draws weighed by 1/q are every label once: `σ(f) = p/(1 + p)`, whatever the noise; nothing to remove."""
    scores_XL = minimiser(Objective("logistic", "importance"), NOISE[noise])

    np.testing.assert_allclose(scores_XL, np.log(DATA), atol=1e-3)


@pytest.mark.parametrize("noise", NOISE)
def test_nce_learns_the_log_probability_itself(noise: str) -> None:
    """Self-normalised: no constant, nothing to remove [BM20 §5]."""
    scores_XL = minimiser(Objective("nce"), NOISE[noise])

    np.testing.assert_allclose(scores_XL, np.log(DATA), atol=1e-3)


def test_masked_hits_overestimate_a_frequent_label() -> None:
    """`.7/.3` beside three odds of `.1/.9`: .875, at a log-likelihood of −1.05 where −.94 is the best."""
    p = np.array([0.7, 0.1, 0.1, 0.1])
    masked = p / (1 - p) / (p / (1 - p)).sum()

    assert masked[0] == pytest.approx(0.875)
    assert p @ np.log(masked) == pytest.approx(-1.047, abs=1e-3)
    assert p @ np.log(p) == pytest.approx(-0.940, abs=1e-3)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("sampler", [{"name": "in_batch"}, {"name": "uniform", "negatives": 4}, {"name": "full"}])
def test_a_model_s_nce_counts_the_draws_that_hit(sampler: dict[str, Any]) -> None:
    """By hand from a step's logits, which stand for log p(y|x) from 1/L on; of the batch's labels only a row's own is
    left out. log q of m·q on both sides."""
    rows = tiny.pairs((0, 0), (1, 1), (2, 1), (3, 3))
    data = tiny.dataset(rows, queries=4, labels=4)
    model = tiny.model(tiny.recipe(loss={"family": "nce", "sampler": sampler}), data, batch_size=4)
    logits_BL = model.embed_queries({"user_id": rows.queries + 1}) @ model.embed_labels().T / 0.1
    q_L = np.array([1 / 4, 2 / 4, 1, 1 / 4]) if sampler["name"] == "in_batch" else np.full(4, 1 / 4)
    drawn = np.asarray(keras.random.randint((4,), 0, 4, dtype="int32", seed=keras.random.SeedGenerator(0)))
    expected = []
    for row, positive in enumerate(rows.labels):
        others = {"in_batch": np.delete(rows.labels, row), "uniform": drawn, "full": np.arange(4)}[sampler["name"]]
        shifted_L = logits_BL[row] - np.log(4) - np.log(len(others) * q_L)
        expected.append(np.log1p(np.exp(-shifted_L[positive])) + np.log1p(np.exp(shifted_L[others])).sum())

    assert float(model.train_step(tiny.batch(rows))) == pytest.approx(np.mean(expected), rel=1e-5)
