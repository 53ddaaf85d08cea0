"""Folders of files at an object store: uploaded whole or not at all, downloaded verified; bundles are such folders.

`upload.json` is written first and reserves the folder, the manifest last: a folder without one is not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from longtail.bundle.errors import BundleCorruptError, BundleError, BundleExistsError
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256, check_names, read_manifest, verify_files
from longtail.bundle.manifest import FileRecord, Manifest
from longtail.bundle.objects import ObjectStore, is_url, local_path
from longtail.bundle.store import atomic_directory

UPLOAD = "upload.json"
CACHE = "LONGTAIL_CACHE"
_BUNDLE = "bundle"


def copies_of(url: str, root: Path | None = None) -> Path:
    """Get the directory of the copies of what is at a URL, below a root, LONGTAIL_CACHE, or the user's cache."""
    if root is None:
        home = os.environ.get("XDG_CACHE_HOME")
        root = Path(os.environ.get(CACHE) or (Path(home) if home else Path.home() / ".cache") / "longtail")
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:64]
    return root / f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@contextmanager
def downloading(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Keep other processes from downloading to the same directory, which is made.

    Raises:
        BlockingIOError: another process does, and this one is not to wait.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a directory that takes the place of the target, and of its content, if the block succeeds."""
    fresh = target.with_name(f".{target.name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    with atomic_directory(fresh) as working:
        yield working
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def download_files(store: ObjectStore, prefix: str, records: Mapping[str, FileRecord], target: Path) -> None:
    """Download the files of a folder and verify each; raises StorageError, or OSError where the disk is full."""
    check_names(target, records)
    for name, record in records.items():
        store.download(f"{prefix}{name}", record, target / name)


def upload_files(store: ObjectStore, prefix: str, folder: Path, files: Iterable[str], last: str) -> None:
    """Copy files of a folder to a store, whole or not at all, and its manifest `last`; goes on after a StorageError.

    Raises BundleExistsError where another folder is there, or somebody uploads one.
    """
    content = (folder / last).read_bytes()
    reservation = json.dumps({"sha256": hashlib.sha256(content).hexdigest()}).encode()
    if not store.create(f"{prefix}{UPLOAD}", reservation):
        raise BundleExistsError(f"{store.url}/{prefix}: expected a free place, found another upload; nothing changed")
    for name in files:
        store.upload(folder / name, f"{prefix}{name}")
    if not store.create(f"{prefix}{last}", content):
        raise BundleExistsError(f"{store.url}/{prefix}: expected a free place, found another {last}")


def upload_bundle(bundle: Path, url: str) -> None:
    """Verify a bundle and copy it to a URL such as `s3://bucket/books`; raises BundleError or StorageError."""
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest.files)
    store = ObjectStore(url)
    if store.read(MANIFEST) not in (None, (bundle / MANIFEST).read_bytes()):
        raise BundleExistsError(f"{url}: expected a URL without a bundle, found another one; nothing was changed")
    upload_files(store, "", bundle, (*manifest.files, MANIFEST_SHA256), MANIFEST)


def local_bundle(place: str | Path, cache: Path | None = None) -> Path:
    """Get the directory of a bundle, or of a verified copy of one at a URL; raises BundleError or StorageError."""
    if not is_url(place):
        return local_path(place)
    store = ObjectStore(str(place))
    copies = copies_of(store.url, cache)
    target = copies / _BUNDLE
    with downloading(copies):
        content = store.read(MANIFEST)
        if content is None:
            raise BundleCorruptError(f"{place}: expected a bundle (a folder with {MANIFEST}), found none")
        if not _is_copy(target, content):
            with replacing(target) as working:
                download_files(store, "", fetch_manifest(store, "", working).files, working)
    return target


def _is_copy(target: Path, content: bytes) -> bool:
    try:
        verify_files(target, read_manifest(target).files)
        return (target / MANIFEST).read_bytes() == content
    except (OSError, BundleError):
        return False


def fetch_manifest(store: ObjectStore, prefix: str, target: Path) -> Manifest:
    """Download the manifest of the bundle whose objects begin with a prefix; raises BundleError or StorageError."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, MANIFEST_SHA256):
        content = store.read(f"{prefix}{name}")
        if content is None:
            raise BundleCorruptError(f"{store.url}/{prefix}{name}: expected a file of a bundle, found none")
        (target / name).write_bytes(content)
    return read_manifest(target)
