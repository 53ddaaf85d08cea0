"""One request's share of a batch, and what its answers are called: in figures, by feedback, in draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from longtail.serving.core.arms import Assignment
from longtail.serving.core.batcher import Part
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.embedding import ToEmbed
from longtail.serving.core.lottery import Draws
from longtail.serving.core.queries import Query, SimilarQuery
from longtail.serving.core.retriever import Retrieval, Retriever
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.monitoring import AnsweredBatch, ArmAnswer, Monitoring, join_batches

_QUERY_COST = 64
"""Of encoding and searching a query, in labels written: about what one noisy run on the demo's release said."""


@dataclass(frozen=True, slots=True)
class Search:
    """One request's share of a batch.

    Attributes:
        asked: queries, or labels whose nearest labels are wanted.
        answer_id: what feedback will name the answer by; no other has the same.
        request_id: the client's name for the request; where it has none, `answer_id`.
        in_request: where each query stands in the request; None: these are all of them.
        divided: whether it is a part of a search, that has a batch of its own.
        assignments: to arms of an experiment, of each query; None: there is none.
    """

    asked: Sequence[Query] | SimilarQuery
    answer_id: str
    request_id: str
    in_request: Sequence[int] | None = None
    divided: bool = False
    assignments: Sequence[Assignment] | None = None

    @property
    def queries(self) -> int:
        """How many queries it has, or labels whose nearest labels it wants."""
        return len(self.asked.labels) if isinstance(self.asked, SimilarQuery) else len(self.asked)

    @property
    def places(self) -> Sequence[int]:
        """Where each of its queries stands in the request, from 0."""
        return range(self.queries) if self.in_request is None else self.in_request

    def _costs(self) -> Iterator[int]:
        """What each of its queries costs, about: the time that a label takes to be written is 1."""
        if isinstance(self.asked, SimilarQuery):
            return repeat(_QUERY_COST + self.asked.depth, self.queries)
        return (_QUERY_COST + query.depth for query in self.asked)

    @property
    def cost(self) -> int:
        """What it costs, in the time that a label takes to be written."""
        return sum([*self._costs()])

    @property
    def labels(self) -> int:
        """How many labels it asks for, all queries together."""
        if isinstance(self.asked, SimilarQuery):
            return self.asked.k * self.queries
        return sum([query.k for query in self.asked])

    def mean_bytes(self, catalogue: Catalogue) -> float:
        """About how many bytes its answer will have, were its labels as long as others are on average."""
        asked = [self.asked] if isinstance(self.asked, SimilarQuery) else self.asked
        labels = self.queries if isinstance(self.asked, SimilarQuery) else 1
        return sum(labels * query.k * catalogue.mean_bytes(query.display) for query in asked)

    def check_bytes(self, count: float, limit: int) -> None:
        """Raise InvalidRequestError if its answer has, or will have, more bytes than an answer may."""
        if count > limit:
            raise InvalidRequestError(
                f"expected an answer of at most {limit} bytes (LONGTAIL_MAX_ANSWER_BYTES), received a request for "
                f"{count:.0f}: fewer labels, or columns in `display`, make less",
                field="k" if isinstance(self.asked, SimilarQuery) else "queries",
            )

    def divide(self, cost: float) -> Part[Search] | None:
        """Its first queries, one at least, that do not cost more; None if it has but one."""
        here, taken = 0, 0
        for each in self._costs():
            if here and taken + each > cost:
                break
            here, taken = here + 1, taken + each
        count = self.queries
        if count == 1:
            return None
        if here == count:
            here, taken = here - 1, taken - each
        return Part(self._slice(0, here), taken, self._slice(here, count))

    def _slice(self, start: int, end: int) -> Search:
        asked = self.asked
        some = (
            asked.model_copy(update={"id": None, "ids": asked.labels[start:end]})
            if isinstance(asked, SimilarQuery)
            else asked[start:end]
        )
        assignments = None if self.assignments is None else self.assignments[start:end]
        return replace(self, asked=some, in_request=self.places[start:end], divided=True, assignments=assignments)

    def located(self, error: Exception) -> Exception:
        """An error about one of its queries, as one about the request's."""
        items = "ids" if isinstance(self.asked, SimilarQuery) else "queries"
        if (
            self.in_request is not None
            and isinstance(error, ServingError)
            and (error.field or "").startswith(f"{items}.")
        ):
            return error.renumbered(items, self.places)
        return error

    @property
    def features_json(self) -> list[bytes | None]:
        """Features of every query; None of labels, which have none."""
        if isinstance(self.asked, SimilarQuery):
            return [None] * self.queries
        return [query.features_json() for query in self.asked]


def divide(work: Search | ToEmbed, cost: float) -> Part[Search | ToEmbed] | None:
    """Some of a request, as `Search.divide`; vectors are made all at once."""
    return work.divide(cost) if isinstance(work, Search) else None  # type: ignore[return-value]


def queries_of(searches: Sequence[Search]) -> list[Query]:
    """The queries of searches, in order; labels that are asked about are none."""
    return [query for search in searches if not isinstance(search.asked, SimilarQuery) for query in search.asked]


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What searches must have in common to share a batch."""

    retriever: Retriever
    similar: bool
    preview: bool

    def search(self, searches: Sequence[Search], draws: Draws) -> Retrieval:
        """Answer the requests of a batch together; raises as `Retriever.retrieve` and `Retriever.similar`."""
        if self.similar:
            return self.retriever.similar(
                [search.asked for search in searches if isinstance(search.asked, SimilarQuery)], draws
            )
        return self.retriever.retrieve(queries_of(searches), draws)


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """The answer to a part of a search, which counts when all parts are answered.

    Attributes:
        results: JSON of each query's.
        answered: what is counted of it; None of a preview.
        unknown: ids that the release does not know, by list.
    """

    results: list[bytes]
    answered: AnsweredBatch | None
    unknown: Mapping[str, int]


def join_parts(parts: Sequence[list[bytes] | PartAnswer], monitoring: Monitoring) -> list[bytes]:
    """The results of a search that was done in parts, counted now that all of it is answered."""
    results: list[bytes] = []
    answered, unknown = list[AnsweredBatch](), dict.fromkeys(("exclude", "allow"), 0)
    for part in parts:
        assert isinstance(part, PartAnswer)
        results += part.results
        answered += [] if part.answered is None else [part.answered]
        for ids, count in part.unknown.items():
            unknown[ids] += count
    if answered:
        # All at once: it takes a fraction of the time, in which nobody else is served.
        monitoring.count_answers(join_batches(answered), unknown)
    return results


def draw_names(searches: Sequence[Search], *, repeatable: bool) -> list[str]:
    """What decides the draws of every query of a batch.

    Args:
        searches: the requests of the batch.
        repeatable: a request of the same id draws the same, for tests. Else every answer draws anew: a gateway may give
            all requests one id.
    """
    return [
        f"{place}:{search.request_id if repeatable else search.answer_id}"
        for search in searches
        for place in search.places
    ]


def answered_batch(
    retriever: Retriever, searches: Sequence[Search], retrieval: Retrieval, record_features: bool
) -> AnsweredBatch:
    """What is counted of a batch, and kept for feedback.

    Args:
        retriever: the release that answered.
        searches: the requests of the batch.
        retrieval: what it found.
        record_features: whether features of queries are kept.
    """
    catalogue, rows_N = retriever.catalogue, retrieval.rows_N
    names = [(search, place) for search in searches for place in search.places]
    return AnsweredBatch(
        release=retriever.name,
        answer_ids=[search.answer_id for search, _ in names],
        places=[place for _, place in names],
        bias_removal_B=retrieval.bias_removal_B,
        popularity_B=retrieval.popularity_B,
        fingerprints_N=catalogue.fingerprints(rows_N),
        rows_N=catalogue.catalogue_rows(rows_N),
        scores_N=retrieval.scores_N,
        ends_B=retrieval.ends_B,
        buckets_N=catalogue.buckets(rows_N),
        counts_N=catalogue.counts(rows_N),
        propensities_N=retrieval.propensities_N,
        explored=retrieval.explored,
        features_B=[features for search in searches for features in search.features_json] if record_features else None,
        request_ids=[None if search.request_id == search.answer_id else search.request_id for search, _ in names],
        arms_B=_arms(searches),
    )


def _arms(searches: Sequence[Search]) -> list[ArmAnswer | None] | None:
    if all(search.assignments is None for search in searches):
        return None
    return [
        arm
        for search in searches
        for arm in (
            [None] * search.queries
            if search.assignments is None
            else [assignment.record() for assignment in search.assignments]
        )
    ]
