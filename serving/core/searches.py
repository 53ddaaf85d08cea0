"""Answer requests for labels, queries and vectors: queue them, run them in batches, sign and count the answers.

A request goes `retrieve → enqueue → run_batch`, where the retriever ranks labels. `run_batch` and its siblings run in
the queue's threads: FAISS and ONNX Runtime release the interpreter lock while they compute, so a long search stalls
neither /livez nor the parsing of the next request.

Legend: `B` queries of a batch.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import random
from time import perf_counter
from typing import Any

import orjson

from longtail.index import EngineUnavailableError
from longtail.serving.core import lifetimes
from longtail.serving.core.answer_ids import sign_answer
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.experiments import Experiment
from longtail.serving.core.exploration import Draws, Lottery
from longtail.serving.core.feedback import arm_fields, recorded_features, recorded_options
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.mirror import Mirror
from longtail.serving.core.queries import (
    MOST_POOL,
    QueriesFor,
    QueryFeatures,
    RetrieveQuery,
    SearchOptions,
    SimilarQuery,
    ToEmbed,
    count_entries,
    first_pool,
)
from longtail.serving.core.queue import Cost, SearchQueue, client, cut
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    ServingError,
    TimedOutError,
    UnknownReleaseError,
)
from longtail.serving.events import EventSink
from longtail.serving.events.schema import event_json
from longtail.serving.monitoring import ArmAnswer, Monitoring
from longtail.serving.settings import Settings
from longtail.state import AnswerKeys

_WINDOW_SECONDS = 0.002
"""Longest time that requests gather while another search runs; an idle service never waits."""
_WAITING_ANSWERS = 8
"""Number of requests of the largest size that may wait together, by labels and by bytes."""
_STEP = Cost(1, extra=8000)
"""Cost of a turn of an explanation: some 40 searches, which take no room from requests that wait."""
_STEP_SECONDS = 0.002
"""Time from which an explanation lets others search."""
_REFUSAL_SECONDS = 0.1
"""Delay of refusals: clients that retry immediately would otherwise take the time that answers need."""
_ITEMS = frozenset({"queries", "ids", "labels"})
"""Lists of requests whose pieces are searched apart."""
_GROWN_POOL, _OTHER_SEARCH = 512, 250
"""Estimated work, in labels searched, of a pool of `max_per`, which may grow, and of a search for slots or a floor."""
_LISTS_READ_ONCE = 8
"""Divisor of the entries of lists that one request has for many labels, which are read once."""
_ANY_POOL = 1 << 62


@dataclass(slots=True)
class Piece:
    """The part of a request with one turn in the queue.

    Attributes:
        options: queries, one request for similar labels or for queries, or what to embed.
        positions: positions of the results in the request.
        name: unique name of the request.
        answer_ids: give every result an `answer_id`.
        arms_B: the arm of each query; None: no experiment runs.
        counts: filled by the search, functions that count its answers once the whole request has succeeded; None: the
            search counts them itself.
        explanations: filled by the search, unfinished explanations of its results.
    """

    options: Sequence[Any]
    positions: Sequence[int]
    name: str = ""
    answer_ids: bool = False
    arms_B: Sequence[ArmAnswer] | None = None
    counts: list[Callable[[], None]] | None = None
    explanations: list[Iterator[None]] = field(default_factory=list)


class Searches:
    """Answers requests in threads of its own.

    Args:
        now: returns the time of events, in seconds since 1970.
        find_release: returns a loaded release by its name at a time; see `Service.retriever`.

    Attributes:
        experiment: the running experiment; None without one.
    """

    def __init__(
        self,
        settings: Settings,
        monitoring: Monitoring,
        events: EventSink,
        keys: AnswerKeys,
        now: Callable[[], float],
        mirror: Mirror,
        find_release: Callable[..., Retriever],
    ) -> None:
        self._settings, self._monitoring, self._events = settings, monitoring, events
        self._keys, self._now, self._mirror, self._find_release = keys, now, mirror, find_release
        self.experiment: Experiment | None = None
        # A seed of this process, so that no client can foresee a draw.
        self._lottery, self._most_labels = Lottery(), settings.max_total_k
        self.queue: SearchQueue[Any, Any] = SearchQueue(
            # A GPU index serves one search at a time, and a second thread would only wait.
            threads=1 if settings.device == "gpu" else settings.search_threads,
            window=_WINDOW_SECONDS,
            max_batch=settings.max_batch,
            limit=Cost(
                settings.queue_limit,
                _WAITING_ANSWERS * self._most_labels,
                _WAITING_ANSWERS * settings.max_answer_bytes,
            ),
            timeout=settings.request_seconds,
            set_depth=monitoring.slot.set_queue_depth,
        )

    async def retrieve(
        self,
        queries: Sequence[RetrieveQuery],
        name: str,
        *,
        release: str | None,
        preview: bool,
        answer_ids: bool,
        unit: str | None,
        arm: str | None,
    ) -> dict[str, Any]:
        """Answer queries; while an experiment runs, each by the settings of its unit's arm.

        Args:
            name: unique name of the request.
            release: name of the release that answers; None: the current one, or the arm's.
            preview: whether no user sees the answer, so that it is not counted.
            answer_ids: give every result an `answer_id`.
            unit: unit of all queries; None: each query's feature decides.
            arm: name of the arm to use for all queries; None: the units decide.

        Returns:
            `results`, and in `release` the name of the release that answered. If several releases did, it is the one
            for queries whose arm names none.

        Raises:
            ServingError: the release or the arm is unknown, the service is too busy, or a query cannot be answered.
        """
        if (experiment := self.experiment) is None:
            retriever = self._find_release(release)
            piece = Piece(queries, range(len(queries)), name, answer_ids)
            results = await self.enqueue(self.run_batch, retriever, queries, piece, preview=preview)
            return {"results": results, "release": retriever.name}
        at = lifetimes.now()  # one time for the releases of all arms
        retriever = self._find_release(release, at=at)
        assigned, groups = list[tuple[RetrieveQuery, ArmAnswer]](), defaultdict[Retriever, list[int]](list)
        for position, query in enumerate(queries):
            query_name = f"{position}:{name}"
            in_arm, answer, arm_release = experiment.assign(
                query, query_name, unit=unit, arm=arm, pinned=release is not None
            )
            by_arm = retriever
            try:
                by_arm = retriever if arm_release is None else self._find_release(arm_release, at=at)
            except UnknownReleaseError:  # the arm's release was unloaded just now
                in_arm, answer = query, replace(answer, counted=False)
            assigned.append((in_arm, answer))
            # By release, because a search runs in one release.
            groups[by_arm].append(position)

        async def answer_group(by_arm: Retriever, positions: list[int]) -> tuple[str, list[Any]]:
            in_arms, arms = zip(*(assigned[position] for position in positions), strict=True)
            piece = Piece(in_arms, positions, name, answer_ids, arms)
            try:
                return by_arm.name, await self.enqueue(self.run_batch, by_arm, in_arms, piece, preview=preview)
            except InvalidRequestError:
                # An arm must not make a request fail. If the request itself is wrong, this attempt raises its error.
                plain = [queries[position] for position in positions]
                piece = replace(piece, options=plain, arms_B=[replace(arm, counted=False) for arm in arms])
                return retriever.name, await self.enqueue(self.run_batch, retriever, plain, piece, preview=preview)

        answers = await asyncio.gather(*(answer_group(*group) for group in groups.items()))
        results = list[Any]([None] * len(queries))
        for positions, (_, group) in zip(groups.values(), answers, strict=True):
            for position, result in zip(positions, group, strict=True):
                results[position] = result
        names = {name for name, _ in answers}
        return {"results": results, "release": names.pop() if len(names) == 1 else retriever.name}

    async def similar(
        self, request: SimilarQuery, name: str, *, release: str | None, preview: bool, answer_ids: bool
    ) -> dict[str, Any]:
        """Find labels like others; returns and raises like `retrieve`."""
        retriever, labels = self._find_release(release), len(request.labels)
        piece = Piece([request], range(labels), name, answer_ids)
        results = await self.enqueue(self.run_batch, retriever, [request] * labels, piece, preview=preview)
        return {"results": results, "release": retriever.name}

    async def find_queries(self, request: QueriesFor, *, release: str | None) -> dict[str, Any]:
        """Find queries for labels; returns and raises like `retrieve`."""
        retriever, labels = self._find_release(release), max(1, len(request.labels))
        piece = Piece([request], range(labels))
        results = await self.enqueue(self._run_find_queries, retriever, [request] * labels, piece)
        return {"results": results, "release": retriever.name}

    async def embed(self, request: ToEmbed, retriever: Retriever) -> list[Any]:
        """Compute vectors, float32 [D]; raises like `retrieve`."""
        items = request.labels or request.queries or ()
        return await self.enqueue(self._run_embed, retriever, items, Piece(items, range(len(items))))

    async def enqueue(
        self,
        run: Callable[[Retriever, bool, Sequence[Piece], Sequence[float]], Sequence[list[Any]]],
        retriever: Retriever,
        options: Sequence[Any],
        piece: Piece,
        *,
        preview: bool = True,
    ) -> list[Any]:
        """Queue a request, and return its results as JSON or vectors.

        Args:
            run: answers a batch of pieces.
            options: options of each result, for its cost.
            piece: the whole request.

        Raises:
            QueueFullError, TimedOutError: the service is too busy.
            EngineError: the server that holds the index does not answer.
            InvalidRequestError: the answer would be too long, or the release cannot answer the request.
        """
        settings, begun, first = self._settings, perf_counter(), options[0]
        if isinstance(first, SearchOptions | QueriesFor):
            catalogue = (retriever.queries if isinstance(first, QueriesFor) else retriever).catalogue
            costs = [_estimate_cost(query, catalogue) for query in options]
            labels, size = sum([cost.labels for cost in costs]), sum([cost.bytes for cost in costs])
            if len(costs) > 1 and labels > (limit := self._most_labels):
                deeper = any(cost.labels != query.k for cost, query in zip(costs, options, strict=True))
                pools = ", of max_per and mmr their pool," if deeper else ""
                raise InvalidRequestError(
                    f"expected at most {limit} labels asked for, k{pools} summed over the queries "
                    f"(100 × LONGTAIL_MAX_QUERIES), received {labels}",
                    field="queries" if isinstance(first, RetrieveQuery) else "k",
                )
            if size > settings.max_answer_bytes:
                raise _too_long(first, settings.max_answer_bytes, size)
        else:
            costs = [
                Cost(1, 1, extra=count_entries(item.features) if isinstance(item, QueryFeatures) else 0)
                for item in options
            ]
        parts = [(slice(0, 1), costs[0])] if len(costs) == 1 else cut(costs, settings.max_batch)
        pieces = [piece] if len(parts) == 1 else [_take_part(piece, part) for part, _ in parts]
        # Previews share no batch with others, because a batch is counted or not as a whole.
        key: tuple[Any, ...] = run, retriever, preview, type(first)
        if len(pieces) > 1 or (isinstance(first, RetrieveQuery) and any(query.explain for query in options)):
            # Such a request may still fail, so its answers are counted at its end, apart from others.
            counts = list[Callable[[], None]]()
            key = *key, id(counts)
            for part in pieces:
                part.counts = counts
        try:
            results = await self.queue.submit(
                key, partial(run, retriever, preview), pieces, [cost for _, cost in parts], client.get()
            )
            if pieces[0].counts is not None:
                steps = [(explanation, _STEP) for part in pieces for explanation in part.explanations]
                # Counting takes a turn as well: it belongs in a search thread, not in the event loop.
                if pieces[0].counts:
                    steps.append((_run_all(pieces[0].counts), Cost(1)))
                for step, cost in steps:
                    ended = [False]
                    while not ended[0]:
                        ended = await self.queue.submit(id(step), _run_step, [step], [cost], client.get(), begun=begun)
        except (QueueFullError, TimedOutError) as error:
            await delay_refusal(self._monitoring, error)
            raise
        except EngineUnavailableError as error:
            # The server's message is only for the operator, so clients get another.
            self._monitoring.count("engine_unanswered", len(options))
            raise EngineError("the server that holds the index does not answer now", seconds=error.seconds) from None
        except ServingError as error:
            if (items := (error.field or "").partition(".")[0]) in _ITEMS:
                raise error.renumbered(items, pieces[error.piece].positions) from error
            raise
        answers = [answer for piece_results in results for answer in piece_results]
        # The estimate above took mean sizes, which long texts may exceed.
        size = sum([len(answer) for answer in answers if isinstance(answer, bytes)])
        if size > settings.max_answer_bytes:
            raise _too_long(first, settings.max_answer_bytes, size)
        return [orjson.Fragment(answer) if isinstance(answer, bytes) else answer for answer in answers]

    def run_batch(
        self, retriever: Retriever, preview: bool, pieces: Sequence[Piece], waited: Sequence[float]
    ) -> Sequence[list[Any]]:
        """Answer a batch, and count the answers."""
        options, queries = [query for piece in pieces for query in piece.options], list[RetrieveQuery]()
        draws = None
        if any(query.explore for query in options):
            names = [f"{position}:{piece.name}" for piece in pieces for position in piece.positions]
            # By the request's unique name, so that two requests never share a draw.
            draws = Draws(self._lottery, names)
        if isinstance(options[0], SimilarQuery):
            retrieval = retriever.similar(options, draws)
            options = [piece.options[0] for piece in pieces for _ in piece.positions]
        else:
            arms_B: list[ArmAnswer | None] | None = None
            if any(piece.arms_B for piece in pieces):  # an experiment may begin or end between two requests
                arms_B = []
                for piece in pieces:
                    arms_B += piece.arms_B or [None] * len(piece.options)
            queries, retrieval = options, retriever.retrieve(options, draws, arms_B)
        if not preview:
            lines = list[bytes]()
            if any(piece.answer_ids for piece in pieces) or self._settings.answer_share or retrieval.arms_B:
                lines = self._sign(options, [piece.answer_ids for piece in pieces for _ in piece.positions], retrieval)
            if pieces[0].counts is None:
                self._count(retriever, queries, retrieval, waited, lines)
            else:
                pieces[0].counts.append(partial(self._count, retriever, queries, retrieval, waited, lines))
        # As JSON, in this thread: a long answer would hold up the event loop.
        results = [
            result if i in retrieval.explanations else orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY)
            for i, result in enumerate(retrieval.results)
        ]
        answers, end = list[list[Any]](), 0
        for piece in pieces:
            start, end = end, end + len(piece.positions)
            answers.append(results[start:end])
            if retrieval.explanations:
                piece.explanations += [steps for i, steps in retrieval.explanations.items() if start <= i < end]
        return answers

    def _run_find_queries(
        self, retriever: Retriever, _: bool, pieces: Sequence[Piece], waited: Sequence[float]
    ) -> Sequence[list[Any]]:
        """Find queries for labels."""
        started = perf_counter()
        rankings = iter(find_known_queries(retriever, [piece.options[0] for piece in pieces]))
        answers = [
            [orjson.dumps(next(rankings), option=orjson.OPT_SERIALIZE_NUMPY) for _ in piece.positions]
            for piece in pieces
        ]
        self._count_search(pieces, waited, "search", started)
        return answers

    def _run_embed(
        self, retriever: Retriever, _: bool, pieces: Sequence[Piece], waited: Sequence[float]
    ) -> Sequence[list[Any]]:
        """Compute the vectors of queries or of labels, float32 [D] each."""
        started = perf_counter()
        items = [item for piece in pieces for item in piece.options]
        vectors = iter(retriever.embed(items))
        answers = [[next(vectors) for _ in piece.options] for piece in pieces]
        self._count_search(pieces, waited, "encode", started)
        return answers

    def _count_search(self, pieces: Sequence[Piece], waited: Sequence[float], stage: str, started: float) -> None:
        count = sum(len(piece.positions) for piece in pieces)
        self._monitoring.count_searches([count], waited, [{stage: perf_counter() - started}])

    def _count(
        self,
        retriever: Retriever,
        queries: Sequence[RetrieveQuery],
        retrieval: Retrieval,
        waited: Sequence[float],
        lines: Sequence[bytes],
    ) -> None:
        """Count answers, record some as events, mirror some."""
        retrieval.waited = waited
        if queries and self._settings.groups:
            retrieval.features_B = [query.features for query in queries]
        self._monitoring.count_answers(retrieval)
        if lines:
            self._monitoring.count("dropped", self._events.offer(lines))
        # Answers to similar labels have no queries to mirror.
        if queries and self._mirror.staged is not None:
            self._mirror.offer(retriever, queries, retrieval, self._settings.mirror_share)

    def _sign(self, options: Sequence[SearchOptions], signed_B: Sequence[bool], retrieval: Retrieval) -> list[bytes]:
        """Add an `answer_id` to the results that get one; returns events of a share of the answers."""
        key, release, now = self._keys.signing, retrieval.release.encode(), self._now()
        share, lines, start = self._settings.answer_share, list[bytes](), 0
        for i, (query, resolved, end) in enumerate(zip(options, retrieval.queries, retrieval.ends_B, strict=True)):
            labels = [label["id"] for label in retrieval.labels_N[start:end]]
            propensities_K = None if retrieval.propensities_N is None else retrieval.propensities_N[start:end]
            buckets_K, start = retrieval.buckets_N[start:end], end
            arm = retrieval.arms_B[i] if retrieval.arms_B else None
            is_event = (arm is not None and arm.counted) or (share > 0 and random() < share)
            # The signature names an event, so events are signed even if clients want no id.
            if key is None or not (signed_B[i] or is_event):
                continue
            weights, is_promised = resolved.weights, resolved.represents and retrieval.promise_holds
            answer_id, name = sign_answer(
                key, now, release, (*weights[:3], *weights.signed), labels, arm=arm, propensities_K=propensities_K,
                restricted=not is_promised or retrieval.heads_B[i].get("basis", "model") != "model",
            )  # fmt: skip
            if signed_B[i]:
                retrieval.results[i]["answer_id"] = answer_id
            if is_event:
                line = event_json(
                    kind="answer", time=now, answer=name, answered_at=now, release=retrieval.release,
                    bias_removal=float(weights.bias_removal), popularity=float(weights.popularity),
                    cooccurrence=float(weights.cooccurrence), priors=weights.signed or None,
                    restricted=not resolved.represents, labels=labels, positions=list(range(len(labels))),
                    propensities=[1.0] * len(labels) if propensities_K is None else propensities_K.tolist(),
                    buckets=buckets_K.tolist(),
                    features=recorded_features(getattr(query, "features", None), self._settings),
                    options=recorded_options(query, self._settings, self._lottery.candidates), **arm_fields(arm),
                )  # fmt: skip
                lines.append(line)
        return lines


def _estimate_cost(options: SearchOptions | QueriesFor, catalogue: Catalogue) -> Cost:
    """Estimate a query's cost to a catalogue by the mean size of its labels."""
    depth, searches, filters = options.k, 0, [options.filter]
    lists: list[object] = [options.exclude, options.display]
    if isinstance(options, SearchOptions):
        lists.append(options.allow)
        if options.max_per or options.mmr is not None:
            depth = first_pool(options.pool, options.k, _ANY_POOL)
        if options.max_per or options.explore or options.at_least:
            filters += [floor.filter for floor in options.at_least]
            counts = [*options.explore.values(), *(MOST_POOL if options.max_per else f.n for f in options.at_least)]
            searches = len(options.max_per) * max(_GROWN_POOL, depth) + sum(_OTHER_SEARCH + count for count in counts)
    if isinstance(options, RetrieveQuery | QueriesFor) and options.features:
        lists += options.features.values()
    if isinstance(options, RetrieveQuery):
        lists.append(options.history)
    if any(filters):
        lists += [
            operand
            for conditions in filters
            for condition in conditions.values()
            if isinstance(condition, dict)
            for operand in condition.values()
        ]
    entries = sum([len(entries) for entries in lists if isinstance(entries, list | dict)])
    # One request for many labels has its lists once.
    if not isinstance(options, RetrieveQuery):
        entries //= _LISTS_READ_ONCE
    label_bytes = catalogue.label_bytes if options.display is True else catalogue.mean_bytes(options.display)
    return Cost(1, depth, min(options.k, catalogue.labels) * label_bytes, searches + entries)


async def delay_refusal(monitoring: Monitoring, error: ServingError) -> None:
    """Count a refused or late request; delay refusals."""
    # A late request has waited long enough, so only refusals are delayed.
    if isinstance(error, TimedOutError):
        monitoring.count("timeouts")
    else:
        monitoring.count("shed")
        await asyncio.sleep(_REFUSAL_SECONDS)


def _too_long(options: SearchOptions | QueriesFor, limit: int, size: float) -> InvalidRequestError:
    """Create the error of an answer with more bytes than allowed."""
    return InvalidRequestError(
        f"expected an answer of at most {limit} bytes, received a request for about {size:.0f}; request fewer labels, "
        "or fewer columns in `display`",
        field="queries" if isinstance(options, RetrieveQuery) else "k",
    )


def _take_part(piece: Piece, part: slice) -> Piece:
    """Return a piece with a part of a request."""
    first, positions = piece.options[0], piece.positions[part]
    options = piece.options[part]
    if isinstance(first, SimilarQuery | QueriesFor):
        options = [first.model_copy(update={"ids": first.labels[part], "id": None})]
    arms_B = piece.arms_B and piece.arms_B[part]
    return replace(piece, options=options, positions=positions, arms_B=arms_B, explanations=[])


def _run_step(steps: Sequence[Iterator[None]], _: Sequence[float]) -> list[bool]:
    """Go on with an explanation for some time; returns whether it has ended."""
    (step,), started, ended = steps, perf_counter(), False
    while not ended and perf_counter() - started < _STEP_SECONDS:
        ended = next(step, step) is step
    return [ended]


def _run_all(counts: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Call functions in one step."""
    for count in counts:
        count()
    yield from ()
