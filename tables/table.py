"""A table of any number of files, in DuckDB, with the types of its columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from longtail.tables.engine import Engine, Opened, QueryTable, Rejected
from longtail.tables.errors import DataError, EmptyFileError
from longtail.tables.files import DataFile
from longtail.tables.queries import opened_query
from longtail.tables.values import (
    TEXT,
    WHOLE,
    as_type,
    in_words,
    is_no_id,
    is_nothing,
    kinds_of_text,
    matches,
    one_type,
    quoted,
    text_of,
    typed,
)

_TYPED = ("parquet", "delta", "iceberg")
"""Kinds of files that say the types of their columns."""
_FEW = 10_000
"""Rows that are looked at first for the types of columns."""
_AT_ONCE = 16
"""Columns whose types are found in one query: the time that DuckDB plans for grows with their square."""
Columns = Callable[[Opened, int], dict[str, tuple[str, str]]]


@dataclass(frozen=True)
class Part:
    """A file of a table: its number among all, its rows, and its lines that are no rows.

    Attributes:
        source: what its rows are read from: the table, where they begin at `first`, or a view of the file alone.
    """

    opened: Opened
    number: int
    first: int
    rows: int
    rejected: list[Rejected]
    source: str

    def row(self, place: int) -> int:
        """Return the number in its file of a row of the table, from 0: lines that are no rows count too."""
        at = place - self.first
        for line in self.rejected:
            at += line.file == self.opened.file.name and line.row <= at
        return at


@dataclass
class Table:
    """Columns of some files, each under its place, `c0`, `c1`, …, in the order of the files.

    Attributes:
        kinds: types of the columns, by their names.
    """

    engine: Engine
    name: str
    kinds: dict[str, str]
    parts: list[Part] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(part.rows for part in self.parts)

    def column(self, name: str) -> str:
        """Return the expression of a column as it is stored."""
        return f"c{[*self.kinds].index(name)}"

    def where(self, place: int) -> tuple[str, int]:
        """Return the file of a row of all files, and its number there."""
        part = next(part for part in reversed(self.parts) if part.first <= place)
        return part.opened.file.name, part.row(place)

    def ids(self, column: str) -> pa.Array:
        """Get the ids of a column, each in one spelling, in the order of the rows; null where there is none."""
        text = canonical_ids(self.engine, self.name, self.column(column))
        return self.engine.arrow(f"SELECT {text} AS id FROM {self.name} ORDER BY rowid")["id"].combine_chunks()

    def refuse_rejected(self) -> None:
        """Raise DataError where a line of a text file is no row."""
        for part in self.parts:
            if part.rejected:
                first, more = part.rejected[0], len(part.rejected) - 1
                others = f" and {more:,} more" if more else ""
                where = f"{part.opened.file.name}: line {first.line}{others}"
                raise DataError(f"{where}: expected {first.expected}, found {first.found}")

    def find_types(self, names: Collection[str] | None = None) -> None:
        """Find out what the columns of text files hold, all of their values together."""
        texts = [name for name, kind in self.kinds.items() if kind == TEXT and (names is None or name in names)]
        for start in range(0, len(texts), _AT_ONCE):
            self._find_types_of(texts[start : start + _AT_ONCE])

    def _find_types_of(self, texts: list[str]) -> None:
        fits = {name: [*kinds_of_text("")] for name in texts}
        few = f"(SELECT * FROM {self.name} LIMIT {_FEW})"
        for source in (few, self.name):  # a few rows rule most types out
            checks = []
            for name, kinds in fits.items():
                value = self.column(name)
                conditions, given = kinds_of_text(value), f"FILTER (NOT {is_nothing(value)})"
                checks += [f"bool_and({conditions[kind]}) {given}" for kind in kinds]
            found = iter(self.engine.row(f"SELECT {', '.join(checks)} FROM {source}") if checks else ())
            holds = {name: {kind: next(found) for kind in kinds} for name, kinds in fits.items()}
            fits = {
                name: [kind for kind, all_ in kinds.items() if all_ or (source == few and all_ is None)]
                for name, kinds in holds.items()
            }
        for name, kinds in fits.items():
            self.kinds[name] = kinds[0] if kinds else "VARCHAR"
            if kinds:
                at = self.column(name)
                self.engine.run(f"ALTER TABLE {self.name} ALTER {at} TYPE {kinds[0]} USING {typed(at, kinds[0])}")

    def rows_of(self, part: Part, start: int, count: int) -> pa.Table:
        """Return all columns of some rows of a file, which begin at its row `start`."""
        first = part.first + start
        with self.engine.reading(part.opened.file):
            return self.arrow([*self.kinds], f"rowid >= {first} AND rowid < {first + count}", part.source)

    def arrow(self, names: Sequence[str], where: str = "true", source: str | None = None) -> pa.Table:
        """Return some columns of the rows that meet a condition, in their order."""
        wanted = ", ".join(map(self._for_arrow, names))
        found = self.engine.arrow(f"SELECT {wanted or 'rowid'} FROM {source or self.name} WHERE {where} ORDER BY rowid")
        return found.rename_columns([*names]) if names else found.select([])

    def _for_arrow(self, name: str) -> str:
        """Return a column as a type that Arrow has: BIGINT where all of a HUGEINT fit, else decimals."""
        value = self.column(name)
        if self.kinds[name] != "HUGEINT":
            return value
        (fits,) = self.engine.row(f"SELECT bool_and(TRY_CAST({value} AS BIGINT) IS NOT NULL) FROM {self.name} "
                                  f"WHERE {value} IS NOT NULL")  # fmt: skip
        return f"{value}::{'DECIMAL(38, 0)' if fits is False else 'BIGINT'}"


def read_table(
    engine: Engine, files: Sequence[DataFile], wanted: Columns, where: str, errors: list[str] | None = None, *,
    views: Collection[str] = (),
) -> Table:  # fmt: skip
    """Read columns of some files into one table.

    Args:
        wanted: expression and type of each column, by the name it gets, of an opened file and its number; DataError
            if it lacks one. A name may have a role before it, `role:name`, which messages leave out.
        where: the files, for messages.
        errors: takes what is wrong with single files, which are left out; None raises it.
        views: kinds of files whose rows stay where they are, if all files are of these.
    """
    opened: list[tuple[int, Opened, dict[str, tuple[str, str]]]] = []
    empty: list[EmptyFileError] = []
    for number, file in enumerate(files):
        try:
            opened_file = open_file(engine, file)
            opened.append((number, opened_file, wanted(opened_file, number)))
        except EmptyFileError as error:
            empty.append(error)
            engine.empty_files.append(file.name)
        except DataError as error:
            if errors is None:
                raise
            errors.append(str(error))
    if empty and len(empty) == len(files):
        if errors is None:
            raise empty[0]
        errors.append(str(empty[0]))
    kinds = _kinds([columns for *_, columns in opened], where)
    made = Table(engine, engine.name("rows"), kinds)
    stay = "HUGEINT" not in kinds.values() and all(opened_file.file.kind in views for _, opened_file, _ in opened)
    stored = ", ".join(f"c{at} {'VARCHAR' if kind == TEXT else kind}" for at, kind in enumerate(kinds.values()))
    engine.run(f"CREATE TABLE {made.name} ({stored or 'nothing INTEGER'})")
    first = 0
    for number, opened_file, columns in opened:
        cells = _cells(columns, kinds)
        if stay:
            source = engine.name("rows")
            named = [f"{cell} AS c{at}" for at, cell in enumerate(cells)]
            named += ["file_row_number AS rowid"] if opened_file.file.kind == "parquet" else []
            with engine.reading(opened_file.file):
                engine.run(f"CREATE VIEW {source} AS SELECT {', '.join(named)} FROM {opened_file.relation}")
                (rows,) = engine.row(f"SELECT count(*) FROM {source}")
            made.parts.append(Part(opened_file, number, 0, rows, [], source))
            continue
        try:
            rows, rejected = opened_file.insert(made.name, cells or ["NULL"])
        except DataError as error:
            if errors is None:
                raise
            errors.append(str(error))
            continue
        made.parts.append(Part(opened_file, number, first, rows, rejected, made.name))
        first += rows
    return made


def open_file(engine: Engine, file: DataFile) -> Opened:
    """Open a file, or a query over files."""
    if file.kind != "sql":
        return Opened(engine, file)
    rejected: list[Rejected] = []

    def view(files: list[DataFile], source: Path | str) -> str:
        if source not in engine.views:
            engine.views[source], lines = view_of(engine, files, str(source))
            rejected.extend(lines)
        return engine.views[source]

    with engine.reading(file):
        return Opened(engine, file, QueryTable(*opened_query(engine, file.path, view), rejected))


def id_of(opened: Opened, name: str, value: str, kind: str) -> tuple[str, str]:
    """Return a column of ids as text; DataError where a value is neither a text nor a whole number."""
    expected = "ids as strings or integers"
    try:
        wrong = is_no_id(value, kind)
    except TypeError:
        raise opened.file.wrong(name, expected, in_words(kind)) from None
    if wrong is not None:
        found = opened.engine.rows(f"SELECT {value} FROM {opened.relation} WHERE {wrong} LIMIT 1")
        if found:
            shown = f"{found[0][0]:g}" if isinstance(found[0][0], float) else str(found[0][0])
            raise opened.file.wrong(name, expected, f"{in_words(kind)}, such as {shown}")
    return text_of(value, kind), "VARCHAR"


def canonical_ids(engine: Engine, source: str, text: str, among: str = "true") -> str:
    """Return SQL of a column of ids: where all of its texts are whole numbers, `39.0` is `39`.

    Args:
        among: SQL condition of the texts that count.
    """
    whole, decimal = engine.row(
        f"SELECT bool_and({matches(text, WHOLE)}) FILTER ({among}), bool_or(contains({text}, '.')) FROM {source}"
    )
    return f"regexp_replace({text}, '\\.0+$', '')" if whole and decimal else text


def all_columns(opened: Opened, _: int) -> dict[str, tuple[str, str]]:
    """Return every column of a file."""
    return {name: opened.column(name) for name in opened.names}


def view_of(engine: Engine, files: Sequence[DataFile], where: str) -> tuple[str, list[Rejected]]:
    """Make a table of all columns of some files, by their names, with the types of what text files hold.

    Returns:
        Its name, and the lines of the files that are no rows.
    """
    table = read_table(engine, files, all_columns, where, views=_TYPED)
    table.find_types()
    kinds, rejected = table.kinds, [line for part in table.parts for line in part.rejected]
    lower = [name.lower() for name in kinds]
    if twice := [name for name in kinds if lower.count(name.lower()) > 1]:
        raise DataError(f"{where}: expected columns that a query can tell apart, found {' and '.join(twice)}")
    columns = ", ".join(f"{table.column(name)} AS {quoted(name)}" for name in kinds)
    rows = [f"SELECT {columns} FROM {source}" for source in dict.fromkeys(part.source for part in table.parts)]
    name = engine.name("place")
    engine.run(f"CREATE VIEW {name} AS {' UNION ALL '.join(rows)}")
    return name, rejected


def _kinds(columns: Sequence[dict[str, tuple[str, str]]], where: str) -> dict[str, str]:
    """Return one type for each column of some files; DataError where there is none."""
    kinds: dict[str, str] = {}
    for name in dict.fromkeys(name for of_file in columns for name in of_file):
        of = {of_file[name][1] for of_file in columns if name in of_file}
        kind = one_type(of)
        if kind is None:
            raise DataError(
                f"{where}: expected files whose columns are of one type each, "
                f"found {name.partition(':')[2] or name!r} as {', '.join(sorted(map(in_words, of)))}"
            )
        kinds[name] = kind
    return kinds


def _cells(columns: dict[str, tuple[str, str]], kinds: dict[str, str]) -> list[str]:
    return [as_type(*columns[name], kind) if name in columns else "NULL" for name, kind in kinds.items()]
