"""One request's share of a batch, and what its answers are called: in figures, by feedback, in draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longtail.serving.core.queries import Query, SimilarQuery
from longtail.serving.core.retriever import Retrieval, Retriever
from longtail.serving.monitoring import AnsweredBatch


@dataclass(frozen=True, slots=True)
class Search:
    """One request's share of a batch.

    Attributes:
        asked: queries, or labels whose nearest labels are wanted.
        answer_id: what feedback will name the answer by; no other has the same.
        request_id: the client's name for the request; where it has none, `answer_id`.
    """

    asked: Sequence[Query] | SimilarQuery
    answer_id: str
    request_id: str

    @property
    def queries(self) -> int:
        """How many queries it has, or labels whose nearest labels it wants."""
        return len(self.asked.labels) if isinstance(self.asked, SimilarQuery) else len(self.asked)

    @property
    def features_json(self) -> list[bytes | None]:
        """Features of every query; None of labels, which have none."""
        if isinstance(self.asked, SimilarQuery):
            return [None] * self.queries
        return [query.features_json() for query in self.asked]


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
        for place in range(search.queries)
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
    names = [(search, place) for search in searches for place in range(search.queries)]
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
    )
