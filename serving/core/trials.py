"""Queries under the experiment that runs, or under none: searched by arm, and told which."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from longtail.serving.core.arms import Part, Unit
from longtail.serving.core.queries import Query
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.searches import Search
from longtail.serving.core.service import Service
from longtail.serving.errors import UnknownReleaseError

_NOBODY = Unit()


async def retrieve(
    service: Service,
    queries: Sequence[Query],
    answer_id: str,
    request_id: str,
    *,
    release: str | None = None,
    preview: bool = False,
    asked: Unit = _NOBODY,
) -> tuple[list[bytes], str]:
    """The results of queries, JSON each, and the release that answers.

    Args:
        service: searches.
        queries, answer_id, request_id, preview: as for `Service.search`.
        release: that is to answer; None: the current one, or that of an arm.
        asked: what the request says of its unit.

    Raises:
        NotReadyError, UnknownReleaseError: as `Service.retriever`.
        InvalidRequestError: as `Trial.answer`.
        QueueFullError, TimedOutError, ServingError: as `Service.search`.
    """
    retriever, trial = service.retriever(release), service.trial
    if trial is None:
        return await service.search(retriever, queries, answer_id, request_id, preview=preview), retriever.name

    async def search(part: Part) -> list[bytes]:
        found = Search(part.queries, answer_id, request_id, part.places, assignments=part.assignments)
        return await service.submit(part.retriever, found, preview=preview)

    def of_arm(name: str | None) -> Retriever:
        with suppress(UnknownReleaseError):
            return retriever if name is None else service.retriever(name)
        return retriever

    releases, pinned = (retriever, of_arm), release is not None
    return await trial.answer(queries, asked, answer_id, releases, search, pinned=pinned, preview=preview)
