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

_LIST_COLUMN = "labels"
"""Column of lists that `longtail-serve batch` writes."""
_ORDERS = ("rank", "score")
"""Columns that order entries where the caller names none."""


@dataclass(frozen=True)
class ListColumns:
    """Name the columns of a table of lists.

    Args:
        rank, score: column that orders a query's rows, from the lowest rank or the highest score.
    """

    query: str
    label: str
    rank: str | None = None
    score: str | None = None


@dataclass(frozen=True)
class ListEntries:
    """Hold entries of lists by query, then rank.

    Attributes:
        order: what orders entries, in words.
        queries: distinct queries, strings; `labels`: distinct labels, strings.
        query_E, label_E, rank_E: rows of these, and the rank in the list from 0, int32 [E].
        longer: lists of more than the K that are read.
        empty_files: line about files without rows; None without any.
    """

    order: str
    queries: pa.Array
    labels: pa.Array
    query_E: Int32
    label_E: Int32
    rank_E: Int32
    longer: int
    empty_files: str | None = None


def read_lists(source: Path | str, columns: ListColumns, k: int) -> ListEntries:
    """Read the first K entries of every list.

    Raises:
        DataError: a column is not there or of another type, a cell is empty, or a query has two rows of lists.
    """
    name = name_sources(source)
    with open_database() as duck:
        table, order, falling = _read_table(duck, source, columns, name)
        table.refuse_rejected()
        query, label = table.column("query"), table.column("label")
        nulls = f"{query} IS NULL" + ("" if _has_lists(table) else f" OR {label} IS NULL")
        _refuse(table, nulls, "an id of a query and of a label", "null")
        if _has_lists(table):
            again = f"rowid NOT IN (SELECT min(rowid) FROM {table.name} GROUP BY {query})"
            _refuse(table, again, "one list of each query", "a second one", query)
            nothing = f"len(list_filter({label}, lambda x: x IS NULL)) > 0"
            _refuse(table, nothing, "lists of ids", "null in one")
            source = (
                f"SELECT {query} AS query, unnest({label}) AS label, generate_subscripts({label}, 1) AS position "
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
                f"AS position FROM {table.name}"
            )
        entries = duck.name("entries")
        duck.run(f"CREATE TABLE {entries} AS {source}")
        (longer,) = duck.row(f"SELECT count(*) FROM {entries} WHERE position = {k + 1}")
        columns_E = duck.arrow(f"SELECT * FROM {entries} WHERE position <= {k} ORDER BY query, position")
        empty_files = duck.empty_in_words()
    if not len(columns_E):
        raise DataError(f"{name}: expected lists of labels, found none")
    queries, labels = (columns_E[column].combine_chunks().dictionary_encode() for column in ("query", "label"))
    # SQL counts positions from 1.
    rank_E = columns_E["position"].to_numpy() - 1
    query_E, label_E, rank_E = (
        code.astype(np.int32) for code in (queries.indices.to_numpy(), labels.indices.to_numpy(), rank_E)
    )
    return ListEntries(order, queries.dictionary, labels.dictionary, query_E, label_E, rank_E, longer, empty_files)


def _has_lists(table: Table) -> bool:
    return table.kinds["label"].endswith("[]")


def _read_table(duck: Database, source: Path | str, columns: ListColumns, name: str) -> tuple[Table, str, bool]:
    """Read columns `query`, `label` and maybe `order`, a DOUBLE.

    Returns:
        The table, what orders entries in words, and whether that falls.
    """
    chosen: set[tuple[str, bool]] = set()

    def select_columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
        label = columns.label
        if label not in opened.names and _LIST_COLUMN in opened.names:
            label = _LIST_COLUMN
        for option, column in (("data.query_id", columns.query), ("data.label_id", label)):
            if column not in opened.names:
                raise DataError(
                    f"{opened.file.name}: expected a column {column!r}, found {', '.join(opened.names)}: --set "
                    f"{option}=COLUMN names another"
                )
        value, kind = opened.column(label)
        selected = {"query": id_expression(opened, columns.query, *opened.column(columns.query))}
        order_column = columns.rank or columns.score
        if is_list_of_ids(kind):
            if order_column is not None:
                raise opened.file.wrong(label, f"a label in each row with {order_column!r}", type_name(kind))
            chosen.add((f"the lists in column {label!r}", False))
            return selected | {"label": (as_type(value, kind, "VARCHAR[]"), "VARCHAR[]")}
        order = order_column or next((column for column in _ORDERS if column in opened.names), None)
        falling = order is not None and order == (columns.score or (None if columns.rank else "score"))
        chosen.add(("the order of the rows" if order is None else f"column {order!r}", falling))
        selected["label"] = id_expression(opened, label, value, kind)
        if order is not None:
            number = to_number(*opened.column(order))
            if number is None:
                raise opened.file.wrong(order, "numbers", type_name(opened.column(order)[1]))
            selected["order"] = number, "DOUBLE"
        return selected

    table = read_table(duck, find_files(source), select_columns, name)
    if len(chosen) > 1:
        orders = " and ".join(sorted(words for words, _ in chosen))
        raise DataError(f"{name}: expected files that are ordered alike, found {orders}")
    return table, *chosen.pop()


def _refuse(table: Table, condition: str, expected: str, received: str, value: str = "NULL") -> None:
    """Raise DataError where some row meets a condition."""
    rows = table.database.rows(f"SELECT rowid, {value} FROM {table.name} WHERE {condition} ORDER BY rowid")
    if rows:
        file, row = table.locate(rows[0][0])
        query = "" if rows[0][1] is None else f" of {rows[0][1]!r}"
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise DataError(f"{file}: row {row}{more}: expected {expected}, found {received}{query}")


def match_ids(ids: pa.Array, dataset_ids: pa.Array, kind: str, source: str) -> Int32:
    """Match ids to rows, int32, −1 if unknown; raises DataError if all are."""
    rows: Int32 = pc.fill_null(find_rows(ids, dataset_ids), -1).to_numpy().astype(np.int32)
    if (rows < 0).all():
        raise DataError(
            f"{source}: expected {kind} of the interactions, found none"
            f"{describe_example(ids, dataset_ids, nothing=True)}"
        )
    return rows
