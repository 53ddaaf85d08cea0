"""Keep releases at an object store, with verified copies in a local directory.

`URL/NAME/` has the files that a directory of releases has in `NAME/`, and `upload.json`, which is written first and
reserves the name. `release.json` is written last: a folder without it is not a release.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from longtail.bundle import BundleExistsError
from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import MANIFESTS, UPLOAD, copies_path, download, download_manifests, downloading, upload
from longtail.bundle.store import remove_stale, replace_file
from longtail.index.errors import LongtailIndexError, PublishedMeanwhileError, ReleaseNotFoundError
from longtail.index.release.pointers import Move, Pointers
from longtail.index.release.release import BUNDLE, CURRENT, RELEASE_MANIFEST, check_name, files_of

_MANIFESTS = (*(f"{BUNDLE}/{name}" for name in MANIFESTS), RELEASE_MANIFEST)
_ABANDONED = timedelta(days=1)
"""Age from which an unfinished upload counts as abandoned."""
_IN_USE_SECONDS = 600.0
"""Time after a fetch during which a copy counts as in use."""


class RemoteReleases:
    """The releases below a URL such as `s3://bucket/releases`, and their copies in `directory`."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.store = ObjectStore(url)
        self.directory = copies_path(self.store.url, cache)

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> list[str]:
        """Get every release's name, sorted; raises ObjectStoreError."""
        return _whole(self.store.list())

    def pointers(self) -> Pointers:
        """Read `CURRENT` with one request; raises ReleaseCorruptError or ObjectStoreError."""
        content = self.store.read(CURRENT)
        return Pointers() if content is None else Pointers.parse(content, f"{self}/{CURRENT}")

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """Read `CURRENT` to change it, without a lock.

        The move raises PublishedMeanwhileError if another writer has changed `CURRENT` since, and LongtailIndexError if
        the store does not support conditional writes.
        """
        content, tag = self.store.read_version(CURRENT) or (None, None)

        def move(after: Pointers) -> None:
            probe, once = f"{CURRENT}.probe", uuid4().hex.encode()
            # Some stores accept conditions and ignore them, so a test object shows first that this one refuses to
            # overwrite. S3 and Azure compare the ETag, GCS the version.
            self.store.put(probe, once)
            if any(self.store.put(probe, once[::-1], tag) for tag in (None, {"e_tag": '"0"', "version": "1"})):
                raise LongtailIndexError(
                    f"{self}: the object store must refuse to overwrite an object on condition (If-None-Match, "
                    "If-Match); this one overwrote a test object. Nothing was published."
                )
            if not self.store.put(CURRENT, after.content(), tag):
                raise PublishedMeanwhileError(
                    f"{self}: another writer changed CURRENT in the meantime; nothing was changed. Look at CURRENT and "
                    "run this again"
                )

        yield Pointers() if content is None else Pointers.parse(content, f"{self}/{CURRENT}"), move

    def fetch(self, name: str) -> Path:
        """Get the directory of a release's copy; every file is verified while it is downloaded.

        Raises LongtailIndexError or BundleError if there is no such release, or ObjectStoreError.
        """
        target = self.directory / check_name(name)
        remove_stale(self.directory)
        if not download(self.store, f"{name}/", _MANIFESTS, partial(files_of, name=name), target):
            raise self._not_found(name)
        os.utime(target)  # marks the copy as in use for `drop_copies`
        return target

    def drop_copies(self, needed: Collection[str], published: Collection[str]) -> None:
        """Delete copies that are not needed.

        Releases that were built here and are not yet at the store stay, and so do copies fetched within the last
        minutes: a command may be opening them.
        """
        with suppress(BlockingIOError), downloading(self.directory, wait=False):
            extra, settled = [], time.time() - _IN_USE_SECONDS
            for path in self.directory.iterdir():
                with suppress(FileNotFoundError):  # a temporary directory may vanish meanwhile
                    if path.is_dir() and path.name not in needed and path.stat().st_mtime < settled:
                        extra.append(path.name)
            for name in {*published, *self.names()}.intersection(extra) if extra else ():
                shutil.rmtree(self.directory / name, ignore_errors=True)

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield a temporary directory that has only the manifests of a release."""
        with TemporaryDirectory() as folder:
            copy = Path(folder) / check_name(name)
            if not download_manifests(self.store, f"{name}/", _MANIFESTS, copy):
                raise self._not_found(name)
            yield copy

    def upload(self, path: Path) -> None:
        """Copy a release to the store, completely or not at all."""
        self._refuse_deleted(path.name)
        upload(self.store, f"{path.name}/", path, [*files_of(path), *_MANIFESTS[:-1]], RELEASE_MANIFEST)

    def complete(self, name: str) -> None:
        """Upload a release from `directory`; after a ObjectStoreError the release stays there."""
        try:
            self.upload(self.directory / name)
        except ObjectStoreError as error:
            raise ObjectStoreError(
                f"{error}; the release is built: longtail-index upload {self.directory / name} {self} resumes it"
            ) from error

    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if the store has a release or an upload of that name.

        Otherwise a local copy of an older release of that name is deleted.
        """
        self._refuse_deleted(name)
        if any(self.store.read(f"{name}/{file}") is not None for file in (UPLOAD, RELEASE_MANIFEST)):
            raise BundleExistsError(f"{self}/{name} already exists: expected a name that is free")
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete a release and its local copy; after a ObjectStoreError the same call resumes."""
        # The manifest goes first, so that no reader sees half a release; the reservation goes last, so that no writer
        # takes the name before.
        first, last = f"{name}/{RELEASE_MANIFEST}", f"{name}/{UPLOAD}"
        rest = [path for path in self.store.list() if path.startswith(f"{name}/") and path not in (first, last)]
        self.store.delete([first, *rest, last])
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def abandoned(self) -> list[str]:
        """Get the folders of uploads that have been unfinished for a day."""
        written, newest = self.store.list(), dict[str, datetime]()
        for path, at in written.items():
            name = path.partition("/")[0]
            newest[name] = max(at, newest.get(name, at))
        begun = {name for name in newest if f"{name}/{UPLOAD}" in written} - {*_whole(written)}
        return [name for name in begun if datetime.now(UTC) - newest[name] > _ABANDONED]

    def pull(self, file: str) -> None:
        """Copy a small file of the releases, such as promise.toml, to `directory`."""
        self.keep(file, self.store.read(file))

    def keep(self, file: str, content: bytes | None) -> None:
        """Write the content of a small file to `directory`; None deletes the file."""
        here = self.directory / file
        if content is None:
            here.unlink(missing_ok=True)
        elif not here.is_file() or here.read_bytes() != content:
            here.parent.mkdir(parents=True, exist_ok=True)
            replace_file(here, content)

    def _refuse_deleted(self, name: str) -> None:
        if name in self.pointers().deleting:
            raise BundleExistsError(f"{self}/{name}: expected a name that is free, found one that a prune is deleting")

    def _not_found(self, name: str) -> ReleaseNotFoundError:
        return ReleaseNotFoundError.of(name, self.names(), str(self))


def _whole(paths: Collection[str]) -> list[str]:
    ends = f"/{RELEASE_MANIFEST}"
    return [path.removesuffix(ends) for path in paths if path.count("/") == 1 and path.endswith(ends)]
