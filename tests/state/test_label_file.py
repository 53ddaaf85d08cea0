"""The SQLite file of label changes: damage is said, a full disk loses one batch, old logs are taken over."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import threading
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from longtail.state import (
    LabelStore,
    StoreCorruptError,
    StoreError,
    StoreVersionError,
    read_label_changes,
)
from longtail.state.old_log import read_old_log
from tests.state.changes import hide, ids, upsert

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_no_file_is_an_empty_store_and_reading_makes_none(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    assert store.read_from() == ([], None, False)
    store.append([])
    store.compact()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="expected label changes of a service, found none"):
        read_label_changes(tmp_path)


def test_a_file_that_was_taken_away_is_started_over(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.append([hide("a")])
    position = store.read_from().position
    for path in tmp_path.glob("labels.sqlite*"):
        path.unlink()
    assert store.read_from(position) == ([], None, True)
    store.append([hide("b")])
    tail = store.read_from(position)
    assert ([record.id for record in tail.records], tail.restarted) == (["b"], True)


def test_a_file_that_was_set_back_is_started_over(tmp_path: Path) -> None:
    store, path = LabelStore(tmp_path), tmp_path / "labels.sqlite"
    store.append([hide("a")])
    store.close()
    shutil.copy(path, tmp_path / "backup")
    store.append([hide("b")])
    position = store.read_from().position
    store.close()
    os.replace(tmp_path / "backup", path)
    tail = store.read_from(position)
    assert ([record.id for record in tail.records], tail.restarted) == (["a"], True)


def test_several_that_come_first_make_one_file(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "labels_v1.log", tmp_path / "labels.log")
    threads = [threading.Thread(target=LabelStore(tmp_path).append, args=([hide(str(name))],)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ids(tmp_path)
    assert (found[:7], sorted(found[7:])) == (
        ["new-1", "item-5", "item-7", "item-8", "item-8", "new-2", "new-2"], [str(name) for name in range(8)]
    )  # fmt: skip


def damaged(path: Path, content: bytes) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    path.write_bytes(content)


def test_other_files_damaged_ones_and_newer_versions_are_refused_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "labels.sqlite"
    store = LabelStore(tmp_path)
    store.append([upsert(f"label-{count}", text="x" * 100) for count in range(200)])
    store.close()
    content = path.read_bytes()
    middle = len(content) // 2
    for broken in (b"", b"PAR1" * 100, content[:middle], content[:middle] + bytes(4096) + content[middle + 4096 :]):
        damaged(path, broken)
        for use in (store.read_from, lambda: store.append([hide("a")]), store.compact):
            with pytest.raises(StoreError, match=r"labels\.sqlite"):
                use()
        store.close()
        assert path.read_bytes() == broken
    damaged(path, content)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE label_changes SET record = replace(record, 'upsert', 'rename') WHERE number = 7")
        connection.commit()
        with pytest.raises(StoreCorruptError, match="change 7: expected an upsert, hide or restore"):
            store.read_from()
        connection.execute("UPDATE label_store SET version = 2")
        connection.commit()
    with pytest.raises(StoreVersionError, match="version 2, this installation reads 1: upgrade Longtail"):
        store.append([hide("a")])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM label_store")
        connection.commit()
    with pytest.raises(StoreCorruptError, match="found tables without a name"):
        store.read_from()


def test_a_full_disk_loses_only_the_batch_that_found_it_full(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.append([upsert("a")])
    position = store.read_from().position
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited[1]))
        for each in (store, LabelStore(tmp_path)):
            with pytest.raises(StoreError, match="expected to write 9 label changes, earlier ones are intact; found"):
                each.append([upsert("b", text="x" * 100_000)] * 9)
            assert ids(tmp_path)[:1] == ["a"]
        store.append([hide("c")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    store.append([upsert("d")])
    assert [record.id for record in store.read_from(position).records] == ["c", "d"]


def test_a_directory_that_is_not_there_is_an_error_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/labels\.sqlite: .*No such file or directory"):
        LabelStore(tmp_path / "nowhere").append([hide("a")])


def line(left: int, content: str) -> bytes:
    rest = f"{left} {content}".encode()
    return b"%08x %b\n" % (zlib.crc32(rest), rest)


HEAD = b"longtail-labels 1 3f0c\n"
A = '{"id":"a","at":"2026-11-01T00:00:00Z","op":"hide"}'
B = A.replace('"a"', '"b"')


def test_an_old_log_is_taken_over_whole_once(tmp_path: Path) -> None:
    log = tmp_path / "labels.log"
    shutil.copy(FIXTURES / "labels_v1.log", log)
    records = read_old_log(log)
    for source in (log, tmp_path):
        assert len(read_label_changes(source).upserts) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["labels.log"], "reading takes nothing over"
    store = LabelStore(tmp_path)
    assert store.read_from().records == records
    assert not log.exists()
    assert (tmp_path / "labels.log.taken_over").read_bytes() == (FIXTURES / "labels_v1.log").read_bytes()
    store.append([hide("later")])
    assert "later" in read_label_changes(log).hidden, "commands that name the old file go on"
    assert ids(tmp_path) == [*(record.id for record in records), "later"]


def test_of_an_old_log_a_batch_cut_anywhere_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "labels.log"
    whole = HEAD + line(0, A)
    content = whole + line(2, B) + line(1, A) + line(0, B)
    for cut in range(len(whole), len(content)):
        path.write_bytes(content[:cut])
        assert [record.id for record in read_old_log(path)] == ["a"], cut
    path.write_bytes(whole + bytes(5000))
    assert [record.id for record in read_old_log(path)] == ["a"]
    path.write_bytes(content)
    assert [record.id for record in read_old_log(path)] == ["a", "b", "a", "b"]


def test_of_an_old_log_every_flipped_byte_is_found_and_nothing_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "labels.log"
    content = HEAD + line(1, A) + line(0, B) + line(0, A)
    for at in range(len(HEAD), len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(StoreCorruptError, match=r"labels\.log, line [234]: expected .*, found "):
            read_old_log(path)
    for use in (LabelStore(tmp_path).read_from, lambda: LabelStore(tmp_path).append([hide("c")])):
        with pytest.raises(StoreCorruptError):
            use()
    assert not (tmp_path / "labels.sqlite").exists()


def test_of_an_old_log_missing_lines_other_files_and_newer_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.log"
    path.write_bytes(HEAD + line(2, A) + line(0, B))
    with pytest.raises(StoreCorruptError, match="line 3: expected 1 more records of the batch, found 0"):
        read_old_log(path)
    path.write_bytes(HEAD + line(0, A.replace("hide", "rename")))
    with pytest.raises(StoreCorruptError, match="line 2: expected an upsert, hide or restore"):
        read_old_log(path)
    for content in (b"", b"PAR1", b"longtail-labels\n", b"longtail-labels 1 abc"):
        path.write_bytes(content)
        with pytest.raises(StoreCorruptError, match="line 1: expected longtail-labels 1"):
            read_old_log(path)
    path.write_bytes(b"longtail-labels 2 abc\n")
    with pytest.raises(StoreVersionError, match="version 2, this installation reads 1: upgrade Longtail"):
        read_old_log(path)
