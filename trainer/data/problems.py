"""What is wrong with the rows of files: found everywhere first, then refused or left out, in one report.

Legend: `N` rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from longtail.bundle.arrays import Bools, Int64
from longtail.trainer.config import DataConfig
from longtail.trainer.errors import DataError

_SHOWN = 5


@dataclass(frozen=True)
class Problem:
    """Rows of one file with one thing wrong.

    Attributes:
        expected, found: what a row should hold, and what the first of these holds.
        rows: numbers of the first few, from 0, without a header.
        fatal: whether such a row is refused, or left out; else it is only reported.
    """

    file: str
    column: str
    expected: str
    found: str
    rows: list[int]
    count: int
    fatal: bool = True

    @property
    def kind(self) -> tuple[str, str, str, str, bool]:
        """Return what is wrong, and in which file."""
        return self.file, self.column, self.expected, self.found.partition(" (")[0], self.fatal

    def __str__(self) -> str:
        return self.among(1, self.count)

    def among(self, files: int, count: int) -> str:
        """In words: these rows, and as many in as many files as have the same wrong with them."""
        where = f"row {self.rows[0]}"
        if count > 1:
            more = ", …" if self.count > len(self.rows) else ""
            of = " of the first" if files > 1 else ""
            where = f"{count:,} rows ({', '.join(map(str, self.rows))}{more}{of})"
        others = f" and {files - 1} more" if files > 1 else ""
        return f"{self.file}{others}: column {self.column!r}: expected {self.expected}, found {self.found} in {where}"


def in_words(problems: list[Problem]) -> list[str]:
    """Problems, those of several files that are alike as one."""
    alike: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((problem.column, problem.expected, problem.found.partition(" (")[0]), []).append(problem)
    return [same[0].among(len(same), sum(each.count for each in same)) for same in alike.values()]


@dataclass
class RowReport:
    """What was read, what was left out, and why.

    Attributes:
        filtered: left out by `data.filter`.
        early: left out by `data.since`.
        unweighted: left out because their event type weighs 0.
        dropped: bad ones left out, feature tables' among them.
        notes: rows that are read in another way than the recipe says, by what is said of them.
        unlisted: of the interactions' `queries` and `labels`, how many their feature table has no row for, and how
            many there are; only where some have none.
        dates: whether times are timestamps, dates or ISO 8601, which are read in microseconds.
        unit: of the times: seconds, milliseconds, microseconds or nanoseconds; None where there are none, or they are
            only an order.
    """

    read: int = 0
    filtered: int = 0
    early: int = 0
    unweighted: int = 0
    dropped: int = 0
    repeats: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    unlisted: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    dates: bool = False
    unit: str | None = None

    def note(self, problems: Iterable[Problem]) -> None:
        """Add problems, file after file; one of rows with the same wrong as others of their file is one with theirs."""
        for new in problems:
            at = len(self.problems) - 1
            while at >= 0 and self.problems[at].file == new.file and self.problems[at].kind != new.kind:
                at -= 1
            if at < 0 or self.problems[at].file != new.file:
                self.problems.append(new)
                continue
            old = self.problems[at]
            rows = [*old.rows, *new.rows][:_SHOWN]
            self.problems[at] = replace(old, rows=rows, count=old.count + new.count)

    def lines(self) -> list[str]:
        """In words, for people; empty where every row counts and nothing is wrong."""
        counts = {
            "data.filter": self.filtered,
            "data.since": self.early,
            "event types of weight 0": self.unweighted,
            "bad rows": self.dropped,
            "repeats of a pair": self.repeats,
        }
        left_out = ", ".join(f"{count:,} by {name}" for name, count in counts.items() if count)
        lines = [f"Left out, of {self.read:,} rows read: {left_out}"] if left_out else []
        lines += [f"{rows:,} of {self.read:,} rows {note}" for note, rows in self.notes.items() if rows]
        for side, (without, every) in self.unlisted.items():
            lines.append(f"Without a row in data.{side}: {without:,} of the {every:,} {side} in interactions")
        for name, fatal in (("Bad", True), ("Doubtful", False)):
            lines += [f"{name}: {each}" for each in in_words([one for one in self.problems if one.fatal is fatal])]
        return lines


class RowChecks:
    """Finds bad rows of one file and remembers which they are.

    Args:
        rows_N: numbers of its rows, int64 [N].
        fatal: rows that a check marks as bad, bool [N].
    """

    def __init__(self, file: str, rows_N: Int64) -> None:
        self.file, self.rows_N = file, rows_N
        self.fatal = np.zeros(len(rows_N), bool)
        self.problems: list[Problem] = []

    def add(self, column: str, wrong_N: Bools, *, expected: str, found: str | None, values: object = None,
            fatal: bool = True) -> None:  # fmt: skip
        """Note the rows of a mask, if there are any.

        Args:
            wrong_N: which, bool [N].
            found: what they hold; None shows the first of `values`.
            fatal: whether such a row is refused or left out.
        """
        at = np.flatnonzero(wrong_N)
        if not len(at):
            return
        if found is None:
            found = _shown(values[int(at[0])])  # type: ignore[index]
        rows = self.rows_N[at[:_SHOWN]].tolist()
        self.problems.append(Problem(self.file, column, expected, found, rows, len(at), fatal))
        if fatal:
            self.fatal |= wrong_N


def _shown(value: object) -> str:
    plain = value.as_py() if hasattr(value, "as_py") else value
    return repr(plain) if isinstance(plain, str) else str(plain)


def settle(report: RowReport, data: DataConfig, structural: list[str], *, rows: int) -> None:
    """Refuse what has to be refused, all of it in one error.

    Args:
        structural: errors of whole files, which nothing can leave out.
    """
    fatal = in_words([problem for problem in report.problems if problem.fatal])
    limit = data.max_bad_rows
    allowed = limit if isinstance(limit, int) else limit * rows
    hint = ""
    if data.on_bad_row == "error" and fatal:
        hint = 'data.on_bad_row = "drop" leaves such rows out'
    elif report.dropped > allowed:
        share = f"{limit:,}" if isinstance(limit, int) else f"{limit:g} of {rows:,} rows"
        hint = f"data.max_bad_rows: expected at most {share}, found {report.dropped:,} bad rows"
    else:
        fatal = []
    problems = [*structural, *fatal]
    if not problems:
        return
    if len(problems) == 1 and data.on_bad_row == "error":
        raise DataError(problems[0] + (f" ({hint})" if hint else ""))
    if len(problems) == 1 and not hint:
        raise DataError(problems[0])
    head = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} with the data"
    raise DataError("\n  ".join([f"{head}{'; ' + hint if hint else ''}:", *problems]))
