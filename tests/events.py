"""Files of events, written as a service writes them."""

from __future__ import annotations

from pathlib import Path

from longtail.serving.events.folder import FolderEvents


def write_events(folder: Path, *lines: bytes) -> Path:
    """Write events in one more file; return the folder."""
    events = FolderEvents(folder, days=7, most_bytes=1 << 20)
    events.append(lines).result(10)
    events.close()
    return folder
