"""What a training step keeps from visit to visit of its pairs and of its queries, in checkpoints and in no bundle.

Legend: `B` batch, `N` training pairs, `A` queries as they are asked, for every objective, `L` labels, `S` as `TopK` has
it, `U` distinct queries of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int8
from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.losses import LOSSES
from longtail.trainer.losses.batch_loss import Visited
from longtail.trainer.losses.top_k import QueryStates, TopK
from longtail.trainer.model.two_tower import untrained_variable


class Askings(NamedTuple):
    """What the K-th highest scores of a job are of.

    Attributes:
        number: A; numbers of queries in batches are below it.
        buckets_L: bucket of every label, int8, as `Buckets.assign` has it.
    """

    number: int
    buckets_L: Int8

    @classmethod
    def of(cls, recipe: Recipe, dataset: Dataset) -> Askings | None:
        """Return those of a job's training pairs; None where its loss has no `top_k`."""
        if recipe.loss.top_k is None:
            return None
        counts_L = dataset.label_counts()
        buckets = buckets_for(recipe.evaluation, counts_L)
        return cls(int(dataset.train.asked_for.max()) + 1, buckets.assign(counts_L))


class Kept:
    """log η of every pair for `augment_and_reduce`, and β of every query for `top_k`; neither for other losses.

    Args:
        askings: what `top_k` is of; None where a recipe has none.

    Attributes:
        top_k: how β is estimated and used; None without.
    """

    def __init__(
        self, recipe: Recipe, *, pairs: int, labels: int, steps_per_epoch: int, askings: Askings | None
    ) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._log_eta_N = (
            keras.Variable(np.full(pairs, np.log(labels), np.float32), trainable=False, name="log_eta")
            if LOSSES[recipe.loss.family.name].stateful
            else None
        )
        self.top_k: TopK | None = None
        self._states_AS: keras.Variable | None = None
        self._group_L: keras.Variable | None = None
        if (config := recipe.loss.top_k) is not None:
            if askings is None:
                raise ValueError("a step with top_k: expected askings, of which β is kept, received none")
            buckets = [BUCKET_NAMES.index(name) for name in config.by_bucket]
            group_L = np.full(labels, len(buckets), np.int32) if buckets else np.zeros(labels, np.int32)
            for group, bucket in enumerate(buckets):
                group_L[askings.buckets_L == bucket] = group
            self.top_k = TopK(
                k_G=tuple(config.by_bucket.values()) if buckets else (config.whole,),
                labels_G=tuple(int(np.sum(group_L == group)) for group in range(max(len(buckets), 1))),
                labels=labels,
                temperature=config.temperature,
                memory=config.memory,
                never_the_positive=recipe.loss.sampler.never_the_positive,
            )
            size = len(self.top_k.k_G) + 2
            self._states_AS = untrained_variable(np.zeros((askings.number, size), np.float32), "top_k")
            self._group_L = untrained_variable(group_L, "top_k_group")

    @property
    def variables(self) -> list[keras.Variable]:
        """Return what steps change, in a fixed order."""
        return [variable for variable in (self._log_eta_N, self._states_AS) if variable is not None]

    @property
    def constants(self) -> list[keras.Variable]:
        """Return what they read."""
        return [] if self._group_L is None else [self._group_L]

    def eta(self, batch: dict[str, Tensor], steps_done: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """log η of a batch's pairs, float32 [B], and the step size of η, float32 scalar; None of a family without."""
        if self._log_eta_N is None:
            return None, None
        epochs_done = steps_done // self._steps_per_epoch
        rate = ops.minimum(ops.power(1.0 + ops.cast(epochs_done, "float32"), -0.9), 1 - 1e-6)
        return backend.gather(self._log_eta_N, batch["_pair"]), rate

    def queries(self, batch: dict[str, Tensor], candidates: Tensor) -> QueryStates | None:
        """Return what is kept of a batch's queries, and the groups of its labels; None without `top_k`.

        Args:
            batch: as a step is called with, `_asking` int32 [B] in it.
            candidates: label rows, int32 [M] or [B, M].
        """
        if self._states_AS is None:
            return None
        if "_asking" not in batch:
            raise ValueError("a step with top_k: expected _asking in its batch, received none")
        return QueryStates(
            backend.gather(self._states_AS, batch["_asking"]),
            backend.gather(self._group_L, batch["_positive"]),
            backend.gather(self._group_L, candidates),
        )

    def keep(self, batch: dict[str, Tensor], visited: Visited) -> None:
        """Write what a batch, columns [B], has made of it; of rows that ask the same query, the mean."""
        if self._log_eta_N is not None and visited.log_eta_B is not None:
            backend.scatter(self._log_eta_N, batch["_pair"], visited.log_eta_B)
        if self._states_AS is not None and visited.states_BS is not None:
            asked_U, places_B = backend.unique(ops.convert_to_tensor(batch["_asking"]), self._states_AS.shape[0])
            sums_US = ops.segment_sum(visited.states_BS, places_B, num_segments=ops.shape(asked_U)[0])
            rows_U1 = ops.maximum(backend.count(places_B, asked_U), 1.0)[:, None]
            backend.scatter(self._states_AS, asked_U, sums_US / rows_U1)
