"""What every route works with: the releases that are loaded, the batcher that searches them, and the counters."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import faiss

from longtail.bundle import LabelLogError, LabelRecord
from longtail.bundle.errors import describe
from longtail.serving.core import feedback
from longtail.serving.core.batcher import Batcher
from longtail.serving.core.executor import Apart
from longtail.serving.core.label_changes import Changes
from longtail.serving.core.retriever import Retrieval, Retriever
from longtail.serving.errors import (
    NotReadyError,
    QueueFullError,
    ServingError,
    StorageError,
    TimedOutError,
    UnknownReleaseError,
)
from longtail.serving.http.schemas import Event, RetrieveRequest, SimilarRequest
from longtail.serving.monitoring import Answered, Live
from longtail.serving.monitoring.prometheus import Monitor
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_REFUSAL_SECONDS = 0.1
_MOST_WRITES, _MOST_READS = 64, 16

Result = TypeVar("Result")
Search = RetrieveRequest | SimilarRequest


@dataclass(frozen=True, slots=True)
class _Kind:
    """Searches that may share a batch."""

    retriever: Retriever
    similar: bool
    preview: bool


class Service:
    """The state of one process.

    Searching runs in threads of its own: FAISS and ONNX Runtime leave the interpreter to the event loop while they
    compute, so a long search stalls neither /livez nor the parsing of the next request.

    Args:
        settings: of the service.
        monitor: counts requests and releases.
        live: counts what head, torso and tail get.
    """

    def __init__(self, settings: Settings, monitor: Monitor, live: Live) -> None:
        self.settings = settings
        self.monitor = monitor
        self.live = live
        self.draining = False
        self.refused: str | None = None
        """The release that CURRENT names and that could not be loaded."""
        self._current: Retriever | None = None
        self._loaded: dict[str, Retriever] = {}
        self._changes = Changes(settings.state_directory / "labels.log")
        self._changing = threading.Lock()
        patience = settings.request_seconds
        self._writer = Apart("write", most=_MOST_WRITES, patience=patience, begin=one_openmp_thread)
        self._reader = Apart("read", most=_MOST_READS, patience=patience)
        self._batcher: Batcher[tuple[Search, str], list[bytes]] = Batcher(
            self._search,
            slots=1 if settings.device == "gpu" else settings.search_threads,
            window=settings.batch_window_ms / 1e3,
            most=settings.max_batch,
            limit=settings.queue_limit,
            patience=patience,
            begin=one_openmp_thread,
        )

    @property
    def ready(self) -> bool:
        """Whether new requests should come here."""
        return self._current is not None and not self.draining

    def retriever(self, name: str | None = None) -> Retriever:
        """A loaded release; the one being served unless named. Take it once: the next call may give another.

        Raises:
            NotReadyError: none is loaded yet.
            UnknownReleaseError: this one is not, or no longer.
        """
        current = self._current
        if current is None:
            if self.refused is not None:
                raise NotReadyError(
                    f"expected a release that can be served, found {self.refused}; the log says why not"
                )
            raise NotReadyError("expected a published release, found none loaded yet; see longtail-index publish")
        if name is None or name == current.name:
            return current
        pinned = self._loaded.get(name)
        if pinned is None:
            raise UnknownReleaseError(
                f"expected one of the releases loaded, {list(self._loaded)}, received {describe(name)}", field="release"
            )
        return pinned

    def serve(self, retriever: Retriever) -> None:
        """Answer from this release from now on; requests under way finish with the one they took.

        Raises:
            as `Retriever.after`; the release before goes on. The first release also as `Changes.read`.
        """
        with self._changing:
            # Before the first answer, not a moment after it: hidden labels must not be seen again. A service that has
            # read the log once goes on with what it knows, and the follower says what is wrong with it since.
            with suppress(*([] if self._current is None else [LabelLogError, OSError, ServingError])):
                self._read_changes()
            changed = self._changes.after(retriever)
            self.live.begin(changed.name, changed.buckets_L, changed.baseline)
            loaded = {name: kept for name, kept in self._loaded.items() if name != changed.name}
            loaded[changed.name] = changed
            for name in list(loaded)[: -1 - self.settings.keep_releases]:
                del loaded[name]
            self._loaded, self._current, self.refused = loaded, changed, None
            self._count_labels()
        self.monitor.release_swapped(changed.name)
        self.monitor.readiness(self.ready)

    def drain(self) -> None:
        """Say on /readyz that new requests should go elsewhere; they are answered all the same.

        Called by signal handlers, which may have interrupted the counters: those are told by another thread.
        """
        self.draining = True
        threading.Thread(target=self.monitor.readiness, args=(False,), daemon=True).start()

    async def search(self, retriever: Retriever, request: Search, request_id: str) -> list[bytes]:
        """The results of a request, JSON each, from one search that others may share.

        Raises:
            QueueFullError, TimedOutError: as `Batcher`.
            ServingError: as `Retriever.retrieve` and `Retriever.similar`.
        """
        kind = _Kind(retriever, isinstance(request, SimilarRequest), request.preview)
        return await self._counted(lambda: self._batcher.submit(kind, (request, request_id), _queries(request)))

    async def admit(self) -> None:
        """Turn a request away before its body is read, if there is no room for even one query.

        Raises:
            QueueFullError: there is none.
        """
        if self._batcher.depth >= self.settings.queue_limit:
            await self._shed(
                QueueFullError(f"expected at most {self.settings.queue_limit} queries waiting, found as many")
            )

    async def _shed(self, error: QueueFullError) -> NoReturn:
        """Refuse, but not at once: clients that come straight back would take the time that answers need."""
        self.monitor.shed()
        self.live.shed()
        await asyncio.sleep(_REFUSAL_SECONDS)
        raise error

    def change_labels(self, change: Callable[[Retriever], Sequence[LabelRecord]]) -> str:
        """Record label changes; they are on disk, and in every answer of this worker, when this returns.

        Args:
            change: what is asked for, checked against the release being served.

        Returns:
            That release's name.

        Raises:
            StorageError: the disk; nothing has changed.
            ServingError: as `change`.
        """
        with self._changing:
            retriever = self.retriever()
            records = change(retriever)
            try:
                self._changes.append(records)
            except LabelLogError as error:
                logger.error("label changes were refused: %s", error)
                raise StorageError(
                    "expected a log that label changes can be written to, found none; none was made, and the service's "
                    "log says why"
                ) from error
            self._read_changes()
            return retriever.name

    def read_changes(self) -> None:
        """Answer with what other workers have changed. Raises as `Changes.read`; nothing has changed then."""
        with self._changing:
            self._read_changes()

    def take_feedback(self, events: Sequence[Event]) -> int:
        """Record events; raises as `feedback.take`, but StorageError for the disk."""
        try:
            return feedback.take(events, self.retriever(), self.live, shadow_k=self.settings.shadow_k)
        except sqlite3.Error as error:
            logger.error("feedback was refused: %s", error)
            raise StorageError("expected a disk to write feedback to, found none; send it again later") from error

    def report(self) -> dict[str, Any]:
        """Raises as `Live.report`, but StorageError for the disk."""
        try:
            return self.live.report()
        except (sqlite3.Error, OSError) as error:
            logger.error("figures cannot be read: %s", error)
            raise StorageError("expected figures that can be read, found none; the log says why not") from error

    async def write(self, work: Callable[[], Result]) -> Result:
        """Record something, in a thread that no search waits for; raises as `Apart.run`."""
        return await self._counted(lambda: self._writer.run(work))

    async def read(self, work: Callable[[], Result]) -> Result:
        """Read figures, in a thread that neither searches nor writes wait for; raises as `Apart.run`."""
        return await self._counted(lambda: self._reader.run(work))

    async def _counted(self, begin: Callable[[], Awaitable[Result]]) -> Result:
        """What is begun, and a count of what the service could not do in time or had no room for."""
        try:
            return await begin()
        except QueueFullError as error:
            await self._shed(error)
        except TimedOutError:
            self.monitor.timed_out()
            raise

    def close(self) -> None:
        """Let the threads and files go."""
        self._batcher.close()
        self._writer.close()
        self._reader.close()
        self.live.close()

    def _read_changes(self) -> None:
        loaded = self._changes.read(list(self._loaded.values()))
        self._loaded = {retriever.name: retriever for retriever in loaded}
        if self._current is not None:
            self._current = self._loaded[self._current.name]
            self._count_labels()

    def _count_labels(self) -> None:
        overlay = self.retriever().overlay
        self.live.set_labels(added=overlay.new, hidden=len(overlay.hidden))

    def _search(
        self, kind: Hashable, works: Sequence[tuple[Search, str]], waited: Sequence[float]
    ) -> list[list[bytes] | Exception]:
        """What a search thread does with a batch. A request that cannot be answered costs only itself."""
        assert isinstance(kind, _Kind)
        requests = [request for request, _ in works]
        try:
            if kind.similar:
                retrieval = kind.retriever.similar([each for each in requests if isinstance(each, SimilarRequest)])
            else:
                asked = [each for each in requests if isinstance(each, RetrieveRequest)]
                retrieval = kind.retriever.retrieve([query for each in asked for query in each.queries])
        except Exception as error:
            if len(works) == 1:
                return [error]
            return [self._search(kind, [work], [wait])[0] for work, wait in zip(works, waited, strict=True)]
        self.monitor.batch(retrieval, waited, self._batcher.depth)
        if not kind.preview:
            answered = _answered(kind.retriever, works, retrieval)
            self.monitor.retrieval(retrieval, answered.buckets_N)
            self.live.answered(answered)
        split: list[list[bytes] | Exception] = []
        start = 0
        for request in requests:
            end = start + _queries(request)
            split.append(retrieval.results[start:end])
            start = end
        return split


def one_openmp_thread() -> None:
    """Keep FAISS in the calling thread: OpenMP would start a pool for each thread that searches."""
    faiss.omp_set_num_threads(1)


def _queries(request: Search) -> int:
    return len(request.queries) if isinstance(request, RetrieveRequest) else len(request.labels)


def _answered(retriever: Retriever, works: Sequence[tuple[Search, str]], retrieval: Retrieval) -> Answered:
    catalogue, rows_N = retriever.catalogue, retrieval.rows_N
    return Answered(
        release=retriever.name,
        request_ids=[id_ for request, id_ in works for _ in range(_queries(request))],
        places=[place for request, _ in works for place in range(_queries(request))],
        bias_removal_B=retrieval.bias_removal_B,
        fingerprints_N=catalogue.fingerprints(rows_N),
        rows_N=catalogue.catalogue_rows(rows_N),
        scores_N=retrieval.scores_N,
        ends_B=retrieval.ends_B,
        buckets_N=catalogue.buckets(rows_N),
        counts_N=catalogue.counts(rows_N),
    )
