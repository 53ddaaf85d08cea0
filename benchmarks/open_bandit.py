"""Off-policy estimates on a shop's logged propensities: each policy's clicks, from the other policy's log and its own.

    pip download obp==0.5.7 --no-deps --no-binary :all: --ignore-requires-python && tar xzf obp-0.5.7.tar.gz
    python -m benchmarks.open_bandit obp-0.5.7/obp

The package `obp` has a sample of the Open Bandit Dataset [Saito, Aihara, Matsutani, Narita 2021, "Open bandit dataset
and pipeline"]: 10,000 recommendations of ZOZOTOWN for each of three campaigns by each of two policies, uniform random
and Bernoulli Thompson sampling, with positions, propensities and clicks. What Thompson sampling shows at a position is
simulated from its published prior. The estimator and its bounds are those of `longtail-serve off-policy`, where the
probability that the other policy shows an item stands for 1[in T].
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow.csv as pc
import typer
import yaml

from longtail.bundle.arrays import Float64, Int64
from longtail.serving.off_policy import Interval, estimate

_POLICIES = {"random": "uniform random", "bts": "Thompson sampling"}
_CAMPAIGNS = ("all", "men", "women")
_ROUNDS, _AT_ONCE = 400_000, 20_000
_COLUMNS = ["item_id", "position", "click", "propensity_score"]


def shown_by_sampling(alpha_I: Float64, beta_I: Float64) -> Float64:
    """Simulate P(item at position) of Thompson sampling, float64 [I, 3]."""
    chance, found = np.random.default_rng(0), np.zeros((len(alpha_I), 3))
    for _ in range(_ROUNDS // _AT_ONCE):
        drawn = chance.beta(alpha_I, beta_I, (_AT_ONCE, len(alpha_I)))
        best = np.argsort(-drawn, axis=1)[:, :3]
        found += np.stack([np.bincount(best[:, place], minlength=len(alpha_I)) for place in range(3)], axis=1)
    return found / _ROUNDS


def text(figure: Interval | None) -> str:
    """Write clicks per 1,000 recommendations, with bounds."""
    assert figure is not None
    value, low, high = (1000 * figure[name] for name in ("value", "low", "high"))
    return f"{value:.2f} [{max(low, 0):.2f}, {high:.2f}]"


def main(package: Annotated[Path, typer.Argument(help="The folder `obp` of the package.", exists=True)]) -> None:
    """Print a table of both directions, for each campaign and for all three together."""
    prior = yaml.safe_load((package / "policy/conf/prior_bts.yaml").read_text())
    parts: dict[str, list[tuple[Float64, Float64]]] = {policy: [] for policy in _POLICIES}
    print("| campaign | policy | from the other's log | largest weight | covered | on its own log | the other's own |")
    print("|---|---|---|---|---|---|---|")
    for campaign in _CAMPAIGNS:
        logs = {
            policy: pc.read_csv(package / f"dataset/obd/{policy}/{campaign}/{campaign}.csv").select(_COLUMNS)
            for policy in _POLICIES
        }
        sampled = shown_by_sampling(*(np.array(prior[campaign][name]) for name in ("alpha", "beta")))
        shown_by = {"random": np.full_like(sampled, 1 / len(sampled)), "bts": sampled}
        for policy, log in logs.items():
            item_N, position_N, click_N, propensity_N = (log[name].to_numpy() for name in _COLUMNS)
            other = next(name for name in _POLICIES if name != policy)
            weight_N = shown_by[other][item_N, position_N - 1] / propensity_N
            parts[policy].append((weight_N, click_N.astype(np.float64)))
        row_of(campaign, {policy: rows[-1] for policy, rows in parts.items()})
    together = {
        policy: tuple(np.concatenate(each) for each in zip(*rows, strict=True)) for policy, rows in parts.items()
    }
    row_of("together", together)


def row_of(campaign: str, logs: dict[str, tuple[Float64, ...]]) -> None:
    """Print the clicks of each policy, estimated from the other's log and measured on its own."""
    for policy, other in (("bts", "random"), ("random", "bts")):
        (weight_N, click_N), (_, own_N) = logs[other], logs[policy]
        each: Int64 = np.arange(len(click_N))
        once = np.ones(len(click_N))
        found = text(estimate(weight_N, click_N, each, once))
        own, others = (text(estimate(once, clicks_N, each, once)) for clicks_N in (own_N, click_N))
        facts = f"{weight_N.max():,.0f} | {weight_N.mean():.2f}"
        print(f"| {campaign} | {_POLICIES[policy]} | {found} | {facts} | {own} | {others} |")


if __name__ == "__main__":
    typer.run(main)
