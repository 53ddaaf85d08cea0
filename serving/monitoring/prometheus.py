"""The figures of requests and releases that /metrics shows; METRICS.md lists them all.

All series are there, at 0, from the first scrape. Where several workers share the port, each counts into mapped
files that the one that is scraped adds up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from longtail.serving.monitoring.records import AnsweredBatch

# Half of all lines, and nobody's question.
disable_created_metrics()  # type: ignore[no-untyped-call]

UNKNOWN_ROUTE = "unmatched"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable that names the directory of the mapped files; prometheus_client reads it when imported."""
QUOTAS = ("quota_requests", "quota_labels", "quota_searches")
"""Settings that bound what one client may ask for."""
_STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
_STAGES = ("queue", "encode", "search", "answer")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _ReleaseInfo(Collector):
    """Which release this worker serves."""

    def __init__(self) -> None:
        self.name: str | None = None

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "longtail_release_info", "The release being served, as a label; its value is 1.", labels=["release"]
        )
        if self.name is not None:
            family.add_metric([self.name], 1)
        yield family


class Metrics:
    """The Prometheus series of one process. Thread-safe.

    Args:
        routes: paths as the router knows them, such as `/v1/labels/{id}`.
        others: further collectors that /metrics shows.
    """

    def __init__(self, routes: Iterable[str], others: Iterable[Collector] = ()) -> None:
        counted = CollectorRegistry()
        self._requests = Counter(
            "longtail_requests", "Requests answered, by route and class of status.", ["route", "status"],
            registry=counted,
        )  # fmt: skip
        self._previews = Counter(
            "longtail_previews", "Previews answered, by class of status; they are in no other series.", ["status"],
            registry=counted,
        )  # fmt: skip
        self._request_seconds = Histogram(
            "longtail_request_seconds", "From a request's head read to its answer sent, by route.", ["route"],
            buckets=_SECONDS, registry=counted,
        )  # fmt: skip
        self._stage_seconds = Histogram(
            "longtail_stage_seconds",
            "Parts of a retrieval: wait in the queue (of every request), then encode the queries, search the index "
            "and make the answers (of every batch).",
            ["stage"],
            buckets=_SECONDS,
            registry=counted,
        )
        self._batch_queries = Histogram(
            "longtail_batch_queries", "Queries that shared a search.", buckets=_QUERIES, registry=counted
        )
        self._queries = Counter("longtail_queries", "Queries answered; a request may hold many.", registry=counted)
        self._exposures = Counter(
            "longtail_exposures", "Labels answered, by frequency bucket.", ["bucket"], registry=counted
        )
        self._explored = Counter(
            "longtail_explored", "Labels drawn at random for requests that explore, by frequency bucket.", ["bucket"],
            registry=counted,
        )  # fmt: skip
        self._unknown = Counter(
            "longtail_labels_unknown", "Ids in requests that the release does not have, by the list they stood in.",
            ["list"], registry=counted,
        )  # fmt: skip
        self._swaps = Counter("longtail_release_swaps", "Releases taken into service.", registry=counted)
        self._load_failures = Counter(
            "longtail_release_load_failures",
            "Attempts to load a release that failed; the one before stayed in service.",
            registry=counted,
        )
        self._queue_depth = Gauge(
            "longtail_queue_depth", "Queries that wait for a search.", multiprocess_mode="livesum", registry=counted
        )
        self._shed = Counter("longtail_shed", "Requests refused because the queue was full (429).", registry=counted)
        self._over_quota = Counter(
            "longtail_over_quota", "Requests refused because their client had used up a quota (429).", ["quota"],
            registry=counted,
        )  # fmt: skip
        self._timeouts = Counter(
            "longtail_timeouts", "Requests given up because no answer was there in time.", registry=counted
        )
        # Looked up once: these are counted with every request.
        self._of_route = {
            route: (
                [self._requests.labels(route, status) for status in _STATUS_CLASSES],
                self._request_seconds.labels(route),
            )
            for route in (*routes, UNKNOWN_ROUTE)
        }
        self._previews_of_status = [self._previews.labels(status) for status in _STATUS_CLASSES]
        self._of_stage = {stage: self._stage_seconds.labels(stage) for stage in _STAGES}
        self._of_bucket = [self._exposures.labels(bucket) for bucket in BUCKET_NAMES]
        self._explored_of_bucket = [self._explored.labels(bucket) for bucket in BUCKET_NAMES]
        self._of_list = {ids: self._unknown.labels(ids) for ids in ("exclude", "allow")}
        self._of_quota = {quota: self._over_quota.labels(quota) for quota in QUOTAS}
        self._release = _ReleaseInfo()
        self._shown = self._registry(counted, others)

    def _registry(self, counted: CollectorRegistry, others: Iterable[Collector]) -> CollectorRegistry:
        if MULTIPROCESS in os.environ:
            shown = CollectorRegistry()
            MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
        else:
            shown = counted
            ProcessCollector(registry=shown)
        for collector in (self._release, *others):
            shown.register(collector)
        return shown

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        by_status, durations = self._of_route[route]
        by_status[status // 100 - 2].inc()
        durations.observe(seconds)

    def count_preview(self, status: int) -> None:
        """Count one answered preview."""
        self._previews_of_status[status // 100 - 2].inc()

    def count_search(self, queries: int, waited: Sequence[float], stage_seconds: Mapping[str, float]) -> None:
        """Count one search.

        Args:
            queries: that shared it.
            waited: seconds that each of its requests waited for it.
            stage_seconds: duration of `encode`, `search` and `answer`.
        """
        self._batch_queries.observe(queries)
        for seconds in waited:
            self._of_stage["queue"].observe(seconds)
        for stage, seconds in stage_seconds.items():
            self._of_stage[stage].observe(seconds)

    def set_queue_depth(self, queries: int) -> None:
        """Say how many queries wait for a search."""
        self._queue_depth.set(queries)

    def count_answers(self, batch: AnsweredBatch, unknown: Mapping[str, int]) -> None:
        """Count what a batch showed: its queries, labels by bucket, and ids that the release does not have."""
        self._queries.inc(len(batch.ends_B))
        for exposures, count in zip(self._of_bucket, batch.exposures.tolist(), strict=True):
            exposures.inc(count)
        for bucket, count in batch.explored.items():
            self._explored_of_bucket[bucket].inc(count)
        for ids, count in unknown.items():
            self._of_list[ids].inc(count)

    def count_shed(self) -> None:
        """Count a request that found a queue full."""
        self._shed.inc()

    def count_over_quota(self, quota: str) -> None:
        """Count a request of a client that had used up one of `QUOTAS`."""
        self._of_quota[quota].inc()

    def count_timeout(self) -> None:
        """Count a request that had no answer in time."""
        self._timeouts.inc()

    def begin_release(self, name: str) -> None:
        """Name the release that is served from now on."""
        self._release.name = name
        self._swaps.inc()

    def count_load_failure(self) -> None:
        """Count a release that could not be loaded."""
        self._load_failures.inc()

    def scrape(self) -> bytes:
        """All series in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._shown)
