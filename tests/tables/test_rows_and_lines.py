"""Messages name rows and lines where they are in a file, and every count of rows agrees."""

from functools import partial
from pathlib import Path

import pytest

from longtail.trainer.errors import DataError
from tests.trainer import logs

START = 1_767_225_600
load = partial(logs.load, timestamp="time")


def format_rows(note: str) -> list[str]:
    """30 rows, of which number 4 has too few cells, and number 9 no time."""
    rows = [f"u{at % 5},i{at % 3},{START + at},{note}" for at in range(30)]
    return [*rows[:4], "u4,i1", *rows[5:9], f"u9,i0,oops,{note}", *rows[10:]]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize(
    ("note", "line"), [("x", 6), ('"x"', 6), ('"x\ny"', 10)], ids=["bare", "quoted", "of two lines"]
)
@pytest.mark.parametrize("before", [0, 1], ids=["alone", "second"])
def test_messages_name_lines_and_rows(tmp_path: Path, end: str, note: str, line: int, before: int) -> None:
    good = tmp_path / "good.csv"
    good.write_text("user,item,time,note\nu1,i1,1767225600,z\nu2,i2,1767225601,z\n")
    path = tmp_path / "bad.csv"
    path.write_bytes(end.join(["user,item,time,note", *format_rows(note), ""]).replace("x\ny", f"x{end}y").encode())
    files = [good] * before + [path]

    report = load(files, max_bad_rows=2).report

    assert [str(problem) for problem in report.problems] == [
        f"{path}: expected 4 columns, found 2 in line {line}",
        f"{path}: column 'time': expected numbers or timestamps, found 'oops' in row 9",
    ]
    assert (report.read, report.dropped) == (30 + 2 * before, 2)
    with pytest.raises(DataError, match=r"data.max_bad_rows: expected at most 1, found 2 bad rows"):
        load(files, max_bad_rows=1)
    with pytest.raises(DataError, match=f"expected 4 columns, found 2 in line {line}"):
        load(files)


def test_row_that_may_hide_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"u{at % 5},i{at % 3},{START + at},x" for at in range(30)]
    rows[4], rows[12], rows[20] = 'u4,i1,"odd', 'u2,",",x', 'u2,i2,1,"quoted, whole"'
    path.write_text("\n".join(["user,item,time,note", *rows, ""]))

    with pytest.raises(DataError, match=r"log.csv: line \d+: expected quotations"):
        load(path, max_bad_rows=30)


NO_TIMES = ["1e400", "5", "2026-02-30", "2026-01-01 24:00:00", "2026-01-01 23:59:60", "10000-01-01", "infinity",
            "2026-01-01 01:00:00 PM", "2026-01-01 01:00:00 CET", "2026-01-01 01:00:00+05:75", "now",
            "0x1F"]  # fmt: skip


@pytest.mark.parametrize("odd", NO_TIMES)
def test_invalid_time_is_the_only_bad_row(tmp_path: Path, odd: str) -> None:
    times = [f"2026-01-{1 + at:02} 10:00:00" for at in range(20)]
    times[7] = odd
    path = tmp_path / "log.csv"
    path.write_text("user,item,time\n" + "".join(f"u{at % 3},i{at % 4},{time}\n" for at, time in enumerate(times)))

    with pytest.raises(DataError, match=r"expected numbers or timestamps, found .* in row 7"):
        load(path)
