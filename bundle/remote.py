"""Bundles at an object store: the same files below a URL, uploaded whole or not at all, downloaded verified.

`upload.json` is written first and takes the place, `manifest.json` last: a folder without one is no bundle.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

from longtail.bundle.cache import Cache
from longtail.bundle.errors import BundleCorruptError, BundleError, BundleExistsError
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256, check_names, read_manifest, verify_files
from longtail.bundle.objects import ObjectStore, is_url, local_path
from longtail.bundle.store import sha256_of, working_directory

UPLOAD = "upload.json"
_BUNDLE = "bundle"


def upload_bundle(bundle: Path, url: str) -> None:
    """Verify a bundle and copy it to a URL, where there is none yet.

    Args:
        bundle: its directory.
        url: such as `s3://bucket/bundles/books`: the folder of the copy.

    Raises:
        BundleError: it is not intact.
        BundleExistsError: there is another one at the URL.
        StorageError: the store does not answer; then there is no bundle, and the same call goes on.
    """
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest.files)
    store, content = ObjectStore(url), (bundle / MANIFEST).read_bytes()
    if store.read(MANIFEST) not in (None, content):
        raise BundleExistsError(f"{url}: expected a URL without a bundle, found another one; nothing was changed")
    claim(store, "", sha256_of(bundle / MANIFEST))
    for name in (*manifest.files, MANIFEST_SHA256):
        store.upload(bundle / name, name)
    if not store.create(MANIFEST, content):
        raise BundleExistsError(f"{url}: expected a URL without a bundle, found one that was written meanwhile")


def claim(store: ObjectStore, prefix: str, sha256: str) -> None:
    """Take the place of what is about to be uploaded, so that no two write over each other's files.

    Args:
        store: where.
        prefix: of its objects.
        sha256: of what is written last; who uploads the same goes on.

    Raises:
        BundleExistsError: somebody else has taken it.
        StorageError: the store does not answer.
    """
    said = {"sha256": sha256, "by": f"{socket.gethostname()}:{os.getpid()}"}
    if store.create(f"{prefix}{UPLOAD}", json.dumps(said).encode()):
        return
    try:
        found = json.loads(store.read(f"{prefix}{UPLOAD}") or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("sha256") != sha256:
        by = found.get("by", "nobody") if isinstance(found, dict) else "nobody"
        raise BundleExistsError(
            f"{store.url}/{prefix}: expected a place that is free, found one that {by} uploads to or has uploaded to; "
            "nothing was changed"
        )


def download_bundle(url: str, cache: Cache | None = None) -> Path:
    """The directory of a copy of the bundle at a URL, every file of which is what was written.

    Args:
        url: of the bundle's folder; of a release's bundle `…/NAME/bundle`.
        cache: of downloads; the user's when None.

    Raises:
        BundleError: there is no bundle.
        StorageError: the store does not answer, or has other bytes.
        OSError: the disk is full, or not writable.
    """
    store, cache = ObjectStore(url), cache or Cache()
    with cache.locked(store.url) as directory:
        target = directory / _BUNDLE
        content = store.read(MANIFEST)
        if content is None:
            raise BundleCorruptError(f"{url}: expected a bundle (a folder with {MANIFEST}), found none")
        if not _is_copy(target, content):
            with working_directory(target) as working:
                fetch_bundle(store, "", cache, working / _BUNDLE)
                shutil.rmtree(target, ignore_errors=True)
                (working / _BUNDLE).rename(target)
        cache.trim()
        return target


def _is_copy(target: Path, content: bytes) -> bool:
    try:
        if (target / MANIFEST).read_bytes() != content:
            return False
        verify_files(target, read_manifest(target).files)
    except (OSError, BundleError):
        return False
    return True


def local_bundle(place: str | Path) -> Path:
    """The directory of a bundle, or of its copy where the place is a URL; raises as `download_bundle`."""
    return download_bundle(str(place)) if is_url(place) else local_path(place)


def fetch_bundle(store: ObjectStore, prefix: str, cache: Cache, target: Path) -> None:
    """Have the bundle whose objects begin with a prefix as the directory `target`; raises as `download_bundle`."""
    fetch_manifest(store, prefix, target)
    files = read_manifest(target).files
    check_names(target, files)
    for name, record in files.items():
        cache.fetch(store, f"{prefix}{name}", record, target / name)


def fetch_manifest(store: ObjectStore, prefix: str, target: Path) -> None:
    """Have in `target` the two files that say what a bundle is.

    Raises:
        BundleCorruptError: there is no bundle.
        StorageError: the store does not answer.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, MANIFEST_SHA256):
        content = store.read(f"{prefix}{name}")
        if content is None:
            raise BundleCorruptError(f"{store.url}/{prefix}{name}: expected a file of a bundle, found none")
        (target / name).write_bytes(content)
