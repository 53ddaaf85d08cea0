"""Problems of rows: all are found first, then refused or skipped, in one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longtail.tables.database import Database, Rejected
from longtail.tables.table import FileRows
from longtail.tables.values import is_text
from longtail.trainer.config import DataConfig
from longtail.trainer.errors import DataError

_MOST_ROWS = 5


@dataclass(frozen=True)
class Problem:
    """Describe rows of one file with the same problem.

    Attributes:
        expected, content: what was expected, and what the first row with the problem holds.
        column: name of the column; empty for lines of a text file that are no rows.
        rows: numbers of the first rows, from 0, without a header; numbers of lines count from 1.
        fatal: whether such rows are refused or skipped; otherwise they are only reported.
    """

    file: str
    column: str
    expected: str
    content: str
    rows: list[int]
    count: int
    fatal: bool = True

    @property
    def kind(self) -> tuple[str, str, str, bool]:
        """Return what equal problems of several files share."""
        # Behind the bracket are examples of one file, which would keep alike problems apart.
        return self.column, self.expected, self.content.partition(" (")[0], self.fatal

    def __str__(self) -> str:
        return self.describe(1, self.count)

    def describe(self, files: int, count: int) -> str:
        """Describe these rows, and rows with the same problem in other files."""
        unit = "row" if self.column else "line"
        rows = f"{unit} {self.rows[0]}"
        if count > 1:
            ellipsis = ", …" if self.count > len(self.rows) else ""
            subset = " of the first" if files > 1 else ""
            rows = f"{count:,} {unit}s ({', '.join(map(str, self.rows))}{ellipsis}{subset})"
        others = f" and {files - 1} more" if files > 1 else ""
        column = f"column {self.column!r}: " if self.column else ""
        return f"{self.file}{others}: {column}expected {self.expected}, found {self.content} in {rows}"


def format_problems(problems: list[Problem]) -> list[str]:
    """Describe problems, and merge equal problems of several files."""
    alike: dict[object, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(problem.kind, []).append(problem)
    return [same[0].describe(len(same), sum(it.count for it in same)) for same in alike.values()]


@dataclass
class RowReport:
    """Count the rows that were read and skipped, with reasons.

    Attributes:
        early: rows skipped by `data.since`.
        unweighted: rows skipped because their event type has weight 0.
        dropped: bad rows that were skipped, rows of feature tables included.
        notes: numbers of rows that are read differently from the recipe, by the text of the note.
        unlisted: for `queries` and `labels` of the interactions, the number of ids without a row in the feature table,
            the number of ids, and a text with an example; only if some ids have no row.
        remarks: lines about whole files and splits.
        dates: whether times are timestamps, dates or ISO 8601, which are read in microseconds.
        unit: unit of the times: seconds, milliseconds, microseconds or nanoseconds; None without times, or if times are
            only an order.
    """

    read: int = 0
    early: int = 0
    unweighted: int = 0
    dropped: int = 0
    repeats: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    unlisted: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    dates: bool = False
    unit: str | None = None

    def note(self, problems: Iterable[Problem]) -> None:
        """Add problems, file by file; equal problems of a file are merged."""
        for new in problems:
            # Problems of a file are adjacent, so the search ends where another file begins.
            i = len(self.problems) - 1
            while i >= 0 and self.problems[i].file == new.file and self.problems[i].kind != new.kind:
                i -= 1
            if i < 0 or self.problems[i].file != new.file:
                self.problems.append(new)
                continue
            old = self.problems[i]
            rows = [*old.rows, *new.rows][:_MOST_ROWS]
            self.problems[i] = replace(old, rows=rows, count=old.count + new.count)

    def reject(self, lines: Sequence[Rejected]) -> None:
        """Note lines of text files that are no rows."""
        kinds: dict[tuple[str, str, str], list[int]] = {}
        for file, line, _, expected, content in lines:
            kinds.setdefault((file, expected, content), []).append(line)
        self.dropped += len(lines)
        self.note(
            Problem(file, "", expected, content, rows[:_MOST_ROWS], len(rows))
            for (file, expected, content), rows in kinds.items()
        )

    def lines(self, tables: str = "data.") -> list[str]:
        """Describe skipped rows and problems, a line each; empty without any.

        Args:
            tables: prefix of `queries` and `labels` in the text, such as `--` for options.
        """
        counts = {
            "data.since": self.early,
            "event types of weight 0": self.unweighted,
            "bad rows": self.dropped,
            "repeats of a pair": self.repeats,
        }
        left_out = ", ".join(f"{count:,} by {name}" for name, count in counts.items() if count)
        lines = [f"Left out, of {self.read:,} rows read: {left_out}"] if left_out else []
        lines += self.remarks
        lines += [f"{rows:,} of {self.read:,} rows {note}" for note, rows in self.notes.items() if rows]
        for side, (without, every, example) in self.unlisted.items():
            lines.append(
                f"Without a row in {tables}{side}: {without:,} of the {every:,} {side} in interactions{example}"
            )
        for name, fatal in (("Bad", True), ("Doubtful", False)):
            lines += [f"{name}: {line}" for line in format_problems([it for it in self.problems if it.fatal is fatal])]
        return lines


@dataclass(frozen=True)
class RowCheck:
    """Define a check of the rows of a DuckDB table.

    Attributes:
        condition: SQL condition of the bad rows.
        content: text about the content of bad rows. If None, the text describes the first bad row, by `raw`,
            `counted` or `value`.
        raw: a column of the row's file, quoted as it is written there; `of_text` replaces `expected` for text columns.
        value: an SQL expression, which `format_value` turns into text.
        counted: function from the number of a file to the text.
        fatal: whether bad rows are refused or skipped; otherwise they are only reported.
    """

    column: str
    condition: str
    expected: str
    content: str | None = None
    raw: str | None = None
    of_text: str | None = None
    value: str = "NULL"
    format_value: Callable[[Any], str] = str
    counted: Callable[[int], str] | None = None
    fatal: bool = True


def find_problems(
    database: Database, table: str, checks: Sequence[RowCheck], files: Iterable[FileRows], report: RowReport
) -> str:
    """Note the bad rows of a table by file; return the SQL condition of fatal problems.

    Args:
        table: table with `file`, the number of a file, and `row_id`, the number of a row.
    """
    if not checks:
        return "false"
    # One pass counts all checks; only those with bad rows are looked at again, by file.
    counts = database.row(
        f"SELECT {', '.join(f'count(*) FILTER ({check.condition})' for check in checks)} FROM {table}"
    )
    checks = [check for check, count in zip(checks, counts, strict=True) if count]
    if not checks:
        return "false"
    cells = ", ".join(
        f"count(*) FILTER ({check.condition}), min(row_id, {_MOST_ROWS}) FILTER ({check.condition}), "
        f"arg_min({check.value}, row_id) FILTER ({check.condition})"
        for check in checks
    )
    rows_of_file = {file_rows.number: file_rows for file_rows in files}
    for file, *row in database.rows(f"SELECT file, {cells} FROM {table} GROUP BY file ORDER BY file"):
        file_rows, problems = rows_of_file[file], []
        opened = file_rows.opened
        for i, check in enumerate(checks):
            count, row_numbers, value = row[3 * i : 3 * i + 3]
            if not count:
                continue
            rows, expected, words = [*map(file_rows.row, row_numbers)], check.expected, check.content
            if check.raw is not None and check.raw in opened.names:
                column, kind = opened.column(check.raw)
                expected = check.of_text or expected if is_text(kind) else expected
                cell = opened.value(column, row_numbers[0] - file_rows.first_row)
                words = repr(cell) if isinstance(cell, str) else "null" if cell is None else str(cell)
            elif check.counted is not None:
                words = check.counted(file)
            words = check.format_value(value) if words is None else words
            problems.append(Problem(opened.file.name, check.column, expected, words, rows, count, check.fatal))
        report.note(problems)
    return " OR ".join(f"({check.condition})" for check in checks if check.fatal) or "false"


def refuse_problems(
    report: RowReport, data: DataConfig, structural: list[str], bad_rows: list[Problem], *, rows: int
) -> None:
    """Raise one DataError with all problems that must be refused.

    Args:
        structural: errors about whole files, which no setting can skip.
        bad_rows: the fatal problems of the report.
    """
    fatal = format_problems(bad_rows)
    limit = data.max_bad_rows
    allowed = limit if isinstance(limit, int) else limit * rows
    hint = ""
    if not limit and fatal:
        hint = "data.max_bad_rows = 0.05 leaves out such rows, up to 5 % of those read"
    elif report.dropped > allowed:
        share = f"{limit:,}" if isinstance(limit, int) else f"{limit:g} of {rows:,} rows"
        hint = f"data.max_bad_rows: expected at most {share}, found {report.dropped:,} bad rows"
    else:
        fatal = []
    problems = [*structural, *fatal]
    if not problems:
        return
    if len(problems) == 1 and not limit:
        raise DataError(problems[0] + (f" ({hint})" if hint else ""))
    if len(problems) == 1 and not hint:
        raise DataError(problems[0])
    head = f"data with {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    raise DataError("\n  ".join([f"{head}{'; ' + hint if hint else ''}:", *problems]))
