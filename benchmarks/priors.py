"""Comparison of served priors on trained bundles: counts, decayed counts, forecast, and true shares.

    python -m benchmarks.shops --out runs/shops --law fresh --seed 11
    python -m benchmarks.priors runs/shops/fresh-150000-11 --law fresh --seed 11

`benchmarks.shops` writes `recipe.toml` and the bundle `run` to a folder. Counts get the best λ on test. All other
priors have the bundle's default λ, μ and β, which valid chose. `iALS × forecast` multiplies the scores of iALS by
(π*/π)^γ; valid chooses its settings and γ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.baselines import Row, Trial
from benchmarks.shops.generate import DAYS, Law, log_odds, shop_of
from longtail.bundle import Bundle, Interval, log_frequencies
from longtail.bundle.arrays import Float32, Float64
from longtail.bundle.forecast import Forecast
from longtail.trainer import evaluate, load_recipe
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.baselines import BASELINES, Interactions, Scores, top_labels
from longtail.trainer.evaluation.comparison import tuned
from longtail.trainer.evaluation.dial import Dial, Setting
from longtail.trainer.prior import fit_forecast

_METRICS = ("recall@20", "recall@20/head", "recall@20/torso", "recall@20/tail", "recall@20/new")
_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def main(
    folders: list[Path],
    law: Annotated[Law | None, typer.Option(help="Of the shop in the folder, whose marginal is known.")] = None,
    seed: Annotated[int, typer.Option(help="Of the shop.")] = 0,
    users: int = 6_000,
    products: int = 5_000,
) -> None:
    """Print a table of recall@20 on test, with 95 % intervals over queries, for each folder."""
    print(f"| log | prior | {' | '.join(_METRICS)} |\n| --- | --- {'| --- ' * len(_METRICS)}|")
    for folder in folders:
        bundle = Bundle.load(folder / "run")
        for prior, metrics in _by_prior(folder, bundle).items():
            _print(folder, prior, metrics)
        if law is not None:
            share_P = _marginal(law, seed, users=users, products=products)
            rows_L = [int(id_[1:]) for id_ in bundle.labels.ids.to_pylist()]
            _print(folder, "the law's marginal", _at_default(folder, bundle, np.log(share_P[rows_L] + 1e-12)))
        recipe = load_recipe(folder / "recipe.toml")
        trial = Trial(recipe, read_dataset(recipe))
        rows = [trial.answers("recent popularity"), trial.answers("iALS")]
        rows += [_ials_by_forecast(trial, bundle)] if bundle.forecast is not None else []
        for row in rows:
            if isinstance(row, Row):
                _print(folder, row.method, trial.task.metrics(row.top_NK, trial.facts))


def _by_prior(folder: Path, bundle: Bundle) -> dict[str, dict[str, Interval]]:
    """Measure counts at their best λ, and the forecast and its components at the default dial."""
    counts = bundle if bundle.forecast is None else _with(bundle, log_frequencies(bundle.labels.counts))
    line = [point for point in evaluate(counts, folder / "recipe.toml").curve if not point.popularity]
    best = max(line, key=lambda point: point.metrics["recall@20"].value)
    found = {f"counts, {Setting.of(best)}": dict(best.metrics)}
    if (forecast := bundle.forecast) is not None:
        at = Dial.of_manifest(bundle.manifest).default.of_towers
        decayed = forecast.kinds()["decayed"].log_popularity(whole=True)
        found["decayed counts"] = _at_default(folder, bundle, decayed)
        found[f"forecast, {at}"] = _at_default(folder, bundle, forecast.log_popularity(whole=True))
    return found


def _at_default(folder: Path, bundle: Bundle, log_prior_L: Float64) -> dict[str, Interval]:
    """Measure a prior, nats up to a constant, at the default dial, or at λ = 1 without a forecast."""
    labels, at = bundle.labels, Setting(1.0)
    if bundle.forecast is None:  # ν·π*/π replaces ν
        shifted = replace(labels, log_pn=_log_shares(labels.log_pn + log_prior_L - labels.log_pi))
        bundle = replace(bundle, labels=shifted)
    else:
        at = Dial.of_manifest(bundle.manifest).default.of_towers
        bundle = _with(bundle, log_prior_L)
    return next(
        dict(point.metrics) for point in evaluate(bundle, folder / "recipe.toml").curve if Setting.of(point) == at
    )


def _with(bundle: Bundle, log_prior_L: Float64) -> Bundle:
    """Replace the forecast of a bundle by a prior."""
    return replace(bundle, labels=replace(bundle.labels, log_popularity=_log_shares(log_prior_L)), forecast=None)


def _log_shares(log_L: Float64) -> Float32:
    shares: Float32 = (log_L - np.logaddexp.reduce(log_L)).astype(np.float32)
    return shares


def _marginal(law: Law, seed: int, *, users: int, products: int) -> Float64:
    """Compute every product's share of the events of the last tenth of the time, float64 [P]."""
    shop, share_P = shop_of(law, products=products, users=users, seed=seed), np.zeros(products)
    for day in np.linspace(0.9 * DAYS, DAYS, 19)[1::2]:
        odds_UP = log_odds(shop, law, day)
        odds_UP = np.exp(odds_UP - odds_UP.max(axis=1, keepdims=True))
        share_P += shop.activity_U @ (odds_UP / odds_UP.sum(axis=1, keepdims=True))
    return share_P / share_P.sum()


def _ials_by_forecast(trial: Trial, bundle: Bundle) -> Row:
    """Answer test by iALS times (π*/π)^γ; settings and γ are chosen on valid, by the forecast of valid's time."""
    recipe, dataset, ials = trial.recipe, trial.dataset, BASELINES["iALS"]
    metric, train = recipe.evaluation.metric, dataset.train
    learnt, data = trial.learnt_from(train, trial.valid), trial.learnt_from(trial.final.train, trial.task)
    settings = tuned(ials, trial.valid, learnt, metric, trial.facts)
    scores, gain_L = ials.fit(learnt, settings), _log_gain(learnt, fit_forecast(recipe, dataset, train))

    def found(power: float) -> float:
        top_NK = top_labels(trial.valid, learnt, _times(scores, power * gain_L))
        return trial.valid.metrics(top_NK, trial.facts)[metric].value

    power = max(_POWERS, key=found)
    assert bundle.forecast is not None
    scores = _times(ials.fit(data, settings), power * _log_gain(data, bundle.forecast))
    return Row(f"iALS × forecast (γ {power:g})", top_labels(trial.task, data, scores), None, None)


def _log_gain(data: Interactions, forecast: Forecast) -> Float64:
    """Return log π*/π, float64 [L]."""
    return forecast.log_popularity(whole=True) - log_frequencies(data.popularity)


def _times(scores: Scores, log_factor_L: Float64) -> Scores:
    """Multiply the part of scores above 0 by a factor."""
    factor_L = np.exp(log_factor_L).astype(np.float32)
    return lambda rows_B: np.maximum(scores(rows_B), 0) * factor_L


def _print(folder: Path, prior: str, metrics: Mapping[str, Interval]) -> None:
    first, *rest = (metrics.get(name) for name in _METRICS)
    assert first is not None
    figures = [f"{first.value:.4f} [{first.low:.4f}, {first.high:.4f}]"]
    figures += ["–" if each is None else f"{each.value:.4f}" for each in rest]
    print(f"| {folder.name} | {prior} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
