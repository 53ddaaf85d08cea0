"""DuckDB as the reader of every table: opens files, tells how their text is written, and what of them is rejected."""

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
from pathlib import Path
from typing import IO, Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.validation import did_you_mean
from longtail.tables.errors import DataError, EmptyFileError
from longtail.tables.files import PACKED, DataFile, store_errors
from longtail.tables.lake import lake_reader
from longtail.tables.values import TEXT, in_words, literal

_BLOCK = 1 << 24
_LONGEST_LINE = 1 << 27
"""Bytes of a row of a text file, at most."""
_DELIMITERS = (",", ";", "\t", "|")
_LIKE_ROWS = 6
"""Delimiters of a quoted cell from which on, where its lines look like rows, it has swallowed rows."""
_DIGITS = r"'[-+]?[0-9][-+0-9.,:eETZ/ ]*'"
"""A regular expression of numbers and times."""
_FEW, _MOST = 10_000, 0.9
"""Rows that are looked at for columns of numbers, and the share of numbers above which a column is one."""
_SEEN = 10_000
"""Letters of a rejected line that are looked at."""
_STRUCTURAL = {
    "UNQUOTED VALUE": "quotations that end before a delimiter",
    "INVALID ENCODING": "UTF-8",
    "INVALID STATE": "a line of one table, with quotations that end before a delimiter",
    "LINE SIZE OVER MAXIMUM": f"a line of at most {_LONGEST_LINE:,} bytes",
}
"""What is not allowed in a text file, for it may hide other rows, by DuckDB's kind of error."""

_GUESSED = r"\b(DATE|TIME|TIMESTAMP( WITH TIME ZONE)?|UUID|JSON)(?=[,)\[\]]|$)"
"""Types that DuckDB guesses for texts of JSON, and its name for values of several types."""


class Rejected(NamedTuple):
    """A line of a text file, from 1, that is no row; `row`, from 0, would be its number among the rows."""

    file: str
    line: int
    row: int
    expected: str
    found: str


class QueryTable(NamedTuple):
    """A query over files as a table; `rejected` are lines of its files that are no rows."""

    source: str
    in_order: bool
    rejected: list[Rejected]


class _Text(NamedTuple):
    """How a text file is written, and where it lies; `lines` are counted without the header."""

    path: str
    delimiter: str
    quote: str
    lines: int
    names: list[str]


class Engine:
    """A connection to DuckDB; what does not fit in its memory lies in a folder of its own.

    Attributes:
        views: tables of the places that queries name.
        empty_files: names of files without rows, which were left out.

    Args:
        folder: is the connection's alone, and removed after it.
        memory: bytes; None takes DuckDB's default.
    """

    def __init__(self, folder: Path, memory: int | None) -> None:
        self.folder, self._numbers, self.views = folder, 0, dict[Path | str, str]()
        self.empty_files: list[str] = []
        self.connection = duckdb.connect(config={"autoinstall_known_extensions": False})
        self.run(f"SET temp_directory = {literal(str(folder / 'spilled'))}")
        self.run("SET TimeZone = 'UTC'")
        if memory is not None:
            self.run(f"SET memory_limit = '{memory}B'")

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
        """Free the rows of a table; of a view, those of the table under it stay."""
        kind = self.row(f"SELECT table_type FROM information_schema.tables WHERE table_name = {literal(table)}")[0]
        self.run(f"DROP {'VIEW' if kind == 'VIEW' else 'TABLE'} {table}")

    def register(self, table: Any) -> str:
        """Make an Arrow table, dataset or reader known, and return the name to read it from."""
        name = self.name("arrow")
        self.connection.register(name, table)
        return name

    def empty_in_words(self) -> str | None:
        """Describe the files that were left out without rows; None without any."""
        if not self.empty_files:
            return None
        more = f" and {len(self.empty_files) - 1:,} more" if len(self.empty_files) > 1 else ""
        return f"Without rows: {self.empty_files[0]}{more}"

    def name(self, of: str) -> str:
        """Return a name that nothing has yet."""
        self._numbers += 1
        return f"{of}_{self._numbers}"

    @contextmanager
    def on_one_thread(self) -> Iterator[None]:
        """Run a query whose ties and groups depend on the order in which threads finish."""
        self.run("SET threads = 1")
        try:
            yield
        finally:
            self.run("RESET threads")

    @contextmanager
    def reading(self, file: DataFile) -> Iterator[None]:
        """Say of which file an error of reading is."""
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
        """Name the places of a query that have one column as different types."""
        column = why.rpartition("source column ")[2]
        kinds = {
            str(place): kind
            for place, view in self.views.items()
            for name, kind, *_ in self.rows(f"DESCRIBE {view}")
            if name == column
        }
        if len({*kinds.values()}) < 2:
            return ""
        types = " and ".join(f"{in_words(kind)} in {place}" for place, kind in kinds.items())
        return f"; {column} is {types}, by all of its values there: compare {column}::VARCHAR with {column}::VARCHAR"


@contextmanager
def engine(folder: Path | None = None, memory: int | None = None) -> Iterator[Engine]:
    """Open a connection to DuckDB.

    Args:
        folder: where it puts what does not fit in memory; None: the system's temporary folder.
        memory: bytes that it may take; None takes DuckDB's default.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="longtail-", dir=folder) as own:
        made = Engine(Path(own), memory)
        with made.connection:
            try:
                yield made
            except duckdb.OutOfMemoryException as error:
                why = str(error).partition("\n")[0]
                raise DataError(f"tables: expected more memory or disk than there is to read them in: {why}") from error


class Opened:
    """A file whose columns are known.

    Attributes:
        names: of its stored columns, then of columns that its folders name.
        in_order: whether its rows come in one order on any number of threads.

    Args:
        query: what a file of kind `sql` is read from; `table.open_file` makes it.
    """

    def __init__(self, engine: Engine, file: DataFile, query: QueryTable | None = None) -> None:
        self.engine, self.file, self._query = engine, file, query
        self._rejects, self.in_order = engine.name("rejects"), query is None or query.in_order
        with engine.reading(file):
            self._text = _look_at(engine, file) if file.kind in ("csv", "tsv") else None
            if self._text is not None:
                self._stored = [(name, TEXT) for name in self._text.names]
                self._source = _read_csv(self._text, rejects=self._rejects)
            else:
                self._source, self._stored = self._with_types()
        stored = [name for name, _ in self._stored]
        self.names = [*stored, *(name for name in file.partition if name not in stored)]

    def _with_types(self) -> tuple[str, list[tuple[str, str]]]:
        """Return what reads a file that says its types, and its columns with these."""
        file = self.file
        if self._query is not None:
            source = self._query.source
        elif file.kind in ("delta", "iceberg"):
            source = self.engine.register(lake_reader(file))
        elif file.kind == "jsonl":
            return _json_lines(self.engine, file)
        else:
            path = file.path
            if file.system is not None:
                protocol = file.system.protocol if isinstance(file.system.protocol, str) else file.system.protocol[0]
                if not self.engine.connection.filesystem_is_registered(protocol):
                    from longtail.tables.shared import SharedFiles

                    self.engine.connection.register_filesystem(SharedFiles(file.system))
                path = file.system.unstrip_protocol(path)
            source = f"read_parquet({one_path(path)}, hive_partitioning = false)"
        found = self.engine.rows(f"DESCRIBE SELECT * FROM {source}")
        names = [row[0] for row in found]
        if file.kind == "parquet":  # DuckDB tells no case apart, and gives a second column another name
            with open(file.path, "rb") if file.system is None else file.system.open(file.path) as content:
                about = pq.read_metadata(content)
                schema = about.schema.to_arrow_schema()
            if not about.num_rows and all(map(pa.types.is_null, schema.types)):
                raise EmptyFileError(f"{file.name}: expected columns with types, found an empty file")
            names = schema.names
        return source, [(name, row[1]) for name, row in zip(names, found, strict=True)]

    @property
    def relation(self) -> str:
        """Return what a query reads the file from; its columns are `c0`, `c1`, …"""
        if self._text is not None:
            return self._source
        columns = ", ".join(f"c{at}" for at in range(len(self._stored)))
        return f"{self._source} AS stored({columns})"

    def column(self, name: str) -> tuple[str, str]:
        """Return the expression of a column, and its type; DataError where the file lacks it or has it twice."""
        places = [at for at, (stored, _) in enumerate(self._stored) if stored == name]
        if len(places) > 1:
            raise DataError(f"{self.file.name}: expected one column {name!r}, found {len(places)}")
        if places:
            at = places[0]
            if self._text is not None and self._text.quote == "" and self.file.kind == "tsv":
                inner = f"""nullif(replace(c{at}[2:-2], '""', '"'), '')"""
                return f"""CASE WHEN length(c{at}) > 1 AND c{at} LIKE '"%"' THEN {inner} ELSE c{at} END""", TEXT
            return f"c{at}", self._stored[at][1]
        if name in self.file.partition:
            value = self.file.partition[name]
            return "NULL::VARCHAR" if value is None else literal(value), TEXT
        hint = did_you_mean(name, self.names)
        raise DataError(f"{self.file.name}: expected a column {name!r}, found {', '.join(self.names)}{hint}")

    def insert(self, table: str, columns: Sequence[str]) -> tuple[int, list[Rejected]]:
        """Append expressions of every row to a table; return the rows' number, and rejected lines."""
        engine = self.engine
        with engine.reading(self.file), engine.on_one_thread() if not self.in_order else nullcontext():
            (count,) = engine.row(f"INSERT INTO {table} SELECT {', '.join(columns)} FROM {self.relation}")
            if self._text is not None:
                return count, self._rejected(count)
            return count, [] if self._query is None else self._query.rejected

    def value(self, expression: str, row: int) -> Any:
        """Return an expression of one row, from 0."""
        return self.engine.row(f"SELECT {expression} FROM {self.relation} LIMIT 1 OFFSET {row}")[0]

    def _rejected(self, count: int) -> list[Rejected]:
        """Return the lines that the last reading rejected; DataError where they may hide other rows."""
        text, found = self._text, []
        assert text is not None
        lines = self.engine.rows(
            f"SELECT line, arg_max(error_type::VARCHAR, error_message), list(error_message), max(csv_line[:{_SEEN}]), "
            f"min(line_byte_position) FROM {self._rejects} GROUP BY line ORDER BY line"
        )
        numbers = [line for line, *_ in lines]
        if text.quote and text.lines > count + len(lines):
            self._refuse_swallowed(text)
            numbers = _lines_at(text.path, [position for *_, position in lines])
        for table in (self._rejects, f"{self._rejects}_scan"):
            self.engine.run(f"DROP TABLE IF EXISTS {table}")
        for line, (row, kind, messages, content, _) in zip(numbers, lines, strict=True):
            start, *more = content.splitlines() or [""]
            if kind in _STRUCTURAL:
                raise DataError(f"{self.file.name}: line {line}: expected {_STRUCTURAL[kind]}, found {start[:80]!r}")
            if any(each.count(text.delimiter) >= len(text.names) - 1 for each in more):
                raise DataError(
                    f"{self.file.name}: line {line}: expected quotations without rows in them, found {start[:80]!r} "
                    f"and {len(more)} more lines"
                )
            cells = [int(each) for each in re.findall(r"Found: (\d+)", " ".join(messages))]  # one of each that lacks
            few_or_many = str(min(cells) if kind == "MISSING COLUMNS" else max(cells)) if cells else messages[0]
            found.append(Rejected(self.file.name, line, row - 2, f"{len(text.names)} columns", few_or_many))
        return found

    def _columns_of_numbers(self, text: _Text) -> list[int]:
        """Return the places of columns that nearly always hold numbers or times."""
        shares = ", ".join(f"avg(regexp_full_match(c{at}, {_DIGITS})::INTEGER)" for at in range(len(text.names)))
        found = self.engine.row(f"SELECT {shares} FROM (FROM {self._source} LIMIT {_FEW})")
        return [at for at, share in enumerate(found) if share is not None and share > _MOST]

    def _refuse_swallowed(self, text: _Text) -> None:
        """Raise DataError where a quoted cell holds lines that are rows, or, in TSV, any line break.

        Such a cell begins in a column of one row and ends in the same column of another. One with few lines counts if
        numbers are where other rows have them.
        """

        def delimiters(of: str) -> str:
            return f"(length({of}) - length(replace({of}, {literal(text.delimiter)}, '')))"

        inner, numbers = len(text.names) - 1, self._columns_of_numbers(text)
        for at in range(inner + 1):
            lines = f"string_split(c{at}, chr(10))"
            rows = f"len(list_filter({lines}[2:-2], lambda line: {delimiters('line')} = {inner}))"
            ends = [("[1]", other - at) if other > at else ("[-1]", other) for other in numbers if other != at]
            cells = [f"string_split({lines}{end}, {literal(text.delimiter)})[{place + 1}]" for end, place in ends]
            fits = " AND ".join(f"regexp_full_match({cell}, {_DIGITS})" for cell in cells) or "false"
            bad = (
                f"({inner} * (len({lines}) - 1) >= {_LIKE_ROWS} OR {fits}) AND "
                f"{delimiters(f'{lines}[1]')} = {inner - at} AND "
                f"{delimiters(f'{lines}[-1]')} = {at} AND {rows} >= 0.8 * (len({lines}) - 2)"
            )
            condition = f"contains(c{at}, chr(10))" + ("" if self.file.kind == "tsv" else f" AND {bad}")
            if found := self.engine.rows(f"SELECT c{at}[:60] FROM {self._source} WHERE {condition} LIMIT 1"):
                start = found[0][0].partition("\n")[0]
                raise DataError(
                    f"{self.file.name}: column {text.names[at]!r}: expected quotations without rows in them, found one "
                    f"that begins with {start!r} and goes on for lines: quote it whole, or leave its quotation mark out"
                )


def _lines_at(path: str, positions: Sequence[int]) -> list[int]:
    """Return the numbers, from 1, of the lines at some bytes of a file, in ascending order."""
    lines, line = [], 1
    with open(path, "rb") as content:
        for position in positions:
            while (ahead := position - content.tell()) > 0:
                line += content.read(min(ahead, _BLOCK)).count(b"\n")
            lines.append(line)
    return lines


def one_path(path: str) -> str:
    """Write the path of one file as SQL, which else takes it for a pattern."""
    return literal(glob.escape(path))


def _look_at(engine: Engine, file: DataFile) -> _Text:
    """Find out how a text file is written.

    The delimiter is the one that the header has most of. Quotation marks are text if each line has as many cells as
    the header when they count as text, and, in CSV, no cell is quoted whole.
    """
    path, lines, quotes = _staged(engine, file)
    with open(path, encoding="utf-8-sig", newline="") as content:
        head = content.read(1 << 20)
    first = head.splitlines()[0] if head else ""
    if not head.strip():
        raise EmptyFileError(f"{file.name}: expected a header with the names of columns, found an empty file")
    if not first.strip():
        raise DataError(f"{file.name}: expected a header with the names of columns in its first line, found none")
    unquoted = re.sub(r'"[^"]*"', "", first)
    delimiter = "\t" if file.kind == "tsv" else max(_DELIMITERS, key=unquoted.count)
    cells = next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter))
    text = _Text(path, delimiter, '"' if quotes else "", lines - 1, cells)
    if not quotes:
        return text
    plain = text._replace(names=first.split(delimiter), quote="")
    whole = " OR ".join(f"""c{at} LIKE '"%"'""" for at in range(len(plain.names)))
    try:
        if file.kind == "tsv":
            engine.row(f"SELECT count(*) FROM {_read_csv(plain)}")
            return text if '"' in first else plain
        found = engine.rows(f"SELECT 1 FROM {_read_csv(plain)} WHERE {whole} LIMIT 1")
    except duckdb.Error:
        return text
    return text if found or '"' in first else plain


def _read_csv(text: _Text, rejects: str | None = None) -> str:
    """Return what reads a text file as columns of text.

    Args:
        rejects: table for the lines that are no rows; None makes one of them an error.
    """
    names = ", ".join(f"'c{at}': 'VARCHAR'" for at in range(len(text.names)))
    kept = ""
    if rejects is not None:
        kept = (
            f", store_rejects = true, rejects_limit = 0, rejects_table = '{rejects}', rejects_scan = '{rejects}_scan'"
        )
    return (
        f"read_csv({one_path(text.path)}, columns = {{{names}}}, delim = {literal(text.delimiter)}, "
        f"quote = '{text.quote}', escape = '{text.quote}', header = true, auto_detect = false, strict_mode = true, "
        f"max_line_size = {_LONGEST_LINE}{kept})"
    )


def _refuse_broken(path: str, file: DataFile) -> None:
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                whole = not line.strip() or isinstance(json.loads(line), dict)
            except ValueError:
                whole = False
            if not whole:
                raise DataError(f"{file.name}: line {number}: expected an object of JSON, found {line.strip()[:80]!r}")


def _staged(engine: Engine, file: DataFile) -> tuple[str, int, bool]:
    """Unpack a text file; return its path, its number of lines, and whether it has quotation marks."""
    packed = next((ending for ending in PACKED if file.path.endswith(ending)), None)
    path = file.path
    if file.system is not None or packed:
        path = str(engine.folder / engine.name("text"))
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
        path = _with_plain_breaks(engine, path, within=quotes % 2 == 1)
    return path, (lines or returns) + (last not in b"\r\n"), bool(quotes)


def _with_plain_breaks(engine: Engine, path: str, within: bool) -> str:
    """Write a copy of a file with all line breaks as `\\n`; return its path.

    Args:
        within: whether those between quotation marks change, too.
    """
    plain, rest, is_within = str(engine.folder / engine.name("text")), b"", False
    with open(path, "rb") as content, open(plain, "wb") as copy:
        while block := content.read(_BLOCK):
            parts = (rest + block).split(b'"')
            rest = b"\r" if parts[-1].endswith(b"\r") else b""
            parts[-1] = parts[-1].removesuffix(b"\r")
            first = int(is_within and not within)
            for at in range(first, len(parts), 1 if within else 2):
                parts[at] = parts[at].replace(b"\r\n", b"\n")
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


def _json_lines(engine: Engine, file: DataFile) -> tuple[str, list[tuple[str, str]]]:
    """Return what reads a file of JSON objects, and its columns with their types.

    Texts stay texts, also those that DuckDB takes for dates. Numbers and texts make a column of texts, and so do
    numbers with more digits than a DOUBLE.
    """
    staged, count, _ = _staged(engine, file)
    if not count:
        raise EmptyFileError(f"{file.name}: expected a JSON object in every line, found an empty file")
    path, lines = one_path(staged), "format = 'newline_delimited', records = true"
    auto = f"read_json({path}, {lines}, sample_size = -1, map_inference_threshold = -1)"
    try:
        found = [row[:2] for row in engine.rows(f"DESCRIBE SELECT * FROM {auto}")]
    except duckdb.Error:
        _refuse_broken(staged, file)
        raise
    plain = {re.sub(r"_\d+$", "", name.lower()) for name, _ in found}
    if len(plain) < len(found):  # DuckDB tells no case apart, and gives a second column another name
        keys = {
            row[0] for row in engine.rows(f"SELECT DISTINCT unnest(json_keys(json)) FROM read_json_objects({path})")
        }
        if other := sorted(keys - {name for name, _ in found}):
            raise DataError(
                f"{file.name}: expected keys that differ in more than case, found {other[0]!r} and its like"
            )
    stored = []
    for name, kind in found:
        read_as = re.sub(_GUESSED, "VARCHAR", kind)
        if kind in ("JSON", "DOUBLE"):
            value = f"read_json({path}, {lines}, columns = {{{literal(name)}: 'JSON'}}) AS stored(value)"
            nested, long = engine.row(
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


def read_lines(engine: Engine, file: DataFile, skip: int = 0) -> str:
    """Return what reads the lines of a text file, from some line on, as a column `line`; an empty one is null."""
    path = one_path(_staged(engine, file)[0])
    return (
        f"read_csv({path}, columns = {{'line': 'VARCHAR'}}, delim = '\x01', quote = '', escape = '', header = false, "
        f"auto_detect = false, skip = {skip}, max_line_size = {_LONGEST_LINE})"
    )
