"""The log of label changes: what was acknowledged is there after kill -9 and on a full disk, damage is said so."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from longtail.bundle import (
    Hide,
    LabelLog,
    LabelLogCorruptError,
    LabelLogError,
    LabelLogVersionError,
    Restore,
    Upsert,
    replay,
)
from longtail.bundle import label_log as module

AT = datetime(2026, 11, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


def upsert(id_: str, **features: object) -> Upsert:
    return Upsert(id=id_, at=AT, features=features, display={"title": f"“{id_}”\n"})


def hide(id_: str) -> Hide:
    return Hide(id=id_, at=AT)


def restore(id_: str) -> Restore:
    return Restore(id=id_, at=AT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "labels.log"


def ids(path: Path) -> list[str]:
    return [record.id for record in LabelLog(path).read_from().records]


def line(left: int, content: str) -> bytes:
    rest = f"{left} {content}".encode()
    return b"%08x %b\n" % (zlib.crc32(rest), rest)


def test_records_come_back_as_they_went_in(path: Path) -> None:
    records = [upsert("a", genres=["x", 3], weights={"é": 0.5}, year=None), hide("b"), restore("b"), upsert("a\n\0")]
    log = LabelLog(path)
    log.append(records[:1])
    log.append(records[1:])
    assert log.read_from().records == records
    assert LabelLog(path).read_from().records == records
    text = path.read_bytes().splitlines(keepends=True)
    assert text[0].startswith(b"longtail-labels 1 ")
    assert text[2] == line(2, '{"id":"b","at":"2026-11-01T00:00:00Z","op":"hide"}')
    assert [json.loads(each.split(b" ", 2)[2])["id"] for each in text[1:]] == ["a", "b", "b", "a\n\0"]


def test_a_record_without_priors_is_one_that_older_versions_read(path: Path) -> None:
    records = [upsert("a"), upsert("b").model_copy(update={"priors": {"recent": -0.1}})]
    LabelLog(path).append(records)
    assert LabelLog(path).read_from().records == records
    written = [json.loads(each.split(b" ", 2)[2]) for each in path.read_bytes().splitlines()[1:]]
    assert [sorted(record) for record in written] == [
        ["at", "display", "features", "id", "op"],
        ["at", "display", "features", "id", "op", "priors"],
    ]
    assert written[1]["priors"] == {"recent": -0.1}


def test_no_log_is_an_empty_one_and_reading_makes_none(path: Path) -> None:
    log = LabelLog(path)
    assert log.read_from() == ([], None, False)
    log.append([])
    assert list(path.parent.iterdir()) == []


def test_a_reader_goes_on_where_it_stopped(path: Path) -> None:
    writer, reader = LabelLog(path), LabelLog(path)
    writer.append([upsert("a")])
    first = reader.read_from()
    assert [record.id for record in first.records] == ["a"]
    assert reader.read_from(first.position) == ([], first.position, False)
    writer.append([hide("b"), hide("c")])
    second = reader.read_from(first.position)
    assert ([record.id for record in second.records], second.restarted) == (["b", "c"], False)
    assert reader.read_from(second.position).records == []
    assert [record.id for record in reader.read_from(first.position).records] == ["b", "c"]


def test_looking_when_nothing_happened_opens_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LabelLog(path)
    log.append([upsert("a")])
    position = log.read_from().position
    monkeypatch.setattr(Path, "open", None)
    assert log.read_from(position).records == []


def test_the_last_change_of_a_label_counts() -> None:
    first, second = upsert("a", year=1), upsert("a", year=2)
    assert replay([first, upsert("b"), second]).upserts == {"a": second, "b": upsert("b")}
    assert replay([first, hide("a")]) == module.LabelChanges({}, {"a": hide("a")})
    assert replay([hide("a"), second]) == module.LabelChanges({"a": second}, {})
    assert replay([first, hide("a"), restore("a")]) == module.LabelChanges({}, {})
    changes = replay([first, hide("c"), hide("d"), restore("d")])
    assert changes.records() == [first, hide("c")]
    assert replay(changes.records()) == changes
    assert changes.after([hide("a")]) == replay([first, hide("c"), hide("a")])
    assert changes.upserts == {"a": first}


def test_a_batch_cut_anywhere_is_not_there_and_the_next_writer_cuts_it_off(path: Path) -> None:
    log = LabelLog(path)
    log.append([upsert("a")])
    whole = path.stat().st_size
    log.append([upsert("b"), hide("c"), upsert("d")])
    content = path.read_bytes()
    for cut in range(whole, len(content)):
        path.write_bytes(content[:cut])
        tail = LabelLog(path).read_from()
        assert [record.id for record in tail.records] == ["a"], cut
        if cut % 7 == 0:
            LabelLog(path).append([hide("e")])
            assert ids(path) == ["a", "e"]
            assert [record.id for record in LabelLog(path).read_from(tail.position).records] == ["e"]
    path.write_bytes(content[:whole] + bytes(5000))
    LabelLog(path).append([hide("e")])
    assert ids(path) == ["a", "e"]
    assert b"\0" not in path.read_bytes()


def test_every_flipped_byte_is_found(path: Path) -> None:
    LabelLog(path).append([upsert("a"), hide("b")])
    LabelLog(path).append([hide("c")])
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    for at in range(header, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(LabelLogCorruptError, match=r"labels\.log, line [234]: expected .*, found "):
            ids(path)
        with pytest.raises(LabelLogCorruptError):
            LabelLog(path).append([hide("d")])
        assert len(path.read_bytes()) == len(content)


def test_lines_that_are_missing_or_moved_are_found(path: Path) -> None:
    LabelLog(path).append([upsert("a"), hide("b"), hide("c")])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[3]]))
    with pytest.raises(LabelLogCorruptError, match="line 3: expected 1 more records of the batch, found 0"):
        ids(path)
    path.write_bytes(lines[0] + line(0, '{"id":"b","op":"rename","at":"2026-11-01T00:00:00Z"}'))
    with pytest.raises(LabelLogCorruptError, match="line 2: expected an upsert, hide or restore"):
        ids(path)


def test_other_files_and_newer_versions_are_refused(path: Path) -> None:
    for content in (b"", b"PAR1", b"longtail-labels\n", b"longtail-labels 1 abc"):
        path.write_bytes(content)
        with pytest.raises(LabelLogCorruptError, match="line 1: expected longtail-labels 1"):
            ids(path)
    path.write_bytes(b"longtail-labels 2 abc\n")
    with pytest.raises(LabelLogVersionError, match="version 2, this installation reads 1: upgrade Longtail"):
        LabelLog(path).append([hide("a")])


def test_compacting_keeps_what_it_amounts_to_and_readers_start_over(path: Path) -> None:
    log, reader = LabelLog(path), LabelLog(path)
    for year in range(50):
        log.append([upsert("a", year=year), upsert(f"n{year}"), hide(f"n{year - 1}")])
    before = reader.read_from()
    log.compact()
    tail = reader.read_from(before.position)
    assert tail.restarted
    assert replay(tail.records) == module.LabelChanges(
        {"a": upsert("a", year=49), "n49": upsert("n49")}, {f"n{year}": hide(f"n{year}") for year in range(-1, 49)}
    )
    log.append([hide("a")])
    more = reader.read_from(tail.position)
    assert ([record.id for record in more.records], more.restarted) == (["a"], False)
    LabelLog(path.with_name("none.log")).compact()
    assert not path.with_name("none.log").exists()


def test_a_log_that_was_taken_away_is_started_over(path: Path) -> None:
    log = LabelLog(path)
    log.append([hide("a")])
    position = log.read_from().position
    path.unlink()
    assert log.read_from(position) == ([], None, True)
    log.append([hide("b")])
    tail = log.read_from(position)
    assert ([record.id for record in tail.records], tail.restarted) == (["b"], True)


def test_threads_with_logs_of_their_own_and_shared_ones_lose_nothing(path: Path) -> None:
    shared = LabelLog(path)
    seen: list[str] = []

    def write(name: int) -> None:
        log = shared if name % 2 else LabelLog(path)
        for count in range(15):
            log.append([upsert(f"{name}-{count}-{part}") for part in range(3)])
            if count == 7:
                log.compact()

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    reader, position = LabelLog(path), None
    while any(thread.is_alive() for thread in threads) or len(seen) < 180:
        tail = reader.read_from(position)
        seen = [record.id for record in tail.records] if tail.restarted else seen + [r.id for r in tail.records]
        position = tail.position
        assert len(seen) % 3 == 0
    assert sorted(seen) == sorted(
        f"{name}-{count}-{part}" for name in range(4) for count in range(15) for part in range(3)
    )


def test_a_full_disk_loses_only_the_batch_that_found_it_full(path: Path) -> None:
    log, reader = LabelLog(path), LabelLog(path)
    log.append([upsert("a")])
    position = reader.read_from().position
    content = path.read_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 150, unlimited[1]))
        with pytest.raises(LabelLogError, match=r"File too large; none of the 9 changes is kept, the earlier ones are"):
            log.append([upsert("b")] * 9)
        assert path.read_bytes() == content
        with pytest.raises(LabelLogError, match="File too large"):
            LabelLog(path).append([upsert("b")] * 9)
        log.append([hide("c")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    log.append([upsert("d")])
    assert [record.id for record in reader.read_from(position).records] == ["c", "d"]
    assert ids(path) == ["a", "c", "d"]


def test_a_flush_that_fails_takes_the_batch_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LabelLog(path)
    log.append([upsert("a")])
    content, fsync = path.read_bytes(), os.fsync
    failures = [OSError(5, "Input/output error")]

    def failing(file: int) -> None:
        if failures:
            raise failures.pop()
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(LabelLogError, match="Input/output error"):
        log.append([upsert("b")])
    assert path.read_bytes() == content
    log.append([upsert("c")])
    assert ids(path) == ["a", "c"]


@pytest.mark.parametrize("value", [float("nan"), "\ud800", 10**5000], ids=["nan", "half", "long"])
def test_values_that_would_not_read_back_are_refused_and_nothing_is_written(path: Path, value: object) -> None:
    with pytest.raises(LabelLogError, match="label 'b': expected values that JSON can hold, found others: "):
        LabelLog(path).append([upsert("a"), upsert("b", value=value)])
    assert not path.exists()


@pytest.mark.parametrize(
    "value", [10**400, -(2**63), 0.1, 1e300, "\u2028\x00é", [None, True, {"": []}], {"a": {"b": 1}}]
)
def test_values_that_read_back_as_they_are(path: Path, value: object) -> None:
    LabelLog(path).append([upsert("a", value=value)])
    assert LabelLog(path).read_from().records == [upsert("a", value=value)]


def test_a_directory_that_is_not_there_is_an_error_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(LabelLogError, match="No such file or directory; none of the 1 changes is kept"):
        LabelLog(tmp_path / "nowhere" / "labels.log").append([hide("a")])


CHILD = """
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from longtail.bundle import LabelLog, Upsert, Hide
log, first = LabelLog(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
for count in range(first, first + 100_000):
    at = datetime(2026, 11, 1, tzinfo=UTC)
    log.append([Upsert(id=f"{count}-{part}", at=at, features={"text": "x" * (count * 37 % 9000)}) for part in range(3)])
    print(count, flush=True)
    if count % 20 == 19:
        log.compact()
"""
KILLS = 6


@pytest.mark.process
def test_kill_9_at_any_moment_loses_nothing_that_was_acknowledged(path: Path) -> None:
    rng = random.Random(0)
    acknowledged: list[int] = []
    for round_ in range(KILLS):
        first = round_ * 100_000
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(first)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        select.select([child.stdout], [], [], 10)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        acknowledged += [int(count) for count in child.stdout.read().split("\n")[:-1]]
        child.stdout.close()
        child.wait()
        found = ids(path)
        batches = [f"{count}-{part}" for count in acknowledged for part in range(3)]
        extra = len(found) - len(batches)
        assert extra in (0, 3), "at most the one batch that was whole but not yet acknowledged"
        assert found[: len(batches)] == batches
        if extra:
            acknowledged.append(int(found[-1].split("-")[0]))
    LabelLog(path).append([hide("last")])
    assert ids(path)[-1] == "last"
    LabelLog(path).compact()
    assert not list(path.parent.glob("*.tmp"))


def test_dates_follow_the_log_and_the_release_whatever_the_clock_says(tmp_path: Path) -> None:
    path, day = tmp_path / "labels.log", timedelta(days=1)
    one, other = LabelLog(path), LabelLog(path)
    step = timedelta(microseconds=1)

    def dates() -> list[datetime]:
        return [record.at for record in LabelLog(path).read_from().records]

    def at(moment: datetime) -> Hide:
        return Hide(id="a", at=moment)

    one.append([at(AT)], after=AT - day)
    assert dates() == [AT], "the clock is not behind"
    other.append([at(AT - day), at(AT + day), at(AT)], after=AT)
    assert dates()[1:] == [AT + step, AT + day, AT + step]
    # Of another writer's records, too, read by it or not.
    one.append([at(AT)], after=AT)
    other.read_from()
    other.append([at(AT)], after=AT)
    assert dates()[4:] == [AT + day + step, AT + day + 2 * step]
    one.compact()
    other.append([at(AT)], after=AT)
    one.append([at(AT)], after=AT + 5 * day)
    assert dates() == [AT + day + 2 * step, AT + day + 3 * step, AT + 5 * day + step]
    one.append([at(AT)])
    assert dates()[-1] == AT, "without a release they are as they are"
    other.append([at(AT)], after=datetime.max.replace(tzinfo=UTC))
    assert dates()[-1] == datetime.max.replace(tzinfo=UTC)


def test_a_log_that_was_cut_is_continued_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "labels.log"
    log = LabelLog(path)
    log.append([upsert("a")])
    length = path.stat().st_size
    log.append([upsert("b")])
    with path.open("r+b") as file:
        file.truncate(length)
    log.append([upsert("c")], after=AT)
    assert [record.id for record in LabelLog(path).read_from().records] == ["a", "c"]
