"""Define an evaluation's requests, histories and positives.

Legend: `N` rows of a task, `n` held-out pairs, `K` list length, `L` labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from longtail.bundle import Interval
from longtail.bundle.arrays import Bools, Float64, Int32, Int64
from longtail.bundle.sets import distinct, is_in
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.metrics import Bootstrap, LabelFacts, Positives, compute_metrics, compute_ratios
from longtail.trainer.metric_registry import METRICS, Metric, parse_k

VALID_QUERIES = 10_000
"""Most requests that a validation during training measures, drawn by seed."""


@dataclass(frozen=True)
class HeldOut:
    """Count a split's pairs, measured or left out.

    Attributes:
        distinct: pairs without repeats; all pairs with `evaluation.history = "growing"`.
        short: distinct pairs with fewer earlier pairs than `evaluation.least_history`.
        repeated: other distinct pairs whose label is in the history, which `evaluation.exclude_seen` leaves out.
        queries: queries with a measured pair.
        requests: rows of the task: a query once per distinct request, or once per measured pair.
    """

    pairs: int
    distinct: int
    short: int
    repeated: int
    measured: int
    queries: int
    requests: int

    @classmethod
    def count(cls, held_out: Pairs, past: Past, config: EvaluationConfig, *, labels: int) -> HeldOut:
        """Count a split's pairs; `request_rows` are rows of the past."""
        short_n, repeated_n = find_excluded(held_out, past, config)
        keys_n = held_out.request_rows.astype(np.int64) * labels + held_out.labels
        measured_P = distinct(keys_n[~(short_n | repeated_n)])
        short, repeated = (len(distinct(keys_n[mask_n])) for mask_n in (short_n, repeated_n))
        requests, measured = distinct(measured_P // labels), len(measured_P)
        queries = len(distinct(past.queries(requests)))
        return cls(len(held_out), measured + short + repeated, short, repeated, measured, queries, len(requests))

    def __str__(self) -> str:
        if self.measured == self.pairs == self.queries == self.requests:
            return f"{self.pairs:,} pairs of {self.queries:,} queries"
        requests = f" in {self.requests:,} requests" if self.requests > self.queries else ""
        repeats = f", {self.pairs - self.distinct:,} repeats" if self.pairs > self.distinct else ""
        short = f", {self.short:,} with too few earlier pairs (evaluation.least_history)" if self.short else ""
        repeated = f", {self.repeated:,} seen before (evaluation.exclude_seen)" if self.repeated else ""
        measured = f"{self.measured:,} to find of {self.queries:,} queries{requests}"
        return f"{self.pairs:,} pairs → {measured}{repeats}{short}{repeated}"


def find_excluded(held_out: Pairs, past: Past, config: EvaluationConfig) -> tuple[Bools, Bools]:
    """Find pairs with short histories, and repeated pairs, bool [n] each."""
    rows_n = held_out.request_rows
    short_n: Bools = past.lengths(rows_n) < config.least_history
    if not config.exclude_seen:
        return short_n, np.zeros(len(rows_n), np.bool_)
    return short_n, ~short_n & past.holds(rows_n, held_out.labels)


def pair_keys(pairs: Pairs, labels: int) -> Int64:
    """Compute `query · L + label` of every pair, int64 [N]."""
    return pairs.queries.astype(np.int64) * labels + pairs.labels


@dataclass(frozen=True)
class Task:
    """Hold the requests that every model and baseline answers.

    Attributes:
        rows_N: ascending rows of the past, int32 [N]: requests, or held-out pairs with a growing history.
        exclude_seen: whether the labels of a row's history are excluded from its list.
        ks: list lengths that the catalogue has labels for.
        custom: registered metrics of the recipe, with bound parameters.
    """

    rows_N: Int32
    past: Past
    exclude_seen: bool
    positives: Positives
    ks: list[int]
    k: int
    bootstrap: Bootstrap
    custom: Mapping[str, Metric]

    @classmethod
    def create(
        cls, held_out: Pairs, past: Past, config: EvaluationConfig, *, labels: int, seed: int,
        max_queries: int | None = None,
    ) -> Task:  # fmt: skip
        """Create a task of at most `max_queries` rows, drawn by seed.

        The pairs' `request_rows` are rows of the past.
        """
        check_metric(config, labels=labels)
        short_n, repeated_n = find_excluded(held_out, past, config)
        pairs = held_out.take(~(short_n | repeated_n))
        rows_N = distinct(pairs.request_rows)
        if len(rows_N) == 0:
            raise DataError(
                f"evaluation: expected held-out pairs to find, found none of {len(held_out):,}: {repeated_n.sum():,} "
                f"seen before (exclude_seen), {short_n.sum():,} with too few earlier pairs (least_history)"
            )
        if max_queries is not None and len(rows_N) > max_queries:
            # Sorted, because positives find their rows by binary search.
            rows_N = np.sort(np.random.default_rng(seed).choice(rows_N, max_queries, replace=False))
            pairs = pairs.take(is_in(pairs.request_rows, rows_N))
        positives = Positives.collect(
            np.searchsorted(rows_N, pairs.request_rows), pairs.labels, queries=len(rows_N), labels=labels,
            weights=pairs.weights,
        )  # fmt: skip
        bootstrap = Bootstrap(len(rows_N), resamples=config.bootstrap, seed=seed, queries_N=past.queries(rows_N))
        ks = [k for k in config.ks if k <= labels]
        custom = {metric.name: partial(METRICS[metric.name], **metric.arguments) for metric in config.metrics}
        return cls(rows_N, past, config.exclude_seen, positives, ks, min(max(config.ks), labels), bootstrap, custom)

    @property
    def excluded(self) -> Past | None:
        """Return the histories whose labels lists exclude; None excludes nothing."""
        return self.past if self.exclude_seen else None

    @property
    def description(self) -> str:
        """Return the number of queries, and of requests if there are more."""
        requests, queries = len(self.rows_N), len(distinct(self.past.queries(self.rows_N)))
        return f"{requests:,} requests of {queries:,} queries" if requests > queries else f"{queries:,} queries"

    def select_rows(self, mask_N: Bools) -> Task:
        """Select rows, bool [N], with their resamples."""
        return replace(
            self, rows_N=self.rows_N[mask_N], positives=self.positives.select_queries(mask_N),
            bootstrap=self.bootstrap.select_rows(mask_N),
        )  # fmt: skip

    def metrics(self, top_NK: Int32, facts: LabelFacts) -> dict[str, Interval]:
        """Compute every metric of lists of labels, like `compute_metrics`."""
        return compute_metrics(top_NK, self.positives, facts, ks=self.ks, bootstrap=self.bootstrap, custom=self.custom)

    def ratio(self, metric: str, top_NK: Int32, facts: LabelFacts) -> tuple[Float64, Float64]:
        """Compute numerator and denominator of one metric, float64 [N] each."""
        return self.ratios(parse_k(metric), top_NK, facts)[metric]

    def error(self, metric: str, first_NK: Int32, second_NK: Int32, facts: LabelFacts) -> float:
        """Compute the standard error of a difference of two lists."""
        residuals_N = []
        for top_NK in (first_NK, second_NK):
            value_N, weight_N = self.ratio(metric, top_NK, facts)
            total = max(weight_N.sum(), 1e-300)
            residuals_N.append((value_N - value_N.sum() / total * weight_N) / total)
        return float(np.linalg.norm(residuals_N[0] - residuals_N[1]))

    def ratios(self, k: str, top_NK: Int32, facts: LabelFacts) -> dict[str, tuple[Float64, Float64]]:
        """Compute numerators and denominators of the metrics at one k."""
        return compute_ratios(top_NK, self.positives, facts, ks=[int(k)], custom=self.custom)


def check_metric(config: EvaluationConfig, *, labels: int) -> None:
    """Refuse metrics and floors with k above the catalogue."""
    for key, metric in (("metric", config.metric), *(("floor", name) for name in config.floors)):
        if int(parse_k(metric)) > labels:
            raise DataError(f"evaluation.{key}: expected a k of at most {labels}, all labels, received {metric}")
