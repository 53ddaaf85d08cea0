"""Both kinds of state location, for tests that hold for both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longtail.state import LabelStore, StateLocation, parse_location
from tests.postgres import database_server as database_server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def state_location(request: pytest.FixtureRequest, tmp_path: Path) -> StateLocation:
    """An empty state directory, and an empty schema."""
    if request.param == "sqlite":
        return tmp_path
    return parse_location(request.getfixturevalue("database_server").url())


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    built: list[LabelStore] = []
    make = LabelStore.__init__

    def noted(store: LabelStore, state_location: StateLocation) -> None:
        built.append(store)
        make(store, state_location)

    monkeypatch.setattr(LabelStore, "__init__", noted)
    yield
    for store in built:
        store.close()
