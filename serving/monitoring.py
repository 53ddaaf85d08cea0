"""Every figure that /metrics shows. All series are there, at 0, from the first scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from bundle import BUCKET_NAMES
from serving.retriever import Retrieval

UNMATCHED = "unmatched"
_STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
_STAGES = ("encode", "search", "answer")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Monitor:
    """The counters of one application, in a registry of their own.

    Args:
        routes: paths as the router knows them, such as `/v1/labels/{id}`.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "longtail_requests",
            "Requests answered, by route and class of status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._request_seconds = Histogram(
            "longtail_request_seconds",
            "From a request's first byte read to its answer sent, by route.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._stage_seconds = Histogram(
            "longtail_stage_seconds",
            "Parts of a retrieval: encode the queries (with checking them), search the index, make the answer.",
            ["stage"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._queries = Counter(
            "longtail_queries", "Queries answered; a request may hold many.", registry=self._registry
        )
        self._exposures = Counter(
            "longtail_exposures", "Labels answered, by frequency bucket.", ["bucket"], registry=self._registry
        )
        self._unknown = Counter(
            "longtail_labels_unknown",
            "Ids in requests that the release does not have, by the list they stood in.",
            ["list"],
            registry=self._registry,
        )
        self._release = Gauge(
            "longtail_release_info",
            "The release being served, as a label; its value is 1.",
            ["release"],
            registry=self._registry,
        )
        self._swaps = Counter("longtail_release_swaps", "Releases taken into service.", registry=self._registry)
        self._load_failures = Counter(
            "longtail_release_load_failures",
            "Attempts to load a release that failed; the one before stayed in service.",
            registry=self._registry,
        )
        self._ready = Gauge("longtail_ready", "1 if /readyz says ready.", registry=self._registry)
        for route in (*routes, UNMATCHED):
            self._request_seconds.labels(route)
            for status in _STATUS_CLASSES:
                self._requests.labels(route, status)
        # Looked up once: these are counted with every retrieval.
        self._of_stage = {stage: self._stage_seconds.labels(stage) for stage in _STAGES}
        self._of_bucket = [self._exposures.labels(bucket) for bucket in BUCKET_NAMES]
        self._of_list = {ids: self._unknown.labels(ids) for ids in ("exclude", "allow")}

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(route, f"{status // 100}xx").inc()
        self._request_seconds.labels(route).observe(seconds)

    def retrieval(self, retrieval: Retrieval) -> None:
        """Count one answered batch."""
        self._queries.inc(len(retrieval.results))
        for exposures, count in zip(self._of_bucket, retrieval.bucket_counts, strict=True):
            exposures.inc(count)
        for ids, count in retrieval.unknown.items():
            self._of_list[ids].inc(count)
        for stage, seconds in retrieval.seconds.items():
            self._of_stage[stage].observe(seconds)

    def release_swapped(self, name: str) -> None:
        """Another release is being served from now on."""
        self._release.clear()
        self._release.labels(name).set(1)
        self._swaps.inc()

    def release_refused(self) -> None:
        """A release could not be loaded."""
        self._load_failures.inc()

    def watch_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Ask `is_ready` at every scrape."""
        self._ready.set_function(is_ready)

    def scrape(self) -> bytes:
        """All series in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)
