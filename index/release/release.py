"""A release: bundle, index and release.json in one directory that is there whole or not at all.

NAME/
  bundle/         every file of the bundle, hard-linked where the disk allows it
  index/          manifest.json, and per band NAME.faiss and NAME.rows.npy
  release.json    which bundle, which index, the sha256 of every file of index/
"""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from longtail.bundle import (
    Bundle,
    BundleCorruptError,
    FileRecord,
    atomic_directory,
    read_manifest,
    refuse_existing,
    sha256_of,
    verify_files,
)
from longtail.bundle.manifest import BiasRemoval
from longtail.index.construct.bands import Report, construct
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.train import check_device
from longtail.index.errors import ReleaseCorruptError, ReleaseMismatchError, ReleaseNameError
from longtail.index.manifest import Device, IndexManifest, ReleaseManifest
from longtail.index.release.files import (
    INDEX_MANIFEST,
    manifest_bytes,
    read_bands,
    read_manifest_file,
    write_file,
    write_index,
)
from longtail.index.search.searcher import Searcher

RELEASE_MANIFEST = "release.json"
_BUNDLE = "bundle"
_BUNDLE_MANIFEST = f"{_BUNDLE}/manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = ("CURRENT", "HISTORY", "promise.toml")


@dataclass(frozen=True)
class Release:
    """An opened, verified release, ready to answer.

    Attributes:
        name: its directory's name.
        path: its directory.
        created_at: when it was built, UTC.
        bundle: the model; its embeddings are memory-mapped.
        searcher: the index.
        manifest: release.json.
    """

    name: str
    path: Path
    created_at: datetime
    bundle: Bundle
    searcher: Searcher
    manifest: ReleaseManifest


def build_index(
    bundle: Path,
    releases: Path,
    *,
    spec: IndexSpec | None = None,
    name: str | None = None,
    device: Device = "cpu",
    report: Report = lambda _: None,
) -> ReleaseManifest:
    """Build and measure an index over a bundle's labels and write both as a new release; publishes nothing.

    Args:
        bundle: a bundle's directory.
        releases: directory of releases; made if missing.
        spec: what to build; `auto` when None.
        name: of the release; UTC time and the bundle's name when None.
        device: where FAISS trains.
        report: told what is being done, one line each.

    Raises:
        IndexRoomError: the spec, the device, the name or the measured recall; nothing is left behind.
        BundleError: the bundle is not intact, or the release exists.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    spec = spec or IndexSpec()
    source = Bundle.load(bundle)
    created_at = datetime.now(UTC)
    name = _free_name(releases, created_at, source.manifest.name) if name is None else check_name(name)
    refuse_existing(releases / name)
    built = construct(source, spec, device, report)
    report(f"write {releases / name}")
    with atomic_directory(releases / name) as working:
        _link_bundle(bundle, source, working / _BUNDLE)
        bundle_sha256 = sha256_of(working / _BUNDLE_MANIFEST)
        index, files = write_index(working, built, spec=spec, bundle_sha256=bundle_sha256, device=device)
        manifest = ReleaseManifest(
            name=name,
            created_at=created_at,
            bundle=source.manifest.name,
            bundle_sha256=bundle_sha256,
            labels=index.labels,
            spec=index.spec,
            kind=index.kind,
            recall_k=index.recall_k,
            recall=index.recall,
            files=files,
        ).sealed()
        write_file(working / RELEASE_MANIFEST, manifest_bytes(manifest))
    return manifest


def open_release(path: Path, *, device: Device = "cpu", mapped: bool = True) -> Release:
    """Verify every file of a release and load it.

    Args:
        path: its directory.
        device: where it searches.
        mapped: whether its index is mapped and shared with other processes, or read into memory.

    Raises:
        DeviceError: the device is not there, or too small.
        ReleaseCorruptError: a file of the index or release.json is missing or not what was written.
        ReleaseVersionError: written by a newer Longtail.
        ReleaseMismatchError: the index was built from another bundle.
        BundleError: the bundle inside is not intact.
    """
    check_device(device)
    manifest = read_release_manifest(path)
    with ThreadPoolExecutor(1) as pool:
        index_files = pool.submit(_verify_index, path, manifest.files)
        bundle = Bundle.load(path / _BUNDLE)
        index_files.result()
    index = read_manifest_file(path / INDEX_MANIFEST, IndexManifest)
    if index.bundle_sha256 != manifest.bundle_sha256:
        raise _mismatch(path / INDEX_MANIFEST, index.bundle_sha256, manifest.bundle_sha256)
    searcher = Searcher(bundle, read_bands(path, index, bundle, device=device, mapped=mapped), index.effort)
    return Release(path.name, path, manifest.created_at, bundle, searcher, manifest)


def release_dial(path: Path) -> BiasRemoval:
    """The default λ and offline curve of the bundle in a release; raises as `read_manifest` of bundles."""
    return read_manifest(path / _BUNDLE).bias_removal


def read_release_manifest(path: Path) -> ReleaseManifest:
    """release.json alone, checked: version, checksum, name, and that the bundle beside it is its own.

    Raises:
        ReleaseCorruptError, ReleaseVersionError, ReleaseMismatchError: as `open_release`.
    """
    file = path / RELEASE_MANIFEST
    manifest = read_manifest_file(file, ReleaseManifest)
    if manifest.checksum != manifest.expected_checksum():
        raise ReleaseCorruptError(
            f"{file}: expected checksum {manifest.expected_checksum()} for its content, found {manifest.checksum!r}"
        )
    if manifest.name != path.name:
        raise ReleaseCorruptError(f"{file}: expected the release {path.name!r}, found {manifest.name!r}")
    try:
        found = sha256_of(path / _BUNDLE_MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ReleaseCorruptError(f"{path / _BUNDLE_MANIFEST}: expected the release's bundle, found none") from None
    if found != manifest.bundle_sha256:
        raise _mismatch(path / _BUNDLE_MANIFEST, found, manifest.bundle_sha256)
    return manifest


def check_name(name: str) -> str:
    """The name, if it is one path component of plain characters that does not start with a dot.

    Raises:
        ReleaseNameError: it is not.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ReleaseNameError(
            "release name: expected 1 to 128 letters, digits, dots, dashes or underscores, the first a letter or "
            f"digit, and none of CURRENT, HISTORY and promise.toml; received {name!r}"
        )
    return name


def _free_name(releases: Path, created_at: datetime, bundle_name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", bundle_name)[:64]
    base = f"{created_at:%Y%m%dT%H%M%SZ}-{plain}"
    name, again = base, 1
    while (releases / name).exists():
        again += 1
        name = f"{base}-{again}"
    return name


def _link_bundle(source: Path, bundle: Bundle, target: Path) -> None:
    """Hard-link the bundle's files, or copy them where the file system cannot link."""
    for name in ("manifest.json", "manifest.sha256", *bundle.manifest.files):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        file = (source / name).resolve()
        try:
            os.link(file, target / name)
        except OSError:
            shutil.copyfile(file, target / name)


def _verify_index(path: Path, files: dict[str, FileRecord]) -> None:
    try:
        verify_files(path, files)
    except BundleCorruptError as error:
        raise ReleaseCorruptError(str(error)) from error


def _mismatch(file: Path, found: str, expected: str) -> ReleaseMismatchError:
    return ReleaseMismatchError(
        f"{file}: expected the bundle that the index was built from, sha256 {expected}, found {found}; "
        "build the index again from this bundle"
    )
