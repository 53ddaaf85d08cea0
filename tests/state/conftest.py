"""Both kinds of place, for tests of what is the same in both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longtail.state import LabelStore, StateLocation, parse_location
from tests.postgres import database_server as database_server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StateLocation:
    """An empty state directory, and an empty schema."""
    if request.param == "sqlite":
        return tmp_path
    return parse_location(request.getfixturevalue("database_server").url())


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[LabelStore] = []
    make = LabelStore.__init__

    def noted(store: LabelStore, place: StateLocation) -> None:
        made.append(store)
        make(store, place)

    monkeypatch.setattr(LabelStore, "__init__", noted)
    yield
    for store in made:
        store.close()
