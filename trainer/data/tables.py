"""Read and check feature tables, with one row per id in the order of the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from longtail.bundle.mapped_table import combine_chunks
from longtail.tables import find_files
from longtail.tables.database import Database, OpenedFile
from longtail.tables.table import Table, id_expression, read_table
from longtail.tables.times import find_times
from longtail.tables.values import literal, type_name
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import Sources, name_sources
from longtail.trainer.data.ids import IdTexts, check_ids, odd_condition
from longtail.trainer.data.problems import Problem, RowCheck, RowReport, find_problems
from longtail.trainer.errors import DataError

MOST_TEXT = np.iinfo(np.int32).max
"""Largest size of a `string` array in Arrow, bytes."""
_ID, _SINCE, _DATES, _COLUMN = "id", "since", "dates", "column:"


@dataclass(frozen=True)
class IdTable:
    """Hold the good rows of a feature table.

    Attributes:
        listed: table in DuckDB of the rows: `text`, the id; `row_id`; `row_number` among the rows of all files;
            and with `data.valid_from`, `since`, the time from which the row holds. An id then has a row per version.
        source: the rows of all files.
        dates: whether `since` are dates, in microseconds; None without `data.valid_from`.
    """

    table: pa.Table
    listed: str
    source: Table
    dates: bool | None = None

    def take(self, rows: pa.Array) -> pa.Table:
        """Return rows by their numbers, int64 [n]; null gives a row of nulls."""
        values = self.table.combine_chunks()
        # `take` would copy a table that is in this order already.
        in_order = len(rows) == len(values) and rows.equals(pa.array(np.arange(len(rows))))
        return values if in_order else values.take(rows)


def read_feature_table(
    database: Database, source: Sources, id_column: str, data: DataConfig, report: RowReport, *,
    columns: Sequence[str] | None, valid_from: str | None = None,
) -> IdTable:  # fmt: skip
    """Read a feature table from any number of files; bad rows are removed and noted for `refuse_problems`.

    Args:
        columns: columns to read in addition to the ids; None reads all.
        valid_from: column of times of a table with a row per version of an id; None for one row per id.
    """
    name = name_sources(source)

    def columns_of_file(opened: OpenedFile, number: int) -> dict[str, tuple[str, str]]:
        value, kind = opened.column(id_column)
        cells = {
            "file": (f"{number}::INTEGER", "INTEGER"),
            _ID: id_expression(opened, id_column, value, kind),
        }
        if valid_from is not None:
            cells |= _times(opened, valid_from)
        names = opened.names
        # If a column is missing, all are read: its feature's error then names those there are.
        if columns is not None and {*columns} <= {*names}:
            names = [id_column, *columns]
        return cells | {f"{_COLUMN}{name}": opened.column(name) for name in dict.fromkeys(names)}

    table = read_table(database, find_files(source), columns_of_file, name)
    names, id_ = [name for name in table.kinds if name.startswith(_COLUMN)], table.column(_ID)
    table.find_types(names)
    view = database.name("checked")
    database.run(f"CREATE VIEW {view} AS SELECT *, rowid AS row_id, {table.column('file')} AS file FROM {table.name}")
    odd = database.rows(
        f"SELECT DISTINCT {id_} FROM {table.name} WHERE {odd_condition(id_, data.placeholders)} ORDER BY 1"
    )
    checks = [*check_ids(id_column, id_, {text: literal(text) for (text,) in odd}, data.placeholders)]
    if valid_from is not None:
        since = table.column(_SINCE)
        wrong = f"{since} IS NULL OR NOT isfinite({since})"
        checks.append(RowCheck(valid_from, wrong, "finite numbers or timestamps", raw=valid_from))
    for file in table.parts:
        if file.rejected:
            report.reject(file.rejected)
    bad = find_problems(database, view, checks, table.parts, report)
    report.dropped += database.row(f"SELECT count(*) FILTER ({bad}) FROM {table.name}")[0]
    good = f"NOT ({bad})"
    time = f", {table.column(_SINCE)} AS since" if valid_from else ""
    listed = database.name("listed")
    database.run(
        f"CREATE TABLE {listed} AS SELECT {id_} AS text, row_number() OVER (ORDER BY rowid) - 1 AS row_id, "
        f"rowid AS row_number{time} FROM {table.name} WHERE {good}"
    )
    rows = table.arrow(names, good).rename_columns([name.removeprefix(_COLUMN) for name in names])
    if valid_from is None:
        return IdTable(rows, listed, table)
    kinds = [
        kind for (kind,) in database.rows(f"SELECT DISTINCT {table.column(_DATES)} FROM {table.name} WHERE {good}")
    ]
    if len(kinds) > 1:
        raise DataError(f"{name}: column {valid_from!r}: expected numbers or dates in all files, found both")
    return IdTable(rows, listed, table, dates=kinds == [True])


def _times(opened: OpenedFile, name: str) -> dict[str, tuple[str, str]]:
    value, kind = opened.column(name)
    time_and_dates = find_times(opened.database, opened.relation, value, kind)
    if time_and_dates is None:
        raise opened.file.wrong(name, "numbers or timestamps", type_name(kind))
    return {_SINCE: (time_and_dates[0], "DOUBLE"), _DATES: (str(time_and_dates[1]).lower(), "BOOLEAN")}


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Join a column's chunks; text beyond 2 GiB becomes `large_string`."""
    if pa.types.is_string(column.type) and column.nbytes > MOST_TEXT:
        column = column.cast(pa.large_string())
    return combine_chunks(column)


def check_distinct(table: IdTable, texts: IdTexts, id_column: str, data: DataConfig, report: RowReport) -> None:
    """Note every row of an id but the first, which are bad; raise DataError if no row may be bad."""
    database = table.source.database
    repeats = table.table.num_rows - database.row(f"SELECT count(listed) FROM {texts.ids}")[0]
    if not repeats:
        return
    numbered = (
        f"SELECT id, row_number, row_number() OVER (PARTITION BY id ORDER BY row_id) AS occurrence "
        f"FROM {table.listed} JOIN {texts.table} USING (text)"
    )
    again = database.rows(f"SELECT id, row_number FROM ({numbered}) WHERE occurrence > 1 ORDER BY row_number LIMIT 5")
    locations = [table.source.locate(row_number) for _, row_number in again]
    (file, row), content = locations[0], f"{again[0][0]!r} a second time"
    if not data.max_bad_rows:
        more = f", and {repeats - 1:,} more such rows" if repeats > 1 else ""
        raise DataError(f"{file}: column {id_column!r}: expected distinct ids, found {content} in row {row}{more}")
    rows = [row for path, row in locations if path == file]
    report.note([Problem(file, id_column, "distinct ids", content, rows, repeats)])
    report.dropped += repeats
