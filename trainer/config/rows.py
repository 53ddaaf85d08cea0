"""Which files and which of their rows a data set is made of: places, a row filter, spans of time, event types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from longtail.trainer.config.base import Section

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def _place(value: Any) -> Path | str:
    if isinstance(value, str) and "://" in value:
        return value
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError(f"expected a path or a URL, or a list of them, received {value!r}")


def _places(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _place(value)
    if not value:
        raise ValueError("expected at least one path or URL, received []")
    return [_place(part) for part in value]


Places = Annotated[Path | str | list[Path | str], PlainValidator(_places)]
"""A file, a directory, a glob, a URL of a file system that fsspec knows, or a list of these."""


def relative_to(places: Places, folder: Path) -> Places:
    """Return places with their relative paths read from a folder; URLs stay."""
    if isinstance(places, list):
        return [part if isinstance(part, str) else folder / part for part in places]
    return places if isinstance(places, str) else folder / places


def shown(places: Places) -> str:
    """Return places for a message: one, or the first and how many more."""
    if not isinstance(places, list):
        return str(places)
    return str(places[0]) if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"


def seconds_of(span: str) -> float:
    """Return seconds of a span such as `90m`, `12h`, `30d` or `4w`.

    Example:
        >>> seconds_of("30d")
        2592000.0
    """
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", span)) or float(found[1]) == 0:
        raise ValueError(f"expected a span such as '90m', '12h', '30d' or '4w', received {span!r}")
    return float(found[1]) * _SECONDS[found[2]]


def _span(value: str) -> str:
    seconds_of(value)
    return value


Span = Annotated[str, AfterValidator(_span)]
"""A length of time: a number and `s`, `m`, `h`, `d` or `w`."""


def _since(value: Any) -> datetime | str:
    """Return a span as it is, any other value as a time; without a zone it is UTC."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+[smhdw]", value):
        return _span(value)
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if isinstance(found, date) and not isinstance(found, datetime):
        found = datetime.combine(found, time())
    if not isinstance(found, datetime):
        raise ValueError(f"expected a span such as '30d' or a time such as '2026-01-31', received {value!r}")
    return found if found.tzinfo else found.replace(tzinfo=UTC)


Since = Annotated[datetime | str, PlainValidator(_since)]
"""A time, or a span back from the newest row."""


def _condition(value: tuple[str, str, Any]) -> tuple[str, str, Any]:
    column, operator, operand = value
    if (operator in ("in", "not in")) != isinstance(operand, list):
        wanted = "a list" if operator in ("in", "not in") else "one value"
        raise ValueError(f"{column} {operator}: expected {wanted}, received {operand!r}")
    if operand == []:
        raise ValueError(f"{column} {operator}: expected at least one value, received []")
    for part in operand if isinstance(operand, list) else [operand]:
        if not isinstance(part, str | int | float | date):
            raise ValueError(f"{column} {operator}: expected text, numbers or dates, received {part!r}")
    return value


Operator = Literal["=", "!=", "<", "<=", ">", ">=", "in", "not in"]
Condition = Annotated[tuple[str, Operator, Any], AfterValidator(_condition)]
"""`[column, operator, value]`; `in` and `not in` take a list."""


class EventsConfig(Section):
    """What interactions of different types and ages weigh: pairs' weights, as `data.weight` gives them by a column."""

    column: str | None = None
    """Column of the event's type."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Weight by type, such as `{ view = 1, cart = 3, purchase = 10 }`; 0 leaves a type's rows out, from every split.
    A type that is not listed is a bad row (`data.on_bad_row`)."""
    half_life: Span | None = None
    """Time in which a weight halves, counted back from the newest row, such as `30d`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.column is None) != (not self.weights):
            raise ValueError(
                f"events: expected column and weights together, received column = {self.column!r}, "
                f"weights = {self.weights}"
            )
        if self.weights and not any(self.weights.values()):
            raise ValueError(f"events.weights: expected some weight > 0, received {self.weights}")
        if self.column is None and self.half_life is None:
            raise ValueError("events: expected column and weights, or half_life, received neither")
        return self


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
        raise ValueError("objectives: expected data.events with column and weights with them, received none")
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
