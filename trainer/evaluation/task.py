"""What an evaluation asks: queries, the labels each should find and has seen already; and the figures of their lists.

Legend: `N` queries, `B` a block of them, `K` list length, `L` labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from longtail.bundle import Interval
from longtail.bundle.arrays import Float64, Int8, Int32, Int64
from longtail.bundle.sets import distinct, is_among
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.held_out import seen_pairs, to_find
from longtail.trainer.evaluation.metrics import Bootstrap, Positives, metrics_of, ratios_of
from longtail.trainer.lists import METRICS, Metric, k_of


@dataclass(frozen=True)
class Task:
    """The queries of an evaluation: every model and every baseline answers the same ones.

    Attributes:
        rows_N: rows of queries as they are asked (`Pairs.askings`), int32 [N], ascending.
        askers_N: query rows of these, int32 [N]; the same where a query is asked in one way alone.
        seen_keys: `query row · L + label` to leave out of the lists, int64, sorted.
        ks: list lengths that the catalogue has labels for.
        own: registered metrics that the recipe names, their parameters bound.
    """

    rows_N: Int32
    askers_N: Int32
    positives: Positives
    seen_keys: Int64
    ks: list[int]
    k: int
    bootstrap: Bootstrap
    own: Mapping[str, Metric]

    @classmethod
    def of(
        cls, held_out: Pairs, known: Pairs, config: EvaluationConfig, *, labels: int, seed: int,
        max_queries: int | None = None, askers: Int32 | None = None,
    ) -> Task:  # fmt: skip
        """From pairs.

        Args:
            known: pairs seen in training; out of each query's list if `exclude_seen`, and then no positive.
            config: list lengths, resamples, and whether seen labels may be answered.
            seed: of the bootstrap and of the choice of queries.
            max_queries: at most this many queries, drawn by seed.
            askers: query row of every way to ask, int32 [A]; None where it is one of each.
        """
        check_metric(config, labels=labels)
        seen_keys = seen_pairs(known, labels=labels, exclude_seen=config.exclude_seen, held_out=held_out)
        keys = to_find(held_out, seen_keys, labels=labels, askers=askers)
        rows_N = distinct(keys // labels).astype(np.int32)
        if len(rows_N) == 0:
            raise DataError("evaluation: expected held-out pairs that are not in training, found none")
        if max_queries is not None and len(rows_N) > max_queries:
            rows_N = np.sort(np.random.default_rng(seed).choice(rows_N, max_queries, replace=False))
            keys = keys[is_among(keys // labels, rows_N)]
        positives = Positives.of(
            np.searchsorted(rows_N, keys // labels), keys % labels, queries=len(rows_N), labels=labels
        )
        bootstrap = Bootstrap(len(rows_N), resamples=config.bootstrap, seed=seed)
        ks = [k for k in config.ks if k <= labels]
        own = {metric.name: partial(METRICS[metric.name], **metric.arguments) for metric in config.metrics}
        askers_N = rows_N if askers is None else askers[rows_N]
        return cls(rows_N, askers_N, positives, seen_keys, ks, min(max(config.ks), labels), bootstrap, own)

    def metrics(
        self, top_NK: Int32, *, buckets_L: Int8, counts_L: Int64, inverse_propensity_L: Float64 | None
    ) -> dict[str, Interval]:
        """Return every metric of lists of labels, best first, −1 where one ends early; `metrics_of` says which there
        are."""
        return metrics_of(
            top_NK,
            self.positives,
            ks=self.ks,
            buckets_L=buckets_L,
            counts_L=counts_L,
            bootstrap=self.bootstrap,
            inverse_propensity_L=inverse_propensity_L,
            own=self.own,
        )

    def ratio(
        self, metric: str, top_NK: Int32, *, buckets_L: Int8, counts_L: Int64, inverse_propensity_L: Float64 | None
    ) -> tuple[Float64, Float64]:
        """Numerator and denominator of one metric for every query, float64 [N] each."""
        k = int(k_of(metric))
        return ratios_of(
            top_NK,
            self.positives,
            ks=[k],
            buckets_L=buckets_L,
            counts_L=counts_L,
            inverse_propensity_L=inverse_propensity_L,
            own=self.own,
        )[metric]


@dataclass(frozen=True)
class Seen:
    """Labels that queries have seen.

    Attributes:
        keys: `query · L + label`, int64, sorted.
    """

    keys: Int64
    queries: int
    labels: int

    @cached_property
    def _offsets(self) -> Int64:
        """Return start of every query's keys, int64 [queries + 1]."""
        return np.searchsorted(self.keys, np.arange(self.queries + 1, dtype=np.int64) * self.labels)

    def places(self, rows_B: Int32) -> Int64:
        """Return what the queries of a block have seen, as (place in the block, label), int64 [n, 2]."""
        starts, ends = self._offsets[rows_B], self._offsets[rows_B + 1]
        seen = np.concatenate([self.keys[start:end] % self.labels for start, end in zip(starts, ends, strict=True)])
        return np.stack([np.repeat(np.arange(len(rows_B)), ends - starts), seen], axis=1)


def check_metric(config: EvaluationConfig, *, labels: int) -> None:
    """Refuse a metric, or the floor of one, over lists longer than the catalogue."""
    for where, metric in (("metric", config.metric), *(("floor", name) for name in config.floors)):
        if int(k_of(metric)) > labels:
            raise DataError(f"evaluation.{where}: expected a k of at most {labels}, all labels, received {metric}")
