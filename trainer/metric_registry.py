"""The inputs and the registry of custom metrics.

Legend: `N` queries, `K` length of the lists, `L` labels.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from longtail.bundle.arrays import Bools, Float64, Int8, Int32, Int64
from longtail.trainer.errors import DataError


class RankedLists(NamedTuple):
    """Hold lists of K labels for N queries, and the labels to find.

    Attributes:
        top_NK: label rows, best first, int32; −1 after the last of a short list.
        hits_NK: entries that are held-out labels of the query, bool.
        held_out_N: held-out labels of every query, float64.
        counts_L: training pairs of every label, int64.
        buckets_L: bucket of every label, as an index of `BUCKET_NAMES`, int8.
    """

    top_NK: Int32
    hits_NK: Bools
    held_out_N: Float64
    counts_L: Int64
    buckets_L: Int8


Metric = Callable[..., tuple[Float64, Float64]]
"""A function of `RankedLists` and keyword-only parameters to numerators and denominators, both float64 [N]."""

METRICS: dict[str, Metric] = {}
"""Custom metrics, by their names in a recipe's `[evaluation] metrics`; built-in metrics are in `compute_metrics`."""

RESERVED = frozenset((
    "recall", "ndcg", "precision", "hit_rate", "mrr", "psp", "psndcg", "balanced_error", "exposure", "coverage",
    "gini", "popularity", "log_likelihood",
))  # fmt: skip
"""Names of built-in metrics."""


def parse_k(metric: str) -> str:
    """Return the k in the name of a metric, with or without a bucket.

    Example:
        >>> parse_k("recall@20"), parse_k("recall@20/tail")
        ('20', '20')
    """
    return metric.partition("@")[2].partition("/")[0]


def compute_metric(name: str, metric: Metric, lists: RankedLists) -> tuple[Float64, Float64]:
    """Return numerators and denominators of a registered metric, both float64 [N]."""
    result = metric(lists)
    shape = lists.held_out_N.shape
    columns = [np.asarray(column, np.float64) for column in result] if isinstance(result, tuple) else []
    if [column.shape for column in columns] != [shape, shape] or not np.isfinite(columns).all():
        received = [column.shape for column in columns] if columns else type(result).__name__
        raise DataError(
            f"metric {name!r}: expected two finite arrays of shape {shape}, one of each query, found {received}"
        )
    return columns[0], columns[1]
