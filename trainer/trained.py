"""The result of training: a model, the data to evaluate and export it, and the choice of λ and μ on valid.

Legend: `B` queries, `L` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import keras
import numpy as np

from longtail.bundle import BiasRemoval, CurvePoint, Popularity
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.forecast import Forecast
from longtail.trainer.config import Recipe
from longtail.trainer.cooccurrence import TermChoice, choose_term
from longtail.trainer.data.batches import QueryInputs
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm
from longtail.trainer.evaluation.dial import (
    Dial,
    Noise,
    Setting,
    best_dial,
    best_with_bonus,
    describe_choice,
    lines,
    prior_grid,
    select_with_prior,
)
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import (
    RankedModel,
    Watch,
    bias_removal_curve,
    create_log_proposal,
    create_unknown_finder,
    define_buckets,
    tower_lists,
)
from longtail.trainer.evaluation.target import HitsByLabel, list_tail_settings
from longtail.trainer.evaluation.task import VALID_QUERIES, Task
from longtail.trainer.history import TrainingHistory
from longtail.trainer.limits import compute_log_frequencies
from longtail.trainer.losses.implied_noise import (
    SAME,
    compute_q_exponent,
    compute_slope,
    implied_noise,
    name_noise,
    name_tree_noise,
)
from longtail.trainer.model.step import TrainStep
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.prior import fit_forecast_once


@dataclass(frozen=True)
class Trained:
    """A trained model with its data and term of co-occurrence."""

    recipe: Recipe
    dataset: Dataset
    encoding: Encoding
    model: TwoTower
    step: TrainStep
    history: TrainingHistory
    cooccurrence: Cooccurrence | None = None

    @cached_property
    def _log_pi(self) -> Float64:
        return compute_log_frequencies(self.recipe, self.dataset)

    def forecast(self, known_pairs: Pairs) -> Forecast | None:
        """Fit π* of the horizon after the known pairs; None for kind `count`."""
        forecast = fit_forecast_once(self.recipe, self.dataset, known_pairs)
        if forecast is None or self._log_offset is None:
            return forecast
        rarest = float(self._log_offset[self._log_pi.argmin()])
        settings = forecast.settings.model_copy(update={"offset": rarest})
        return replace(forecast, settings=settings, offset=self._log_offset)

    @cached_property
    def _log_offset(self) -> Float64 | None:
        """Compute log ν − log π_w, float64 [L], nats [METHODS §6]; None if ν is π_w.

        π_w are the shares of the training pairs as weighed in the loss; π* counts events by the weights of their types.
        """
        train, labels = self.dataset.train, len(self.dataset.label_ids)
        offset_L = self.log_noise - self.log_visits
        if train.weights is not None:
            weights_N = train.weights.astype(np.float64)
            # The mean weight of a label's pairs, smoothed like its frequency.
            more = self.recipe.loss.smoothing
            total_L = np.bincount(train.labels, weights_N, labels) + more * weights_N.mean()
            offset_L = offset_L - np.log(total_L / (self.dataset.label_counts() + more))
        return offset_L if np.ptp(offset_L) > SAME else None

    def label_side(self, known_pairs: Pairs | None = None, *, served: bool = False) -> LabelSide:
        """Return embeddings, biases, log ν, log π and buckets of all labels.

        Args:
            known_pairs: the pairs before the forecast period; by default the training pairs.
            served: labels with a future date get π* = 0, as in the bundle.
        """
        counts = self.dataset.label_counts()
        log_pi, log_nu = self._log_pi, self.log_noise
        if (forecast := self.forecast(self.dataset.train if known_pairs is None else known_pairs)) is not None:
            log_pi = forecast.log_popularity(include_future=not served)
        return LabelSide.build(
            self.model.embed_labels(),
            self.model.label_biases(),
            counts,
            training_queries=self.dataset.training_queries(),
            temperature=self.model.temperature,
            log_pn=log_nu.astype(np.float32),
            buckets=define_buckets(self.recipe.evaluation, counts),
            log_popularity=None if np.array_equal(log_nu, log_pi) else log_pi.astype(np.float32),
        )

    @cached_property
    def log_visits(self) -> Float64:
        """Return log π of unweighted pairs, float64 [L], nats."""
        return compute_log_frequencies(self.recipe, self.dataset, weighted=False)

    @cached_property
    def log_noise(self) -> Float64:
        """Return log ν of every label, float64 [L], nats [METHODS §9]; log π if a tree is the noise."""
        log_pi, sampler = self._log_pi, self.step.sampler
        if self.model.proposal is not None:
            return log_pi
        log_q = sampler.log_q_L
        if sampler.q_of_pi is not None:  # batches hold unweighted pairs; smoothing keeps ν finite
            log_q = keras.ops.convert_to_numpy(sampler.q_of_pi(self.log_visits))
        loss, log_miss = self.recipe.loss, None
        if sampler.log_miss is not None:
            log_miss = keras.ops.convert_to_numpy(sampler.log_miss(keras.ops.convert_to_tensor(log_q)))
        return implied_noise(loss.objective(), log_pi, log_q, log_miss, reweight=loss.reweight)

    def noise(self) -> Noise:
        """Return the noise that the λ of this model removes."""
        loss, log_pi, ahead = self.recipe.loss, self._log_pi, self.recipe.prior.kind != "count"
        shared = ", of all objectives' pairs" if self.recipe.objectives else ""
        if self.model.proposal is not None:
            named = name_tree_noise(loss.objective(), log_pi, reweight=loss.reweight)
            return Noise(named + loss.noise_suffix + shared, constant=False, separate_prior=True)
        log_nu = self.log_noise
        has_own_noise = ahead or not np.array_equal(log_nu, log_pi)
        constant = has_own_noise and bool(np.ptp(log_nu) == 0)
        named = name_noise(log_nu, log_pi, reweight=loss.reweight)
        if power := self._power_of_scores * compute_q_exponent(loss.objective()):
            drawn = "exp(f)" if power == 1 else f"exp({power:.4g}·f)"
            named = drawn if constant else f"{drawn} · {named}"
        named += loss.noise_suffix
        return Noise(
            named if constant else named + shared, constant=constant, separate_prior=has_own_noise, ahead=ahead
        )

    @property
    def calibrated_at(self) -> float:
        """Return the λ of the recipe's calibrated scores; 0 if ν is in fact constant."""
        return 0.0 if self.noise().constant else self.recipe.loss.calibrated_at

    @property
    def _power_of_scores(self) -> float:
        return self.recipe.loss.sampler.power_of_scores(self.model.temperature)

    @property
    def slope(self) -> float:
        """Return the slope of scores in log p(y|x); 0 if no λ ranks by p(y|x)."""
        return compute_slope(self.recipe.loss.objective(), power_of_scores=self._power_of_scores)

    def theoretical_bias_removal(self) -> float:
        """Return the λ that removes the training bias in theory [METHODS §9]."""
        if self.model.proposal is not None:
            # Below 0 a tree's search would look for labels of almost no probability.
            return max(self.slope * compute_q_exponent(self.recipe.loss.objective()), 0.0)
        return 0.0 if self.noise().constant else self.slope

    def curve(
        self,
        held_out: Pairs,
        past: Past,
        settings: Sequence[Setting],
        *,
        features: QueryInputs | None = None,
        max_queries: int | None = None,
        watch: Watch | None = None,
    ) -> list[CurvePoint]:
        """Measure every metric at some settings; pairs and past are as in `Dataset.with_past`.

        Args:
            features: query features with the histories of the past; by default they are made.
        """
        model = self.ranked_model(past, features)
        return bias_removal_curve(
            held_out, past, model, self.recipe.evaluation, seed=self.recipe.seed, max_queries=max_queries,
            settings=settings, watch=watch,
        )  # fmt: skip

    def ranked_model(self, past: Past, features: QueryInputs | None = None) -> RankedModel:
        """Return the model as evaluation ranks by it, with the histories of a past.

        Args:
            features: query features with these histories; by default they are made.
        """
        read = self.encoding.query.with_history(past) if features is None else features
        # With a forecast no column of the labels is log π*, by which rows without known features are ranked.
        ahead = self.recipe.prior.kind != "count" and self._log_offset is not None
        return RankedModel(
            lambda rows_B: self.model.embed_queries(read.query_inputs(rows_B)),
            self.label_side(past.known_pairs),
            create_log_proposal(self.model.proposal, read),
            self.term(past),
            None if ahead else create_unknown_finder(self.encoding.query_features, read),
            calibrated_at=self.calibrated_at,
            described=self.recipe.describes_labels,
        )

    def term(self, past: Past) -> HistoryTerm | None:
        """Return what computes c of the rows of a past; None without the term."""
        term = self.cooccurrence
        return None if term is None else HistoryTerm(term, HistoryEntries(past, self.recipe.history_events))

    def embed_queries(self, rows_B: Int32) -> Float32:
        """Embed queries given by `Pairs.request_rows`, int32 [B]; float32 [B, D]."""
        return self.model.embed_queries(self.encoding.query.query_inputs(rows_B))


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
    """The dials with their curve on valid, and the term of co-occurrence; `towers` is the best setting without it."""

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
        measured = measure(beyond) if beyond else []
        if config.target_prior is not None:
            best, _ = hits.best(config.target_prior)
            why = f"target prior {config.target_prior} and valid recall@{hits.k}"
            curve += [point for point in measured if Setting.read_point(point) == best]
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
