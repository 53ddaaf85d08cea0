from pathlib import Path

import pyarrow as pa
import pytest

from longtail.bundle import BundleError, Vocabulary
from longtail.bundle.mapped_table import map_table, write_table
from longtail.bundle.vocabulary import OUT_OF_VOCABULARY


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(pa.array(["b", "a", "ü"]))


def test_ids_map_to_rows_from_one_and_unknown_ids_to_row_zero(vocabulary: Vocabulary) -> None:
    assert OUT_OF_VOCABULARY == 0
    assert vocabulary.rows == 4
    assert vocabulary.find_all(["b", "a", "ü", "A", "", "nobody"]) == [1, 2, 3, 0, 0, 0]


@pytest.mark.parametrize(
    "column", [pa.array(["a", None, "x", "b"]), pa.chunked_array([["a", None], ["x", "b"]])], ids=["array", "chunked"]
)
def test_a_column_is_encoded_with_nulls_as_unknown(vocabulary: Vocabulary, column: pa.Array | pa.ChunkedArray) -> None:
    encoded = vocabulary.encode(column)

    assert encoded.dtype == "int32"
    assert encoded.tolist() == [2, 0, 0, 1]


def test_empty_vocabulary_has_only_the_unknown_row(tmp_path: Path) -> None:
    empty = Vocabulary(pa.array([], pa.string()))
    empty.write(tmp_path / "empty.arrow")

    for item in (empty, Vocabulary.read(tmp_path / "empty.arrow")):
        assert (item.rows, item.find_all(["a"]), item.encode(pa.array(["a"])).tolist()) == (1, [0], [0])


def test_written_vocabulary_is_mapped(vocabulary: Vocabulary, tmp_path: Path) -> None:
    vocabulary.write(tmp_path / "ids.arrow")

    allocated = pa.total_allocated_bytes()
    read = Vocabulary.read(tmp_path / "ids.arrow")
    assert read.ids.to_pylist() == ["b", "a", "ü"]
    assert read.find_all(["ü", "nobody", "a"]) == [3, 0, 2]
    assert pa.total_allocated_bytes() == allocated


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("id", ["a", "b", "a"], "distinct ids: expected 3 distinct, found 2 distinct"),
        ("id", ["a", "b", None], "column 'id': expected no nulls, found 1 nulls"),
        ("id", [1, 2, 3], "column 'id': expected string, found int64"),
        ("row_by_id", pa.array([0, 1, 2], pa.int32()), "order of their ids: expected ascending ids, found others"),
        ("row_by_id", pa.array([1, 1, 2], pa.int32()), "order of their ids: expected ascending ids, found others"),
        ("row_by_id", pa.array([1, 0, 3], pa.int32()), "order of their ids: expected ascending ids, found others"),
        ("row_by_id", pa.array([1, 0, None], pa.int32()), "'row_by_id': expected no nulls, found 1 nulls"),
        ("row_by_id", None, "'row_by_id': expected int32, found no such column"),
    ],
)
def test_other_files_are_refused(
    vocabulary: Vocabulary, column: str, values: list[object] | None, message: str, tmp_path: Path
) -> None:
    vocabulary.write(tmp_path / "ids.arrow")
    table = map_table(tmp_path / "ids.arrow").drop_columns([column])
    write_table(tmp_path / "other.arrow", table if values is None else table.append_column(column, pa.array(values)))

    with pytest.raises(BundleError, match=message):
        Vocabulary.read(tmp_path / "other.arrow").check("other.arrow")
