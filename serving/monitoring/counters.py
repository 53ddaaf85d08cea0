"""Store all counters of a worker in one mapped file.

Every outcome is counted once: in the row of its minute and release if the page reports it, otherwise in `totals`, or in
a row of `labelled` if routes, settings or an experiment name its labels. A row that gives way to a newer minute is
added to `evicted`, so that totals never decrease.

Counts are in the page cache at once, so a killed process loses nothing; a power cut loses unwritten pages.

Legend: `V` observed values, `L` labels of the release, `N` answered labels.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array, Int8, Int32, Int64
from longtail.bundle.exposure import coverage, coverage_by_bucket, gini
from longtail.serving.monitoring.baseline import ALL, DECILES
from longtail.serving.monitoring.records import BASES, ID_KINDS, RESTRICTIONS, SOURCES

logger = logging.getLogger(__name__)

MINUTES = 1440
"""Minutes that are reported: a day."""
ROWS = 4096
"""Rows of minutes: a day of two releases that answer at the same time."""
EXPOSED_SUFFIX = ".shown"
LATENCY_EDGES = 10.0 ** (np.arange(41) / 8 - 4)
"""Seconds, eight per decade from 0.1 ms to 10 s; quantiles err by a sixth at most."""
DIAL_CENTRES = np.arange(-20, 41) / 20
"""Centres of the bins of a dial: −1, −0.95, …, 2; values beyond count in the bin at that end."""
DIAL_EDGES = DIAL_CENTRES[:-1] + 0.025
LATENCY_BINS, DIAL_BINS = len(LATENCY_EDGES) + 1, len(DIAL_CENTRES)
DIALS = ("bias_removal", "popularity_weight", "cooccurrence")
KINDS = (*BUCKET_NAMES, ALL)
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
STAGES = ("queue", "encode", "search", "answer")
REFUSALS = ("malformed", "forged", "expired")
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
DIAL_BOUNDS = tuple(quarter / 4 for quarter in range(-4, 9))
BATCH_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _cells(bounds: tuple[float, ...]) -> int:
    """Return the size of a histogram: bins and sum."""
    return len(bounds) + 2


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
        ("ids", "f8", (len(ID_KINDS), 3)),  # senders of ids, ids, and unknown ids
        ("dropped", "f8"),  # events that could not be kept
        ("requests", "f8"),
        ("errors", "f8"),
        ("shed", "f8"),
        ("latency", "f8", (LATENCY_BINS,)),
    ]
)
"""Counts of one minute and release."""
TOTALS = np.dtype(
    [
        ("previews", "f8", (len(STATUS_CLASSES),)),
        ("stage_seconds", "f8", (len(STAGES), _cells(SECONDS))),
        ("batch_queries", "f8", (_cells(BATCH_QUERIES),)),
        ("bases", "f8", (len(BASES),)),
        ("restricted_exposures", "f8", (len(BUCKET_NAMES),)),
        ("query_dials", "f8", (len(DIALS), _cells(DIAL_BOUNDS))),
        ("explored", "f8", (len(BUCKET_NAMES),)),
        ("feedback_events", "f8", (len(SOURCES),)),
        ("choice_bias_removal", "f8", (2, _cells(DIAL_BOUNDS))),  # of choices that the answer held, and of others
        ("answer_ids_refused", "f8", (len(REFUSALS),)),
        ("unknown_ids", "f8", (2,)),  # in `exclude` and in `allow`
        ("release_swaps", "f8"),
        ("release_load_failures", "f8"),
        ("timeouts", "f8"),
        ("engine_unanswered", "f8"),
    ]
)
"""Counts of /metrics that the page does not report."""
ROUTE_CELLS = len(STATUS_CLASSES) + _cells(SECONDS)
_NAME_BYTES = 160
_ROW = np.dtype([("minute", "i8"), ("release", "S128"), ("counts", COUNTS)])
_LABELLED = np.dtype([("name", f"S{_NAME_BYTES}"), ("counts", "f8", (ROUTE_CELLS,))])
_FILE = np.dtype([("evicted", COUNTS), ("totals", TOTALS), ("labelled", _LABELLED, (1024,)), ("rows", _ROW, (ROWS,))])
_LARGEST = 2.0**53
"""Bound on valid counts: a counter of ones in a double cannot exceed it, so larger values are damage."""
_CHUNK_BYTES = 1 << 22
_SEPARATOR = "\0"


class Counters:
    """The counters of one worker in the file `minutes.WORKER`. Not thread-safe: its owner holds a lock.

    A file of another size is replaced by an empty one.

    Args:
        directory: existing directory of the files of all workers.
        worker: number of this process among the processes that share the directory.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory
        self._path = directory / f"minutes.{worker}"
        self._file: npt.NDArray[np.void] = np.frombuffer(map_file(self._path, _FILE.itemsize), _FILE)
        self.totals: np.void = self._file["totals"][0]
        self._table: npt.NDArray[np.void] = self._file["rows"][0]
        minutes = self._table["minute"]
        # The first free row, not the one after the newest: a clock set back has written older minutes behind it.
        free_rows = np.flatnonzero(minutes == 0)
        newest_row = int(np.flatnonzero(minutes == minutes.max())[-1])
        self._next = int(free_rows[0]) if len(free_rows) else (newest_row + 1) % ROWS
        self._minute = -1
        self._open_rows: dict[str, np.void] = {}
        self._labelled_rows = {name: row["counts"] for name, row in _labelled_rows(self._file)}

    def get_minute(self, timestamp: float, release: str) -> np.void:
        """Return a release's counts in a minute, for adding to."""
        minute = int(timestamp // 60)
        if minute != self._minute:
            self._minute, self._open_rows = minute, {}
        row = self._open_rows.get(release)
        if row is None:
            i, self._next = self._next, (self._next + 1) % ROWS
            evicted, counts = (_numbers(table) for table in (self._file["evicted"], self._table["counts"][i : i + 1]))
            # The totals of /metrics must not fall when a row is used again.
            if _is_valid(counts)[0]:
                self._file["evicted"] = (evicted + counts).view(COUNTS)[:, 0]
            self._table[i] = np.zeros((), _ROW)
            self._table["release"][i] = release.encode()
            # Last, because other processes take a row with a minute for a complete one.
            self._table["minute"][i] = minute
            row = self._open_rows[release] = self._table["counts"][i]
        return row

    def get_labelled(self, *labels: str) -> Array:
        """Return the counts of labels, float64 [ROUTE_CELLS], for adding to."""
        name = _SEPARATOR.join(labels).encode()
        row = self._labelled_rows.get(name)
        if row is None:
            table = self._file["labelled"][0]
            free_rows = np.flatnonzero(table["name"] == b"")
            if len(free_rows) and len(name) <= _NAME_BYTES:
                row = table["counts"][free_rows[0]]
                table["name"][free_rows[0]] = name
            else:
                logger.warning("%s: no room for counts of %r, which this process counts alone", self._path, labels)
                row = np.zeros(ROUTE_CELLS)
            self._labelled_rows[name] = row
        return row

    def read_day(self, timestamp: float) -> npt.NDArray[np.void]:
        """Copy all workers' rows of the last day."""
        newest = int(timestamp // 60)
        tables = []
        for file in self._all_files():
            rows = file["rows"][0]
            rows = rows[(rows["minute"] > newest - MINUTES) & (rows["minute"] <= newest)]
            tables.append(rows[_is_valid(_numbers(rows["counts"]))])
        return np.concatenate(tables)

    def read_totals(self) -> tuple[np.void, np.void, Mapping[tuple[str, ...], Array]]:
        """Add up all counts of all workers, typed COUNTS and TOTALS, and by labels."""
        counts, totals, labelled = (
            np.zeros(_columns(COUNTS)),
            np.zeros(_columns(TOTALS)),
            dict[tuple[str, ...], Array](),
        )
        for file in self._all_files():
            rows = file["rows"][0]
            for table in (file["evicted"], rows["counts"][rows["minute"] > 0]):
                numbers = _numbers(table)
                counts += numbers[_is_valid(numbers)].sum(axis=0)
            numbers = _numbers(file["totals"])
            totals += numbers[_is_valid(numbers)].sum(axis=0)
            for name, row in _labelled_rows(file):
                labels = tuple(name.decode(errors="replace").split(_SEPARATOR))
                if _is_valid(row["counts"][None])[0]:
                    labelled[labels] = labelled.get(labels, 0.0) + row["counts"]
        return counts.view(COUNTS)[0], totals.view(TOTALS)[0], labelled

    def _all_files(self) -> Iterator[npt.NDArray[np.void]]:
        yield self._file
        for path in sorted(self._directory.glob("minutes.*")):
            if path != self._path and path.suffix[1:].isdigit():
                with suppress(OSError, ValueError), path.open("rb") as file:
                    yield np.frombuffer(mmap.mmap(file.fileno(), _FILE.itemsize, prot=mmap.PROT_READ), _FILE)


def observe(histogram: Array, bounds: tuple[float, ...], values: npt.ArrayLike) -> None:
    """Add values, float [V], to a histogram: bins, then the sum."""
    values_V = np.asarray(values, np.float64)
    histogram[:-1] += np.bincount(np.searchsorted(bounds, values_V), minlength=len(bounds) + 1)
    histogram[-1] += values_V.sum()


def sum_counts(rows: npt.NDArray[np.void]) -> np.void:
    """Add up rows to one of type COUNTS."""
    total: np.void = _numbers(rows["counts"]).sum(axis=0).view(COUNTS)[0]
    return total


def sum_by_minute(rows: npt.NDArray[np.void], timestamp: float) -> npt.NDArray[np.void]:
    """Add up the last MINUTES minutes, oldest first."""
    sums = np.zeros((MINUTES, _columns(COUNTS)))
    np.add.at(sums, rows["minute"] - int(timestamp // 60) + MINUTES - 1, _numbers(rows["counts"]))
    return sums.view(COUNTS)[:, 0]


def _columns(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize // 8


def _numbers(table: npt.NDArray[np.void]) -> Array:
    return np.ascontiguousarray(table).view(np.float64).reshape(len(table), _columns(table.dtype))


def _is_valid(numbers: Array) -> npt.NDArray[np.bool_]:
    return np.asarray((np.abs(numbers) <= _LARGEST).all(axis=1))


def _labelled_rows(file: npt.NDArray[np.void]) -> Iterator[tuple[bytes, np.void]]:
    table = file["labelled"][0]
    for i in np.flatnonzero(table["name"] != b""):
        yield bytes(table["name"][i]), table[i]


def map_file(path: Path, size: int) -> mmap.mmap | bytearray:
    """Map a file for writing, created with zeros; memory if the disk is full.

    The file is allocated completely: writing to a hole of a mapped file on a full disk would kill the process.
    """
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # so that only one worker allocates the file
            present_size = os.fstat(file.fileno()).st_size
            if present_size != size:
                if present_size:
                    logger.warning("%s: expected %d bytes, found %d; started again", path, size, present_size)
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


class ExposedLabels:
    """Counts of answered labels in a file of 12·L bytes, shared by all workers.

    Not thread-safe: the owner holds a lock. The array is int32 [3, 1 + L]: row 0 has the minute since 1970 in which a
    label was last answered; rows 1 and 2 have its answers on even and odd days (UTC), with the day in the first column.
    Workers write without a lock: two that add to the same label in the same nanoseconds may lose one count, which no
    coefficient shows.
    """

    def __init__(self, directory: Path, release: str, buckets_L: Int8) -> None:
        labels = len(buckets_L)
        memory = map_file(directory / f"{release}{EXPOSED_SUFFIX}", 12 * (1 + labels))
        table: Int32 = np.frombuffer(memory, np.int32).reshape(3, 1 + labels)
        self._last_L, self._days = table[0, 1:], table[1:]
        self._buckets_L = buckets_L
        self._sizes: Int64 = np.bincount(buckets_L, minlength=len(BUCKET_NAMES))

    def count(self, rows_N: Int64, timestamp: float) -> None:
        """Count answered labels; rows from L on are left out."""
        if len(rows_N) and rows_N.max() >= len(self._buckets_L):
            rows_N = rows_N[rows_N < len(self._buckets_L)]
        minute = int(timestamp // 60)
        self._last_L[rows_N] = minute
        day = minute // MINUTES
        answers = self._days[day % 2]
        # The first answer of a day clears what the day before yesterday left.
        if answers[0] != day:
            answers[:] = 0
            answers[0] = day
        np.add.at(answers, rows_N + 1, np.int32(1))  # the same dtype: NumPy adds any other a dozen times slower

    def measure_coverage(self, first_minute: int) -> tuple[list[float], float]:
        """Return the share of labels answered since a minute."""
        is_exposed_L = (self._last_L >= first_minute).astype(np.int8)
        return coverage_by_bucket(is_exposed_L, self._buckets_L, self._sizes), coverage(is_exposed_L)

    def gini(self, timestamp: float) -> float | None:
        """Return Gini of today's and yesterday's answers (UTC); None without answers."""
        today = int(timestamp // 60) // MINUTES
        answers = self._days[(self._days[:, 0] >= today - 1) & (self._days[:, 0] <= today), 1:]
        return gini(answers.sum(axis=0, dtype=np.int64))
