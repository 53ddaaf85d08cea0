"""SL@K: a positive counts by how far it is above the K-th highest score of its query (Yang et al. 2025) [METHODS §2.5].

Among all labels, or among those of the positive's own frequency bucket, of scores without the bias of training:
f + k·log ν [METHODS §9]. That score, β, is estimated for every query as training goes: each visit counts the labels
above the present β, without bias, by the draws that the loss has anyhow.

Legend: `B` rows, `N` training pairs, `A` requests, for every objective, `L` labels, `M` draws,
`U` distinct queries of a batch, `G` groups of labels that have a β of their own, `S` numbers that are kept of a query:
its G estimates, the spread of its scores, its visits.
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
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.backend.tensors import Tensors
from longtail.trainer.config import Recipe
from longtail.trainer.config.loss import TopKConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.limits import log_frequencies_of
from longtail.trainer.losses.implied_noise import implied_noise, power_of_q, removes_all
from longtail.trainer.losses.method import Method, Visit
from longtail.trainer.losses.objective import SampledLogits

_NO_BETA = -1e30
"""β of a positive that no K is given for: it counts in full."""


class QueryStates(NamedTuple):
    """What is kept of the queries of a batch, and which of it concerns which label.

    Attributes:
        state_BS: float32, zeros before the first visit.
        group_B, group_of_candidates: group of every row's positive, and of the candidates, int32 [M] or [B, M]; G of a
            label in none.
    """

    state_BS: Tensor
    group_B: Tensor
    group_of_candidates: Tensor


@dataclass(frozen=True)
class TopK:
    """The weight σ((f_y − β)/τ) of a positive, and β.

    Attributes:
        memory: visits of a query that its β is an average over, once there have been so many.
        never_the_positive: no draw is the positive of its row, which is then counted by itself.
    """

    k_G: tuple[int, ...]
    labels_G: tuple[int, ...]
    labels: int
    temperature: float
    memory: int
    never_the_positive: bool = False

    def beta(self, queries: QueryStates) -> Tensor:
        """β of every row's positive, float32 [B]: of its group; far below any score of a label in none."""
        beta_B = ops.full_like(queries.state_BS[:, 0], _NO_BETA)
        for group in range(len(self.k_G)):
            beta_B = ops.where(ops.equal(queries.group_B, group), queries.state_BS[:, group], beta_B)
        return beta_B

    def visited(
        self, queries: QueryStates, positive_B: Tensor, negative_BM: Tensor, stands_BM: Tensor, *, m: int
    ) -> tuple[QueryStates, Tensor]:
        """Compute what β is of the rows in this step, and their states after it, float32 [B, S]; both without gradient.

        A draw of a label with probability q stands for 1/(m·q) labels, so that the draws above β stand for as many as
        there are, on average [Horvitz and Thompson 1952]. β goes up where these are more than K − ½ and down where they
        are fewer, by steps that fall as one over the visits (Robbins and Monro 1951): to where the count goes from
        K − 1 to K, which is the K-th highest score. At the first visit it is the quantile of a normal distribution with
        the draws' mean and spread.

        Args:
            positive_B, negative_BM: scores of positives and candidates, float32; hits are labels like any other.
            stands_BM: labels that each candidate stands for, float32, of `stands_for`.
        """
        positive_B, scores_BM = ops.stop_gradient(positive_B), ops.stop_gradient(negative_BM)
        group_BM = queries.group_of_candidates + ops.zeros_like(scores_BM, dtype="int32")
        if self.never_the_positive:
            stands_BM = ops.concatenate([stands_BM, ops.ones_like(positive_B[:, None])], axis=1)
            scores_BM = ops.concatenate([scores_BM, positive_B[:, None]], axis=1)
            group_BM = ops.concatenate([group_BM, queries.group_B[:, None]], axis=1)
        mean_B, spread_B = _mean_and_spread(scores_BM, stands_BM)
        before_B, visits_B = queries.state_BS[:, -2], queries.state_BS[:, -1]
        first_B = ops.equal(visits_B, 0.0)
        now, after = [], []
        for group, (k, labels) in enumerate(zip(self.k_G, self.labels_G, strict=True)):
            of_group_BM = ops.where(ops.equal(group_BM, group), stands_BM, 0.0)
            start_B = mean_B + spread_B * NormalDist().inv_cdf(1 - (k - 0.5) / labels)
            beta_B = ops.where(first_B, start_B, queries.state_BS[:, group])
            above_B = ops.sum(ops.where(scores_BM > beta_B[:, None], of_group_BM, 0.0), axis=1)
            # One draw stands for L/m labels on average: so many visits tell as much as one of all labels.
            gain_B = 1 / (ops.clip(visits_B, 1.0, float(self.memory)) + self.labels / (m * (k - 0.5)))
            step_B = before_B * ops.clip(gain_B * (above_B / (k - 0.5) - 1), -1.0, 1.0)
            now.append(beta_B)
            after.append(ops.where(first_B, start_B, beta_B + step_B))
        moved_B = before_B + (spread_B - before_B) / (ops.minimum(visits_B, float(self.memory)) + 1)
        rest = [moved_B, visits_B + 1]
        at_B = queries._replace(state_BS=ops.stack([*now, before_B, visits_B], axis=1))
        return at_B, ops.stack([*after, *rest], axis=1)


def truncation(positive_B: Tensor, beta_B: Tensor, temperature: float) -> Tensor:
    """Compute σ((f_y − β)/τ), float32 [B].

    Example:
        >>> import numpy as np
        >>> truncation(np.float32([3, 1]), np.float32([1, 1]), 2.0).numpy().round(4)
        array([0.7311, 0.5   ], dtype=float32)
    """
    return ops.sigmoid((positive_B - beta_B) / temperature)


def _mean_and_spread(scores_BM: Tensor, stands_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a row's scores, as if every draw were so many labels; float32 [B] each."""
    total_B1 = ops.maximum(ops.sum(stands_BM, axis=1, keepdims=True), 1e-30)
    mean_B1 = ops.sum(stands_BM * scores_BM, axis=1, keepdims=True) / total_B1
    variance_B1 = ops.sum(stands_BM * ops.square(scores_BM - mean_B1), axis=1, keepdims=True) / total_B1
    return mean_B1[:, 0], ops.sqrt(variance_B1)[:, 0]


class HeldToTopK(Method):
    """Weighs positives by the K-th highest scores of their queries, and keeps β of every query."""

    name = "top_k"
    needs = ("_request",)
    weighs_draws = True

    def __init__(self, recipe: Recipe, config: TopKConfig, dataset: Dataset) -> None:
        self._request_keys = dataset.train.request_keys
        counts_L = dataset.label_counts()
        buckets_L = buckets_for(recipe.evaluation, counts_L).assign(counts_L)
        labels, buckets = len(counts_L), [BUCKET_NAMES.index(name) for name in config.by_bucket]
        group_L = np.full(labels, len(buckets), np.int32) if buckets else np.zeros(labels, np.int32)
        for group, bucket in enumerate(buckets):
            group_L[buckets_L == bucket] = group
        self.top_k = TopK(
            k_G=tuple(config.by_bucket.values()) if buckets else (config.whole,),
            labels_G=tuple(int(np.sum(group_L == group)) for group in range(max(len(buckets), 1))),
            labels=labels,
            temperature=config.temperature,
            memory=config.memory,
            never_the_positive=recipe.loss.sampler.never_the_positive,
        )
        self._published = config.published_gradient
        loss, objective = recipe.loss, recipe.loss.objective()
        link = removes_all(objective)
        self._times_log_q = 0.0 if loss.sampler.even else link * power_of_q(objective)
        log_pi_L = log_frequencies_of(recipe, dataset)
        beside_L = link * implied_noise(objective, log_pi_L, None, reweight=loss.reweight)
        self._beside_L = untrained_variable((beside_L - beside_L.mean()).astype(np.float32), "top_k_noise")
        queries = int(self._request_keys.max()) + 1
        self._states_AS = untrained_variable(np.zeros((queries, len(self.top_k.k_G) + 2), np.float32), "top_k")
        self._group_L = untrained_variable(group_L, "top_k_group")
        self.variables, self.constants = [self._states_AS], [self._group_L, self._beside_L]

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Make `_request`, int32 [B]: what every row asks (`Pairs.request_keys`)."""
        return {"_request": self._request_keys[rows_B].astype(np.int32)}

    def of_rows(self, visit: Visit) -> Tensors:
        """Get the states of the rows' queries, and the groups of their positives."""
        return {
            "top_k": backend.gather(self._states_AS, visit.batch["_request"]),
            "top_k group": backend.gather(self._group_L, visit.positive_B),
            "top_k noise": backend.gather(self._beside_L, visit.positive_B),
        }

    def of_candidates(self, candidates: Tensor) -> Tensors:
        """Get the groups of the candidates, and what their noise has beside q."""
        return {
            "top_k groups": backend.gather(self._group_L, candidates),
            "top_k noises": backend.gather(self._beside_L, candidates),
        }

    def visited(self, logits: SampledLogits, *, draws: int) -> Tensors:
        """Compute the logits at which positives are at β, and the states of their queries after this step."""
        rows = logits.rows
        before = QueryStates(rows["top_k"], rows["top_k group"], rows["top_k groups"])
        noise_B = rows["top_k noise"] + self._times_log_q * logits.log_q_positive_B
        negative_BM = logits.negative_BM + (rows["top_k noises"] + self._times_log_q * logits.log_q_negative)
        at_B, states_BS = self.top_k.visited(before, logits.positive_B + noise_B, negative_BM, rows["stands"], m=draws)
        return {"beta": self.top_k.beta(at_B) - noise_B, "top_k visited": states_BS}

    def target(self, losses_B: Tensor, logits: SampledLogits) -> Tensor:
        """Weigh the losses by how far their positives are above β."""
        weight_B = truncation(logits.positive_B, logits.rows["beta"], self.top_k.temperature)
        return losses_B * (weight_B if self._published else ops.stop_gradient(weight_B))

    def keep(self, batch: Mapping[str, Tensor], visited: Tensors) -> None:
        """Write the states; of rows that ask the same query, the mean."""
        asked_U, places_B = backend.unique(ops.convert_to_tensor(batch["_request"]), self._states_AS.shape[0])
        sums_US = ops.segment_sum(visited["top_k visited"], places_B, num_segments=ops.shape(asked_U)[0])
        rows_U1 = ops.maximum(backend.count(places_B, asked_U), 1.0)[:, None]
        backend.scatter(self._states_AS, asked_U, sums_US / rows_U1)
