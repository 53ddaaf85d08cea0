"""JSON lines: types as they are in JSON, and lines that are none."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from longtail.tables import DataError, find_files
from longtail.tables.database import OpenedFile, open_database
from tests.tables.reading import read, read_rows

COLUMNS: dict[str, tuple[list[str], str, list[Any]]] = {
    "integers": (["1", "2"], "BIGINT", [1, 2]),
    "numbers": (["1", "2.5"], "DOUBLE", [1.0, 2.5]),
    "booleans": (["true", "false"], "BOOLEAN", [True, False]),
    "text of digits": (['"007"', '"8"'], "VARCHAR", ["007", "8"]),
    "mixed": (["39", '"x"'], "VARCHAR", ["39", "x"]),
    "mixed with booleans": (["true", "1"], "VARCHAR", ["true", "1"]),
    "beyond int64": (["1", "9223372036854775808"], "HUGEINT", None),
    "dates": (['"2026-01-01"', '"2026-01-02"'], "TEXT", ["2026-01-01", "2026-01-02"]),
    "times": (['"2026-01-01T00:00:00Z"', '"2026-01-02T00:00:00Z"'], "TEXT", None),
    "hours": (['"12:00:00"', '"13:00:00"'], "TEXT", ["12:00:00", "13:00:00"]),
    "uuids": (['"550E8400-E29B-41D4-A716-446655440000"', "null"], "TEXT",
              ["550E8400-E29B-41D4-A716-446655440000", None]),
    "nulls": (["null", "null"], '"NULL"', [None, None]),
    "a null": (["null", "3"], "BIGINT", [None, 3]),
    "lists": (["[1, 2]", "[]"], "BIGINT[]", [[1, 2], []]),
    "lists of dates": (['["2026-01-01"]', "null"], "VARCHAR[]", [["2026-01-01"], None]),
    "mixed lists": (['[1, "x"]', "[2]"], "VARCHAR[]", [["1", "x"], ["2"]]),
    "nested lists": (['[["a"], []]', '[["b", "c"]]'], "VARCHAR[][]", [[["a"], []], [["b", "c"]]]),
    "objects": (['{"date": "2026-01-01"}', '{"DATE2": 1}'], "STRUCT(date VARCHAR, DATE2 BIGINT)", None),
}  # fmt: skip


@pytest.mark.parametrize(("values", "kind", "expected"), COLUMNS.values(), ids=COLUMNS)
def test_json_types_are_kept(tmp_path: Path, values: list[str], kind: str, expected: list[Any] | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id": "q", "v": {value}}}\n' for value in values))
    with open_database() as built:
        assert OpenedFile(built, find_files(path)[0]).column("v")[1] == kind
    if expected is not None:
        assert [row["v"] for row in read_rows(path)] == expected


def test_file_of_nulls_takes_the_type_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"v": null}\n')
    (tmp_path / "b.ndjson").write_text('{"v": 2}\n')
    rows, kinds, _ = read(tmp_path)
    assert (kinds, rows) == ({"v": "BIGINT"}, [{"v": None}, {"v": 2}])


def test_late_keys_and_blank_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = ['{"a": 1}'] * 50_000 + ["", '{"a": 2, "late": "x"}']
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    rows = read_rows(path)
    assert len(rows) == 50_001
    assert rows[-1] == {"a": 2, "late": "x"}


def test_an_object_of_many_keys_is_many_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"k{at}": {at}}}\n' for at in range(300)))
    assert len(read_rows(tmp_path / "a.jsonl")[0]) == 300


BROKEN = {
    "cut off": ('{"a": 1}\n{"a":\n{"a": 2}\n', r"""a\.jsonl: line 2: expected an object of JSON, found '\{"a":'"""),
    "a list": ('{"a": 1}\n[1]\n', r"a\.jsonl: line 2: expected an object of JSON, found '\[1\]'"),
    "text": ("user,item\n1,2\n", r"a\.jsonl: line 1: expected an object of JSON, found 'user,item'"),
    "in many lines": ('{\n"a": 1\n}\n', r"a\.jsonl: line 1: expected an object of JSON, found '\{'"),
    "a key twice": ('{"a": 1}\n{"a": 1, "a": 2}\n', r'a\.jsonl: .*duplicate key "a"'),
    "keys that differ in case": ('{"ID": 1, "id": 2}\n', r"a\.jsonl: expected keys that differ in more than case"),
    "latin-1": ('{"a": "caf\udce9"}\n', r"a\.jsonl: expected UTF-8"),
    "empty": ("", r"a\.jsonl: expected a JSON object in every line, found an empty file"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_line_without_an_object_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / "a.jsonl")


def test_long_numbers_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"ean": 18446744073709551616, "p": 1.5}\n{"ean": 1, "p": 2}\n')
    assert read_rows(path) == [{"ean": "18446744073709551616", "p": 1.5}, {"ean": "1", "p": 2.0}]


def test_mixed_lists_and_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"tags": ["x"]}\n{"tags": "y"}\n')
    with pytest.raises(DataError, match=r"a.jsonl: key 'tags': expected values of one kind, found lists or objects"):
        read_rows(path)
