"""Stochastic Negative Mining [Re19]: Algorithm 1 estimates an ordered weighted loss without bias (Lemma 2),
that loss bounds the retrieval loss (Theorem 3), is convex (Theorem 2) and, where its condition (3) holds, calibrated
(Theorem 4).

Legend: `K` labels, `B` of the K − 1 others in a subset, `R` score vectors.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from scipy import stats
from scipy.optimize import minimize

from longtail.trainer.losses import Mining, Objective, SampledLogits
from tests.trainer import toy

K, B = 8, 4
SCORES = np.array([0.3, 1.4, -0.2, 0.9, -1.1, 0.5, 2.0, -0.7])
Y = 0
OTHERS = [1, 2, 3, 4, 5, 6, 7]

PHI = {
    "logistic": lambda u: np.log1p(np.exp(-u)),
    "hinge": lambda u: np.maximum(1 - u, 0),
    "squared_hinge": lambda u: np.maximum(1 - u, 0) ** 2,
    "exponential": lambda u: np.exp(-u),
    "ramp": lambda u: np.clip(1 - u, 0, 1),
}
FORMS = {"POWL": True, "BOWL": False}
MINED = {"top 1": (1, 0.0), "top 3": (3, 0.0), "power law": (None, 1.5), "power law of the top 2": (2, 0.5)}


def compute_theta(keep: int | None, power: float, size: int) -> np.ndarray:
    """ϑ of a subset: Σ is (K − 1)/B, as negative sampling weighs."""
    ranks = np.arange(1, size + 1.0)
    weights = ranks**-power * (ranks <= (keep or size))
    return (K - 1) / size * weights / weights.sum()


def owl(phi: Any, scores: np.ndarray, theta: np.ndarray, *, pairwise: bool) -> float:
    """[Re19 Definitions 3 and 4] of one score vector, the positive's at Y."""
    ordered = np.sort(scores[OTHERS])[::-1]
    if pairwise:
        return float(theta @ phi(scores[Y] - ordered))
    return float(phi(scores[Y]) + theta @ phi(-ordered))


def losses(objective: Objective, scores_RK: np.ndarray, drawn_RB: np.ndarray, ranks_RN: Any = None) -> np.ndarray:
    """Of every row, its own scores and negatives; uniform q, of the others alone if Y is not among the negatives."""
    rows = len(scores_RK)
    negatives_RB = np.take_along_axis(scores_RK, drawn_RB, axis=1)
    log_q = np.full(rows, -np.log(K), np.float32), np.full(drawn_RB.shape, -np.log(K), np.float32)
    losses_R = objective(
        SampledLogits(
            ops.convert_to_tensor(scores_RK[:, Y].astype(np.float32)),
            ops.convert_to_tensor(negatives_RB.astype(np.float32)),
            ops.convert_to_tensor(drawn_RB == Y), *log_q, *log_q,
            log_miss_B=None if (drawn_RB == Y).any() else np.full(rows, np.log1p(-1 / K), np.float32),
            rows={} if ranks_RN is None else {"ranks": ranks_RN},
        )
    )  # fmt: skip
    return ops.convert_to_numpy(losses_R).astype(np.float64)


def top_k(family: str, k: int, *, pairwise: bool, scores_RK: np.ndarray) -> np.ndarray:
    """The top-k loss with every label, θ_j = 1/k, as sampler `full` takes it: the positive among them, masked."""
    objective = Objective(family, "importance", {"pairwise": pairwise}, mining=Mining(keep=k))
    return losses(objective, scores_RK, np.broadcast_to(np.arange(K), (len(scores_RK), K)))


@pytest.mark.parametrize(("keep", "power"), MINED.values(), ids=MINED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", PHI)
def test_the_mean_over_all_subsets_is_the_ordered_weighted_loss(
    family: str, form: str, keep: int | None, power: float
) -> None:
    """θ_j = Σ_i ϑ_i · C(j−1, i−1)·C(K−1−j, B−i)/C(K−1, B): of a subset, rank j is its i-th [Re19 Lemma 2]."""
    subsets = np.array(list(itertools.combinations(OTHERS, B)))
    objective = Objective(family, "importance", {"pairwise": FORMS[form]}, mining=Mining(keep, power))
    mean = losses(objective, np.tile(SCORES, (len(subsets), 1)), subsets).mean()

    small = compute_theta(keep, power, B)
    theta = np.array([
        sum(small[i - 1] * math.comb(j - 1, i - 1) * math.comb(K - 1 - j, B - i) for i in range(1, B + 1))
        for j in range(1, K)
    ]) / math.comb(K - 1, B)  # fmt: skip
    assert len(subsets) == 35
    assert theta.sum() == pytest.approx(7 / 4), "|θ|₁ = |ϑ|₁ = (K − 1)/B"
    assert (np.diff(theta) <= 1e-12).all(), "non-increasing, so the loss is an OWL"
    if keep is not None and power == 0:
        np.testing.assert_allclose(theta[:keep], 1 / keep, err_msg="ϑ_j = (K − 1)/(k·B) is θ_j = 1/k on the top k")
    assert mean == pytest.approx(owl(PHI[family], SCORES, theta, pairwise=FORMS[form]), rel=1e-6)


def compute_full_theta(theta_B: np.ndarray, others: int, *, replace: bool = False) -> np.ndarray:
    """θ over all J negatives that ϑ over a uniform sample of them amounts to, [J] [Re19 Lemma 2].

    θ_j = Σ_i ϑ_i · P(the sample's i-th highest is the j-th highest of all). At least i of B draws are among the best j
    with a hypergeometric probability (binomial with replacement); what j adds to that of j − 1 is wanted.
    """
    best_J1, fewer_B = np.arange(others + 1)[:, None], np.arange(len(theta_B))
    if replace:
        among_JB = stats.binom.sf(fewer_B, len(theta_B), best_J1 / others)
    else:
        among_JB = stats.hypergeom.sf(fewer_B, others, best_J1, len(theta_B))
    return np.diff(among_JB, axis=0) @ theta_B


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("theta_B", [[1.0, 0, 0, 0], [0.7, 0.7, 0.2, 0.05]], ids=["top 1", "arbitrary"])
def test_theta_of_all_is_the_limit_of_sampled_draws(theta_B: list[float], replace: bool) -> None:
    """The mean weight of every rank over 40,000 rows of the real draws; [Re19 Lemma 2] is without replacement."""
    rows = 40_000
    sample = toy.draw("uniform", rows=rows, negatives=B, replace=replace, exclude_positive=True, seed=9)
    ranks_RB = np.sort(np.where(sample.drawn_BM > toy.Y, sample.drawn_BM - 1, sample.drawn_BM), axis=1)
    found_J = np.bincount(ranks_RB.ravel(), np.tile(theta_B, rows), minlength=5) / rows

    expected_J = compute_full_theta(np.array(theta_B), 5, replace=replace)
    assert expected_J.sum() == pytest.approx(sum(theta_B), rel=1e-12)
    np.testing.assert_allclose(found_J, expected_J, atol=4 * 0.7 * math.sqrt(B / rows))
    if not replace:
        by_hand = [sum(t * math.comb(j - 1, i) * math.comb(5 - j, B - 1 - i) for i, t in enumerate(theta_B)) / 5
                   for j in range(1, 6)]  # fmt: skip
        np.testing.assert_allclose(expected_J, by_hand, atol=1e-12)
        assert (np.diff(expected_J) <= 1e-12).all()


def test_only_draws_without_replacement_make_the_top_one_s_theta_one() -> None:
    """Delicious with B = 512: θ_1 is (L − 1)/B · P(the best of 982 is drawn), 1 or `982/512·(1 − (981/982)^512)`."""
    theta_B = np.zeros(512)
    theta_B[0] = 982 / 512

    assert compute_full_theta(theta_B, 982)[0] == pytest.approx(1, abs=1e-12)
    assert compute_full_theta(theta_B, 982, replace=True)[0] == pytest.approx(
        982 / 512 * (1 - (981 / 982) ** 512), rel=1e-9
    )
    assert compute_full_theta(theta_B, 982, replace=True)[0] == pytest.approx(0.78, abs=0.005)


def test_theta_is_the_paper_s_with_weight_unit_and_scaled_by_importance() -> None:
    """Algorithm 1 has ϑ alone; importance multiplies it by (L − 1)/m = 7/4."""
    subsets = np.array(list(itertools.combinations(OTHERS, B)))
    scores, theta = np.tile(SCORES, (len(subsets), 1)), np.array([0.9, 0.9, 0.3, 0.1])
    mining = Mining(theta=(0.9, 0.9), epsilon=0.1)
    ordered = -np.sort(-np.take_along_axis(scores, subsets, axis=1), axis=1)
    phi = np.log1p(np.exp(ordered - SCORES[Y]))
    powl = {"pairwise": True}

    losses_R = losses(Objective("logistic", "unit", powl, mining=Mining(theta=tuple(theta))), scores, subsets)
    np.testing.assert_allclose(losses_R, phi @ theta, rtol=1e-5)
    losses_R = losses(Objective("logistic", "importance", powl, mining=mining), scores, subsets)
    np.testing.assert_allclose(losses_R, 7 / 4 * phi @ [0.9, 0.9, 0.1, 0.1], rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", PHI)
def test_sampled_theta_is_the_ordered_weighted_loss_on_average(family: str, form: str) -> None:
    """Two ranks of every row, drawn by ϑ, within five standard errors of all that ϑ weighs [Re19 §3.1]."""
    rows, theta = 20_000, (2.0, 1.0, 1.0, 0.5)
    scores, drawn = np.tile(SCORES, (rows, 1)), np.tile(OTHERS, (rows, 1))
    sampled = Mining(theta=theta, draw=2)
    ranks = sampled.ranks(rows, len(OTHERS), keras.random.SeedGenerator(4))
    losses_R = losses(Objective(family, "unit", {"pairwise": FORMS[form]}, mining=sampled), scores, drawn, ranks)

    expected = owl(PHI[family], SCORES, np.pad(theta, (0, 3)), pairwise=FORMS[form])
    assert losses_R.mean() == pytest.approx(expected, abs=5 * losses_R.std() / math.sqrt(rows) + 1e-6)


def test_keeping_every_negative_is_negative_sampling() -> None:
    """keep = B spreads the weight of one negative, (K − 1)/B, over B of them."""
    subsets = np.array(list(itertools.combinations(OTHERS, B)))
    scores = np.tile(SCORES, (len(subsets), 1))
    mined = losses(Objective("logistic", "importance", mining=Mining(keep=B)), scores, subsets)
    sampled = losses(Objective("logistic", "importance"), scores, subsets)
    phi = np.log1p(np.exp(-SCORES[Y]))

    np.testing.assert_allclose(B * (mined - phi), sampled - phi, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", PHI)
def test_with_every_label_mining_is_the_top_k_loss(family: str, form: str) -> None:
    theta = np.array([1 / 3] * 3 + [0] * 4)
    loss = top_k(family, 3, pairwise=FORMS[form], scores_RK=SCORES[None]).item()

    assert loss == pytest.approx(owl(PHI[family], SCORES, theta, pairwise=FORMS[form]), rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("family", PHI)
def test_the_loss_bounds_the_retrieval_loss(family: str, k: int) -> None:
    """POWL ≥ 1[y ∉ Top_k], BOWL ≥ 2·1[y ∉ Top_k] [Re19 Theorem 3]; [Re19]'s logistic is in bits."""
    scores_RK = np.random.default_rng(5).normal(0, 2, (4000, K))
    bits = np.log(2) if family == "logistic" else 1
    missed_R = (scores_RK[:, OTHERS] > scores_RK[:, [Y]]).sum(axis=1) >= k
    powl_R = top_k(family, k, pairwise=True, scores_RK=scores_RK) / bits
    bowl_R = top_k(family, k, pairwise=False, scores_RK=scores_RK) / bits

    assert 0.1 < missed_R.mean() < 0.95
    assert (powl_R >= missed_R - 1e-6).all()
    if family in ("hinge", "ramp"):
        assert powl_R.min() == 0
    convex = family != "ramp"
    assert (bowl_R >= (2 if convex else 1) * missed_R - 1e-5).all()


def condition_3(p: np.ndarray, epsilon: float) -> bool:
    """[Re19 Theorem 4] of k = 1, θ = (1, ε, ε, …) and sorted p."""
    return all(p[0] * epsilon * (n - 1) > p[1:n].sum() for n in range(2, len(p) + 1))


def minimiser(p: np.ndarray, epsilon: float) -> np.ndarray:
    """Scores of the least expected POWL with the logistic loss, the last one 0."""
    theta = np.r_[1.0, np.full(len(p) - 2, epsilon)]

    def expected(free: np.ndarray) -> float:
        scores = np.append(free, 0.0)
        others = [-np.sort(-np.delete(scores, y)) for y in range(len(p))]
        return sum(p[y] * (theta @ PHI["logistic"](scores[y] - others[y])) for y in range(len(p)))

    free = np.log(p[:-1] / p[-1])
    for _ in range(4):  # the loss has kinks where scores tie, at which the search stops early
        free = minimize(expected, free, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12}).x
    return np.append(free, 0.0)


def test_epsilon_keeps_the_order_where_condition_3_holds() -> None:
    """[Re19 Theorem 4]; below the condition's ε = .83 all scores of this p tie [METHODS §3]."""
    p = np.array([0.3, 0.25, 0.25, 0.2])
    assert [condition_3(p, epsilon) for epsilon in (0.5, 0.83, 0.84)] == [False, False, True]
    assert np.ptp(minimiser(p, 0.5)) < 1e-3
    rng = np.random.default_rng(0)
    drawn = [(np.sort(rng.dirichlet(np.ones(4)))[::-1], rng.uniform()) for _ in range(12)]
    pairs = [(p, 0.85), *(pair for pair in drawn if condition_3(*pair))]
    assert len(pairs) >= 5
    for p, epsilon in pairs:
        scores = minimiser(p, epsilon)
        assert scores[0] > scores[1:].max() + 1e-3
