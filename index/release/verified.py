"""Which releases a service has verified whole, so that no start reads every byte of unchanged files again."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtail.bundle import replace_file

_SETTLED_SECONDS = 1.0
"""Age of the newest file from which on another write would show in its time; it may be dated in the future."""


@contextmanager
def verifying(release: Path, state: Path) -> Iterator[bool]:
    """Yield whether a release has yet to be verified; it is noted as verified unless the block raises.

    A file that is written, replaced or copied has another size, inode or time: the release is verified again.
    Of several workers one verifies while the others wait.
    """
    record, handle = state / "verified" / f"{release.name}.json", os.open(release, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        paths = [Path(folder, name) for folder, _, names in os.walk(release, followlinks=True) for name in names]
        files = {str(path): [(at := path.stat()).st_size, at.st_ino, at.st_mtime_ns] for path in paths}
        known, now = None, time.time()
        with suppress(OSError, ValueError):
            known = json.loads(record.read_bytes())
        yield known != files
        if known != files and abs(now - max(at for _, _, at in files.values()) / 1e9) >= _SETTLED_SECONDS:
            with suppress(OSError):  # on a full disk the next start verifies again
                record.parent.mkdir(parents=True, exist_ok=True)
                replace_file(record, json.dumps(files).encode())
                for other in record.parent.glob("*.json"):
                    if not (release.parent / other.stem).is_dir():
                        other.unlink(missing_ok=True)
    finally:
        os.close(handle)
