"""Choose the dials and the term of co-occurrence on valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from longtail.bundle import BiasRemoval, CurvePoint, Popularity
from longtail.bundle.arrays import Int32
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.trainer.cooccurrence import TermChoice, choose_term
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.cooccurrence import HistoryEntries
from longtail.trainer.evaluation.dial import (
    Dial,
    Setting,
    best_dial,
    best_with_bonus,
    describe_choice,
    lines,
    prior_grid,
    select_with_prior,
)
from longtail.trainer.evaluation.ranking import tower_lists
from longtail.trainer.evaluation.target import HitsByLabel, list_tail_settings
from longtail.trainer.evaluation.task import VALID_QUERIES, Task
from longtail.trainer.trained import Trained


def create_hit_counter(trained: Trained) -> HitsByLabel:
    """Create the counter of hits by label for `choose_dial`."""
    recipe, label_ids, theory = trained.recipe, trained.dataset.label_ids, dict[str, Setting]()
    if trained.model.proposal is None and trained.slope:  # where scores are the slope times log p*(y|x) [METHODS §9]
        theory["train"] = Setting(trained.theoretical_bias_removal())
        removed = theory["train"].bias_removal
        has_own_noise = trained.noise().separate_prior and not trained.noise().ahead
        theory["uniform"] = Setting(removed, -trained.slope) if has_own_noise else Setting(0.0)
    k = min(int(recipe.evaluation.k), len(label_ids))
    return HitsByLabel(k, label_ids, np.exp(trained.log_visits), len(label_ids), theory)


class Chosen(NamedTuple):
    """Hold the dials with their curve on valid, and the term of co-occurrence.

    Attributes:
        towers: the best setting without the term.
    """

    dial: Dial
    cooccurrence: Cooccurrence | None
    towers: Setting


def choose_dial(trained: Trained, dataset: Dataset, hits: HitsByLabel | None = None) -> Chosen:
    """Choose λ, μ, ω and β on valid.

    With a target prior, the best recall under this prior decides, over the curve and μ < 0. Without valid, μ is 0 and λ
    is the recipe's default, or else the λ that removes the training bias in theory [METHODS §9].

    Args:
        hits: counter from `create_hit_counter`, to which the labels found at every setting are added.
    """
    hits = hits or create_hit_counter(trained)
    config, noise = trained.recipe.evaluation, trained.noise()
    curve, term, weights = list[CurvePoint](), None, list[float]()
    if len(dataset.valid):
        why = describe_choice(config)
        held_out, past = dataset.with_past(dataset.valid, dataset.train, config.history)
        features = trained.encoding.query.with_history(past)

        def measure(settings: list[Setting]) -> list[CurvePoint]:
            return trained.curve(held_out, past, settings, features=features, watch=hits.count_hits)

        forecast = trained.forecast(dataset.train)
        seasonal = forecast is not None and forecast.settings.calendar is not None and any(prior_grid(config))
        best, curve = best_dial(measure, config, noise, seasonal=seasonal)
        of_curve = [Setting.read_point(point) for point in curve]
        hits.keep(of_curve)
        beyond = list_tail_settings(of_curve, separate_prior=noise.separate_prior)
        tail_points = measure(beyond) if beyond else []
        if config.target_prior is not None:
            best, _ = hits.best(config.target_prior)
            why = f"target prior {config.target_prior} and valid recall@{hits.k}"
            curve += [point for point in tail_points if Setting.read_point(point) == best]
        towers = best
        if (of_term := trained.recipe.cooccurrence) is not None:
            choice = _choose_term(trained, dataset, held_out, past, select_with_prior(curve) if seasonal else curve)
            if choice is not None:
                term, best = choice.cooccurrence, choice.best if choice.best.cooccurrence else towers
                trained = replace(trained, cooccurrence=term)
                weights = [0.0, *of_term.weights]
                curve = measure([*lines(config, noise, best, weights), towers])
                hits.keep([Setting.read_point(point) for point in curve])
        if config.target_prior is None:
            alone = partial(trained.curve, held_out, past, features=features)
            points = select_with_prior(curve) if seasonal else curve
            best, before = best_with_bonus(alone, points, best, config, noise), best
            if best != before:
                curve = alone(lines(config, noise, best, weights) + ([] if term is None else [towers]))
    elif len(config.bias_removal) == 1:
        why, best = "the recipe, for want of validation data", Setting(config.bias_removal[0])
    else:
        removed = trained.theoretical_bias_removal()
        theory = Setting(0.0, trained.slope) if noise.ahead else Setting(removed)
        why, best = "theory, for want of validation data", theory
    bias_removal = BiasRemoval(
        default=best.bias_removal,
        minimum=0.0 if trained.model.proposal is not None else -1.0,
        noise=noise.name,
        chosen_by=why,
        curve_split="valid" if curve else "none",
        curve=curve,
    )
    if term is not None:
        term = term.scaled(1.0, default=best.cooccurrence)
    dial = Dial(
        bias_removal, Popularity(default=best.popularity), None if term is None else term.settings,
        best.bonus_dials,
    )  # fmt: skip
    return Chosen(dial, term, best if term is None else towers)


def _choose_term(
    trained: Trained, dataset: Dataset, held_out: Pairs, past: Past, curve: Sequence[CurvePoint]
) -> TermChoice | None:
    """Choose the term at some settings of the towers."""
    recipe, model = trained.recipe, trained.ranked_model(past)
    config, labels = recipe.evaluation, len(dataset.label_ids)
    task = Task.create(held_out, past, config, labels=labels, seed=recipe.seed, max_queries=VALID_QUERIES)
    lists, _ = tower_lists(task, model, [Setting.read_point(point) for point in curve])
    facts = model.label_side.facts(config)
    hits = None if config.target_prior is None else create_hit_counter(trained)

    def metric(task: Task, top_NK: Int32) -> float:
        if hits is not None and config.target_prior is not None:
            of_lists = replace(hits, hits={})  # threads share `hits`
            of_lists.count_hits(Setting(0.0), top_NK, task.positives)
            return of_lists.best(config.target_prior)[1]
        value_N, weight_N = task.ratio(config.metric, top_NK, facts)
        return float(value_N.sum() / max(weight_N.sum(), 1e-300))

    def error(first_NK: Int32, second_NK: Int32) -> float:
        if hits is not None:  # a reweighted recall has no values by query
            return 0.0
        return task.error(config.metric, first_NK, second_NK, facts)

    entries, k = HistoryEntries(past, recipe.history_events), min(int(config.k), labels)
    return choose_term(recipe, dataset, task, lists, entries, metric=metric, error=error, k=k)
