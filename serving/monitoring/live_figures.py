"""The live figures of one worker: counted in mapped files, reported together with those of all workers of the host."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.core import Metric

from longtail.bundle import BUCKET_NAMES, remove_stale
from longtail.bundle.arrays import Bools, Float64, Int8, Int64
from longtail.bundle.frequency import NEW
from longtail.serving.errors import NotReadyError
from longtail.serving.monitoring.baseline import DECILES, Baseline, OfflineFigures
from longtail.serving.monitoring.feedback_counts import COUNTERS
from longtail.serving.monitoring.feedback_store import KEPT_SECONDS, FeedbackStore, answers_of
from longtail.serving.monitoring.joining import Choices
from longtail.serving.monitoring.records import AnsweredBatch, AnswerFeedback, ShadowPair
from longtail.serving.monitoring.release_history import ReleaseHistory
from longtail.serving.monitoring.report import make_report, report_metrics
from longtail.serving.monitoring.ring import SUFFIX, MinuteRing, ShownLabels, count_dials, latency_bin
from longtail.serving.monitoring.verdict import Evidence, Signal, judge
from longtail.state import Place, StoreError

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0
_TICK_SECONDS = 0.1
"""Often, so that each time is over before a request notices."""
_REPORT_SECONDS = 1.0
_TIDY_SECONDS = 60
_MOST_PENDING_LABELS = 2_000_000
_KEEPING = "keeping answers"
_BATCHES_AT_ONCE = 64
"""Of at most `max_batch` answers, 64 by default."""
_DAY = 86_400
_BUCKETS = len(BUCKET_NAMES)


@dataclass(frozen=True)
class _Counted:
    """A release whose answers are counted."""

    name: str
    shown: ShownLabels
    baseline: Baseline | None

    @cached_property
    def edges(self) -> Float64 | None:
        """Deciles of the baseline's scores."""
        return None if self.baseline is None else np.array(self.baseline.score_edges)


class LiveFigures:
    """The live figures of one worker's answers, reported together with those of all workers. Thread-safe.

    Starts a thread, so a process that forks makes it afterwards. Everything is kept in `state`, where a restart finds
    it again:

        live/minutes.WORKER    counts by minute and release (ring.py)
        live/RELEASE.shown     when each label was last answered (ring.py)
        releases.json          which release served when (release_history.py)
        feedback.sqlite        answers, feedback and recall (database.py)

    Args:
        state: directory, made if need be.
        kept: where answers, feedback and recall are kept instead, such as a database that replicas share.
        worker: number of this process among those that share `state`; no two that run have the same.
        max_answers, max_feedback, feedback_seconds: as of `FeedbackStore`; 0 answers: none is kept.
        releases: begun last, that labels shown are counted of, at least one.
        shadow_k: labels retrieved for an organic interaction.
        clock: seconds since 1970.

    Raises:
        OSError, StoreError: `state` cannot be read or written.
    """

    def __init__(
        self,
        state: Path,
        *,
        kept: Place | None = None,
        worker: int = 0,
        max_answers: int,
        max_feedback: int | None = None,
        feedback_seconds: float = KEPT_SECONDS,
        releases: int = 3,
        shadow_k: int = 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = state / "live"
        self._root.mkdir(parents=True, exist_ok=True)
        self._max_answers = max_answers
        self._releases = releases
        self._shadow_k = shadow_k
        self._clock = clock
        remove_stale(state, ".releases.json.*.tmp")
        self._history = ReleaseHistory(state / "releases.json")
        self._ring = MinuteRing(self._root, worker)
        self._store = FeedbackStore(
            kept or state, max_answers=max_answers, max_feedback=max_feedback, feedback_seconds=feedback_seconds
        )
        self._begin_lock, self._report_lock, self._ring_lock = (threading.Lock() for _ in range(3))
        self._flush_lock, self._keep_lock, self._pending_lock = (threading.Lock() for _ in range(3))
        self._held: dict[str, _Counted] = {}
        self._current: _Counted | None = None
        self._offline = OfflineFigures()
        self._labels = (0, 0)
        self._broken: dict[Signal, str] = {}
        self.count_choices: Callable[[Choices], None] = lambda _: None
        self._pending: deque[AnsweredBatch] = deque()
        self._pending_labels = 0
        self._report: tuple[float, dict[str, Any]] | None = None
        self._tidied_at = 0.0
        self._troubles: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="live-figures", daemon=True)
        self._thread.start()

    def begin_release(
        self, release: str, buckets_L: Int8, baseline: Baseline | None, offline: OfflineFigures | None = None
    ) -> None:
        """Count `release` as the one in service from now on; after a restart its figures go on.

        Never refuses a release: what the disk does not take is kept in memory, with a warning.

        Args:
            release: its name, fit for a file's.
            buckets_L: bucket of every label, int8 [L].
            baseline: what its traffic is compared with; None leaves scores uncounted and PSI undefined.
            offline: what its evaluation says.
        """
        with self._begin_lock:
            with self._warning("noting which release serves"):
                self._history.begin(release, self._clock(), baseline)
            counted = _Counted(release, ShownLabels(self._root, release, buckets_L), baseline)
            others = [held for held in self._held.values() if held.name != release]
            self._held = {held.name: held for held in (*others[1 - self._releases :], counted)}
            self._current, self._offline, self._report = counted, offline or OfflineFigures(), None
            with self._warning("forgetting old releases"):
                lately = {interval.name for interval in self._history.read()[-self._releases :]}
                for path in self._root.glob(f"*{SUFFIX}"):
                    if path.name.removesuffix(SUFFIX) not in lately | self._held.keys():
                        path.unlink(missing_ok=True)

    def count_answers(self, answered: AnsweredBatch) -> tuple[Int64, Int64, Int64 | None]:
        """Count a batch; a release not held here gets no deciles and no count of labels shown.

        Returns:
            Labels by bucket, int64 [4]; those of unrestricted answers; and these by decile of their scores, int64 [10],
            None without a baseline.
        """
        now, queries = self._clock(), len(answered.ends_B)
        judged_N: Bools | slice = slice(None)
        judged_queries: float = queries
        shown = judged = np.bincount(answered.buckets_N, minlength=_BUCKETS)
        if answered.restricted_B is not None:
            judged_queries -= answered.restricted_B.sum()
            judged_N = np.repeat(~answered.restricted_B, np.diff(np.asarray(answered.ends_B), prepend=0))
            judged = np.bincount(answered.buckets_N[judged_N], minlength=_BUCKETS)
        held, deciles = self._held.get(answered.release), None
        if held is not None and held.edges is not None:
            deciles = np.searchsorted(held.edges, answered.scores_N[judged_N], side="right")
            deciles = np.bincount(deciles, minlength=DECILES)
        with self._ring_lock:
            counts = self._ring.at(now, answered.release)
            counts["queries"] += queries
            counts["bias_removal"] += answered.bias_removal_B.sum(dtype=np.float64)
            counts["popularity_weight"] += answered.popularity_B.sum(dtype=np.float64)
            counts["popularity"] += answered.counts_N.sum()
            counts["exposures"] += shown
            counts["judged_queries"] += judged_queries
            counts["judged_exposures"] += judged
            if deciles is not None:
                counts["judged_scores"] += deciles
            for dial, weights_B in enumerate((answered.bias_removal_B, answered.popularity_B)):
                count_dials(counts["dials"][dial], weights_B)
            if held is not None:
                held.shown.count(answered.rows_N, now)
            dropped = self._max_answers > 0 and self._pending_labels >= _MOST_PENDING_LABELS
            counts["dropped"] += queries * dropped
        if self._max_answers and not dropped:
            with self._pending_lock:
                self._pending.append(answered)
                self._pending_labels += len(answered.fingerprints_N)
        return shown, judged, deciles

    def count_request(self, seconds: float, status: int) -> None:
        """Count a request that was answered; a status of 500 and above is an error."""
        if self._current is not None:
            with self._ring_lock:
                counts = self._ring.at(self._clock(), self._current.name)
                counts["requests"] += 1
                counts["errors"] += status >= 500
                counts["latency"][latency_bin(seconds)] += 1

    def count_shed(self) -> None:
        """Count a request that was refused because the queue was full."""
        if self._current is not None:
            with self._ring_lock:
                self._ring.at(self._clock(), self._current.name)["shed"] += 1

    def record_feedback(self, events: Sequence[AnswerFeedback]) -> None:
        """Record feedback on answers, on the disk when this returns; sent again it counts once.

        Raises:
            StoreError: nothing of it was recorded.
        """
        # First, so that a kill leaves no event without the answer it names.
        self._keep_answers()
        self._store.record_feedback(events, self._clock())

    def record_shadow(self, release: str, interactions: Sequence[ShadowPair]) -> None:
        """Record organic interactions, on the disk when this returns; under an idempotency key one counts once.

        Args:
            release: that `answered` was retrieved from.
            interactions: rows at L or above are of labels added since, which are new.

        Raises:
            NotReadyError: the release was not begun lately.
            StoreError: nothing of it was counted.
        """
        held = self._held.get(release)
        if held is None:
            raise NotReadyError(f"expected feedback on a release in service, received some on {release}")
        pairs = []
        for interaction in interactions:
            rows = np.unique(interaction.interacted[interaction.interacted >= 0])
            buckets_L = held.shown.buckets_L
            buckets = np.where(rows < len(buckets_L), buckets_L[np.minimum(rows, len(buckets_L) - 1)], NEW)
            positives = np.bincount(buckets, minlength=_BUCKETS).tolist()
            hits = np.bincount(buckets[np.isin(rows, interaction.answered)], minlength=_BUCKETS).tolist()
            pairs.append(list(zip(positives, hits, strict=True)))
        self._store.record_shadow(release, interactions, pairs, self._clock())

    def set_label_counts(self, *, added: int, hidden: int) -> None:
        """Set how many labels are added to the release and hidden from it."""
        self._labels = (added, hidden)

    def set_trouble(self, signal: Signal, sentence: str | None) -> None:
        """Say what is broken, for the verdict; None: it is well again."""
        troubles = self._broken | {signal: sentence}
        self._broken = {known: told for known, told in troubles.items() if told is not None}

    def report(self) -> dict[str, Any]:
        """The report as GET /v1/monitoring shows it, but for the request's id; up to a second old. Not to be modified.

        Sorts every label's exposures, about 0.1 s for a million labels: not for the event loop.

        Raises:
            NotReadyError: no release is in service.
            StoreError: the feedback cannot be read.
        """
        with self._report_lock:
            now, current = self._clock(), self._current
            if current is None:
                raise NotReadyError("no release is loaded yet")
            if self._report is None or not 0 <= now - self._report[0] < _REPORT_SECONDS:
                with self._ring_lock:  # this worker's row of the minute is not half written
                    rows = self._ring.read(now)
                intervals, recall = self._history.read(), self._store.recall(now)
                made = make_report(current.name, current.baseline, current.shown, rows, intervals, recall, now)
                self._report = now, made
            made, (added, hidden) = self._report[1], self._labels
            verdict = judge(self._evidence(made, current, now))
            return made | {"verdict": verdict, "labels": {"added": added, "hidden": hidden}}

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters of METRICS.md, over all workers; for `CollectorRegistry.register`.

        Never fails a scrape: what cannot be read is NaN.
        """
        report, totals = None, dict.fromkeys(COUNTERS, float("nan"))
        with self._warning("reading the figures"):
            totals |= self._store.totals()
            if self._current is not None:
                report = self.report()
        yield from report_metrics(report, totals, self._labels)

    def flush(self) -> None:
        """Do now what a thread does ten times a second: keep answers, join feedback, tidy up."""
        with self._flush_lock:
            self._keep_answers()
            now = self._clock()
            with self._warning("joining feedback"):
                if _KEEPING not in self._troubles:  # a database that is away is waited for once a tick
                    self.count_choices(self._store.join(now))
                if abs(now - self._tidied_at) >= _TIDY_SECONDS and not self._store.tidy(now):
                    self._tidied_at = now

    def close(self) -> None:
        """Write what is pending and let go of the files; nothing is counted afterwards."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(_PATIENCE_SECONDS)
        # Of a database that is away nobody waits.
        if not self._thread.is_alive() and _KEEPING not in self._troubles:
            self.flush()
        self._current, self._held = None, {}
        self._store.close()

    def _evidence(self, report: Mapping[str, Any], current: _Counted, now: float) -> Evidence:
        broken, until = dict(self._broken), self._offline.data_until
        if _KEEPING in self._troubles:
            broken["records"] = "Answers cannot be kept for feedback: the disk takes none, and the log says why."
        return Evidence(
            windows=report["windows"],
            baseline=report["baseline"],
            offline=self._offline,
            bucket_sizes=dict(zip(BUCKET_NAMES, current.shown.sizes.tolist(), strict=True)),
            added=self._labels[0],
            troubles=broken,
            shadow_k=self._shadow_k,
            age_days=None if until is None else max(0.0, (now - until) / _DAY),
        )

    def _keep_answers(self) -> None:
        with self._keep_lock:
            with self._pending_lock:
                batches, self._pending = self._pending, deque()
                dropped, self._pending_labels = self._pending_labels >= _MOST_PENDING_LABELS, 0
            with self._warning(_KEEPING):
                if dropped:
                    logger.warning("answers came faster than they could be kept: feedback on some will find none")
                while batches:
                    # What came together while a database was away is kept some at a time.
                    some = list(islice(batches, _BATCHES_AT_ONCE))
                    try:
                        answers = (answer for batch in some for answer in answers_of(batch))
                        self._store.keep_answers(answers, self._clock())
                    # The disk may be busy only for the moment.
                    except BaseException:
                        with self._pending_lock:
                            self._pending.extendleft(reversed(batches))
                            self._pending_labels += sum(len(batch.fingerprints_N) for batch in batches)
                        raise
                    for _ in some:
                        batches.popleft()

    def _work(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            try:
                self.flush()
            # Whatever it is, the next tick may go well: without this thread no feedback is joined.
            except Exception:
                logger.exception("live figures: one tick failed")

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Log what goes wrong with the files instead of raising it; the same error once, until things go well again."""
        try:
            yield
        except (StoreError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
            if self._troubles.get(what) != message:
                logger.warning("live figures, %s: %s", what, message)
            self._troubles[what] = message
        else:
            self._troubles.pop(what, None)
