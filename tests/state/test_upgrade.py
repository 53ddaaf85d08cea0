from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from longtail.state import AnswerKeys, LabelStore, Place, Postgres, StoreError, read_place
from longtail.state import tables as tables_module
from longtail.state.engines import postgres_engine, sqlite_engine
from longtail.state.label_file import LABELS_FILE
from tests.state.changes import hide

STEPS = (("ALTER TABLE label_changes ADD COLUMN note TEXT", "UPDATE label_changes SET note = 'old'"),)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return tmp_path if request.param == "sqlite" else read_place(request.getfixturevalue("database_server").url())


@pytest.fixture
def engine(place: Place) -> Iterator[Engine]:
    engine = postgres_engine(place) if isinstance(place, Postgres) else sqlite_engine(place / LABELS_FILE)
    yield engine
    engine.dispose()


def release_with(steps: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Longtail of a later release."""
    for module in ("label_file", "label_server", "labels"):
        for name, value in (("STEPS", steps), ("VERSION", 1 + len(steps))):
            if hasattr(__import__(f"longtail.state.{module}", fromlist=[name]), name):
                monkeypatch.setattr(f"longtail.state.{module}.{name}", value)


def ids(place: Place) -> list[str]:
    store = LabelStore(place)
    try:
        return [record.id for record in store.read_from().records]
    finally:
        store.close()


def test_the_next_release_takes_tables_over_once(place: Place, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    LabelStore(place).append([hide("a"), hide("b")])
    release_with(STEPS, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ids, [place] * 4)) == [["a", "b"]] * 4
    LabelStore(place).append([hide("c")])
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version FROM label_store")) == 2
        notes = connection.scalars(text("SELECT note FROM label_changes ORDER BY number")).all()
    assert notes == ["old", "old", None]
    # The release before says what is wrong, and changes nothing.
    release_with(tables_module.STEPS, monkeypatch)
    with pytest.raises(StoreError, match="expected version 1 or before, found 2"):
        ids(place)


def test_a_step_that_fails_changes_nothing(place: Place, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    LabelStore(place).append([hide("a")])
    release_with((*STEPS, ("ALTER TABLE no_such_table ADD COLUMN x TEXT",)), monkeypatch)
    with pytest.raises(StoreError):
        ids(place)
    release_with(tables_module.STEPS, monkeypatch)
    assert ids(place) == ["a"]
    with engine.connect() as connection, pytest.raises(Exception, match="note"):
        connection.execute(text("SELECT note FROM label_changes"))


@pytest.mark.process
def test_a_table_that_an_earlier_commit_did_not_have_is_made(request: pytest.FixtureRequest) -> None:
    place = read_place(request.getfixturevalue("database_server").url())
    assert isinstance(place, Postgres)
    LabelStore(place).append([hide("a")])
    engine = postgres_engine(place)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE answer_keys"))
    engine.dispose()
    keys = AnswerKeys(place, 1.0, lambda: 1e9)
    keys.load()
    assert keys.signing is not None
