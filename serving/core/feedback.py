"""Feedback: labels that were chosen after an answer, or without one, where a retrieval nobody sees is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from longtail.serving.core.queries import MAX_IDS, LabelId, Query, RequestModel, features_json
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring import AnswerFeedback, LiveFigures, ShadowPair

LONGEST_NAME = 128
"""Characters of what names an answer, a request or an organic choice."""
_LAST_PLACE = 2**31 - 1


class Event(RequestModel):
    """What somebody chose: after an answer (`answer_id`), or on their own (`features`)."""

    labels: list[LabelId] = Field(
        min_length=1, max_length=MAX_IDS, description="The labels chosen, whether they were answered or not."
    )
    answer_id: str | None = Field(
        default=None, min_length=1, max_length=LONGEST_NAME, description="Of the answer they chose from."
    )
    request_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=LONGEST_NAME,
        description="In its place, of the request; counts as long as one answer was given under it, or the same again.",
    )
    query: int = Field(default=0, ge=0, le=_LAST_PLACE, description="Place of the query in that request.")
    features: dict[str, JsonValue] | None = Field(
        default=None, description="Query features of an organic choice: retrieved and scored without being shown."
    )
    bias_removal: float | None = Field(default=None, allow_inf_nan=False, description="λ of that retrieval.")
    popularity: float | None = Field(default=None, allow_inf_nan=False, description="μ of that retrieval.")
    exclude: list[LabelId] = Field(
        default=[], max_length=MAX_IDS, description="Labels that retrieval leaves out, such as seen ones."
    )
    idempotency_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=LONGEST_NAME,
        description="Of an organic choice, of the client's making: what comes under it again is the same choice, sent "
        "once more, and changes nothing.",
    )
    event: str = Field(
        default="click", min_length=1, max_length=64, description="What they did: click, cart, purchase, …"
    )
    weight: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="What it is worth in training; for export-feedback."
    )

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        forms = [name for name in ("answer_id", "request_id", "features") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise PydanticCustomError(
                "request_or_features", "expected one of answer_id, request_id and features, received {received}",
                {"received": " and ".join(forms) or "none"},
            )  # fmt: skip
        (form,) = forms
        others = {"query"} if form == "features" else {"bias_removal", "popularity", "exclude", "idempotency_key"}
        if others & self.model_fields_set:
            raise PydanticCustomError(
                "request_or_features", "expected no {keys} beside {form}, received some",
                {"keys": " and ".join(sorted(others & self.model_fields_set)), "form": form},
            )  # fmt: skip
        return self


def record_events(
    events: Sequence[Event], retriever: Retriever, figures: LiveFigures, *, shadow_k: int, record_features: bool = False
) -> None:
    """Record the events of one request; they are on disk when this returns.

    Args:
        events: what was chosen.
        retriever: the release being served; organic choices are compared with its answers.
        figures: count them.
        shadow_k: labels retrieved for an organic choice.
        record_features: keep organic choices with their features.

    Raises:
        InvalidRequestError: query features that the release cannot read; nothing was recorded.
        StoreError: nothing was recorded, or only events that may be sent again and count once.
    """
    organic = {place: event for place, event in enumerate(events) if event.features is not None}
    interactions = _retrieve_unseen(organic, retriever, shadow_k, record_features) if organic else []
    of_answers = [
        AnswerFeedback(
            event.answer_id, event.query, labels, retriever.catalogue.buckets_of(labels), event.event, event.weight,
            event.request_id,
        )
        for event in events if event.features is None
        for labels in [[str(id_) for id_ in event.labels]]
    ]  # fmt: skip
    if of_answers:
        figures.record_feedback(of_answers)
    if interactions:
        # Last, for without idempotency keys these would count twice if the client had to send them again.
        figures.record_shadow(retriever.name, interactions)


def queries_of(organic: Sequence[Event], k: int, retriever: Retriever) -> list[Query]:
    """Return the queries before organic choices, for at most k labels."""
    return [
        Query(
            features=event.features or {},
            k=min(k, retriever.manifest.labels),
            bias_removal=event.bias_removal,
            popularity=event.popularity,
            exclude=event.exclude,
        )
        for event in organic
    ]


def _retrieve_unseen(
    organic: dict[int, Event], retriever: Retriever, k: int, record_features: bool
) -> list[ShadowPair]:
    """Retrieve what the release answers to each organic event, by place, with what was chosen."""
    try:
        retrieval = retriever.retrieve(queries_of(list(organic.values()), k, retriever))
    except InvalidRequestError as error:
        raise error.renumbered("events", list(organic)) from error
    catalogue = retriever.catalogue
    starts_B = [0, *retrieval.ends_B[:-1]]
    return [
        ShadowPair(
            answered=catalogue.catalogue_rows(retrieval.rows_N[start:end]),
            interacted=catalogue.catalogue_rows(catalogue.rows(event.labels)[0]),
            labels=list(zip(labels, catalogue.buckets_of(labels), strict=True)),
            features=features_json(event.features or {}) if record_features else None,
            event=event.event,
            weight=event.weight,
            idempotency_key=event.idempotency_key,
        )
        for event, start, end in zip(organic.values(), starts_B, retrieval.ends_B, strict=True)
        for labels in [[str(id_) for id_ in event.labels]]
    ]
