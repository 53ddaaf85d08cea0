"""Copy finished files of events to an object store and back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import copies_path, downloading
from longtail.bundle.store import replace_file
from longtail.serving.events.folder import FINISHED


def upload_events(folder: Path, url: str) -> int:
    """Upload Parquet files that a store lacks; return their number."""
    store, uploaded = ObjectStore(url), 0
    for name in sorted({path.name for path in folder.glob(f"*{FINISHED}")} - store.list().keys()):
        with suppress(FileNotFoundError):  # the service has deleted the file meanwhile, as too old
            store.upload(folder / name, name)
            uploaded += 1
    return uploaded


def download_events(url: str) -> Path:
    """Copy a store's Parquet files into a private folder.

    Raises StorageError, or OSError for a full disk.
    """
    store = ObjectStore(url)
    folder = copies_path(store.url) / "events"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # as the service's: events hold what users chose
    with downloading(folder):
        names = {name for name in store.list() if name.endswith(FINISHED) and Path(name).name == name}
        copied = {path.name for path in folder.glob(f"*{FINISHED}")}
        for name in copied - names:
            (folder / name).unlink()
        for name in sorted(names - copied):
            if content := store.read(name):
                replace_file(folder / name, content, mode=0o600)
    return folder
