"""Releases at an object store, and their verified copies here.

`URL/NAME/` has the files that a directory of releases has in `NAME/`, and `upload.json`, which is there first and
reserves the name. `release.json` is there last: a folder without one is no release.
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

from longtail.bundle import BundleExistsError, FileRecord, read_manifest, remove_stale, replace_file
from longtail.bundle.errors import StorageError
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256
from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import UPLOAD, copies_of, download_files, downloading, fetch_bundle, replacing, upload_files
from longtail.index.errors import ReleaseNotFoundError
from longtail.index.manifests import ReleaseManifest
from longtail.index.release.index_files import INDEX_MANIFEST
from longtail.index.release.pointers import PointerObject
from longtail.index.release.release import BUNDLE, RELEASE_MANIFEST, check_name, read_release_manifest

_ABANDONED = timedelta(days=1)
"""Age of an unfinished upload from which on nobody is at it."""
_IN_USE_SECONDS = 600.0
"""How long a copy that was fetched is taken to be in use."""


class RemoteReleases:
    """The releases below a URL.

    Args:
        url: such as `s3://bucket/releases`.
        cache: root of all copies, as of `copies_of`.

    Attributes:
        directory: of the copies, each as in a directory of releases.
        pointers: which of them serves.
    """

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.store = ObjectStore(url)
        self.pointers = PointerObject(self.store)
        self.directory = copies_of(self.store.url, cache)

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> list[str]:
        """Get every release's name, sorted; raises StorageError."""
        return _whole(self.store.list())

    def fetch(self, name: str) -> Path:
        """Get the directory of a copy of a release, every file of which was verified when it was downloaded.

        Raises:
            ReleaseNotFoundError: there is no such release.
            LongtailIndexError, BundleError: what is there is none.
            StorageError: the store does not answer, or has other bytes.
            OSError: the disk is full, or not writable.
        """
        target = self.directory / check_name(name)
        with downloading(self.directory):
            content = self._release_manifest(name)
            here = target / RELEASE_MANIFEST
            if not here.is_file() or here.read_bytes() != content:
                remove_stale(self.directory)
                with replacing(target) as working:
                    manifest = self._fetch_manifests(name, working)
                    fetch_bundle(self.store, f"{name}/{BUNDLE}/", working / BUNDLE)
                    download_files(self.store, f"{name}/", manifest.files, working)
            os.utime(target)
            return target

    def drop_copies(self, needed: Collection[str], published: Collection[str]) -> None:
        """Delete copies that are not needed; what was built here and is not yet at the store stays.

        A copy that was fetched within the last minutes stays, too: a command may be opening it.

        Args:
            needed: names of releases.
            published: names that were at the store once.
        """
        paths = [path for path in self.directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
        settled = time.time() - _IN_USE_SECONDS
        if extra := [path for path in paths if path.name not in needed and path.stat().st_mtime < settled]:
            known = {*published, *self.names()}
            with downloading(self.directory):
                for path in extra:
                    if path.name in known and path.stat().st_mtime < settled:
                        shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield a temporary directory with the manifests of a release alone; raises as `fetch`."""
        with TemporaryDirectory() as folder:
            copy = Path(folder) / check_name(name)
            copy.mkdir()
            self._fetch_manifests(name, copy)
            yield copy

    def upload(self, path: Path) -> None:
        """Copy a release to the store, whole or not at all."""
        self._refuse_deleted(path.name)
        bundle = (*read_manifest(path / BUNDLE).files, MANIFEST, MANIFEST_SHA256)
        files = [*read_release_manifest(path).files, *(f"{BUNDLE}/{name}" for name in bundle)]
        upload_files(self.store, f"{path.name}/", path, files, RELEASE_MANIFEST)

    def complete(self, name: str) -> None:
        """`upload` a release that was written to `directory`; after a StorageError it stays there."""
        try:
            self.upload(self.directory / name)
        except StorageError as error:
            raise StorageError(
                f"{error}; the release is built: longtail-index upload {self.directory / name} {self} goes on"
            ) from error

    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if the store has a release of that name, or an upload of one; delete an old copy."""
        self._refuse_deleted(name)
        if any(self.store.read(f"{name}/{file}") is not None for file in (UPLOAD, RELEASE_MANIFEST)):
            raise BundleExistsError(f"{self}/{name} already exists: expected a name that is free")
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete a release and its copy here; after a StorageError what is left is no release, and the same call goes
        on."""
        # The manifest goes first, so that nobody sees a part; the reservation last, so that nobody takes the name.
        rest = [path for path in self.store.list() if path.startswith(f"{name}/")]
        ends = (f"{name}/{RELEASE_MANIFEST}", f"{name}/{UPLOAD}")
        self.store.delete([ends[0], *(path for path in rest if path not in ends), ends[1]])
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def abandoned(self) -> list[str]:
        """Get the folders of uploads that have not ended for a day."""
        written = self.store.list()
        newest: dict[str, datetime] = {}
        for path, at in written.items():
            name, _, rest = path.partition("/")
            if rest:
                newest[name] = max(at, newest.get(name, at))
        whole, now = set(_whole(written)), datetime.now(UTC)
        uploads = [name for name in newest if name not in whole and f"{name}/{UPLOAD}" in written]
        return [name for name in uploads if now - newest[name] > _ABANDONED]

    def pull(self, file: str) -> None:
        """Copy a small file that lies beside the releases, such as promise.toml, to `directory`."""
        self.keep(file, self.store.read(file))

    def keep(self, file: str, content: bytes | None) -> None:
        """Write what was read of a small file to `directory`; None: there is none."""
        here = self.directory / file
        if content is None:
            here.unlink(missing_ok=True)
        elif not here.is_file() or here.read_bytes() != content:
            here.parent.mkdir(parents=True, exist_ok=True)
            replace_file(here, content)

    def _refuse_deleted(self, name: str) -> None:
        if name in self.pointers.read().deleting:
            raise BundleExistsError(f"{self}/{name}: expected a name that is free, found one that a prune deletes")

    def _release_manifest(self, name: str) -> bytes:
        content = self.store.read(f"{name}/{RELEASE_MANIFEST}")
        if content is None:
            raise ReleaseNotFoundError(f"{self}: expected one of its releases {self.names()}, received {name!r}")
        return content

    def _fetch_manifests(self, name: str, target: Path) -> ReleaseManifest:
        fetch_bundle(self.store, f"{name}/{BUNDLE}/", target / BUNDLE, manifest_only=True)
        (target / RELEASE_MANIFEST).write_bytes(self._release_manifest(name))
        manifest = read_release_manifest(target, name)
        download_files(self.store, f"{name}/", _only(manifest, INDEX_MANIFEST), target)
        return manifest


def _only(manifest: ReleaseManifest, file: str) -> dict[str, FileRecord]:
    return {file: manifest.files[file]} if file in manifest.files else {}


def _whole(paths: Collection[str]) -> list[str]:
    ends = f"/{RELEASE_MANIFEST}"
    return [path.removesuffix(ends) for path in paths if path.count("/") == 1 and path.endswith(ends)]
