"""What training refuses of data that read well: too few pairs or labels for what the recipe wants."""

from __future__ import annotations

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float64
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.evaluation.task import check_metric


def check_sizes(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse data that are too small for a job.

    Raises:
        DataError: too few pairs or visits for a step, or fewer labels than the recipe's numbers need.
    """
    sampled, parts = recipe.data.reduction == "sample", recipe.training.accumulate
    visits, labels = dataset.training_queries() if sampled else len(dataset.train), len(dataset.label_ids)
    if visits < 2 * parts:
        raise DataError(f"training: expected at least {2 * parts} {'queries' if sampled else 'pairs'}, found {visits}")
    if labels < 2:
        raise DataError("training: expected at least 2 labels, found 1: there is nothing to tell it from")
    if len(dataset.valid) or len(dataset.test):
        check_metric(recipe.evaluation, labels=labels)
    check_negatives(recipe, labels=labels, batch_size=min(recipe.training.batch_size, visits) // parts)
    retrieved, top_k = recipe.loss.retrieved_negatives, recipe.loss.top_k
    if retrieved is not None:
        _check_labels("loss.retrieved_negatives.depth", retrieved.depth, labels)
    if top_k is not None:
        counts_L = dataset.label_counts()
        buckets_L = buckets_for(recipe.evaluation, counts_L).assign(counts_L)
        for name, k in top_k.by_bucket.items():
            _check_labels(f"loss.top_k.k.{name}", k, int(np.sum(buckets_L == BUCKET_NAMES.index(name))))
        if not top_k.by_bucket:
            _check_labels("loss.top_k.k", top_k.whole, labels)


def _check_labels(key: str, value: int, labels: int) -> None:
    if value > labels:
        raise DataError(f"{key}: expected at most {labels}, the labels there are, received {value}")


def check_threshold(recipe: Recipe, log_pi_L: Float64) -> None:
    """Refuse a weight's threshold above all label frequencies, given as logs.

    Raises:
        DataError: names the highest frequency.
    """
    threshold, highest = recipe.loss.weight.threshold or 0.0, float(np.exp(log_pi_L.max()))
    if threshold > highest:
        raise DataError(
            f"loss.weight.threshold: expected at most {highest:.3g}, the frequency of the most frequent "
            f"label, beyond which there are no negatives, received {threshold}"
        )


def check_negatives(recipe: Recipe, *, labels: int, batch_size: int) -> None:
    """Refuse more negatives than there are labels to draw, and mining more than a row has.

    Raises:
        DataError: names how many there are.
    """
    sampler, mining = recipe.loss.sampler, recipe.loss.mining
    drawn, others = sampler.negatives or 0, labels - bool(sampler.exclude_positive)
    if drawn > others and sampler.name != "cross_batch":
        raise DataError(
            f"loss.sampler.negatives: expected at most {others}, the labels there are to draw, received {drawn}"
        )
    available = drawn + (batch_size if sampler.of_the_batch else labels if sampler.name == "full" else 0)
    ranks = 0 if mining is None else mining.mining().named or 0
    if mining is not None and ranks > available:
        key = "theta" if mining.keep is None else "keep"
        raise DataError(f"loss.mining.{key}: expected at most {available}, the negatives of a row, received {ranks}")
