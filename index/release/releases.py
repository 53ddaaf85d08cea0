"""Manage releases and the pointer to the serving one, in a directory or at an object store (pointers.py)."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longtail.bundle import BundleError, BundleVersionError, Manifest
from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.integrity import read_manifest
from longtail.bundle.objects import is_url, local_path
from longtail.bundle.one_line import one_line
from longtail.bundle.promise import PROMISE_FILE, QualityPromise
from longtail.bundle.remote import downloading
from longtail.index.errors import (
    LongtailIndexError,
    NotPublishableError,
    PublishedMeanwhileError,
    ReleaseCorruptError,
    ReleaseMismatchError,
    ReleaseNotFoundError,
)
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.release.compatibility import refused_features, refused_priors, refused_queries
from longtail.index.release.local import LocalReleases
from longtail.index.release.milvus import HeldCollections
from longtail.index.release.pointers import Pointers
from longtail.index.release.release import (
    BUNDLE,
    Release,
    check_name,
    files_of,
    open_release,
    read_release_manifest,
)
from longtail.index.release.remote import RemoteReleases
from longtail.index.search.milvus_server import MilvusServer

EXPERIMENTS_FILE = "experiments.toml"
"""File in the directory of the releases from which the service reads its experiments."""


@dataclass(frozen=True)
class PublishReport:
    """Hold the figures of a release for people, and a sentence for each requirement that is not met."""

    lines: list[str]
    unmet: list[str]

    __repr__ = one_line


class Releases:
    """The releases of a directory or of an object store.

    Args:
        place: a directory, empty if it does not exist yet; or a URL of an object store, such as `s3://bucket/releases`,
            from which releases are downloaded and verified when they are needed.
        cache: root of downloads; None: the user's cache directory.
        milvus: server of releases whose rows Milvus holds; None: the server that the environment names.

    Attributes:
        root: the directory, or the directory of downloaded copies.
        shelf: storage of the releases: lists, fetches, uploads and deletes them.
        collections: the Milvus collections of these releases.
    """

    def __init__(self, place: str | Path, cache: Path | None = None, milvus: MilvusServer | None = None) -> None:
        self.shelf: LocalReleases | RemoteReleases = (
            RemoteReleases(str(place), cache) if is_url(place) else LocalReleases(local_path(place))
        )
        self.root = self.shelf.directory
        self._milvus = milvus
        self.collections = HeldCollections(str(self) if is_url(place) else str(self.root.resolve()), self.milvus)

    def __str__(self) -> str:
        """Return the directory or URL."""
        return str(self.shelf)

    def milvus(self) -> MilvusServer:
        """Get the Milvus server; raises SpecError if neither the caller nor the environment names one."""
        if self._milvus is None:
            self._milvus = MilvusServer.named()
        return self._milvus

    def names(self) -> list[str]:
        """Get every release's name, sorted."""
        return self.shelf.names()

    def pointers(self) -> Pointers:
        """Get the published, forced and staged release by one read of CURRENT; raises ReleaseCorruptError."""
        return self.shelf.pointers()

    def current(self) -> str | None:
        """Get the published release's name; None when nothing is published."""
        return self.pointers().current

    def staged(self) -> str | None:
        """Get the name of the release that gets shadow traffic; None without one."""
        return self.pointers().staged

    def open(self, name: str, *, device: Device = "cpu", towers: bool = True, state: Path | None = None) -> Release:
        """Verify a release and load it, ready to search.

        Args:
            device: `gpu` searches flat and IVF indexes on the first visible GPU, one caller at a time.
            towers: read the query and label towers too.
            state: a service's state directory; files that it verified and that are unchanged are not read again.

        Raises:
            LongtailIndexError, BundleError: there is no such release or device, or the release is damaged.
        """
        return self._opened(name, partial(open_release, device=device, towers=towers, state=state, milvus=self.milvus))

    def verify(self, name: str) -> Release:
        """Open a release without mapping its index: every byte is checked, and FAISS parses the whole index."""
        return self._opened(name, partial(open_release, mapped=False, milvus=self.milvus))

    def manifest(self, name: str) -> ReleaseManifest:
        """Get and check release.json of one release; reads no other file of it but the bundle's manifest."""
        with self.manifests(name) as path:
            return read_release_manifest(path)

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield the directory of a release, or a temporary one with its manifests."""
        with self.shelf.manifests(name) as path:
            yield path

    def promise(self) -> QualityPromise:
        """Read `promise.toml` of this directory; raises BundleError."""
        return QualityPromise.of_releases(self.beside(PROMISE_FILE))

    def beside(self, file: str) -> Path:
        """Get the path of a small file in the releases directory, such as experiments.toml.

        Where the releases are at a URL, this is the path of a fresh copy.
        """
        self.shelf.pull(file)
        return self.root / file

    def upload(self, release: Path) -> None:
        """Verify a release and copy it to the object store, completely or not at all.

        After a ObjectStoreError another call resumes the upload.
        """
        opened = open_release(release.resolve(), mapped=False, towers=False, milvus=self.milvus)
        # The collection stays held if the upload fails: a later call resumes it, or the release exists already.
        self.collections.hold(opened.name, opened.manifest.collection)
        self.shelf.upload(opened.path)

    def stage(self, name: str) -> None:
        """Verify a release and have services send it a share of live queries as shadow traffic."""
        check_name(name)
        with self.shelf.turn() as (now, move):
            if name == now.current:
                raise LongtailIndexError(f"stage: expected another release than CURRENT, received {name!r}")
            self._refuse_deleted(name, now)
            self.verify(name)
            move(now.model_copy(update={"staged": name}))

    def unstage(self) -> str | None:
        """End shadow traffic; returns the name of the release that received it."""
        with self.shelf.turn() as (now, move):
            if now.staged is not None:
                move(now.model_copy(update={"staged": None}))
            return now.staged

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
        with self.shelf.turn() as (now, move):
            self._refuse_deleted(name, now)
            if instead_of is not None and now.current != instead_of:
                raise PublishedMeanwhileError(
                    f"{name} is not published: expected {instead_of} to be published still, found {now.current}"
                )
            release = self.verify(name)
            bundle, index = self._manifests_of(now.current, force=force)
            lines, unmet = (promise or self.promise()).judge_release(release.bundle.manifest, bundle)
            if bundle is not None and index is not None and now.current != name:
                before, after = ([prior.name for prior in each.priors] for each in (index, release.manifest))
                unmet += refused_features(bundle, release.bundle.manifest) + refused_priors(before, after)
                unmet += refused_queries(index.queries, release.manifest.queries)
            if unmet and not force:
                raise NotPublishableError(
                    f"{name} is not published, CURRENT stays as it was: {'; '.join(unmet)}; `longtail-index "
                    "publish --force` publishes all the same",
                    unmet=unmet,
                )
            self.collections.check(release)
            update: dict[str, object] = {"current": name, "forced": name if force else None, "held": False}
            if name != now.current:
                update["history"] = (*now.history, name)
            if name == now.staged:
                update["staged"] = None
            move(now.model_copy(update=update))
            # Points the alias again, in case the release was copied here by hand and nothing holds its collection.
            self.collections.hold(name, release.manifest.collection)
            return PublishReport(lines, unmet)

    def rollback(self) -> str:
        """Point CURRENT back at the last published release that still exists; returns its name.

        Floors are not checked, and the release may refuse features that clients have begun to send since. Refreshes
        wait until somebody publishes.
        """
        with self.shelf.turn() as (now, move):
            history = self._history_before(now)
            if not history:
                raise ReleaseNotFoundError(
                    f"{self}: expected a release published before {now.current or 'any'}, found none in its history"
                )
            self._refuse_deleted(history[-1], now)
            held = self.verify(history[-1]).manifest.collection
            chosen = {"current": history[-1], "forced": history[-1], "held": True, "history": tuple(history)}
            move(now.model_copy(update=chosen))
            self.collections.hold(history[-1], held)
            return history[-1]

    def prune(
        self, keep: int, say: Callable[[str], None] = lambda _: None, *, among: Collection[str] | None = None
    ) -> list[str]:
        """Delete all but the `keep` newest releases and those in use; returns the deleted names.

        In use are the current release, the staged one, the one that `rollback` would choose, and the releases of arms
        in `experiments.toml`; `say` reports the latter. Unreadable releases count as oldest. Leftovers of killed builds
        are deleted too. Raises LongtailIndexError if `experiments.toml` cannot be read; then nothing is deleted.

        Args:
            among: names of the releases that may be deleted; None: all.
        """
        if keep < 1:
            raise LongtailIndexError(f"--keep: expected at least 1, received {keep}")
        with self.shelf.turn() as (now, move):
            in_arms = self._in_arms()
            needed = {now.current, now.staged, *self._history_before(now)[-1:]}
            newest_first = sorted(self.names() if among is None else among, key=self._age_key, reverse=True)
            for name in newest_first[keep:]:
                if name in in_arms - needed:
                    say(f"kept: {name}, which answers for an arm of {EXPERIMENTS_FILE}")
            needed |= in_arms
            old = [name for name in newest_first[keep:] if name not in needed]
            gone = sorted({*old, *now.deleting, *self.shelf.abandoned()} - needed)
            collections = self.collections.named(gone, self.manifests)
            if collections:
                self.milvus().version()  # an unreachable server must fail before anything is deleted
            if gone:
                # Announced before the deletion: from here on no writer publishes these or reuses their names.
                move(now.model_copy(update={"deleting": tuple(gone)}))
                self.collections.drop_unheld(collections)
                for name in gone:
                    self.shelf.delete(name)
        # The announcement is withdrawn last; another writer may change CURRENT at the same time, hence the retries.
        while gone:
            with suppress(PublishedMeanwhileError), self.shelf.turn() as (now, move):
                move(now.model_copy(update={"deleting": tuple(name for name in now.deleting if name not in gone)}))
                break
        return gone

    def _in_arms(self) -> set[str]:
        """Get the releases that arms of experiments name, of running experiments and of others."""
        path = self.beside(EXPERIMENTS_FILE)
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

    def bytes(self, name: str) -> int:
        """Compute the total size of a release's files, in bytes."""
        with self.manifests(name) as path:
            return sum(record.bytes for record in files_of(path).values())

    def _opened(self, name: str, open_: Callable[[Path], Release]) -> Release:
        """Open a release; a damaged copy of a remote release is downloaded again."""
        path = self.shelf.fetch(name)
        try:
            return open_(path)
        except BundleVersionError:
            raise  # the original at the store has the same version: downloading it again cannot help
        except (ReleaseCorruptError, ReleaseMismatchError, BundleError):
            if isinstance(self.shelf, LocalReleases):
                raise
            with downloading(self.root):
                shutil.rmtree(path, ignore_errors=True)
            return open_(self.shelf.fetch(name))

    def _manifests_of(
        self, current: str | None, *, force: bool
    ) -> tuple[Manifest, ReleaseManifest] | tuple[None, None]:
        """Get CURRENT's bundle and release manifest; two Nones if they cannot be read.

        Without `force`, ObjectStoreError passes through: a failing store must not switch the checks off.
        """
        try:
            if current is not None:
                with self.manifests(current) as path:
                    return read_manifest(path / BUNDLE), read_release_manifest(path)
        except (BundleError, LongtailIndexError):
            pass
        except ObjectStoreError:
            if not force:
                raise
        return None, None

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
        """Get the names published before the current one, oldest first; the last one still exists."""
        history, there = list(now.history[:-1]), set(self.names())
        while history and history[-1] not in there:
            history.pop()
        return history


def publish(
    releases: str | Path,
    name: str,
    *,
    promise: QualityPromise | None = None,
    force: bool = False,
) -> PublishReport:
    """Verify a release in a directory or at a URL, and publish it; see `Releases.publish`.

    Example:
        >>> from longtail.index import QualityPromise, Releases, build, publish
        >>> manifest = build("runs/model", "releases", name="first")
        >>> publish("releases", "first").unmet
        []
        >>> Releases("releases").current()
        'first'
        >>> publish("releases", "first", promise=QualityPromise(floors={"tail": 0.02}))
        Traceback (most recent call last):
        longtail.index.errors.NotPublishableError: first is not published, CURRENT stays as it was: expected ...
    """
    return Releases(releases).publish(name, promise=promise, force=force)
