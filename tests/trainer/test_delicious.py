"""Delicious, on tiny files in each of its layouts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtail.trainer.config import load_recipe
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.sources import DATASETS, KnownDataset, delicious, prepare
from longtail.trainer.data.sources.delicious import read_delicious
from longtail.trainer.errors import DataError


@pytest.fixture(autouse=True)
def tiny_delicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Delicious have three rows."""
    for name, size in (("TRAIN_ROWS", 2), ("TEST_ROWS", 1), ("FEATURES", 5), ("LABELS", 4)):
        monkeypatch.setattr(delicious, name, size)


LIMITS = "of labels below 4, features below 5 and finite values"
TRAIN, TEST = "2 5 4\n0,3 1:2\n1 4:0.5\n", "1 5 4\n2 0:3\n"
LAYOUTS = {
    "two files": {"train.txt": TRAIN, "test.txt": TEST},
    "one file": {
        "Delicious_data.txt": "3 5 4\n0,3 1:2\n2 0:3\n1 4:0.5\n",
        "delicious_trSplit.txt": "1 3\n3 1\n",
        "delicious_tstSplit.txt": "2 2\n",
    },
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_give_the_same_tables(tmp_path: Path, files: dict[str, str]) -> None:
    tables = {name: table.to_pydict() for name, table in read_delicious(write(tmp_path, files)).items()}

    assert tables == {
        "train": {"row_id": ["train-0", "train-0", "train-1"], "tag": ["0", "3", "1"]},
        "test": {"row_id": ["test-0"], "tag": ["2"]},
        "rows": {"row_id": ["train-0", "train-1", "test-0"], "features": [[(1, 2.0)], [(4, 0.5)], [(0, 3.0)]]},
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"other.txt": ""}, r"expected train.txt and test.txt, or Delicious_data.txt and its splits, found other.txt"),
        ({"train.txt": TRAIN}, r"test.txt: expected a text file, found none"),
        (LAYOUTS["one file"] | {"delicious_trSplit.txt": "1\nx\n"}, r"trSplit.txt: expected columns of row numbers"),
        (LAYOUTS["one file"] | {"delicious_tstSplit.txt": "4\n"}, r"tstSplit.txt: expected rows from 1 to 3, found 4"),
        (LAYOUTS["one file"] | {"delicious_tstSplit.txt": "0\n"}, r"tstSplit.txt: expected rows from 1 to 3, found 0"),
        ({"Delicious_data.txt": "3 5 4\n"}, r"trSplit.txt: expected a file of row numbers, found none"),
    ],
    ids=["nothing", "half", "no numbers", "beyond", "before", "no split"],
)  # fmt: skip
def test_missing_files_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_delicious(write(tmp_path, files))


ROWS: dict[str, tuple[str, list[list[int]], list[list[tuple[int, float]]]]] = {
    "Windows": ("1,2 3:4\r\n 4:6\r\n", [[1, 2], []], [[(3, 4)], [(4, 6)]]),
    "blanks": ("1,2  3:4 \n\t4:6\t0:8 \n\n \n", [[1, 2], []], [[(3, 4)], [(4, 6), (0, 8)]]),
    "no last newline": ("1 3:4\n2 4:6", [[1], [2]], [[(3, 4)], [(4, 6)]]),
    "an empty row": ("\n2 4:6\n", [[], [2]], [[], [(4, 6)]]),
    "labels twice": ("3,0,3,3,2 1:1 1:2\n003\n", [[3, 0, 2], [3]], [[(1, 1), (1, 2)], []]),
    "empty labels": (",3,\n2 1:1e-2\n", [[3], [2]], [[], [(1, np.float32(0.01))]]),
}


@pytest.mark.parametrize(("lines", "labels", "features"), ROWS.values(), ids=ROWS)
def test_rows_are_parsed(
    tmp_path: Path, lines: str, labels: list[list[int]], features: list[list[tuple[int, float]]]
) -> None:
    tables = read_delicious(write(tmp_path, {"train.txt": f"2 5 4\n{lines}", "test.txt": TEST}))

    pairs = [(f"train-{row}", str(label)) for row, row_labels in enumerate(labels) for label in row_labels]
    assert list(zip(*tables["train"].to_pydict().values(), strict=True)) == pairs
    assert tables["rows"]["features"].to_pylist()[:2] == features
    assert tables["rows"].schema.field("features").type == pa.map_(pa.int32(), pa.float32())


BAD = {
    "empty": (b"", "expected the first line `2 5 4` "),
    "other sizes": (b"1,2 3:4\n", "expected the first line `2 5 4` .*, found '1,2 3:4'"),
    "fewer rows": (b"2 5 4\n1 3:4\n", "expected 2 rows as its header says, found 1"),
    "more rows after a blank one": (b"2 5 4\n1 3:4\n1 3:4\n\n2\n", "expected 2 rows as its header says, found 4"),
} | {
    f"{line!r}": (b"2 5 4\n0 1:1\n" + line + b"\n", f"line 3: expected `label,label feature:value …` {LIMITS}, found")
    for line in (
        b"1 5:1", b"1 99999999999:1", b"1 -3:1", b"4 1:1", b"-3 4:1", b"1.5 4:1", b"one 4:1", b"4:1 0:2", b"1 3:4 2",
        b"1 3:", b"1 3:4:5", b"1 3:x", b"1 3:nan", b"1 3:-inf", b"1 3:1e39", b"1 3.5:1",
    )
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_line_is_refused_with_its_number(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write(tmp_path, {"test.txt": TEST})
    (folder / "train.txt").write_bytes(content)

    with pytest.raises(DataError, match=f"train.txt: {message}"):
        read_delicious(folder)


def test_prepared_data_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = KnownDataset(delicious.SOURCES, read_delicious, ("train", "test"), (3, 4, 4))
    monkeypatch.setitem(DATASETS, "delicious", tiny)
    raw = write(tmp_path / "raw", LAYOUTS["two files"])

    prepare("delicious", tmp_path / "out", raw, say=pytest.fail)

    dataset = load_dataset(load_recipe(tmp_path / "out" / "recipe.toml").data, seed=0)
    assert (len(dataset.train) + len(dataset.valid), len(dataset.test)) == (3, 1)
