"""Replicas that share a database tell the same figures: those that one host would, had it answered everything."""

from __future__ import annotations

import errno
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from longtail.serving.monitoring import ArmAnswer, Design, LiveFigures
from longtail.serving.monitoring.exchange import SharedClock
from longtail.state import FigureRow, Place, Postgres, ReplicaStore, StoreError, read_place
from longtail.state.engines import postgres_engine, writing
from tests.postgres import PostgresServer, postgres
from tests.serving.monitoring.shop import BASELINE, BUCKETS, NOON, Clock, a_live, answered
from tests.serving.monitoring.test_arms import design, in_arms

pytestmark = pytest.mark.process

Opening = Callable[..., LiveFigures]
LAYOUT = '{"rows": 1440, "columns": 1, "dtype": "float64", "seconds": 60}'


def packed(counts: Sequence[float]) -> bytes:
    return zlib.compress(np.array(counts, np.float64).tobytes())


def told(release: str, kind: str, *, period: int = 0, layout: str = LAYOUT, content: bytes = packed([1])) -> FigureRow:
    """A row, so many periods after noon."""
    return FigureRow(0, release, kind, int(NOON // 60) + period, layout, content, 0, NOON + 86_400)


@pytest.fixture
def kept(database_server: PostgresServer) -> Place:
    return read_place(database_server.url())


@pytest.fixture
def replica(tmp_path: Path, clock: Clock, kept: Place) -> Iterator[Opening]:
    """Opens one worker of a replica, by the replica's name."""
    with ExitStack() as stack:

        def opened(name: str, **arguments: Any) -> LiveFigures:
            state = tmp_path / name
            state.mkdir(exist_ok=True)
            live = a_live(state, **({"clock": clock, "kept": kept} | arguments))
            stack.callback(live.close)
            return live

        yield opened


def exchanged(*replicas: LiveFigures) -> None:
    """Each tells, and each hears what all have told."""
    for live in (*replicas, *replicas):
        assert live.exchange is not None
        live.exchange.exchange()


def reports(clock: Clock, *replicas: LiveFigures) -> list[dict[str, Any]]:
    """What each says, once all have heard of each other, but for what it says of itself alone."""
    exchanged(*replicas)
    clock.pass_(1)
    return [{name: of for name, of in live.report().items() if name != "verdict"} for live in replicas]


def asked(live: LiveFigures, rng: np.random.Generator) -> list[Any]:
    """Some batches and requests, counted, and the batches."""
    batches = [
        answered(
            [rng.choice(14, 3, replace=False).tolist() for _ in range(rng.integers(1, 5))],
            bias_removal=float(rng.choice([0, 0.5, 1])),
            popularity=float(rng.choice([0, -1])),
            score=float(rng.uniform(0, 10)),
        )
        for _ in range(5)
    ]
    for batch in batches:
        live.count_answers(batch)
        live.count_request(0.004, 200)
    live.count_request(0.2, 503)
    live.count_shed()
    return batches


def test_replicas_say_what_one_host_would(tmp_path: Path, replica: Opening, clock: Clock) -> None:
    workers = [replica("a"), replica("a", worker=1), replica("b"), replica("c")]
    (tmp_path / "alone").mkdir()
    alone = a_live(tmp_path / "alone", clock)
    rng = np.random.default_rng(0)
    for minutes in (0, 1, 3, 9, 40, 200, 700):
        clock.pass_(60 * minutes)
        for live in workers:
            seed = rng.integers(1 << 30)
            asked(live, np.random.default_rng(seed))
            asked(alone, np.random.default_rng(seed))
        found = reports(clock, *workers)
        expected = {name: of for name, of in alone.report().items() if name != "verdict"}
        assert expected["windows"]["5m"]["queries"] > 0
        for report in found:
            assert report == expected
    alone.close()


def test_what_was_told_is_told_once_through_kills_and_a_lost_disk(
    tmp_path: Path, replica: Opening, clock: Clock
) -> None:
    first, other = replica("a"), replica("b")
    first.count_answers(answered([[0, 4]] * 3))
    exchanged(first, other)
    first.count_answers(answered([[0, 4]] * 4))
    # As killed: what it had not told yet is in its rings, which the next process finds.
    shutil.copytree(tmp_path / "a", tmp_path / "killed")
    killed = replica("killed")
    assert {report["windows"]["24h"]["queries"] for report in reports(clock, killed, other)} == {7}
    # With its disk gone, it is another, and what it told before still counts.
    assert killed.exchange is not None
    killed.exchange._trouble = "gone: nothing is told at the end"
    killed.close()
    shutil.rmtree(tmp_path / "killed")
    fresh = replica("fresh")
    fresh.count_answers(answered([[8]]))
    assert {report["windows"]["24h"]["queries"] for report in reports(clock, fresh, other)} == {8}
    assert {report["windows"]["24h"]["coverage"] for report in reports(clock, fresh, other)} == {3 / 12}


def test_a_release_that_comes_back_begins_at_zero_everywhere(replica: Opening, clock: Clock) -> None:
    replicas = [replica("a"), replica("b")]
    for live in replicas:
        live.count_answers(answered([[0, 4, 8]]))
    exchanged(*replicas)
    for name in ("r2", "r1"):
        clock.pass_(90)
        for live in replicas:
            live.begin_release(name, BUCKETS, BASELINE)
    replicas[0].count_answers(answered([[1]]))
    for report in reports(clock, *replicas):
        assert report["windows"]["24h"]["queries"] == 1
        assert report["windows"]["24h"]["coverage"] == 1 / 12
        assert report["windows"]["24h"]["gini"] == pytest.approx(11 / 12)
        assert [(one["name"], one["until"] is None) for one in report["releases"]] == [
            ("r1", False), ("r2", False), ("r1", True)
        ]  # fmt: skip


def test_a_replica_that_goes_over_later_changes_nothing(replica: Opening, clock: Clock) -> None:
    first, late = replica("a"), replica("b")
    first.begin_release("r2", BUCKETS, BASELINE)
    clock.pass_(30)
    first.count_answers(answered([[0]], release="r2"))
    late.count_answers(answered([[0, 4]] * 200))
    of_first, of_late = reports(clock, first, late)
    assert (of_first["release"], of_first["windows"]["5m"]["queries"]) == ("r2", 1)
    assert (of_late["release"], of_late["windows"]["5m"]["queries"]) == ("r1", 200)
    assert of_first["series"] == of_late["series"]
    assert of_first["series"]["psi"][0] > 0
    first.begin_release("r3", BUCKETS, BASELINE)
    clock.pass_(30)
    late.begin_release("r2", BUCKETS, BASELINE)
    late.begin_release("r3", BUCKETS, BASELINE)
    assert [one["name"] for one in reports(clock, first, late)[1]["releases"]] == ["r1", "r2", "r3"]
    first.begin_release("r2", BUCKETS, BASELINE)
    late.begin_release("r2", BUCKETS, BASELINE)
    joined = replica("c", begin=False)
    joined.begin_release("r2", BUCKETS, BASELINE)
    clock.pass_(60)
    exchanged(joined)
    joined.flush()
    found = reports(clock, first, late, joined)
    assert [[one["name"] for one in report["releases"]] for report in found] == [["r1", "r2", "r3", "r2"]] * 3
    assert found[0]["series"] == found[2]["series"], "with the baseline of r1, which it never served"


def test_the_history_of_before_is_taken_over_once(tmp_path: Path, replica: Opening, clock: Clock) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        before = a_live(tmp_path / name, clock)
        before.count_answers(answered([[0]]))
        before.close()
    clock.pass_(3600)
    replicas = [replica("a"), replica("b")]
    for report in reports(clock, *replicas):
        assert report["windows"]["24h"]["queries"] == 2
        assert [one["name"] for one in report["releases"]] == ["r1"]


def test_arms_of_an_experiment_cover_what_any_replica_answered(replica: Opening) -> None:
    replicas = [replica("a"), replica("b")]
    for live in replicas:
        live.comparison.compare(Design(design()))
    for place, live in enumerate(replicas):
        live.count_answers(in_arms([f"a{place}"], [ArmAnswer("r-1", "new", place)], [[place, 4 + place, 8]]))
        live.flush()
    exchanged(*replicas)
    for live in replicas:
        (arm,) = (arm for arm in live.comparison.report()["experiment"]["arms"] if arm["name"] == "new")
        assert (arm["answers"], arm["coverage"]) == (2, 5 / 12)
    for live in replicas:
        live.comparison.compare(Design(None))
    exchanged(*replicas)
    for live in replicas:
        assert not [*(live._root / "r1").glob("arm-*")]
    fresh = replica("c")
    exchanged(fresh)
    assert not [*(fresh._root / "r1").glob("arm-*")], "what has ended is not told any more"


def test_clocks_that_are_minutes_apart(replica: Opening) -> None:
    apart = [SharedClock(lambda ahead=ahead: time.time() + ahead) for ahead in (-400.0, 0.0, 400.0)]  # type: ignore[misc]
    replicas = [replica(name, clock=clock) for name, clock in zip("abc", apart, strict=True)]
    assert max(abs(clock() - time.time()) for clock in apart) < 1
    for live in replicas:
        live.count_answers(answered([[0]]))
    exchanged(*replicas)
    time.sleep(1.1)
    found = [live.report() for live in replicas]
    assert [report["windows"]["5m"]["queries"] for report in found] == [3, 3, 3]
    assert len({report["since"] for report in found}) == 1


def test_what_is_no_ring_is_left_out(kept: Postgres, replica: Opening, clock: Clock) -> None:
    live = replica("a")
    store, empty = ReplicaStore(kept), b"x\x9c\x03\x00\x00\x00\x00\x01"
    bad = [
        told("..", "new", content=empty),
        told("r1", "../new", content=empty),
        told("r1", "new", layout="{"),
        told("r1", "dropped", layout=LAYOUT.replace("float64", "O")),
        told("r1", "priors", content=empty),
        told("r1", "priors", layout=LAYOUT.replace("60", "0")),
        told("../r1", "priors", content=b""),
        told("r1", "likeness", content=b"no zlib"),
    ]
    store.tell("0123456789abcdef", bad, NOON)
    store.close()
    live.count_answers(answered([[0]]))
    (report,) = reports(clock, live)
    assert report["windows"]["5m"]["queries"] == 1
    assert not [*live._root.rglob("*0123456789abcdef*")]


def test_a_ring_that_is_damaged_holds_up_nobody(replica: Opening, clock: Clock) -> None:
    first, other = replica("a"), replica("b")
    first.count_answers(answered([[0]]))
    for number, header in enumerate((b"{}", b"[1]", b'{"kind": 5, "rows": "x"}', b"\xff", b"")):
        (first._root / "r1" / f"priors.{7 + number}.ring").write_bytes(header)
    assert [report["windows"]["5m"]["queries"] for report in reports(clock, first, other)] == [1, 1]


def test_rows_of_two_layouts_hold_up_nobody(kept: Postgres, replica: Opening, clock: Clock) -> None:
    first, second = replica("a"), replica("b")
    store = ReplicaStore(kept)
    wide = LAYOUT.replace('"columns": 1', '"columns": 2')
    store.tell(
        "0000000000000000",
        [
            told("r1", "priors", period=-1, layout=wide, content=packed([1, 2])),
            told("r1", "priors", content=packed([3])),
            told("r1", "priors", period=1, layout=wide, content=packed([1, 2])),
        ],
        NOON,
    )
    store.close()
    second.count_answers(answered([[0]]))
    assert reports(clock, first, second)[0]["windows"]["5m"]["queries"] == 1


def test_a_database_that_was_set_back_is_told_anew(kept: Postgres, replica: Opening, clock: Clock) -> None:
    first, second = replica("a"), replica("b")
    first.count_answers(answered([[0]] * 5))
    second.count_answers(answered([[4]] * 7))
    exchanged(first, second)
    engine = postgres_engine(kept)
    for live in (first, second):
        for _ in range(3):
            live.count_answers(answered([[8]]))
            exchanged(live)
    with writing(engine) as connection:
        connection.execute(text("UPDATE replicas SET version = 1"))
        connection.execute(text("DELETE FROM figure_rows WHERE version > 1"))
    engine.dispose()
    for live in (first, second):
        live.count_answers(answered([[8]]))
    exchanged(first, second)
    assert [report["windows"]["5m"]["queries"] for report in reports(clock, first, second)] == [20, 20]
    fresh = replica("fresh", begin=False)
    fresh.begin_release("r1", BUCKETS, BASELINE)
    assert reports(clock, fresh)[0]["windows"]["5m"]["queries"] == 20


def test_one_that_lost_its_last_row_is_told_anew(kept: Postgres, replica: Opening, clock: Clock) -> None:
    # As a standby that takes over, and lacks the last transaction, which others have read.
    first, other = replica("a"), replica("b")
    first.count_answers(answered([[0]] * 5))
    exchanged(first, other)
    engine = postgres_engine(kept)
    with writing(engine) as connection:
        before = connection.scalar(text("SELECT max(version) FROM replicas"))
    first.count_answers(answered([[4]] * 50))
    exchanged(first, other)
    with writing(engine) as connection:
        connection.execute(text("DELETE FROM figure_rows WHERE version > :before"), {"before": before})
        connection.execute(text("UPDATE replicas SET version = :before WHERE version > :before"), {"before": before})
    engine.dispose()
    clock.pass_(2)
    assert first.exchange is not None
    first.count_answers(answered([[8]] * 2))
    first.exchange.exchange()
    clock.pass_(2)
    exchanged(first, other)
    assert [report["windows"]["5m"]["queries"] for report in reports(clock, first, other)] == [57, 57]


def test_a_worker_that_ends_takes_nobody_away(replica: Opening, clock: Clock) -> None:
    workers, other = [replica("a", worker=worker) for worker in range(2)], replica("b")
    for live in (*workers, other):
        live.begin_release("r2", BUCKETS, BASELINE)
        live.count_answers(answered([[0]], release="r2"))
    workers[0].close()
    exchanged(workers[1], other)
    other.begin_release("r1", BUCKETS, BASELINE)
    found = reports(clock, workers[1])[0]
    assert (found["windows"]["5m"]["queries"], found["since"] < found["now"]) == (3, True)


def test_a_disk_that_was_full_reads_again(replica: Opening, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = replica("a"), replica("b")
    first.count_answers(answered([[0]] * 5))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        exchanged(first, other)
    assert reports(clock, other)[0]["windows"]["5m"]["queries"] == 5


def test_a_clock_that_went_ahead_and_back(replica: Opening, clock: Clock) -> None:
    first, other = replica("a"), replica("b")
    clock.pass_(86_400)
    first.count_answers(answered([[0]]))
    exchanged(first, other)
    clock.pass_(-86_400)
    first.count_answers(answered([[0, 4]] * 13))
    found = reports(clock, first, other)
    assert [report["windows"]["5m"]["queries"] for report in found] == [13, 13]
    assert [report["windows"]["24h"]["coverage"] for report in found] == [2 / 12] * 2


def test_a_database_that_hangs_holds_up_no_end(replica: Opening) -> None:
    with postgres() as server:
        place = read_place(server.url())
        live = replica("a", kept=place)
        assert live.exchange is not None
        live.exchange.exchange()
        server.pause()
        began = time.monotonic()
        live.exchange.stop()
        assert time.monotonic() - began < 10
        server.go_on()
        live.close()


def test_rows_that_nobody_wants_are_deleted(kept: Postgres, replica: Opening, clock: Clock) -> None:
    live, other = replica("a"), replica("b")
    for _ in range(30):
        live.count_answers(answered([[0]]))
        exchanged(live, other)
        clock.pass_(60)
    store = ReplicaStore(kept)
    store.forget(clock())
    kinds = [row.kind for _, row in store.news({}, "other")]
    assert kinds.count("labels-5m") <= 6
    assert kinds.count("answers") == 30
    clock.pass_(2 * 86_400)
    store.forget(clock())
    assert [*store.news({}, "other")] == []
    store.close()


def test_workers_that_are_no_more_are_told_of(replica: Opening, clock: Clock) -> None:
    workers = [replica("a", worker=worker) for worker in range(3)]
    for live in workers:
        live.count_answers(answered([[0]]))
        assert live.exchange is not None
        live.exchange._trouble = "as killed: nothing is told at the end"
        live.close()
    first, other = replica("a"), replica("b")
    assert {report["windows"]["5m"]["queries"] for report in reports(clock, first, other)} == {3}


def test_a_replica_that_is_gone_is_not_of_the_next_time(replica: Opening, clock: Clock) -> None:
    gone, first, second = replica("gone"), replica("a"), replica("b")
    gone.count_answers(answered([[0, 4]]))
    exchanged(gone, first, second)
    gone.close()
    for name in ("r2", "r1"):
        clock.pass_(90)
        for live in (first, second):
            live.begin_release(name, BUCKETS, BASELINE)
    first.count_answers(answered([[8]]))
    for report in reports(clock, first, second):
        assert (report["windows"]["24h"]["queries"], report["windows"]["24h"]["coverage"]) == (1, 1 / 12)


def test_the_order_of_releases_through_restarts(replica: Opening, clock: Clock) -> None:
    first, other = replica("a"), replica("b")
    other.begin_release("r2", BUCKETS, BASELINE)
    assert [one["name"] for one in reports(clock, first, other)[0]["releases"]] == ["r1", "r2"]
    other.begin_release("r1", BUCKETS, BASELINE)
    clock.pass_(10)
    first.close()
    first = replica("a")
    found = reports(clock, first, other)
    assert [one["name"] for one in found[0]["releases"]] == ["r1"], "the first has never left it"
    assert found[0]["since"] == found[1]["since"] == "2023-11-15T12:00:00Z"
    first.begin_release("r2", BUCKETS, BASELINE)
    other.begin_release("r2", BUCKETS, BASELINE)
    # One that lost its disk starts with what it has fetched before, and moves on.
    fresh = replica("c", begin=False)
    for name in ("r1", "r2"):
        fresh.begin_release(name, BUCKETS, BASELINE)
    for report in reports(clock, first, other, fresh):
        assert [one["name"] for one in report["releases"]] == ["r1", "r2"]
    for live in (first, other, fresh):
        live.begin_release("r1", BUCKETS, BASELINE)
    for report in reports(clock, first, other, fresh):
        assert [one["name"] for one in report["releases"]] == ["r1", "r2", "r1"]


def test_what_is_kept_is_tidied_though_the_history_is_not_to_be_had(
    replica: Opening, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = replica("a")
    tidied: list[float] = []

    def begin(*_: object) -> bool:
        raise StoreError("away")

    monkeypatch.setattr(live._history, "begin", begin)
    monkeypatch.setattr(live._store, "tidy", lambda now: tidied.append(now))
    live.begin_release("r2", BUCKETS, BASELINE)
    for _ in range(3):
        clock.pass_(61)
        live.flush()
    assert len(tidied) >= 3
    monkeypatch.undo()
    clock.pass_(61)
    live.flush()
    assert [one["name"] for one in reports(clock, live)[0]["releases"]] == ["r1", "r2"]


def test_counts_by_label_go_with_the_release(tmp_path: Path, replica: Opening, clock: Clock) -> None:
    early = replica("c", begin=False)
    assert early.exchange is not None
    early.exchange.exchange()
    early.flush()  # nobody serves anything yet
    first, late = replica("a"), replica("b", begin=False)
    late.begin_release("r0", BUCKETS, BASELINE)
    first.count_answers(answered([[0, 4]]))
    exchanged(first, late)
    assert not [*(tmp_path / "b" / "live" / "r1").glob("labels-*")], "nobody counts them there"
    late.begin_release("r1", BUCKETS, BASELINE)
    for report in reports(clock, first, late):
        assert report["windows"]["1h"]["coverage"] == 2 / 12
    theirs = tmp_path / "b" / "live" / "r1"
    assert late.exchange is not None
    late.exchange._forget({"r1"}, clock())
    assert first.exchange is not None
    assert [*theirs.glob(f"labels-24h.{first.exchange.replica}-0.ring")]
    late.exchange._forget({"r1"}, clock() + 2 * 86_400)
    assert not [*theirs.glob("*-0.ring")], "a replica that is gone leaves nothing"


def test_a_database_that_is_away_is_told_afterwards(tmp_path: Path, clock: Clock) -> None:
    with postgres() as server, ExitStack() as stack:
        place = read_place(server.url())

        def opened(name: str) -> LiveFigures:
            (tmp_path / name).mkdir()
            live = a_live(tmp_path / name, clock, kept=place)
            stack.callback(live.close)
            return live

        replicas = [opened("a"), opened("b")]
        exchanged(*replicas)
        server.kill()
        for _ in range(5):
            for live in replicas:
                live.count_answers(answered([[0]]))
            exchanged(replicas[0])
            clock.pass_(60)
        replicas[0].begin_release("r2", BUCKETS, BASELINE)
        replicas[1].begin_release("r2", BUCKETS, BASELINE)
        server.start()
        clock.pass_(60)
        for live in replicas:
            live.flush()
        found = reports(clock, *replicas)
        assert found[0] == found[1]
        assert [sum(report["series"]["queries"]) for report in found] == [10, 10]
        assert [one["name"] for one in found[0]["releases"]] == ["r1", "r2"]
        assert found[0]["since"] == found[0]["releases"][-1]["from"]
