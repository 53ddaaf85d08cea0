"""Count requests and releases for /metrics; METRICS.md lists all series.

All series exist, at 0, from the first scrape. If several workers share the port, each counts into memory-mapped files,
and the worker that is scraped adds them up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int64
from longtail.bundle.forecast import ForecastSettings
from longtail.bundle.ids import id_text
from longtail.serving.monitoring.baseline import DECILES
from longtail.serving.monitoring.records import BASES, ID_KINDS, SOURCES, AnsweredBatch, ChosenLabels, IdKind, NamedIds
from longtail.serving.settings import NO_VALUE, OTHER_VALUE

# The `_created` series would be half of all lines, and no dashboard or alert uses them.
disable_created_metrics()  # type: ignore[no-untyped-call]

UNKNOWN_ROUTE, REFUSED_ROUTE = "unmatched", "refused"
"""Routes of requests to no path of the service, and of those whose key is wrong or missing."""
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable that names the directory of the mapped files; prometheus_client reads it when imported."""
_STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
_STAGES = ("queue", "encode", "search", "answer")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_DIALS = tuple(quarter / 4 for quarter in range(-4, 9))
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(Collector):
    """The Prometheus series of one process. Thread-safe.

    Args:
        routes: path patterns of the router, such as `/v1/labels/{id}`.
        groups: query features and their values by which answers are counted.
    """

    def __init__(
        self,
        routes: Iterable[str],
        others: Iterable[Collector] = (),
        groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        counted = CollectorRegistry()
        counter, histogram = partial(Counter, registry=counted), partial(Histogram, registry=counted)
        requests = counter("longtail_requests", "Requests answered, by route and class of status.", ["route", "status"])
        previews = counter(
            "longtail_previews", "Previews answered, by class of status; they are in no other series.", ["status"]
        )
        seconds = histogram(
            "longtail_request_seconds", "From a request's head read to its answer sent, by route.", ["route"],
            buckets=_SECONDS,
        )  # fmt: skip
        stages = histogram(
            "longtail_stage_seconds",
            "Parts of a retrieval: wait in the queue (of every request), then encode the queries, search the index "
            "and make the answers (of every batch).",
            ["stage"],
            buckets=_SECONDS,
        )
        self._batch_queries = histogram("longtail_batch_queries", "Queries that shared a search.", buckets=_QUERIES)
        self._queries = counter("longtail_queries", "Queries answered; a request may hold many.")
        bases = counter("longtail_bases", "Queries of /v1/retrieve, by what their answers stand on.", ["basis"])
        exposures = counter(
            "longtail_exposures", "Labels answered, by frequency bucket; restricted: by the client's filters.",
            ["bucket", "restricted"],
        )  # fmt: skip
        scores = counter("longtail_scores", "Labels of judged answers, by the promised deciles of scores.", ["decile"])
        self._dials = [
            histogram(f"longtail_query_{name}", f"{symbol} of the queries.", buckets=_DIALS)
            for name, symbol in (("bias_removal", "λ"), ("popularity", "μ"), ("cooccurrence", "ω"))
        ]
        explored = counter(
            "longtail_explored", "Labels drawn at random for requests that explore, by frequency bucket.", ["bucket"]
        )
        floored = counter(
            "longtail_floored_queries", "Queries with floors (at_least), by whether the answer meets them all.", ["met"]
        )
        group_queries = counter("longtail_group_queries", "Queries answered, by LONGTAIL_GROUPS.", ["group", "value"])
        group_exposures = counter(
            "longtail_group_exposures", "Labels answered, by LONGTAIL_GROUPS and frequency bucket.",
            ["group", "value", "bucket"],
        )  # fmt: skip
        self._groups = [_GroupSeries(name, values, group_queries, group_exposures) for name, values in groups.items()]
        self._arm_answers = counter(
            "longtail_arm_answers", "Answers that arms of an experiment are compared by.", ["run", "arm"]
        )
        events = counter("longtail_feedback_events", "Feedback events that were kept, by source.", ["source"])
        positives, hits = (
            counter(f"longtail_{name}", text, ["source", "bucket"])
            for name, text in (
                ("positives", "Labels chosen that the release knows, by frequency bucket."),
                ("hits", "Of these, labels that the answer held."),
            )
        )
        chosen_at = histogram(
            "longtail_choice_bias_removal", "λ of answers that labels were chosen from, by whether they held them.",
            ["hit"], buckets=_DIALS,
        )  # fmt: skip
        refused = counter("longtail_answer_ids_refused", "Answer ids in feedback that were refused.", ["reason"])
        self.dropped = counter("longtail_events_dropped", "Events of answers and label changes that were not kept.")
        self._arm_exposures, self._arm_choices = (
            counter(f"longtail_arm_{name}", text, ["run", "arm", "bucket"])
            for name, text in (
                ("exposures", "Labels in these answers, by frequency bucket."),
                ("choices", "Labels chosen from these answers, by frequency bucket."),
            )
        )
        named, unknown = (
            counter(f"longtail_ids{name}", text, ["list"])
            for name, text in (
                ("", "Ids in requests that the release should know, by where they stood."),
                ("_unknown", "Ids in requests that the release does not know, by where they stood."),
            )
        )
        self._swaps = counter("longtail_release_swaps", "Releases taken into service.")
        self.load_failures = counter(
            "longtail_release_load_failures",
            "Attempts to load a release that failed; the one before stayed in service.",
        )
        self.queue_depth = Gauge(
            "longtail_queue_depth", "Queries that wait for a search.", multiprocess_mode="livesum", registry=counted
        )
        self.queue_limit = Gauge(
            "longtail_queue_limit", "Queries that may wait for a search in each process.", multiprocess_mode="livemax",
            registry=counted,
        )  # fmt: skip
        self.shed = counter("longtail_shed", "Requests refused because the queue was full (429).")
        self.timeouts = counter("longtail_timeouts", "Requests given up because no answer was there in time.")
        self.unanswered = counter(
            "longtail_engine_unanswered", "Queries refused because the server that holds the index did not answer."
        )
        # Looked up in advance, because these are counted with every request.
        self._of_route = {
            route: ([requests.labels(route, status) for status in _STATUS_CLASSES], seconds.labels(route))
            for route in (*routes, UNKNOWN_ROUTE, REFUSED_ROUTE)
        }
        self._previews = [previews.labels(status) for status in _STATUS_CLASSES]
        self._of_basis = {basis: bases.labels(basis) for basis in BASES}
        self._of_stage = {stage: stages.labels(stage) for stage in _STAGES}
        self._of_bucket = [[exposures.labels(bucket, of) for bucket in BUCKET_NAMES] for of in ("no", "yes")]
        self._of_decile = [scores.labels(str(decile)) for decile in range(1, DECILES + 1)]
        self._explored = [explored.labels(bucket) for bucket in BUCKET_NAMES]
        self._floored = floored.labels("yes"), floored.labels("no")
        self._events = [events.labels(source) for source in SOURCES]
        self._positives, self._hits = (
            [[of.labels(source, bucket) for bucket in BUCKET_NAMES] for source in SOURCES] for of in (positives, hits)
        )
        self._chosen_at = {True: chosen_at.labels("yes"), False: chosen_at.labels("no")}
        self.refused_ids = {reason: refused.labels(reason) for reason in ("malformed", "forged", "expired")}
        self._named: dict[str, Counter] = {kind: named.labels(kind) for kind in ID_KINDS}
        self._unknown = {ids: unknown.labels(ids) for ids in (*ID_KINDS, "exclude", "allow")}
        self._release: str | None = None
        self._forecast: ForecastSettings | None = None
        self._cooccurrence_until: float | None = None
        self._shown = counted
        if MULTIPROCESS in os.environ:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=counted)
        for collector in (self, *others):
            self._shown.register(collector)

    def count_requests(self, route: str, statuses: Sequence[int], seconds: Sequence[float]) -> None:
        """Count answered requests of one route."""
        by_status, durations = self._of_route[route]
        for status in statuses:
            by_status[status // 100 - 2].inc()
        observe_all(durations, seconds)

    def count_preview(self, status: int) -> None:
        """Count one answered preview."""
        self._previews[status // 100 - 2].inc()

    def count_searches(
        self, queries: Sequence[int], waited: Sequence[float], stage_seconds: Sequence[Mapping[str, float]]
    ) -> None:
        """Count searches.

        Args:
            queries: number of queries of each search.
            waited: seconds that each request of the searches waited in the queue.
            stage_seconds: duration of each search's stages.
        """
        observe_all(self._batch_queries, queries)
        seconds_of: dict[str, list[float]] = {"queue": [*waited]}
        for of_search in stage_seconds:
            for stage, seconds in of_search.items():
                seconds_of.setdefault(stage, []).append(seconds)
        for stage, seconds_S in seconds_of.items():
            observe_all(self._of_stage[stage], seconds_S)

    def count_answers(
        self, batch: AnsweredBatch, unknown: Mapping[str, int], exposures: Int64, deciles: Int64 | None
    ) -> None:
        """Count the answers of a batch.

        Args:
            batch: its queries, labels, dials and ids are counted.
            unknown: numbers of unknown ids in `exclude` and in `allow`.
            exposures: labels by bucket, int64 [4].
            deciles: labels of judged answers by decile of their scores, int64 [10]; None without a promise.
        """
        self._queries.inc(len(batch.ends_B))
        restricted = np.zeros_like(exposures)
        if batch.restrictions_B is not None:
            restricted_N = np.repeat(list(map(bool, batch.restrictions_B)), np.diff(batch.ends_B, prepend=0))
            restricted = np.bincount(batch.buckets_N[restricted_N], minlength=len(BUCKET_NAMES))
        counts = [(self._of_bucket[0], exposures - restricted), (self._of_bucket[1], restricted)]
        if deciles is not None:
            counts.append((self._of_decile, deciles))
        for counters, labels in counts:
            for series, count in zip(counters, labels.tolist(), strict=True):
                if count:
                    series.inc(count)
        for dial, weights_B in zip(
            self._dials, (batch.bias_removal_B, batch.popularity_B, batch.cooccurrence_B), strict=True
        ):
            observe_all(dial, weights_B)
        for bucket, count in batch.explored.items():
            self._explored[bucket].inc(count)
        queries, unmet = batch.floored
        if queries:
            self._floored[0].inc(queries - unmet)
            self._floored[1].inc(unmet)
        for basis, count in batch.bases.items():
            self._of_basis[basis].inc(count)
        for ids, count in unknown.items():
            self._unknown[ids].inc(count)
        for kind, named in batch.ids.items():
            self._count_ids(kind, named)
        for place, arm in enumerate(batch.arms_B or ()):
            if arm is not None and arm.counted:
                self._arm_answers.labels(arm.run, arm.arm).inc()
                start = batch.ends_B[place - 1] if place else 0
                shown = np.bincount(batch.buckets_N[start : batch.ends_B[place]], minlength=len(BUCKET_NAMES))
                for name, count in zip(BUCKET_NAMES, shown.tolist(), strict=True):
                    self._arm_exposures.labels(arm.run, arm.arm, name).inc(count)

    def _count_ids(self, kind: IdKind, counts: NamedIds) -> None:
        self._named[kind].inc(counts.ids)
        self._unknown[kind].inc(counts.unknown)

    def count_groups(self, features_B: Sequence[Mapping[str, Any] | None], batch: AnsweredBatch) -> None:
        """Count queries and shown labels of a batch by group; None: a query with a vector."""
        queries, buckets = len(batch.ends_B), len(BUCKET_NAMES)
        query_N = np.repeat(np.arange(queries), np.diff(batch.ends_B, prepend=0))
        shown = np.bincount(query_N * buckets + batch.buckets_N, minlength=queries * buckets).reshape(queries, buckets)
        for group in self._groups:
            group.count(features_B, shown)

    def count_choice(self, chosen: ChosenLabels, positives: Sequence[int], hits: Sequence[int]) -> None:
        """Count the chosen labels of an event."""
        source = SOURCES.index(chosen.source)
        self._events[source].inc()
        self._count_ids("feedback", chosen.ids)
        for counters, counts in ((self._positives[source], positives), (self._hits[source], hits)):
            for series, count in zip(counters, counts, strict=True):
                if count:
                    series.inc(count)
        if chosen.source == "feedback":
            for position in chosen.positions:
                self._chosen_at[position is not None].observe(chosen.bias_removal)
        if chosen.arm is not None and chosen.arm.counted:
            for name, count in zip(BUCKET_NAMES, hits, strict=True):
                if count:
                    self._arm_choices.labels(chosen.arm.run, chosen.arm.arm, name).inc(count)

    def begin_release(
        self, name: str, forecast: ForecastSettings | None = None, cooccurrence_until: float | None = None
    ) -> None:
        """Set the release in service, its forecast of popularity, and the time of the last pair in its W."""
        self._release, self._forecast, self._cooccurrence_until = name, forecast, cooccurrence_until
        self._swaps.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the series of the release in service, for `CollectorRegistry.register`."""
        family = GaugeMetricFamily(
            "longtail_release_info", "The release being served, as a label; its value is 1.", labels=["release"]
        )
        if self._release is not None:
            family.add_metric([self._release], 1)
        yield family
        age = GaugeMetricFamily("longtail_prior_age_seconds", "Since the last pair that the forecast knows.")
        nats = GaugeMetricFamily(
            "longtail_prior_nats",
            "Mean log-probability of the latest pairs, by the prior before them.",
            labels=["kind"],
        )
        if self._forecast is not None:
            age.add_metric([], time.time() - self._forecast.until)
            for kind, value in self._forecast.nats.items():
                nats.add_metric([kind], value)
        together = GaugeMetricFamily(
            "longtail_cooccurrence_age_seconds", "Since the last pair that the term of co-occurrence knows."
        )
        if self._cooccurrence_until is not None:
            together.add_metric([], time.time() - self._cooccurrence_until)
        yield from (age, nats, together)

    def scrape(self) -> bytes:
        """Return all series in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._shown)


def observe_all(histogram: Histogram, values: npt.ArrayLike) -> None:
    """Add values, float [V], to a histogram."""
    values_V = np.asarray(values, np.float64)
    if len(values_V):
        at_V = np.searchsorted(histogram._upper_bounds, values_V)
        for bucket, count in enumerate(np.bincount(at_V).tolist()):
            if count:
                histogram._buckets[bucket].inc(count)
        histogram._sum.inc(float(values_V.sum()))


class _GroupSeries:
    """Counts queries by one feature: by its listed values, `other` and `missing`, or by `given` and `missing`."""

    def __init__(self, name: str, values: Sequence[str], queries: Counter, exposures: Counter) -> None:
        self._name, self._values = name, frozenset(values)
        self._of_value = {
            value: (queries.labels(name, value), [exposures.labels(name, value, bucket) for bucket in BUCKET_NAMES])
            for value in (*values, OTHER_VALUE if values else "given", NO_VALUE)
        }

    def count(self, features_B: Sequence[Mapping[str, Any] | None], shown: Int64) -> None:
        """Count queries by their features, and the labels shown to each query by bucket, int64 [B, 4]."""
        places: dict[str, list[int]] = {}
        for place, features in enumerate(features_B):
            places.setdefault(self._value(None if features is None else features.get(self._name)), []).append(place)
        for value, rows in places.items():
            queries, exposures = self._of_value[value]
            queries.inc(len(rows))
            for series, count in zip(exposures, shown[rows].sum(axis=0).tolist(), strict=True):
                if count:
                    series.inc(count)

    def _value(self, given: Any) -> str:
        if given is None or given in ("", [], {}):
            return NO_VALUE
        if not self._values:
            return "given"
        text = id_text(given)
        return text if text is not None and text in self._values else OTHER_VALUE
