from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from longtail.serving.core.service import ForwardClock
from longtail.serving.errors import StateError, StorageError
from longtail.serving.events import folder as module
from longtail.serving.events.folder import FolderEvents, Segment, finish_segment, kept_since
from longtail.serving.events.reader import damaged_files, open_events
from longtail.serving.events.schema import SCHEMA, event_json

NOW = 1_700_000_000.0  # before any real time, at which segments become Parquet


def line(label: str, **fields: Any) -> bytes:
    return event_json(kind="choice", time=NOW, labels=[label], **fields)


def opened(folder: Path, **options: Any) -> FolderEvents:
    return FolderEvents(folder, **({"days": 1.0, "most_bytes": 1 << 30} | options))


def labels(folder: Path) -> list[str]:
    with open_events(folder) as connection:
        return sorted(
            label for (label_ids,) in connection.execute("SELECT labels FROM events").fetchall() for label in label_ids
        )


def names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir() if not path.name.startswith("."))


def test_events_are_readable_during_and_after_writing(tmp_path: Path) -> None:
    events = opened(tmp_path)
    for stored in [events.append([line(str(number)), line(f"{number}b")]) for number in range(50)]:
        stored.result(10)
    expected = sorted([str(number) for number in range(50)] + [f"{number}b" for number in range(50)])
    assert names(tmp_path) == [".jsonl"]
    assert labels(tmp_path) == expected
    events.close()
    assert names(tmp_path) == [".parquet"]
    assert labels(tmp_path) == expected
    assert pq.read_schema(next(tmp_path.glob("*.parquet"))).equals(SCHEMA)


def test_all_columns_are_stored(tmp_path: Path) -> None:
    event = {
        "kind": "choice", "time": NOW + 0.25, "client": "0f", "idempotency_key": "k", "answer": "f00",
        "answered_at": NOW, "release": "r", "bias_removal": 0.5, "popularity": 0.0,
        "cooccurrence": 0.25, "priors": [0.5],
        "restricted": True, "run": "e-1",
        "arm": "a", "unit": -(2**63), "labels": ["é"], "positions": [None], "propensities": [0.25], "buckets": [-1],
        "event": "click", "weight": 2.0, "features": '{"a":1}',
        "options": '{"k":3}',
    }  # fmt: skip
    events = opened(tmp_path)
    events.append([event_json(**event)]).result(10)
    events.close()
    (row,) = pq.read_table(tmp_path).to_pylist()
    assert row == {**event, "version": 1, "time": row["time"], "answered_at": row["answered_at"]}
    assert (row["time"].timestamp(), row["answered_at"].timestamp()) == (NOW + 0.25, NOW)


def test_offered_events_are_written_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    events = opened(tmp_path, count_dropped=dropped.append)
    assert events.offer([line("a")]) == 0
    events.append([line("b")]).result(10)
    monkeypatch.setattr(Segment, "write", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert events.offer([line("c"), line("d")]) == 0
    with pytest.raises(StorageError, match="the events could not be written to the disk"):
        events.append([line("e")]).result(10)
    monkeypatch.undo()
    events.append([line("f")]).result(10)
    events.close()
    assert labels(tmp_path) == ["a", "b", "f"]
    assert sum(dropped) == 2


def test_events_beyond_the_byte_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 3 * len(line("5")))
    monkeypatch.setattr(Segment, "write", lambda *_, **__: time.sleep(0.3))
    events = opened(tmp_path)
    waiting = [events.append([line(str(number))]) for number in range(12)]
    refused = [stored for stored in waiting if stored.done() and stored.exception()]
    assert refused
    assert all(isinstance(stored.exception(), StorageError) for stored in refused)
    assert events.offer([line("x"), line("y")]) == 2
    events.close()


def test_cancelled_clients_and_errors_stop_no_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = opened(tmp_path)
    stored = events.append([line("a")])
    assert not stored.cancel()
    stored.result(10)
    monkeypatch.setattr(Segment, "write", lambda *_, **__: 1 / 0)
    with pytest.raises(StorageError):
        events.append([line("b")]).result(10)
    monkeypatch.undo()
    events.append([line("c")]).result(10)
    events.close()
    assert labels(tmp_path) == ["a", "c"]


class TinyDisk:
    """A file that takes so many bytes, then a part of what is written, then none."""

    def __init__(self, room: int) -> None:
        self.room, self.write = room, os.write

    def __call__(self, file: int, content: memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.write(file, content[: self.room])
        self.room -= written
        return written


def test_full_disk_stores_no_refused_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = opened(tmp_path)
    events.append([line("before")]).result(10)
    monkeypatch.setattr(module.os, "write", TinyDisk(len(line("x")) + 5))
    with pytest.raises(StorageError):
        events.append([line("x"), line("y")]).result(10)
    monkeypatch.undo()
    events.append([line("after")]).result(10)
    events.close()
    assert labels(tmp_path) == ["after", "before"]
    assert names(tmp_path) == [".parquet"] * 2


def test_segments_end_by_size_and_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 200)
    events = opened(tmp_path)
    for number in range(4):
        events.append([line(str(number))]).result(10)
    events.close()
    assert len(names(tmp_path)) == 2
    assert labels(tmp_path) == ["0", "1", "2", "3"]
    segment = Segment(tmp_path, NOW)
    assert not segment.full(NOW + 599)
    assert segment.full(NOW + 600)
    segment.close()


def test_oldest_files_are_deleted_by_age_and_bytes(tmp_path: Path) -> None:
    for age, name in ((9, "a"), (2, "b"), (1, "c")):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(bytes(100))
        os.utime(path, (NOW - 86_400 * age,) * 2)
    assert kept_since(tmp_path) == 0
    opened(tmp_path, days=3.0, most_bytes=150, clock=lambda: NOW).close()
    assert [path.name for path in sorted(tmp_path.glob("*.parquet"))] == ["c.parquet"]
    assert kept_since(tmp_path) == NOW - 86_400 * 2


def aged(folder: Path, *days: float) -> None:
    for age in days:
        path = folder / f"{age:05.1f}.parquet"
        path.write_bytes(b"x")
        os.utime(path, (NOW - 86_400 * age,) * 2)


def read_times(folder: Path) -> list[float]:
    return sorted(float(path.stem) for path in folder.glob("*.parquet"))


@pytest.mark.parametrize(
    ("ages", "after", "expected"),
    [
        (range(0, 300, 30), 0, [0, 30]),  # the last 30 days may be a clock that has jumped ahead
        (range(0, 300, 30), 0.5, [0]),
        (range(0, 300, 30), 20, [0]),  # as may the last 20
        (range(10), 0, range(8)),
        (range(10), 0.5, range(7)),
        (range(8), 8, range(8)),
        ([0, 0.5, *range(8, 12)], 0, [0, 0.5]),
        ([0, 0.5, 2, 4, 6, 8], 0, [0, 0.5, 2, 4, 6]),
    ],
)
def test_rare_events_are_deleted_by_age(
    tmp_path: Path, ages: Sequence[float], after: float, expected: Sequence[float]
) -> None:
    aged(tmp_path, *ages)
    opened(tmp_path, days=7.0, clock=lambda: NOW + 86_400 * after).close()
    assert read_times(tmp_path) == list(expected)


def test_clock_ahead_deletes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(bytes(100))
    os.utime(path, (NOW, NOW))
    opened(tmp_path, days=3.0, clock=lambda: NOW + 8 * 86_400).close()
    assert path.exists()
    # Also with events of that clock, and after it was set right.
    ahead = opened(tmp_path, days=3.0, clock=lambda: NOW + 8 * 86_400)
    ahead.append([line("a")]).result(10)
    ahead.close()
    (other,) = set(tmp_path.glob("*.parquet")) - {path}
    os.utime(other, (NOW + 8 * 86_400,) * 2)
    for clock in (NOW + 8 * 86_400, NOW + 3600, NOW + 86_400):
        opened(tmp_path, days=3.0, clock=lambda: clock).close()  # noqa: B023
    assert {*tmp_path.glob("*.parquet")} == {path, other}
    assert kept_since(tmp_path) == 0


def test_close_converts_the_last_segment_after_the_writer_has_ended_it(tmp_path: Path) -> None:
    events = opened(tmp_path)
    events.append([line("a")]).result(10)
    events._closing.set()
    events._ended.set()  # the other thread tidies up while the writer still has the segment
    time.sleep(0.1)
    events.close()
    assert names(tmp_path) == [".parquet"]


def test_files_are_private(tmp_path: Path) -> None:
    events = opened(tmp_path)
    events.append([line("a")]).result(10)
    events.close()
    (tmp_path / "s.jsonl").write_bytes(line("a") + b"\n[1]\n")
    finish_segment(tmp_path / "s.jsonl")
    paths = [*tmp_path.glob("*.parquet"), *tmp_path.glob("*.damaged")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600] * 3


def test_times_never_run_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wall, passed = [NOW], [0.0]
    monkeypatch.setattr("time.time", lambda: wall[0])
    monkeypatch.setattr("time.monotonic", lambda: passed[0])
    clock = ForwardClock()
    assert clock() == NOW
    wall[0], passed[0] = NOW - 3600, 5.0  # set back by an hour
    assert clock() == NOW + 5
    wall[0] = NOW + 60
    assert clock() == NOW + 60
    wall[0], passed[0] = NOW - 3600, 0.0
    assert ForwardClock(NOW)() == NOW  # started while it is set back
    assert not caplog.records
    assert ForwardClock(NOW).problem() is None
    assert ForwardClock(NOW + 8 * 86_400)() == NOW - 3600  # the newest event is from a clock that was ahead
    assert "ahead of this machine's clock, and those since" in caplog.text
    wall[0] = NOW + 9 * 86_400
    clock = ForwardClock()
    assert (clock(), clock.problem()) == (NOW + 9 * 86_400, None)
    wall[0] = NOW  # set back by nine days while events are written
    assert clock() == NOW + 9 * 86_400
    assert clock.problem() == (
        "Events are dated 216 hours ahead of this machine's clock, because it has been set back: exports and refreshes "
        "take them once it is there."
    )
    wall[0] = NOW + 9 * 86_400
    assert clock.problem() is None


WRITER = """
import stat
import sys
from pathlib import Path
from longtail.serving.core.service import ForwardClock
from longtail.serving.events.folder import FolderEvents
from longtail.serving.events.schema import event_json
events, number = FolderEvents(Path(sys.argv[1]), days=1, most_bytes=1 << 30), 0
while True:
    waiting = [events.append([event_json(kind="choice", time=1.0, labels=[str(number + of)])]) for of in range(20)]
    for kept in waiting:
        kept.result(10)
    number += 20
    print(number, flush=True)
"""


@pytest.mark.process
def test_acknowledged_events_survive_a_kill(tmp_path: Path) -> None:
    acknowledged = 0
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        while acknowledged < 400:
            acknowledged = int(writer.stdout.readline())
        # While it writes, its segment is left alone, whoever comes.
        opened(tmp_path).close()
        assert names(tmp_path) == [".jsonl"]
        writer.send_signal(signal.SIGKILL)
        acknowledged = max(acknowledged, *(int(number) for number in writer.stdout.read().split()), 0)
    (segment,) = tmp_path.glob("*.jsonl")
    with segment.open("ab") as file:
        file.write(line("cut")[:-9])
    label_ids = set(labels(tmp_path))
    opened(tmp_path).close()
    assert names(tmp_path) == [".parquet"]
    assert set(labels(tmp_path)) == label_ids
    assert {str(number) for number in range(acknowledged)} <= label_ids
    assert "cut" not in label_ids


def test_damaged_lines_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(line("a") + b"\n" + b"\0" * 30 + b"\n[1]\n" + line("b") + b"\n")
    assert labels(tmp_path) == ["a", "b"]
    finish_segment(path)
    assert labels(tmp_path) == ["a", "b"]
    assert damaged_files(tmp_path) == ["s.damaged"]
    assert (tmp_path / "s.damaged").read_bytes() == b"\0" * 30 + b"\n[1]\n"
    assert "2 lines are no events; they are kept in s.damaged" in caplog.text


def test_kill_during_conversion_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(line("a") + b"\n")
    finish_segment(path)
    path.write_bytes(line("a") + b"\n")
    assert labels(tmp_path) == ["a"]
    finish_segment(path)
    assert names(tmp_path) == [".parquet"]
    assert labels(tmp_path) == ["a"]


def test_new_segment_survives_tidying_by_another_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = module.fcntl.flock

    def late(file: int, operation: int) -> None:
        monkeypatch.setattr(module.fcntl, "flock", lock)
        (path,) = tmp_path.glob("*.jsonl")
        finish_segment(path)  # another worker tidies up
        lock(file, operation)

    monkeypatch.setattr(module.fcntl, "flock", late)
    segment = Segment(tmp_path, NOW)
    segment.write(line("a") + b"\n", sync=True)
    assert labels(tmp_path) == ["a"]
    segment.close()


def test_bad_file_blocks_no_other_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"kind":"\xff\xfe"}\n')
    (tmp_path / "b.jsonl").write_bytes(line("b") + b"\n")
    (tmp_path / "c.jsonl").write_bytes(line("c") + b"\n")
    old = tmp_path / "0.parquet"
    old.write_bytes(b"")
    os.utime(old, (time.time() - 64_800,) * 2)
    write = pq.write_table

    def fail_once(table: Any, working: Path, **options: Any) -> None:
        if working.name == ".b.tmp":
            working.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(table, working, **options)

    monkeypatch.setattr(module.pq, "write_table", fail_once)
    opened(tmp_path, days=0.5).close()
    assert not old.exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".deleted") == [
        ".deleted", "a.damaged", "b.jsonl", "c.parquet",
    ]  # fmt: skip
    assert "b.jsonl cannot be tidied up: OSError" in caplog.text
    assert labels(tmp_path) == ["b", "c"]


def test_missing_or_broken_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="expected a folder of events, found none"), open_events(tmp_path / "none"):
        pass
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(StateError, match="expected files of events"), open_events(tmp_path):
        pass
