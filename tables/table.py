"""Read any number of files into one typed table of DuckDB."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from longtail.tables.database import Database, OpenedFile, QuerySource, Rejected
from longtail.tables.errors import DataError, EmptyFileError
from longtail.tables.files import DataFile
from longtail.tables.queries import open_query
from longtail.tables.values import (
    EXACT,
    INTEGERS,
    TEXT,
    as_type,
    is_integer,
    is_nothing,
    is_text,
    matches,
    one_type,
    quoted,
    text_types,
    to_text,
    type_name,
    typed,
)

_TYPED = ("parquet", "delta", "iceberg")
"""Formats with typed columns."""
_FEW = 10_000
"""Rows that are tested first for the types of columns."""
_AT_ONCE = 16
"""Columns whose types one query finds; DuckDB's planning time grows with their square."""
Columns = Callable[[OpenedFile, int], dict[str, tuple[str, str]]]


@dataclass(frozen=True)
class FileRows:
    """The rows of one file of a table: the file's number, its rows, and its lines that are not rows.

    Attributes:
        source: the table, in which the rows begin at `first_row`, or a view of the file.
    """

    opened: OpenedFile
    number: int
    first_row: int
    rows: int
    rejected: list[Rejected]
    source: str

    def row(self, row_number: int) -> int:
        """Convert a row number of the table to one of the file, from 0."""
        row_in_file = row_number - self.first_row
        for line in self.rejected:
            row_in_file += line.file == self.opened.file.name and line.row <= row_in_file
        return row_in_file


@dataclass
class Table:
    """Columns of some files, named `c0`, `c1`, … in DuckDB.

    Attributes:
        kinds: types of the columns, by name.
    """

    database: Database
    name: str
    kinds: dict[str, str]
    parts: list[FileRows] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(part.rows for part in self.parts)

    def column(self, name: str) -> str:
        """Return a column's name in DuckDB."""
        return f"c{[*self.kinds].index(name)}"

    def locate(self, row_number: int) -> tuple[str, int]:
        """Return the file of a row, and its row number there."""
        part = next(part for part in reversed(self.parts) if part.first_row <= row_number)
        return part.opened.file.name, part.row(row_number)

    def ids(self, column: str) -> pa.Array:
        """Get the ids of a column in one spelling, in the order of the rows; null for a missing one."""
        text = canonical_ids(self.database, self.name, self.column(column))
        return self.database.arrow(f"SELECT {text} AS id FROM {self.name} ORDER BY rowid")["id"].combine_chunks()

    def refuse_rejected(self) -> None:
        """Raise DataError if a line of a text file is not a row."""
        for part in self.parts:
            if part.rejected:
                first, more = part.rejected[0], len(part.rejected) - 1
                more_lines = f" and {more:,} more" if more else ""
                location = f"{part.opened.file.name}: line {first.line}{more_lines}"
                raise DataError(f"{location}: expected {first.expected}, found {first.received}")

    def find_types(self, names: Collection[str] | None = None) -> None:
        """Detect the types of the columns of text files by all of their values."""
        texts = [name for name, kind in self.kinds.items() if kind == TEXT and (names is None or name in names)]
        for start in range(0, len(texts), _AT_ONCE):
            self._find_column_types(texts[start : start + _AT_ONCE])

    def _find_column_types(self, texts: list[str]) -> None:
        fits = {name: [*text_types("")] for name in texts}
        few = f"(SELECT * FROM {self.name} LIMIT {_FEW})"
        for source in (few, self.name):  # a few rows rule most types out
            checks = []
            for name, kinds in fits.items():
                value = self.column(name)
                conditions, has_value = text_types(value), f"FILTER (NOT {is_nothing(value)})"
                checks += [f"bool_and({conditions[kind]}) {has_value}" for kind in kinds]
            results = iter(self.database.row(f"SELECT {', '.join(checks)} FROM {source}") if checks else ())
            holds = {name: {kind: next(results) for kind in kinds} for name, kinds in fits.items()}
            fits = {
                name: [kind for kind, all_ in kinds.items() if all_ or (source == few and all_ is None)]
                for name, kinds in holds.items()
            }
        for name, kinds in fits.items():
            self.kinds[name] = kinds[0] if kinds else "VARCHAR"
            if kinds:
                column = self.column(name)
                self.database.run(
                    f"ALTER TABLE {self.name} ALTER {column} TYPE {kinds[0]} USING {typed(column, kinds[0])}"
                )

    def read_rows(self, part: FileRows, start: int, count: int) -> pa.Table:
        """Read all columns of some rows of a file, from row `start` on."""
        start_row = part.first_row + start
        with self.database.reading(part.opened.file):
            return self.arrow([*self.kinds], f"rowid >= {start_row} AND rowid < {start_row + count}", part.source)

    def arrow(self, names: Sequence[str], condition: str = "true", source: str | None = None) -> pa.Table:
        """Read columns of the rows that meet a condition, in order."""
        columns = {name: self.column(name) for name in names}
        for name in [name for name in names if self.kinds[name] == "HUGEINT"]:  # a type that Arrow lacks
            value = columns[name]
            (fits,) = self.database.row(
                f"SELECT bool_and(TRY_CAST({value} AS BIGINT) IS NOT NULL) FROM {self.name} WHERE {value} IS NOT NULL"
            )
            columns[name] = f"{value}::{'DECIMAL(38, 0)' if fits is False else 'BIGINT'}"
        rows = self.database.arrow(
            f"SELECT {', '.join(columns.values()) or 'rowid'} FROM {source or self.name} WHERE {condition} "
            "ORDER BY rowid"
        )
        return rows.rename_columns([*names]) if names else rows.select([])


def read_table(
    database: Database, files: Sequence[DataFile], read_columns: Columns, title: str,
    errors: list[str] | None = None, *, views: Collection[str] = (),
) -> Table:  # fmt: skip
    """Read columns of some files into one table.

    Args:
        read_columns: returns expression and type of each column, by name, for a file and its number. A name may have a
            role, `role:name`, which messages leave out.
        title: name of the files in messages.
        errors: gets the errors of files, which are then left out; None raises them.
        views: formats that are read in place, if all files have one of them.
    """
    opened: list[tuple[int, OpenedFile, dict[str, tuple[str, str]]]] = []
    empty: list[EmptyFileError] = []
    for number, file in enumerate(files):
        try:
            opened_file = open_file(database, file)
            opened.append((number, opened_file, read_columns(opened_file, number)))
        except EmptyFileError as error:
            empty.append(error)
            database.empty_files.append(file.name)
        except DataError as error:
            if errors is None:
                raise
            errors.append(str(error))
    if empty and len(empty) == len(files):
        if errors is None:
            raise empty[0]
        errors.append(str(empty[0]))
    kinds = _kinds([columns for *_, columns in opened], title)
    table = Table(database, database.name("rows"), kinds)
    stay = "HUGEINT" not in kinds.values() and all(opened_file.file.kind in views for _, opened_file, _ in opened)
    stored = ", ".join(f"c{i} {'VARCHAR' if kind == TEXT else kind}" for i, kind in enumerate(kinds.values()))
    database.run(f"CREATE TABLE {table.name} ({stored or 'nothing INTEGER'})")
    first_row = 0
    for number, opened_file, columns in opened:
        cells = [as_type(*columns[name], kind) if name in columns else "NULL" for name, kind in kinds.items()]
        if stay:
            source = database.name("rows")
            named = [f"{cell} AS c{i}" for i, cell in enumerate(cells)]
            named += ["file_row_number AS rowid"] if opened_file.file.kind == "parquet" else []
            with database.reading(opened_file.file):
                database.run(f"CREATE VIEW {source} AS SELECT {', '.join(named)} FROM {opened_file.relation}")
                (rows,) = database.row(f"SELECT count(*) FROM {source}")
            table.parts.append(FileRows(opened_file, number, 0, rows, [], source))
            continue
        try:
            rows, rejected = opened_file.insert(table.name, cells or ["NULL"])
        except DataError as error:
            if errors is None:
                raise
            errors.append(str(error))
            continue
        table.parts.append(FileRows(opened_file, number, first_row, rows, rejected, table.name))
        first_row += rows
    return table


def open_file(database: Database, file: DataFile) -> OpenedFile:
    """Open a file, or a query over files."""
    if file.kind != "sql":
        return OpenedFile(database, file)
    rejected: list[Rejected] = []

    def view(files: list[DataFile], source: Path | str) -> str:
        if source not in database.views:
            database.views[source], lines = create_view(database, files, str(source))
            rejected.extend(lines)
        return database.views[source]

    with database.reading(file):
        return OpenedFile(database, file, QuerySource(*open_query(database, file.path, view), rejected))


def id_expression(opened: OpenedFile, name: str, value: str, kind: str) -> tuple[str, str]:
    """Return SQL that converts a column of ids to text; raises DataError for other values."""
    expected, wrong = "ids as strings or integers", ""
    if kind in EXACT:
        wrong = f"NOT isnan({value}) AND NOT ({value} = trunc({value}) AND abs({value}) < {EXACT[kind]})"
    elif kind.startswith("DECIMAL"):
        wrong = f"{value} <> trunc({value})"
    elif kind == "BLOB":
        wrong = f"TRY(decode({value})) IS NULL"
    elif not (is_text(kind) or is_integer(kind) or kind == "UUID"):
        raise opened.file.wrong(name, expected, type_name(kind))
    if wrong and (rows := opened.database.rows(f"SELECT {value} FROM {opened.relation} WHERE {wrong} LIMIT 1")):
        example = f"{rows[0][0]:g}" if isinstance(rows[0][0], float) else str(rows[0][0])
        raise opened.file.wrong(name, expected, f"{type_name(kind)}, such as {example}")
    return to_text(value, kind), "VARCHAR"


def canonical_ids(database: Database, source: str, text: str, condition: str = "true") -> str:
    """Return SQL that spells `39.0` as `39` in a column of whole numbers.

    Args:
        condition: SQL condition of the texts that count.
    """
    are_whole, decimal = database.row(
        f"SELECT bool_and({matches(text, INTEGERS)}) FILTER ({condition}), bool_or(contains({text}, '.')) FROM {source}"
    )
    return f"regexp_replace({text}, '\\.0+$', '')" if are_whole and decimal else text


def all_columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
    """Return every column of a file."""
    return {name: opened.column(name) for name in opened.names}


def create_view(database: Database, files: Sequence[DataFile], title: str) -> tuple[str, list[Rejected]]:
    """Create a view of all columns of some files; returns its name, and the rejected lines."""
    table = read_table(database, files, all_columns, title, views=_TYPED)
    table.find_types()
    kinds, rejected = table.kinds, [line for part in table.parts for line in part.rejected]
    lower = [name.lower() for name in kinds]
    if twice := [name for name in kinds if lower.count(name.lower()) > 1]:
        raise DataError(f"{title}: expected columns that a query can tell apart, found {' and '.join(twice)}")
    columns = ", ".join(f"{table.column(name)} AS {quoted(name)}" for name in kinds)
    rows = [f"SELECT {columns} FROM {source}" for source in dict.fromkeys(part.source for part in table.parts)]
    name = database.name("source")
    database.run(f"CREATE VIEW {name} AS {' UNION ALL '.join(rows)}")
    return name, rejected


def _kinds(columns: Sequence[dict[str, tuple[str, str]]], title: str) -> dict[str, str]:
    """Find one type for each column of some files; raises DataError if there is none."""
    kinds: dict[str, str] = {}
    for name in dict.fromkeys(name for file_columns in columns for name in file_columns):
        types = {file_columns[name][1] for file_columns in columns if name in file_columns}
        kind = one_type(types)
        if kind is None:
            raise DataError(
                f"{title}: expected files whose columns are of one type each, "
                f"found {name.partition(':')[2] or name!r} as {', '.join(sorted(map(type_name, types)))}"
            )
        kinds[name] = kind
    return kinds
