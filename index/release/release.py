"""Open and verify a release: bundle, index and release.json in one directory; `building/writing.py` lists the files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from longtail.bundle import Bundle, BundleCorruptError, FileRecord
from longtail.bundle.integrity import read_manifest, read_versioned_json, verify_files
from longtail.bundle.store import file_sha256, replace_file
from longtail.index.errors import (
    ReleaseCorruptError,
    ReleaseMismatchError,
    ReleaseNameError,
    ReleaseVersionError,
)
from longtail.index.manifests import SCHEMA_VERSION, Device, ReleaseManifest
from longtail.index.release.index_files import (
    read_index,
    read_priors,
)
from longtail.index.search.milvus_searcher import Collection, MilvusSearcher
from longtail.index.search.milvus_server import MilvusServer
from longtail.index.search.searcher import Searcher
from longtail.index.spec import IndexSpec

RELEASE_MANIFEST = "release.json"
BUNDLE = "bundle"
BUNDLE_MANIFEST = f"{BUNDLE}/manifest.json"
QUERIES = "queries"
"""Name and folder of the release whose rows are known queries."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CURRENT = "CURRENT"
_RESERVED = (CURRENT, f"{CURRENT}.probe", "promise.toml", "experiments.toml")
_SETTLED_SECONDS = 1.0
"""Smallest age of the newest file at which a later write would certainly change its modification time."""


@dataclass(frozen=True)
class Release:
    """An opened and verified release; its bundle is memory-mapped and has the priors of the index."""

    name: str
    path: Path
    bundle: Bundle
    searcher: Searcher
    manifest: ReleaseManifest
    queries: Release | None = None
    """The index of known queries, whose rows are queries; None without one."""

    def __repr__(self) -> str:
        return f"Release({self.name!r}, {self.manifest.kind}, model {self.bundle.manifest.in_words()})"

    @property
    def spec(self) -> IndexSpec:
        """Return the spec of the index."""
        return IndexSpec(self.manifest.spec, self.manifest.recall_floor, self.manifest.device)


def open_release(
    path: Path,
    *,
    device: Device = "cpu",
    mapped: bool = True,
    towers: bool = True,
    verify: bool = True,
    milvus: Callable[[], MilvusServer] = MilvusServer.named,
) -> Release:
    """Verify the files of a release and load it.

    Args:
        mapped: map the index and share it with other processes. Otherwise read all of it into memory, and also check
            the bundle's invariants.
        verify: read every byte; otherwise only the sizes of the files are compared.

    Raises:
        LongtailIndexError, BundleError: the server is missing, or the release differs from its manifest.
    """
    manifest = read_release_manifest(path)
    # The index is hashed while the bundle is: both wait for the disk.
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_files, path, manifest.files, content=verify)
        bundle = Bundle.load(path / BUNDLE, towers=towers, verify=verify)
        try:
            verified.result()
        except BundleCorruptError as error:
            raise ReleaseCorruptError(str(error)) from error
    if not mapped:
        bundle.validate()
    bundle = replace(bundle, priors=read_priors(path, manifest, verify=verify))
    searcher: Searcher
    if manifest.collection is not None:
        collection = Collection(milvus(), manifest.collection)
        collection.open(manifest.labels, manifest.dim)
        searcher = MilvusSearcher(bundle, collection, manifest.params)
    else:
        opened = read_index(path, manifest, bundle, device=device, mapped=mapped)
        filtered = manifest.filtered.params if manifest.filtered else ()
        searcher = Searcher(bundle, opened, manifest.params, filtered, manifest.params_at)
    queries = None
    if manifest.queries:
        queries = open_release(path / QUERIES, mapped=mapped, towers=towers, verify=verify, milvus=milvus)
    return Release(path.name, path, bundle, searcher, manifest, queries)


@contextmanager
def verifying(release: Path, state: Path) -> Iterator[bool]:
    """Yield whether a release must be verified; record success in the state unless the block raises.

    So later starts of a service do not read every byte of unchanged files again. A file that was written, replaced or
    copied has another size, inode or time, and its release is verified again. Of several workers one verifies while the
    others wait.
    """
    record, handle = state / "verified" / f"{release.name}.json", os.open(release, os.O_RDONLY)
    try:
        # The release's directory is the lock of all workers; closing the handle releases it.
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Links are followed, because a linked table of a bundle may change as well.
        paths = [Path(folder, name) for folder, _, names in os.walk(release, followlinks=True) for name in names]
        files = {str(path): [(stat := path.stat()).st_size, stat.st_ino, stat.st_mtime_ns] for path in paths}
        verified_files, now = None, time.time()
        with suppress(OSError, ValueError):
            verified_files = json.loads(record.read_bytes())
        yield verified_files != files
        # Files written within the last second could change again with the same time, so they are not recorded yet.
        if (
            verified_files != files
            and abs(now - max(mtime_ns for _, _, mtime_ns in files.values()) / 1e9) >= _SETTLED_SECONDS
        ):
            with suppress(OSError):  # if the disk is full, the next start verifies again
                record.parent.mkdir(parents=True, exist_ok=True)
                replace_file(record, json.dumps(files).encode())
                for other in record.parent.glob("*.json"):
                    if not (release.parent / other.stem).is_dir():
                        other.unlink(missing_ok=True)
    finally:
        os.close(handle)


def read_release_manifest(path: Path, name: str | None = None) -> ReleaseManifest:
    """Read release.json and check its version, checksum, name, and the checksum of its bundle's manifest."""
    file = path / RELEASE_MANIFEST
    manifest = read_versioned_json(
        file,
        ReleaseManifest,
        SCHEMA_VERSION,
        missing=f"{file}: expected a manifest, found none",
        remedy="build the release again",
        corrupt=ReleaseCorruptError,
        unread=ReleaseVersionError,
    )
    if manifest.checksum != (checksum := manifest.sealed().checksum):
        raise ReleaseCorruptError(f"{file}: expected checksum {checksum} for its content, found {manifest.checksum!r}")
    # Answer ids, events and figures hold the name, so a renamed copy would pass for another release.
    if manifest.name != (name or path.name):
        raise ReleaseCorruptError(f"{file}: expected the release {name or path.name!r}, found {manifest.name!r}")
    try:
        digest = file_sha256(path / BUNDLE_MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ReleaseCorruptError(f"{path / BUNDLE_MANIFEST}: expected the release's bundle, found none") from None
    if digest != manifest.bundle_sha256:
        raise ReleaseMismatchError(
            f"{path / BUNDLE_MANIFEST}: expected the bundle that the index was built from, sha256 "
            f"{manifest.bundle_sha256}, found {digest}; build the index again from this bundle"
        )
    return manifest


def list_files(path: Path, name: str | None = None) -> dict[str, FileRecord]:
    """Get the records of all files of a release except its manifests, by path."""
    release, bundle = read_release_manifest(path, name), read_manifest(path / BUNDLE)
    return release.files | {f"{BUNDLE}/{file}": record for file, record in bundle.files.items()}


def check_name(name: str) -> str:
    """Return a valid release name: one path component of plain characters; raises ReleaseNameError."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ReleaseNameError(
            "release name: expected 1 to 128 letters, digits, dots, dashes or underscores, the first a letter or "
            f"digit, and none of {', '.join(_RESERVED)}; received {name!r}"
        )
    return name
