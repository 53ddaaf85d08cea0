"""Types of recipe values that select files and rows: sources, spans of time, event types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator

from longtail.bundle.dates import span_seconds
from longtail.bundle.events import weights_by_type
from longtail.tables import is_query
from longtail.tables.files import shorten_query
from longtail.trainer.config.base import Section


def _parse_source(value: Any) -> Path | str:
    if isinstance(value, str) and (is_query(value) or "://" in value):
        return value
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError(f"expected a path or a URL, or a list of them, received {value!r}")


def _parse_sources(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _parse_source(value)
    if not value:
        raise ValueError("expected at least one path or URL, received []")
    return [_parse_source(part) for part in value]


Sources = Annotated[Path | str | list[Path | str], PlainValidator(_parse_sources)]
"""A file, a directory, a glob, a URL of an fsspec file system, an SQL query over these, or a list."""


def name_sources(sources: Sources) -> str:
    """Name the first source and the number of further ones, for a message."""
    first, *more = sources if isinstance(sources, list) else [sources]
    name = shorten_query(str(first)) if is_query(first) else str(first)
    return f"{name} and {len(more)} more" if more else name


Span = Annotated[str, AfterValidator(lambda value: span_seconds(value) and value)]
"""A length of time: a number followed by `s`, `m`, `h`, `d` or `w`."""


def _since(value: Any) -> datetime | str:
    """Parse a time, in UTC without a zone; return a span unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+[smhdw]", value):
        span_seconds(value)
        return value
    try:
        time_ = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        time_ = None
    if isinstance(time_, date) and not isinstance(time_, datetime):
        time_ = datetime.combine(time_, time())
    if not isinstance(time_, datetime):
        raise ValueError(f"expected a span such as '30d' or a time such as '2026-01-31', received {value!r}")
    return time_ if time_.tzinfo else time_.replace(tzinfo=UTC)


Since = Annotated[datetime | str, PlainValidator(_since)]
"""A time, or a span before the newest row."""


class EventsConfig(Section):
    """Weigh interactions by their event type; the weights act as those of `data.weight`."""

    column: str
    """Column with the type of the event."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Weight by type, such as `{ view = 1, cart = 3, purchase = 10 }`. Weight 0 removes the rows of a type from every
    split. A row of a type that is not listed is a bad row (`data.max_bad_rows`); a refresh leaves such rows out."""
    negative: list[str] = Field(default_factory=list)
    """Types that say no, such as `["returned", "disliked"]`. They weigh 0, and their labels are left out of later
    answers to the query, as far as the release remembers it."""

    def _problems(self) -> Iterator[str]:
        if not any(self.weights.values()):
            yield f"events.weights: expected some weight > 0, received {self.weights}"
        if weighted := [name for name in self.negative if self.weights.get(name)]:
            yield f"events.negative: expected types without a weight above 0, received {weighted[0]!r}"

    @property
    def by_type(self) -> dict[str, float]:
        """Return weights by type, in the order of `Pairs.events`."""
        return weights_by_type(self.weights, self.negative)


class ObjectiveConfig(Section):
    """Define one objective: its event types, its weight in training and in the served score."""

    events: list[str] = Field(min_length=1)
    """Event types of the objective. Each type with a weight above 0 in `data.events.weights` belongs to exactly one
    objective."""
    weight: float = Field(default=1.0, gt=0)
    """Multiplies the weights of these types in `data.events.weights`, in the loss and in π."""
    export: float | None = Field(default=None, ge=0)
    """Share of the objective in the served score, normalised to sum to 1 over objectives; by default its `weight`."""
