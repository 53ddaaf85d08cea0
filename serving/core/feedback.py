"""Process feedback: labels chosen from an answer, or without one, which is compared with an unseen retrieval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from longtail.serving.core.answer_ids import AnswerIdError, AnswerRecord
from longtail.serving.core.queries import (
    MAX_IDS,
    ChosenId,
    LabelId,
    RequestModel,
    RetrieveQuery,
    SearchOptions,
    count_entries,
    features_json,
)
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.events.schema import event_json
from longtail.serving.monitoring import ArmAnswer, ChosenLabels
from longtail.serving.settings import Settings

LONGEST_NAME = 128
"""Characters of an idempotency key."""
LONGEST_ANSWER_ID = 4096
MOST_WEIGHT = 1e6
"""Most weight of an event: training sums weights in float32, and one client must not stop it or outweigh all."""
CANDIDATES = "candidates"
"""Key of an answer's options: number of a bucket's labels that exploring drew its slots from."""
ORGANIC_K = 20
"""Labels retrieved for an organic interaction, to check whether the service would have answered it."""
_WORK_OF_FEATURES = 100
"""Estimated work of the features of an event, without their lists, as labels."""
_NOT_OPTIONS = {"features", "display", "explain"}
_OF_ORGANIC = ("bias_removal", "popularity", "cooccurrence", "exclude", "exclude_history", "history")


class Event(RequestModel):
    """A user's choice: from an answer (`answer_id`), or without one (`features` alone)."""

    labels: list[ChosenId] = Field(
        min_length=1, max_length=MAX_IDS, description="The labels chosen, whether they were answered or not."
    )
    answer_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=LONGEST_ANSWER_ID,
        description="`answer_id` of the result that the user chose from.",
    )
    features: dict[str, JsonValue] | None = Field(
        default=None,
        description="Features of the query. With an `answer_id` they make the choice a training pair; names "
        "that the release does not read, for example of a query id, are stored. Without one the "
        "choice is organic: the service retrieves labels for these features in the background "
        "and compares.",
    )
    bias_removal: float | None = Field(default=None, allow_inf_nan=False, description="λ of an unseen retrieval.")
    popularity: float | None = Field(default=None, allow_inf_nan=False, description="μ of an unseen retrieval.")
    cooccurrence: float | None = Field(default=None, allow_inf_nan=False, description="ω of an unseen retrieval.")
    exclude: list[LabelId] = Field(
        default=[],
        max_length=MAX_IDS,
        description="Labels that an unseen retrieval leaves out, such as labels that the user has seen.",
    )
    exclude_history: bool | None = Field(
        default=None,
        description="Whether an unseen retrieval leaves out the history of the query, like in a query.",
    )
    history: list[LabelId] | None = Field(
        default=None,
        max_length=MAX_IDS,
        description="Ids of the labels that the query chose before, the latest last, for an unseen retrieval.",
    )
    idempotency_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=LONGEST_NAME,
        description="Key that the client makes up: of several events with one key, only the first counts.",
    )
    event: str = Field(
        default="click", min_length=1, max_length=64, description="What the user did: click, cart, purchase, …"
    )
    weight: float = Field(
        default=1.0, ge=0, le=MOST_WEIGHT, allow_inf_nan=False, description="Weight of the choice in training."
    )

    @property
    def distinct(self) -> list[str]:
        """Return the distinct labels as strings."""
        return list(dict.fromkeys(map(str, self.labels)))

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.answer_id is None and self.features is None:
            raise PydanticCustomError("answer_or_features", "expected an answer_id or features, received neither")
        organic_options = sorted(self.model_fields_set.intersection(_OF_ORGANIC))
        if self.answer_id is not None and organic_options:
            raise PydanticCustomError(
                "answer_or_features", "expected {keys} in an event without answer_id, received one that has it",
                {"keys": " and ".join(organic_options)},
            )  # fmt: skip
        return self


class Choice:
    """An event as it is written and counted."""

    def __init__(self, event: Event, labels: Sequence[str], chosen: ChosenLabels, **fields: Any) -> None:
        self.chosen, self.event = chosen, event.event
        self.line = event_json(
            idempotency_key=event.idempotency_key,
            release=chosen.release,
            labels=labels,
            positions=chosen.positions,
            buckets=chosen.buckets,
            event=event.event,
            weight=event.weight,
            **fields,
        )


def read_choices(
    events: Mapping[int, Event],
    read_answer: Callable[[str], AnswerRecord],
    retriever_of: Callable[[str], Retriever],
    *,
    now: float,
    settings: Settings,
    client: str | None = None,
) -> list[Choice]:
    """Check events on answers, by the answers' ids alone.

    Args:
        read_answer: `read_answer_id` with keys and time bound.
        retriever_of: returns the release of a name, or the current one if that is not loaded, for the labels' buckets.
        settings: decide whether features are recorded, and up to which length.
        client: fingerprint of the API key that sent the events.

    Raises:
        InvalidRequestError: an answer id is wrong, with the AnswerIdError as `__cause__`; or the release cannot read
            the features.
    """
    choices = []
    for i, event in events.items():
        try:
            answer = read_answer(str(event.answer_id))
        except AnswerIdError as error:
            raise InvalidRequestError(
                f"expected the answer_id of a result of this service, {error}", field=f"events.{i}.answer_id"
            ) from error
        retriever = retriever_of(answer.release)
        # In the release's spelling, because an answer's id holds codes of exactly this text.
        labels = retriever.catalogue.spelled(event.distinct)
        positions = answer.positions(labels)
        if event.features is not None:
            try:
                retriever.check_features(event.features, "events")
            except InvalidRequestError as error:
                raise error.renumbered("events", [i]) from error
        chosen = ChosenLabels(
            source="feedback",
            release=answer.release,
            buckets=retriever.catalogue.find_buckets(labels),
            positions=positions,
            bias_removal=answer.bias_removal,
            # Drawn labels shift the recall, so nothing is promised for such an answer.
            judged_at=(
                math.nan
                if answer.restricted or answer.propensities
                else retriever.find_judged_dial(
                    answer.bias_removal, answer.popularity, answer.cooccurrence, answer.priors
                )
            ),
            k=len(answer.codes),
            arm=answer.arm,
        )
        choices.append(
            Choice(
                event,
                labels,
                chosen,
                kind="choice",
                time=now,
                client=client,
                propensities=[1.0 if of is None else answer.propensities.get(of, 1.0) for of in positions],
                answer=answer.name,
                answered_at=answer.at,
                # The id holds float32: seven digits turn 0.30000001192 back into 0.3.
                bias_removal=round(answer.bias_removal, 7),
                popularity=round(answer.popularity, 7),
                cooccurrence=round(answer.cooccurrence, 7),
                priors=answer.priors or None,
                restricted=answer.restricted,
                features=recorded_features(event.features, settings),
                **arm_fields(answer.arm),
            )
        )
    return choices


def retrieve_unseen(
    events: Mapping[int, Event], retriever: Retriever, *, now: float, settings: Settings, client: str | None = None
) -> list[Choice]:
    """Retrieve the answers that organic choices would have had.

    Args:
        client: fingerprint of the API key that sent the events.

    Raises:
        InvalidRequestError: the release cannot read the query features.
    """
    try:
        retrieval = retriever.retrieve(create_queries(list(events.values()), ORGANIC_K, retriever))
    except InvalidRequestError as error:
        raise error.renumbered("events", list(events)) from error
    choices = []
    for event, result, judged_at in zip(
        events.values(), retrieval.results, retrieval.judged_at_B.tolist(), strict=True
    ):
        labels = retriever.catalogue.spelled(event.distinct)
        answered = [label["id"] for label in result["labels"]]
        chosen = ChosenLabels(
            source="organic",
            release=retriever.name,
            buckets=retriever.catalogue.find_buckets(labels),
            positions=[answered.index(label) if label in answered else None for label in labels],
            bias_removal=result["bias_removal"],
            judged_at=judged_at,
            k=ORGANIC_K,
        )
        choice = Choice(
            event,
            labels,
            chosen,
            kind="organic",
            time=now,
            client=client,
            propensities=[1.0] * len(labels),
            bias_removal=result["bias_removal"],
            popularity=result["popularity"],
            cooccurrence=result.get("cooccurrence", 0.0),
            features=recorded_features(event.features, settings),
        )
        choices.append(choice)
    return choices


def create_queries(organic: Sequence[Event], k: int, retriever: Retriever) -> list[RetrieveQuery]:
    """Create the queries of organic choices, for at most k labels."""
    return [
        RetrieveQuery(
            features=event.features or {},
            k=min(k, retriever.manifest.labels),
            bias_removal=event.bias_removal,
            popularity=event.popularity,
            cooccurrence=event.cooccurrence,
            exclude=event.exclude,
            exclude_history=event.exclude_history,
            history=event.history,
        )
        for event in organic
    ]


def arm_fields(arm: ArmAnswer | None) -> dict[str, Any]:
    """List an event's columns about its arm."""
    if arm is None or not arm.counted:
        return {}
    # The column is a signed 64-bit integer, the unit an unsigned one.
    return {"run": arm.run, "arm": arm.arm, "unit": arm.unit - (1 << 64) if arm.unit >= 1 << 63 else arm.unit}


def recorded_features(features: dict[str, JsonValue] | None, settings: Settings) -> str | None:
    """Return a query's features as JSON for an event; None if they are not recorded or too long."""
    if features is None or not settings.record_features:
        return None
    return _if_short(features_json(features), settings)


def recorded_options(query: SearchOptions, settings: Settings, candidates: int) -> str | None:
    """Return a query's other options as JSON for an event; None if features are not recorded, or the JSON is too long.

    Args:
        candidates: number of labels that exploring drew from; included if the query explored.
    """
    if not (isinstance(query, RetrieveQuery) and query.features is not None and settings.record_features):
        return None
    options = query.model_dump(mode="json", exclude_unset=True, exclude=_NOT_OPTIONS)
    if any(query.explore.values()):
        options[CANDIDATES] = candidates
    return _if_short(features_json(options), settings)


def _if_short(content: bytes, settings: Settings) -> str | None:
    return content.decode() if len(content) <= settings.max_features_bytes else None


def estimate_work(events: Iterable[Event]) -> int:
    """Estimate the time that reading and counting events takes, as labels."""
    return sum(
        [
            len(event.labels) + (_WORK_OF_FEATURES + count_entries(event.features) if event.features else 0)
            for event in events
        ]
    )
