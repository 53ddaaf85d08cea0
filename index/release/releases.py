"""Manage releases and the pointer to the serving one, in a directory or object store.

At an object store, `URL/NAME/` has the files that a directory of releases has in `NAME/`, and `upload.json`, which is
written first and reserves the name. `release.json` is written last: a folder without it is not a release.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from longtail.bundle import BundleError, BundleExistsError, BundleVersionError
from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.integrity import read_manifest
from longtail.bundle.objects import ObjectStore, is_url, local_path
from longtail.bundle.one_line import one_line
from longtail.bundle.promise import PROMISE_FILE, QualityPromise
from longtail.bundle.remote import MANIFESTS, UPLOAD, copies_path, download, download_manifests, downloading, upload
from longtail.bundle.store import refuse_existing, remove_stale, replace_file
from longtail.index.errors import (
    LongtailIndexError,
    NotPublishableError,
    PublishedMeanwhileError,
    ReleaseCorruptError,
    ReleaseMismatchError,
    ReleaseNotFoundError,
)
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.release.compatibility import ClientInputs, breaking_changes
from longtail.index.release.milvus import MilvusCollections
from longtail.index.release.pointers import Pointers, WritePointers
from longtail.index.release.release import (
    BUNDLE,
    CURRENT,
    RELEASE_MANIFEST,
    Release,
    check_name,
    list_files,
    open_release,
    read_release_manifest,
    verifying,
)
from longtail.index.search.gpu import check_gpu
from longtail.index.search.milvus_server import MilvusServer

EXPERIMENTS_FILE = "experiments.toml"
"""File in the directory of the releases from which the service reads its experiments."""
_LOCK = ".lock"
_MANIFESTS = (*(f"{BUNDLE}/{name}" for name in MANIFESTS), RELEASE_MANIFEST)
_ABANDONED = timedelta(days=1)
"""Age from which an unfinished upload counts as abandoned."""
_IN_USE_SECONDS = 600.0
"""Time after a fetch during which a copy counts as in use."""


@dataclass(frozen=True)
class PublishReport:
    """Hold a release's figures for people, and a sentence for each unmet requirement."""

    lines: list[str]
    unmet: list[str]

    __repr__ = one_line


class Releases(ABC):
    """The releases of a directory or of an object store.

    `open_releases` creates `LocalReleases` or `RemoteReleases`.

    Attributes:
        root: the directory, or the directory of downloaded copies.
    """

    root: Path
    _milvus: MilvusServer | None

    def milvus(self) -> MilvusServer:
        """Get the Milvus server; raises SpecError if neither the caller nor the environment names one."""
        if self._milvus is None:
            self._milvus = MilvusServer.named()
        return self._milvus

    def collections(self) -> MilvusCollections:
        """Get the Milvus collections of these releases."""
        return MilvusCollections(str(self) if is_url(str(self)) else str(self.root.resolve()), self.milvus())

    @abstractmethod
    def names(self) -> list[str]:
        """Get every release's name, sorted; raises ObjectStoreError."""

    @abstractmethod
    def pointers(self) -> Pointers:
        """Read `CURRENT`; raises ReleaseCorruptError, OSError or ObjectStoreError where that is not possible."""

    @abstractmethod
    def change_pointers(self) -> AbstractContextManager[tuple[Pointers, WritePointers]]:
        """Read `CURRENT` to change it, alone in a directory; raises ReleaseNotFoundError without a directory.

        At an object store, writing raises PublishedMeanwhileError if another writer has changed `CURRENT` since, and
        LongtailIndexError if the store does not support conditional writes.
        """

    @abstractmethod
    def fetch(self, name: str) -> Path:
        """Get the directory of a release or its verified copy; raises ReleaseNameError or ReleaseNotFoundError."""

    @abstractmethod
    def manifests(self, name: str) -> AbstractContextManager[Path]:
        """Yield the directory of a release, or a temporary one with its manifests."""

    @abstractmethod
    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if a release or an upload has that name."""

    @abstractmethod
    def local_copy(self, file: str) -> Path:
        """Get the path of a small file of the releases, or of a fresh copy."""

    @abstractmethod
    def complete(self, name: str) -> None:
        """Upload a release that was written to `root`; after a ObjectStoreError the release stays there."""

    @abstractmethod
    def upload(self, path: Path) -> None:
        """Verify a release and copy it to the object store, completely or not at all.

        After a ObjectStoreError another call resumes the upload.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a release if it exists; after a ObjectStoreError the same call resumes."""

    @abstractmethod
    def find_abandoned(self) -> list[str]:
        """Get the names of abandoned uploads; delete local leftovers of killed builds."""

    def current(self) -> str | None:
        """Get the published release's name; None when nothing is published."""
        return self.pointers().current

    def staged(self) -> str | None:
        """Get the name of the release that gets shadow traffic; None without one."""
        return self.pointers().staged

    def open(
        self, name: str, *, device: Device = "cpu", mapped: bool = True, towers: bool = True, state: Path | None = None
    ) -> Release:
        """Verify a release and load it, ready to search.

        Args:
            device: `gpu` searches flat and IVF indexes on the first visible GPU, one caller at a time.
            mapped: share the index's pages with other processes; otherwise see `verify`.
            towers: read the query and label towers too.
            state: a service's state directory; files that it verified and that are unchanged are not read again.

        Raises:
            LongtailIndexError, BundleError: there is no such release or device, or the release is damaged.
        """
        if device == "gpu":
            check_gpu()  # before a download or a verification, which may take minutes
        return self._open(self.fetch(name), device=device, mapped=mapped, towers=towers, state=state)

    def _open(self, path: Path, *, device: Device, mapped: bool, towers: bool, state: Path | None) -> Release:
        """Verify and load the copy of a release."""
        if state is not None:
            with verifying(path, state) as needed:
                if needed:
                    open_release(path, towers=towers, milvus=self.milvus)
        # After a verification a second time, so that the pages it read do not count as this process's memory.
        verify = state is None
        return open_release(path, device=device, mapped=mapped, towers=towers, verify=verify, milvus=self.milvus)

    def verify(self, name: str) -> Release:
        """Open a release; check every byte, the bundle's invariants, and that FAISS parses the index."""
        return self.open(name, mapped=False)

    def manifest(self, name: str) -> ReleaseManifest:
        """Get and check release.json of one release; reads no other file of it but the bundle's manifest."""
        with self.manifests(name) as path:
            return read_release_manifest(path)

    def bytes(self, name: str) -> int:
        """Compute the total size of a release's files, in bytes."""
        with self.manifests(name) as path:
            return sum(record.bytes for record in list_files(path).values())

    def promise(self) -> QualityPromise:
        """Read `promise.toml` of these releases; raises BundleError."""
        return QualityPromise.of_releases(self.local_copy(PROMISE_FILE))

    def stage(self, name: str) -> None:
        """Verify a release, and have services send it shadow traffic."""
        check_name(name)
        with self.change_pointers() as (pointers, write):
            if name == pointers.current:
                raise LongtailIndexError(f"stage: expected another release than CURRENT, received {name!r}")
            self._refuse_deleted(name, pointers)
            self.verify(name)
            write(pointers.model_copy(update={"staged": name}))

    def unstage(self) -> str | None:
        """End shadow traffic; returns the name of the release that received it."""
        with self.change_pointers() as (pointers, write):
            if pointers.staged is not None:
                write(pointers.model_copy(update={"staged": None}))
            return pointers.staged

    def publish(
        self,
        name: str,
        *,
        promise: QualityPromise | None = None,
        force: bool = False,
        instead_of: str | None = None,
    ) -> PublishReport:
        """Verify a release and point CURRENT at it; a service that follows CURRENT then loads it.

        Args:
            promise: bounds of the release's figures; None: those of `promise.toml`.
            force: publish even if the promise is broken, or the release refuses requests that CURRENT accepts.
            instead_of: name of the release that must still be published; otherwise PublishedMeanwhileError.

        Returns:
            The figures, and, with `force`, the requirements that are not met.

        Raises:
            NotPublishableError: the promise is broken, or the release refuses features or priors that CURRENT accepts.
            LongtailIndexError, BundleError: there is no such release, or it is damaged; CURRENT is unchanged.
        """
        check_name(name)
        with self.change_pointers() as (pointers, write):
            self._refuse_deleted(name, pointers)
            if instead_of is not None and pointers.current != instead_of:
                raise PublishedMeanwhileError(
                    f"{name} is not published: expected {instead_of} to be published still, found {pointers.current}"
                )
            promise = promise or self.promise()
            # Inside this block a directory's lock keeps a prune from deleting what was just verified.
            release = self.verify(name)
            current = self._current_inputs(pointers.current, force=force)
            lines, unmet = promise.judge_release(release.bundle.manifest, None if current is None else current.manifest)
            if current is not None and pointers.current != name:
                unmet += breaking_changes(
                    current, ClientInputs.from_manifests(release.bundle.manifest, release.manifest)
                )
            if unmet and not force:
                raise NotPublishableError(
                    f"{name} is not published, CURRENT stays as it was: {'; '.join(unmet)}; `longtail-index "
                    "publish --force` publishes all the same",
                    unmet=unmet,
                )
            if release.manifest.collection is not None:
                # Before the pointer moves, because the server may have lost rows since the build.
                self.collections().check(release)
            update: dict[str, object] = {"current": name, "forced": name if force else None, "is_held": False}
            if name != pointers.current:
                update["history"] = (*pointers.history, name)
            if name == pointers.staged:
                update["staged"] = None
            write(pointers.model_copy(update=update))
            if release.manifest.collection is not None:
                # The release may have been copied here by hand, so that nothing holds its collection yet.
                self.collections().hold(name, release.manifest.collection)
            return PublishReport(lines, unmet)

    def rollback(self) -> str:
        """Point CURRENT back at the last published release that still exists; returns its name.

        The promise is not checked, and the release may refuse features that clients have begun to send since. Refreshes
        wait until somebody publishes.
        """
        with self.change_pointers() as (pointers, write):
            history = self._existing_history(pointers)
            if not history:
                raise ReleaseNotFoundError(
                    f"{self}: expected a release published before {pointers.current or 'any'}, found none in its "
                    "history"
                )
            name = history[-1]
            self._refuse_deleted(name, pointers)
            collection = self.verify(name).manifest.collection
            # Forced, because the older release may lack what clients have begun to send.
            update = {"current": name, "forced": name, "is_held": True, "history": tuple(history)}
            write(pointers.model_copy(update=update))
            if collection is not None:
                self.collections().hold(name, collection)
            return name

    def prune(
        self, keep: int, say: Callable[[str], None] = lambda _: None, *, candidates: Collection[str] | None = None
    ) -> list[str]:
        """Delete all but the `keep` newest releases and those in use; returns the deleted names.

        In use are the current release, the staged one, the one that `rollback` would choose, and the releases of arms
        in `experiments.toml`; `say` reports the latter. Unreadable releases count as oldest. Leftovers of killed builds
        are deleted too. Raises LongtailIndexError if `experiments.toml` cannot be read; then nothing is deleted.

        Args:
            candidates: names of the releases that may be deleted; None: all.
        """
        if keep < 1:
            raise LongtailIndexError(f"--keep: expected at least 1, received {keep}")
        with self.change_pointers() as (pointers, write):
            in_arms = self._releases_of_arms()
            needed = {pointers.current, pointers.staged, *self._existing_history(pointers)[-1:]}
            newest_first = sorted(self.names() if candidates is None else candidates, key=self._age_key, reverse=True)
            for name in newest_first[keep:]:
                if name in in_arms - needed:
                    say(f"kept: {name}, which answers for an arm of {EXPERIMENTS_FILE}")
            needed |= in_arms
            old = [name for name in newest_first[keep:] if name not in needed]
            deleted = sorted({*old, *pointers.deleting, *self.find_abandoned()} - needed)
            collections = self._collection_names(deleted)
            if collections:
                self.milvus().version()  # an unreachable server must fail before anything is deleted
            if deleted:
                # Announced before the deletion: from here on no writer publishes these or reuses their names.
                write(pointers.model_copy(update={"deleting": tuple(deleted)}))
                if collections:
                    self.collections().drop_unheld(collections)
                for name in deleted:
                    self.delete(name)
        # The announcement is withdrawn last; another writer may change CURRENT at the same time, hence the retries.
        while deleted:
            with suppress(PublishedMeanwhileError), self.change_pointers() as (pointers, write):
                deleting = tuple(name for name in pointers.deleting if name not in deleted)
                write(pointers.model_copy(update={"deleting": deleting}))
                break
        return deleted

    def _collection_names(self, names: Collection[str]) -> dict[str, str]:
        """Map releases to the Milvus collections that they name; unreadable releases are left out."""
        collections = {}
        for name in names:
            with suppress(LongtailIndexError, BundleError):
                if (record := self.manifest(name).collection) is not None:
                    collections[name] = record.name
        return collections

    def _releases_of_arms(self) -> set[str]:
        """Get the releases that arms of experiments name, of running experiments and of others."""
        path = self.local_copy(EXPERIMENTS_FILE)
        try:
            experiments = (
                tomllib.loads(path.read_text(encoding="utf-8")).get("experiments", {}) if path.exists() else {}
            )
            arms = [arm for experiment in experiments.values() for arm in experiment["arms"].values()]
            return {name for arm in arms if (name := arm.get("release"))}
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, AttributeError, TypeError) as error:
            raise LongtailIndexError(
                f"{path}: expected experiments with arms, whose releases stay, found {type(error).__name__}: {error}; "
                "nothing was deleted"
            ) from error

    def _current_inputs(self, current: str | None, *, force: bool) -> ClientInputs | None:
        """Get what clients of CURRENT may send; None if nothing is published or CURRENT cannot be read.

        Without `force`, ObjectStoreError passes through: a failing store must not switch the checks off.
        """
        try:
            if current is not None:
                with self.manifests(current) as path:
                    return ClientInputs.from_manifests(read_manifest(path / BUNDLE), read_release_manifest(path))
        except (BundleError, LongtailIndexError):
            pass
        except ObjectStoreError:
            if not force:
                raise
        return None

    def _refuse_deleted(self, name: str, pointers: Pointers) -> None:
        if name in pointers.deleting:
            raise ReleaseNotFoundError(
                f"{self}: expected a release that stays, received {name!r}, which a prune deletes"
            )

    def _age_key(self, name: str) -> tuple[float, str]:
        try:
            return self.manifest(name).created_at.timestamp(), name
        except (LongtailIndexError, BundleError):
            return 0.0, name

    def _existing_history(self, pointers: Pointers) -> list[str]:
        """Get the names published before the current one that still exist, oldest first."""
        # The last entry is the current release.
        history, names = list(pointers.history[:-1]), set(self.names())
        while history and history[-1] not in names:
            history.pop()
        return history


class LocalReleases(Releases):
    """The releases in a directory; a directory that does not exist yet holds none."""

    def __init__(self, source: str | Path, milvus: MilvusServer | None = None) -> None:
        self.root, self._milvus = local_path(source), milvus

    def __str__(self) -> str:
        return str(self.root)

    def names(self) -> list[str]:
        """Get every release's name, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def pointers(self) -> Pointers:
        """Read `CURRENT`; see `Releases.pointers`."""
        try:
            content = (self.root / CURRENT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return Pointers()
        return Pointers.parse(content, str(self.root / CURRENT))

    @contextmanager
    def change_pointers(self) -> Iterator[tuple[Pointers, WritePointers]]:
        """Read `CURRENT` to change it, after waiting for other writers; see `Releases.change_pointers`."""
        if not self.root.is_dir():
            raise ReleaseNotFoundError(f"{self}: expected a directory of releases, found none")
        with (self.root / _LOCK).open("w") as lock:
            # The system drops this lock when the process dies. The lock file must stay: two files would be two locks.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.pointers(), lambda pointers: replace_file(self.root / CURRENT, pointers.content())

    def fetch(self, name: str) -> Path:
        """Get the directory of a release; see `Releases.fetch`."""
        path = self.root / check_name(name)
        if not path.is_dir():
            raise ReleaseNotFoundError.for_name(name, self.names(), str(self))
        return path

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield the directory of a release; see `Releases.manifests`."""
        yield self.fetch(name)

    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if a release has that name."""
        refuse_existing(self.root / name)

    def local_copy(self, file: str) -> Path:
        """Get the path of a small file of the releases."""
        return self.root / file

    def complete(self, name: str) -> None:
        """Do nothing: a release that was written is already in its directory."""

    def upload(self, path: Path) -> None:
        """Raise LongtailIndexError: a directory is no target for uploads."""
        raise LongtailIndexError(f"upload of {path.name}: expected the URL of an object store, received {self}")

    def delete(self, name: str) -> None:
        """Delete a release if it exists."""
        # The rename hides it in one step, so that no reader sees a half-deleted release.
        hidden = self.root / f".{name}.{os.getpid()}.pruned.tmp"
        with suppress(FileNotFoundError):  # a prune that was killed, or another one, has deleted it already
            (self.root / name).rename(hidden)
            shutil.rmtree(hidden)

    def find_abandoned(self) -> list[str]:
        """Delete leftovers of killed builds; no release is abandoned."""
        remove_stale(self.root)
        return []


class RemoteReleases(Releases):
    """The releases below a URL such as `s3://bucket/releases`, and their verified copies in `root`."""

    def __init__(self, source: str | Path, cache: Path | None = None, milvus: MilvusServer | None = None) -> None:
        self.store, self._milvus = ObjectStore(str(source)), milvus
        self.root = copies_path(self.store.url, cache)

    def __str__(self) -> str:
        return self.store.url

    def names(self) -> list[str]:
        """Get every release's name, sorted; raises ObjectStoreError."""
        return _complete_releases(self.store.list())

    def pointers(self) -> Pointers:
        """Read `CURRENT` with one request; see `Releases.pointers`."""
        content = self.store.read(CURRENT)
        return Pointers() if content is None else Pointers.parse(content, f"{self}/{CURRENT}")

    @contextmanager
    def change_pointers(self) -> Iterator[tuple[Pointers, WritePointers]]:
        """Read `CURRENT` to change it, without a lock; see `Releases.change_pointers`."""
        content, tag = self.store.read_version(CURRENT) or (None, None)

        def write(pointers: Pointers) -> None:
            probe, once = f"{CURRENT}.probe", uuid4().hex.encode()
            # Some stores accept conditions and ignore them, so a test object shows first that this one refuses to
            # overwrite. S3 and Azure compare the ETag, GCS the version.
            self.store.put(probe, once)
            if any(self.store.put(probe, once[::-1], tag) for tag in (None, {"e_tag": '"0"', "version": "1"})):
                raise LongtailIndexError(
                    f"{self}: the object store must refuse to overwrite an object on condition (If-None-Match, "
                    "If-Match); this one overwrote a test object. Nothing was published."
                )
            if not self.store.put(CURRENT, pointers.content(), tag):
                raise PublishedMeanwhileError(
                    f"{self}: another writer changed CURRENT in the meantime; nothing was changed. Look at CURRENT and "
                    "run this again"
                )

        yield Pointers() if content is None else Pointers.parse(content, f"{self}/{CURRENT}"), write

    def fetch(self, name: str) -> Path:
        """Get the directory of a release's copy; every file is verified while it is downloaded.

        Raises LongtailIndexError or BundleError if there is no such release, or ObjectStoreError.
        """
        target = self.root / check_name(name)
        remove_stale(self.root)
        if not download(self.store, f"{name}/", _MANIFESTS, partial(list_files, name=name), target):
            raise ReleaseNotFoundError.for_name(name, self.names(), str(self))
        os.utime(target)  # marks the copy as in use for `drop_copies`
        return target

    def _open(self, path: Path, *, device: Device, mapped: bool, towers: bool, state: Path | None) -> Release:
        """Open the copy of a release; a damaged copy is downloaded again."""
        try:
            return super()._open(path, device=device, mapped=mapped, towers=towers, state=state)
        except BundleVersionError:
            raise  # the original at the store has the same version: downloading it again cannot help
        except (ReleaseCorruptError, ReleaseMismatchError, BundleError):
            with downloading(self.root):
                shutil.rmtree(path, ignore_errors=True)
            path = self.fetch(path.name)
            return super()._open(path, device=device, mapped=mapped, towers=towers, state=state)

    def drop_copies(self, needed: Collection[str], published: Collection[str]) -> None:
        """Delete copies that are not needed.

        Releases that were built here and are not yet at the store stay, and so do copies fetched within the last
        minutes: a command may be opening them.
        """
        with suppress(BlockingIOError), downloading(self.root, wait=False):
            extra, settled = [], time.time() - _IN_USE_SECONDS
            for path in self.root.iterdir():
                with suppress(FileNotFoundError):  # a temporary directory may vanish meanwhile
                    if path.is_dir() and path.name not in needed and path.stat().st_mtime < settled:
                        extra.append(path.name)
            for name in {*published, *self.names()}.intersection(extra) if extra else ():
                shutil.rmtree(self.root / name, ignore_errors=True)

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield a temporary directory that has only the manifests of a release."""
        with TemporaryDirectory() as folder:
            copy = Path(folder) / check_name(name)
            if not download_manifests(self.store, f"{name}/", _MANIFESTS, copy):
                raise ReleaseNotFoundError.for_name(name, self.names(), str(self))
            yield copy

    def upload(self, path: Path) -> None:
        """Verify a release and copy it to the store; see `Releases.upload`."""
        release = open_release(path.resolve(), mapped=False, towers=False, milvus=self.milvus)
        if release.manifest.collection is not None:
            # The collection stays held if the upload fails: a later call resumes it, or the release exists already.
            self.collections().hold(release.name, release.manifest.collection)
        self._upload(release.path)

    def _upload(self, path: Path) -> None:
        self._refuse_reuse(path.name)
        upload(self.store, f"{path.name}/", path, [*list_files(path), *_MANIFESTS[:-1]], RELEASE_MANIFEST)

    def complete(self, name: str) -> None:
        """Upload a release from `root`; after a ObjectStoreError the release stays there."""
        try:
            self._upload(self.root / name)
        except ObjectStoreError as error:
            raise ObjectStoreError(
                f"{error}; the release is built: longtail-index upload {self.root / name} {self} resumes it"
            ) from error

    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if the store has a release or an upload of that name.

        Otherwise a local copy of an older release of that name is deleted.
        """
        self._refuse_reuse(name)
        if any(self.store.read(f"{name}/{file}") is not None for file in (UPLOAD, RELEASE_MANIFEST)):
            raise BundleExistsError(f"{self}/{name} already exists: expected a name that is free")
        shutil.rmtree(self.root / name, ignore_errors=True)

    def _refuse_reuse(self, name: str) -> None:
        if name in self.pointers().deleting:
            raise BundleExistsError(f"{self}/{name}: expected a name that is free, found one that a prune is deleting")

    def local_copy(self, file: str) -> Path:
        """Copy a small file of the releases to `root`, and get its path."""
        self.write_copy(file, self.store.read(file))
        return self.root / file

    def write_copy(self, file: str, content: bytes | None) -> None:
        """Write the content of a small file to `root`; None deletes the file."""
        path = self.root / file
        if content is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)

    def delete(self, name: str) -> None:
        """Delete a release and its local copy; after a ObjectStoreError the same call resumes."""
        # The manifest goes first, so that no reader sees half a release; the reservation goes last, so that no writer
        # takes the name before.
        first, last = f"{name}/{RELEASE_MANIFEST}", f"{name}/{UPLOAD}"
        files = [path for path in self.store.list() if path.startswith(f"{name}/") and path not in (first, last)]
        self.store.delete([first, *files, last])
        shutil.rmtree(self.root / name, ignore_errors=True)

    def find_abandoned(self) -> list[str]:
        """Get the folders of uploads that have been unfinished for a day."""
        files, newest = self.store.list(), dict[str, datetime]()
        for path, written_at in files.items():
            name = path.partition("/")[0]
            newest[name] = max(written_at, newest.get(name, written_at))
        begun = {name for name in newest if f"{name}/{UPLOAD}" in files} - {*_complete_releases(files)}
        return [name for name in begun if datetime.now(UTC) - newest[name] > _ABANDONED]


def open_releases(source: str | Path, cache: Path | None = None, milvus: MilvusServer | None = None) -> Releases:
    """Open the releases of a directory or of an object store; reads nothing.

    Args:
        source: a directory, empty if it does not exist yet; or a URL of an object store, for example
            `s3://bucket/releases`, from which releases are downloaded and verified when they are needed.
        cache: root of downloads; None: the user's cache directory.
        milvus: server of releases whose rows Milvus holds; None: the server that the environment names.
    """
    return RemoteReleases(source, cache, milvus) if is_url(source) else LocalReleases(source, milvus)


def split_release(source: str) -> tuple[str, str]:
    """Split the path or URL of a release into the releases' and its name."""
    if is_url(source):
        releases, _, name = source.rstrip("/").rpartition("/")
        return releases, name
    path = local_path(source)
    path = path.resolve() if path.name in ("", "..") else path
    return str(path.parent), path.name


def find_release(source: str) -> tuple[str, str | None]:
    """Return releases and the name of one, if a source is a release; otherwise the source and None."""
    if is_url(source):
        is_release = ObjectStore(source).read(RELEASE_MANIFEST) is not None
    else:
        is_release = (local_path(source) / RELEASE_MANIFEST).is_file()
    return split_release(source) if is_release else (source, None)


def _complete_releases(paths: Collection[str]) -> list[str]:
    suffix = f"/{RELEASE_MANIFEST}"
    return [path.removesuffix(suffix) for path in paths if path.count("/") == 1 and path.endswith(suffix)]


def publish(
    releases: str | Path,
    name: str,
    *,
    promise: QualityPromise | None = None,
    force: bool = False,
) -> PublishReport:
    """Verify a release in a directory or at a URL, and publish it; see `Releases.publish`.

    Example:
        >>> from longtail.index import QualityPromise, build, open_releases, publish
        >>> manifest = build("runs/model", "releases", name="first")
        >>> publish("releases", "first").unmet
        []
        >>> open_releases("releases").current()
        'first'
        >>> publish("releases", "first", promise=QualityPromise(floors={"tail": 0.02}))
        Traceback (most recent call last):
        longtail.index.errors.NotPublishableError: first is not published, CURRENT stays as it was: ...
    """
    return open_releases(releases).publish(name, promise=promise, force=force)
