"""Releases, and which of them serves: in a directory, or at an object store with copies in one (pointers.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from longtail.bundle import Bundle, BundleError
from longtail.bundle.cache import Cache
from longtail.bundle.errors import StorageError
from longtail.bundle.objects import is_url, local_path
from longtail.index.errors import (
    LongtailIndexError,
    NotStagedError,
    PublishedMeanwhileError,
    ReleaseCorruptError,
    ReleaseMismatchError,
    ReleaseNotFoundError,
)
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.release.bucket_floors import FLOORS_FILE, BucketFloors, BucketMetrics, FloorsReport
from longtail.index.release.collections import HeldCollections
from longtail.index.release.compatibility import Compatibility
from longtail.index.release.local import LocalReleases
from longtail.index.release.pointers import Pointers, PointerStore
from longtail.index.release.published import compared_with, metrics_of
from longtail.index.release.release import (
    BUNDLE,
    Release,
    check_name,
    open_release,
    read_again,
    read_release_manifest,
)
from longtail.index.release.remote import RemoteReleases
from longtail.index.release.staged import StagedCounts, StagedReport
from longtail.index.release.verified import Verified
from longtail.index.search.milvus import MilvusServer
from longtail.state import Place, Postgres


class Releases:
    """The releases of a place.

    Args:
        place: a directory, which may not exist yet, and then holds no release; or a URL of an object store, such as
            `s3://bucket/releases`, of which releases are downloaded as they are needed, and verified.
        cache: of downloads; the user's when None.
        milvus: the server of releases whose rows are there; that of the environment when None.

    Attributes:
        root: the directory, or that of the copies.
        shelf: what is there, and how releases come and go.
        collections: those of releases whose rows Milvus holds.

    Raises:
        StorageError: a URL that cannot be opened. Of a place at one, every method that looks at it.
    """

    def __init__(self, place: str | Path, cache: Cache | None = None, milvus: MilvusServer | None = None) -> None:
        self.shelf: LocalReleases | RemoteReleases = (
            RemoteReleases(str(place), cache or Cache()) if is_url(place) else LocalReleases(local_path(place))
        )
        self.root = self.shelf.directory
        self._pointers: PointerStore = self.shelf.pointers
        self._milvus = milvus
        self.collections = HeldCollections(str(self) if is_url(place) else str(self.root.resolve()), self.milvus)

    def __str__(self) -> str:
        """The place."""
        return str(self.shelf)

    def milvus(self) -> MilvusServer:
        """The server of releases whose rows are there; raises SpecError where none is named."""
        if self._milvus is None:
            self._milvus = MilvusServer.named()
        return self._milvus

    def names(self) -> list[str]:
        """Every release's name, sorted."""
        return self.shelf.names()

    def current(self) -> str | None:
        """The published release's name; None when nothing is published.

        Raises:
            ReleaseNameError: CURRENT holds something that is no release name.
        """
        return _checked(self._pointers.read().current)

    def open(self, name: str, *, device: Device = "cpu", towers: bool = True, state: Path | None = None) -> Release:
        """Verify every file of a release and load it, ready to search.

        Args:
            name: the release's name.
            device: `gpu` searches flat and IVF bands on the first visible GPU, one caller at a time.
            towers: as of `Bundle.load`.
            state: a service's state directory, whose record of what was verified before is trusted, and kept.

        Raises:
            DeviceError: the device is not there, or too small.
            ReleaseNameError, ReleaseNotFoundError: no such release.
            ReleaseCorruptError, ReleaseVersionError, ReleaseMismatchError, BundleError: it is not what was built.
        """
        return self._opened(name, partial(open_release, device=device, towers=towers, state=state, milvus=self.milvus))

    def manifest(self, name: str) -> ReleaseManifest:
        """release.json of one release, checked, without reading the other files.

        Raises:
            ReleaseNameError, ReleaseNotFoundError: no such release.
            ReleaseCorruptError, ReleaseVersionError, ReleaseMismatchError: it is not what was written.
        """
        with self.manifests(name) as path:
            return read_release_manifest(path)

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """The directory of a release, or while this lasts one with its manifests; raises as `manifest`."""
        with self.shelf.manifests(name) as path:
            yield path

    def read_again(self, name: str, state: Path) -> None:
        """Read every byte of a release that was opened by the record in `state`, if that is an hour old and no other
        process is at it; what it finds is known to all that ask `verified`.

        Raises:
            LongtailIndexError, BundleError, OSError: as `open`.
            ReleaseNotFoundError: it was deleted meanwhile.
        """
        read_again(self.shelf.fetch(name), state)

    def verified(self, name: str, state: Path) -> Verified:
        """What a service with this state directory knows of a release: whether it is damaged, or to be read again."""
        return Verified(self.root / check_name(name), state)

    def verify(self, name: str) -> Release:
        """`open`, but into memory of its own: every byte is read and compared, and FAISS parses the index whole.

        Raises:
            LongtailIndexError, BundleError: as `open`.
        """
        return self._opened(name, partial(open_release, mapped=False, milvus=self.milvus))

    def forced(self) -> str | None:
        """The release that serves although it may refuse what clients send, if there is one."""
        return self._pointers.read().forced

    def staged(self) -> str | None:
        """The release that a service asks unseen, if there is one.

        Raises:
            ReleaseNameError: STAGED holds something that is no release name.
        """
        return _checked(self._pointers.read().staged)

    def floors(self, floors: Sequence[str] = (), max_drop: str | None = None) -> BucketFloors:
        """What `promise.toml` beside the releases says, and what a command line changes about it.

        Args:
            floors, max_drop: as of `BucketFloors.read`.

        Raises:
            FloorsError: a key or value that there is not; names the file or the option.
        """
        return BucketFloors.read(self.beside(FLOORS_FILE).parent, floors=floors, max_drop=max_drop)

    def beside(self, file: str) -> Path:
        """Where a small file is that lies beside the releases, such as experiments.toml; of one at a URL, its copy."""
        self.shelf.pull(file)
        return self.root / file

    def upload(self, release: Path) -> None:
        """Verify a release and copy it to the object store, whole or not at all; publishes nothing.

        Args:
            release: its directory.

        Raises:
            LongtailIndexError, BundleError: it is not what was built, or the store has another one by its name.
            StorageError: the store does not answer; then there is no such release, and the same call goes on.
        """
        opened = open_release(release.resolve(), mapped=False, towers=False, milvus=self.milvus)
        # Held on if the upload fails: it goes on later, or there is such a release already.
        self.collections.hold(opened.name, opened.index.collection)
        self.shelf.upload(opened.path)

    def stage(self, name: str) -> None:
        """Verify a release and have a service that follows CURRENT ask it, too, unseen, a share of live queries.

        Raises:
            LongtailIndexError, BundleError: as `open`; or it is CURRENT already.
        """
        check_name(name)
        with self._pointers.turn() as (now, move):
            if name == now.current:
                raise LongtailIndexError(f"stage: expected another release than CURRENT, received {name!r}")
            self._refuse_deleted(name, now)
            self.verify(name)
            move(now.model_copy(update={"staged": name}))

    def unstage(self) -> str | None:
        """Have no release asked unseen any more; returns the one that was.

        Raises:
            ReleaseNotFoundError: there is no such directory.
            ReleaseNameError: STAGED holds something that is no release name.
        """
        with self._pointers.turn() as (now, move):
            name = _checked(now.staged)
            if name is not None:
                move(now.model_copy(update={"staged": None}))
            return name

    def staged_report(self, name: str | None = None, *, state: Place | None = None) -> StagedReport:
        """What mirrored queries have shown of a release beside CURRENT.

        Args:
            name: the release's name; the staged one's when None.
            state: the service's state directory; by default `.state` of this one. Each replica has its own counts.

        Raises:
            ReleaseNotFoundError: nothing is staged, or nothing published.
            FloorsError: promise.toml cannot be read.
            NotStagedError: `state` is a database, which holds no such counts.
        """
        name, current = name or self.staged(), self.current()
        if name is None or current is None:
            raise ReleaseNotFoundError(
                f"{self.root}: expected a staged and a published release, found {name or 'none'} and "
                f"{current or 'none'}"
            )
        floors = self.floors().staged
        if isinstance(state, Postgres):
            raise NotStagedError(
                f"{name}: a database holds no counts of a staged release: each replica keeps its own in its directory "
                "(LONGTAIL_STATE); give that directory as --state"
            )
        return StagedReport(StagedCounts.read_all(state or self.root / ".state", name, current), floors)

    def compare(self, name: str, *, state: Place | None = None) -> Compatibility | None:
        """What clients of the published release would lose by another; None if nothing else is published.

        A published release that cannot be read must not hold up the next: then there is nothing to compare.

        Args:
            name: the other release's.
            state: the service's state, for the labels added to it; by default the directory `.state` of this one.

        Raises:
            LongtailIndexError, BundleError: as `open`, of the other one.
        """
        try:
            return compared_with(self.shelf, self.current(), name, Bundle.load(self.shelf.fetch(name) / BUNDLE), state)
        except StorageError:
            return None

    def publish(
        self, name: str, *, floors: BucketFloors | None = None, force: bool = False, state: Place | None = None
    ) -> FloorsReport:
        """Verify a release and point CURRENT at it; a service that follows CURRENT then loads it.

        Args:
            name: the release's name.
            floors: what its buckets must be given; by default what `promise.toml` says.
            force: publish a release that is below a floor, or takes something away from clients, too.
            state: the service's state, for the labels added to it; by default the directory `.state` of this one.

        Returns:
            The floors and how the release stands to them.

        Raises:
            FloorsError: promise.toml cannot be read.
            FloorsNotMetError: a bucket gets less than its floor.
            NotStagedError: mirrored queries have not shown what promise.toml asks for.
            IncompatibleReleaseError: it refuses query features that the published release takes, or drops labels that
                were added while serving.
            LongtailIndexError, BundleError: as `open`; CURRENT stays as it was.
        """
        check_name(name)
        with self._pointers.turn() as (now, move):
            current = _checked(now.current)
            self._refuse_deleted(name, now)
            floors = floors or self.floors()
            release = self.verify(name)
            after = BucketMetrics.at_default(name, release.bundle.manifest, floors.metric)
            report = floors.compare(after, metrics_of(self.shelf, current, floors.metric, force=force))
            if not force:
                report.check()
                if floors.staged is not None and current not in (None, name):
                    StagedReport(self.staged_report(name, state=state).counts, floors.staged).check(name)
                if (compared := compared_with(self.shelf, current, name, release.bundle, state)) is not None:
                    compared.check()
            self.collections.check(release)
            history = now.history if name == current else (*now.history, name)
            staged = None if now.staged == name else now.staged
            forced = name if force else None
            move(now.model_copy(update={"current": name, "history": history, "forced": forced, "staged": staged}))
            self.collections.publish(release)
            return report

    def rollback(self) -> str:
        """Point CURRENT back at the release published before, skipping deleted ones; returns its name.

        It is held to no floors, and may refuse what clients have begun to send since.

        Raises:
            ReleaseNotFoundError: nothing is published, or nothing was before.
            LongtailIndexError, BundleError: as `open`, if that release is damaged; CURRENT stays as it was.
        """
        with self._pointers.turn() as (now, move):
            _checked(now.current)
            history = self._history_before(now)
            if not history:
                raise ReleaseNotFoundError(
                    f"{self}: expected a release published before {now.current or 'any'}, found none in its history"
                )
            self._refuse_deleted(history[-1], now)
            release = self.verify(history[-1])
            move(now.model_copy(update={"current": history[-1], "forced": history[-1], "history": tuple(history)}))
            self.collections.publish(release)
            return history[-1]

    def prune(self, keep: int) -> list[str]:
        """Delete all but the `keep` newest releases, the current, the staged, and the one that `rollback` would go to.

        Returns the deleted names.

        Releases that cannot be read count as oldest. Leftovers of killed builds are deleted too.

        Raises:
            LongtailIndexError: keep < 1.
            ReleaseNotFoundError: there is no such directory.
            ReleaseNameError: CURRENT holds something that is no release name.
        """
        if keep < 1:
            raise LongtailIndexError(f"--keep: expected at least 1, received {keep}")
        with self._pointers.turn() as (now, move):
            needed = {_checked(now.current), now.staged, *self._history_before(now)[-1:]}
            newest_first = sorted(self.names(), key=self._age_key, reverse=True)
            old = [name for name in newest_first[keep:] if name not in needed]
            gone = sorted({*old, *now.deleting, *self.shelf.abandoned()} - needed)
            collections = self.collections.named(gone, self.manifests)
            if collections:
                self.milvus().version()  # before anything is begun
            if gone:
                # Said before it is done: from then on nobody publishes one of them, or takes its name.
                move(now.model_copy(update={"deleting": tuple(gone)}))
                self.collections.drop_unheld(collections)
                for name in gone:
                    self.shelf.delete(name)
        while gone:
            with suppress(PublishedMeanwhileError), self._pointers.turn() as (now, move):
                move(now.model_copy(update={"deleting": tuple(name for name in now.deleting if name not in gone)}))
                break
        return gone

    def bytes(self, name: str) -> int:
        """Bytes of a release's files; hard-linked ones count although they may exist once.

        Raises:
            ReleaseNameError, ReleaseNotFoundError: no such release.
        """
        return self.shelf.bytes(name)

    def _opened(self, name: str, open_: Callable[[Path], Release]) -> Release:
        """A release, of another copy where the one that was here is damaged and there is another."""
        try:
            return open_(self.shelf.fetch(name))
        except (ReleaseCorruptError, ReleaseMismatchError, BundleError):
            if (other := self.shelf.again(name)) is None:
                raise
            return open_(other)

    def _refuse_deleted(self, name: str, now: Pointers) -> None:
        if name in now.deleting:
            raise ReleaseNotFoundError(
                f"{self}: expected a release that stays, received {name!r}, which a prune deletes"
            )

    def _age_key(self, name: str) -> tuple[float, str]:
        try:
            return self.manifest(name).created_at.timestamp(), name
        except (LongtailIndexError, BundleError):
            return 0.0, name

    def _history_before(self, now: Pointers) -> list[str]:
        """Names published before the current one, oldest first; the last is a release that is still there."""
        history, there = list(now.history[:-1]), set(self.names())
        while history and history[-1] not in there:
            history.pop()
        return history


def _checked(name: str | None) -> str | None:
    return None if name is None else check_name(name)
