"""Upload folders to an object store, completely or not at all, and download verified copies.

`upload.json` is written first and reserves the folder; the manifest is written last: a folder without it does not
count.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from longtail.bundle.errors import BundleCorruptError, BundleExistsError
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256, check_names, read_manifest, verify_files
from longtail.bundle.manifest import FileRecord
from longtail.bundle.objects import ObjectStore
from longtail.bundle.store import atomic_directory

UPLOAD = "upload.json"
MANIFESTS = (MANIFEST_SHA256, MANIFEST)
CACHE = "LONGTAIL_CACHE"


def copies_path(url: str, root: Path | None = None) -> Path:
    """Get the directory for copies of a URL: below a root, LONGTAIL_CACHE, or the user's cache."""
    if root is None:
        home = os.environ.get("XDG_CACHE_HOME")
        root = Path(os.environ.get(CACHE) or (Path(home) if home else Path.home() / ".cache") / "longtail")
    # For people; the hash tells apart URLs that differ in other characters alone.
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:64]
    return root / f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@contextmanager
def downloading(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Create a directory, and lock it against downloads by other processes.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def download_manifests(store: ObjectStore, prefix: str, manifests: Sequence[str], target: Path) -> bool:
    """Download the manifests of a folder; returns whether the last one exists, so that the folder is complete.

    Raises BundleCorruptError if another manifest is missing, or ObjectStoreError.
    """
    # The last manifest first: it was written last, so without it the folder is not complete.
    for name in reversed(manifests):
        content = store.read(f"{prefix}{name}")
        if content is None and name == manifests[-1]:
            return False
        if content is None:
            raise BundleCorruptError(f"{store.url}/{prefix}{name}: expected a manifest, found none")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return True


def download(
    store: ObjectStore,
    prefix: str,
    manifests: Sequence[str],
    files: Callable[[Path], Mapping[str, FileRecord]],
    target: Path,
) -> bool:
    """Download a folder unless a verified copy exists; returns False if the store has no such folder.

    Args:
        manifests: its manifests, the one that was written last at the end.
        files: reads the records of all other files from a directory with the manifests.

    Raises ObjectStoreError, errors of `files`, or OSError if the disk is full; an earlier copy stays then.
    """
    with downloading(target.parent):
        content, here = store.read(f"{prefix}{manifests[-1]}"), target / manifests[-1]
        if content is None or (here.is_file() and here.read_bytes() == content):
            return content is not None
        with atomic_directory(target, replace=True) as working:
            download_manifests(store, prefix, manifests, working)
            records = files(working)
            # Before the first download, because names in a store become paths here.
            check_names(working, records)
            for name, record in records.items():
                store.download(f"{prefix}{name}", record, working / name)
    return True


def upload(store: ObjectStore, prefix: str, folder: Path, files: Iterable[str], last: str) -> None:
    """Copy a folder's files to a store, then its manifest `last`; resumable after an ObjectStoreError.

    Raises BundleExistsError if another folder exists at the target, or another process is uploading one.
    """
    content = (folder / last).read_bytes()
    reservation = json.dumps({"sha256": hashlib.sha256(content).hexdigest()}).encode()
    if store.read(f"{prefix}{last}") not in (None, content) or not store.put(f"{prefix}{UPLOAD}", reservation):
        raise BundleExistsError(f"{store.url}/{prefix}: expected a free folder, found another upload; nothing changed")
    for name in files:
        store.upload(folder / name, f"{prefix}{name}")
    if not store.put(f"{prefix}{last}", content):
        raise BundleExistsError(f"{store.url}/{prefix}: expected a free folder, found another {last}")


def upload_bundle(bundle: Path, url: str) -> None:
    """Verify a bundle and copy it to a URL such as `s3://bucket/shop`; raises BundleError or ObjectStoreError."""
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest.files)
    upload(ObjectStore(url), "", bundle, (*manifest.files, MANIFEST_SHA256), MANIFEST)


def download_bundle(url: str, cache: Path | None = None) -> Path:
    """Get the directory of a verified copy of a bundle; raises BundleError or ObjectStoreError."""
    store = ObjectStore(url)
    target = copies_path(store.url, cache) / "bundle"
    if not download(store, "", MANIFESTS, lambda path: read_manifest(path).files, target):
        raise BundleCorruptError(f"{url}: expected a bundle (a folder with {MANIFEST}), found none")
    return target
