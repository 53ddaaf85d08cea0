"""Terms for rows of the same query: pooled positives, shared negatives, objectives, own entry in audiences.

Legend: `B` batch, `N` training pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import keras
import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int64
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.data.audience import Audience
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.losses import FamilyInputs, LogWeight, LossTerm, StepInputs
from longtail.trainer.losses.families import pool_positives
from longtail.trainer.model.towers import map_by_objective


class PooledPositives(LossTerm):
    """Pool the positives of one request's rows into one term, per batch part."""

    joins_rows = True

    def __init__(self, train: Pairs, parts: int) -> None:
        self._request_keys, self._parts = train.request_keys, parts

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_group`, int32 [B]: a number per distinct request, counted from 0 in every part of the batch."""
        parts = np.split(self._request_keys[rows_B], self._parts)
        return {"_group": np.concatenate([np.unique(part, return_inverse=True)[1] for part in parts]).astype(np.int32)}

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Return the group of every row."""
        return {"group": ops.convert_to_tensor(step.batch["_group"])}

    def negatives(self, inputs: FamilyInputs, rows: Tensors, *, offset: float) -> FamilyInputs:  # noqa: ARG002
        """Replace positives by the pooled positive of their group."""
        positive_B, negative_BM, log_weight_BM = inputs
        return pool_positives(positive_B, rows["group"]), negative_BM, log_weight_BM


class NegativesPerQuery(LossTerm):
    """Count a query's negatives once for its n training pairs, 1/n each [METHODS §2.7]."""

    def __init__(self, train: Pairs) -> None:
        self._weight_N = train.weight_of_owner()
        weight_N = np.ones(len(train)) if train.weights is None else train.weights
        self.pairs_per_query = float(weight_N.sum() / (weight_N / self._weight_N).sum())

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_pairs`, float32 [B]: the total weight n of the pairs of the row's query."""
        return {"_pairs": self._weight_N[rows_B]}

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Return log n of every row."""
        return {"log_pairs": ops.log(ops.convert_to_tensor(step.batch["_pairs"]))}

    def weight(self, weight: LogWeight, rows: Tensors) -> LogWeight:
        """Divide the weights of negatives by n."""
        return weight._replace(row=weight.row - rows["log_pairs"])


class ByObjective(LossTerm):
    """Map each row's query by the row's own objective [METHODS §2.4]."""

    def __init__(self, train: Pairs) -> None:
        self._objectives_N = train.objectives

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_objective`, int32 [B]: the index of the row's objective in the recipe."""
        return {} if self._objectives_N is None else {"_objective": self._objectives_N[rows_B]}

    def context(self, tower: keras.Model, batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Map each row by its own objective inside the block."""
        return map_by_objective(tower, batch.get("_objective"))


class OwnInAudience(LossTerm):
    """Exclude a row's own query from the audience of the row's positive."""

    def __init__(self, audience: Audience) -> None:
        self._audience = audience

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_own`, int32 [B, 2]: first entry and number of entries of the row's query in the audience."""
        return {"_own": self._audience.entry_ranges[rows_B]}
