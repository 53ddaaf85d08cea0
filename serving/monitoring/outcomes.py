"""Count every outcome once; report all workers' counts.

Prometheus computes any window over all replicas from totals. The page has windows of this host, also without a
Prometheus. Both read the mapped files of all workers of the host (counters), which survive restarts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int8
from longtail.bundle.forecast import ForecastSettings
from longtail.bundle.ids import id_text
from longtail.serving.errors import NotReadyError
from longtail.serving.monitoring.baseline import DECILES, OfflineFigures, OfflineRecall, Promises
from longtail.serving.monitoring.counters import (
    BATCH_QUERIES,
    DIAL_BINS,
    DIAL_BOUNDS,
    DIAL_EDGES,
    DIALS,
    EXPOSED_SUFFIX,
    KINDS,
    LATENCY_BINS,
    LATENCY_EDGES,
    REFUSALS,
    SECONDS,
    STAGES,
    STATUS_CLASSES,
    Counters,
    ExposedLabels,
    observe,
)
from longtail.serving.monitoring.prometheus import collect_counters, collect_release, collect_report
from longtail.serving.monitoring.records import (
    BASES,
    ID_KINDS,
    RESTRICTIONS,
    SOURCES,
    AnsweredBatch,
    ChosenLabels,
)
from longtail.serving.monitoring.report import make_report
from longtail.serving.monitoring.verdict import Signal, judge
from longtail.serving.monitoring.workers import Workers, WorkerSlot
from longtail.serving.settings import NO_VALUE, OTHER_VALUE

logger = logging.getLogger(__name__)

UNKNOWN_ROUTE, REFUSED_ROUTE = "unmatched", "refused"
"""Routes of requests to no path of the service, and of those whose key is wrong or missing."""
_REPORT_SECONDS = 1.0
_DAY = 86_400
_BUCKETS = len(BUCKET_NAMES)
_MOST_WAITING = 1024
"""Most requests, and searches, that wait to be counted."""
_TRAFFIC_ROUTES = ("/v1/retrieve", "/v1/similar")
_NO_RELEASE = ""
"""Release of outcomes that precede the first release; the page leaves them out."""
Countable = Literal["shed", "dropped", "timeouts", "engine_unanswered", "release_load_failures"]


@dataclass(frozen=True)
class _CountedRelease:
    name: str
    labels: ExposedLabels
    promises: Promises | None


class Monitoring(Collector):
    """Counts one worker's outcomes, reports all workers'. Thread-safe.

    Requests and answers wait until `flush` counts them together, which takes a tenth of the time. Files in `state`:

        live/minutes.WORKER    all counters of a worker
        live/RELEASE.shown     when each label was last answered

    Args:
        slot: this worker's slot on the board of workers; None: this worker is alone.
        routes: path patterns of the router, such as `/v1/labels/{id}`.
        groups: query features and their values by which answers are counted.
        queue_limit: queries that may wait for a search.
        releases: number of latest releases whose answered labels are counted, at least one.

    Raises:
        OSError: `state` cannot be read or written.
    """

    def __init__(
        self,
        state: Path,
        slot: WorkerSlot | None = None,
        *,
        routes: Sequence[str] = (),
        groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
        queue_limit: int = 0,
        releases: int = 3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.slot = slot or WorkerSlot(Workers(), 0)
        self._root = state / "live"
        self._root.mkdir(parents=True, exist_ok=True)
        self._routes = (*routes, UNKNOWN_ROUTE, REFUSED_ROUTE)
        self._groups = {name: frozenset(values) for name, values in groups.items()}
        self._group_values = {
            name: (*values, OTHER_VALUE if values else "given", NO_VALUE) for name, values in groups.items()
        }
        self._queue_limit = queue_limit
        self._most_releases = releases
        self._clock = clock
        self._counters = Counters(self._root, self.slot.worker)
        # `_lock` comes last: the others may be held when it is taken, never the other way round.
        self._begin_lock, self._report_lock, self._lock, self._flushing = (threading.Lock() for _ in range(4))
        self._requests = deque[tuple[str, int, float]]()
        self._searches = deque[AnsweredBatch]()
        self._releases: dict[str, _CountedRelease] = {}
        self._current: _CountedRelease | None = None
        self._offline = OfflineFigures()
        self._evaluated: list[dict[str, Any]] = []
        self._forecast: ForecastSettings | None = None
        self._cooccurrence_until: float | None = None
        self._labels: Callable[[], dict[str, int]] = lambda: dict.fromkeys(("added", "hidden", "available"), 0)
        self._troubles: dict[Signal, str] = {}
        self._report: tuple[float, dict[str, Any]] | None = None
        self._file_errors: dict[str, str] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        # A scrape reaches one process of several, whose memory and CPU would pass for all.
        if self.slot.workers.workers == 1:
            ProcessCollector(registry=self._registry)

    def begin_release(
        self, release: str, buckets_L: Int8, promises: Promises | None, offline: OfflineFigures | None = None,
        forecast: ForecastSettings | None = None, cooccurrence_until: float | None = None,
    ) -> None:  # fmt: skip
        """Count later answers as this release's.

        A full disk does not prevent this: counts then stay in memory, with a warning.

        Args:
            promises: distributions to compare the traffic with; None: scores are not counted, and PSI is undefined.
        """
        self.flush()
        with self._begin_lock:
            counted = _CountedRelease(release, ExposedLabels(self._root, release, buckets_L), promises)
            # Earlier releases stay: requests that began with them still end.
            others = [other for other in self._releases.values() if other.name != release]
            self._releases = {other.name: other for other in (*others[1 - self._most_releases :], counted)}
            offline = offline or OfflineFigures()
            self._evaluated = (
                [] if promises is None or not promises.is_complete else offline.compare_exposures(promises)
            )
            self._current, self._offline, self._report = counted, offline, None
            self._forecast, self._cooccurrence_until = forecast, cooccurrence_until
            with self._warning("forgetting old releases"):
                paths = sorted(self._root.glob(f"*{EXPOSED_SUFFIX}"), key=lambda path: path.stat().st_mtime)
                for path in paths[: -self._most_releases]:
                    if path.name.removesuffix(EXPOSED_SUFFIX) not in self._releases:
                        path.unlink(missing_ok=True)
            with self._lock:
                self._counters.totals["release_swaps"] += 1

    def count_request(self, route: str, status: int, seconds: float, *, preview: bool = False) -> None:
        """Count a request that has ended.

        Args:
            preview: no user sees the answer, so only the number of previews includes it.
        """
        if preview:
            with self._lock:
                self._counters.totals["previews"][status // 100 - 2] += 1
            return
        # Appending to a deque needs no lock, and `flush` counts many at once.
        self._requests.append((route, status, seconds))
        if len(self._requests) >= _MOST_WAITING:
            self.flush()

    def count_answers(self, batch: AnsweredBatch) -> None:
        """Count a search and its answers."""
        self._searches.append(batch)
        if len(self._searches) >= _MOST_WAITING:
            self.flush()

    def count(self, name: Countable, amount: int = 1) -> None:
        """Count outcomes without further figures."""
        if amount:
            with self._lock:
                counts = self._counters.totals if name not in ("shed", "dropped") else self._get_current_minute()
                counts[name] += amount

    def count_refused_id(self, reason: Literal["malformed", "forged", "expired"]) -> None:
        """Count a request of feedback whose `answer_id` was refused."""
        with self._lock:
            self._counters.totals["answer_ids_refused"][REFUSALS.index(reason)] += 1

    def count_searches(
        self, queries: Sequence[int], waited: Sequence[float], stage_seconds: Sequence[Mapping[str, float]]
    ) -> None:
        """Count searches.

        Args:
            queries: number of queries of each search.
            waited: seconds that each request of the searches waited in the queue.
            stage_seconds: duration of each search's stages.
        """
        seconds_by_stage: dict[str, list[float]] = {"queue": [*waited]}
        for durations in stage_seconds:
            for stage, seconds in durations.items():
                seconds_by_stage.setdefault(stage, []).append(seconds)
        with self._lock:
            totals = self._counters.totals
            observe(totals["batch_queries"], BATCH_QUERIES, queries)
            for stage, stage_durations in seconds_by_stage.items():
                observe(totals["stage_seconds"][STAGES.index(stage)], SECONDS, stage_durations)

    def count_choice(self, chosen: ChosenLabels) -> None:
        """Count the chosen labels of an event that was stored."""
        positives, hits = [0] * _BUCKETS, [0] * _BUCKETS
        for bucket, position in zip(chosen.buckets, chosen.positions, strict=True):
            if bucket >= 0:
                positives[bucket] += 1
                hits[bucket] += position is not None
        source, promised = SOURCES.index(chosen.source), self._find_promised_recall(chosen)
        with self._lock:
            counts, totals = self._counters.get_minute(self._clock(), chosen.release), self._counters.totals
            totals["feedback_events"][source] += 1
            counts["positives"][source] += positives
            counts["hits"][source] += hits
            counts["ids"][ID_KINDS.index("feedback")] += chosen.ids
            for kind, recall in promised.items():
                observed = (positives[kind], hits[kind]) if kind < _BUCKETS else (sum(positives), sum(hits))
                low, high = (recall.value if bound is None else bound for bound in recall[1:])
                expected = observed[0] * np.array([recall.value, low, high])
                counts["judged_recall"][source, kind] += [*observed, *expected]
            if chosen.source == "feedback":
                for position in chosen.positions:
                    histogram = totals["choice_bias_removal"][int(position is None)]
                    observe(histogram, DIAL_BOUNDS, [chosen.bias_removal])
            if chosen.arm is not None and chosen.arm.counted:
                self._counters.get_labelled("arm", chosen.arm.run, chosen.arm.arm)[5:9] += hits

    def _find_promised_recall(self, chosen: ChosenLabels) -> dict[int, OfflineRecall]:
        current = self._current
        if current is None or chosen.release != current.name or math.isnan(chosen.judged_at):
            return {}
        recall = self._offline.interpolate_recall(chosen.judged_at, chosen.k)
        return {KINDS.index(kind): figures for kind, figures in recall.items()}

    def flush(self) -> None:
        """Count the requests and answers that wait."""
        with self._flushing:
            by_route = defaultdict[str, list[tuple[int, float]]](list)
            # As many as wait now: other threads append meanwhile, and this must end.
            for _ in range(len(self._requests)):
                route, status, duration = self._requests.popleft()
                by_route[route].append((status, duration))
            for route, requests in by_route.items():
                with self._lock:
                    self._count_requests(route, requests)
            by_release = defaultdict[str, list[AnsweredBatch]](list)
            for _ in range(len(self._searches)):
                batch = self._searches.popleft()
                by_release[batch.release].append(batch)
            for batches in by_release.values():
                self._count_searches(batches)

    def _count_requests(self, route: str, requests: Sequence[tuple[int, float]]) -> None:
        statuses, seconds = zip(*requests, strict=True)
        row = self._counters.get_labelled("route", route)
        classes = len(STATUS_CLASSES)
        row[:classes] += np.bincount(np.array(statuses) // 100 - 2, minlength=classes)
        observe(row[classes:], SECONDS, seconds)
        if route in _TRAFFIC_ROUTES:
            # Refused requests take no time, and would make the latency look better than it is.
            answered = [(status, duration) for status, duration in requests if not 400 <= status < 500]
            counts = self._get_current_minute()
            counts["requests"] += len(answered)
            counts["errors"] += sum([status >= 500 for status, _ in answered])
            bins = np.searchsorted(LATENCY_EDGES, [duration for _, duration in answered], side="right")
            counts["latency"] += np.bincount(bins, minlength=LATENCY_BINS)

    def _get_current_minute(self) -> np.void:
        release = _NO_RELEASE if self._current is None else self._current.name
        return self._counters.get_minute(self._clock(), release)

    def _count_searches(self, searches: Sequence[AnsweredBatch]) -> None:
        """Count searches of one release, and their answers.

        An answer that has a promise is judged by its first labels only, up to the baseline's number per query. For a
        release older than those counted here, no deciles and no exposed labels are counted.
        """
        waited = [*chain.from_iterable([search.waited for search in searches])]
        queries = [len(search.ends_B) for search in searches]
        self.count_searches(queries, waited, [search.seconds for search in searches])
        batch = AnsweredBatch.joined(searches)
        unknown = Counter[str]()
        for search in searches:
            unknown.update(search.unknown)
        timestamp, release = self._clock(), self._releases.get(batch.release)
        judged = _judge(batch, None if release is None else release.promises)
        with self._lock:
            counts, totals = self._counters.get_minute(timestamp, batch.release), self._counters.totals
            self._count_batch(batch, judged, counts, totals)
            totals["unknown_ids"] += [unknown["exclude"], unknown["allow"]]
            for search in searches:
                if search.features_B is not None:
                    self._count_groups(search.features_B, search)
            self._count_arms(batch)
            if release is not None:
                release.labels.count(batch.rows_N, timestamp)

    def _count_batch(self, batch: AnsweredBatch, judged: Mapping[str, Any], counts: np.void, totals: np.void) -> None:
        exposures = np.bincount(batch.buckets_N, minlength=_BUCKETS)
        counts["queries"] += len(batch.ends_B)
        counts["popularity"] += batch.counts_N.sum()
        counts["exposures"] += exposures
        for name, amount in judged.items():
            counts[name] += amount
        counts["floored"] += batch.floored
        if (restrictions_B := batch.restrictions_B) is not None:
            by_option = [sum(name in names for names in restrictions_B) for name in RESTRICTIONS]
            counts["restricted"] += [sum(map(bool, restrictions_B)), *by_option]
            restricted_N = np.repeat(list(map(bool, restrictions_B)), np.diff(batch.ends_B, prepend=0))
            totals["restricted_exposures"] += np.bincount(batch.buckets_N[restricted_N], minlength=_BUCKETS)
        dials = (batch.bias_removal_B, batch.popularity_B, batch.cooccurrence_B)
        for i, (name, weights_B) in enumerate(zip(DIALS, dials, strict=True)):
            counts[name] += weights_B.sum(dtype=np.float64)
            counts["dials"][i] += np.bincount(np.searchsorted(DIAL_EDGES, weights_B), minlength=DIAL_BINS)
            observe(totals["query_dials"][i], DIAL_BOUNDS, weights_B)
        for bucket, count in batch.explored.items():
            totals["explored"][bucket] += count
        for basis, count in batch.bases.items():
            totals["bases"][BASES.index(basis)] += count
        for kind, id_counts in batch.ids.items():
            if id_counts.ids:
                counts["ids"][ID_KINDS.index(kind)] += id_counts

    def _count_arms(self, batch: AnsweredBatch) -> None:
        for i, arm in enumerate(batch.arms_B or ()):
            if arm is not None and arm.counted:
                start = batch.ends_B[i - 1] if i else 0
                exposures = np.bincount(batch.buckets_N[start : batch.ends_B[i]], minlength=_BUCKETS)
                self._counters.get_labelled("arm", arm.run, arm.arm)[:5] += [1, *exposures]

    def _count_groups(self, features_B: Sequence[Mapping[str, Any] | None], batch: AnsweredBatch) -> None:
        queries = len(batch.ends_B)
        query_N = np.repeat(np.arange(queries), np.diff(batch.ends_B, prepend=0))
        exposures_BU = np.bincount(query_N * _BUCKETS + batch.buckets_N, minlength=queries * _BUCKETS)
        for name, values in self._groups.items():
            for features, exposures in zip(features_B, exposures_BU.reshape(queries, _BUCKETS), strict=True):
                value = _group_value(None if features is None else features.get(name), values)
                self._counters.get_labelled("group", name, value)[:5] += [1, *exposures]

    def set_label_counts(self, *, added: int, hidden: int, available: Callable[[], int]) -> None:
        """Set the numbers of added, hidden and available labels."""
        self._labels = lambda: {"added": added, "hidden": hidden, "available": available()}

    def set_trouble(self, signal: Signal, sentence: str | None) -> None:
        """Set a problem's sentence for the verdict; None: solved."""
        # A new dictionary each time, because a report may read the old one in another thread.
        troubles = self._troubles | {signal: sentence}
        self._troubles = {name: text for name, text in troubles.items() if text is not None}

    def report(self) -> dict[str, Any]:
        """Create the report of GET /v1/monitoring, at most a second old.

        Callers must not modify the report, and must not call this in the event loop: it sorts all labels' exposures,
        about 0.1 s for a million labels.

        Raises:
            NotReadyError: no release is in service.
        """
        self.flush()
        with self._report_lock:
            timestamp, current = self._clock(), self._current
            if current is None:
                raise NotReadyError("no release is loaded yet")
            baseline = None if current.promises is None else current.promises.default
            if self._report is None or not 0 <= timestamp - self._report[0] < _REPORT_SECONDS:
                with self._lock:  # so that this worker's row of the current minute is complete
                    rows = self._counters.read_day(timestamp)
                rows = rows[rows["release"] != _NO_RELEASE.encode()]
                self._report = (timestamp, make_report(current.name, baseline, current.labels, rows, timestamp))
            report, data_until = self._report[1] | {"labels": self._labels()}, self._offline.data_until
            if baseline is not None:
                report["baseline"] = {**report["baseline"], "evaluated": self._evaluated}
            age_days = None if data_until is None else max(0.0, (timestamp - data_until) / _DAY)
            return report | {"verdict": judge(report, self._troubles, age_days=age_days)}

    def scrape(self) -> bytes:
        """Return all series in Prometheus' text format, version 0.0.4."""
        self.flush()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the series of METRICS.md over all workers, for `CollectorRegistry.register`.

        A scrape never fails: unreadable figures are NaN.
        """
        report = None
        with self._warning("reading the figures"):
            if self._current is not None:
                report = self.report()
        with self._lock:
            counts, totals, labelled = self._counters.read_totals()
        yield from collect_counters(counts, totals, labelled, self._routes, self._group_values)
        current = None if self._current is None else self._current.name
        yield from collect_release(current, self._forecast, self._cooccurrence_until)
        yield from self.slot.collect(self._queue_limit)
        yield from collect_report(report, self._labels())

    def close(self) -> None:
        """Count the waiting requests and answers, and stop reporting."""
        self.flush()
        self._current, self._releases = None, {}

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Log errors of files instead of raising them."""
        try:
            yield
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            if self._file_errors.get(what) != message:
                logger.warning("live figures, %s: %s", what, message)
            self._file_errors[what] = message
        else:
            self._file_errors.pop(what, None)


def _group_value(feature: Any, values: frozenset[str]) -> str:
    if feature is None or feature in ("", [], {}):
        return NO_VALUE
    if not values:
        return "given"
    text = id_text(feature)
    return text if text is not None and text in values else OTHER_VALUE


def _judge(batch: AnsweredBatch, promises: Promises | None) -> dict[str, Any]:
    """Judge the first labels of each answer by the promise at its λ.

    Without promises, the answers are only selected.

    Returns:
        Amounts to add to `COUNTS`, by field.
    """
    ends, queries_by_dial = list(batch.ends_B), dict[float, list[int]]()
    for query, bias_removal in enumerate(batch.judged_at_B.tolist()):
        if not math.isnan(bias_removal):
            queries_by_dial.setdefault(bias_removal, []).append(query)
    judged_queries, exposures = 0, np.zeros(_BUCKETS, np.int64)
    deciles, promised = np.zeros(DECILES, np.int64), np.zeros(_BUCKETS + DECILES)
    for bias_removal, queries in queries_by_dial.items():
        promise = None if promises is None else promises.get(bias_removal)
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
        exposures += np.bincount(batch.buckets_N[judged_N], minlength=_BUCKETS)
        if promise is not None:
            deciles_N = np.searchsorted(promise.score_edges, batch.scores_N[judged_N], side="right")
            deciles += np.bincount(deciles_N, minlength=DECILES)
            for depth in depths:
                promised += promise.by_k[depth]
    return {
        "judged_queries": judged_queries, "judged_exposures": exposures, "judged_scores": deciles, "promised": promised
    }  # fmt: skip
