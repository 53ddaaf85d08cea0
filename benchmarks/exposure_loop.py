"""A month of a small shop that learns every day from its own answers, with and without weight on the prior `exposed`.

    python -m benchmarks.exposure_loop

Every day half of the users see a list of 20 labels, without what they chose before, and choose at most one of them, by
a law of taste and popularity. The next morning the model is fitted again to all choices: correspondence analysis,
whose rank-16 approximation is p(y|x) / π(y) to first order. The first model knows choices from all labels. `open` has
the same number of choices every day, but from all labels and not from its lists: they narrow without a loop.

Legend: `U` users, `V` visitors, `L` labels, `K` places of a list, `D` latent coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import typer

from longtail.bundle.arrays import Bools, Float64
from longtail.bundle.exposure import coverage, gini
from longtail.bundle.frequency import log_frequencies
from longtail.bundle.priors import Exposure

USERS, LABELS, DIMS, PLACES, RANK, DAYS = 2_000, 1_500, 16, 20, 16, 30
DAY = 86_400.0
_TASTE, _NOTHING = 4.0, 0.3
"""Weight of taste in log-odds, and the mass of choosing nothing, of an average user's mass of all labels."""
_KNOWN = 20_000
"""Choices before the first day."""
_LEAST = 0.05
"""Least estimate of p(y|x) / π(y)."""
_WEEKS = ((0, 1), (DAYS - 7, DAYS))


class Arm(NamedTuple):
    """Hold what a shop does: λ, weight and half-life in days of `exposed`, and whether choices are of all labels."""

    name: str
    bias_removal: float = 1.0
    exposed: float = 0.0
    half_life: float = 7.0
    open: bool = False


ARMS = (
    Arm("open: no loop", open=True),
    Arm("λ = 1"),
    *(Arm(f"exposed {weight:g}", exposed=weight) for weight in (-0.05, -0.1, -0.2, -0.3, -0.5)),
    Arm("exposed -0.3, 1 d", exposed=-0.3, half_life=1.0),
    Arm("exposed -0.3, 30 d", exposed=-0.3, half_life=30.0),
    *(Arm(f"λ = {value:g}", bias_removal=value) for value in (0.9, 0.8, 0.7, 0.5)),
)


class Figures(NamedTuple):
    """Hold one day: labels shown, Gini of places, share of places of the tail, choices for each visitor."""

    coverage: float
    gini: float
    tail: float
    choices: float


class Shop:
    """Draw users, labels and the law of their choices; p(y|x) of all labels, float64 [U, L]."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        group_L = rng.integers(0, 40, LABELS)
        z_LD = (0.8 * rng.standard_normal((40, DIMS))[group_L] + 0.6 * rng.standard_normal((LABELS, DIMS))) / np.sqrt(
            DIMS
        )
        u_UD = rng.standard_normal((USERS, DIMS))
        u_UD /= np.linalg.norm(u_UD, axis=1, keepdims=True)
        odds_UL = np.exp(_TASTE * u_UD @ z_LD.T - 0.9 * np.log(rng.permutation(LABELS) + 10.0))
        self.shares_UL: Float64 = odds_UL / odds_UL.sum(axis=1, keepdims=True)
        by_share_L = np.argsort(-self.shares_UL.mean(axis=0))
        total_L = self.shares_UL.mean(axis=0)[by_share_L].cumsum()
        self.tail_L: Bools = np.zeros(LABELS, np.bool_)
        self.tail_L[by_share_L[total_L > 0.8]] = True


def month(shop: Shop, arm: Arm, seed: int) -> list[Figures]:
    """Simulate a month of an arm; every arm of a seed has the same visitors."""
    rng = np.random.default_rng(seed)
    counts_UL = np.zeros((USERS, LABELS))
    cumulated_UL = shop.shares_UL.cumsum(axis=1)
    for user in rng.integers(0, USERS, _KNOWN):
        counts_UL[user, np.searchsorted(cumulated_UL[user], rng.random() * cumulated_UL[user, -1])] += 1
    state, places_L, days = Exposure(half_life=arm.half_life * DAY), np.zeros(LABELS), list[Figures]()
    for day in range(DAYS):
        prior_L = arm.bias_removal * log_frequencies(counts_UL.sum(axis=0)) + arm.exposed * state.values(places_L)
        visitors_V = np.flatnonzero(rng.random(USERS) < 0.5)
        draws_V = rng.random((len(visitors_V), 2))
        scores_VL = np.where(counts_UL[visitors_V] > 0, -np.inf, log_lift(counts_UL)[visitors_V] + prior_L)
        lists_VK = np.argpartition(-scores_VL, PLACES, axis=1)[:, :PLACES]
        shares_VK = np.take_along_axis(shop.shares_UL[visitors_V], lists_VK, axis=1)
        chosen_V = draws_V[:, 0] < shares_VK.sum(axis=1) / (shares_VK.sum(axis=1) + _NOTHING)
        shown_L = np.bincount(lists_VK.ravel(), minlength=LABELS)
        days.append(
            Figures(
                coverage(shown_L), gini(shown_L) or 0.0, shown_L[shop.tail_L].sum() / shown_L.sum(), chosen_V.mean()
            )
        )
        values_L = state.values(places_L).astype(np.float32)
        state, places_L = state.counted(values_L, shown_L.astype(np.float64), (day + 1) * DAY)
        pool_VK = np.broadcast_to(np.arange(LABELS), (len(visitors_V), LABELS)) if arm.open else lists_VK
        from_VK = cumulated(
            np.where(counts_UL[visitors_V] > 0, 0, shop.shares_UL[visitors_V]) if arm.open else shares_VK
        )
        at_V = (from_VK < draws_V[:, 1:]).sum(axis=1)
        np.add.at(counts_UL, (visitors_V[chosen_V], pool_VK[chosen_V, at_V[chosen_V]]), 1)
    return days


def cumulated(odds_VK: Float64) -> Float64:
    """Compute cumulated probabilities of odds."""
    total_VK = odds_VK.cumsum(axis=1)
    return total_VK / total_VK[:, -1:]


def log_lift(counts_UL: Float64) -> Float64:
    """Estimate log p(y|x) − log π(y) by correspondence analysis of rank 16, float64 [U, L]."""
    rows_U, columns_L = counts_UL.sum(axis=1) + 1, counts_UL.sum(axis=0) + 1
    scale_UL = np.sqrt(np.outer(rows_U, columns_L) / columns_L.sum())
    residual_UL = counts_UL / scale_UL - scale_UL
    start = np.random.default_rng(0).standard_normal((LABELS, RANK + 8))
    basis = np.linalg.qr(residual_UL @ (residual_UL.T @ (residual_UL @ start)))[0]
    left, values, right = np.linalg.svd(basis.T @ residual_UL, full_matrices=False)
    low_UL = (basis @ left[:, :RANK] * values[:RANK]) @ right[:RANK]
    return np.log(np.maximum(1 + low_UL / scale_UL, _LEAST))


def main(seeds: int = 3) -> None:
    """Print coverage, Gini, tail and choices of the first day and the last week, and choices against λ = 1."""
    print("| arm | labels shown a day: first, last week | Gini | tail | choices a visit | of λ = 1's, the month |")
    print("| --- " * 6 + "|")
    runs = {arm: [month(Shop(seed), arm, seed) for seed in range(seeds)] for arm in ARMS}
    base_S = np.array([[day.choices for day in days] for days in runs[ARMS[1]]]).mean(axis=1)
    for arm, months in runs.items():
        figures_SDF = np.array(months)
        cells = []
        for at in range(len(Figures._fields)):
            first, last = (figures_SDF[:, begin:end, at].mean(axis=1) for begin, end in _WEEKS)
            cells.append(f"{first.mean():.3f}, {last.mean():.3f} ± {last.std(ddof=1):.3f}")
        ratio_S = figures_SDF[:, :, -1].mean(axis=1) / base_S
        print(f"| {arm.name} | {' | '.join(cells)} | {ratio_S.mean():.3f} ± {ratio_S.std(ddof=1):.3f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
