"""What somebody chose: after an answer, or on their own, when it shows what the service would have answered."""

from __future__ import annotations

from collections.abc import Sequence

from longtail.serving import monitoring as live
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.schemas import Event, Query
from longtail.serving.monitoring import Interaction, Live


def take(events: Sequence[Event], retriever: Retriever, figures: Live, *, shadow_k: int) -> int:
    """Record events; they are on disk when this returns.

    Args:
        events: of one request.
        retriever: the release being served; organic choices are compared with what it answers.
        figures: count them.
        shadow_k: labels retrieved for an organic choice.

    Returns:
        How many events there were.

    Raises:
        InvalidRequestError: query features that the release cannot read; nothing was recorded.
        sqlite3.Error: the disk; nothing was recorded, or only events that may be sent again and count once.
    """
    organic = {place: event for place, event in enumerate(events) if event.features is not None}
    interactions = _shadow(organic, retriever, shadow_k)
    of_answers = [_of_answer(event, retriever) for event in events if event.features is None]
    if of_answers:
        figures.events(of_answers)
    if interactions:
        # Last, for these would count twice if the client had to send them again.
        figures.shadow(retriever.name, interactions)
    return len(events)


def _of_answer(event: Event, retriever: Retriever) -> live.Event:
    labels = [str(id_) for id_ in event.labels]
    return live.Event(event.request_id or "", event.query, labels, retriever.catalogue.buckets_of(labels))


def _shadow(organic: dict[int, Event], retriever: Retriever, k: int) -> list[Interaction]:
    """What the release answers to each event's query, beside what was chosen."""
    if not organic:
        return []
    queries = [
        Query(
            features=event.features or {},
            k=min(k, retriever.manifest.labels),
            bias_removal=event.bias_removal,
            exclude=event.exclude,
        )
        for event in organic.values()
    ]
    try:
        retrieval = retriever.retrieve(queries)
    except InvalidRequestError as error:
        raise error.moved("events", list(organic)) from error
    catalogue = retriever.catalogue
    starts_B = [0, *retrieval.ends_B[:-1]]
    return [
        Interaction(
            answered=catalogue.catalogue_rows(retrieval.rows_N[start:end]),
            interacted=catalogue.catalogue_rows(catalogue.rows(event.labels)[0]),
        )
        for event, start, end in zip(organic.values(), starts_B, retrieval.ends_B, strict=True)
    ]
