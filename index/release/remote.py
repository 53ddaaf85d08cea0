"""Releases at an object store, and their verified copies here.

`URL/NAME/` has the files that a directory of releases has in `NAME/`, and `upload.json`, which is there first and
reserves the name. `release.json` is there last: a folder without one is no release.
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

from longtail.bundle import BundleExistsError, remove_stale, replace_file
from longtail.bundle.errors import StorageError
from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import MANIFESTS, UPLOAD, copies_of, download, download_manifests, downloading, upload
from longtail.index.errors import LongtailIndexError, PublishedMeanwhileError, ReleaseNotFoundError
from longtail.index.release.pointers import Move, Pointers
from longtail.index.release.release import BUNDLE, CURRENT, RELEASE_MANIFEST, check_name, files_of

_MANIFESTS = (*(f"{BUNDLE}/{name}" for name in MANIFESTS), RELEASE_MANIFEST)
_ABANDONED = timedelta(days=1)
"""Age of an unfinished upload from which on nobody is at it."""
_IN_USE_SECONDS = 600.0
"""How long a copy that was fetched is taken to be in use."""


class RemoteReleases:
    """The releases below a URL such as `s3://bucket/releases`, and their copies in `directory`."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.store = ObjectStore(url)
        self.directory = copies_of(self.store.url, cache)

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> list[str]:
        """Get every release's name, sorted; raises StorageError."""
        return _whole(self.store.list())

    def pointers(self) -> Pointers:
        """Read `CURRENT` by one request; raises ReleaseCorruptError or StorageError."""
        content = self.store.read(CURRENT)
        return Pointers() if content is None else Pointers.parse(content, f"{self}/{CURRENT}")

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """Read `CURRENT` to change it; waits for nobody.

        Moving raises PublishedMeanwhileError if somebody else has, LongtailIndexError of a store without conditions.
        """
        content, tag = self.store.read_version(CURRENT) or (None, None)

        def move(after: Pointers) -> None:
            probe, once = f"{CURRENT}.probe", uuid4().hex.encode()
            self.store.put(probe, once)
            # S3 and Azure compare the ETag, GCS the version.
            if any(self.store.put(probe, once[::-1], tag) for tag in (None, {"e_tag": '"0"', "version": "1"})):
                raise LongtailIndexError(
                    f"{self}: the object store must refuse to overwrite an object on condition (If-None-Match, "
                    "If-Match); this one overwrote a test object. Nothing was published."
                )
            if not self.store.put(CURRENT, after.content(), tag):
                raise PublishedMeanwhileError(
                    f"{self}: somebody else has changed what is published meanwhile; nothing was changed, look at it "
                    "and run this again"
                )

        yield Pointers() if content is None else Pointers.parse(content, f"{self}/{CURRENT}"), move

    def fetch(self, name: str) -> Path:
        """Get the directory of a copy of a release, every file of which was verified when it was downloaded.

        Raises LongtailIndexError or BundleError where there is none, or StorageError.
        """
        target = self.directory / check_name(name)
        remove_stale(self.directory)
        if not download(self.store, f"{name}/", _MANIFESTS, partial(files_of, name=name), target):
            raise self._not_found(name)
        os.utime(target)
        return target

    def drop_copies(self, needed: Collection[str], published: Collection[str]) -> None:
        """Delete copies that are not needed; what was built here and is not yet at the store stays.

        A copy that was fetched within the last minutes stays, too: a command may be opening it.
        """
        with suppress(BlockingIOError), downloading(self.directory, wait=False):
            extra, settled = [], time.time() - _IN_USE_SECONDS
            for path in self.directory.iterdir():
                with suppress(FileNotFoundError):  # of a temporary one
                    if path.is_dir() and path.name not in needed and path.stat().st_mtime < settled:
                        extra.append(path.name)
            for name in {*published, *self.names()}.intersection(extra) if extra else ():
                shutil.rmtree(self.directory / name, ignore_errors=True)

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield a temporary directory with the manifests of a release."""
        with TemporaryDirectory() as folder:
            copy = Path(folder) / check_name(name)
            if not download_manifests(self.store, f"{name}/", _MANIFESTS, copy):
                raise self._not_found(name)
            yield copy

    def upload(self, path: Path) -> None:
        """Copy a release to the store, whole or not at all."""
        self._refuse_deleted(path.name)
        upload(self.store, f"{path.name}/", path, [*files_of(path), *_MANIFESTS[:-1]], RELEASE_MANIFEST)

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
        """Delete a release and its copy here; after a StorageError the same call goes on."""
        # The manifest goes first, so that nobody sees a part; the reservation last, so that nobody takes the name.
        first, last = f"{name}/{RELEASE_MANIFEST}", f"{name}/{UPLOAD}"
        rest = [path for path in self.store.list() if path.startswith(f"{name}/") and path not in (first, last)]
        self.store.delete([first, *rest, last])
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def abandoned(self) -> list[str]:
        """Get the folders of uploads that have not ended for a day."""
        written, newest = self.store.list(), dict[str, datetime]()
        for path, at in written.items():
            name = path.partition("/")[0]
            newest[name] = max(at, newest.get(name, at))
        begun = {name for name in newest if f"{name}/{UPLOAD}" in written} - {*_whole(written)}
        return [name for name in begun if datetime.now(UTC) - newest[name] > _ABANDONED]

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
        if name in self.pointers().deleting:
            raise BundleExistsError(f"{self}/{name}: expected a name that is free, found one that a prune deletes")

    def _not_found(self, name: str) -> ReleaseNotFoundError:
        return ReleaseNotFoundError.of(name, self.names(), str(self))


def _whole(paths: Collection[str]) -> list[str]:
    ends = f"/{RELEASE_MANIFEST}"
    return [path.removesuffix(ends) for path in paths if path.count("/") == 1 and path.endswith(ends)]
