"""Open the SQLite file of label changes."""

from __future__ import annotations

import fcntl
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection, Engine, insert

from longtail.bundle.store import fsync_path, working_directory
from longtail.state.engines import autocommit, reading, sqlite_engine
from longtail.state.errors import StoreError
from longtail.state.tables import VERSION, label_changes, label_store, metadata

LABELS_FILE = "labels.sqlite"
"""File in the state directory."""


class LabelFile:
    """The file of label changes in a state directory. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine: Engine | None = None
        self._reader: Connection | None = None
        self._opened: tuple[int, int] | None = None
        self._data_version: int | None = None

    def engine(self, *, make: bool) -> Engine | None:
        """Get the engine; None if there is no file yet and `make` is false."""
        if not self.path.exists():
            self.close()
            if not make:
                return None
            _make(self.path)
        stat = self.path.stat()
        if self._engine is None or self._opened != (stat.st_dev, stat.st_ino):
            self.close()
            if not stat.st_size:
                raise StoreError(f"{self.path}: expected label changes, found an empty file; restore it")
            engine = sqlite_engine(self.path)
            try:
                with reading(engine) as connection:
                    check = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
                if check != "ok":
                    raise StoreError(f"{self.path}: expected an SQLite file that is whole, found {check}")
            except BaseException:
                engine.dispose()
                raise
            self._engine, self._opened = engine, (stat.st_dev, stat.st_ino)
        return self._engine

    def changed(self) -> bool:
        """Return whether any process may have written since the last call."""
        if self._engine is None:
            return True
        if self._reader is None:
            self._reader = autocommit(self._engine)
        earlier = self._data_version
        self._data_version = self._reader.exec_driver_sql("PRAGMA data_version").scalar_one()
        return self._data_version != earlier

    def wrote(self, connection: Connection) -> None:
        """Do nothing: readers notice writes of others by polling."""

    def close(self) -> None:
        """Close the connections."""
        if self._reader is not None:
            self._reader.close()
        if self._engine is not None:
            self._engine.dispose()
        self._engine = self._reader = self._opened = self._data_version = None


def _make(path: Path) -> None:
    """Create the file; processes that do so at the same time take turns."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        with working_directory(path) as folder:
            working = folder / path.name
            _write(working)
            # SQLite would apply the journal of an earlier file of this name to the new one.
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            working.rename(path)
        fsync_path(path.parent)


def _write(path: Path) -> None:
    engine = sqlite_engine(path)
    try:
        with engine.begin() as connection:
            metadata.create_all(connection, [label_store, label_changes])
            connection.execute(insert(label_store), {"version": VERSION, "generation": uuid4().hex})
        with autocommit(engine) as connection:
            mode = connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar_one()
            if mode != "wal":
                raise StoreError(f"{path.name}: expected a disk that SQLite's WAL works on, found one for {mode}")
    finally:
        engine.dispose()
    path.chmod(0o644)
