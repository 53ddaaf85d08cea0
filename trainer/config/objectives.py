"""`[objectives]`: kinds of events that share the towers, each with a map of the query's embedding of its own."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from longtail.trainer.config.base import Section
from longtail.trainer.config.rows import EventsConfig


class ObjectiveConfig(Section):
    """What belongs to one objective, how much its loss weighs in training, and its share of the served score."""

    events: list[str] = Field(min_length=1)
    """The types of `data.events.weights` that belong to it: each type that weighs anything to one objective."""
    weight: float = Field(default=1.0, gt=0)
    """Multiplies what `data.events.weights` says of its types: its pairs' loss, and what they count in π."""
    export: float | None = Field(default=None, ge=0)
    """Its share of the served score, once the shares are divided by their sum; its `weight` if not given."""


def shares_of(objectives: Mapping[str, ObjectiveConfig]) -> dict[str, float]:
    """Return the share of every objective in the served score, by name; they sum to 1."""
    given = {name: each.weight if each.export is None else each.export for name, each in objectives.items()}
    total = sum(given.values())
    return {name: share / total for name, share in given.items()}


def weighted_events(objectives: Mapping[str, ObjectiveConfig], events: EventsConfig) -> EventsConfig:
    """Return the events' weights, times those of the objectives that they belong to."""
    factor = {event: each.weight for each in objectives.values() for event in each.events}
    weights = {event: weight * factor.get(event, 1.0) for event, weight in events.weights.items()}
    return events.model_copy(update={"weights": weights})


def check_objectives(objectives: Mapping[str, ObjectiveConfig], events: EventsConfig | None) -> None:
    """Refuse objectives that do not share out the types of events."""
    names = list(objectives)
    if len(names) == 1:
        raise ValueError(f"objectives: expected at least two, or no [objectives] at all, received {names}")
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(f"objectives: expected names of letters, digits and _, received {wrong}")
    if events is None or events.column is None:
        raise ValueError("objectives: expected data.events with column and weights beside them, received none")
    types = [event for event, weight in events.weights.items() if weight]
    owners: dict[str, str] = {}
    for name, objective in objectives.items():
        for event in objective.events:
            if event not in types:
                raise ValueError(
                    f"objectives.{name}.events: expected types of data.events.weights with a weight above 0, "
                    f"{types}, received {event!r}"
                )
            if event in owners:
                raise ValueError(
                    f"objectives.{name}.events: expected each type once, received {event!r}, which belongs to "
                    f"{owners[event]!r}"
                )
            owners[event] = name
    if left := [event for event in types if event not in owners]:
        raise ValueError(
            f"objectives: expected one for each type that data.events gives a weight above 0, received none for {left}"
        )
    if not any(each.weight if each.export is None else each.export for each in objectives.values()):
        raise ValueError("objectives: expected some export > 0, received only zeros")
