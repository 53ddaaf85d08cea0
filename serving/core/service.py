"""Provide what all routes share: the loaded releases, the search queue, writes, reads and figures."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from random import random
from time import perf_counter, time
from typing import Any, TypeVar

import orjson

from longtail.bundle import LabelRecord
from longtail.bundle.errors import describe
from longtail.bundle.label_changes import record_json
from longtail.index import EngineUnavailableError
from longtail.serving.core import lifetimes
from longtail.serving.core.answer_ids import AnswerIdError, read_answer_id, sign_answer
from longtail.serving.core.experiments import Experiment
from longtail.serving.core.exploration import Draws, Lottery
from longtail.serving.core.feedback import (
    Choice,
    Event,
    arm_fields,
    read_choices,
    recorded_features,
    recorded_options,
    retrieve_unseen,
)
from longtail.serving.core.known_queries import queries_for
from longtail.serving.core.label_changes import LabelFollower
from longtail.serving.core.mirror import Mirror
from longtail.serving.core.queries import QueriesFor, Query, QueryInArm, SearchOptions, SimilarQuery, ToEmbed, entries
from longtail.serving.core.queue import (
    LABELS_PER_QUERY,
    BoundedExecutor,
    Cost,
    SearchQueue,
    add_up,
    client,
    use_one_openmp_thread,
)
from longtail.serving.core.retriever import Retrieval, Retriever
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
from longtail.serving.events import EventSink
from longtail.serving.events.clock import ForwardClock
from longtail.serving.events.schema import event_json
from longtail.serving.monitoring import Monitoring, OfflineFigures
from longtail.serving.monitoring.records import AnsweredSearch
from longtail.serving.settings import Settings
from longtail.state import AnswerKeys, StoreError

logger = logging.getLogger(__name__)

_MAX_PENDING_WRITES, _MAX_PENDING_READS = 64, 16
_WAITING_ANSWERS = 8
"""Number of requests of the largest size that may wait together, by labels and by bytes."""
_STEP = Cost(1, extra=8000)
"""Cost of a turn of an explanation: some 40 searches, which take no room from requests that wait."""
_STEP_SECONDS = 0.002
"""Time from which an explanation lets others search."""
_WORK_ON_THE_LOOP = 1000
"""Most labels and features of feedback that the event loop reads and counts itself, as labels that take as long."""
_WORK_OF_FEATURES = 100
"""Estimated work of the features of an event, without their lists, as labels."""
_MOST_NAMED = 10
"""Most labels that a line of the log names."""
_REFUSAL_SECONDS = 0.1
"""Delay of refusals: clients that retry immediately would otherwise take the time that answers need."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Search:
    """One request in the queue.

    Attributes:
        retriever: the release that answers.
        options: queries of a retrieval, or requests for similar labels or for queries.
        embed: the request for vectors, in place of `options`.
        name: unique name of the request.
        preview: whether no user sees the answer, so that it is not counted.
        answer_ids: give every result an `answer_id`.
        in_request: positions of `options` in the client's request; None: 0, 1, ….
        step: what to go on with, such as an explanation, in place of `options`; the result is whether it has ended.
        explanations: filled by the search, unfinished explanations of its results.
        counts: filled by the search, functions that count its answers once the whole request has succeeded; None: the
            search counts them itself.
    """

    retriever: Retriever
    options: Sequence[SearchOptions | QueriesFor] = ()
    embed: ToEmbed | None = None
    name: str = ""
    preview: bool = False
    answer_ids: bool = False
    in_request: Sequence[int] | None = None
    step: Iterator[None] | None = None
    explanations: list[Iterator[None]] = field(default_factory=list)
    counts: list[Callable[[], None]] | None = None

    def of_arm(self, retriever: Retriever, options: Sequence[SearchOptions], positions: Sequence[int]) -> Search:
        """Return the search of some queries by the release and the settings of their arm."""
        return replace(self, retriever=retriever, options=options, in_request=positions, explanations=[])


class Service:
    """The service of one process, for routes and the follower: search, label changes, feedback and figures.

    Searches run in their own threads: FAISS and ONNX Runtime release the interpreter lock while they compute, so a long
    search stalls neither /livez nor the parsing of the next request.
    """

    def __init__(self, settings: Settings, monitoring: Monitoring, events: EventSink) -> None:
        self.settings = settings
        self.monitoring = monitoring
        self._events = events
        self._now = ForwardClock(events.newest)
        self.keys = AnswerKeys(settings.place, 3600 * settings.answer_id_hours, time)
        self.draining = False
        self.surplus_connections = 0
        """Connections to give up, so that their clients connect to workers that hold fewer."""
        self.release_problem: str | None = None
        """Why the release that CURRENT names is not served; None: the published release is served."""
        self.experiment: Experiment | None = None
        """The running experiment; None without one."""
        self.current: Retriever | None = None
        """The release in service; None before the first is loaded."""
        self._loaded: dict[str, Retriever] = {}
        self._changes = LabelFollower(settings.place)
        self._changing = threading.Lock()
        self.mirror = Mirror(settings.state_directory, monitoring.slot.worker)
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
            set_depth=monitoring.slot.set_queue_depth,
        )

    @property
    def ready(self) -> bool:
        """Whether new requests should be sent here; /readyz and `longtail_ready` report this."""
        return self.monitoring.slot.ready

    def check_ready(self) -> None:
        """Raise NotReadyError, which gives the reason, if new requests should not be sent here."""
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
        """Get a loaded release, by default the current one, with the labels available at a time, None: now.

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
            return current.at(at)
        staged = self.mirror.staged
        pinned = staged if staged is not None and staged.name == name else self._loaded.get(name)
        if pinned is None:
            loaded = [*self._loaded, *([] if staged is None else [staged.name])]
            raise UnknownReleaseError(
                f"expected one of the releases loaded, {loaded}, received {describe(name)}", field="release"
            )
        return pinned.at(at)

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
            changed = self._changes.apply_to(retriever)
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
            if lacking := self.settings.groups.keys() - {each.name for each in changed.manifest.query_features}:
                logger.warning(
                    "LONGTAIL_GROUPS: release %s has no query feature %s: every query counts as missing there",
                    changed.name, ", ".join(map(repr, sorted(lacking))),
                )  # fmt: skip
            others = [kept for kept in self._loaded.values() if kept.name != changed.name]
            kept = others[max(0, len(others) - self.settings.keep_releases) :]
            self._loaded, self.current = {each.name: each for each in (*kept, changed)}, changed
            # Few requests name a replaced release, so its caches are dropped.
            for other in kept:
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
            self.mirror.use(None, None)
            if retriever is not None:
                self.mirror.use(self._changes.apply_to(retriever), self.current)

    def clock_problem(self) -> str | None:
        """Say how far events are dated ahead of the system's clock; None if they are not."""
        return self._now.problem()

    def set_release_problem(self, problem: str | None) -> None:
        """Set why the release that CURRENT names is not served, beginning with its name; None: it is served."""
        self.release_problem = problem
        told = f"The published release, {problem}. The log says why."
        self.monitoring.set_trouble("refused_release", problem and told)

    def set_unreadable(self, unreadable: bool) -> None:
        """Set whether label changes of other processes cannot be read; such a replica is not ready."""
        told = "The changes of labels cannot be read: labels stay as they were. The service's own log says why."
        self.monitoring.set_trouble("label_log", told if unreadable else None)
        self._changes.unreadable = unreadable
        if self.current is not None:
            self.monitoring.slot.set_ready(not self._changes.behind and not self.draining)

    def drain(self) -> None:
        """Report not ready on /readyz, so that new requests go elsewhere; requests are still answered."""
        self.draining = True
        self.monitoring.slot.set_ready(False)

    def closes_connection(self) -> bool:
        """Return whether an answer closes its connection, which counts as given up."""
        if self.surplus_connections:
            self.surplus_connections -= 1
            return True
        return self.draining

    async def retrieve(
        self,
        queries: Sequence[Query],
        name: str,
        *,
        release: str | None,
        preview: bool,
        answer_ids: bool,
        unit: str | None,
        arm: str | None,
    ) -> tuple[list[Any], str]:
        """Answer queries; while an experiment runs, each by the settings of its unit's arm.

        Args:
            queries, name, preview, answer_ids: see `Search`.
            release: name of the release that answers; None: the current one, or the arm's.
            unit: unit of all queries; None: each query's feature decides.
            arm: name of the arm to use for all queries; None: the units decide.

        Returns:
            The results, and the name of the release that answered. If several releases did, it is the one for queries
            whose arm names none.

        Raises:
            ServingError: the release or the arm is unknown, the service is too busy, or a query cannot be answered.
        """
        experiment = self.experiment
        at = None if experiment is None else lifetimes.now()
        retriever = self.retriever(release, at=at)
        search = Search(retriever, queries, None, name, preview, answer_ids)
        if experiment is None:
            return await self.search(search), retriever.name
        in_arms, answering = list[QueryInArm](), list[Retriever]()
        for position, query in enumerate(queries):
            query_name = f"{position}:{name}"
            in_arm, of_arm = experiment.assign(query, query_name, unit=unit, arm=arm, pinned=release is not None)
            in_arms.append(in_arm)
            try:
                answering.append(retriever if of_arm is None else self.retriever(of_arm, at=at))
            except UnknownReleaseError:  # the arm's release was unloaded just now
                answering.append(retriever)
                in_arms[-1] = query.in_arm(replace(in_arm.arm, counted=False), {})
        positions_of = defaultdict[Retriever, list[int]](list)
        for position, answers in enumerate(answering):
            positions_of[answers].append(position)

        async def answer(of_arms: Retriever, positions: list[int]) -> tuple[str, list[Any]]:
            try:
                in_group = [in_arms[position] for position in positions]
                return of_arms.name, await self.search(search.of_arm(of_arms, in_group, positions))
            except InvalidRequestError:
                # An arm must not make a request fail. If the request itself is wrong, this attempt raises its error.
                plain = [
                    queries[position].in_arm(replace(in_arms[position].arm, counted=False), {})
                    for position in positions
                ]
                return retriever.name, await self.search(search.of_arm(retriever, plain, positions))

        groups = await asyncio.gather(*(answer(*group) for group in positions_of.items()))
        results = dict(zip(chain(*positions_of.values()), chain(*(results for _, results in groups)), strict=True))
        names = {name for name, _ in groups}
        in_order = [results[position] for position in range(len(results))]
        return in_order, names.pop() if len(names) == 1 else retriever.name

    async def search(self, search: Search) -> list[Any]:
        """Queue one request and return its results for a JSON answer, or its vectors, float32 [D].

        Raises:
            QueueFullError, TimedOutError: the service is too busy.
            InvalidRequestError: the answer would be too long, or the release cannot answer the request.
        """
        limit, begun = self.settings.max_answer_bytes, perf_counter()
        pieces = self._pieces(search)
        costs = [cost for _, cost in pieces]
        if (size := sum([cost.bytes for cost in costs])) > limit:
            raise _too_long(search, limit, size)
        alike: Hashable = search.retriever, type(search.embed or search.options[0]), search.preview
        counts: list[Callable[[], None]] | None = None
        if len(pieces) > 1 or any(isinstance(query, Query) and query.explain for query in search.options):
            # Such a request may still fail, so its answers are counted at its end, apart from others.
            counts = []
            alike, pieces = (alike, id(counts)), [(replace(piece, counts=counts), cost) for piece, cost in pieces]
        try:
            results = await self.queue.submit(alike, [piece for piece, _ in pieces], costs, client.get())
            steps = [(explanation, _STEP) for explanation in search.explanations]
            if counts:
                steps.append((_run_all(counts), Cost(1)))
            for step, cost in steps:
                ended, going_on = False, [Search(search.retriever, step=step)]
                while not ended:
                    ((ended,),) = await self.queue.submit(id(step), going_on, [cost], client.get(), begun=begun)
        except (QueueFullError, TimedOutError) as error:
            await self._count_refused(error)
            raise
        answers = list(chain(*results))
        if (size := sum([len(each) for each in answers if isinstance(each, bytes)])) > limit:
            raise _too_long(search, limit, size)
        return [orjson.Fragment(each) if isinstance(each, bytes) else each for each in answers]

    def _pieces(self, search: Search) -> list[tuple[Search, Cost]]:
        """Split a search into pieces no larger than a batch, with their costs."""
        retriever, embed, most = search.retriever, search.embed, self.settings.max_batch
        if embed is not None:
            costs = [Cost(1, 1, extra=entries([*query.features.values()])) for query in embed.queries or ()]
            costs = costs or [Cost(1, 1)] * embed.count
        else:
            catalogue = (retriever.queries if isinstance(search.options[0], QueriesFor) else retriever).catalogue
            # Bytes are an estimate, before the labels are known: every label takes the mean size.
            costs = [
                Cost(
                    1,
                    options.depth,
                    min(options.k, catalogue.labels)
                    * (catalogue.label_bytes if options.display is True else catalogue.mean_bytes(options.display)),
                    options.extra,
                )
                for options in search.options
            ]
        if len(costs) == 1:
            return [(search, costs[0])]
        sums, starts = list[Cost](), list[int]()
        for position, cost in enumerate(costs):
            together = add_up([*sums[-1:], cost])
            is_full = together.queries > most or together.labels + together.extra > LABELS_PER_QUERY * most
            if not sums or is_full:
                starts.append(position)
                sums.append(cost)
            else:
                sums[-1] = together
        if len(sums) == 1:
            return [(search, sums[0])]
        ends = [*starts[1:], len(costs)]
        return [(_piece(search, start, end), cost) for start, end, cost in zip(starts, ends, sums, strict=True)]

    def _answer(self, searches: Sequence[Search], waited: Sequence[float]) -> Sequence[list[Any] | Exception]:
        """Return results or an error for each search of a batch; a failing search does not affect others."""
        try:
            return self._search(searches, waited)
        except EngineUnavailableError as error:
            # Trying each search alone would fail as well, after the same wait. The server's message is only for the
            # operator, so clients get another.
            refused = EngineError("the server that holds the index does not answer now", seconds=error.seconds)
            counts = (len(search.options) or 1 if search.embed is None else search.embed.count for search in searches)
            self.monitoring.count("engine_unanswered", sum(counts))
            return [refused] * len(searches)
        except Exception as error:
            # One search of the batch is at fault: answered one by one, only that one fails.
            if len(searches) > 1:
                return [self._answer([search], [wait])[0] for search, wait in zip(searches, waited, strict=True)]
            places = searches[0].in_request
            items = (error.field or "").partition(".")[0] if isinstance(error, ServingError) else ""
            if places is not None and isinstance(error, ServingError) and items in ("queries", "ids", "labels"):
                return [error.renumbered(items, places)]
            return [error]

    def _search(self, searches: Sequence[Search], waited: Sequence[float]) -> Sequence[list[Any]]:
        """Answer a batch of requests of one kind to one release, and count the answers."""
        retriever, settings, started = searches[0].retriever, self.settings, perf_counter()
        if (step := searches[0].step) is not None:
            ended = False
            while not ended and perf_counter() - started < _STEP_SECONDS:
                ended = next(step, step) is step
            return [[ended]]
        if to_embed := [search.embed for search in searches if search.embed is not None]:
            vectors, seconds = retriever.embed(to_embed), {"encode": perf_counter() - started}
            self.monitoring.count_searches([sum(each.count for each in to_embed)], waited, [seconds])
            return vectors
        if isinstance(searches[0].options[0], QueriesFor):
            requests = [one for search in searches if isinstance(one := search.options[0], QueriesFor)]
            rankings = queries_for(retriever, requests)
            encoded = iter([orjson.dumps(ranking, option=orjson.OPT_SERIALIZE_NUMPY) for ranking in rankings])
            seconds = {"search": perf_counter() - started}
            self.monitoring.count_searches([sum(len(search.options) for search in searches)], waited, [seconds])
            return [[*islice(encoded, len(search.options))] for search in searches]
        asked = [each for search in searches for each in search.options if isinstance(each, SearchOptions)]
        draws = None
        if any(options.explore for options in asked):
            positions = [
                range(len(search.options)) if search.in_request is None else search.in_request for search in searches
            ]
            pairs = [
                (search.name, position)
                for search, in_request in zip(searches, positions, strict=True)
                for position in in_request
            ]
            draws = Draws(self._lottery, [f"{position}:{name}" for name, position in pairs])
        queries = [each for each in asked if isinstance(each, Query)]
        if queries:
            retrieval = retriever.retrieve(queries, draws, explain_later=True)
        else:
            similar = [each for search in searches if isinstance(each := search.options[0], SimilarQuery)]
            retrieval = retriever.similar(similar, draws)
        if not searches[0].preview:
            wanted, lines = [search.answer_ids for search in searches for _ in search.options], list[bytes]()
            if any(wanted) or settings.answer_share or retrieval.arms_B:
                lines = self._name_answers(asked, wanted, retrieval)
            if (counts := searches[0].counts) is None:
                self._count_answers(retriever, queries, retrieval, waited, lines)
            else:
                counts.append(partial(self._count_answers, retriever, queries, retrieval, waited, lines))
        # As JSON, in this thread: a long answer would hold up the event loop.
        results = iter(
            [
                result if place in retrieval.explanations else orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY)
                for place, result in enumerate(retrieval.results)
            ]
        )
        answers, end = list[list[Any]](), 0
        for search in searches:
            answers.append(list(islice(results, len(search.options))))
            end += len(search.options)
            start = end - len(search.options)
            search.explanations.extend(
                [steps for place, steps in retrieval.explanations.items() if start <= place < end]
            )
        return answers

    def _count_answers(
        self,
        retriever: Retriever,
        queries: Sequence[Query],
        retrieval: Retrieval,
        waited: Sequence[float],
        lines: Sequence[bytes],
    ) -> None:
        """Count the answers of a batch, record a share of them as events, and send a share to the staged release."""
        features_B = [query.features for query in queries] if queries and self.settings.groups else None
        search = AnsweredSearch(retrieval, retrieval.unknown, waited, retrieval.seconds, features_B)
        self.monitoring.count_answers(search)
        if lines:
            self.monitoring.count("dropped", self._events.offer(lines))
        if queries and self.mirror.staged is not None:
            self.mirror.offer(retriever, queries, retrieval, self.settings.mirror_share)

    def _name_answers(
        self,
        asked: Sequence[SearchOptions],
        wanted: Sequence[bool],
        retrieval: Retrieval,
    ) -> list[bytes]:
        """Add an `answer_id` to the wanting results; returns events of a share of the answers."""
        key, release, now = self.keys.signing, retrieval.release.encode(), self._now()
        share, lines = self.settings.answer_share, []
        for place, (query, result, start, end) in enumerate(
            zip(asked, retrieval.results, [0, *retrieval.ends_B[:-1]], retrieval.ends_B, strict=True)
        ):
            arm, features = (query.arm, query.features) if isinstance(query, Query) else (None, None)
            is_event = (arm is not None and arm.counted) or (share > 0 and random() < share)
            if key is None or not (wanted[place] or is_event):
                continue
            propensities_K = None if retrieval.propensities_N is None else retrieval.propensities_N[start:end]
            weights = retrieval.weights_B[place]
            dials, priors = weights[:3], weights.signed
            labels = [label["id"] for label in result["labels"]]
            represents = retrieval.represents_B[place]
            promised = represents and retrieval.promise_holds and result.get("basis", "model") == "model"
            answer_id, name = sign_answer(
                key, now, release, dials, labels,
                priors=priors, arm=arm, propensities_K=propensities_K,
                restricted=not promised,
            )  # fmt: skip
            if wanted[place]:
                result["answer_id"] = answer_id
            if is_event:
                line = event_json(
                    kind="answer", time=now, answer=name, answered_at=now, release=retrieval.release,
                    bias_removal=float(dials[0]), popularity=float(dials[1]), cooccurrence=float(dials[2]),
                    priors=priors or None,
                    restricted=not represents, labels=labels, positions=list(range(len(labels))),
                    propensities=[1.0] * len(labels) if propensities_K is None else propensities_K.tolist(),
                    buckets=retrieval.buckets_N[start:end].tolist(),
                    features=recorded_features(features, self.settings),
                    options=recorded_options(query, self.settings, self._lottery.candidates), **arm_fields(arm),
                )  # fmt: skip
                lines.append(line)
        return lines

    async def change_labels(self, change: Callable[[Retriever], Sequence[LabelRecord]]) -> str:
        """Record label changes durably, and apply them to every later answer of this worker.

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
        """Read the label changes of other workers, and renew the answer ids' key when due."""
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
        organic = {place: event for place, event in enumerate(events) if event.answer_id is None}
        named = {place: event for place, event in enumerate(events) if event.answer_id is not None}
        choices = await self._read_choices(named, now, client) if named else []
        if organic:
            choices += await self.write(
                lambda: retrieve_unseen(organic, current, now=now, settings=settings, client=client)
            )
        await self._keep([choice.line for choice in choices])
        counted = [choice for choice in choices if choice.event not in current.negative_events]
        if _work(events) > _WORK_ON_THE_LOOP:
            await asyncio.to_thread(self._count, counted)
        else:
            self._count(counted)
        chosen = [event for event in organic.values() if event.event not in current.negative_events]
        self.mirror.offer_choices(chosen, self.settings.organic_k)
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
        """Check answer ids, and once more with fresh keys if one seems forged.

        Another replica may have created a key in the meantime.
        """

        def read_here() -> list[Choice]:
            oldest = now - 3600 * self.settings.answer_id_hours
            read_answer = partial(read_answer_id, keys=self.keys.secrets, oldest=oldest)
            return read_choices(
                events, read_answer, self._loaded_or_current, now=now, settings=self.settings, client=client
            )

        async def read() -> list[Choice]:
            return await self.write(read_here) if _work(events.values()) > _WORK_ON_THE_LOOP else read_here()

        try:
            try:
                return await read()
            except InvalidRequestError as error:
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
        """Run work on feedback in a thread that no search waits for."""
        return await self._run(self._writer, work)

    async def read(self, work: Callable[[], Result]) -> Result:
        """Read figures or state in a thread that no search or write waits for; raises StorageError."""
        try:
            return await self._run(self._reader, work)
        except (StoreError, OSError) as error:
            logger.error("state cannot be read: %s", error)
            raise StorageError("the state cannot be read now; send the request again later") from error

    async def _run(self, executor: BoundedExecutor, work: Callable[[], Result]) -> Result:
        try:
            return await executor.run(work)
        except (QueueFullError, TimedOutError) as error:
            await self._count_refused(error)
            raise

    async def _count_refused(self, error: ServingError) -> None:
        if isinstance(error, TimedOutError):
            self.monitoring.count("timeouts")
        else:
            self.monitoring.count("shed")
            await asyncio.sleep(_REFUSAL_SECONDS)

    def close(self) -> None:
        """End the threads and close the files."""
        # In this order: searches offer events and mirror queries, so what they feed closes after them.
        self.queue.close()
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
        self._loaded = {name: changed[each] for name, each in self._loaded.items() if each in changed}
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


def _work(events: Iterable[Event]) -> int:
    """Estimate the time that reading and counting events takes, as labels."""
    return sum(
        [
            len(event.labels) + (_WORK_OF_FEATURES + entries([*event.features.values()]) if event.features else 0)
            for event in events
        ]
    )


def _too_long(search: Search, limit: int, size: float) -> InvalidRequestError:
    """Create the error of an answer with more bytes than allowed."""
    return InvalidRequestError(
        f"expected an answer of at most {limit} bytes, received a request for about {size:.0f}; request fewer labels, "
        "or fewer columns in `display`",
        field="k" if isinstance(search.options[0], SimilarQuery | QueriesFor) else "queries",
    )


def _run_all(counts: Iterable[Callable[[], None]]) -> Iterator[None]:
    """Call functions in one step."""
    for count in counts:
        count()
    yield from ()


def _piece(search: Search, start: int, end: int) -> Search:
    """Return a search for some of the queries, ids or labels of another."""
    embed, options = search.embed, search.options[start:end]
    places = (range(end) if search.in_request is None else search.in_request)[start:end]
    if embed is not None:
        parts = {
            "queries": embed.queries and embed.queries[start:end],
            "labels": embed.labels and embed.labels[start:end],
        }
        return replace(search, embed=embed.model_copy(update=parts), in_request=places)
    if isinstance(one := search.options[0], SimilarQuery | QueriesFor):
        options = [one.model_copy(update={"ids": one.labels[start:end]})] * (end - start)
    return replace(search, options=options, in_request=places)


def _label_event(record: LabelRecord) -> bytes:
    content = json.loads(record_json(record))
    features = content.get("features")
    return event_json(
        kind="label", time=record.at.timestamp(), labels=[record.id], event=content["op"],
        features=None if features is None else json.dumps(features),
    )  # fmt: skip
