"""Releases at an object store, and their copies here.

`URL/NAME/` has the files that a directory of releases has in `NAME/`, and `upload.json`, which is there first: it takes
the name. `release.json` is there last: a folder without one is no release.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from longtail.bundle import (
    BundleError,
    BundleExistsError,
    FileRecord,
    read_manifest,
    remove_stale,
    replace_file,
    sha256_of,
    working_directory,
)
from longtail.bundle.cache import Cache
from longtail.bundle.errors import StorageError
from longtail.bundle.integrity import check_names
from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import UPLOAD, claim, fetch_bundle, fetch_manifest
from longtail.index.errors import LongtailIndexError, ReleaseNotFoundError
from longtail.index.manifests import ReleaseManifest
from longtail.index.release.index_files import INDEX_MANIFEST
from longtail.index.release.pointers import CURRENT, PointerFiles, PointerObjects
from longtail.index.release.release import BUNDLE, RELEASE_MANIFEST, check_name, read_release_manifest

_ABANDONED = timedelta(days=1)
"""Age of an upload that has not ended from which on nobody is at it."""
_IN_USE_SECONDS = 600.0
"""How long a copy that somebody asked for stays whatever the limit: he may open it still."""


class RemoteReleases:
    """The releases below a URL.

    Args:
        url: such as `s3://bucket/releases`.
        cache: of downloads.
        limit: bytes that the cache may take; what is served and what was asked for of late stays whatever it is. None:
            no limit.

    Attributes:
        directory: where copies are, each as in a directory of releases.
        pointers: which of them serves.

    Raises:
        StorageError: as `ObjectStore`.
    """

    def __init__(self, url: str, cache: Cache, limit: int | None = None) -> None:
        self.store = ObjectStore(url)
        self.pointers = PointerObjects(self.store)
        self.directory = cache.directory(self.store.url)
        self._cache = cache
        self._limit = limit

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> list[str]:
        """Every release, sorted.

        Raises:
            StorageError: the store does not answer.
        """
        ends = f"/{RELEASE_MANIFEST}"
        return [
            path.removesuffix(ends) for path in self.store.below("") if path.count("/") == 1 and path.endswith(ends)
        ]

    def fetch(self, name: str, needed: Collection[str] = (), *, anew: bool = False) -> Path:
        """The directory of a copy of a release, every file of which is what was written; downloads what is not here.

        Args:
            name: the release's.
            needed: others whose copies are not to make room for it.
            anew: make another copy although one is here: a disk may have forgotten some of it.

        Raises:
            ReleaseNotFoundError: there is no such release.
            LongtailIndexError, BundleError: what is there is none.
            StorageError: the store does not answer, or has other bytes.
            OSError: the disk is full, or not writable; nothing is left behind but whole files, to go on from.
        """
        with self._cache.locked(self.store.url) as directory:
            target = directory / check_name(name)
            content = self.store.read(f"{name}/{RELEASE_MANIFEST}")
            if content is None:
                raise ReleaseNotFoundError(
                    f"{self.store.url}: expected one of its releases {self.names()}, received {name!r}"
                )
            if anew or not _is_copy(target, content):
                with working_directory(target) as working:
                    copy = working / name
                    manifest = self._fetch_manifests(name, copy)
                    fetch_bundle(self.store, f"{name}/{BUNDLE}/", self._cache, copy / BUNDLE)
                    check_names(target, manifest.files)
                    for path, record in manifest.files.items():
                        if path == INDEX_MANIFEST:
                            continue
                        self._cache.fetch(self.store, f"{name}/{path}", record, copy / path)
                    # What is served of one by this name before stays readable.
                    shutil.rmtree(target, ignore_errors=True)
                    copy.rename(target)
            os.utime(target)
            self._make_room({name, *needed})
            return target

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """A directory for the while with the manifests of a release, of which nothing else is downloaded.

        Raises:
            ReleaseNotFoundError: there is no such release.
            LongtailIndexError, BundleError, StorageError: as `fetch`.
        """
        with TemporaryDirectory() as folder:
            self._fetch_manifests(name, Path(folder) / check_name(name))
            yield Path(folder) / name

    def bytes(self, name: str) -> int:
        """Bytes of a release's files, of which some may be another's as well here."""
        with self.manifests(name) as path:
            return sum(record.bytes for record in _records(path).values())

    def upload(self, path: Path) -> None:
        """Copy a release to the store, whole or not at all.

        Args:
            path: its directory, by its name.

        Raises:
            BundleExistsError: the store has another one by that name, or somebody has begun to upload one.
            StorageError: the store does not answer; then there is no such release, and the same call goes on.
        """
        name = path.name
        content = (path / RELEASE_MANIFEST).read_bytes()
        self._refuse_deleted(name)
        claim(self.store, f"{name}/", sha256_of(path / RELEASE_MANIFEST))
        records = _records(path)
        for file, record in records.items():
            self.store.upload(path / file, f"{name}/{file}")
            self._cache.adopt(path / file, record)
        if not self.store.create(f"{name}/{RELEASE_MANIFEST}", content):
            raise BundleExistsError(f"{self.store.url}/{name}: expected a name that is free, found another release")

    def complete(self, name: str) -> None:
        """`upload` a release that was written to `directory`.

        Raises:
            StorageError: the store does not answer; the release is here, to be uploaded later.
        """
        try:
            self.upload(self.directory / name)
        except StorageError as error:
            raise StorageError(
                f"{error}; the release is built: longtail-index upload {self.directory / name} {self} goes on"
            ) from error

    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if the store has a release of that name, or an upload of one; a copy of one that it
        had is deleted."""
        self._refuse_deleted(name)
        if self.store.read(f"{name}/{UPLOAD}") is not None or self.store.read(f"{name}/{RELEASE_MANIFEST}") is not None:
            raise BundleExistsError(f"{self}/{name} already exists: expected a name that is free")
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete a release, of which nobody sees a part.

        Raises:
            StorageError: the store does not answer; what is left is no release, and the same call goes on.
        """
        self.store.delete([f"{name}/{RELEASE_MANIFEST}"])
        # The claim goes last: until then nobody takes the name.
        rest = [path for path in self.store.below(name) if path != f"{name}/{UPLOAD}"]
        self.store.delete([*rest, f"{name}/{UPLOAD}"])

    def abandoned(self) -> list[str]:
        """Folders of uploads that have not ended for a day."""
        whole = set(self.names())
        found = []
        for name in self.store.folders():
            if name != CURRENT and name not in whole and (paths := self.store.below(name)):
                newest = max(self.store.written_at(path) for path in paths)
                if datetime.now(UTC) - newest > _ABANDONED:
                    found.append(name)
        return found

    def again(self, name: str) -> Path | None:
        """`fetch` another copy of a release, in place of one that is not what was written."""
        return self.fetch(name, anew=True)

    def _refuse_deleted(self, name: str) -> None:
        if name in self.pointers.read().deleting:
            raise BundleExistsError(f"{self}/{name}: expected a name that is free, found one that a prune deletes")

    def pull(self, file: str) -> None:
        """Have a small file that lies beside the releases, such as promise.toml, in `directory` as it is there."""
        content, here = self.store.read(file), self.directory / file
        if content is None:
            here.unlink(missing_ok=True)
        elif not here.is_file() or here.read_bytes() != content:
            here.parent.mkdir(parents=True, exist_ok=True)
            replace_file(here, content)

    def _fetch_manifests(self, name: str, target: Path) -> ReleaseManifest:
        fetch_manifest(self.store, f"{name}/{BUNDLE}/", target / BUNDLE)
        content = self.store.read(f"{name}/{RELEASE_MANIFEST}")
        if content is None:
            raise ReleaseNotFoundError(f"{self.store.url}: expected one of its releases, received {name!r}")
        (target / RELEASE_MANIFEST).write_bytes(content)
        manifest = read_release_manifest(target)
        if INDEX_MANIFEST in manifest.files:
            record = manifest.files[INDEX_MANIFEST]
            self._cache.fetch(self.store, f"{name}/{INDEX_MANIFEST}", record, target / INDEX_MANIFEST)
        return manifest

    def _make_room(self, needed: Collection[str]) -> None:
        """Delete copies of releases that the store has no more, or that are too much, the longest unused first."""
        remove_stale(self.directory)
        here = [path for path in self.directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
        now, pointed = time.time(), PointerFiles(self.directory).read()
        kept = {*needed, pointed.current, pointed.staged}
        there = self.names()
        for path in sorted(here, key=lambda each: each.stat().st_mtime):
            over = self._limit is not None and self._cache.bytes > self._limit
            used = path.name in kept or now - path.stat().st_mtime < _IN_USE_SECONDS
            # What was built here is not there before its upload has ended.
            gone = path.name not in there and self.store.read(f"{path.name}/{UPLOAD}") is None
            if not used and (over or gone):
                hidden = path.with_name(f".{path.name}.{os.getpid()}.evicted.tmp")
                path.rename(hidden)
                shutil.rmtree(hidden)
                self._cache.trim(self._limit)
        self._cache.trim(self._limit)


def _is_copy(path: Path, content: bytes) -> bool:
    """Whether a directory is a copy of the release whose release.json has this content, as far as sizes tell."""
    try:
        if (path / RELEASE_MANIFEST).read_bytes() != content:
            return False
        return all((path / file).stat().st_size == record.bytes for file, record in _records(path).items())
    except (OSError, LongtailIndexError, BundleError):
        return False


def _records(path: Path) -> dict[str, FileRecord]:
    """Every file of a release but release.json, by its path there."""
    release, bundle = read_release_manifest(path), read_manifest(path / BUNDLE)
    own = {name: path / BUNDLE / name for name in ("manifest.json", "manifest.sha256")}
    return {
        **release.files,
        **{f"{BUNDLE}/{name}": record for name, record in bundle.files.items()},
        **{
            f"{BUNDLE}/{name}": FileRecord(sha256=sha256_of(file), bytes=file.stat().st_size)
            for name, file in own.items()
        },
    }
