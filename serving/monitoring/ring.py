"""Counts by period of time in a mapped file: bounded, shared by reading, there again after a kill.

A ring has one writer, a worker of the service; readers add up the rings of all workers. What was added is in the
page cache at once, so a killed process loses nothing; a power cut loses what the kernel had not written yet. The
file is reserved whole when made: on a full disk the ring stays in the process's own memory, with a warning.

File: 4096 bytes of JSON, padded with spaces, that say what follows; then [rows, 1 + columns] numbers, row-major. A
row belongs to the period `p` with `p % rows` = its place; its first column is `p`, the others are counts.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtail.bundle.arrays import Array, Bools, Int64

logger = logging.getLogger(__name__)

_VERSION = 1
_HEADER_BYTES = 4096
_OF_REPLICA = re.compile(r"\.[0-9a-f]{16}-\d+\.ring$")
_CHUNK_BYTES = 1 << 22
_LARGEST = 2.0**53
"""Beyond what anything counts to, in a double that counts by ones: so much only damage says."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a ring holds, and how its file is laid out.

    Attributes:
        kind: names the files, `KIND.WORKER.ring`.
        rows: periods kept.
        columns: counts per period.
        dtype: `float64`, or `uint32`, of which the period's number must be one as well.
        seconds: length of a period.
    """

    kind: str
    rows: int
    columns: int
    dtype: str
    seconds: int

    @property
    def header(self) -> bytes:
        """The first 4096 bytes of a file of this layout."""
        fields = {"format": "longtail live figures", "version": _VERSION}
        fields |= {name: getattr(self, name) for name in ("kind", "rows", "columns", "dtype", "seconds")}
        return (json.dumps(fields) + "\n").encode().ljust(_HEADER_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of a file of this layout."""
        return _HEADER_BYTES + self.rows * (1 + self.columns) * np.dtype(self.dtype).itemsize

    def file(self, worker: int | str) -> str:
        """Name of a worker's file."""
        return f"{self.kind}.{worker}.ring"

    def period(self, now: float) -> int:
        """Number of the period that `now`, in seconds since 1970, falls in."""
        return int(now // self.seconds)

    def array_in(self, memory: mmap.mmap) -> Array:
        """The numbers of a mapped file, [rows, 1 + columns]."""
        numbers: Array = np.frombuffer(memory, self.dtype, offset=_HEADER_BYTES)
        return numbers.reshape(self.rows, 1 + self.columns)


class Ring:
    """The ring that this worker writes. Not thread-safe: its owner holds a lock around `counts_at` and what is added.

    A file of another version, layout or size is put aside as `NAME.aside`, and another is started empty.

    Args:
        directory: existing directory of the file.
        layout: layout of the file.
        worker: number of the process among those that share the directory, or the name of another replica's.

    Attributes:
        is_kept: in the file, and not in memory alone.
    """

    def __init__(self, directory: Path, layout: Layout, worker: int | str) -> None:
        self.layout = layout
        self.path = directory / layout.file(worker)
        self.is_kept = True
        try:
            self.array = layout.array_in(_mapped(self.path, layout))
        except OSError as error:
            self.is_kept = False
            logger.warning("%s: kept in memory only, lost at a restart: %s", self.path, error)
            self.array = np.zeros((layout.rows, 1 + layout.columns), layout.dtype)
        self._periods = periods_of(self.array).tolist()

    def counts_at(self, period: int) -> Array:
        """The counts of a period, [columns], to add to; those of the period before in the same place are gone."""
        counts: Array = self.array[self.row_of(period), 1:]
        return counts

    def put(self, period: int, counts: Array, newest: int) -> None:
        """Set the counts of a period, [columns]; they are left out if the ring has gone beyond it, unless to one that
        is yet to come after the newest.
        """
        if self._periods[period % self.layout.rows] <= period or self._periods[period % self.layout.rows] > newest:
            self.counts_at(period)[:] = counts

    def row_of(self, period: int) -> int:
        """The row of a period, cleared if it was another's."""
        place = period % self.layout.rows
        if self._periods[place] != period:
            self.array[place] = 0
            self.array[place, 0] = period
            self._periods[place] = period
        return place


def worker_arrays(directory: Path, layout: Layout, own: Ring | None = None) -> Iterator[Array]:
    """The rings of every worker, [rows, 1 + columns] each: `own` as it is, the others' as read from their files.

    Files that are not of this layout are left out.
    """
    if own is not None:
        yield own.array
    for path in sorted(directory.glob(f"{layout.kind}.*.ring")):
        if own is None or path != own.path:
            with suppress(OSError), path.open("rb") as file:
                if _is_of(file.fileno(), layout):
                    yield layout.array_in(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def read_ring(path: Path) -> tuple[Layout, Array] | None:
    """A ring's layout and numbers, [rows, 1 + columns], as its file has them now; None if there is none."""
    with suppress(OSError, ValueError, TypeError, LookupError), path.open("rb") as file:
        fields = json.loads(os.pread(file.fileno(), _HEADER_BYTES, 0))
        layout = Layout(**{name: fields[name] for name in Layout.__slots__})
        if _is_of(file.fileno(), layout):
            return layout, layout.array_in(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    return None


def is_of_others(path: Path) -> bool:
    """Whether a ring's file is of another replica, by its name."""
    return _OF_REPLICA.search(path.name) is not None


def total(arrays: Iterable[Array], layout: Layout, now: float, periods: int, *, since: float) -> Array:
    """Counts over all arrays of the last `periods` periods to that of `now`, none before that of `since`: [columns]."""
    newest = layout.period(now)
    oldest = max(newest - periods + 1, layout.period(since))
    counts: Array = np.zeros(layout.columns, layout.dtype)
    for array in arrays:
        stamps = periods_of(array)
        for place in np.flatnonzero((stamps >= oldest) & (stamps <= newest)):
            if _sane(array[place, 1:]):
                counts += array[place, 1:]
    return counts


def by_period(arrays: Iterable[Array], layout: Layout, now: float) -> Array:
    """Counts over all arrays of every period kept, the last is that of `now`: [rows, columns]."""
    newest = layout.period(now)
    counts: Array = np.zeros((layout.rows, layout.columns), layout.dtype)
    for array in arrays:
        ages = newest - periods_of(array)
        inside = np.flatnonzero((ages >= 0) & (ages < layout.rows))
        inside = inside[_sane(array[inside, 1:])]
        counts[layout.rows - 1 - ages[inside]] += array[inside, 1:]
    return counts


def periods_of(array: Array) -> Int64:
    """The period of every row, int64 [rows]; any number where the file was damaged."""
    with np.errstate(invalid="ignore"):
        return array[:, 0].astype(np.int64)


def _sane(rows: Array) -> Bools:
    """Which rows hold counts; others are left out, so that a damaged one does not take the whole report with it."""
    if rows.dtype.kind == "u":
        return np.ones(rows.shape[:-1], np.bool_)
    return np.asarray((np.abs(rows) <= _LARGEST).all(axis=-1))


def _is_of(file: int, layout: Layout) -> bool:
    return os.fstat(file).st_size == layout.file_bytes and os.pread(file, _HEADER_BYTES, 0) == layout.header


def _mapped(path: Path, layout: Layout) -> mmap.mmap:
    try:
        with path.open("r+b") as file:
            if _is_of(file.fileno(), layout):
                return mmap.mmap(file.fileno(), 0)
        aside = path.with_name(f"{path.name}.aside")
        logger.warning("%s: expected %s; put aside as %s", path, layout, aside.name)
        os.replace(path, aside)
    except FileNotFoundError:
        pass
    handle, working = tempfile.mkstemp(prefix=f".{path.name}.{os.getpid()}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "r+b") as file:
            _reserve(file.fileno(), layout.file_bytes)
            os.pwrite(file.fileno(), layout.header, 0)
            os.replace(working, path)
            return mmap.mmap(file.fileno(), 0)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(working)
        raise


def _reserve(file: int, size: int) -> None:
    """Give a file all its blocks: writing to a hole of a mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    for start in range(0, size, _CHUNK_BYTES):
        os.pwrite(file, bytes(min(_CHUNK_BYTES, size - start)), start)
