"""Text files of many writers are read as they were written, or an error or a rejected line says what is not."""

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from longtail.tables.database import Database
from tests.tables.dirty import (
    CASES,
    PACKERS,
    QUOTED,
    STRAY,
    WORDS,
    WRITERS,
    Rows,
    Writer,
    as_read,
    cases,
    read,
    tables,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dirty")


def write(folder: Path, writer: Writer, content: bytes, packed: str = "") -> Path:
    path = folder / f"table{writer.ending}{packed}"
    path.write_bytes(PACKERS[packed](content))
    return path


@pytest.mark.parametrize("count", CASES)
def test_written_rows_are_read(count: int, reader: Database, folder: Path) -> None:
    @cases(count)
    @given(tables(WORDS | QUOTED), st.sampled_from(WRITERS), st.sampled_from([*PACKERS]))
    def check(table: tuple[list[str], Rows], writer: Writer, packed: str) -> None:
        names, rows = table
        if not writer.quotes:
            rows = [tuple(re.sub('[\t\n\r,;|"]', "", cell) for cell in row) for row in rows]
        content = writer.write([tuple(names), *rows]).encode()

        result = read(reader, write(folder, writer, content, packed))

        if writer.name == "csv of old Macs" and result.refused and b"\n" in content:
            return
        assert result.refused is None
        assert result.rows == [as_read(row) for row in rows]
        assert not result.rejected

    check()


@pytest.mark.parametrize("count", CASES)
def test_stray_quotation_marks_hide_no_row(count: int, reader: Database, folder: Path) -> None:
    """Of a writer that quotes nothing; a cell quoted whole is read with or without its marks."""

    @cases(count)
    @given(
        tables(WORDS, rows=40),
        st.lists(st.tuples(st.integers(0, 39), st.integers(1, 4), STRAY), min_size=1, max_size=4),
        st.sampled_from([writer for writer in WRITERS if not writer.quotes]),
    )
    def check(table: tuple[list[str], Rows], strays: list[tuple[int, int, str]], writer: Writer) -> None:
        names, rows = table
        cells = [list(row) for row in rows]
        for row, column, text in strays:
            cells[row % len(rows)][1 + column % (len(names) - 1)] = text
        rows = [tuple(row) for row in cells]
        content = writer.write([tuple(names), *rows]).encode()

        result = read(reader, write(folder, writer, content))

        if result.refused is None:
            assert len(result.rows) + len(result.rejected) == len(rows)
            full = {row: {as_read(row), as_read(tuple(unquoted(cell) for cell in row))} for row in rows}
            saved = [row for line, row in enumerate(rows, 2) if line not in result.rejected]
            assert all(single in full[row] for single, row in zip(result.rows, saved, strict=True))

    check()


def unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if re.fullmatch('"([^"]|"")*"', cell) else cell


@pytest.mark.parametrize("count", CASES)
def test_broken_files_lose_no_row_in_silence(count: int, reader: Database, folder: Path) -> None:
    """Quotation marks, line breaks, delimiters and bytes at any place of a file of 40 rows that quotes some cells."""
    accidents = st.tuples(st.floats(0, 1), st.sampled_from(['"', '"', ",", "\r", "\xff", "\x00", '""', '"x']))

    @cases(count)
    @given(st.lists(accidents, min_size=1, max_size=3), st.sampled_from(["minimal", "all"]), st.booleans())
    def check(accidents: list[tuple[float, str]], quoting: str, windows: bool) -> None:
        end = "\r\n" if windows else "\n"
        note = '"said, hi"' if quoting == "minimal" else '"shoes"'
        lines = [f"u{at},p{at % 7},{at},{note if at % 9 == 4 or quoting == 'all' else 'shoes'}" for at in range(60)]
        content = end.join(["user,item,time,note", *lines, ""]).encode()
        start = content.index(b"\n") + 1
        for source, what in sorted(accidents, reverse=True):
            at = start + int(source * (len(content) - start))
            content = content[:at] + what.encode("latin-1") + content[at:]

        result = read(reader, write(folder, WRITERS[0], content))

        if result.refused is None:
            assert len(result.rows) + len(result.rejected) >= len(lines)
            touched = 2 * len(accidents)
            present = {row[0] for row in result.rows}
            assert len([at for at in range(60) if f"u{at}" not in present]) <= touched + len(result.rejected)

    check()
