"""Run queries over files: `SELECT …`, whose tables are paths or URLs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import duckdb

from longtail.tables.database import Database
from longtail.tables.errors import DataError
from longtail.tables.files import DataFile, as_source, find_files, is_query, shorten_query

_TABLE_FUNCTIONS = ("unnest", "range", "generate_series")
_WITHOUT_PARENTHESES = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
_CHANGING = {*_WITHOUT_PARENTHESES, "now", "today", "random", "uuid", "uuidv4", "uuidv7", "gen_random_uuid",
             "transaction_timestamp", "get_current_timestamp", "get_current_time", "current_localtime",
             "current_localtimestamp"}  # fmt: skip
"""Functions that return another value at each call."""
_IN_ORDER = {"PROJECTION", "FILTER", "UNION", "UNNEST", "STREAMING_LIMIT"}
"""Operators that keep the order of rows, as scans do."""
Tree = dict[str, Any]


def rename_files(query: str, change: Callable[[Path], Path | str]) -> str:
    """Replace the paths of files in a query; URLs stay."""
    tree, tables = _parse(query)
    for table in tables:
        if isinstance(source := as_source(table["table_name"]), Path):
            _rename(table, str(change(source)))
    return _print(tree)


def find_all_files(sources: Path | str | list[Path | str]) -> list[DataFile]:
    """Find every file of some sources, and the files that their queries read."""
    files: list[DataFile] = []
    for source in sources if isinstance(sources, list) else [sources]:
        if not is_query(source):
            files += find_files(source)
            continue
        for inner_source in dict.fromkeys(as_source(table["table_name"]) for table in _parse(str(source))[1]):
            files += find_files(inner_source)
    return files


def open_query(database: Database, query: str, view: Callable[[list[DataFile], Path | str], str]) -> tuple[str, bool]:
    """Return the SQL source of a query, and whether its order is fixed.

    Rows without an order of the files or of the query are sorted by all columns.

    Args:
        view: creates a view of the files of a source, and returns its name.
    """
    tree, tables = _parse(query)
    views: dict[Path | str, str] = {}
    for table in tables:
        source = as_source(table["table_name"])
        if source not in views:
            views[source] = view(find_files(source), source)
        _rename(table, views[source])
    modifiers = tree["statements"][0]["node"]["modifiers"]
    ordered = [modifier for modifier in modifiers if modifier["type"] == "ORDER_MODIFIER"]
    keeps = _keeps_order(database, _print(tree))
    if ordered or not keeps:
        columns = range(1, 1 + len(database.rows(f"DESCRIBE {_print(tree)}")))
        by_all = _serialize(f"SELECT 1 ORDER BY {', '.join(map(str, columns))}")["statements"][0]["node"]["modifiers"]
        if ordered:
            ordered[0]["orders"] += by_all[0]["orders"]
        else:
            distinct = sum(modifier["type"] == "DISTINCT_MODIFIER" for modifier in modifiers)
            modifiers[distinct:distinct] = by_all
    return f"({_print(tree)})", keeps


@functools.cache
def _parser() -> duckdb.DuckDBPyConnection:
    """Open the database that parses and prints queries; once, because that takes 17 ms."""
    return duckdb.connect(config={"threads": 1})


def _serialize(query: str) -> Tree:
    with _parser().cursor() as connection:
        (row,) = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree: Tree = json.loads(row[0])
    return tree


def _print(tree: Tree) -> str:
    with _parser().cursor() as connection:
        (row,) = connection.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()
    return str(row[0])


def _parse(query: str) -> tuple[Tree, list[Tree]]:
    """Parse a query; returns its tree and the nodes that name files. Raises DataError if it reads anything else."""
    line, tree = shorten_query(query), _serialize(query)
    if tree["error"]:
        is_other_statement = tree["error_type"] == "not implemented"
        raise DataError(
            f"{line}: expected one SELECT, found {'another statement' if is_other_statement else tree['error_message']}"
        )
    if len(tree["statements"]) != 1:
        raise DataError(f"{line}: expected one SELECT, found {len(tree['statements'])} statements")
    try:
        return tree, [*_tables(tree["statements"][0]["node"], frozenset())]
    except DataError as error:
        raise DataError(f"{line}: expected {error}") from error


def _tables(node: Any, with_names: Collection[str]) -> Iterator[Tree]:
    """Yield the nodes that name files; `with_names` are tables of `WITH`."""
    if isinstance(node, list):
        for child in node:
            yield from _tables(child, with_names)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if kind == "TABLE_FUNCTION" and (name := node["function"]["function_name"]) not in _TABLE_FUNCTIONS:
        raise DataError(f"files by their names in quotes, such as FROM 'clicks.csv', found the function {name}")
    if kind == "SHOW_REF":
        raise DataError("rows of files, found DESCRIBE, SHOW or SUMMARIZE")
    if node.get("sample"):
        raise DataError("the same rows each time, found a sample: take hash(user_id) % 10 = 0 or the like")
    names = [node["function_name"]] if kind == "FUNCTION" else node.get("column_names", [])
    changing = _CHANGING if kind == "FUNCTION" else _WITHOUT_PARENTHESES
    of_today = kind == "FUNCTION" and names == ["age"] and len(node["arguments"]) == 1
    if len(names) == 1 and ((name := names[0].lower()) in changing or of_today):
        raise DataError(f"the same rows each time, found {name}: write a fixed value, or use data.since")
    if kind == "BASE_TABLE":
        if len(path := node["qualified_name"]["path"]) > 1:
            raise DataError(f"names of files in quotes, such as '{'.'.join(path)}', found {'.'.join(path)}")
        if path[0].lower() not in with_names:
            yield node
    for child in (node.get("cte_map") or {}).get("map", []):
        below, name = child["value"]["query_node"], child["key"].lower()
        yield from _tables(below, {*with_names, name} if below["type"] == "RECURSIVE_CTE_NODE" else with_names)
        with_names = {*with_names, name}
    for key, value in node.items():
        if key != "cte_map":
            yield from _tables(value, with_names)


def _rename(table: Tree, name: str) -> None:
    """Rename a table; its default alias is DuckDB's, the file's name without endings."""
    table["alias"] = table["alias"] or PurePosixPath(table["table_name"]).name.partition(".")[0]
    table["table_name"], table["qualified_name"] = name, {"path": [name]}


def _keeps_order(database: Database, query: str) -> bool:
    """Return whether a query's rows have the order of its files."""
    nodes = json.loads(database.row(f"EXPLAIN (FORMAT JSON) {query}")[1])
    while nodes:
        node = nodes.pop()
        name = node["name"].strip()
        if name not in _IN_ORDER and "SCAN" not in name and not name.startswith("READ"):
            return False
        nodes += node["children"]
    return True
