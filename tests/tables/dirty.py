"""Tables with a known truth, written as programs write them and as accidents leave them."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings, strategies as st

from longtail.tables import DataError, find_files
from longtail.tables.database import Database
from longtail.tables.table import all_columns, read_table

Rows = list[tuple[str, ...]]
CASES = [40, pytest.param(300, marks=pytest.mark.nightly)]


def cases(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )


def _comma(rows: Rows, **how: Any) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, **({"lineterminator": "\n"} | how)).writerows(rows)
    return out.getvalue()


def _excel(rows: Rows) -> str:
    return "\ufeff" + _comma(rows, delimiter=";", lineterminator="\r\n")


def _r(rows: Rows) -> str:
    """As R's `write.csv` without row names: every text is quoted, and nothing is `NA`."""
    return _comma(rows, quoting=csv.QUOTE_ALL)


def _copy(rows: Rows) -> str:
    """As `COPY` of PostgreSQL and `SELECT … INTO OUTFILE` of MySQL with a header: tabs, and no quotation."""
    return "".join("\t".join(row) + "\n" for row in rows)


def _plain(rows: Rows) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


@dataclass(frozen=True)
class Writer:
    """A program that writes tables.

    Attributes:
        quotes: whether what it writes may hold delimiters and line breaks; quotation marks are text where it does not.
    """

    name: str
    ending: str
    write: Callable[[Rows], str]
    quotes: bool = True


WRITERS = [
    Writer("csv", ".csv", _comma),
    Writer("csv of all quoted", ".csv", _r),
    Writer("csv of Windows", ".csv", lambda rows: _comma(rows, lineterminator="\r\n")),
    Writer("csv of old Macs", ".csv", lambda rows: _comma(rows, lineterminator="\r")),
    Writer("excel", ".csv", _excel),
    Writer("pipes", ".csv", lambda rows: _comma(rows, delimiter="|")),
    Writer("no last line break", ".csv", lambda rows: _comma(rows).removesuffix("\n")),
    Writer("copy", ".tsv", _copy, quotes=False),
    Writer("concatenated", ".csv", _plain, quotes=False),
]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}

WORDS = st.sampled_from([
    "", "a", "7", "007", "39.0", "1E1", "NA", "NULL", "\\N", "None", "-", "true", "False", "Zoë", "日本", "e\u0301",
    "x y", " x", "x ", "#x", "2026-01-02", "01/02/2026", "1_000", "１２", "inf", "\\", "x\\", "'q'", "\u2028", "\x00",
    "\xa0", "😀", "5'", "%", "=1+1", "@x",
])  # fmt: skip
QUOTED = st.sampled_from(['"', 'said "hi"', 'x"', '5" disk', "a,b", "a;b", "a\tb", "a|b", ",", "a\nb", "\n", "a\r\nb",
                          '"a"', '",', ',"', '"\n"', "line\n\nline", "u9,i9,5"])  # fmt: skip
STRAY = st.sampled_from(['"odd', 'od"d', 'odd"', '5"', '"', '""', '"a" b', 'a "b"', '"x""y'])
_NAMES = ["a", "A", "Time", "time", "id", "ID", "a.b", "é", "order", "c0", "x y", "rowid", "1"]
NAMES = st.lists(st.sampled_from(_NAMES), min_size=2, max_size=5, unique=True)


@st.composite
def tables(draw: st.DrawFn, cells: st.SearchStrategy[str], *, rows: int = 12) -> tuple[list[str], Rows]:
    """Draw names of columns and rows of texts; the first cell is no empty one, so that no line is blank."""
    names = draw(NAMES)
    first = st.sampled_from(["u1", "u2", "7"])
    row = st.tuples(first, *[cells] * (len(names) - 1))
    return names, draw(st.lists(row, min_size=1, max_size=rows))


@dataclass(frozen=True)
class Read:
    """What is read of a file: its rows, as texts or None, and the lines that are rejected; or why it is refused."""

    rows: list[tuple[object, ...]]
    rejected: list[int]
    refused: str | None = None


def read(database: Database, path: Path) -> Read:
    """Read every column of a file as it is stored."""
    try:
        table = read_table(database, find_files(path), all_columns, str(path))
    except DataError as error:
        return Read([], [], str(error))
    result = table.arrow([*table.kinds])
    database.drop(table.name)
    rows = list(zip(*(column.to_pylist() for column in result.columns), strict=True))
    return Read(rows, [line.line for part in table.parts for line in part.rejected])


def as_read(row: tuple[str, ...]) -> tuple[str | None, ...]:
    """Return what a text file says of a row: an empty cell is nothing."""
    return tuple(cell or None for cell in row)
