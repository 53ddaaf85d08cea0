"""The tree that a job with the sampler `adversarial` draws its negatives from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.sampling.conditional import TREE_DIMS, penalties_of
from longtail.trainer.sampling.proposal import FittedTree, fit_proposal, read_or_fit_proposal


def tree_of(recipe: Recipe, dataset: Dataset, encoding: Encoding, path: Path) -> FittedTree | None:
    """Return the tree, kept at `path`; None for any other sampler."""
    sampler = recipe.loss.sampler
    if sampler.name != "adversarial":
        return None
    rng = np.random.default_rng(recipe.seed)
    return read_or_fit_proposal(
        path,
        lambda: fit_proposal(
            [feature for feature in recipe.query.features if feature.in_tree],
            lambda rows_B: encoding.query.of_pairs(rows_B, rng),
            dataset.train.labels,
            vocabulary_rows=encoding.vocabulary_rows,
            labels=len(dataset.label_ids),
            dims=sampler.dims or TREE_DIMS,
            penalties=penalties_of(sampler.penalty),
            query_id=recipe.data.query_id,
        ),
    )
