from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from longtail.trainer.data.sources.lists import read_lists
from longtail.trainer.errors import DataError
from tests.trainer.logs import load, write_table, write_text


def interactions(path: Path, **changes: Any) -> dict[str, list[object]]:
    """Return the pairs of `train`, by query, then time or place in the file; what is wrong with them is raised."""
    dataset = load(path, **changes)
    pairs = dataset.train
    columns = {
        "query": [dataset.query_ids[row].as_py() for row in pairs.queries.tolist()],
        "label": [dataset.label_ids[row].as_py() for row in pairs.labels.tolist()],
    }
    columns |= {} if pairs.times is None else {"time": pairs.times.tolist()}
    return columns | ({} if pairs.weights is None else {"weight": pairs.weights.tolist()})


PAIRS = {"query": ["u1", "u1", "u2"], "label": ["7", "8", "8"]}
COMMA = "user,item,when,much\nu1,7,30,0.5\nu2,8,10,1\nu1,8,20,2\n"


@pytest.mark.parametrize("labels", [[7, 8, 8], ["7", "8", "8"]], ids=["integers", "strings"])
def test_parquet(tmp_path: Path, labels: list[object]) -> None:
    path = write_table(tmp_path / "pairs.parquet", user=["u1", "u2", "u1"], item=labels, extra=[1.5, None, 2])

    assert interactions(path) == PAIRS


@pytest.mark.parametrize(("name", "separator"), [("pairs.csv", ","), ("pairs.tsv", "\t")])
def test_csv_and_tsv(tmp_path: Path, name: str, separator: str) -> None:
    path = write_text(tmp_path / name, COMMA.replace(",", separator))

    assert interactions(path) == PAIRS
    assert interactions(path, timestamp="when", weight="much") == {
        "query": ["u1", "u1", "u2"],
        "label": ["8", "7", "8"],
        "time": [20, 30, 10],
        "weight": [2, 0.5, 1],
    }


def test_ids_of_text_files_are_their_text(tmp_path: Path) -> None:
    path = write_text(tmp_path / "pairs.csv", "user,item\n007,1.50\n7,true\n")

    assert interactions(path) == {"query": ["007", "7"], "label": ["1.50", "true"]}


def test_times_without_a_unit_are_any_numbers(tmp_path: Path) -> None:
    path = write_table(tmp_path / "pairs.parquet", user=["a", "b"], item=["x", "y"], when=[2.5, -1.0])

    assert interactions(path, timestamp="when")["time"] == [2.5, -1]


def test_lists(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", "u1 7 8\nlonely\r\n\n  u2\t9  7 \n")

    assert read_lists(path).to_pydict() == {"query": ["u1", "u1", "u2", "u2"], "label": ["7", "8", "9", "7"]}
    for name, content, message in (
        ("latin.txt", "1 é\n".encode("latin-1"), "expected UTF-8 text, found other bytes"),
        ("gone.txt", None, "expected a text file, found none"),
    ):
        if content is not None:
            write_text(tmp_path / name, content)
        with pytest.raises(DataError, match=f"{name}: {message}"):
            read_lists(tmp_path / name)


BAD_TABLES = {
    "null id": ({"user": ["a", None], "item": [1, 2]}, {}, r"column 'user': expected an id .*, found null in row 1"),
    "empty id": ({"user": ["a", "b"], "item": ["x", ""]}, {}, r"column 'item': .* found an empty one in row 1"),
    "float ids": (
        {"user": [1.5], "item": [1]},
        {},
        r"'user': expected ids as strings or integers, found double, .* 1.5",
    ),
    "boolean ids": ({"user": [True], "item": [1]}, {}, r"'user': expected ids as strings or integers, found boolean"),
    "no rows": ({"user": pa.array([], pa.string()), "item": pa.array([], pa.string())}, {}, "at least one interaction"),
    "NaN weight": ({"w": [1, np.nan]}, {"weight": "w"}, r"'w': expected finite numbers, found nan in row 1"),
    "infinite weight": ({"w": [np.inf, 1]}, {"weight": "w"}, r"'w': expected finite numbers, found inf in row 0"),
    "null weight": ({"w": [1.0, None]}, {"weight": "w"}, r"'w': expected finite numbers, found null in row 1"),
    "weight beyond float32": (
        {"w": [1, 1e300]},
        {"weight": "w"},
        r"'w': expected weights that float32 can hold, found 1e",
    ),
    "text weight": ({"w": ["a", "b"]}, {"weight": "w"}, r"'w': expected numbers, found 'a' in 2 rows"),
    "no weight": ({}, {"weight": "w"}, r"expected a column 'w', found user, item"),
    "null time": ({"t": [None, 1]}, {"timestamp": "t"}, r"'t': expected finite numbers, found null in row 0"),
    "text time": ({"t": ["a", "b"]}, {"timestamp": "t"}, r"'t': expected numbers or timestamps, found text"),
}


@pytest.mark.parametrize(("columns", "changes", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_columns_are_refused(
    tmp_path: Path, columns: dict[str, Any], changes: dict[str, str], message: str
) -> None:
    ids = {} if "user" in columns else {"user": ["a", "b"], "item": ["x", "y"]}
    path = write_table(tmp_path / "pairs.parquet", **ids, **columns)

    with pytest.raises(DataError, match=f"^{path}: .*{message}"):
        interactions(path, **changes)


BAD_FILES = {
    "empty Parquet": ("a.parquet", b"", {}, "expected a readable parquet file: "),
    "garbled Parquet": ("a.parquet", b"PAR1 and then nothing", {}, "expected a readable parquet file: "),
    "empty CSV": ("a.csv", b"", {}, "expected a header with the names of columns"),
    "header only": ("a.csv", b"user,item\n", {}, "expected at least one interaction, found none"),
    "ragged CSV": ("a.csv", b"user,item\na,b\na\n", {}, "expected 2 columns, found 1 in line 3"),
    "CSV in latin-1": ("a.csv", "user,item\né,x\n".encode("latin-1"), {}, "expected UTF-8 text, found other bytes"),
    "unknown ending": (
        "a.dat",
        b"user,item\na,b\n",
        {},
        "expected an ending among .parquet, .csv, .tsv, .jsonl, .ndjson, received '.dat'",
    ),
}


@pytest.mark.parametrize(("name", "content", "changes", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_unreadable_file_is_refused(
    tmp_path: Path, name: str, content: bytes, changes: dict[str, str], message: str
) -> None:
    path = write_text(tmp_path / name, content)

    with pytest.raises(DataError, match=f"(?s)^{path}: .*{message}"):
        interactions(path, **changes)
    assert path.read_bytes() == content
