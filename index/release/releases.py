"""A directory of releases and the pointer to the one that serves.

`CURRENT` holds the name of the published release and is the only truth; `HISTORY` holds the names published up
to it, oldest first, so that `rollback` knows where to go. Each is replaced in one step, in an order that leaves
every crash in between consistent: names in HISTORY after CURRENT's last place were never reached. Writers take
turns through a lock that the system releases when a process dies; readers need none. `FORCED` holds the name of a
release that was published by force, or gone back to: a service takes it although it refuses what clients send. `STAGED`
holds the name of a release that a service asks unseen, beside the one that serves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longtail.bundle import Bundle, BundleError, remove_stale, replace_file
from longtail.index.errors import (
    LongtailIndexError,
    NotStagedError,
    ReleaseCorruptError,
    ReleaseNameError,
    ReleaseNotFoundError,
    ReleaseVersionError,
)
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.release.bucket_floors import BucketFloors, BucketMetrics, FloorsReport
from longtail.index.release.compatibility import Compatibility, compare_releases
from longtail.index.release.release import (
    BUNDLE,
    Release,
    check_name,
    open_release,
    read_again,
    read_bundle_manifest,
    read_prior_names,
    read_release_manifest,
)
from longtail.index.release.staged import StagedCounts, StagedReport
from longtail.index.release.verified import Verified
from longtail.state import Place

CURRENT = "CURRENT"
HISTORY = "HISTORY"
FORCED = "FORCED"
STAGED = "STAGED"
_LOCK = ".lock"


class Releases:
    """The releases below `root`.

    Args:
        root: a directory; it may not exist yet, and then holds no release.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def names(self) -> list[str]:
        """Every release directory's name, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def current(self) -> str | None:
        """The published release's name; None when nothing is published.

        Raises:
            ReleaseNameError: CURRENT holds something that is no release name.
        """
        try:
            content = (self.root / CURRENT).read_bytes()
        except FileNotFoundError:
            return None
        return check_name(content.decode("utf-8", "replace").strip())

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
        return open_release(self._existing(name), device=device, towers=towers, state=state)

    def manifest(self, name: str) -> ReleaseManifest:
        """release.json of one release, checked, without reading the other files.

        Raises:
            ReleaseNameError, ReleaseNotFoundError: no such release.
            ReleaseCorruptError, ReleaseVersionError, ReleaseMismatchError: it is not what was written.
        """
        return read_release_manifest(self._existing(name))

    def read_again(self, name: str, state: Path) -> None:
        """Read every byte of a release that was opened by the record in `state`, if that is an hour old and no other
        process is at it; what it finds is known to all that ask `verified`.

        Raises:
            LongtailIndexError, BundleError, OSError: as `open`.
            ReleaseNotFoundError: it was deleted meanwhile.
        """
        read_again(self._existing(name), state)

    def verified(self, name: str, state: Path) -> Verified:
        """What a service with this state directory knows of a release: whether it is damaged, or to be read again."""
        return Verified(self.root / check_name(name), state)

    def verify(self, name: str) -> Release:
        """`open`, but into memory of its own: every byte is read and compared, and FAISS parses the index whole.

        Raises:
            LongtailIndexError, BundleError: as `open`.
        """
        return open_release(self._existing(name), mapped=False)

    def forced(self) -> str | None:
        """The release that serves although it may refuse what clients send, if there is one."""
        try:
            return (self.root / FORCED).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None

    def staged(self) -> str | None:
        """The release that a service asks unseen, if there is one.

        Raises:
            ReleaseNameError: STAGED holds something that is no release name.
        """
        try:
            content = (self.root / STAGED).read_bytes()
        except FileNotFoundError:
            return None
        return check_name(content.decode("utf-8", "replace").strip())

    def stage(self, name: str) -> None:
        """Verify a release and have a service that follows CURRENT ask it, too, unseen, a share of live queries.

        Raises:
            LongtailIndexError, BundleError: as `open`; or it is CURRENT already.
        """
        check_name(name)
        with self._locked():
            if name == self.current():
                raise LongtailIndexError(f"stage: expected another release than CURRENT, received {name!r}")
            self.verify(name)
            replace_file(self.root / STAGED, f"{name}\n".encode())

    def unstage(self) -> str | None:
        """Have no release asked unseen any more; returns the one that was.

        Raises:
            ReleaseNotFoundError: there is no such directory.
            ReleaseNameError: STAGED holds something that is no release name.
        """
        with self._locked():
            name = self.staged()
            (self.root / STAGED).unlink(missing_ok=True)
            return name

    def staged_report(self, name: str | None = None, *, state: Place | None = None) -> StagedReport:
        """What mirrored queries have shown of a release beside CURRENT.

        Args:
            name: the release's name; the staged one's when None.
            state: the service's state directory; by default, and beside a database, `.state` of this one.

        Raises:
            ReleaseNotFoundError: nothing is staged, or nothing published.
            FloorsError: promise.toml cannot be read.
        """
        name, current = name or self.staged(), self.current()
        if name is None or current is None:
            raise ReleaseNotFoundError(
                f"{self.root}: expected a staged and a published release, found {name or 'none'} and "
                f"{current or 'none'}"
            )
        counts = StagedCounts.read_all(state if isinstance(state, Path) else self.root / ".state", name, current)
        return StagedReport(counts, BucketFloors.read(self.root).staged)

    def compare(self, name: str, *, state: Place | None = None) -> Compatibility | None:
        """What clients of the published release would lose by another; None if nothing else is published.

        A published release that cannot be read must not hold up the next: then there is nothing to compare.

        Args:
            name: the other release's.
            state: the service's state, for the labels added to it; by default the directory `.state` of this one.

        Raises:
            LongtailIndexError, BundleError: as `open`, of the other one.
        """
        return self._compare(name, Bundle.load(self._existing(name) / BUNDLE), state)

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
        with self._locked():
            floors = floors or BucketFloors.read(self.root)
            release = self.verify(name)
            current = self.current()
            after = BucketMetrics.at_default(name, release.bundle.manifest, floors.metric)
            report = floors.compare(after, self._current_metrics(current, floors.metric))
            if not force:
                report.check()
                if floors.staged is not None and current not in (None, name):
                    shown = StagedReport(self.staged_report(name, state=state).counts, floors.staged)
                    _check_staged(name, shown)
                if (compared := self._compare(name, release.bundle, state)) is not None:
                    compared.check()
            self._note_forced(name if force else None)
            if name != current:
                # HISTORY first: until CURRENT follows, the new name stands beyond its place and counts for nothing.
                self._write_history([*self._history(current), name])
                self._point_to(name)
            if self._staged_or_none() == name:
                (self.root / STAGED).unlink()
            return report

    def rollback(self) -> str:
        """Point CURRENT back at the release published before, skipping deleted ones; returns its name.

        It is held to no floors, and may refuse what clients have begun to send since.

        Raises:
            ReleaseNotFoundError: nothing is published, or nothing was before.
            LongtailIndexError, BundleError: as `open`, if that release is damaged; CURRENT stays as it was.
        """
        with self._locked():
            current = self.current()
            history = self._history_before(current)
            if not history:
                raise ReleaseNotFoundError(
                    f"{self.root}: expected a release published before {current or 'any'}, found none in {HISTORY}"
                )
            self.verify(history[-1])
            self._note_forced(history[-1])
            # What a killed publish left beyond CURRENT's place would count again where it is the name to go back to.
            self._write_history(self._history(current))
            self._point_to(history[-1])
            self._write_history(history)
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
        deleted = []
        with self._locked():
            current = self.current()
            needed = {current, self._staged_or_none(), *self._history_before(current)[-1:]}
            newest_first = sorted(self.names(), key=self._age_key, reverse=True)
            for name in newest_first[keep:]:
                if name not in needed:
                    self._delete(name)
                    deleted.append(name)
            remove_stale(self.root)
        return deleted

    def bytes(self, name: str) -> int:
        """Bytes of a release's files; hard-linked ones count although they may exist once.

        Raises:
            ReleaseNameError, ReleaseNotFoundError: no such release.
        """
        return sum(path.stat().st_size for path in self._existing(name).rglob("*") if path.is_file())

    def _staged_or_none(self) -> str | None:
        try:
            return self.staged()
        except ReleaseNameError:
            return None

    def _existing(self, name: str) -> Path:
        path = self.root / check_name(name)
        if not path.is_dir():
            raise ReleaseNotFoundError(f"{self.root}: expected one of its releases {self.names()}, received {name!r}")
        return path

    def _age_key(self, name: str) -> tuple[float, str]:
        try:
            return self.manifest(name).created_at.timestamp(), name
        except (LongtailIndexError, BundleError):
            return 0.0, name

    def _delete(self, name: str) -> None:
        """Rename out of sight first, so that a release is never seen half deleted."""
        hidden = self.root / f".{name}.{os.getpid()}.pruned.tmp"
        (self.root / name).rename(hidden)
        shutil.rmtree(hidden)

    def _history(self, current: str | None) -> list[str]:
        """Names published up to and including `current`, oldest first."""
        if current is None:
            return []
        try:
            names = (self.root / HISTORY).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            names = []
        while names and names[-1] != current:
            names.pop()
        return names or [current]

    def _history_before(self, current: str | None) -> list[str]:
        """Names published before `current`, oldest first; the last is a release that is still there."""
        history = self._history(current)[:-1]
        while history and not (self.root / history[-1]).is_dir():
            history.pop()
        return history

    def _current_metrics(self, current: str | None, metric: str) -> BucketMetrics | None:
        """CURRENT's figures; None where there is no such release that can be read, which must not hold up the next."""
        if current is None:
            return None
        try:
            return BucketMetrics.at_default(current, read_bundle_manifest(self.root / current), metric)
        except BundleError:
            return None

    def _compare(self, name: str, bundle: Bundle, state: Place | None) -> Compatibility | None:
        current = self.current()
        if current is None or current == name:
            return None
        try:
            priors = read_prior_names(self.root / current), read_prior_names(self.root / name)
            return compare_releases(
                (current, self.root / current / BUNDLE), (name, bundle), state or self.root / ".state", priors
            )
        except (BundleError, ReleaseCorruptError, ReleaseVersionError):
            return None

    def _note_forced(self, name: str | None) -> None:
        if name is None:
            (self.root / FORCED).unlink(missing_ok=True)
        else:
            replace_file(self.root / FORCED, f"{name}\n".encode())

    def _write_history(self, names: list[str]) -> None:
        replace_file(self.root / HISTORY, "".join(f"{name}\n" for name in names).encode())

    def _point_to(self, name: str) -> None:
        replace_file(self.root / CURRENT, f"{name}\n".encode())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, across processes."""
        if not self.root.is_dir():
            raise ReleaseNotFoundError(f"{self.root}: expected a directory of releases, found none")
        with (self.root / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _check_staged(name: str, report: StagedReport) -> None:
    if report.unmet:
        raise NotStagedError(
            f"{name} has not shown on mirrored queries what promise.toml asks for: {'; '.join(report.unmet)}; CURRENT "
            "stays as it was, longtail-index stage has it asked, and --force publishes all the same"
        )
