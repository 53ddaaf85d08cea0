"""Read the events of a folder as a view of DuckDB, also while services write to the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from longtail.serving.errors import StateError
from longtail.serving.events.folder import DAMAGED, FINISHED, SEGMENT, read_lines
from longtail.serving.events.schema import SCHEMA

ONCE = """
SELECT * FROM events WHERE time >= to_timestamp($since - 48 * 3600) AND time < to_timestamp($until)
QUALIFY idempotency_key IS NULL OR row_number() OVER (PARTITION BY client, idempotency_key ORDER BY time) = 1
"""
"""Query for the events before `until`, one for each idempotency key of a client.

The query starts 48 hours before `since`, the time during which an answer accepts feedback. So an event that was sent
again later counts in one window only.
"""
IN_WINDOW = "time >= to_timestamp($since)"


@contextmanager
def events_of(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection with the view `events`, of SCHEMA, over the present content of a folder.

    Raises:
        StateError: there is no such folder, or its files cannot be read.
    """
    if not folder.is_dir():
        raise StateError(f"{folder}: expected a folder of events, found none; --events names another")
    tables, connection = [SCHEMA.empty_table()], duckdb.connect()
    try:
        # Segments are read before Parquet files are listed: a segment converted in between is then found as Parquet.
        contents = {path.stem: content for path in [*folder.glob(f"*{SEGMENT}")] if (content := _content(path))}
        finished = {path.stem for path in folder.glob(f"*{FINISHED}")}
        for stem, content in contents.items():
            if stem not in finished:
                tables.append(read_lines(content[: content.rfind(b"\n") + 1])[0])
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")
        connection.register("unfinished", pa.concat_tables(tables))
        columns = ", ".join(SCHEMA.names)
        union = "SELECT * FROM unfinished"
        if finished:
            paths = ", ".join(
                "'" + str(folder / f"{stem}{FINISHED}").replace("'", "''") + "'" for stem in sorted(finished)
            )
            # By name, because files of earlier versions lack newer columns.
            union += f" UNION ALL BY NAME SELECT * FROM read_parquet([{paths}], union_by_name = true)"
        connection.execute(f"CREATE TEMP VIEW events AS SELECT {columns} FROM ({union})")
        yield connection
    except (duckdb.Error, OSError) as error:
        raise StateError(f"{folder}: expected files of events, found {error}") from error
    finally:
        connection.close()


def _content(path: Path) -> bytes:
    """Read a segment; empty if it has become Parquet."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def damaged_files(folder: Path) -> list[str]:
    """List the files that hold lines which are not events."""
    return sorted(path.name for path in folder.glob(f"*{DAMAGED}"))
