"""What every route works with: the loaded releases, the search queue, writes, reads and figures."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from longtail.bundle import LabelRecord
from longtail.bundle.errors import describe
from longtail.index import EngineUnavailableError
from longtail.serving.core.experiments import Experiment
from longtail.serving.core.exploration import Draws, Lottery
from longtail.serving.core.feedback import Event, record_events
from longtail.serving.core.label_changes import LabelFollower
from longtail.serving.core.mirror import Mirror
from longtail.serving.core.queries import Query, QueryInArm, SearchOptions, SimilarQuery, ToEmbed, features_json
from longtail.serving.core.queue import BoundedExecutor, Cost, SearchQueue, client, use_one_openmp_thread
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import (
    EngineError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    ServingError,
    StorageError,
    TimedOutError,
    UnknownReleaseError,
)
from longtail.serving.monitoring import AnsweredBatch, Monitoring, OfflineFigures
from longtail.serving.settings import Settings
from longtail.state import StoreError

logger = logging.getLogger(__name__)

_MAX_PENDING_WRITES, _MAX_PENDING_READS = 64, 16
_WAITING_ANSWERS = 8
"""Largest requests whose labels and bytes may wait together."""
_REFUSAL_SECONDS = 0.1
"""Refusals wait: clients that come straight back would take the time that answers need."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Search:
    """One request of the queue.

    Attributes:
        retriever: the release that answers.
        options: queries; or, for each label whose nearest labels are wanted, its request.
        embed: what is to embed in their place.
        answer_id: the name by which feedback refers to the answer.
        request_id: the client's name for the request; by default `answer_id`.
        preview: leave the answers out of the figures.
        in_request: positions of the queries in the request; None: these are all.
    """

    retriever: Retriever
    options: Sequence[SearchOptions] = ()
    embed: ToEmbed | None = None
    answer_id: str = ""
    request_id: str = ""
    preview: bool = False
    in_request: Sequence[int] | None = None

    @property
    def cost(self) -> Cost:
        """Compute the cost, with the bytes of an answer whose labels are as long as the average one."""
        if self.embed is not None:
            return Cost(self.embed.count, self.embed.count)
        mean_bytes = self.retriever.catalogue.mean_bytes
        bytes_ = sum([query.k * mean_bytes(query.display) for query in self.options])
        return Cost(len(self.options), sum([query.depth for query in self.options]), bytes_)


class Service:
    """The service of one process, for routes and the follower: search, label changes, feedback and figures.

    Searching runs in threads of its own: FAISS and ONNX Runtime leave the interpreter to the event loop while they
    compute, so a long search stalls neither /livez nor the parsing of the next request.
    """

    def __init__(self, settings: Settings, monitoring: Monitoring) -> None:
        self.settings = settings
        self.monitoring = monitoring
        self.draining = False
        self.release_problem: str | None = None
        """What is wrong with the release that CURRENT names; None: it is served as it was published."""
        self.experiment: Experiment | None = None
        """The experiment that runs, if one does."""
        self._current: Retriever | None = None
        self._loaded: dict[str, Retriever] = {}
        self._changes = LabelFollower(settings.place)
        self._changing = threading.Lock()
        self.mirror = Mirror(settings.state_directory, monitoring.seat.worker)
        seconds = settings.request_seconds
        self._writer, self._changer = (
            BoundedExecutor(name, max_pending=_MAX_PENDING_WRITES, timeout=seconds, initializer=use_one_openmp_thread)
            for name in ("write", "labels")
        )
        self._reader = BoundedExecutor("read", max_pending=_MAX_PENDING_READS, timeout=seconds)
        self._lottery = Lottery()
        self.queue: SearchQueue[Search, list[Any]] = SearchQueue(
            self._answer,
            threads=1 if settings.device == "gpu" else settings.search_threads,
            window=settings.batch_window_ms / 1e3,
            max_batch=settings.max_batch,
            limit=Cost(
                settings.queue_limit,
                _WAITING_ANSWERS * max(settings.max_total_k, settings.max_k),
                _WAITING_ANSWERS * settings.max_answer_bytes,
            ),
            timeout=seconds,
            set_depth=monitoring.metrics.queue_depth.set,
        )

    @property
    def ready(self) -> bool:
        """Whether new requests should come here, as /readyz and `longtail_ready` say."""
        return self.monitoring.seat.ready

    def check_ready(self) -> None:
        """Refuse where new requests should not come here.

        Raises:
            NotReadyError: why not.
        """
        if self.ready and not self._changes.behind:
            return
        if self.draining:
            raise NotReadyError("expected a service that takes requests, found one that is shutting down")
        self.retriever()
        self._changes.check_abreast()
        seat = self.monitoring.seat
        raise NotReadyError(
            f"expected {seat.workers.workers} workers that have loaded a release, found "
            f"{seat.workers.ready}; others are starting"
        )

    @property
    def problem(self) -> str | None:
        """Why no new requests should come here, or which published release is not served."""
        if self.draining:
            return "the service is shutting down"
        if self.release_problem is not None:
            return f"the published release, {self.release_problem}; the log says why"
        return None if self._current is not None else "no release is loaded yet; see longtail-index publish"

    @property
    def served(self) -> Retriever | None:
        """The release being served, once one is."""
        return self._current

    def retriever(self, name: str | None = None) -> Retriever:
        """Get a loaded release, by default the current one; call it once for each request.

        Raises:
            NotReadyError: none is loaded yet.
            UnknownReleaseError: this one is not loaded.
        """
        current = self._current
        if current is None:
            if self.release_problem is not None:
                raise NotReadyError(f"expected a release that can be served: {self.problem}")
            raise NotReadyError("expected a published release, found none loaded yet; see longtail-index publish")
        if name is None or name == current.name:
            return current
        staged = self.mirror.staged
        pinned = staged if staged is not None and staged.name == name else self._loaded.get(name)
        if pinned is None:
            loaded = [*self._loaded, *([] if staged is None else [staged.name])]
            raise UnknownReleaseError(
                f"expected one of the releases loaded, {loaded}, received {describe(name)}", field="release"
            )
        return pinned

    def serve(self, retriever: Retriever, *, forced: bool = True) -> None:
        """Answer from this release from now on; requests under way finish with the one they took.

        Args:
            retriever: the release.
            forced: even if clients of the release before lose features or labels.

        Raises:
            UnservableReleaseError, StoreError: it cannot be served; the release before stays.
        """
        with self._changing:
            # Before the first answer, not a moment after it: hidden labels must not be seen again. A service that has
            # read the log once goes on with what it knows, and the follower says what is wrong with it since.
            with suppress(*([] if self._current is None else [StoreError, ServingError])):
                self._read_changes()
            changed = self._changes.apply_to(retriever)
            if self._current is not None and not forced:
                changed.check_compatible(self._current)
            offline = OfflineFigures.of(changed.manifest)
            self.monitoring.begin_release(changed.name, changed.buckets_L, changed.baseline, offline)
            others = [kept for kept in self._loaded.values() if kept.name != changed.name]
            kept = others[max(0, len(others) - self.settings.keep_releases) :]
            self._loaded, self._current = {each.name: each for each in (*kept, changed)}, changed
            # Few ask a release that another has followed: what is only there to be quick again is not kept for them.
            for other in kept:
                other.catalogue.forget()
            self.set_release_problem(None)
            self._count_labels()
            self.mirror.use(self.mirror.staged, self._current)
        self.monitoring.seat.set_ready(True)
        # A signal may have come in between.
        if self.draining:
            self.monitoring.seat.set_ready(False)

    def stage(self, retriever: Retriever | None) -> None:
        """Send a share of live queries to this release, too, as shadow traffic; None: to no other."""
        with self._changing:
            self.mirror.use(None, None)
            if retriever is not None:
                self.mirror.use(self._changes.apply_to(retriever), self._current)

    def set_release_problem(self, problem: str | None) -> None:
        """Set what is wrong with the release that CURRENT names, beginning with its name; None: nothing."""
        self.release_problem = problem
        told = f"The published release, {problem}. The log says why."
        self.monitoring.figures.set_trouble("refused_release", problem and told)

    def set_unreadable(self, unreadable: bool) -> None:
        """Set whether others' label changes cannot be read; a replica that cannot read them is not ready."""
        told = "The changes of labels cannot be read: labels stay as they were. The service's own log says why."
        self.monitoring.figures.set_trouble("label_log", told if unreadable else None)
        self._changes.unreadable = unreadable
        if self._current is not None:
            self.monitoring.seat.set_ready(not self._changes.behind and not self.draining)

    def drain(self) -> None:
        """Say on /readyz that new requests should go elsewhere; they are answered all the same."""
        self.draining = True
        self.monitoring.seat.set_ready(False)

    async def retrieve(
        self,
        queries: Sequence[Query],
        answer_id: str,
        request_id: str,
        *,
        release: str | None,
        preview: bool,
        unit: str | None,
        arm: str | None,
    ) -> tuple[list[Any], str]:
        """Answer queries, each as the arm of its unit does while an experiment runs.

        Args:
            queries, answer_id, request_id, preview: as of `Search`.
            release: that answers; None: the current one, or that of an arm.
            unit, arm: of the request.

        Returns:
            The results, and the release that answered all; of several, the one of queries without an arm's.

        Raises:
            ServingError: as `retriever` and `search`; there is no such arm.
        """
        retriever, experiment = self.retriever(release), self.experiment
        search = Search(retriever, queries, None, answer_id, request_id, preview)
        if experiment is None:
            return await self.search(search), retriever.name
        in_arms, answering = list[QueryInArm](), list[Retriever]()
        for place, query in enumerate(queries):
            own = f"{place}:{answer_id}"
            given, name = experiment.assign(query, own, unit=unit, arm=arm, pinned=release is not None)
            in_arms.append(given)
            try:
                answering.append(retriever if name is None else self.retriever(name))
            except UnknownReleaseError:  # since a moment
                answering.append(retriever)
                in_arms[-1] = query.in_arm(replace(given.arm, counted=False), {})
        places_of = {each: [place for place, one in enumerate(answering) if one is each] for each in answering}

        async def answer(each: Retriever, places: list[int]) -> tuple[str, list[Any]]:
            group = replace(search, retriever=each, options=[in_arms[place] for place in places], in_request=places)
            try:
                return each.name, await self.search(group)
            except InvalidRequestError:
                # No request is refused because of an arm: without one, it says what is wrong with the request itself.
                plain = [queries[place].in_arm(replace(in_arms[place].arm, counted=False), {}) for place in places]
                return retriever.name, await self.search(replace(group, retriever=retriever, options=plain))

        found = await asyncio.gather(*(answer(each, places) for each, places in places_of.items()))
        of_place = dict(zip(chain(*places_of.values()), chain(*(results for _, results in found)), strict=True))
        names = {name for name, _ in found}
        return [of_place[place] for place in range(len(in_arms))], names.pop() if len(names) == 1 else retriever.name

    async def search(self, search: Search) -> list[Any]:
        """Return the results of one request, or its vectors, float32 [D], from a batch that others may share.

        Raises:
            QueueFullError, TimedOutError: the service is too busy.
            InvalidRequestError: the answer would be too long, or the release cannot answer the request.
        """
        cost, limit = search.cost, self.settings.max_answer_bytes
        if cost.bytes > limit:
            raise InvalidRequestError(
                f"expected an answer of at most {limit} bytes, received a request for "
                f"about {cost.bytes:.0f}: fewer labels, or columns in `display`, make less",
                field="k" if isinstance(search.options[0], SimilarQuery) else "queries",
            )
        alike = search.retriever, type(search.embed or search.options[0]), search.preview
        try:
            return await self.queue.submit(alike, search, cost, client.get())
        except (QueueFullError, TimedOutError) as error:
            await self._count_refused(error)
            raise

    def _answer(self, searches: Sequence[Search], waited: Sequence[float]) -> Sequence[list[Any] | Exception]:
        """Return the results or an error of each of a batch; one that cannot be answered costs only itself."""
        try:
            return self._search(searches, waited)
        except EngineUnavailableError as error:
            # Alone they would fare no better, and each would wait as long. The server's words are the operator's.
            refused = EngineError(
                "expected the server that holds the index to answer, found that it does not now", seconds=error.seconds
            )
            self.monitoring.metrics.unanswered.inc(sum(search.cost.queries for search in searches))
            return [refused] * len(searches)
        except Exception as error:
            if len(searches) > 1:
                return [self._answer([search], [wait])[0] for search, wait in zip(searches, waited, strict=True)]
            places = searches[0].in_request
            if places is not None and isinstance(error, ServingError) and (error.field or "").startswith("queries."):
                return [error.renumbered("queries", places)]
            return [error]

    def _search(self, searches: Sequence[Search], waited: Sequence[float]) -> Sequence[list[Any]]:
        """Answer a batch of requests of one kind to one release, and count it."""
        retriever, settings, started = searches[0].retriever, self.settings, perf_counter()
        if to_embed := [search.embed for search in searches if search.embed is not None]:
            vectors, seconds = retriever.embed(to_embed), {"encode": perf_counter() - started}
            self.monitoring.metrics.count_search(sum(each.count for each in to_embed), waited, seconds)
            return vectors
        names = [
            (search, place)
            for search in searches
            for place in (range(len(search.options)) if search.in_request is None else search.in_request)
        ]
        asked = [each for search in searches for each in search.options]
        queries = [each for each in asked if isinstance(each, Query)]
        similar = [each for search in searches if isinstance(each := search.options[0], SimilarQuery)]
        draws = Draws(self._lottery, [f"{place}:{search.answer_id}" for search, place in names])
        retrieval = retriever.retrieve(queries, draws) if queries else retriever.similar(similar, draws)
        if not searches[0].preview:
            self.monitoring.metrics.count_search(len(names), waited, retrieval.seconds)
            fingerprints_N, rows_N, buckets_N, counts_N = retriever.catalogue.recorded(retrieval.rows_N)
            arms_B, restricted = [query.arm for query in queries], [each.restricted for each in asked]
            recorded = settings.record_features and queries
            answered = AnsweredBatch(
                release=retriever.name,
                answer_ids=[search.answer_id for search, _ in names],
                places=[place for _, place in names],
                bias_removal_B=retrieval.bias_removal_B,
                popularity_B=retrieval.popularity_B,
                fingerprints_N=fingerprints_N,
                rows_N=rows_N,
                scores_N=retrieval.scores_N,
                ends_B=retrieval.ends_B,
                buckets_N=buckets_N,
                counts_N=counts_N,
                propensities_N=retrieval.propensities_N,
                explored=retrieval.explored,
                features_B=[None if query.features is None else features_json(query.features) for query in queries]
                if recorded
                else None,
                request_ids=[
                    search.request_id if search.request_id != search.answer_id else None for search, _ in names
                ],
                arms_B=arms_B if any(arms_B) else None,
                restricted_B=np.array(restricted) if any(restricted) else None,
            )
            self.monitoring.count_answers(answered, retrieval.unknown)
            if queries and self.mirror.staged is not None:
                self.mirror.offer(retriever, queries, retrieval, settings.mirror_share)
        results = iter(retrieval.results)
        return [list(islice(results, len(search.options))) for search in searches]

    def change_labels(self, change: Callable[[Retriever], Sequence[LabelRecord]]) -> str:
        """Record label changes; they are on disk, and in every answer of this worker, when this returns.

        Args:
            change: makes records, checked against the release being served.

        Returns:
            That release's name.

        Raises:
            StorageError: the disk or the database; nothing is known to have changed.
        """
        with self._changing:
            retriever = self.retriever()
            records = change(retriever)
            try:
                self._changes.append(records, self._loaded.values())
                self._read_changes()
            except StoreError as error:
                logger.error("label changes were refused: %s", error)
                raise StorageError(
                    "expected a state that label changes can be written to, found none: send them again later"
                ) from error
            return retriever.name

    def read_changes(self) -> None:
        """Read what other workers have changed."""
        with self._changing:
            self._read_changes()

    def record_feedback(self, events: Sequence[Event]) -> None:
        """Record events; they are on disk when this returns.

        Raises:
            StorageError: the disk; nothing was recorded, or what may be sent again.
            InvalidRequestError: query features that the release cannot read.
        """
        k, features = self.settings.shadow_k, self.settings.record_features
        try:
            record_events(events, self.retriever(), self.monitoring.figures, shadow_k=k, record_features=features)
        except StoreError as error:
            logger.error("feedback was refused: %s", error)
            raise StorageError("expected a state to write feedback to, found none; send it again later") from error
        self.mirror.offer_choices(events, k)

    def read_figures(self, report: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `report` makes of the figures; raises StorageError for the disk."""
        try:
            return report()
        except (StoreError, OSError) as error:
            logger.error("figures cannot be read: %s", error)
            raise StorageError("expected figures that can be read, found none; the log says why not") from error

    async def write(self, work: Callable[[], Result]) -> Result:
        """Record feedback, in a thread that no search waits for."""
        return await self._run(self._writer, work)

    async def change(self, work: Callable[[], Result]) -> Result:
        """Change labels, in a thread that neither searches nor feedback wait for."""
        return await self._run(self._changer, work)

    async def read(self, work: Callable[[], Result]) -> Result:
        """Read figures, in a thread that neither searches nor writes wait for."""
        return await self._run(self._reader, work)

    async def _run(self, executor: BoundedExecutor, work: Callable[[], Result]) -> Result:
        try:
            return await executor.run(work)
        except (QueueFullError, TimedOutError) as error:
            await self._count_refused(error)
            raise

    async def _count_refused(self, error: ServingError) -> None:
        if isinstance(error, TimedOutError):
            self.monitoring.metrics.timeouts.inc()
        else:
            self.monitoring.count_shed()
            await asyncio.sleep(_REFUSAL_SECONDS)

    def close(self) -> None:
        """End the threads and close the files."""
        self.queue.close()
        self._writer.close()
        self._changer.close()
        self._reader.close()
        self.mirror.close()
        self._changes.close()
        self.monitoring.figures.close()

    def _read_changes(self) -> None:
        staged = self.mirror.staged
        changed = self._changes.read([*self._loaded.values(), *([] if staged is None else [staged])], self._current)
        self._loaded = {name: changed[each] for name, each in self._loaded.items() if each in changed}
        if self._current is not None:
            self._current = changed[self._current]
            self._count_labels()
        if staged is not None:
            self.mirror.use(changed.get(staged), self._current)

    def _count_labels(self) -> None:
        overlay = self.retriever().overlay
        self.monitoring.figures.set_label_counts(added=overlay.new_labels, hidden=len(overlay.hidden))
