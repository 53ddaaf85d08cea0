"""Which files and which of their rows a data set is made of: places, spans of time, event types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator

from longtail.bundle.dates import span_seconds
from longtail.tables import is_query
from longtail.tables.files import in_line
from longtail.trainer.config.base import Section


def _place(value: Any) -> Path | str:
    if isinstance(value, str) and (is_query(value) or "://" in value):
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
"""A file, a directory, a glob, a URL of a file system that fsspec knows, a query of these, or a list."""


def shown(places: Places) -> str:
    """Return places for a message: one, or the first and how many more."""
    first, *more = places if isinstance(places, list) else [places]
    name = in_line(str(first)) if is_query(first) else str(first)
    return f"{name} and {len(more)} more" if more else name


Span = Annotated[str, AfterValidator(lambda value: span_seconds(value) and value)]
"""A length of time: a number and `s`, `m`, `h`, `d` or `w`."""


def _since(value: Any) -> datetime | str:
    """Return a span as it is, any other value as a time; without a zone it is UTC."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+[smhdw]", value):
        span_seconds(value)
        return value
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


class EventsConfig(Section):
    """What interactions of different types weigh: pairs' weights, as `data.weight` gives them by a column."""

    column: str
    """Column of the event's type."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Weight by type, such as `{ view = 1, cart = 3, purchase = 10 }`; 0 leaves a type's rows out, from every split.
    A type that is not listed is a bad row (`data.on_bad_row`)."""

    def _problems(self) -> Iterator[str]:
        if not any(self.weights.values()):
            yield f"events.weights: expected some weight > 0, received {self.weights}"


class ObjectiveConfig(Section):
    """What belongs to one objective, how much its loss weighs in training, and its share of the served score."""

    events: list[str] = Field(min_length=1)
    """The types of `data.events.weights` that belong to it: each type that weighs anything to one objective."""
    weight: float = Field(default=1.0, gt=0)
    """Multiplies what `data.events.weights` says of its types: its pairs' loss, and what they count in π."""
    export: float | None = Field(default=None, ge=0)
    """Its share of the served score, once the shares are divided by their sum; its `weight` if not given."""
