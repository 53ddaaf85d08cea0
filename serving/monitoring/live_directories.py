"""The directories of releases under STATE/live: kept while a worker holds them, and two days more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from longtail.serving.monitoring.feedback_store import KEPT_SECONDS
from longtail.serving.monitoring.release_figures import ReleaseFigures, delete_label_counts

_KEPT_RELEASES = 100


def touch(held: Iterable[ReleaseFigures], now: float) -> None:
    """Tell the other workers that the directories of these releases are in use; raises OSError."""
    for figures in held:
        with suppress(FileNotFoundError):
            os.utime(figures.directory, (now, now))


def forget(root: Path, held: Collection[str], worker: int, now: float) -> None:
    """Delete the directories nobody has used for two days, and of the others a worker's counts by label.

    Args:
        root: of the directories.
        held: names of those that the worker holds, which stay.
        worker: its number.
        now: seconds since 1970.

    Raises:
        OSError: the disk.
    """
    used_at: dict[Path, float] = {}
    for directory in root.iterdir():
        with suppress(FileNotFoundError):
            used_at[directory] = directory.stat().st_mtime
    newest_first = sorted(used_at, key=lambda directory: used_at[directory], reverse=True)
    for place, directory in enumerate(newest_first):
        if directory.name in held:
            continue
        if place >= _KEPT_RELEASES or used_at[directory] < now - KEPT_SECONDS:
            shutil.rmtree(directory, ignore_errors=True)
            continue
        delete_label_counts(directory, worker)
        with suppress(FileNotFoundError):
            os.utime(directory, (used_at[directory], used_at[directory]))
