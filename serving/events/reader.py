"""Read the events of a folder as views of DuckDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from longtail.serving.errors import StateError
from longtail.serving.events.folder import DAMAGED, FINISHED, SEGMENT, read_lines
from longtail.serving.events.schema import SCHEMA

_FOREVER = 253_402_300_000.0
"""A time in the year 9999."""
_RESENT_SECONDS = 48 * 3600
"""Time during which an answer accepts feedback, and so the longest time between a choice and its repetitions."""
_VIEWS = """
CREATE TEMP VIEW recent AS
SELECT * FROM events WHERE time >= to_timestamp({begin}) AND time < to_timestamp({until})
QUALIFY idempotency_key IS NULL OR row_number() OVER (PARTITION BY client, idempotency_key ORDER BY time) = 1;

CREATE TEMP VIEW answers AS
SELECT * FROM recent WHERE kind = 'answer'
QUALIFY answer IS NULL OR row_number() OVER (PARTITION BY answer ORDER BY time) = 1;

CREATE TEMP VIEW choices AS
WITH labels AS (
    SELECT * EXCLUDE (labels, positions, propensities, buckets), unnest(labels) AS label,
        unnest(positions) AS position, unnest(propensities) AS propensity, unnest(buckets) AS bucket
    FROM recent WHERE kind IN ('choice', 'organic')
),
distinct_labels AS (
    SELECT * FROM labels
    QUALIFY answer IS NULL OR row_number() OVER (PARTITION BY answer, label, event ORDER BY time) = 1
)
SELECT chosen.* EXCLUDE (features), coalesce(chosen.features, answers.features) AS features,
    answers.labels AS impressions
FROM distinct_labels AS chosen LEFT JOIN answers USING (answer);
"""


@contextmanager
def open_events(folder: Path, since: float = 0.0, until: float = _FOREVER) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open views of the present events of a folder.

    `events` are all events, of SCHEMA. Views of the window, from `since` to before `until` in seconds since 1970:

        recent     events, one for each idempotency key of a client
        answers    recorded answers, each once
        choices    labels chosen from an answer or without one, the first of an answer, label and event; with the
                   features and labels (`impressions`) of the answer if it was recorded

    The views begin 48 hours before `since`, so that a repeated event counts in one window only: readers select
    `time >= to_timestamp(since)` themselves.

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
        # Times are cast to dates, which must not depend on the machine's zone.
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")
        connection.register("unfinished", pa.concat_tables(tables))
        columns = ", ".join(SCHEMA.names)
        union = f"SELECT {columns} FROM unfinished"
        if finished:
            paths = ", ".join(
                "'" + str(folder / f"{stem}{FINISHED}").replace("'", "''") + "'" for stem in sorted(finished)
            )
            union += f" UNION ALL SELECT {columns} FROM read_parquet([{paths}])"
        connection.execute(f"CREATE TEMP VIEW events AS {union}")
        connection.execute(_VIEWS.format(begin=since - _RESENT_SECONDS, until=until))
        yield connection
    except (duckdb.Error, OSError) as error:
        raise StateError(f"{folder}: expected files of events, found {error}") from error
    finally:
        connection.close()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def damaged_files(folder: Path) -> list[str]:
    """List files with lines that are not events."""
    return sorted(path.name for path in folder.glob(f"*{DAMAGED}"))
