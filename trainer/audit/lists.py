"""Read lists of labels: a row for each entry, or a row for each query.

Legend: `E` entries of all lists, `N` queries of a task, `K` list length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int32
from longtail.bundle.ids import find_rows
from longtail.tables import DataError, find_files
from longtail.tables.database import Database, OpenedFile, open_database
from longtail.tables.table import Table, id_expression, read_table
from longtail.tables.values import as_type, is_list_of_ids, to_number, type_name
from longtail.trainer.config.rows import name_sources
from longtail.trainer.data.ids import describe_example

_WHOLE_LISTS = "labels"
"""Column of lists that `longtail-serve batch` writes."""
_ORDERS = ("rank", "score")
"""Columns that order entries where the caller names none."""


@dataclass(frozen=True)
class Columns:
    """Name the columns of a table of lists.

    Args:
        rank, score: column that orders a query's rows, from the lowest rank or the highest score.
    """

    query: str
    label: str
    rank: str | None = None
    score: str | None = None


@dataclass(frozen=True)
class Lists:
    """Hold entries of lists by query, then place.

    Attributes:
        order: what orders entries, in words.
        queries: distinct queries, strings; `labels`: distinct labels, strings.
        query_E, label_E, place_E: rows of these, and the place in the list from 0, int32 [E].
        longer: lists of more than the K that are read.
        empty_files: line about files without rows; None without any.
    """

    order: str
    queries: pa.Array
    labels: pa.Array
    query_E: Int32
    label_E: Int32
    place_E: Int32
    longer: int
    empty_files: str | None = None


def read_lists(place: Path | str, columns: Columns, k: int) -> Lists:
    """Read the first K entries of every list.

    Raises:
        DataError: a column is not there or of another type, a cell is empty, or a query has two rows of lists.
    """
    where = name_sources(place)
    with open_database() as duck:
        table, order, falling = _table(duck, place, columns, where)
        table.refuse_rejected()
        query, label = table.column("query"), table.column("label")
        nulls = f"{query} IS NULL" + ("" if _whole(table) else f" OR {label} IS NULL")
        _refuse(table, nulls, "an id of a query and of a label", "null")
        if _whole(table):
            again = f"rowid NOT IN (SELECT min(rowid) FROM {table.name} GROUP BY {query})"
            _refuse(table, again, "one list of each query", "a second one", query)
            nothing = f"len(list_filter({label}, lambda x: x IS NULL)) > 0"
            _refuse(table, nothing, "lists of ids", "null in one")
            source = (
                f"SELECT {query} AS query, unnest({label}) AS label, generate_subscripts({label}, 1) AS place "
                f"FROM {table.name}"
            )
        else:
            by = "rowid"
            if "order" in table.kinds:
                key = table.column("order")
                _refuse(table, f"{key} IS NULL OR NOT isfinite({key})", f"a finite number in {order}", "none")
                by = f"{key} {'DESC' if falling else 'ASC'}, rowid"
            source = (
                f"SELECT {query} AS query, {label} AS label, row_number() OVER (PARTITION BY {query} ORDER BY {by}) "
                f"AS place FROM {table.name}"
            )
        entries = duck.name("entries")
        duck.run(f"CREATE TABLE {entries} AS {source}")
        (longer,) = duck.row(f"SELECT count(*) FROM {entries} WHERE place = {k + 1}")
        found = duck.arrow(f"SELECT * FROM {entries} WHERE place <= {k} ORDER BY query, place")
        empty_files = duck.empty_in_words()
    if not len(found):
        raise DataError(f"{where}: expected lists of labels, found none")
    queries, labels = (found[name].combine_chunks().dictionary_encode() for name in ("query", "label"))
    place_E = found["place"].to_numpy() - 1
    query_E, label_E, place_E = (
        code.astype(np.int32) for code in (queries.indices.to_numpy(), labels.indices.to_numpy(), place_E)
    )
    return Lists(order, queries.dictionary, labels.dictionary, query_E, label_E, place_E, longer, empty_files)


def _whole(table: Table) -> bool:
    return table.kinds["label"].endswith("[]")


def _table(duck: Database, place: Path | str, columns: Columns, where: str) -> tuple[Table, str, bool]:
    """Read columns `query`, `label` and maybe `order`, a DOUBLE.

    Returns:
        The table, what orders entries in words, and whether that falls.
    """
    chosen: set[tuple[str, bool]] = set()

    def wanted(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
        label = columns.label
        if label not in opened.names and _WHOLE_LISTS in opened.names:
            label = _WHOLE_LISTS
        for option, name in (("--query-id", columns.query), ("--label-id", label)):
            if name not in opened.names:
                raise DataError(
                    f"{opened.file.name}: expected a column {name!r}, found {', '.join(opened.names)}: {option} names "
                    "another"
                )
        value, kind = opened.column(label)
        made = {"query": id_expression(opened, columns.query, *opened.column(columns.query))}
        given = columns.rank or columns.score
        if is_list_of_ids(kind):
            if given is not None:
                raise opened.file.wrong(label, f"a label in each row with {given!r}", type_name(kind))
            chosen.add((f"the lists in column {label!r}", False))
            return made | {"label": (as_type(value, kind, "VARCHAR[]"), "VARCHAR[]")}
        order = given or next((name for name in _ORDERS if name in opened.names), None)
        falling = order is not None and order == (columns.score or (None if columns.rank else "score"))
        chosen.add(("the order of the rows" if order is None else f"column {order!r}", falling))
        made["label"] = id_expression(opened, label, value, kind)
        if order is not None:
            number = to_number(*opened.column(order))
            if number is None:
                raise opened.file.wrong(order, "numbers", type_name(opened.column(order)[1]))
            made["order"] = number, "DOUBLE"
        return made

    table = read_table(duck, find_files(place), wanted, where)
    if len(chosen) > 1:
        orders = " and ".join(sorted(words for words, _ in chosen))
        raise DataError(f"{where}: expected files that are ordered alike, found {orders}")
    return table, *chosen.pop()


def _refuse(table: Table, condition: str, expected: str, found: str, value: str = "NULL") -> None:
    """Raise DataError where some row meets a condition."""
    rows = table.database.rows(f"SELECT rowid, {value} FROM {table.name} WHERE {condition} ORDER BY rowid")
    if rows:
        file, row = table.locate(rows[0][0])
        of = "" if rows[0][1] is None else f" of {rows[0][1]!r}"
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise DataError(f"{file}: row {row}{more}: expected {expected}, found {found}{of}")


def rows_of(found: pa.Array, known: pa.Array, what: str, where: str) -> Int32:
    """Return the row in `known` of each id, int32, −1 where there is none.

    Raises:
        DataError: no id has one.
    """
    rows: Int32 = pc.fill_null(find_rows(found, known), -1).to_numpy().astype(np.int32)
    if (rows < 0).all():
        raise DataError(
            f"{where}: expected {what} of the interactions, found none{describe_example(found, known, nothing=True)}"
        )
    return rows
