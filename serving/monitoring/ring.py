"""Store counts by minute and release in one mapped file per worker, and shown labels in one per release.

Counts are in the page cache at once, so a killed process loses nothing; a power cut loses pages that are still
unwritten. Files are allocated completely when they are created, because writing to a hole of a mapped file on a full
disk would kill the process. If the disk is full, counts stay in memory, with a warning. A reader adds up the rings of
all workers of a host.

Legend: `B` queries, `L` labels of the release, `N` answered labels.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array, Float32, Int8, Int32, Int64
from longtail.bundle.exposure import Counts, coverage, coverage_by_bucket, gini
from longtail.serving.monitoring.baseline import ALL, DECILES
from longtail.serving.monitoring.records import ID_KINDS, RESTRICTIONS, SOURCES

logger = logging.getLogger(__name__)

MINUTES = 1440
"""Minutes that are reported: a day."""
ROWS = 4096
"""Rows of a ring: a day of two releases that answer at the same time."""
SUFFIX = ".shown"
LATENCY_BINS = 42
"""Bins of durations: eight per decade from 0.1 ms to 10 s, one below and one above; quantiles err by a sixth at
most."""
_PER_DECADE = 8
_SHIFT = 1 + 4 * _PER_DECADE

LOWEST, WIDTH = -1.0, 0.05
DIAL_BINS = 61
"""Bins of a dial around −1, −0.95, …, 2; values beyond count in the bin at that end."""
DIALS = ("bias_removal", "popularity_weight", "cooccurrence")
KINDS = (*BUCKET_NAMES, ALL)
COUNTS = np.dtype(
    [
        ("queries", "f8"),
        ("bias_removal", "f8"),  # sums of λ, μ and ω
        ("popularity_weight", "f8"),
        ("cooccurrence", "f8"),
        ("popularity", "f8"),  # training pairs of the answered labels
        ("exposures", "f8", (len(BUCKET_NAMES),)),
        ("judged_queries", "f8"),  # queries that the release promises something for
        ("judged_exposures", "f8", (len(BUCKET_NAMES),)),
        ("judged_scores", "f8", (DECILES,)),
        ("promised", "f8", (len(BUCKET_NAMES) + DECILES,)),  # promised exposures and deciles of the same λ and depths
        ("restricted", "f8", (1 + len(RESTRICTIONS),)),  # queries that the client restricted: all, and by option
        ("floored", "f8", (2,)),  # queries with floors, and with a floor that the answer does not meet
        ("dials", "f8", (len(DIALS), DIAL_BINS)),
        ("positives", "f8", (len(SOURCES), len(BUCKET_NAMES))),  # labels chosen
        ("hits", "f8", (len(SOURCES), len(BUCKET_NAMES))),  # chosen labels that the answer held
        # of chosen labels with a promise, by kind of label: positives, hits, promised hits and their bounds
        ("judged_recall", "f8", (len(SOURCES), len(KINDS), 5)),
        ("ids", "f8", (len(ID_KINDS), 3)),  # those who named ids, the ids, and those of them that are unknown
        ("dropped", "f8"),  # events that could not be kept
        ("requests", "f8"),
        ("errors", "f8"),
        ("shed", "f8"),
        ("latency", "f8", (LATENCY_BINS,)),
    ]
)
"""Counts of one minute and release."""
_COLUMNS = COUNTS.itemsize // 8
_ROW = np.dtype([("minute", "i8"), ("release", "S128"), ("counts", COUNTS)])
_LARGEST = 2.0**53
"""Bound on valid counts: a counter of ones in a double cannot exceed it, so larger values are damage."""
_CHUNK_BYTES = 1 << 22


class MinuteRing:
    """The file that this worker writes, `minutes.WORKER`. Not thread-safe: its owner holds a lock.

    A file of another size is replaced by an empty one.

    Args:
        directory: existing directory of the files of all workers.
        worker: number of this process among the processes that share the directory.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory
        self._path = directory / f"minutes.{worker}"
        self._table: npt.NDArray[np.void] = np.frombuffer(map_file(self._path, ROWS * _ROW.itemsize), _ROW)
        minutes = self._table["minute"]
        # The first free row, not the one after the newest: a clock set back has written older minutes behind it.
        free = np.flatnonzero(minutes == 0)
        self._next = int(free[0]) if len(free) else (int(np.flatnonzero(minutes == minutes.max())[-1]) + 1) % ROWS
        self._minute = -1
        self._rows: dict[str, np.void] = {}

    def at(self, now: float, release: str) -> np.void:
        """Return the counts of a release in the minute of `now`, for adding to."""
        minute = int(now // 60)
        if minute != self._minute:
            self._minute, self._rows = minute, {}
        row = self._rows.get(release)
        if row is None:
            place, self._next = self._next, (self._next + 1) % ROWS
            self._table[place] = np.zeros((), _ROW)
            self._table["release"][place] = release.encode()
            self._table["minute"][place] = minute
            row = self._rows[release] = self._table["counts"][place]
        return row

    def read(self, now: float) -> npt.NDArray[np.void]:
        """Return a copy of all workers' rows of the last day."""
        newest = int(now // 60)
        tables = [self._table]
        for path in sorted(self._directory.glob("minutes.*")):
            if path != self._path and path.suffix[1:].isdigit():
                with suppress(OSError, ValueError), path.open("rb") as file:
                    tables.append(
                        np.frombuffer(mmap.mmap(file.fileno(), ROWS * _ROW.itemsize, prot=mmap.PROT_READ), _ROW)
                    )
        found = []
        for table in tables:
            rows = table[(table["minute"] > newest - MINUTES) & (table["minute"] <= newest)]
            found.append(rows[(np.abs(_numbers(rows)) <= _LARGEST).all(axis=1)])
        return np.concatenate(found)


def total(rows: npt.NDArray[np.void]) -> np.void:
    """Return the sum of the counts of some rows, of type COUNTS."""
    summed: np.void = _numbers(rows).sum(axis=0).view(COUNTS)[0]
    return summed


def by_minute(rows: npt.NDArray[np.void], now: float) -> npt.NDArray[np.void]:
    """Return the sums of the last MINUTES minutes, oldest first, of type COUNTS [MINUTES]."""
    sums = np.zeros((MINUTES, _COLUMNS))
    np.add.at(sums, rows["minute"] - int(now // 60) + MINUTES - 1, _numbers(rows))
    return sums.view(COUNTS)[:, 0]


def map_file(path: Path, size: int) -> mmap.mmap | bytearray:
    """Map a file of a size for writing, created with zeros; plain memory if the disk is full."""
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # so that only one worker allocates the file
            found = os.fstat(file.fileno()).st_size
            if found != size:
                if found:
                    logger.warning("%s: expected %d bytes, found %d; started again", path, size, found)
                file.truncate(0)
                try:
                    for start in range(0, size, _CHUNK_BYTES):
                        file.write(bytes(min(_CHUNK_BYTES, size - start)))
                    file.flush()
                except OSError:
                    file.truncate(0)
                    raise
            fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, and so would keep the lock
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        logger.warning("%s: kept in memory only, lost at a restart: %s", path, error)
        return bytearray(size)


def _numbers(rows: npt.NDArray[np.void]) -> Array:
    """View the counts of rows as float64 [rows, columns]."""
    return np.ascontiguousarray(rows["counts"]).view(np.float64).reshape(len(rows), _COLUMNS)


class ShownLabels:
    """Counts of shown labels in a mapped file of 12·L bytes that all workers of a host share.

    Not thread-safe: the owner holds a lock. The array is int32 [3, 1 + L]: row 0 has the minute since 1970 in which a
    label was last answered; rows 1 and 2 have its answers on even and odd days (UTC), with the day in the first column.
    Workers write without a lock: two that add to the same label in the same nanoseconds may lose one count, which no
    coefficient shows.
    """

    def __init__(self, directory: Path, release: str, buckets_L: Int8) -> None:
        labels = len(buckets_L)
        memory = map_file(directory / f"{release}{SUFFIX}", 12 * (1 + labels))
        table: Int32 = np.frombuffer(memory, np.int32).reshape(3, 1 + labels)
        self._last_L, self._days = table[0, 1:], table[1:]
        self.buckets_L = buckets_L
        self.sizes: Int64 = np.bincount(buckets_L, minlength=len(BUCKET_NAMES))

    def count(self, rows_N: Int64, now: float) -> None:
        """Count answered labels by their rows; labels added since (L and above) are left out."""
        if len(rows_N) and rows_N.max() >= len(self.buckets_L):
            rows_N = rows_N[rows_N < len(self.buckets_L)]
        minute = int(now // 60)
        self._last_L[rows_N] = minute
        day = minute // MINUTES
        shown = self._days[day % 2]
        if shown[0] != day:
            shown[:] = 0
            shown[0] = day
        np.add.at(shown, rows_N + 1, np.int32(1))  # the same dtype: NumPy adds any other a dozen times slower

    def coverage_since(self, since: int) -> tuple[list[float], float]:
        """Return the share of labels answered since a minute, by bucket and in total."""
        shown_L = (self._last_L >= since).astype(np.int8)
        return coverage_by_bucket(shown_L, self.buckets_L, self.sizes), coverage(shown_L)

    def gini(self, now: float) -> float | None:
        """Return the Gini coefficient of the answers of today and yesterday (UTC); None without answers."""
        today = int(now // 60) // MINUTES
        shown = self._days[(self._days[:, 0] >= today - 1) & (self._days[:, 0] <= today), 1:]
        return gini(shown.sum(axis=0, dtype=np.int64))


def latency_bin(seconds: float) -> int:
    """Return the bin of a duration, 0 … LATENCY_BINS − 1."""
    return 0 if seconds < 1e-4 else min(int(math.log10(seconds) * _PER_DECADE + _SHIFT), LATENCY_BINS - 1)


def latency_ms(bins: Counts, quantile: float) -> float | None:
    """Return a quantile in ms, interpolated logarithmically, at most 10 s; None without observations."""
    upto = np.cumsum(bins)
    if not upto[-1]:
        return None
    wanted = quantile * float(upto[-1])
    cell = min(int(np.searchsorted(upto, wanted)), LATENCY_BINS - 1)
    inside = (wanted - float(upto[cell] - bins[cell])) / float(bins[cell]) if bins[cell] else 1.0
    if cell == 0:
        return 0.1 * inside
    if cell == LATENCY_BINS - 1:
        return 10_000.0
    return float(10.0 ** ((cell - _SHIFT + inside) / _PER_DECADE) * 1000)


def count_dials(counts: Array, weights_B: Float32) -> None:
    """Add the queries of every bin of one dial to `counts`, [DIAL_BINS]; weights are finite."""
    places = np.minimum(np.maximum((weights_B - LOWEST) / WIDTH, 0), DIAL_BINS - 1)
    counts += np.bincount((places + 0.5).astype(np.intp), minlength=DIAL_BINS)


def dial_json(counts: Array) -> list[dict[str, Any]]:
    """Return the non-empty bins, ascending by the dial's value."""
    return [
        {"at": round(LOWEST + WIDTH * int(place), 2), "queries": int(counts[place])} for place in np.flatnonzero(counts)
    ]
