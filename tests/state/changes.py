"""Label changes for tests."""

from __future__ import annotations

from datetime import UTC, datetime

from longtail.bundle import Hide, Restore, Upsert
from longtail.state import LabelStore, StateLocation

AT = datetime(2026, 11, 1, tzinfo=UTC)


def upsert(id_: str, **features: object) -> Upsert:
    return Upsert(id=id_, at=AT, features=features, display={"title": f"“{id_}”\n"})


def hide(id_: str) -> Hide:
    return Hide(id=id_, at=AT)


def restore(id_: str) -> Restore:
    return Restore(id=id_, at=AT)


def ids(state_location: StateLocation) -> list[str]:
    return [record.id for record in LabelStore(state_location).read_from().records]
