"""Provide what all routes share: the loaded releases, the search queue, writes, reads and figures."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from longtail.bundle import LabelRecord
from longtail.bundle.errors import describe
from longtail.bundle.label_changes import record_json
from longtail.serving.core.answer_ids import AnswerIdError, read_answer_id
from longtail.serving.core.feedback import (
    ORGANIC_K,
    Choice,
    Event,
    estimate_work,
    read_choices,
    retrieve_unseen,
)
from longtail.serving.core.label_changes import LabelFollower
from longtail.serving.core.mirror import Mirror
from longtail.serving.core.queue import (
    BoundedExecutor,
    use_one_openmp_thread,
)
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.searches import Searches, delay_refusal
from longtail.serving.errors import (
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    ServingError,
    StorageError,
    TimedOutError,
    UnknownReleaseError,
)
from longtail.serving.events import EventSink
from longtail.serving.events.schema import event_json
from longtail.serving.monitoring import Monitoring, OfflineFigures
from longtail.serving.settings import Settings
from longtail.state import AnswerKeys, StoreError

logger = logging.getLogger(__name__)

_MAX_PENDING_WRITES, _MAX_PENDING_READS = 64, 16
_ANSWER_ID_SECONDS = 48 * 3600.0
"""Time during which feedback may name an answer by its `answer_id`."""
_WORK_ON_THE_LOOP = 1000
"""Most labels and features of feedback that the event loop reads and counts itself, as labels that take as long."""
_MOST_NAMED = 10
"""Most labels that a line of the log names."""
_MOST_AHEAD_SECONDS = 86_400.0
"""Times of events further ahead of the clock are errors, which no clock can wait for."""
_NOTABLE_SECONDS = 3600.0
"""Distance of event times from the clock that an operator should know."""
Result = TypeVar("Result")


class Service:
    """The service of one process, for routes and the follower: releases, label changes, feedback and figures.

    Attributes:
        searches: answers requests for labels, queries and vectors.
    """

    def __init__(self, settings: Settings, monitoring: Monitoring, events: EventSink) -> None:
        self.settings = settings
        self.monitoring = monitoring
        self._events = events
        self._now = ForwardClock(events.newest)
        self.keys = AnswerKeys(settings.state_location, _ANSWER_ID_SECONDS, time.time)
        self.draining = False
        self.surplus_connections = 0
        """Connections to give up, so that their clients connect to workers that hold fewer."""
        self.release_problem: str | None = None
        """Why the release that CURRENT names is not served; None: the published release is served."""
        self.current: Retriever | None = None
        """The release in service; None before the first is loaded."""
        self._loaded: dict[str, Retriever] = {}
        self._changes = LabelFollower(settings.state_location)
        self._changing = threading.Lock()
        self.mirror = Mirror(settings.state_directory, monitoring.slot.worker)
        seconds = settings.request_seconds
        self._writer, self._changer = (
            BoundedExecutor(name, max_pending=_MAX_PENDING_WRITES, timeout=seconds, initializer=use_one_openmp_thread)
            # Both search or embed: organic feedback is answered, and labels are embedded.
            for name in ("write", "labels")
        )
        self._reader = BoundedExecutor("read", max_pending=_MAX_PENDING_READS, timeout=seconds)
        self.searches = Searches(settings, monitoring, events, self.keys, self._now, self.mirror, self.retriever)

    @property
    def ready(self) -> bool:
        """Whether new requests should be sent here; /readyz and `longtail_ready` report this."""
        return self.monitoring.slot.ready

    def check_ready(self) -> None:
        """Raise NotReadyError, with the reason, if not ready."""
        if self.ready and not self._changes.behind:
            return
        if self.draining:
            raise NotReadyError("expected a service that takes requests, found one that is shutting down")
        self.retriever()
        if self._changes.behind:
            raise NotReadyError(
                "expected a database of state that can be read, found none, and so not what other replicas change"
            )
        slot = self.monitoring.slot
        raise NotReadyError(
            f"expected {slot.workers.workers} workers that have loaded a release, found "
            f"{slot.workers.ready}; others are starting"
        )

    def retriever(self, name: str | None = None, *, at: float | None = None) -> Retriever:
        """Get a loaded release, by default the current one, with labels available at `at`.

        A request calls this once, so that a swap or a label's end in between does not mix two states.

        Raises:
            NotReadyError: no release is loaded yet.
            UnknownReleaseError: the named release is not loaded.
        """
        current = self.current
        if current is None:
            if self.release_problem is not None:
                raise NotReadyError(
                    f"expected a release that can be served: the published release, {self.release_problem}; "
                    "the log says why"
                )
            raise NotReadyError("expected a published release, found none loaded yet; see longtail-index publish")
        if name is None or name == current.name:
            return current.view_at(at) if current.has_lifetimes else current
        staged = self.mirror.staged
        pinned = staged if staged is not None and staged.name == name else self._loaded.get(name)
        if pinned is None:
            loaded = [*self._loaded, *([] if staged is None else [staged.name])]
            raise UnknownReleaseError(
                f"expected one of the releases loaded, {loaded}, received {describe(name)}", field="release"
            )
        return pinned.view_at(at)

    def serve(self, retriever: Retriever, *, forced: bool = True) -> None:
        """Put a release into service; running requests finish with the release they took.

        Args:
            forced: accept a release that refuses features, priors or labels of the present one.

        Raises:
            UnservableReleaseError, StoreError: the release cannot be served; the present one stays.
        """
        with self._changing:
            # Changes are applied before the first answer, so that hidden labels never appear. A service that has read
            # the changes once may continue with those; the follower then reports why reading fails.
            with suppress(*([] if self.current is None else [StoreError, ServingError])):
                self._read_changes()
                if self.keys.signing is None:
                    self.keys.load()
            changed = self._changes.apply_changes(retriever)
            if self.current is not None and not forced:
                changed.check_compatible(self.current)
            undone = [] if self.current is None else changed.overlay.undone_patches(self.current.overlay)
            if undone:
                logger.warning(
                    "release %s: %d patched labels have the values of its newer table again, first %s; values to keep "
                    "belong into the table that it is trained on",
                    changed.name, len(undone), ", ".join(map(describe, undone[:_MOST_NAMED])),
                )  # fmt: skip
            offline = OfflineFigures.from_manifest(changed.manifest)
            self.monitoring.begin_release(
                changed.name, changed.buckets_L, changed.promises, offline, changed.forecast, changed.cooccurrence_until
            )
            if lacking := self.settings.groups.keys() - {feature.name for feature in changed.manifest.query_features}:
                logger.warning(
                    "LONGTAIL_GROUPS: release %s has no query feature %s: every query counts as missing there",
                    changed.name, ", ".join(map(repr, sorted(lacking))),
                )  # fmt: skip
            others = [loaded for loaded in self._loaded.values() if loaded.name != changed.name]
            # Not below 0, where a slice would count from the end.
            previous = others[max(0, len(others) - self.settings.keep_releases) :]
            self._loaded, self.current = {retriever.name: retriever for retriever in (*previous, changed)}, changed
            # Few requests name a replaced release, so its caches are dropped.
            for other in previous:
                other.catalogue.forget()
            self.set_release_problem(None)
            self._count_labels()
            self.mirror.use(self.mirror.staged, self.current)
        self.monitoring.slot.set_ready(True)
        # A stop signal may have set `draining` just before the line above.
        if self.draining:
            self.monitoring.slot.set_ready(False)

    def stage(self, retriever: Retriever | None) -> None:
        """Send shadow traffic to a release; None ends shadow traffic."""
        with self._changing:
            # First: if the changes cannot be applied, the release before must not stay staged.
            self.mirror.use(None, None)
            if retriever is not None:
                self.mirror.use(self._changes.apply_changes(retriever), self.current)

    def clock_problem(self) -> str | None:
        """Say how far events are dated ahead of the system's clock; None if they are not."""
        return self._now.problem()

    def set_release_problem(self, problem: str | None) -> None:
        """Set why the published release is not served; None: it is served."""
        self.release_problem = problem
        sentence = f"The published release, {problem}. The log says why."
        self.monitoring.set_trouble("refused_release", problem and sentence)

    def set_unreadable(self, unreadable: bool) -> None:
        """Set whether label changes of other processes cannot be read; such a replica is not ready."""
        sentence = "The changes of labels cannot be read: labels stay as they were. The service's own log says why."
        self.monitoring.set_trouble("label_log", sentence if unreadable else None)
        self._changes.unreadable = unreadable
        if self.current is not None:
            self.monitoring.slot.set_ready(not self._changes.behind and not self.draining)

    def drain(self) -> None:
        """Report not ready on /readyz, so that new requests go elsewhere; requests are still answered."""
        self.draining = True
        self.monitoring.slot.set_ready(False)

    def closes_connection(self) -> bool:
        """Check whether an answer closes its connection."""
        if self.surplus_connections:
            self.surplus_connections -= 1
            return True
        return self.draining

    async def change_labels(self, change: Callable[[Retriever], Sequence[LabelRecord]]) -> str:
        """Record label changes durably, and apply them.

        A thread of their own writes them, so that neither searches nor feedback wait.

        Args:
            change: creates the changes for the release in service.

        Returns:
            The name of that release.

        Raises:
            StorageError: the disk or the database failed; it is unknown whether anything has changed.
        """
        return await self._run(self._changer, lambda: self._change_labels(change))

    def _change_labels(self, change: Callable[[Retriever], Sequence[LabelRecord]]) -> str:
        with self._changing:
            try:
                self._read_changes()  # of other workers, on which those of this request build
                retriever = self.retriever()
                records = change(retriever)
                # Written first and then read back, so that all workers apply the changes in one order.
                self._changes.append(records, self._loaded.values())
                self._read_changes()
                self.monitoring.count("dropped", self._events.offer([_label_event(record) for record in records]))
            except StoreError as error:
                logger.error("label changes were refused: %s", error)
                raise StorageError(
                    "the label changes could not be written to the state; send them again later"
                ) from error
            return retriever.name

    def read_changes(self) -> None:
        """Read other workers' label changes; renew the signing key."""
        with self._changing:
            self._read_changes()
        self.keys.tend()

    async def record_feedback(self, events: Sequence[Event], client: str | None = None) -> int:
        """Record events durably; returns the number of labels that the release of their answer does not know.

        Args:
            client: fingerprint of the API key that sent the events; None without keys.

        Raises:
            StorageError: the events are not known to be recorded; they may be sent again.
            InvalidRequestError: an answer id is wrong, or the release cannot read the query features.
        """
        current, now, settings = self.retriever(), self._now(), self.settings
        organic = {i: event for i, event in enumerate(events) if event.answer_id is None}
        named = {i: event for i, event in enumerate(events) if event.answer_id is not None}
        # Answer ids are checked first: a wrong one refuses the whole request before anything is stored.
        choices = await self._read_choices(named, now, client) if named else []
        if organic:
            choices += await self.write(
                lambda: retrieve_unseen(organic, current, now=now, settings=settings, client=client)
            )
        await self._keep([choice.line for choice in choices])
        counted = [choice for choice in choices if choice.event not in current.negative_events]
        if estimate_work(events) > _WORK_ON_THE_LOOP:
            await asyncio.to_thread(self._count, counted)
        else:
            self._count(counted)
        chosen = [event for event in organic.values() if event.event not in current.negative_events]
        self.mirror.offer_choices(chosen, ORGANIC_K)
        return sum(choice.chosen.ids.unknown for choice in choices)

    def _count(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self.monitoring.count_choice(choice.chosen)

    async def _keep(self, lines: Sequence[bytes]) -> None:
        """Wait until events are stored durably; the verdict reports a failure."""
        stored = self._events.append(lines)
        try:
            await asyncio.wait_for(asyncio.wrap_future(stored), self.settings.request_seconds)
        except (TimeoutError, StorageError) as error:
            sentence = "Feedback cannot be kept, and is answered 503. The service's own log says why."
            self.monitoring.set_trouble("records", sentence)
            if isinstance(error, StorageError):
                raise
            raise StorageError("the events could not be stored in time; send them again") from None
        self.monitoring.set_trouble("records", None)

    async def _read_choices(self, events: dict[int, Event], now: float, client: str | None) -> list[Choice]:
        """Check answer ids, again with fresh keys if forged."""

        def read_here() -> list[Choice]:
            oldest = now - _ANSWER_ID_SECONDS
            read_answer = partial(read_answer_id, keys=self.keys.secrets, oldest=oldest)
            return read_choices(
                events, read_answer, self._loaded_or_current, now=now, settings=self.settings, client=client
            )

        async def read() -> list[Choice]:
            return await self.write(read_here) if estimate_work(events.values()) > _WORK_ON_THE_LOOP else read_here()

        try:
            try:
                return await read()
            except InvalidRequestError as error:
                # Another worker or replica may have made a new key, which this one has not read yet.
                if getattr(error.__cause__, "reason", "") != "forged":
                    raise
                await self.read(self.keys.refresh)
                return await read()
        except InvalidRequestError as error:
            if isinstance(error.__cause__, AnswerIdError):
                self.monitoring.count_refused_id(error.__cause__.reason)
            raise

    def _loaded_or_current(self, name: str) -> Retriever:
        try:
            return self.retriever(name)
        except UnknownReleaseError:
            return self.retriever()

    async def write(self, work: Callable[[], Result]) -> Result:
        """Run work on feedback in its own thread."""
        return await self._run(self._writer, work)

    async def read(self, work: Callable[[], Result]) -> Result:
        """Read figures or state in its own thread; raises StorageError."""
        try:
            return await self._run(self._reader, work)
        except (StoreError, OSError) as error:
            logger.error("state cannot be read: %s", error)
            raise StorageError("the state cannot be read now; send the request again later") from error

    async def _run(self, executor: BoundedExecutor, work: Callable[[], Result]) -> Result:
        try:
            return await executor.run(work)
        except (QueueFullError, TimedOutError) as error:
            await delay_refusal(self.monitoring, error)
            raise

    def close(self) -> None:
        """End the threads and close the files."""
        # In this order: searches offer events and mirror queries, so what they feed closes after them.
        self.searches.queue.close()
        self._writer.close()
        self._changer.close()
        self._reader.close()
        self.mirror.close()
        self._changes.close()
        self._events.close()
        self.monitoring.close()

    def _read_changes(self) -> None:
        staged = self.mirror.staged
        changed = self._changes.read([*self._loaded.values(), *([] if staged is None else [staged])], self.current)
        self._loaded = {name: changed[retriever] for name, retriever in self._loaded.items() if retriever in changed}
        if self.current is not None:
            self.current = changed[self.current]
            self._count_labels()
        if staged is not None:
            self.mirror.use(changed.get(staged), self.current)

    def _count_labels(self) -> None:
        overlay = self.retriever().overlay
        self.monitoring.set_label_counts(
            added=overlay.new_labels,
            hidden=len(overlay.hidden),
            available=lambda: int(self.retriever().availability["labels"]),
        )


def _label_event(record: LabelRecord) -> bytes:
    content = json.loads(record_json(record))
    features = content.get("features")
    return event_json(
        kind="label", time=record.at.timestamp(), labels=[record.id], event=content["op"],
        features=None if features is None else json.dumps(features),
    )  # fmt: skip


class ForwardClock:
    """Seconds since 1970 that go on when the clock is set back. Thread-safe.

    Args:
        newest: time of the newest stored event, in seconds since 1970.
    """

    def __init__(self, newest: float = 0.0) -> None:
        self._newest, self._start = newest, time.time()
        self._time = newest if newest - time.time() <= _MOST_AHEAD_SECONDS else 0.0
        self._monotonic, self._lock = time.monotonic(), threading.Lock()
        if problem := self.problem():
            logger.error(problem)

    def __call__(self) -> float:
        """Return the present time, never less than before."""
        with self._lock:
            monotonic = time.monotonic()
            self._time, self._monotonic = max(time.time(), self._time + monotonic - self._monotonic), monotonic
            return self._time

    def problem(self) -> str | None:
        """Say how far events are ahead of the clock; None up to an hour."""
        system_time = time.time()
        ahead = self() - system_time
        if ahead > _NOTABLE_SECONDS:
            hours = f"{ahead / 3600:,.0f} hours"
            return (
                f"Events are dated {hours} ahead of this machine's clock, because it has been set back: exports and "
                "refreshes take them once it is there."
            )
        if self._newest - system_time > _NOTABLE_SECONDS:
            newest, start = (
                datetime.fromtimestamp(at, UTC).strftime("%F %R UTC") for at in (self._newest, self._start)
            )
            return (
                f"Older events are dated up to {newest}, ahead of this machine's clock, and those since {start} before "
                "them: export with an earlier --since."
            )
        return None
