"""Queries over files: `SELECT …`, whose tables are places, each read by the rules of every place."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import duckdb

from longtail.tables.engine import Engine
from longtail.tables.errors import DataError
from longtail.tables.files import DataFile, find_files, in_line, is_query

_TABLE_FUNCTIONS = ("unnest", "range", "generate_series")
_WITHOUT_PARENTHESES = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
_CHANGING = {*_WITHOUT_PARENTHESES, "now", "today", "random", "uuid", "uuidv4", "uuidv7", "gen_random_uuid",
             "transaction_timestamp", "get_current_timestamp", "get_current_time", "current_localtime",
             "current_localtimestamp"}  # fmt: skip
"""Functions whose values differ each time."""
_IN_ORDER = {"PROJECTION", "FILTER", "UNION", "UNNEST", "STREAMING_LIMIT"}
"""Operators that keep the order of rows, as scans do."""
Tree = dict[str, Any]


def renamed(query: str, change: Callable[[Path], Path | str]) -> str:
    """Return a query with other paths of files; URLs stay."""
    tree, tables = _parsed(query)
    for table in tables:
        if isinstance(place := _place(table), Path):
            _rename(table, str(change(place)))
    return _text(tree)


def files_behind(places: Path | str | list[Path | str]) -> list[DataFile]:
    """Return every file of some places, and the files that queries among them name."""
    found: list[DataFile] = []
    for place in places if isinstance(places, list) else [places]:
        if not is_query(place):
            found += find_files(place)
            continue
        for of in dict.fromkeys(map(_place, _parsed(str(place))[1])):
            found += find_files(of)
    return found


def opened_query(engine: Engine, query: str, view: Callable[[list[DataFile], Path | str], str]) -> tuple[str, bool]:
    """Return a query as a table, and whether its rows come in one order on any number of threads.

    Rows without an order of the files or of the query are sorted by all columns.

    Args:
        view: makes a table of the files of a place, and returns its name.
    """
    tree, tables = _parsed(query)
    views: dict[Path | str, str] = {}
    for table in tables:
        place = _place(table)
        if place not in views:
            views[place] = view(find_files(place), place)
        _rename(table, views[place])
    modifiers = tree["statements"][0]["node"]["modifiers"]
    ordered = [each for each in modifiers if each["type"] == "ORDER_MODIFIER"]
    keeps = _keeps_order(engine, _text(tree))
    if ordered or not keeps:
        columns = range(1, 1 + len(engine.rows(f"DESCRIBE {_text(tree)}")))
        by_all = _serialized(f"SELECT 1 ORDER BY {', '.join(map(str, columns))}")["statements"][0]["node"]["modifiers"]
        if ordered:
            ordered[0]["orders"] += by_all[0]["orders"]
        else:
            before = sum(each["type"] == "DISTINCT_MODIFIER" for each in modifiers)
            modifiers[before:before] = by_all
    return f"({_text(tree)})", keeps


@functools.cache
def _parser() -> duckdb.DuckDBPyConnection:
    """Open the database that parses and prints queries; once, as opening one takes 17 ms."""
    return duckdb.connect(config={"threads": 1})


def _serialized(query: str) -> Tree:
    with _parser().cursor() as connection:
        (found,) = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree: Tree = json.loads(found[0])
    return tree


def _text(tree: Tree) -> str:
    with _parser().cursor() as connection:
        (found,) = connection.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()
    return str(found[0])


def _parsed(query: str) -> tuple[Tree, list[Tree]]:
    """Return the tree of a query, and those of its nodes that name files; DataError where it reads anything else."""
    line, tree = in_line(query), _serialized(query)
    if tree["error"]:
        other = tree["error_type"] == "not implemented"
        raise DataError(f"{line}: expected one SELECT, found {'another statement' if other else tree['error_message']}")
    if len(tree["statements"]) != 1:
        raise DataError(f"{line}: expected one SELECT, found {len(tree['statements'])} statements")
    try:
        return tree, [*_tables(tree["statements"][0]["node"], frozenset())]
    except DataError as error:
        raise DataError(f"{line}: expected {error}") from error


def _tables(node: Any, known: Collection[str]) -> Iterator[Tree]:
    """Yield nodes of files below one of a query's tree; `known` are names of `WITH`."""
    if isinstance(node, list):
        for each in node:
            yield from _tables(each, known)
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
        if path[0].lower() not in known:
            yield node
    for each in (node.get("cte_map") or {}).get("map", []):
        below, name = each["value"]["query_node"], each["key"].lower()
        yield from _tables(below, {*known, name} if below["type"] == "RECURSIVE_CTE_NODE" else known)
        known = {*known, name}
    for key, value in node.items():
        if key != "cte_map":
            yield from _tables(value, known)


def _place(table: Tree) -> Path | str:
    name: str = table["table_name"]
    return name if "://" in name else Path(name)


def _rename(table: Tree, name: str) -> None:
    """Name another table; its alias, if it has none, is that of DuckDB: the file's name without endings."""
    table["alias"] = table["alias"] or PurePosixPath(table["table_name"]).name.partition(".")[0]
    table["table_name"], table["qualified_name"] = name, {"path": [name]}


def _keeps_order(engine: Engine, query: str) -> bool:
    """Tell whether a query's rows come in the order of its files."""
    nodes = json.loads(engine.row(f"EXPLAIN (FORMAT JSON) {query}")[1])
    while nodes:
        node = nodes.pop()
        name = node["name"].strip()
        if name not in _IN_ORDER and "SCAN" not in name and not name.startswith("READ"):
            return False
        nodes += node["children"]
    return True
