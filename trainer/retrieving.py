"""Negatives from the current model's own lists (ANCE): searched before an epoch, kept beside its checkpoints.

Legend: `N` training pairs, `A` queries as they are asked, `K` length of a list, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from longtail.bundle.arrays import Int32
from longtail.bundle.sets import distinct
from longtail.trainer.checkpoint import Checkpoints
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.replay import Replay
from longtail.trainer.data.retrieved import Retrieved
from longtail.trainer.errors import CheckpointError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.held_out import seen_pairs
from longtail.trainer.evaluation.ranking import EmbedQueries, LabelSide, rank

_KIND = "retrieved"
"""Of what is kept beside the checkpoints."""


class Retrieval:
    """The lists of a run's epochs [METHODS §3.1].

    They are exact, over the whole catalogue, of the weights as the epoch found them, and of every query as it stands
    after all its training pairs, whatever part of a history a pair is asked with. Left out are a query's training
    positives, and labels that are no negatives.

    Args:
        recipe: the job, which has `loss.retrieved_negatives`.
        replay: which pairs epochs visit; None where it is all.
        checkpoints: where a run that goes on within an epoch finds the lists of its beginning.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset, replay: Replay | None, checkpoints: Checkpoints) -> None:
        if recipe.loss.retrieved_negatives is None:
            raise ValueError("a retrieval: expected a recipe with loss.retrieved_negatives, received none")
        self._config, self._dataset, self._checkpoints = recipe.loss.retrieved_negatives, dataset, checkpoints
        visited = dataset.train if replay is None or replay.drawn else dataset.train.take(replay.new)
        self._rows_A = distinct(visited.askings)
        # Of pairs that are not visited: any.
        rows_N = np.searchsorted(self._rows_A, dataset.train.askings).clip(max=len(self._rows_A) - 1)
        self._list_of_N = rows_N.astype(np.int32)
        weighed_L = np.bincount(visited.labels, visited.weights, minlength=len(dataset.label_ids))
        self._negatives_L = (weighed_L > 0) | (not recipe.describes_labels)
        self._searched: int | None = None
        self._lists = Retrieved.nothing(len(dataset.train), negatives=self._config.negatives)

    def of_epoch(
        self, epoch: int, embed_queries: EmbedQueries, label_side: Callable[[], LabelSide], *, within: bool
    ) -> Retrieved:
        """Return the lists that an epoch draws from; none while it warms up.

        Args:
            embed_queries: rows of queries as they are asked → embeddings, by the current weights.
            within: whether the run goes on within the epoch, so that the weights are no longer those of its beginning.
        """
        before = self._config.searched_before(epoch)
        if before == self._searched:
            return self._lists
        kept = self._checkpoints.read(_KIND)
        if kept is not None and kept[1]["epoch"] == before:
            lists_AK = kept[0]
        elif within or before != epoch:
            raise CheckpointError(
                f"{self._checkpoints.root}: expected the lists of retrieved negatives from before epoch "
                f"{(before or 0) + 1} beside the checkpoint, found none: remove the folder to begin anew"
            )
        else:
            lists_AK = self._search(embed_queries, label_side())
            self._checkpoints.save(_KIND, [lists_AK], {"epoch": before})
        self._searched = before
        self._lists = replace(self._lists, lists_AK=lists_AK, list_of_N=self._list_of_N)
        return self._lists

    def _search(self, embed_queries: EmbedQueries, label_side: LabelSide) -> Int32:
        """Return the best labels of every query, int32 [A, K]; −1 where fewer are left."""
        dataset = self._dataset
        among = np.flatnonzero(self._negatives_L).astype(np.int32)
        seen = dataset.train.take(self._negatives_L[dataset.train.labels])
        place_L = np.cumsum(self._negatives_L) - 1
        seen = replace(seen, labels=place_L[seen.labels].astype(np.int32))
        ranked, _ = rank(
            self._rows_A,
            embed_queries,
            label_side.among(among),
            seen_pairs(seen, labels=len(among), exclude_seen=True),
            [Setting(self._config.bias_removal)],
            k=min(self._config.depth, len(among)),
            queries=len(dataset.query_ids),
            askers=dataset.askers,
        )
        return np.where(ranked[0] < 0, np.int32(-1), among[ranked[0]])
