"""Negatives from columns of the data: impressions, and labels that the model itself retrieved (ANCE).

No sampler drew these negatives. They have the recipe's weight, and neither mining nor the regularizer applies to them.

Legend: `N` training pairs, `B` batch, `S` negatives that a term adds to a row, `A` requests, `K` length of a list,
`L` labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.sets import distinct
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.checkpoint import Checkpoints
from longtail.trainer.config import Recipe
from longtail.trainer.config.loss import RetrievedConfig
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import CheckpointError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import EmbedQueries, RankedModel, rank
from longtail.trainer.losses import MASKED, FamilyInputs, LossTerm, StepInputs
from longtail.trainer.losses.hits import mask_hits


class ColumnNegatives(LossTerm):
    """Add negatives from a column, all with the same weight; short lists are filled up with the row's positive."""

    adds_negatives = True

    def __init__(self, name: str, weight: float) -> None:
        self.name, self._weight = name, weight

    def extra_negatives(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the negatives of every row, int32 [B, S]."""
        return ops.convert_to_tensor(batch[f"_{self.name}"])

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Return the negatives of every row, and mask labels that must not be negatives."""
        labels_BS = self.extra_negatives(step.batch)
        # This also masks the row's positive, which fills up short lists.
        masked_BS = mask_hits("mask", labels_BS, step.positive_B, in_batch=False)
        excluded_BS = step.excluded(labels_BS)
        if excluded_BS is not None:
            masked_BS = ops.logical_or(masked_BS, excluded_BS)
        return {self.name: labels_BS, f"{self.name} masked": masked_BS}

    def negatives(self, inputs: FamilyInputs, rows: Tensors, *, offset: float) -> FamilyInputs:
        """Append the negatives to the sampled ones."""
        positive_B, negative_BM, log_weight_BM = inputs
        logits_BS = ops.cast(rows[f"{self.name} logits"], "float32") + offset
        log_weight_BS = ops.where(rows[f"{self.name} masked"], MASKED, np.float32(math.log(self._weight)))
        return (
            positive_B,
            ops.concatenate([negative_BM, logits_BS], axis=1),
            ops.concatenate([log_weight_BM, log_weight_BS], axis=1),
        )


class Impressions(ColumnNegatives):
    """Use labels that were shown with a row and not chosen [METHODS §2.3].

    `impressions` has the label rows of every list; None without lists.
    """

    def __init__(self, weight: float, train: Pairs, impressions: Bags | None) -> None:
        super().__init__("shown", weight)
        self._impressions, self._list_of_N = impressions, train.shown_rows

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_shown`, int32 [B, S]."""
        if self._impressions is None or self._list_of_N is None:
            return {}
        return {"_shown": self._impressions.filled(self._list_of_N[rows_B], batch["_positive"])}


class Retrieved(ColumnNegatives):
    """Use labels that rank high for a query when an epoch begins [METHODS §3.1].

    Lists come from an exact search of the whole catalogue, with every query as it is after all its training pairs. They
    exclude the query's training positives, and labels that are never negatives.

    Attributes:
        lists_AK: label rows, best first, int32; −1 after the last of a short list.
    """

    stream = 1

    def __init__(self, recipe: Recipe, config: RetrievedConfig, dataset: Dataset) -> None:
        super().__init__("retrieved", 1.0)
        self._config, self._dataset = config, dataset
        train = dataset.train
        self._rows_A = distinct(train.request_rows)
        weighed_L = np.bincount(train.labels, train.weights, minlength=len(dataset.label_ids))
        self._negatives_L = (weighed_L > 0) | (not recipe.describes_labels)
        self.lists_AK = np.full((1, 1), -1, np.int32)
        self.list_of_N = np.zeros(len(dataset.train), np.int32)

    def begin_epoch(
        self, epoch: int, checkpoints: Checkpoints, embed_queries: EmbedQueries, label_side: Callable[[], LabelSide],
        *, within: bool,
    ) -> None:  # fmt: skip
        """Search the lists of an epoch, or read them from the checkpoint's folder; do nothing in the first epoch."""
        if epoch == 0:
            return
        stored = checkpoints.read(self.name)
        if stored is not None and stored[1]["epoch"] == epoch:
            self.lists_AK = stored[0]
        elif within:  # the weights have changed since, so a search would find other lists
            raise CheckpointError(
                f"{checkpoints.root}: expected the lists of retrieved negatives from before epoch {epoch + 1} in the "
                "checkpoint's folder, found none: remove the folder to train from the start"
            )
        else:
            self.lists_AK = self._search(embed_queries, label_side())
            checkpoints.save(self.name, [self.lists_AK], {"epoch": epoch})
        self.list_of_N = np.searchsorted(self._rows_A, self._dataset.train.request_rows).astype(np.int32)

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:
        """Build `_retrieved`, int32 [B, S]: draw a label from each of S equal parts of a list."""
        size = self._config.negatives
        lists_BK = self.lists_AK[self.list_of_N[rows_B]]
        lengths_B1 = np.sum(lists_BK >= 0, axis=1, keepdims=True)
        drawn_B1 = np.minimum(lengths_B1, size)  # a list of fewer labels is cut into parts of one label each
        part_S = np.arange(size)
        random_BS = rng.random((len(rows_B), size))
        entry_BS = ((part_S + random_BS) * lengths_B1 / np.maximum(drawn_B1, 1)).astype(np.int64)
        # Rounding may reach the end of a list.
        entry_BS = np.clip(entry_BS, 0, np.maximum(lengths_B1 - 1, 0))
        labels_BS = np.take_along_axis(lists_BK, entry_BS, axis=1)
        return {"_retrieved": np.where(part_S < drawn_B1, labels_BS, batch["_positive"][:, None]).astype(np.int32)}

    def _search(self, embed_queries: EmbedQueries, label_side: LabelSide) -> Int32:
        """Find the best labels of every query, int32 [A, K]; −1 after the last of a short list."""
        dataset = self._dataset
        # The search runs over possible negatives only; `position_L` maps label rows to positions among them.
        negative_rows = np.flatnonzero(self._negatives_L).astype(np.int32)
        position_L = np.where(self._negatives_L, np.cumsum(self._negatives_L) - 1, -1).astype(np.int32)
        ranked, _ = rank(
            self._rows_A,
            RankedModel(embed_queries, label_side.select_labels(negative_rows)),
            dataset.fixed_past(dataset.train).with_labels(position_L),
            [Setting(self._config.bias_removal)],
            k=min(self._config.depth, len(negative_rows)),
        )
        return np.where(ranked[0] < 0, np.int32(-1), negative_rows[ranked[0]])
