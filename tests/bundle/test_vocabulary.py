from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import OUT_OF_VOCABULARY, BundleInvariantError, Vocabulary


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(pa.array(["a", "b", "ü"]))


def test_ids_map_to_rows_from_one_and_unknown_ids_to_row_zero(vocabulary: Vocabulary) -> None:
    assert OUT_OF_VOCABULARY == 0
    assert vocabulary.rows == 4
    assert [vocabulary.lookup(id_) for id_ in ("a", "b", "ü", "A", "")] == [1, 2, 3, 0, 0]
    assert vocabulary.lookup_all(["ü", "nobody", "a"]) == [3, 0, 1]


@pytest.mark.parametrize(
    "column", [pa.array(["b", None, "x", "a"]), pa.chunked_array([["b", None], ["x", "a"]])], ids=["array", "chunked"]
)
def test_a_column_is_encoded_with_nulls_as_unknown(vocabulary: Vocabulary, column: pa.Array | pa.ChunkedArray) -> None:
    encoded = vocabulary.encode(column)

    assert encoded.dtype == "int32"
    assert encoded.tolist() == [2, 0, 0, 1]


def test_what_is_written_is_read_back(vocabulary: Vocabulary, tmp_path: Path) -> None:
    vocabulary.write(tmp_path / "ids.parquet")

    assert Vocabulary.read(tmp_path / "ids.parquet").ids.to_pylist() == ["a", "b", "ü"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"id": ["a", "b", "a"]}, "distinct, non-null ids: expected 3 distinct, found 2 distinct, 0 null"),
        ({"id": ["a", None]}, "distinct, non-null ids: expected 2 distinct, found 1 distinct, 1 null"),
        ({"id": [1, 2]}, "one column `id` of strings: expected id: string"),
        ({"id": ["a"], "row": [1]}, "one column `id` of strings"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(table: dict[str, list[object]], message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(table), tmp_path / "ids.parquet")

    with pytest.raises(BundleInvariantError, match=message):
        Vocabulary.read(tmp_path / "ids.parquet")
