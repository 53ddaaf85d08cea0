"""The SQLite file of label changes: damage is said, a full disk loses one batch."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from longtail.state import (
    LabelStore,
    StoreError,
    read_label_changes,
)
from tests.state.changes import hide, ids, upsert


def test_missing_file_is_an_empty_store(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    assert store.read_from() == ([], None, False)
    store.append([])
    store.compact()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="expected label changes of a service, found none"):
        read_label_changes(tmp_path)


def test_deleted_file_restarts_readers(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.append([hide("a")])
    position = store.read_from().position
    for path in tmp_path.glob("labels.sqlite*"):
        path.unlink()
    assert store.read_from(position) == ([], None, True)
    store.append([hide("b")])
    tail = store.read_from(position)
    assert ([record.id for record in tail.records], tail.restarted) == (["b"], True)


def test_restored_file_restarts_readers(tmp_path: Path) -> None:
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


def damaged(path: Path, content: bytes) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    path.write_bytes(content)


def test_foreign_damaged_and_newer_files_are_refused_unchanged(tmp_path: Path) -> None:
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
        with pytest.raises(StoreError, match="change 7: expected an upsert, patch, hide or restore"):
            store.read_from()
        connection.execute("UPDATE label_store SET version = 2")
        connection.commit()
    with pytest.raises(StoreError, match=r"expected version 1, found 2: use the Longtail that made it"):
        store.append([hide("a")])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM label_store")
        connection.commit()
    with pytest.raises(StoreError, match="found tables without a name"):
        store.read_from()


def test_full_disk_loses_only_the_failed_batch(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.append([upsert("a")])
    position = store.read_from().position
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited[1]))
        for item in (store, LabelStore(tmp_path)):
            with pytest.raises(StoreError, match="expected to write 9 label changes, earlier ones are intact; found"):
                item.append([upsert("b", text="x" * 100_000)] * 9)
            assert ids(tmp_path)[:1] == ["a"]
        store.append([hide("c")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    store.append([upsert("d")])
    assert [record.id for record in store.read_from(position).records] == ["c", "d"]
