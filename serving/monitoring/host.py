"""What the service may use of its machine: memory, open files, the disk of its state, its queue; for alerts."""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 and 1."""


class Host(Collector):
    """Gauges of the machine, or of the container that the process is in; NaN where the system does not tell."""

    def __init__(self, state: Path, queue_limit: int) -> None:
        self._state = state
        self._queue_limit = queue_limit

    def collect(self) -> Iterator[Metric]:
        """Yield the series of METRICS.md about the machine."""
        total, free = _disk(self._state)
        for name, text, value in (
            ("memory_limit_bytes", "Memory that all processes may use: the container's, or the machine's.", _memory()),
            ("open_files_limit", "Files, sockets and pipes that a process may have open.", _open_files()),
            ("state_disk_bytes", "Size of the file system that state is kept on.", total),
            ("state_disk_free_bytes", "Of it, what is free.", free),
            ("queue_limit", "Queries that may wait for a search in each process.", self._queue_limit),
        ):
            yield GaugeMetricFamily(f"longtail_{name}", text, value=value)


def _memory() -> float:
    try:
        machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError):
        return math.nan
    for name in _LIMITS:
        try:
            return min(machine, float((_CGROUP / name).read_text()))
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return machine


def _open_files() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


def _disk(path: Path) -> tuple[float, float]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return math.nan, math.nan
    return float(usage.total), float(usage.free)
