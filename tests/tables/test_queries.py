"""Queries over files: what they may name, how the text in these is typed, and what they cannot do."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.tables import DataError, is_query
from longtail.tables.queries import find_all_files, rename_files
from tests.tables.reading import read, read_rows


@pytest.fixture(autouse=True)
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log as CSV, with a line that is no row, and tables of users as Parquet and of items in a Hive folder."""
    monkeypatch.chdir(tmp_path)
    Path("my log.csv").write_text("user,item,price,code\nu1,1,5.5,007\nu2,2,NA,008\nbad,line\nu3,3,7,\n")
    pq.write_table(pa.table({"user": ["u1", "u2"], "age": [30, None]}), "Käufer.parquet")
    for day in ("007", "008"):
        Path(f"days/day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"item": [int(day)]}), f"days/day={day}/a.parquet")
    return tmp_path


QUERIES = {
    "text is typed": ("SELECT user, code FROM 'my log.csv' WHERE price > 5", [("u1", "007"), ("u3", None)]),
    "FROM first": ("FROM 'Käufer.parquet' SELECT user", [("u1",), ("u2",)]),
    "double quotes": ('SELECT user FROM "Käufer.parquet"', [("u1",), ("u2",)]),
    "joins, the log twice": (
        "SELECT a.user, k.age FROM 'my log.csv' AS a JOIN 'Käufer.parquet' k USING (user) "
        "SEMI JOIN 'my log.csv' AS b ON a.item = b.item",
        [("u1", 30), ("u2", None)],
    ),
    "a name of its own": ("SELECT \"my log\".item FROM 'my log.csv'", [(1,), (2,), (3,)]),
    "WITH": ("WITH l AS (FROM 'my log.csv') SELECT count(*) AS n FROM l", [(3,)]),
    "WITH in the case of a file": (
        "WITH \"käufer.parquet\" AS (SELECT 'x' AS user) SELECT user FROM \"Käufer.parquet\"", [("x",)],
    ),
    "a name that is WITH's elsewhere": (
        "SELECT (WITH \"Käufer.parquet\" AS (SELECT 1 AS n) SELECT n FROM \"Käufer.parquet\") AS n, user "
        "FROM 'Käufer.parquet'", [(1, "u1"), (1, "u2")],
    ),
    "sub-query": (
        "SELECT item FROM 'my log.csv' WHERE user IN (SELECT user FROM 'Käufer.parquet' WHERE age > 1)", [(1,)],
    ),
    "a name in a text": ("SELECT 'my log.csv' AS name FROM 'Käufer.parquet' LIMIT 1", [("my log.csv",)]),
    "folder": ("SELECT day FROM 'days'", [("007",), ("008",)]),
    "glob": ("SELECT day FROM 'days/*/*.parquet' WHERE day > '007'", [("008",)]),
    "groups": ("SELECT user, count(*) AS n FROM 'my log.csv' GROUP BY user", [("u1", 1), ("u2", 1), ("u3", 1)]),
    "ties": ("SELECT user FROM 'my log.csv' ORDER BY length(user), item DESC", [("u3",), ("u2",), ("u1",)]),
    "comments and a semicolon": ("-- the log\nSELECT user /* who */ FROM 'Käufer.parquet';", [("u1",), ("u2",)]),
    "lists to rows": ("SELECT n FROM 'Käufer.parquet', unnest([1, 2]) AS of(n) WHERE age > 1", [(1,), (2,)]),
    "UNION": ("SELECT user FROM 'Käufer.parquet' UNION ALL SELECT 'x'", [("u1",), ("u2",), ("x",)]),
}  # fmt: skip


@pytest.mark.parametrize(("query", "expected"), QUERIES.values(), ids=QUERIES)
def test_a_query_reads_files_like_other_sources(query: str, expected: list[tuple[object, ...]]) -> None:
    assert is_query(query)
    assert [tuple(row.values()) for row in read_rows(query)] == expected


def test_types_of_a_text_file_in_a_query() -> None:
    _, kinds, rejected = read("FROM 'my log.csv'")
    assert kinds == {"user": "VARCHAR", "item": "BIGINT", "price": "DOUBLE", "code": "VARCHAR"}
    assert [(line.file, line.line, line.received) for line in rejected] == [("my log.csv", 4, "2")]


def test_a_text_file_in_two_queries_is_read_once() -> None:
    rows, _, rejected = read(["SELECT user FROM 'my log.csv' WHERE item = 1", "SELECT user FROM 'my log.csv'"])
    assert [row["user"] for row in rows] == ["u1", "u1", "u2", "u3"]
    assert len(rejected) == 1


def test_files_that_differ_in_case_are_distinct() -> None:
    Path("A.csv").write_text("x\n1\n")
    Path("a.csv").write_text("x\n2\n")
    assert [row["x"] for row in read_rows("SELECT u.x FROM 'A.csv' AS u UNION ALL SELECT l.x FROM 'a.csv' AS l")] == [
        1,
        2,
    ]


def test_integers_of_many_digits_are_joined_exactly() -> None:
    Path("ids.csv").write_text("id\n12345678901234567890\n12345678901234567891\n")
    query = "SELECT count(*) AS n FROM 'ids.csv' AS a JOIN 'ids.csv' AS b USING (id)"
    assert read_rows(query) == [{"n": 2}]


def test_joins_and_groups_have_a_fixed_order() -> None:
    rows = 300_000
    pq.write_table(pa.table({"user": [f"u{at % 997}" for at in range(rows)], "item": range(rows)}), "big.parquet",
                   row_group_size=10_000)  # fmt: skip
    query = "SELECT a.user, a.item FROM 'big.parquet' AS a JOIN (SELECT DISTINCT user FROM 'big.parquet') USING (user)"
    result = [row["item"] for row in read_rows(query)]
    assert result == [row["item"] for row in read_rows(query)]
    assert sorted(result) == [*range(rows)]
    assert [row["item"] for row in read_rows("SELECT item FROM 'big.parquet' WHERE item % 3 = 0")] == [
        *range(0, rows, 3)
    ]


def test_rows_of_many_files_come_in_the_order_of_the_files() -> None:
    Path("parts").mkdir()
    for part in range(4):
        rows = pa.table({"item": range(part * 200_000, (part + 1) * 200_000)})
        pq.write_table(rows, f"parts/{part}.parquet", row_group_size=10_000)
    assert [row["item"] for row in read_rows("SELECT item FROM 'parts' WHERE item % 2 = 0")] == [*range(0, 800_000, 2)]


REFUSED = {
    "COPY": ("WITH x AS (SELECT 1) INSERT INTO y FROM x", "expected one SELECT, found another statement"),
    "two": ("SELECT 1; SELECT 2", "expected one SELECT, found 2 statements"),
    "a second that writes": ("SELECT 1; COPY (SELECT 1) TO 'x.csv'", "expected one SELECT"),
    "a second that attaches": ("SELECT 1; ATTACH 'x.db'", "expected one SELECT"),
    "a second that installs": ("SELECT 1; INSTALL httpfs", "expected one SELECT"),
    "no SQL": ("SELECT FROM WHERE", "expected one SELECT, found syntax error"),
    "read_csv": (
        "SELECT * FROM read_csv('my log.csv')",
        "by their names in quotes, .*found the function",
    ),
    "read_text below": ("SELECT * FROM (SELECT * FROM read_text('*'))", "found the function read_text"),
    "glob": ("SELECT * FROM 'days' WHERE day IN (SELECT file FROM glob('*'))", "found the function glob"),
    "query": ("FROM query('SELECT 1')", "found the function query"),
    "without quotes": ("SELECT * FROM log.csv", "expected names of files in quotes, such as 'log.csv'"),
    "settings": ("FROM information_schema.tables", "expected names of files in quotes"),
    "no file": ("SELECT * FROM clicks", "clicks: expected a Parquet, CSV, TSV or JSON file, found none"),
    "the clock": ("SELECT * FROM 'my log.csv' WHERE price > now()", "expected the same rows each time, found now"),
    "the clock's word": ("SELECT CURRENT_DATE AS d FROM 'my log.csv'", "the same rows each time, found current_date"),
    "an age": ("SELECT age(DATE '2026-01-01') FROM 'my log.csv'", "the same rows each time, found age"),
    "chance": ("SELECT * FROM 'my log.csv' ORDER BY random()", "the same rows each time, found random"),
    "a sample": ("SELECT * FROM 'my log.csv' USING SAMPLE 10", "the same rows each time, found a sample"),
    "SUMMARIZE": ("FROM (SUMMARIZE 'my log.csv')", "expected rows of files"),
    "no column": ("SELECT gone FROM 'my log.csv'", 'expected a query that DuckDB runs: .*"gone" not found'),
    "at run": ("SELECT user::INTEGER AS n FROM 'my log.csv'", "expected a query that DuckDB runs: Conversion"),
}


@pytest.mark.parametrize(("query", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_queries_are_refused(query: str, message: str) -> None:
    before = {*Path().rglob("*")}
    with pytest.raises(DataError, match=message):
        read_rows(query)
    assert {*Path().rglob("*")} == before


def test_columns_that_differ_in_case_are_refused() -> None:
    Path("a.csv").write_text("Item,item\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: expected columns that a query can tell apart, found Item and item"):
        read_rows("SELECT item FROM 'a.csv'")


def test_only_paths_of_a_query_are_renamed() -> None:
    query = "SELECT 'a.csv' AS n FROM 'a.csv' JOIN '/abs/b.csv' USING (k) JOIN 's3://c/d' USING (k) JOIN w USING (k)"
    result = rename_files(f"WITH w AS (FROM 'e f.csv') {query}", lambda path: Path("shop") / path)
    for part in ('"shop/a.csv" AS a', '"/abs/b.csv"', '"s3://c/d"', '"shop/e f.csv"', "SELECT 'a.csv' AS n", "JOIN w"):
        assert part in result


def test_files_behind_a_query() -> None:
    files = find_all_files(["SELECT * FROM 'days' JOIN 'my log.csv' USING (item)", Path("Käufer.parquet")])
    assert [file.name for file in files] == [
        "days/day=007/a.parquet", "days/day=008/a.parquet", "my log.csv", "Käufer.parquet",
    ]  # fmt: skip


def test_rows_of_ties_and_groups_are_the_same_each_time(tmp_path: Path) -> None:
    rows = 200_000
    log = pa.table({"u": [at % 50 for at in range(rows)], "l": range(rows)})
    pq.write_table(log, tmp_path / "log.parquet", row_group_size=5_000)
    query = f"FROM '{tmp_path}/log.parquet'"
    for select in (
        f"SELECT u, any_value(l) AS l {query} GROUP BY u",
        f"SELECT arg_max(l, 1) AS l {query}",
        f"SELECT u, l {query} QUALIFY row_number() OVER (PARTITION BY u) = 1",
    ):
        assert len({json.dumps(read_rows(select)) for _ in range(5)}) == 1, select


@pytest.mark.parametrize("name", ["uuid", "today", "now", "random"])
def test_columns_may_have_the_names_of_functions(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text(f"{name},u\nx,y\n")
    assert read_rows(f"SELECT {name}, u FROM '{tmp_path}/a.csv'") == [{name: "x", "u": "y"}]


@pytest.mark.parametrize("condition", ["USING (item)", "ON a.item = b.item"])
def test_ids_of_two_types_name_both_files(tmp_path: Path, condition: str) -> None:
    (tmp_path / "ints.csv").write_text("item\n1\n2\n")
    (tmp_path / "mixed.csv").write_text("item\n1\nA1\n")
    joined = f"SELECT a.item FROM '{tmp_path}/ints.csv' AS a JOIN '{tmp_path}/mixed.csv' AS b"
    with pytest.raises(DataError) as refused:
        read_rows(f"{joined} {condition}")
    assert str(refused.value).endswith(
        f"; item is bigint in {tmp_path}/ints.csv and text in {tmp_path}/mixed.csv, by all of its values there: "
        "compare item::VARCHAR with item::VARCHAR"
    )
    assert read_rows(f"{joined} ON a.item::VARCHAR = b.item::VARCHAR") == [{"item": 1}]
