"""Feature tables of queries and labels: read from files, checked, with one row per id in the order of the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools
from longtail.tables import find_files
from longtail.tables.database import Database, OpenedFile
from longtail.tables.table import Table, id_expression, read_table
from longtail.tables.times import find_times
from longtail.tables.values import type_name
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import Sources, name_sources
from longtail.trainer.data.ids import check_texts
from longtail.trainer.data.problems import Problem, RowCheck, RowReport, find_problems
from longtail.trainer.errors import DataError

MOST_TEXT = np.iinfo(np.int32).max
"""Largest size of a `string` array in Arrow, bytes."""
_ID, _SINCE, _DATES, _COLUMN = "id", "since", "dates", "column:"


@dataclass(frozen=True)
class IdTable:
    """Hold a feature table.

    Attributes:
        ids: strings; with `data.valid_from`, an id occurs once per version.
        row_numbers: the number of each row among the rows of all files, for messages.
        source: the rows of all files.
        since: the time from which each row holds, float64; None without `data.valid_from`.
        dates: whether `since` are dates, in microseconds.
    """

    ids: pa.Array
    table: pa.Table
    row_numbers: pa.Array
    source: Table
    since: pa.Array | None = None
    dates: bool = False

    def filter(self, selected: Bools) -> IdTable:
        """Return some of the rows."""
        return self if selected.all() else replace(
            self, **{name: value.filter(pa.array(selected)) for name in ("ids", "table", "since", "row_numbers")
                     if (value := getattr(self, name)) is not None}
        )  # fmt: skip

    def locate(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and its number there."""
        return self.source.locate(self.row_numbers[row].as_py())

    def aligned(self, ids: pa.Array) -> pa.Table:
        """Return the table in the order of `ids`, [n]; ids without a row get nulls."""
        rows = pc.index_in(ids, value_set=self.ids.cast(ids.type))
        values = self.table.combine_chunks()
        in_order = len(ids) == len(values) and rows.equals(pa.array(np.arange(len(ids)), rows.type))
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
        if columns is not None and {*columns} <= {*names}:
            names = [id_column, *columns]
        return cells | {f"{_COLUMN}{name}": opened.column(name) for name in dict.fromkeys(names)}

    table = read_table(database, find_files(source), columns_of_file, name)
    table.find_types([name for name in table.kinds if name.startswith(_COLUMN)])
    return _good_rows(table, id_column, data, report, name, valid_from)


def _times(opened: OpenedFile, name: str) -> dict[str, tuple[str, str]]:
    value, kind = opened.column(name)
    time_and_dates = find_times(opened.database, opened.relation, value, kind)
    if time_and_dates is None:
        raise opened.file.wrong(name, "numbers or timestamps", type_name(kind))
    return {_SINCE: (time_and_dates[0], "DOUBLE"), _DATES: (str(time_and_dates[1]).lower(), "BOOLEAN")}


def _good_rows(
    table: Table, id_column: str, data: DataConfig, report: RowReport, name: str, valid_from: str | None
) -> IdTable:
    """Return the rows with an id and, if versions need one, a time."""
    database, id_ = table.database, table.column(_ID)
    view = database.name("checked")
    database.run(f"CREATE VIEW {view} AS SELECT *, rowid AS place, {table.column('file')} AS file FROM {table.name}")
    checks = [*check_texts(database, table.name, id_, id_column, data.placeholders)]
    if valid_from is not None:
        since = table.column(_SINCE)
        wrong = f"{since} IS NULL OR NOT isfinite({since})"
        checks.append(RowCheck(valid_from, wrong, "finite numbers or timestamps", raw=valid_from))
    for file in table.parts:
        report.reject(file.rejected)
    bad = find_problems(database, view, checks, table.parts, report)
    report.dropped += database.row(f"SELECT count(*) FILTER ({bad}) FROM {table.name}")[0]
    names = [name for name in table.kinds if name.startswith(_COLUMN)]
    good = f"NOT ({bad})"
    row_numbers = database.arrow(f"SELECT rowid FROM {table.name} WHERE {good} ORDER BY rowid")
    rows = table.arrow([_ID, *names, *([_SINCE, _DATES] if valid_from else [])], good)
    read = IdTable(
        one_chunk(rows[_ID]),
        rows.select(names).rename_columns([name.removeprefix(_COLUMN) for name in names]),
        row_numbers=row_numbers["rowid"].combine_chunks(),
        source=table,
    )
    if valid_from is None:
        return read
    kinds = pc.unique(rows[_DATES]).to_pylist()
    if len(kinds) > 1:
        raise DataError(f"{name}: column {valid_from!r}: expected numbers or dates in all files, found both")
    return replace(read, since=rows[_SINCE].combine_chunks(), dates=kinds == [True])


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Join a column's chunks; text beyond 2 GiB becomes `large_string`."""
    if pa.types.is_string(column.type) and column.nbytes > MOST_TEXT:
        column = column.cast(pa.large_string())
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def distinct_rows(read: IdTable, id_column: str, data: DataConfig, report: RowReport) -> IdTable:
    """Return the first row of every id; further rows of an id are bad."""
    encoded = read.ids.dictionary_encode()
    if len(encoded.dictionary) == len(encoded):
        return read
    first_N = np.zeros(len(encoded), bool)
    first_N[np.unique(encoded.indices.to_numpy(), return_index=True)[1]] = True
    again = np.flatnonzero(~first_N)
    file, row = read.locate(int(again[0]))
    content = f"{read.ids[int(again[0])].as_py()!r} a second time"
    if not data.max_bad_rows:
        more = f", and {len(again) - 1:,} more such rows" if len(again) > 1 else ""
        raise DataError(f"{file}: column {id_column!r}: expected distinct ids, found {content} in row {row}{more}")
    rows = [row for path, row in map(read.locate, again[:5].tolist()) if path == file]
    report.note([Problem(file, id_column, "distinct ids", content, rows, len(again))])
    report.dropped += len(again)
    return read.filter(first_N)
