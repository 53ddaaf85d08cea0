"""Counts by minute and release, one mapped file per worker; a reader adds up all workers of a host.

What was added is in the page cache at once, so a killed process loses nothing; a power cut loses what the kernel had
not written yet. Files are reserved whole when made: writing to a hole of a mapped file on a full disk would kill the
process. On a full disk counts stay in memory, with a warning.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.serving.monitoring.baseline import DECILES
from longtail.serving.monitoring.bins import DIAL_BINS, LATENCY_BINS

logger = logging.getLogger(__name__)

MINUTES = 1440
"""That are reported."""
ROWS = 4096
"""A day of two releases that answer at the same time."""
COUNTS = np.dtype(
    [
        ("queries", "f8"),
        ("bias_removal", "f8"),  # sums of λ and μ
        ("popularity_weight", "f8"),
        ("popularity", "f8"),  # training pairs of the answered labels
        ("exposures", "f8", (len(BUCKET_NAMES),)),
        ("judged_queries", "f8"),  # those that the client did not restrict to some labels
        ("judged_exposures", "f8", (len(BUCKET_NAMES),)),
        ("judged_scores", "f8", (DECILES,)),
        ("dials", "f8", (2, DIAL_BINS)),
        ("dropped", "f8"),  # answers that were not kept for feedback
        ("requests", "f8"),
        ("errors", "f8"),
        ("shed", "f8"),
        ("latency", "f8", (LATENCY_BINS,)),
    ]
)
"""Of one minute and release."""
_COLUMNS = COUNTS.itemsize // 8
_ROW = np.dtype([("minute", "i8"), ("release", "S128"), ("counts", COUNTS)])
_LARGEST = 2.0**53
"""No counter of ones in a double gets there: more is damage."""
_CHUNK_BYTES = 1 << 22


class MinuteRing:
    """The file that this worker writes, `minutes.WORKER`. Not thread-safe: its owner holds a lock.

    A file of another size is replaced by an empty one.

    Args:
        directory: existing directory of the files of all workers.
        worker: number of the process among those that share it.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory
        self._path = directory / f"minutes.{worker}"
        self._table: npt.NDArray[np.void] = np.frombuffer(map_file(self._path, ROWS * _ROW.itemsize), _ROW)
        newest = np.flatnonzero(self._table["minute"] == self._table["minute"].max())
        self._next = (int(newest[-1]) + 1) % ROWS
        self._minute = -1
        self._rows: dict[str, np.void] = {}

    def at(self, now: float, release: str) -> np.void:
        """Return the counts of a release in the minute of `now`, to add to."""
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
        """Return a copy of the rows of all workers of the last day."""
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
    """Map a file of this size for writing, of zeros where there was none; memory alone if the disk is full."""
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of several workers one fills it
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
            fcntl.flock(file, fcntl.LOCK_UN)  # a mapping would hold the lock
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        logger.warning("%s: kept in memory only, lost at a restart: %s", path, error)
        return bytearray(size)


def _numbers(rows: npt.NDArray[np.void]) -> Array:
    """The counts of rows as float64 [rows, columns]."""
    return np.ascontiguousarray(rows["counts"]).view(np.float64).reshape(len(rows), _COLUMNS)
