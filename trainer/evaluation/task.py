"""Define an evaluation's task: queries, their labels to find and their seen labels; compute figures of lists.

Legend: `N` queries, `B` a block of them, `K` list length, `L` labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from longtail.bundle import Interval
from longtail.bundle.arrays import Bools, Float64, Int32, Int64
from longtail.bundle.sets import distinct, is_among
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.metrics import Bootstrap, LabelFacts, Positives, metrics_of, ratios_of
from longtail.trainer.metric_registry import METRICS, Metric, k_of

VALID_QUERIES = 10_000
"""Most queries that a validation during training measures, drawn by seed."""


@dataclass(frozen=True)
class HeldOut:
    """Numbers of a split's pairs, of measured pairs, and of pairs left out.

    Attributes:
        seen: distinct pairs that also occur in training and are left out by `evaluation.exclude_seen`; 0 if it is off.
        queries: queries with a measured pair; a query counts once per distinct request.
    """

    pairs: int
    distinct: int
    seen: int
    measured: int
    queries: int

    @classmethod
    def of(
        cls, held_out: Pairs, known: Pairs, *, labels: int, exclude_seen: bool, request_queries: Int32 | None = None
    ) -> HeldOut:
        """Count the pairs of a split; `request_queries`, int32 [A], are the query rows of requests."""
        seen = seen_pairs(known, labels=labels, exclude_seen=exclude_seen, held_out=held_out)
        keys_P = to_find(held_out, seen, labels=labels, request_queries=request_queries)
        once = len(to_find(held_out, seen[:0], labels=labels, request_queries=request_queries))
        queries = len(distinct(keys_P // labels))
        return cls(len(held_out), once, once - len(keys_P), len(keys_P), queries)

    def __str__(self) -> str:
        repeats = f", {self.pairs - self.distinct:,} repeats" if self.pairs > self.distinct else ""
        seen = f", {self.seen:,} seen in training (evaluation.exclude_seen)" if self.seen else ""
        return f"{self.pairs:,} pairs → {self.measured:,} to find of {self.queries:,} queries{repeats}{seen}"


def seen_pairs(known: Pairs, *, labels: int, exclude_seen: bool, held_out: Pairs | None = None) -> Int64:
    """Get `query · L + label` of what rankings leave out, for the queries of `held_out` or all, int64 [P], rising."""
    if not exclude_seen:
        return np.zeros(0, np.int64)
    if held_out is not None:
        asked_Q = np.zeros(int(max(known.queries.max(initial=-1), held_out.queries.max(initial=-1))) + 1, np.bool_)
        asked_Q[held_out.queries] = True
        known = known.take(asked_Q[known.queries])
    return distinct(pair_keys(known, labels))


def to_find(held_out: Pairs, seen: Int64, *, labels: int, request_queries: Int32 | None = None) -> Int64:
    """Get `query · L + label` of distinct held-out pairs whose keys are not in `seen`, int64 [P], rising.

    With `request_queries`, query rows int32 [A], keys are of requests (`Pairs.request_rows`).
    """
    if request_queries is None:
        keys = distinct(pair_keys(held_out, labels))
        return keys[~is_among(keys, seen)]
    keys = distinct(held_out.request_rows.astype(np.int64) * labels + held_out.labels)
    return keys[~is_among(request_queries[keys // labels].astype(np.int64) * labels + keys % labels, seen)]


def pair_keys(pairs: Pairs, labels: int) -> Int64:
    """Compute `query · L + label` of every pair, int64 [N]."""
    return pairs.queries.astype(np.int64) * labels + pairs.labels


@dataclass(frozen=True)
class Task:
    """The queries of an evaluation: every model and every baseline answers the same ones.

    Attributes:
        rows_N: rows of requests (`Pairs.request_rows`), int32 [N], ascending.
        queries_N: query rows of the requests, int32 [N]; equal to `rows_N` if every query has one request.
        seen_keys: `query row · L + label` to leave out of the lists, int64, sorted.
        ks: list lengths that the catalogue has labels for.
        own: registered metrics that the recipe names, their parameters bound.
    """

    rows_N: Int32
    queries_N: Int32
    positives: Positives
    seen_keys: Int64
    ks: list[int]
    k: int
    bootstrap: Bootstrap
    own: Mapping[str, Metric]

    @classmethod
    def of(
        cls, held_out: Pairs, known: Pairs, config: EvaluationConfig, *, labels: int, seed: int,
        max_queries: int | None = None, request_queries: Int32 | None = None,
    ) -> Task:  # fmt: skip
        """Create the task of held-out pairs, at most `max_queries` queries drawn by seed.

        Args:
            known: pairs seen in training; out of each query's list if `exclude_seen`, and then no positive.
            request_queries: query row of every request, int32 [A]; None where each query has one.
        """
        check_metric(config, labels=labels)
        seen_keys = seen_pairs(known, labels=labels, exclude_seen=config.exclude_seen, held_out=held_out)
        keys = to_find(held_out, seen_keys, labels=labels, request_queries=request_queries)
        rows_N = distinct(keys // labels).astype(np.int32)
        if len(rows_N) == 0:
            raise DataError("evaluation: expected held-out pairs that are not in training, found none")
        if max_queries is not None and len(rows_N) > max_queries:
            rows_N = np.sort(np.random.default_rng(seed).choice(rows_N, max_queries, replace=False))
            keys = keys[is_among(keys // labels, rows_N)]
        asked = held_out.queries if request_queries is None else held_out.request_rows
        pairs = asked.astype(np.int64) * labels + held_out.labels
        kept = is_among(pairs, keys)
        positives = Positives.of(
            np.searchsorted(rows_N, asked[kept]), held_out.labels[kept], queries=len(rows_N), labels=labels,
            weights=None if held_out.weights is None else held_out.weights[kept],
        )  # fmt: skip
        bootstrap = Bootstrap(len(rows_N), resamples=config.bootstrap, seed=seed)
        ks = [k for k in config.ks if k <= labels]
        own = {metric.name: partial(METRICS[metric.name], **metric.arguments) for metric in config.metrics}
        queries_N = rows_N if request_queries is None else request_queries[rows_N]
        return cls(rows_N, queries_N, positives, seen_keys, ks, min(max(config.ks), labels), bootstrap, own)

    def among(self, kept_N: Bools) -> Task:
        """Return the task of some of its queries, bool [N], with their resamples."""
        return replace(
            self, rows_N=self.rows_N[kept_N], queries_N=self.queries_N[kept_N],
            positives=self.positives.of_queries(kept_N), bootstrap=self.bootstrap.among(kept_N),
        )  # fmt: skip

    def metrics(self, top_NK: Int32, facts: LabelFacts) -> dict[str, Interval]:
        """Compute every metric of lists of labels, best first, −1 where one ends early, as `metrics_of`."""
        return metrics_of(top_NK, self.positives, facts, ks=self.ks, bootstrap=self.bootstrap, own=self.own)

    def ratio(self, metric: str, top_NK: Int32, facts: LabelFacts) -> tuple[Float64, Float64]:
        """Compute numerator and denominator of one metric for every query, float64 [N] each."""
        return self.ratios(k_of(metric), top_NK, facts)[metric]

    def ratios(self, k: str, top_NK: Int32, facts: LabelFacts) -> dict[str, tuple[Float64, Float64]]:
        """Compute numerators and denominators of the metrics at one k for every query, float64 [N] each."""
        return ratios_of(top_NK, self.positives, facts, ks=[int(k)], own=self.own)


def seen_by(seen_keys: Int64, queries_B: Int32, *, labels: int) -> Int64:
    """Get what the queries of a block have seen, as (place in the block, label), int64 [n, 2].

    Args:
        seen_keys: `query · L + label`, int64, sorted.
    """
    first_B = queries_B.astype(np.int64) * labels
    starts, ends = np.searchsorted(seen_keys, [first_B, first_B + labels])
    seen = np.concatenate([seen_keys[start:end] % labels for start, end in zip(starts, ends, strict=True)])
    return np.stack([np.repeat(np.arange(len(queries_B)), ends - starts), seen], axis=1)


def check_metric(config: EvaluationConfig, *, labels: int) -> None:
    """Refuse a metric, or the floor of one, over lists longer than the catalogue."""
    for where, metric in (("metric", config.metric), *(("floor", name) for name in config.floors)):
        if int(k_of(metric)) > labels:
            raise DataError(f"evaluation.{where}: expected a k of at most {labels}, all labels, received {metric}")
