"""The result of training: a model, the data to evaluate and export it, and the choice of λ and μ on valid.

Legend: `B` queries, `L` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import keras
import numpy as np

from longtail.bundle import CurvePoint
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.forecast import Forecast
from longtail.trainer.config import Recipe
from longtail.trainer.data.batches import QueryInputs
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm
from longtail.trainer.evaluation.dial import Noise, Setting
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import (
    RankedModel,
    Watch,
    bias_removal_curve,
    create_log_proposal,
    create_unknown_finder,
    define_buckets,
)
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
        """Return the noise that the λ of this model adds back."""
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
