"""The rings of one release in one worker: by minute what was answered and asked, by label how often it was shown.

Legend: `B` queries, `N` answered labels, `L` labels of the release, `S` those of them that are counted one by one.

At most 24 hours are kept, and a window never reaches further back than its name says: the 24-hour window of the
minute figures covers 1,439 to 1,440 minutes, and of the per-label counts 21 to 24 hours.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array, Int8
from longtail.serving.monitoring.baseline import DECILES, Baseline, decile_of
from longtail.serving.monitoring.counted_labels import CountedLabels
from longtail.serving.monitoring.dial_bins import DIAL_BINS, dial_bins
from longtail.serving.monitoring.latency_bins import LATENCY_BINS, latency_bin
from longtail.serving.monitoring.likeness import PAIRS, pairs_of
from longtail.serving.monitoring.records import AnsweredBatch
from longtail.serving.monitoring.ring import Layout, Ring, by_period, total, worker_arrays

BUCKETS = len(BUCKET_NAMES)
WINDOWED = "labels-"
"""How kinds of rings begin that count by label."""
MINUTES = 1440

# Columns of what was answered; the last, exposures of new labels, is a ring of its own.
QUERIES, BIAS_REMOVAL, POPULARITY = range(3)
SCORES = slice(6, 6 + DECILES)
EXPOSURES = np.array([3, 4, 5, SCORES.stop])
"""By bucket: head, torso, tail, new."""
ANSWER_COLUMNS = SCORES.stop + 1
ANSWERS = Layout("answers", MINUTES, SCORES.stop, "float64", 60)

NEW_LABELS = Layout("new", MINUTES, 1, "float64", 60)
PRIORS = Layout("priors", MINUTES, 1, "float64", 60)
"""Sum of μ. Rings of their own: the answers' is older, and another layout would put aside what it holds."""
DIALS = Layout("dials", MINUTES, 2 * DIAL_BINS, "uint32", 60)
"""Queries by λ, then by μ."""
LIKENESS = Layout("likeness", MINUTES, PAIRS, "float64", 60)
DROPPED = Layout("dropped", MINUTES, 1, "float64", 60)
"""Answers that were not kept for feedback to join."""

# Columns of the requests' ring.
REQUESTS, ERRORS, SHED = range(3)
LATENCY = slice(3, 3 + LATENCY_BINS)
TRAFFIC = Layout("requests", MINUTES, LATENCY.stop, "float64", 60)

_ONE = np.uint32(1)
"""Of the tiles' own type: numpy adds any other a dozen times slower."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A time that figures are of, up to now.

    Attributes:
        name: in reports and on metrics.
        seconds: longest reach.
        tile_seconds: period of the per-label counts; divides `seconds`.
    """

    name: str
    seconds: int
    tile_seconds: int

    @property
    def minutes(self) -> int:
        """How many rows of the minute figures it covers."""
        return self.seconds // 60

    @property
    def kind(self) -> str:
        """Kind of the rings of its per-label counts, which names their files."""
        return f"{WINDOWED}{self.name}"

    def tiles(self, labels: int) -> Layout:
        """Layout of the ring of its per-label counts."""
        return Layout(self.kind, self.seconds // self.tile_seconds, labels, "uint32", self.tile_seconds)


WINDOWS = (TimeWindow("5m", 300, 60), TimeWindow("1h", 3600, 600), TimeWindow("24h", 86_400, 10_800))


class ReleaseFigures:
    """Counts one release's answers and requests. Thread-safe; takes 76·S + 1,720,000 bytes of disk.

    Args:
        directory: existing directory of the release's rings.
        worker: number of the process among those that share the directory.
        buckets_L: bucket of every label, int8 [L].
        baseline: whose deciles the scores are counted in; without one, scores are not counted.
    """

    def __init__(self, directory: Path, worker: int, buckets_L: Int8, baseline: Baseline | None) -> None:
        self.directory = directory
        self.buckets_L = buckets_L
        self.counted = CountedLabels(buckets_L)
        self.baseline = baseline
        self.release = directory.name
        self.labels = len(buckets_L)
        self._edges = None if baseline is None else np.array(baseline.score_edges)
        self._answers = Ring(directory, ANSWERS, worker)
        self._new = Ring(directory, NEW_LABELS, worker)
        self._priors = Ring(directory, PRIORS, worker)
        self._dials = Ring(directory, DIALS, worker)
        self._likeness = Ring(directory, LIKENESS, worker)
        self._dropped = Ring(directory, DROPPED, worker)
        self._tiles = [Ring(directory, window.tiles(len(self.counted)), worker) for window in WINDOWS]
        self._traffic = Ring(directory, TRAFFIC, worker)
        # Single numbers are added to a memoryview in a fifth of the time that an array takes.
        self._traffic_counts = self._traffic.array.data.cast("B").cast("d")
        # BoundedExecutor, so that the event loop's counting never waits for a search thread's.
        self._answers_lock, self._traffic_lock = threading.Lock(), threading.Lock()

    def count_answers(self, answered: AnsweredBatch, now: float) -> None:
        """Count one batch at `now`, seconds since 1970."""
        counts = np.zeros(ANSWER_COLUMNS)
        counts[QUERIES] = len(answered.ends_B)
        counts[BIAS_REMOVAL] = answered.bias_removal_B.sum(dtype=np.float64)
        counts[POPULARITY] = answered.counts_N.sum()
        counts[EXPOSURES] = np.bincount(answered.buckets_N, minlength=BUCKETS)
        if self._edges is not None:
            counts[SCORES] = np.bincount(decile_of(answered.scores_N, self._edges), minlength=DECILES)
        rows_N = answered.rows_N
        if len(rows_N) and rows_N.max() >= self.labels:
            rows_N = rows_N[rows_N < self.labels]
        places_N = self.counted.places(rows_N)
        pairs = pairs_of(answered.buckets_N, answered.ends_B)
        dials = dial_bins(answered.bias_removal_B, answered.popularity_B)
        with self._answers_lock:
            row = self._answers.counts_at(ANSWERS.period(now))
            row += counts[: ANSWERS.columns]
            new = self._new.counts_at(NEW_LABELS.period(now))
            new += counts[ANSWERS.columns :]
            weight = self._priors.counts_at(PRIORS.period(now))
            weight += answered.popularity_B.sum(dtype=np.float64)
            likeness = self._likeness.counts_at(LIKENESS.period(now))
            likeness += pairs
            np.add.at(self._dials.counts_at(DIALS.period(now)), dials, _ONE)
            for ring in self._tiles:
                np.add.at(ring.counts_at(ring.layout.period(now)), places_N, _ONE)

    def count_dropped(self, answers: int, now: float) -> None:
        """Count answers that were given and not kept for feedback to join."""
        with self._answers_lock:
            row = self._dropped.counts_at(DROPPED.period(now))
            row += answers

    def count_request(self, seconds: float, status: int, now: float) -> None:
        """Count one request: its duration, and as an error if its status is 500 or above."""
        with self._traffic_lock:
            counts, start = self._traffic_counts, self._traffic_start(now)
            counts[start + REQUESTS] += 1
            counts[start + LATENCY.start + latency_bin(seconds)] += 1
            if status >= 500:
                counts[start + ERRORS] += 1

    def count_shed(self, now: float) -> None:
        """Count one request turned away."""
        with self._traffic_lock:
            self._traffic_counts[self._traffic_start(now) + SHED] += 1

    def answers_in(self, window: TimeWindow, now: float, *, since: float) -> Array:
        """What all workers answered, none from before the minute of `since`, float64 [ANSWER_COLUMNS]."""
        return np.concatenate([self._total(ring, window, now, since) for ring in (self._answers, self._new)])

    def popularity_weight_in(self, window: TimeWindow, now: float, *, since: float) -> float:
        """Sum of μ over all workers' queries, none from before the minute of `since`."""
        return float(self._total(self._priors, window, now, since)[0])

    def dials_in(self, window: TimeWindow, now: float, *, since: float) -> Array:
        """All workers' queries by λ and by μ, none from before the minute of `since`, uint32 [2, DIAL_BINS]."""
        return self._total(self._dials, window, now, since).reshape(2, DIAL_BINS)

    def likeness_in(self, window: TimeWindow, now: float, *, since: float) -> Array:
        """`pairs_of` all workers' answers, none from before the minute of `since`, float64 [PAIRS]."""
        return self._total(self._likeness, window, now, since)

    def dropped_in(self, window: TimeWindow, now: float, *, since: float) -> int:
        """How many answers all workers dropped, none from before the minute of `since`."""
        return int(self._total(self._dropped, window, now, since)[0])

    def traffic_in(self, window: TimeWindow, now: float, *, since: float) -> Array:
        """Columns of TRAFFIC over all workers, none from before the minute of `since`, float64."""
        return self._total(self._traffic, window, now, since)

    def exposures_in(self, window: TimeWindow, now: float) -> Array:
        """How often each counted label was answered by all workers, uint32 [S]."""
        own = self._tiles[WINDOWS.index(window)]
        return total(worker_arrays(self.directory, own.layout, own), own.layout, now, own.layout.rows, since=0)

    def _total(self, own: Ring, window: TimeWindow, now: float, since: float) -> Array:
        """Counts by minute of all workers, [columns]."""
        return total(worker_arrays(self.directory, own.layout, own), own.layout, now, window.minutes, since=since)

    def _traffic_start(self, now: float) -> int:
        """Where the counts of the minute begin in `_traffic_counts`."""
        return self._traffic.row_of(int(now // 60)) * (1 + TRAFFIC.columns) + 1


def answers_by_minute(directory: Path, now: float) -> Array:
    """What all workers of a release answered by minute, the last that of `now`, float64 [MINUTES, ANSWER_COLUMNS]."""
    return np.concatenate(
        [by_period(worker_arrays(directory, layout), layout, now) for layout in (ANSWERS, NEW_LABELS)], axis=1
    )


def delete_label_counts(directory: Path, worker: int) -> None:
    """Delete a worker's per-label counts: most of what a release takes on disk, and of no use once it is out."""
    for path in directory.glob(f"{WINDOWED}*.{worker}.ring"):
        path.unlink(missing_ok=True)
