"""Requests in the search queue, and what a search thread does with a batch of them: answer, count, mirror."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from longtail.index import EngineUnavailableError
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.embedding import ToEmbed
from longtail.serving.core.lottery import Draws, Lottery
from longtail.serving.core.mirror import Mirror
from longtail.serving.core.queries import Query, SearchOptions, SimilarQuery, features_json
from longtail.serving.core.queue import Cost
from longtail.serving.core.retriever import Retrieval, Retriever
from longtail.serving.errors import EngineError, ServingError
from longtail.serving.monitoring import AnsweredBatch, Monitoring
from longtail.serving.settings import Settings

Kind = Literal["retrieve", "similar", "embed"]


class BatchKey(NamedTuple):
    """What requests of one batch have in common."""

    retriever: Retriever
    kind: Kind
    preview: bool


@dataclass(frozen=True, slots=True)
class Search:
    """One request of the queue.

    Attributes:
        asked: queries, or labels whose nearest labels are wanted, or what is to embed.
        answer_id: the name by which feedback refers to the answer.
        request_id: the client's name for the request; by default `answer_id`.
        in_request: positions of the queries in the request; None: these are all.
    """

    asked: Sequence[Query] | SimilarQuery | ToEmbed
    answer_id: str = ""
    request_id: str = ""
    in_request: Sequence[int] | None = None

    def cost(self, catalogue: Catalogue) -> Cost:
        """Compute the cost, with the bytes of an answer whose labels are as long as the average one."""
        if isinstance(self.asked, ToEmbed):
            return Cost(self.asked.count, self.asked.count)
        if isinstance(self.asked, SimilarQuery):
            asked: Sequence[SearchOptions] = [self.asked] * len(self.asked.labels)
        else:
            asked = self.asked
        bytes_ = sum([query.k * catalogue.mean_bytes(query.display) for query in asked])
        return Cost(len(asked), sum([query.depth for query in asked]), bytes_)

    def located(self, error: Exception) -> Exception:
        """Return an error about one of the queries as one about the request's."""
        if self.in_request is None or not isinstance(error, ServingError):
            return error
        return error.renumbered("queries", self.in_request) if (error.field or "").startswith("queries.") else error


class SearchRunner:
    """Answers batches, in any thread.

    Args:
        settings: returns the current settings.
        monitoring: counts what is answered.
        mirror: gets the queries for the staged release.
    """

    def __init__(self, settings: Callable[[], Settings], monitoring: Monitoring, mirror: Mirror) -> None:
        self._settings = settings
        self._monitoring = monitoring
        self._mirror = mirror
        now = settings()
        self._lottery = Lottery(
            now.explore_candidates,
            now.explore_temperature,
            secrets.randbits(64) if now.explore_seed is None else now.explore_seed,
        )

    def answer(
        self, key: Hashable, searches: Sequence[Search], waited: Sequence[float]
    ) -> Sequence[list[Any] | Exception]:
        """Return the results or an error of each request; one that cannot be answered costs only itself."""
        assert isinstance(key, BatchKey)
        try:
            if key.kind == "embed":
                return self._embed(key.retriever, [search.asked for search in searches], waited)
            return self._search(key, searches, waited)
        except EngineUnavailableError as error:
            # Alone they would fare no better, and each would wait as long. The server's words are the operator's.
            refused = EngineError(
                "expected the server that holds the index to answer, found that it does not now", seconds=error.seconds
            )
            self._monitoring.metrics.count_unanswered(
                sum(search.cost(key.retriever.catalogue).queries for search in searches)
            )
            return [refused] * len(searches)
        except Exception as error:
            if len(searches) == 1:
                return [searches[0].located(error)]
            return [self.answer(key, [search], [wait])[0] for search, wait in zip(searches, waited, strict=True)]

    def _embed(self, retriever: Retriever, asked: Sequence[object], waited: Sequence[float]) -> Sequence[list[Any]]:
        started = perf_counter()
        requests = [request for request in asked if isinstance(request, ToEmbed)]
        vectors = retriever.embed(requests)
        seconds = {"encode": perf_counter() - started}
        self._monitoring.metrics.count_search(sum(request.count for request in requests), waited, seconds)
        return vectors

    def _search(self, key: BatchKey, searches: Sequence[Search], waited: Sequence[float]) -> Sequence[list[Any]]:
        retriever = key.retriever
        settings = self._settings()
        queries, similar, sizes = list[Query](), list[SimilarQuery](), list[int]()
        for search in searches:
            if isinstance(search.asked, SimilarQuery):
                similar.append(search.asked)
                sizes.append(len(search.asked.labels))
            elif not isinstance(search.asked, ToEmbed):
                queries += search.asked
                sizes.append(len(search.asked))
        names = [
            (search, place)
            for search, size in zip(searches, sizes, strict=True)
            for place in (range(size) if search.in_request is None else search.in_request)
        ]
        # With a seed a request of the same id draws the same, for tests; else every answer draws anew.
        repeatable = settings.explore_seed is not None
        draws = Draws(
            self._lottery,
            [f"{place}:{search.request_id if repeatable else search.answer_id}" for search, place in names],
        )
        retrieval = retriever.retrieve(queries, draws) if queries else retriever.similar(similar, draws)
        if not key.preview:
            self._monitoring.metrics.count_search(len(names), waited, retrieval.seconds)
            answered = _answered(retriever, names, queries, retrieval, settings.record_features)
            self._monitoring.count_answers(answered, retrieval.unknown)
            if queries and self._mirror.staged is not None:
                self._mirror.offer(retriever, queries, retrieval, settings.mirror_share)
        ends = iter(retrieval.results)
        return [[next(ends) for _ in range(size)] for size in sizes]


def _answered(
    retriever: Retriever,
    names: Sequence[tuple[Search, int]],
    queries: Sequence[Query],
    retrieval: Retrieval,
    record_features: bool,
) -> AnsweredBatch:
    """Describe a batch for monitoring and for feedback.

    Args:
        retriever: the release that answered.
        names: of every query its search, and its position in the request.
        queries: of the batch; none of labels.
        retrieval: what it found.
        record_features: whether features of queries are kept.
    """
    fingerprints_N, rows_N, buckets_N, counts_N = retriever.catalogue.recorded(retrieval.rows_N)
    arms_B = [query.arm for query in queries]
    asked: Sequence[object] = queries or [search.asked for search, _ in names]
    restricted = [isinstance(options, SearchOptions) and options.restricted for options in asked]
    return AnsweredBatch(
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
        if record_features and queries
        else None,
        request_ids=[None if search.request_id == search.answer_id else search.request_id for search, _ in names],
        arms_B=arms_B if any(arms_B) else None,
        restricted_B=np.array(restricted) if any(restricted) else None,
    )
