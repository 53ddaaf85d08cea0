"""Record every outcome of a worker by one call of `Monitoring`, for /metrics and for GET /v1/monitoring.

| outcome | /metrics, by `Metrics` | GET /v1/monitoring, by `LiveFigures` |
|---|---|---|
| a request has ended | requests and seconds of its route | requests, errors and latency, of traffic |
| a preview has ended | previews, and nothing else | – |
| a request was turned away, the queue being full | shed | shed |
| a batch was answered | queries, λ, μ, ω, exposures, scores, arms, unknown ids | the same, labels |
| labels were chosen | positives and hits by bucket, by λ, by arm | positives and hits by bucket |
| an event was dropped | dropped | dropped |
| a release went into service | swaps, the release's name | the labels that it may show |

Prometheus has totals since the start of the process, from which it computes any window over all replicas. The page has
windows of this host that survive restarts, also without a Prometheus.

Live figures are in memory-mapped files, and reports add up those of all workers of the host.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from prometheus_client.core import Metric

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float64, Int8, Int64
from longtail.bundle.forecast import ForecastSettings
from longtail.serving.errors import NotReadyError
from longtail.serving.monitoring.baseline import DECILES, OfflineFigures, OfflineRecall, Promises
from longtail.serving.monitoring.prometheus import Metrics
from longtail.serving.monitoring.records import (
    ID_KINDS,
    RESTRICTIONS,
    SOURCES,
    AnsweredBatch,
    AnsweredSearch,
    ChosenLabels,
)
from longtail.serving.monitoring.report import make_report, report_metrics
from longtail.serving.monitoring.ring import (
    DIALS,
    KINDS,
    LATENCY_BINS,
    SUFFIX,
    MinuteRing,
    ShownLabels,
    count_dials,
    latency_bin,
)
from longtail.serving.monitoring.verdict import Signal, judge
from longtail.serving.monitoring.workers import Seat, Workers

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
_DAY = 86_400
_BUCKETS = len(BUCKET_NAMES)
_MOST_WAITING = 1024
"""Requests, and searches, that wait to be counted at most."""
_TRAFFIC_ROUTES = ("/v1/retrieve", "/v1/similar")


@dataclass(frozen=True)
class _Counted:
    """State of a release whose answers are counted."""

    name: str
    shown: ShownLabels
    promises: Promises | None


class _Judged(NamedTuple):
    """What is held against a promise.

    Attributes:
        exposures: labels by bucket, int64 [4].
        deciles: labels by decile of the scores promised, int64 [10]; None without a promise.
        promised: labels promised, by bucket and decile, float64 [14].
    """

    queries: int
    exposures: Int64
    deciles: Int64 | None
    promised: Float64


class LiveFigures:
    """The live figures of one worker, reported together with those of all workers. Thread-safe.

    All figures are stored in `state`, where a restart finds them:

        live/minutes.WORKER    counts by minute and release (ring.py)
        live/RELEASE.shown     when each label was last answered (ring.py)

    Args:
        worker: number of this process, unique among the running processes that share `state`.
        releases: number of latest releases whose shown labels are counted, at least one.

    Raises:
        OSError: `state` cannot be read or written.
    """

    def __init__(
        self,
        state: Path,
        *,
        worker: int = 0,
        releases: int = 3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = state / "live"
        self._root.mkdir(parents=True, exist_ok=True)
        self._releases = releases
        self._clock = clock
        self._ring = MinuteRing(self._root, worker)
        self._begin_lock, self._report_lock, self._ring_lock = (threading.Lock() for _ in range(3))
        self._held: dict[str, _Counted] = {}
        self._current: _Counted | None = None
        self._offline = OfflineFigures()
        self._evaluated: list[dict[str, Any]] = []
        self._labels: Callable[[], dict[str, int]] = lambda: dict.fromkeys(("added", "hidden", "available"), 0)
        self._broken: dict[Signal, str] = {}
        self._report: tuple[float, dict[str, Any]] | None = None
        self._troubles: dict[str, str] = {}

    def begin_release(
        self, release: str, buckets_L: Int8, promises: Promises | None, offline: OfflineFigures | None = None
    ) -> None:
        """Count `release` as the one in service from now on; after a restart its figures continue.

        A full disk does not prevent this: counts then stay in memory, with a warning.

        Args:
            promises: distributions to compare the traffic with; None: scores are not counted, and PSI is undefined.
        """
        with self._begin_lock:
            counted = _Counted(release, ShownLabels(self._root, release, buckets_L), promises)
            others = [held for held in self._held.values() if held.name != release]
            self._held = {held.name: held for held in (*others[1 - self._releases :], counted)}
            offline = offline or OfflineFigures()
            self._evaluated = [] if promises is None or not promises.whole else offline.evaluated(promises)
            self._current, self._offline, self._report = counted, offline, None
            with self._warning("forgetting old releases"):
                paths = sorted(self._root.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
                for path in paths[: -self._releases]:
                    if path.name.removesuffix(SUFFIX) not in self._held:
                        path.unlink(missing_ok=True)

    def count_answers(self, answered: AnsweredBatch) -> tuple[Int64, Int64 | None]:
        """Count a batch; of a release older than those counted here, no deciles and no shown labels.

        Each answer that has a promise is judged by its first labels only, up to the baseline's number per query.

        Returns:
            Labels by bucket, int64 [4], and judged labels by decile of their scores, int64 [10], None without any
            promise.
        """
        now, counted = self._clock(), self._held.get(answered.release)
        exposures = np.bincount(answered.buckets_N, minlength=_BUCKETS)
        judged = _judge(answered, None if counted is None else counted.promises)
        dials = (answered.bias_removal_B, answered.popularity_B, answered.cooccurrence_B)
        with self._ring_lock:
            counts = self._ring.at(now, answered.release)
            counts["queries"] += len(answered.ends_B)
            counts["popularity"] += answered.counts_N.sum()
            counts["exposures"] += exposures
            counts["judged_queries"] += judged.queries
            counts["judged_exposures"] += judged.exposures
            if judged.deciles is not None:
                counts["judged_scores"] += judged.deciles
                counts["promised"] += judged.promised
            if (restrictions_B := answered.restrictions_B) is not None:
                of_option = [sum(name in names for names in restrictions_B) for name in RESTRICTIONS]
                counts["restricted"] += [sum(map(bool, restrictions_B)), *of_option]
            counts["floored"] += answered.floored
            for dial, (name, weights_B) in enumerate(zip(DIALS, dials, strict=True)):
                counts[name] += weights_B.sum(dtype=np.float64)
                count_dials(counts["dials"][dial], weights_B)
            for kind, id_counts in answered.ids.items():
                if id_counts.ids:
                    counts["ids"][ID_KINDS.index(kind)] += id_counts
            if counted is not None:
                counted.shown.count(answered.rows_N, now)
        return exposures, judged.deciles

    def count_requests(self, requests: Sequence[tuple[int, float]]) -> None:
        """Count answered requests by status and seconds; a status of 500 and above is an error."""
        if requests and self._current is not None:
            bins = [latency_bin(seconds) for _, seconds in requests]
            with self._ring_lock:
                counts = self._ring.at(self._clock(), self._current.name)
                counts["requests"] += len(requests)
                counts["errors"] += sum([status >= 500 for status, _ in requests])
                counts["latency"] += np.bincount(bins, minlength=LATENCY_BINS)

    def count(self, name: Literal["shed", "dropped"], amount: int = 1) -> None:
        """Count requests that were refused because the queue was full, or events that could not be kept."""
        if amount and self._current is not None:
            with self._ring_lock:
                self._ring.at(self._clock(), self._current.name)[name] += amount

    def count_choice(self, chosen: ChosenLabels) -> tuple[list[int], list[int]]:
        """Count labels chosen; return positives and hits by bucket."""
        positives, hits = [0] * _BUCKETS, [0] * _BUCKETS
        for bucket, position in zip(chosen.buckets, chosen.positions, strict=True):
            if bucket >= 0:
                positives[bucket] += 1
                hits[bucket] += position is not None
        id_counts = chosen.ids
        source, promised = SOURCES.index(chosen.source), self._promised_recall(chosen)
        with self._ring_lock:
            counts = self._ring.at(self._clock(), chosen.release)
            counts["positives"][source] += positives
            counts["hits"][source] += hits
            counts["ids"][ID_KINDS.index("feedback")] += id_counts
            for kind, figures in promised.items():
                of_kind = (positives[kind], hits[kind]) if kind < _BUCKETS else (sum(positives), sum(hits))
                low, high = (figures.value if bound is None else bound for bound in figures[1:])
                expected = of_kind[0] * np.array([figures.value, low, high])
                counts["judged_recall"][source, kind] += [*of_kind, *expected]
        return positives, hits

    def _promised_recall(self, chosen: ChosenLabels) -> dict[int, OfflineRecall]:
        """Return the recall that the release in service promises for an event, by place of the kind."""
        current = self._current
        if current is None or chosen.release != current.name or math.isnan(chosen.judged_at):
            return {}
        recall = self._offline.recall_at(chosen.judged_at, chosen.k)
        return {KINDS.index(kind): figures for kind, figures in recall.items()}

    def set_label_counts(self, *, added: int, hidden: int, available: Callable[[], int]) -> None:
        """Set the numbers of labels added to the release, hidden in it, and available when the report is made."""
        self._labels = lambda: {"added": added, "hidden": hidden, "available": available()}

    def set_trouble(self, signal: Signal, sentence: str | None) -> None:
        """Set the sentence about a problem for the verdict; None: the problem is solved."""
        troubles = self._broken | {signal: sentence}
        self._broken = {known: told for known, told in troubles.items() if told is not None}

    def report(self) -> dict[str, Any]:
        """Create the report of GET /v1/monitoring, without the request's id; it may be a second old.

        Callers must not modify the report, and must not call this in the event loop: it sorts all labels' exposures,
        about 0.1 s for a million labels.

        Raises:
            NotReadyError: no release is in service.
        """
        with self._report_lock:
            now, current = self._clock(), self._current
            if current is None:
                raise NotReadyError("no release is loaded yet")
            baseline = None if current.promises is None else current.promises.default
            if self._report is None or not 0 <= now - self._report[0] < _REPORT_SECONDS:
                with self._ring_lock:  # so that this worker's row of the current minute is complete
                    rows = self._ring.read(now)
                self._report = (
                    now,
                    make_report(current.name, baseline, current.shown, rows, now),
                )
            report, until = self._report[1] | {"labels": self._labels()}, self._offline.data_until
            if baseline is not None:
                report["baseline"] = {**report["baseline"], "evaluated": self._evaluated}
            age_days = None if until is None else max(0.0, (now - until) / _DAY)
            verdict = judge(report, self._broken, age_days=age_days)
            return report | {"verdict": verdict}

    def collect(self) -> Iterator[Metric]:
        """Yield the computed series of METRICS.md over all workers, for `CollectorRegistry.register`.

        A scrape never fails: unreadable figures are NaN.
        """
        report = None
        with self._warning("reading the figures"):
            if self._current is not None:
                report = self.report()
        yield from report_metrics(report, self._labels())

    def close(self) -> None:
        """Close the files; later calls count nothing."""
        self._current, self._held = None, {}

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Log errors of the files instead of raising them; the same error once, until a success."""
        try:
            yield
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            if self._troubles.get(what) != message:
                logger.warning("live figures, %s: %s", what, message)
            self._troubles[what] = message
        else:
            self._troubles.pop(what, None)


def _judge(answered: AnsweredBatch, promises: Promises | None) -> _Judged:
    """Hold the first labels of each answer against the promise at its λ; without promises, only select the answers."""
    ends, queries_of = list(answered.ends_B), dict[float, list[int]]()
    for query, bias_removal in enumerate(answered.judged_at_B.tolist()):
        if not math.isnan(bias_removal):
            queries_of.setdefault(bias_removal, []).append(query)
    judged_queries, exposures = 0, np.zeros(_BUCKETS, np.int64)
    deciles, promised = np.zeros(DECILES, np.int64), np.zeros(_BUCKETS + DECILES)
    for bias_removal, queries in queries_of.items():
        promise = None if promises is None else promises.at(bias_removal)
        if promises is not None and promise is None:
            continue
        judged_queries += len(queries)
        starts = [ends[query - 1] if query else 0 for query in queries]
        depths = [ends[query] - start for query, start in zip(queries, starts, strict=True)]
        if promise is not None:
            depths = [min(depth, len(promise.by_k) - 1) for depth in depths]
        judged_N = np.concatenate(
            [np.arange(start, start + depth) for start, depth in zip(starts, depths, strict=True)]
        )
        exposures += np.bincount(answered.buckets_N[judged_N], minlength=_BUCKETS)
        if promise is not None:
            deciles_N = np.searchsorted(promise.edges, answered.scores_N[judged_N], side="right")
            deciles += np.bincount(deciles_N, minlength=DECILES)
            for depth in depths:
                promised += promise.by_k[depth]
    return _Judged(judged_queries, exposures, None if promises is None else deciles, promised)


class Monitoring:
    """Counts the outcomes of one worker in both views. Thread-safe.

    Requests and answers wait until `flush` counts them together, which takes a tenth of the time. Outcomes that only
    one view shows are counted there directly: `metrics.timeouts.inc()`.

    Args:
        seat: this worker's place on the workers' board; None: this worker is alone.
    """

    def __init__(self, metrics: Metrics, figures: LiveFigures, seat: Seat | None = None) -> None:
        self.metrics = metrics
        self.figures = figures
        self.seat = seat or Seat(Workers(), 0)
        self._requests = deque[tuple[str, int, float]]()
        self._searches = deque[AnsweredSearch]()
        self._flushing = threading.Lock()

    def count_request(self, route: str, status: int, seconds: float, *, preview: bool = False) -> None:
        """Count a request that has ended.

        Args:
            preview: no user sees the answer, so only the number of previews includes it.
        """
        if preview:
            self.metrics.count_preview(status)
            return
        self._requests.append((route, status, seconds))
        if len(self._requests) >= _MOST_WAITING:
            self.flush()

    def count_answers(self, search: AnsweredSearch) -> None:
        """Count a search for a batch of queries, and its answers."""
        self._searches.append(search)
        if len(self._searches) >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Count the requests and answers that wait."""
        with self._flushing:
            by_route = defaultdict[str, list[tuple[int, float]]](list)
            for _ in range(len(self._requests)):
                route, status, duration = self._requests.popleft()
                by_route[route].append((status, duration))
            for route, requests in by_route.items():
                statuses, seconds = zip(*requests, strict=True)
                self.metrics.count_requests(route, statuses, seconds)
                if route in _TRAFFIC_ROUTES:
                    # Refused requests take no time, and would make the latency look better than it is.
                    answered = [(status, duration) for status, duration in requests if not 400 <= status < 500]
                    self.figures.count_requests(answered)
            by_release = defaultdict[str, list[AnsweredSearch]](list)
            for _ in range(len(self._searches)):
                search = self._searches.popleft()
                by_release[search.batch.release].append(search)
            for searches in by_release.values():
                self._count_searches(searches)

    def _count_searches(self, searches: Sequence[AnsweredSearch]) -> None:
        """Count searches of one release."""
        waited = [*chain.from_iterable([search.waited for search in searches])]
        queries = [len(search.batch.ends_B) for search in searches]
        self.metrics.count_searches(queries, waited, [search.seconds for search in searches])
        unknown = Counter[str]()
        for search in searches:
            unknown.update(search.unknown)
            if search.features_B is not None:
                self.metrics.count_groups(search.features_B, search.batch)
        batch = AnsweredBatch.joined([search.batch for search in searches])
        self.metrics.count_answers(batch, unknown, *self.figures.count_answers(batch))

    def report(self) -> dict[str, Any]:
        """Return the report of GET /v1/monitoring; see `LiveFigures.report`."""
        self.flush()
        return self.figures.report()

    def scrape(self) -> bytes:
        """Return all series; see `Metrics.scrape`."""
        self.flush()
        return self.metrics.scrape()

    def count_shed(self) -> None:
        """Count a request that was refused because a queue was full."""
        self.metrics.shed.inc()
        self.figures.count("shed")

    def count_choice(self, chosen: ChosenLabels) -> None:
        """Count the chosen labels of an event that was stored."""
        self.metrics.count_choice(chosen, *self.figures.count_choice(chosen))

    def count_dropped(self, events: int) -> None:
        """Count lost events that no client waited for."""
        self.metrics.dropped.inc(events)
        self.figures.count("dropped", events)

    def begin_release(
        self, release: str, buckets_L: Int8, promises: Promises | None, offline: OfflineFigures | None = None,
        forecast: ForecastSettings | None = None, cooccurrence_until: float | None = None,
    ) -> None:  # fmt: skip
        """Count later answers as this release's."""
        self.flush()
        self.figures.begin_release(release, buckets_L, promises, offline)
        self.metrics.begin_release(release, forecast, cooccurrence_until)

    def close(self) -> None:
        """Count what waits, and close the files."""
        self.flush()
        self.figures.close()
