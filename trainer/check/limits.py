"""What training refuses of data that read well: too few pairs or labels for what the recipe asks."""

from __future__ import annotations

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float64, Int8
from longtail.trainer.config import Recipe
from longtail.trainer.config.loss import TopKConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.evaluation.task import check_metric


def check_sizes(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse data that are too small for a job.

    Raises:
        DataError: fewer than two pairs, or queries where an epoch visits these, for each part of a step; fewer than two
            labels; a metric over more labels than there are; more negatives, or longer lists of retrieved ones, than
            labels; a K of `top_k` beyond the labels that it is among.
    """
    sampled, parts = recipe.data.reduction == "sample", recipe.training.accumulate
    visits = dataset.training_queries() if sampled else len(dataset.train)
    if visits < 2 * parts:
        raise DataError(f"training: expected at least {2 * parts} {'queries' if sampled else 'pairs'}, found {visits}")
    if len(dataset.label_ids) < 2:
        raise DataError("training: expected at least 2 labels, found 1: there is nothing to tell it from")
    if len(dataset.valid) or len(dataset.test):
        check_metric(recipe.evaluation, labels=len(dataset.label_ids))
    check_negatives(recipe, labels=len(dataset.label_ids), batch_size=min(recipe.training.batch_size, visits) // parts)
    retrieved = recipe.loss.retrieved_negatives
    if retrieved is not None and retrieved.depth > len(dataset.label_ids):
        raise DataError(
            f"loss.retrieved_negatives.depth: expected at most {len(dataset.label_ids)}, the labels there are, "
            f"received {retrieved.depth}"
        )
    if recipe.loss.top_k is not None:
        counts_L = dataset.label_counts()
        _check_top_k(recipe.loss.top_k, buckets_for(recipe.evaluation, counts_L).assign(counts_L))


def check_threshold(recipe: Recipe, log_pi_L: Float64) -> None:
    """Refuse a weight's threshold above all label frequencies, given as logs.

    Raises:
        DataError: says which is the highest.
    """
    threshold, highest = recipe.loss.weight.threshold or 0.0, float(np.exp(log_pi_L.max()))
    if threshold > highest:
        raise DataError(
            f"loss.weight.threshold: expected at most {highest:.3g}, the frequency of the most frequent "
            f"label, beyond which there are no negatives, received {threshold}"
        )


def _check_top_k(top_k: TopKConfig, buckets_L: Int8) -> None:
    """Refuse a K-th highest score of fewer than K labels.

    Raises:
        DataError: says of which, and how many there are.
    """
    among = {f".{name}": (k, int(np.sum(buckets_L == BUCKET_NAMES.index(name)))) for name, k in top_k.by_bucket.items()}
    for where, (k, labels) in (among or {"": (top_k.whole, len(buckets_L))}).items():
        if k > labels:
            raise DataError(f"loss.top_k.k{where}: expected at most {labels}, the labels there are, received {k}")


def check_negatives(recipe: Recipe, *, labels: int, batch_size: int) -> None:
    """Refuse more negatives than there are labels to draw, and mining more than a row has.

    Raises:
        DataError: says how many there are.
    """
    sampler, mining = recipe.loss.sampler, recipe.loss.mining
    others = labels - bool(sampler.exclude_positive)
    if (sampler.negatives or 0) > others and sampler.name != "cross_batch":
        raise DataError(
            f"loss.sampler.negatives: expected at most {others}, the labels there are to draw, "
            f"received {sampler.negatives}"
        )
    own = batch_size if sampler.of_the_batch else labels if sampler.name == "full" else 0
    ranks = 0 if mining is None else mining.mining().named or 0
    if mining is not None and ranks > own + (sampler.negatives or 0):
        raise DataError(
            f"loss.mining.{'theta' if mining.keep is None else 'keep'}: expected at most "
            f"{own + (sampler.negatives or 0)}, the negatives of a row, received {ranks}"
        )
