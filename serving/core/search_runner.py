"""What a search thread does with a batch: answers it, counts it, and has a staged release asked some of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter

from longtail.index import EngineUnavailableError
from longtail.serving.core.embedding import ToEmbed, embed_each
from longtail.serving.core.lottery import Draws, Lottery
from longtail.serving.core.mirror import Mirror
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.searches import (
    BatchKey,
    PartAnswer,
    Search,
    answered_batch,
    draw_names,
    join_parts,
    queries_of,
)
from longtail.serving.errors import EngineError
from longtail.serving.monitoring import Monitoring
from longtail.serving.settings import Settings


class SearchRunner:
    """Answers batches of one model, in any thread; what `SearchPool` runs.

    Args:
        settings: gives the settings of now.
        monitoring: counts what is answered.
        mirror: is offered what was asked.
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

    def __call__(
        self, key: BatchKey | Retriever, works: Sequence[Search | ToEmbed], waited: Sequence[float]
    ) -> Sequence[list[bytes] | PartAnswer | Exception]:
        """An answer or an error to each request of a batch; of requests for vectors the key is the release."""
        if isinstance(key, Retriever):
            return self._embed(key, [work for work in works if isinstance(work, ToEmbed)], waited)
        return self._search(key, [work for work in works if isinstance(work, Search)], waited)

    def join(self, parts: Sequence[list[bytes] | PartAnswer]) -> list[bytes]:
        """One answer of those to all parts of a search."""
        return join_parts(parts, self._monitoring)

    def _embed(
        self, retriever: Retriever, requests: Sequence[ToEmbed], waited: Sequence[float]
    ) -> list[list[bytes] | Exception]:
        started = perf_counter()
        vectors = embed_each(retriever.embed, requests)
        count = sum(request.count for request in requests)
        self._monitoring.metrics.count_search(count, waited, {"encode": perf_counter() - started})
        return vectors

    def _search(
        self, key: BatchKey, searches: Sequence[Search], waited: Sequence[float]
    ) -> Sequence[list[bytes] | PartAnswer | Exception]:
        """A request that cannot be answered costs only itself."""
        settings = self._settings()
        draws = Draws(self._lottery, draw_names(searches, repeatable=settings.explore_seed is not None))
        try:
            retrieval = key.search(searches, draws)
        except EngineUnavailableError as error:
            # Alone they would fare no better, and each would wait as long. What the server said is the operator's.
            self._monitoring.metrics.count_unanswered(sum(search.queries for search in searches))
            refused = EngineError(
                "expected the server that holds the index to answer, found that it does not now", seconds=error.seconds
            )
            return [refused] * len(searches)
        except Exception as error:
            if len(searches) == 1:
                return [searches[0].located(error)]
            return [self._search(key, [search], [wait])[0] for search, wait in zip(searches, waited, strict=True)]
        answered = None
        if not key.preview:
            self._monitoring.metrics.count_search(len(retrieval.results), waited, retrieval.seconds)
            answered = answered_batch(key.retriever, searches, retrieval, settings.record_features)
            if not key.similar:
                self._mirror.offer(key.retriever, queries_of(searches), retrieval, settings.mirror_share)
        if searches[0].divided:
            return [PartAnswer(retrieval.results, answered, retrieval.unknown)]
        if answered is not None:
            self._monitoring.count_answers(answered, retrieval.unknown)
        ends = accumulate(search.queries for search in searches)
        return [retrieval.results[end - search.queries : end] for search, end in zip(searches, ends, strict=True)]
