"""Label changes in both kinds of location have one order, and no acknowledged change is lost."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from longtail.bundle import Hide, LabelChanges
from longtail.bundle.label_changes import replay
from longtail.state import LabelStore, Postgres, StateLocation, StoreError, read_label_changes
from tests.state.changes import AT, hide, ids, restore, upsert

ROOT = Path(__file__).parents[2]


def test_records_round_trip(state_location: StateLocation) -> None:
    records = [upsert("a", genres=["x", 3], weights={"é": 0.5}, year=None), hide("b"), restore("b"), upsert("a\n\0")]
    records.append(upsert("c").model_copy(update={"priors": {"recent": -0.1}}))
    store = LabelStore(state_location)
    store.append(records[:1])
    store.append(records[1:])
    assert store.read_from().records == records
    assert LabelStore(state_location).read_from().records == records
    assert read_label_changes(
        str(state_location) if isinstance(state_location, Path) else build_url(state_location)
    ) == replay(records)


def build_url(state_location: Postgres) -> str:
    url = state_location.url.set(drivername="postgresql").update_query_dict({"schema": state_location.schema})
    return url.render_as_string(hide_password=False)


def test_the_last_change_of_a_label_counts() -> None:
    first, second = upsert("a", year=1), upsert("a", year=2)
    assert replay([first, upsert("b"), second]).records() == [second, upsert("b")]
    assert replay([first, hide("a")]).records() == [hide("a")]
    assert replay([hide("a"), second]) == replay([second])
    assert replay([first, hide("a"), restore("a")]) == LabelChanges()
    changes = replay([first, hide("c"), hide("d"), restore("d")])
    assert changes.records() == [first, hide("c")]
    assert replay(changes.records()) == changes
    assert changes.apply([hide("a")]) == replay([first, hide("c"), hide("a")])
    assert dict(changes.upserts) == {"a": first}, "changes stay as they are"


def test_reader_continues_after_the_last_change(state_location: StateLocation) -> None:
    writer, reader = LabelStore(state_location), LabelStore(state_location)
    writer.append([upsert("a")])
    first = reader.read_from()
    assert [record.id for record in first.records] == ["a"]
    assert reader.read_from(first.position) == ([], first.position, False)
    writer.append([hide("b"), hide("c")])
    time.sleep(0.6)  # longer than a database is looked at where nothing is heard
    second = reader.read_from(first.position)
    assert ([record.id for record in second.records], second.restarted) == (["b", "c"], False)
    assert reader.read_from(second.position).records == []
    assert [record.id for record in reader.read_from(first.position).records] == ["b", "c"]


def test_writer_reads_its_changes_at_once(state_location: StateLocation) -> None:
    store, position = LabelStore(state_location), None
    for count in range(5):
        store.append([hide(str(count))])
        read = store.read_from(position)
        assert [record.id for record in read.records] == [str(count)]
        position = read.position


def test_idle_read_returns_no_changes(state_location: StateLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LabelStore(state_location)
    store.append([upsert("a")])
    position = store.read_from().position
    store.read_from(position)
    monkeypatch.setattr(LabelStore, "_check", None)
    assert store.read_from(position).records == []


def test_failed_read_is_repeated(state_location: StateLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = LabelStore(state_location), LabelStore(state_location)
    writer.append([upsert("a")])
    position = reader.read_from().position
    writer.append([upsert("b")])
    time.sleep(0.6)
    with monkeypatch.context() as patched:
        patched.setattr(LabelStore, "_check", None)
        with pytest.raises(TypeError):
            reader.read_from(position)
    assert [record.id for record in reader.read_from(position).records] == ["b"]


def test_compacting_keeps_the_last_change_of_each_label_and_readers_go_on(state_location: StateLocation) -> None:
    store, reader = LabelStore(state_location), LabelStore(state_location)
    for year in range(50):
        store.append([upsert("a", year=year), upsert(f"n{year}"), hide(f"n{year - 1}")])
    store.append([hide("b"), restore("b")])
    half = store.read_from().records
    before = reader.read_from()
    store.compact()
    tail = reader.read_from(before.position)
    assert (tail.records, tail.restarted) == ([], False)
    saved = LabelStore(state_location).read_from().records
    assert (replay(saved), len(saved)) == (replay(half), 1 + 50 + 1 + 2)
    assert saved[-1] == restore("b"), "a reader that has seen it hidden must see it come back"
    store.append([hide("a")])
    time.sleep(0.6)
    more = reader.read_from(tail.position)
    assert ([record.id for record in more.records], more.restarted) == (["a"], False)


def test_concurrent_threads_lose_no_change(state_location: StateLocation) -> None:
    shared = LabelStore(state_location)
    observed: list[str] = []

    def write(name: int) -> None:
        store = shared if name % 2 else LabelStore(state_location)
        for count in range(15):
            store.append([upsert(f"{name}-{count}-{part}") for part in range(3)])
            if count == 7:
                store.compact()

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    reader, position = LabelStore(state_location), None
    while any(thread.is_alive() for thread in threads) or len(observed) < 180:
        tail = reader.read_from(position)
        assert not tail.restarted
        observed += [record.id for record in tail.records]
        position = tail.position
        assert len(observed) % 3 == 0
    assert sorted(observed) == sorted(
        f"{name}-{count}-{part}" for name in range(4) for count in range(15) for part in range(3)
    )


def test_concurrent_creation_makes_one_store(state_location: StateLocation) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: LabelStore(state_location).append([hide(str(name))]), range(8)))
    assert sorted(ids(state_location)) == [str(name) for name in range(8)]
    assert LabelStore(state_location).read_from().position is not None


@pytest.mark.parametrize("value", [float("nan"), "\ud800", 10**5000], ids=["nan", "half", "long"])
def test_values_outside_json_are_refused(state_location: StateLocation, value: object) -> None:
    store = LabelStore(state_location)
    with pytest.raises(StoreError, match="label 'b': expected values that JSON can hold, found others: "):
        store.append([upsert("a"), upsert("b", value=value)])
    assert store.read_from().records == []


@pytest.mark.parametrize(
    "value", [10**400, -(2**63), 0.1, 1e300, "\u2028\x00é", [None, True, {"": []}], {"a": {"b": 1}}]
)
def test_odd_values_round_trip(state_location: StateLocation, value: object) -> None:
    LabelStore(state_location).append([upsert("a", value=value)])
    assert LabelStore(state_location).read_from().records == [upsert("a", value=value)]


CHILD = """
import sys
from datetime import UTC, datetime
from longtail.bundle import Upsert
from longtail.state import LabelStore, parse_location
store, first = LabelStore(parse_location(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
for count in range(first, first + 100_000):
    at = datetime(2026, 11, 1, tzinfo=UTC)
    upserts = [Upsert(id=f"{count}-{part}", at=at, features={"text": "x" * (count * 37 % 9000)}) for part in range(3)]
    store.append(upserts)
    print(count, flush=True)
    if count % 20 == 19:
        store.compact()
"""
KILLS = 6


@pytest.mark.process
def test_kill_9_loses_no_acknowledged_change(state_location: StateLocation) -> None:
    rng = random.Random(0)
    acknowledged: list[int] = []
    location = str(state_location) if isinstance(state_location, Path) else build_url(state_location)
    for round_ in range(KILLS):
        first = round_ * 100_000
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, location, str(first)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        select.select([child.stdout], [], [], 10)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        acknowledged += [int(count) for count in child.stdout.read().split("\n")[:-1]]
        child.stdout.close()
        child.wait()
        if isinstance(state_location, Postgres):
            LabelStore(state_location).append([hide("wait")])  # for what the killed writer's session may still be about
        result = [id_ for id_ in ids(state_location) if id_ != "wait"]
        batches = [f"{count}-{part}" for count in acknowledged for part in range(3)]
        extra = len(result) - len(batches)
        assert extra in (0, 3), "at most the one batch that was whole but not yet acknowledged"
        assert result[: len(batches)] == batches
        if extra:
            acknowledged.append(int(result[-1].split("-")[0]))
    LabelStore(state_location).append([hide("last")])
    assert ids(state_location)[-1] == "last"
    if isinstance(state_location, Path):
        assert not list(state_location.glob(".*.tmp"))


def test_dates_follow_store_and_release_with_wrong_clocks(state_location: StateLocation) -> None:
    day = timedelta(days=1)
    single, other = LabelStore(state_location), LabelStore(state_location)
    step = timedelta(microseconds=1)

    def dates() -> list[datetime]:
        return [record.at for record in LabelStore(state_location).read_from().records]

    def at(moment: datetime, id_: str = "a") -> Hide:
        return Hide(id=id_, at=moment)

    single.append([at(AT)], after=AT - day)
    assert dates() == [AT], "the clock is not behind"
    other.append([at(AT - day), at(AT + day), at(AT)], after=AT)
    assert dates()[1:] == [AT + step, AT + day, AT + step]
    # Of another writer's records, too, read by it or not.
    single.append([at(AT)], after=AT)
    other.read_from()
    other.append([at(AT)], after=AT)
    assert dates()[4:] == [AT + day + step, AT + day + 2 * step]
    single.compact()
    other.append([at(AT)], after=AT)
    single.append([at(AT)], after=AT + 5 * day)
    assert dates() == [AT + day + 2 * step, AT + day + 3 * step, AT + 5 * day + step]
    single.append([at(AT)])
    assert dates()[-1] == AT, "without a release they are as they are"
    other.append([at(AT)], after=datetime.max.replace(tzinfo=UTC))
    assert dates()[-1] == datetime.max.replace(tzinfo=UTC)
