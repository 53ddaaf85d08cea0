"""Open files in DuckDB: detect delimiters and quotes, unpack text, list rejected lines."""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.validation import did_you_mean
from longtail.tables.errors import DataError, EmptyFileError
from longtail.tables.files import PACKED, DataFile, store_errors
from longtail.tables.lake import lake_reader
from longtail.tables.values import TEXT, literal, type_name

_BLOCK = 1 << 24
_LONGEST_LINE = 1 << 27
"""Most bytes of a row of a text file."""
_DELIMITERS = (",", ";", "\t", "|")
_LIKE_ROWS = 6
"""Fewest delimiters in a quoted cell that has swallowed rows, if its lines look like rows."""
_DIGITS = r"'[-+]?[0-9][-+0-9.,:eETZ/ ]*'"
"""Regular expression of numbers and times."""
_FEW, _MOST = 10_000, 0.9
"""Rows sampled for columns of numbers, and the least share of numbers in such a column."""
_CHARS = 10_000
"""Most characters of a rejected line that are examined."""
_STRUCTURAL = {
    "UNQUOTED VALUE": "quotations that end before a delimiter",
    "INVALID ENCODING": "UTF-8",
    "INVALID STATE": "a line of one table, with quotations that end before a delimiter",
    "LINE SIZE OVER MAXIMUM": f"a line of at most {_LONGEST_LINE:,} bytes",
}
"""Requirements whose violation may hide other rows, by DuckDB's kind of error."""

_GUESSED = r"\b(DATE|TIME|TIMESTAMP( WITH TIME ZONE)?|UUID|JSON)(?=[,)\[\]]|$)"
"""Types that DuckDB guesses for JSON strings, and JSON, its name for mixed types."""


class Rejected(NamedTuple):
    """A line of a text file, from 1, that is not a row; `row` would be its row number, from 0."""

    file: str
    line: int
    row: int
    expected: str
    received: str


class QuerySource(NamedTuple):
    """A query over files; `rejected` are lines of its files that are not rows."""

    source: str
    in_order: bool
    rejected: list[Rejected]


class _Text(NamedTuple):
    """Path and format of a text file; `lines` excludes the header."""

    path: str
    delimiter: str
    quote: str
    lines: int
    names: list[str]


@dataclass(eq=False)
class Database:
    """A connection to DuckDB.

    Attributes:
        folder: scratch folder, deleted when the connection closes.
        views: tables of the sources that queries name.
        empty_files: names of skipped files without rows.
    """

    folder: Path
    connection: duckdb.DuckDBPyConnection
    views: dict[Path | str, str] = field(default_factory=dict)
    empty_files: list[str] = field(default_factory=list)
    _numbers: int = 0

    def run(self, sql: str) -> duckdb.DuckDBPyConnection:
        """Execute a statement."""
        return self.connection.execute(sql)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        return self.run(sql).fetchall()

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the one row of a query."""
        (row,) = self.rows(sql)
        return row

    def arrow(self, sql: str) -> pa.Table:
        """Return the rows of a query as an Arrow table."""
        return self.connection.sql(sql).to_arrow_table()

    def drop(self, table: str) -> None:
        """Drop a table or view."""
        kind = self.row(f"SELECT table_type FROM information_schema.tables WHERE table_name = {literal(table)}")[0]
        self.run(f"DROP {'VIEW' if kind == 'VIEW' else 'TABLE'} {table}")

    def register(self, table: Any) -> str:
        """Register an Arrow table, dataset or reader; returns its name in SQL."""
        name = self.name("arrow")
        self.connection.register(name, table)
        return name

    def empty_in_words(self) -> str | None:
        """Describe skipped files without rows; None if there were none."""
        if not self.empty_files:
            return None
        more = f" and {len(self.empty_files) - 1:,} more" if len(self.empty_files) > 1 else ""
        return f"Without rows: {self.empty_files[0]}{more}"

    def name(self, prefix: str) -> str:
        """Return an unused name."""
        self._numbers += 1
        return f"{prefix}_{self._numbers}"

    @contextmanager
    def on_one_thread(self) -> Iterator[None]:
        """Use one thread for results that depend on threads' order."""
        self.run("SET threads = 1")
        try:
            yield
        finally:
            self.run("RESET threads")

    @contextmanager
    def reading(self, file: DataFile) -> Iterator[None]:
        """Add the file's name to errors of reading; raises DataError."""
        try:
            yield
        except duckdb.OutOfMemoryException:
            raise
        except store_errors(duckdb.Error, pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError) or "not utf-8 encoded" in str(error):
                raise DataError(f"{file.name}: expected UTF-8 text, found other bytes: write it as UTF-8") from error
            why = str(error).partition("\n")[0]
            if "state machine" in why:
                why = "its lines end in different ways, or a cell has a carriage return and no quotation marks"
            what = "a query that DuckDB runs" if file.kind == "sql" else f"a readable {file.kind} file"
            hint = self._hint_of_types(why) if isinstance(error, duckdb.ConversionException) else ""
            raise DataError(f"{file.name}: expected {what}: {why}{hint}") from error

    def _hint_of_types(self, why: str) -> str:
        """Name the sources of a query that have a column with different types."""
        column = why.rpartition("source column ")[2]
        kinds = {
            str(source): kind
            for source, view in self.views.items()
            for name, kind, *_ in self.rows(f"DESCRIBE {view}")
            if name == column
        }
        if len({*kinds.values()}) < 2:
            return ""
        types = " and ".join(f"{type_name(kind)} in {source}" for source, kind in kinds.items())
        return f"; {column} is {types}, by all of its values there: compare {column}::VARCHAR with {column}::VARCHAR"


@contextmanager
def open_database(folder: Path | None = None, memory: int | None = None) -> Iterator[Database]:
    """Open a connection to DuckDB; raises DataError if memory or disk do not suffice.

    Args:
        folder: parent of the scratch folder; None: the system's temporary folder.
        memory: most bytes; None: DuckDB's default.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="longtail-", dir=folder) as scratch:
        config: dict[str, Any] = {"autoinstall_known_extensions": False, "temp_directory": f"{scratch}/spilled"}
        if memory is not None:
            config["memory_limit"] = f"{memory}B"
        with duckdb.connect(config=config) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            try:
                yield Database(Path(scratch), connection)
            except duckdb.OutOfMemoryException as error:
                why = str(error).partition("\n")[0]
                raise DataError(f"tables: expected more memory or disk than there is to read them in: {why}") from error


class OpenedFile:
    """A file with known columns.

    Attributes:
        relation: SQL source of the file, with columns `c0`, `c1`, …
        names: stored columns, then columns that folders name.
        in_order: whether rows have the same order on any number of threads.

    Args:
        query: source of a file of kind `sql`, from `table.open_file`.
    """

    def __init__(self, database: Database, file: DataFile, query: QuerySource | None = None) -> None:
        self.database, self.file, self._query = database, file, query
        self._rejects, self.in_order = database.name("rejects"), query is None or query.in_order
        with database.reading(file):
            self._text = _detect_format(database, file) if file.kind in ("csv", "tsv") else None
            if self._text is not None:
                self._stored = [(name, TEXT) for name in self._text.names]
                self.relation = _read_csv(self._text, rejects=self._rejects)
            else:
                source, self._stored = self._with_types()
                self.relation = f"{source} AS stored({', '.join(f'c{i}' for i in range(len(self._stored)))})"
        stored = [name for name, _ in self._stored]
        self.names = [*stored, *(name for name in file.partition if name not in stored)]

    def _with_types(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the SQL source of a typed file, and its columns with their types."""
        file = self.file
        if self._query is not None:
            source = self._query.source
        elif file.kind in ("delta", "iceberg"):
            source = self.database.register(lake_reader(file))
        elif file.kind == "jsonl":
            return _json_lines(self.database, file)
        else:
            path = file.path
            if file.system is not None:
                protocol = file.system.protocol if isinstance(file.system.protocol, str) else file.system.protocol[0]
                if not self.database.connection.filesystem_is_registered(protocol):
                    from longtail.tables.shared import SharedFiles

                    self.database.connection.register_filesystem(SharedFiles(file.system))
                path = file.system.unstrip_protocol(path)
            source = f"read_parquet({one_path(path)}, hive_partitioning = false)"
        described = self.database.rows(f"DESCRIBE SELECT * FROM {source}")
        names = [row[0] for row in described]
        if file.kind == "parquet":  # DuckDB tells no case apart, and gives a second column another name
            with open(file.path, "rb") if file.system is None else file.system.open(file.path) as content:
                about = pq.read_metadata(content)
                schema = about.schema.to_arrow_schema()
            if not about.num_rows and all(map(pa.types.is_null, schema.types)):
                raise EmptyFileError(f"{file.name}: expected columns with types, found an empty file")
            names = schema.names
        return source, [(name, row[1]) for name, row in zip(names, described, strict=True)]

    def column(self, name: str) -> tuple[str, str]:
        """Return expression and type of a column; raises DataError if it is missing or repeated."""
        positions = [i for i, (stored, _) in enumerate(self._stored) if stored == name]
        if len(positions) > 1:
            raise DataError(f"{self.file.name}: expected one column {name!r}, found {len(positions)}")
        if positions:
            i = positions[0]
            if self._text is not None and self._text.quote == "" and self.file.kind == "tsv":
                inner = f"""nullif(replace(c{i}[2:-2], '""', '"'), '')"""
                return f"""CASE WHEN length(c{i}) > 1 AND c{i} LIKE '"%"' THEN {inner} ELSE c{i} END""", TEXT
            return f"c{i}", self._stored[i][1]
        if name in self.file.partition:
            value = self.file.partition[name]
            return "NULL::VARCHAR" if value is None else literal(value), TEXT
        hint = did_you_mean(name, self.names)
        raise DataError(f"{self.file.name}: expected a column {name!r}, found {', '.join(self.names)}{hint}")

    def insert(self, table: str, columns: Sequence[str]) -> tuple[int, list[Rejected]]:
        """Append expressions of every row to a table; returns the number of rows, and rejected lines."""
        database = self.database
        with database.reading(self.file), database.on_one_thread() if not self.in_order else nullcontext():
            (count,) = database.row(f"INSERT INTO {table} SELECT {', '.join(columns)} FROM {self.relation}")
            if self._text is not None:
                return count, self._rejected(count)
            return count, [] if self._query is None else self._query.rejected

    def value(self, expression: str, row: int) -> Any:
        """Evaluate an expression on one row, from 0."""
        return self.database.row(f"SELECT {expression} FROM {self.relation} LIMIT 1 OFFSET {row}")[0]

    def _rejected(self, count: int) -> list[Rejected]:
        """Return the lines rejected by the last reading; raises DataError if they may hide rows."""
        text, rejected = self._text, []
        assert text is not None
        lines = self.database.rows(
            f"SELECT line, arg_max(error_type::VARCHAR, error_message), list(error_message), max(csv_line[:{_CHARS}]), "
            f"min(line_byte_position) FROM {self._rejects} GROUP BY line ORDER BY line"
        )
        numbers = [line for line, *_ in lines]
        if text.quote and text.lines > count + len(lines):
            self._refuse_swallowed(text)
            numbers = _find_line_numbers(text.path, [position for *_, position in lines])
        for table in (self._rejects, f"{self._rejects}_scan"):
            self.database.run(f"DROP TABLE IF EXISTS {table}")
        for line, (row, kind, messages, content, _) in zip(numbers, lines, strict=True):
            start, *more = content.splitlines() or [""]
            if kind in _STRUCTURAL:
                raise DataError(f"{self.file.name}: line {line}: expected {_STRUCTURAL[kind]}, found {start[:80]!r}")
            if any(part.count(text.delimiter) >= len(text.names) - 1 for part in more):
                raise DataError(
                    f"{self.file.name}: line {line}: expected quotations without rows in them, found {start[:80]!r} "
                    f"and {len(more)} more lines"
                )
            # DuckDB repeats the message for every missing column.
            cells = [int(number) for number in re.findall(r"Found: (\d+)", " ".join(messages))]
            few_or_many = str(min(cells) if kind == "MISSING COLUMNS" else max(cells)) if cells else messages[0]
            rejected.append(Rejected(self.file.name, line, row - 2, f"{len(text.names)} columns", few_or_many))
        return rejected

    def _columns_of_numbers(self, text: _Text) -> list[int]:
        """Return the positions of columns that nearly always hold numbers or times."""
        shares = ", ".join(f"avg(regexp_full_match(c{i}, {_DIGITS})::INTEGER)" for i in range(len(text.names)))
        shares_of_numbers = self.database.row(f"SELECT {shares} FROM (FROM {self.relation} LIMIT {_FEW})")
        return [i for i, share in enumerate(shares_of_numbers) if share is not None and share > _MOST]

    def _refuse_swallowed(self, text: _Text) -> None:
        """Raise DataError if a quoted cell contains rows or, in TSV, a line break.

        Such a cell begins in a column of one row and ends in the same column of another. One with few lines counts if
        numbers are where other rows have them.
        """

        def delimiters(text_sql: str) -> str:
            return f"(length({text_sql}) - length(replace({text_sql}, {literal(text.delimiter)}, '')))"

        inner, numbers = len(text.names) - 1, self._columns_of_numbers(text)
        for i in range(inner + 1):
            lines = f"string_split(c{i}, chr(10))"
            rows = f"len(list_filter({lines}[2:-2], lambda line: {delimiters('line')} = {inner}))"
            ends = [("[1]", other - i) if other > i else ("[-1]", other) for other in numbers if other != i]
            cells = [f"string_split({lines}{end}, {literal(text.delimiter)})[{position + 1}]" for end, position in ends]
            fits = " AND ".join(f"regexp_full_match({cell}, {_DIGITS})" for cell in cells) or "false"
            bad = (
                f"({inner} * (len({lines}) - 1) >= {_LIKE_ROWS} OR {fits}) AND "
                f"{delimiters(f'{lines}[1]')} = {inner - i} AND "
                f"{delimiters(f'{lines}[-1]')} = {i} AND {rows} >= 0.8 * (len({lines}) - 2)"
            )
            condition = f"contains(c{i}, chr(10))" + ("" if self.file.kind == "tsv" else f" AND {bad}")
            if cell_starts := self.database.rows(f"SELECT c{i}[:60] FROM {self.relation} WHERE {condition} LIMIT 1"):
                start = cell_starts[0][0].partition("\n")[0]
                raise DataError(
                    f"{self.file.name}: column {text.names[i]!r}: expected quotations without rows in them, found one "
                    f"that begins with {start!r} and goes on for lines: quote it whole, or leave its quotation mark out"
                )


def _find_line_numbers(path: str, positions: Sequence[int]) -> list[int]:
    """Return the line numbers, from 1, of ascending byte positions of a file."""
    lines, line = [], 1
    with open(path, "rb") as content:
        for position in positions:
            while (ahead := position - content.tell()) > 0:
                line += content.read(min(ahead, _BLOCK)).count(b"\n")
            lines.append(line)
    return lines


def one_path(path: str) -> str:
    """Quote a path in SQL, without wildcards."""
    return literal(glob.escape(path))


def _detect_format(database: Database, file: DataFile) -> _Text:
    """Detect delimiter and quotes of a text file.

    The delimiter is the one that the header has most of. Quotation marks are text if each line has as many cells as
    the header when they count as text, and, in CSV, no cell is quoted whole.
    """
    path, lines, quotes = _unpack(database, file)
    with open(path, encoding="utf-8-sig", newline="") as content:
        head = content.read(1 << 20)
    header = head.splitlines()[0] if head else ""
    if not head.strip():
        raise EmptyFileError(f"{file.name}: expected a header with the names of columns, found an empty file")
    if not header.strip():
        raise DataError(f"{file.name}: expected a header with the names of columns in its first line, found none")
    unquoted = re.sub(r'"[^"]*"', "", header)
    delimiter = "\t" if file.kind == "tsv" else max(_DELIMITERS, key=unquoted.count)
    cells = next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter))
    text = _Text(path, delimiter, '"' if quotes else "", lines - 1, cells)
    if not quotes:
        return text
    plain = text._replace(names=header.split(delimiter), quote="")
    is_quoted = " OR ".join(f"""c{i} LIKE '"%"'""" for i in range(len(plain.names)))
    try:
        if file.kind == "tsv":
            database.row(f"SELECT count(*) FROM {_read_csv(plain)}")
            return text if '"' in header else plain
        quoted_row = database.rows(f"SELECT 1 FROM {_read_csv(plain)} WHERE {is_quoted} LIMIT 1")
    except duckdb.Error:
        return text
    return text if quoted_row or '"' in header else plain


def _read_csv(text: _Text, rejects: str | None = None) -> str:
    """Return the SQL source of a text file, with columns of text.

    Args:
        rejects: table for lines that are not rows; None makes such a line an error.
    """
    names = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(text.names)))
    options = ""
    if rejects is not None:
        options = (
            f", store_rejects = true, rejects_limit = 0, rejects_table = '{rejects}', rejects_scan = '{rejects}_scan'"
        )
    return (
        f"read_csv({one_path(text.path)}, columns = {{{names}}}, delim = {literal(text.delimiter)}, "
        f"quote = '{text.quote}', escape = '{text.quote}', header = true, auto_detect = false, strict_mode = true, "
        f"max_line_size = {_LONGEST_LINE}{options})"
    )


def _refuse_broken(path: str, file: DataFile) -> None:
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                is_object = not line.strip() or isinstance(json.loads(line), dict)
            except ValueError:
                is_object = False
            if not is_object:
                raise DataError(f"{file.name}: line {number}: expected an object of JSON, found {line.strip()[:80]!r}")


def _unpack(database: Database, file: DataFile) -> tuple[str, int, bool]:
    """Unpack a text file; returns its path, its number of lines, and whether it has quotation marks."""
    packed = next((ending for ending in PACKED if file.path.endswith(ending)), None)
    path = file.path
    if file.system is not None or packed:
        path = str(database.folder / database.name("text"))
        with _content(file) as content, open(path, "wb") as copy:
            while block := content.read(_BLOCK):
                copy.write(block)
    lines = returns = breaks = quotes = 0
    last = b"\n"
    with open(path, "rb") as content:
        if content.read(4).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{file.name}: expected UTF-8 text, found UTF-16: write it as UTF-8")
        content.seek(0)
        while block := content.read(_BLOCK):
            lines += block.count(b"\n")
            returns += block.count(b"\r")
            breaks += block.count(b"\r\n") + (last == b"\r" and block.startswith(b"\n"))
            quotes += block.count(b'"')
            last = block[-1:]
    if 0 < breaks < lines:
        path = _with_plain_breaks(database, path, within=quotes % 2 == 1)
    return path, (lines or returns) + (last not in b"\r\n"), bool(quotes)


def _with_plain_breaks(database: Database, path: str, within: bool) -> str:
    """Copy a file with all line breaks as `\\n`; returns the path of the copy.

    Args:
        within: also change line breaks between quotation marks.
    """
    plain, rest, is_within = str(database.folder / database.name("text")), b"", False
    with open(path, "rb") as content, open(plain, "wb") as copy:
        while block := content.read(_BLOCK):
            parts = (rest + block).split(b'"')
            rest = b"\r" if parts[-1].endswith(b"\r") else b""
            parts[-1] = parts[-1].removesuffix(b"\r")
            first = int(is_within and not within)
            for i in range(first, len(parts), 1 if within else 2):
                parts[i] = parts[i].replace(b"\r\n", b"\n")
            is_within ^= len(parts) % 2 == 0
            copy.write(b'"'.join(parts))
        copy.write(rest)
    return plain


def _content(file: DataFile) -> IO[bytes]:
    raw: IO[bytes] = open(file.path, "rb") if file.system is None else file.system.open(file.path, "rb")  # noqa: SIM115
    ending = Path(file.path).suffix
    if ending not in PACKED:
        return raw
    codec = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}[ending]
    unpacked: IO[bytes] = pa.CompressedInputStream(pa.PythonFile(raw), codec)
    return unpacked


def _json_lines(database: Database, file: DataFile) -> tuple[str, list[tuple[str, str]]]:
    """Return the SQL source of a JSON file, and its columns with their types.

    Strings stay text, even if they look like dates. Mixed numbers and strings become text, and so do numbers with more
    digits than a DOUBLE.
    """
    staged, count, _ = _unpack(database, file)
    if not count:
        raise EmptyFileError(f"{file.name}: expected a JSON object in every line, found an empty file")
    path, lines = one_path(staged), "format = 'newline_delimited', records = true"
    auto = f"read_json({path}, {lines}, sample_size = -1, map_inference_threshold = -1)"
    try:
        described = [row[:2] for row in database.rows(f"DESCRIBE SELECT * FROM {auto}")]
    except duckdb.Error:
        _refuse_broken(staged, file)
        raise
    plain = {re.sub(r"_\d+$", "", name.lower()) for name, _ in described}
    if len(plain) < len(described):  # DuckDB tells no case apart, and gives a second column another name
        keys = {
            row[0] for row in database.rows(f"SELECT DISTINCT unnest(json_keys(json)) FROM read_json_objects({path})")
        }
        if lost_keys := sorted(keys - {name for name, _ in described}):
            raise DataError(
                f"{file.name}: expected keys that differ in more than case, found {lost_keys[0]!r} and its like"
            )
    stored = []
    for name, kind in described:
        read_as = re.sub(_GUESSED, "VARCHAR", kind)
        if kind in ("JSON", "DOUBLE"):
            value = f"read_json({path}, {lines}, columns = {{{literal(name)}: 'JSON'}}) AS stored(value)"
            nested, long = database.row(
                f"SELECT coalesce(bool_or(json_type(value) IN ('ARRAY', 'OBJECT')), false), "
                f"coalesce(bool_or(regexp_matches(value::VARCHAR, '^-?\\d{{16,}}')), false) FROM {value}"
            )
            if nested:
                raise DataError(
                    f"{file.name}: key {name!r}: expected values of one kind, found lists or objects and others"
                )
            read_as = "VARCHAR" if long else read_as
        stored.append((name, TEXT if read_as == "VARCHAR" and kind not in ("VARCHAR", "JSON") else read_as))
    columns = ", ".join(f"{literal(name)}: {literal('VARCHAR' if kind == TEXT else kind)}" for name, kind in stored)
    return f"read_json({path}, {lines}, columns = {{{columns}}})", stored


def lines_source(database: Database, file: DataFile, skip: int = 0) -> str:
    """Return the SQL source of the lines of a text file, as a column `line`; an empty line is null."""
    path = one_path(_unpack(database, file)[0])
    return (
        f"read_csv({path}, columns = {{'line': 'VARCHAR'}}, delim = '\x01', quote = '', escape = '', header = false, "
        f"auto_detect = false, skip = {skip}, max_line_size = {_LONGEST_LINE})"
    )
