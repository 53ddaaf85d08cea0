"""SL@K: weigh a positive by its margin over the K-th highest score of its query (Yang et al. 2025) [METHODS §2.5].

The K-th highest score, β, ranks all labels, or the labels of the positive's frequency bucket, by scores without the
bias of training: f + k·log ν [METHODS §9]. Training estimates β for every query. Each visit of a query gives an
unbiased estimate of the number of labels above the present β, from the draws that the loss uses anyway.

Legend: `B` rows, `N` training pairs, `A` requests per objective, `L` labels, `M` draws, `U` distinct queries of a
batch, `G` groups of labels with a β of their own, `S` numbers kept per query: G estimates of β, the spread of the
query's scores, its number of visits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from longtail.bundle import BUCKET_NAMES, Inputs
from longtail.bundle.arrays import Int64
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.config import Recipe
from longtail.trainer.config.loss import TopKConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.limits import assign_buckets, compute_log_frequencies
from longtail.trainer.losses import LossTerm, SampledLogits, StepInputs
from longtail.trainer.losses.implied_noise import compute_q_exponent, compute_slope, implied_noise

_NO_BETA = -1e30
"""β of a positive whose bucket has no K; the positive then has weight 1."""


class QueryStates(NamedTuple):
    """Hold the states of a batch's queries, and the groups of labels.

    Attributes:
        state_BS: float32, zeros before the first visit.
        group_B, group_of_candidates: group of every row's positive, int32 [B], and of the candidates, int32 [M] or
            [B, M]; a label without a group has G.
    """

    state_BS: Tensor
    group_B: Tensor
    group_of_candidates: Tensor


@dataclass(frozen=True)
class TopK:
    """Estimate β of every query.

    Attributes:
        memory: largest number of visits over which a query's β is averaged.
        never_the_positive: draws exclude the row's positive, which is then counted separately.
    """

    k_G: tuple[int, ...]
    labels_G: tuple[int, ...]
    labels: int
    temperature: float
    memory: int = 100
    never_the_positive: bool = False

    def beta(self, queries: QueryStates) -> Tensor:
        """Return β for the group of every row's positive, float32 [B]; `_NO_BETA` without a group."""
        beta_B = ops.full_like(queries.state_BS[:, 0], _NO_BETA)
        for group in range(len(self.k_G)):
            beta_B = ops.where(ops.equal(queries.group_B, group), queries.state_BS[:, group], beta_B)
        return beta_B

    def row_state(
        self, queries: QueryStates, positive_B: Tensor, negative_BM: Tensor, multiplicity_BM: Tensor, *, m: int
    ) -> tuple[QueryStates, Tensor]:
        """Return β and the states after this step, float32 [B, S], both without gradient.

        A draw of a label with probability q represents 1/(m·q) labels. The draws above β therefore give an unbiased
        count of the labels above β [Horvitz and Thompson 1952]. β rises if this count exceeds K − ½ and falls if it is
        lower, in steps that shrink as one over the visits (Robbins and Monro 1951). It converges to the score at which
        the count changes from K − 1 to K: the K-th highest. At the first visit, β is a quantile of the normal
        distribution with mean and spread of the draws.

        Args:
            positive_B, negative_BM: scores of positives and candidates, float32; accidental hits count as labels.
            multiplicity_BM: number of labels that each candidate represents, float32, of `multiplicity`.
        """
        positive_B, scores_BM = ops.stop_gradient(positive_B), ops.stop_gradient(negative_BM)
        group_BM = queries.group_of_candidates + ops.zeros_like(scores_BM, dtype="int32")
        # The positive is never drawn, but is a label that may lie above β.
        if self.never_the_positive:
            multiplicity_BM = ops.concatenate([multiplicity_BM, ops.ones_like(positive_B[:, None])], axis=1)
            scores_BM = ops.concatenate([scores_BM, positive_B[:, None]], axis=1)
            group_BM = ops.concatenate([group_BM, queries.group_B[:, None]], axis=1)
        mean_B, spread_B = _mean_and_spread(scores_BM, multiplicity_BM)
        old_spread_B, visits_B = queries.state_BS[:, -2], queries.state_BS[:, -1]
        first_B = ops.equal(visits_B, 0.0)
        beta, next_state = [], []
        for group, (k, labels) in enumerate(zip(self.k_G, self.labels_G, strict=True)):
            group_multiplicity_BM = ops.where(ops.equal(group_BM, group), multiplicity_BM, 0.0)
            start_B = mean_B + spread_B * NormalDist().inv_cdf(1 - (k - 0.5) / labels)
            beta_B = ops.where(first_B, start_B, queries.state_BS[:, group])
            above_B = ops.sum(ops.where(scores_BM > beta_B[:, None], group_multiplicity_BM, 0.0), axis=1)
            # One draw represents L/m labels on average, so L/(m·(K − ½)) visits give as much information about the
            # count as one visit that scores all labels.
            gain_B = 1 / (ops.clip(visits_B, 1.0, float(self.memory)) + self.labels / (m * (k - 0.5)))
            # Steps are in units of the score's spread, and clipped so that one noisy count cannot move β far.
            step_B = old_spread_B * ops.clip(gain_B * (above_B / (k - 0.5) - 1), -1.0, 1.0)
            beta.append(beta_B)
            next_state.append(ops.where(first_B, start_B, beta_B + step_B))
        new_spread_B = old_spread_B + (spread_B - old_spread_B) / (ops.minimum(visits_B, float(self.memory)) + 1)
        present = queries._replace(state_BS=ops.stack([*beta, old_spread_B, visits_B], axis=1))
        return present, ops.stack([*next_state, new_spread_B, visits_B + 1], axis=1)


def truncation(positive_B: Tensor, beta_B: Tensor, temperature: float) -> Tensor:
    """Compute σ((f_y − β)/τ), float32 [B].

    Example:
        >>> import numpy as np
        >>> truncation(np.float32([3, 1]), np.float32([1, 1]), 2.0).numpy().round(4)
        array([0.7311, 0.5   ], dtype=float32)
    """
    return ops.sigmoid((positive_B - beta_B) / temperature)


def _mean_and_spread(scores_BM: Tensor, multiplicity_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a row's scores, weighted by `multiplicity_BM`; float32 [B] each."""
    total_B1 = ops.maximum(ops.sum(multiplicity_BM, axis=1, keepdims=True), 1e-30)
    mean_B1 = ops.sum(multiplicity_BM * scores_BM, axis=1, keepdims=True) / total_B1
    variance_B1 = ops.sum(multiplicity_BM * ops.square(scores_BM - mean_B1), axis=1, keepdims=True) / total_B1
    return mean_B1[:, 0], ops.sqrt(variance_B1)[:, 0]


class WeighByTopK(LossTerm):
    """Weigh positives by their queries' K-th highest scores, and remember β by query."""

    reads_multiplicity = True

    def __init__(self, recipe: Recipe, config: TopKConfig, dataset: Dataset) -> None:
        self._request_keys = dataset.train.request_keys
        buckets_L = assign_buckets(recipe, dataset)
        labels, buckets = len(buckets_L), [BUCKET_NAMES.index(name) for name in config.by_bucket]
        group_L = np.full(labels, len(buckets), np.int32) if buckets else np.zeros(labels, np.int32)
        for group, bucket in enumerate(buckets):
            group_L[buckets_L == bucket] = group
        self.top_k = TopK(
            k_G=tuple(config.by_bucket.values()) if buckets else (config.k_overall,),
            labels_G=tuple(int(np.sum(group_L == group)) for group in range(max(len(buckets), 1))),
            labels=labels,
            temperature=config.temperature,
            never_the_positive=recipe.loss.sampler.never_the_positive,
        )
        loss, objective = recipe.loss, recipe.loss.objective()
        # Scores without the bias of training are f + link·log ν. The part of log ν from q differs by sampler and step,
        # so it is added in `visited`; the rest is fixed per label (`fixed_noise_L`).
        link = compute_slope(objective)
        self._times_log_q = 0.0 if loss.sampler.even else link * compute_q_exponent(objective)
        log_pi_L = compute_log_frequencies(recipe, dataset)
        fixed_noise_L = link * implied_noise(objective, log_pi_L, None, reweight=loss.reweight)
        fixed_noise_L = (fixed_noise_L - fixed_noise_L.mean()).astype(np.float32)
        self._fixed_noise_L = untrained_variable(fixed_noise_L, "top_k_noise")
        queries = int(self._request_keys.max()) + 1
        self._states_AS = untrained_variable(np.zeros((queries, len(self.top_k.k_G) + 2), np.float32), "top_k")
        self._group_L = untrained_variable(group_L, "top_k_group")
        self.variables, self.constants = [self._states_AS], [self._group_L, self._fixed_noise_L]

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_request`, int32 [B]: the request of every row (`Pairs.request_keys`)."""
        return {"_request": self._request_keys[rows_B].astype(np.int32)}

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Return the states of rows' queries, and every positive's group and fixed noise."""
        return {
            "top_k": backend.gather(self._states_AS, step.batch["_request"]),
            "top_k group": backend.gather(self._group_L, step.positive_B),
            "top_k noise": backend.gather(self._fixed_noise_L, step.positive_B),
        }

    def candidate_tensors(self, candidates: Tensor) -> Tensors:
        """Return the candidates' groups, and the part of their noise that q lacks."""
        return {
            "top_k groups": backend.gather(self._group_L, candidates),
            "top_k noises": backend.gather(self._fixed_noise_L, candidates),
        }

    def row_state(self, logits: SampledLogits, *, draws: int) -> Tensors:
        """Compute β as a logit of every positive, and the queries' new states."""
        rows = logits.rows
        queries = QueryStates(rows["top_k"], rows["top_k group"], rows["top_k groups"])
        noise_B = rows["top_k noise"] + self._times_log_q * logits.log_q_positive_B
        negative_BM = logits.negative_BM + (rows["top_k noises"] + self._times_log_q * logits.log_q_negative)
        present, states_BS = self.top_k.row_state(
            queries, logits.positive_B + noise_B, negative_BM, rows["multiplicity"], m=draws
        )
        return {"beta": self.top_k.beta(present) - noise_B, "top_k state": states_BS}

    def target(self, losses_B: Tensor, logits: SampledLogits) -> Tensor:
        """Weigh the losses by the margins of their positives over β."""
        weight_B = truncation(logits.positive_B, logits.rows["beta"], self.top_k.temperature)
        return losses_B * ops.stop_gradient(weight_B)

    def update_state(self, batch: Mapping[str, Tensor], row_state: Tensors) -> None:
        """Write the states; rows with the same request write their mean."""
        requests_U, positions_B = backend.unique(ops.convert_to_tensor(batch["_request"]), self._states_AS.shape[0])
        sums_US = ops.segment_sum(row_state["top_k state"], positions_B, num_segments=ops.shape(requests_U)[0])
        rows_U1 = ops.maximum(backend.count(positions_B, requests_U), 1.0)[:, None]
        backend.scatter(self._states_AS, requests_U, sums_US / rows_U1)
