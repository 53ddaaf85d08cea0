"""Feature tables of queries and of labels: read from their files, checked, one row per id in the ids' order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import Places, shown
from longtail.trainer.data.files import DataFile, decoded, find_files, joined, read_columns
from longtail.trainer.data.ids import check_ids, encode_ids
from longtail.trainer.data.problems import RowChecks, RowReport
from longtail.trainer.data.times import as_times
from longtail.trainer.errors import DataError


@dataclass(frozen=True)
class IdTable:
    """A feature table.

    Attributes:
        ids: strings; distinct, but in a table of `data.valid_from`, whose rows are versions.
    """

    ids: pa.Array
    table: pa.Table

    def aligned(self, ids: pa.Array) -> pa.Table:
        """Return the table in the order of `ids`, [n]; ids without a row get nulls."""
        rows = pc.index_in(ids, value_set=self.ids)
        values = self.table.combine_chunks()
        in_order = len(ids) == len(values) and rows.equals(pa.array(np.arange(len(ids)), rows.type))
        return values if in_order else values.take(rows)


def read_feature_table(
    places: Places, id_column: str, data: DataConfig, report: RowReport, *, strings: Iterable[str],
    columns: Sequence[str] | None, valid_from: str | None = None,
) -> IdTable:  # fmt: skip
    """Return a feature table of any number of files; bad rows are left out and noted, for `settle` to judge.

    Args:
        strings: columns that text formats must not read as numbers or dates.
        columns: those that are needed beside the ids; None reads all.
        valid_from: column of times, where an id has a row for each of its versions.
    """
    tables, ids = [], []
    wanted = None if columns is None else [id_column, *columns]
    as_text = [id_column, *strings, *([valid_from] if valid_from else [])]
    for file in find_files(places, "table"):
        table = read_columns(file, wanted, strings=as_text)
        if id_column not in table.column_names:
            raise DataError(f"{file.name}: expected a column {id_column!r}, found {', '.join(table.column_names)}")
        of_file = encode_ids(table[id_column], id_column, file)
        checks = RowChecks(file.name, np.arange(table.num_rows))
        check_ids(checks, id_column, of_file, data.placeholders)
        if valid_from is not None:
            _check_times(checks, valid_from, table, file)
        report.problems += checks.problems
        report.dropped += int(checks.fatal.sum())
        table = decoded(table)
        good = pa.array(~checks.fatal)
        ids.append(of_file.dictionary_decode().filter(good))
        tables.append(table if not checks.fatal.any() else table.filter(good))
    read = IdTable(pa.concat_arrays(ids), joined(tables, shown(places)))
    return read if valid_from is not None else _distinct(read, id_column, shown(places), data, report)


def _check_times(checks: RowChecks, name: str, table: pa.Table, file: DataFile) -> None:
    """Note rows without a time."""
    if name not in table.column_names:
        raise DataError(f"{file.name}: expected a column {name!r}, found {', '.join(table.column_names)}")
    times_N = as_times(table[name])
    if times_N is None:
        raise file.wrong(name, "numbers or timestamps", table[name].type)
    checks.add(name, ~np.isfinite(times_N), expected="finite numbers or timestamps", found=None, values=table[name])


def _distinct(read: IdTable, id_column: str, where: str, data: DataConfig, report: RowReport) -> IdTable:
    """Return the first row of every id; a second one is bad."""
    encoded = read.ids.dictionary_encode()
    if len(encoded.dictionary) == len(encoded):
        return read
    counts = np.bincount(encoded.indices.to_numpy())
    worst = int(counts.argmax())
    if data.on_bad_row == "error":
        raise DataError(
            f"{where}: column {id_column!r}: expected distinct ids, "
            f"found {encoded.dictionary[worst].as_py()!r} {counts[worst]} times"
        )
    first_N = np.zeros(len(encoded), bool)
    first_N[np.unique(encoded.indices.to_numpy(), return_index=True)[1]] = True
    checks = RowChecks(where, np.arange(len(encoded)))
    found = f"{encoded.dictionary[worst].as_py()!r} {counts[worst]} times, and its like,"
    checks.add(id_column, ~first_N, expected="distinct ids", found=found)
    report.problems += checks.problems
    report.dropped += int((~first_N).sum())
    good = pa.array(first_N)
    return IdTable(read.ids.filter(good), read.table.filter(good))
