"""Data sets of the extreme classification repository, on tiny files in each of its layouts."""

from dataclasses import replace
from pathlib import Path

import pytest

from longtail.trainer.config import load_recipe
from longtail.trainer.data.dataset import load_dataset
from longtail.trainer.data.sources import DATASETS, KnownDataset, extreme, prepare
from longtail.trainer.errors import DataError

KNOWN = [extreme.DELICIOUS, extreme.EURLEX_4K, extreme.AMAZONCAT_13K, extreme.WIKILSHTC_325K, extreme.AMAZON_670K]
LARGE = KNOWN[1:]
TINY = replace(extreme.DELICIOUS, train=2, test=1, features=5, labels=4)
"""Delicious, as if it had three rows."""

TRAIN, TEST = "2 5 4\n0,3 1:2\n1 4:0.5\n", "1 5 4\n2 0:3\n"
LAYOUTS = {
    "new": {"train.txt": TRAIN, "test.txt": TEST},
    "old": {"delicious_train.txt": TRAIN, "delicious_test.txt": TEST},
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
def test_every_layout_gives_the_same_tables(tmp_path: Path, files: dict[str, str]) -> None:
    tables = {name: table.to_pydict() for name, table in TINY.read(write(tmp_path, files)).items()}

    assert tables == {
        "train": {"row_id": ["train-0", "train-0", "train-1"], "tag": ["0", "3", "1"]},
        "test": {"row_id": ["test-0"], "tag": ["2"]},
        "rows": {"row_id": ["train-0", "train-1", "test-0"], "features": [[(1, 2.0)], [(4, 0.5)], [(0, 3.0)]]},
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"other.txt": ""}, r"expected train.txt and test.txt, delicious_train.txt and delicious_test.txt, or "
         r"Delicious_data.txt and its splits, found other.txt. Get Delicious, BoW features, at http://manikvarma.org/"),
        ({"train.txt": TRAIN}, r"test.txt: expected a text file, found none"),
        (LAYOUTS["one file"] | {"delicious_trSplit.txt": "1\nx\n"}, r"trSplit.txt: expected columns of row numbers"),
        (LAYOUTS["one file"] | {"delicious_tstSplit.txt": "4\n"}, r"tstSplit.txt: expected rows from 1 to 3, found 4"),
        (LAYOUTS["one file"] | {"delicious_tstSplit.txt": "0\n"}, r"tstSplit.txt: expected rows from 1 to 3, found 0"),
        ({"Delicious_data.txt": "3 5 4\n"}, r"trSplit.txt: expected a file of row numbers, found none"),
    ],
    ids=["nothing", "half", "no numbers", "beyond", "before", "no split"],
)  # fmt: skip
def test_files_that_are_not_there_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TINY.read(write(tmp_path, files))


@pytest.mark.parametrize("known", LARGE, ids=lambda known: known.name)
def test_what_is_prepared_is_ready_to_train(
    tmp_path: Path, known: extreme.ExtremeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, name = replace(known, train=2, test=1, features=5, labels=4), known.name.lower()
    monkeypatch.setitem(DATASETS, name, KnownDataset((tiny.source,), tiny.read, ("train", "test")))
    raw = write(tmp_path / "raw", {f"{known.stem}_train.txt": TRAIN, f"{known.stem}_test.txt": TEST})

    prepare(name, tmp_path / "out", raw, say=pytest.fail)

    recipe = load_recipe(tmp_path / "out" / "recipe.toml")
    dataset = load_dataset(recipe.data, seed=0)
    pairs = {"smallest": 2, "sample": 3}[recipe.data.reduction]  # of rows {0, 3} and {1}
    assert (len(dataset.train) + len(dataset.valid), len(dataset.test)) == (pairs, 1)
