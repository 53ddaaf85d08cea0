"""Label changes as rows of their table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from longtail.bundle import LabelRecord, record_json
from longtail.state.errors import StoreError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEP = timedelta(microseconds=1)


def microseconds(at: datetime) -> int:
    """Since 1970."""
    return (at - _EPOCH) // _STEP


def moment(at: int) -> datetime:
    """Of microseconds since 1970."""
    return _EPOCH + at * _STEP


def rows_of(records: Sequence[LabelRecord]) -> list[dict[str, Any]]:
    """Their rows, in their order."""
    rows = []
    for record in records:
        try:
            content = record_json(record)
        except ValueError as error:
            raise StoreError(
                f"change of label {record.id[:100]!r}: expected values that JSON can hold, found others: {error}"
            ) from error
        rows.append({"at": microseconds(record.at), "record": content})
    return rows


def dated_after(latest: datetime, records: Sequence[LabelRecord]) -> list[LabelRecord]:
    """The records, those dated no later than `latest` dated a microsecond after it."""
    later = min(latest, datetime.max.replace(tzinfo=UTC) - _STEP) + _STEP
    return [record if record.at > latest else record.model_copy(update={"at": later}) for record in records]
