from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.trainer.config import DataConfig
from longtail.trainer.data.dataset import load_dataset
from longtail.trainer.data.xmc import read_xmc
from longtail.trainer.errors import DataError

XMC = "4 6 3\n0,2 1:0.5 5:2\n 0:1\n1\n2 3:-1.5e0\n"


def write(folder: Path, content: str | bytes, name: str = "train.txt") -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def rows_of(path: Path) -> tuple[list[list[int]], list[list[tuple[int, float]]]]:
    """Labels and features of every row, read back by the row's name."""
    read = read_xmc(path)
    labels: dict[str, list[int]] = {name: [] for name in read.queries["query"].to_pylist()}
    for pair in read.pairs.to_pylist():
        labels[pair["query"]].append(int(pair["label"]))
    return list(labels.values()), read.queries["features"].to_pylist()


def test_xmc(tmp_path: Path) -> None:
    path = write(tmp_path, XMC)
    rows = read_xmc(path)

    assert rows.pairs.to_pydict() == {
        "query": ["train-0", "train-0", "train-2", "train-3"],
        "label": ["0", "2", "1", "2"],
    }
    assert rows.queries.to_pydict() == {
        "query": ["train-0", "train-1", "train-2", "train-3"],
        "features": [[(1, 0.5), (5, 2.0)], [(0, 1.0)], [], [(3, -1.5)]],
    }
    assert rows.queries.schema.field("features").type == pa.map_(pa.int32(), pa.float32())
    dataset = load_dataset(DataConfig(train=path, format="xmc"), seed=0)
    assert dataset.query_ids.take(pa.array(dataset.train.queries)).to_pylist() == rows.pairs["query"].to_pylist()
    assert dataset.label_ids.take(pa.array(dataset.train.labels)).to_pylist() == rows.pairs["label"].to_pylist()


@pytest.mark.parametrize(
    ("content", "labels", "features"),
    [
        ("2 9 9\r\n1,2 3:4\r\n 5:6\r\n", [[1, 2], []], [[(3, 4)], [(5, 6)]]),
        ("2 9 9\n1,2  3:4 \n\t5:6\t7:8 \n\n \n", [[1, 2], []], [[(3, 4)], [(5, 6), (7, 8)]]),
        ("2 9 9\n1 3:4\n2 5:6", [[1], [2]], [[(3, 4)], [(5, 6)]]),
        ("3 9 9\n1 3:4\n\n2 5:6\n", [[1], [], [2]], [[(3, 4)], [], [(5, 6)]]),
        ("2 9 9\n7,3,7,3,5 1:1 1:2\n007\n", [[7, 3, 5], [7]], [[(1, 1), (1, 2)], []]),
        ("2 9 9\n,4,\n4 8:1e-2\n", [[4], [4]], [[], [(8, np.float32(0.01))]]),
        ("1 9 9\n0\n", [[0]], [[]]),
        ("1 9 9\n 8:0\n", [[]], [[(8, 0)]]),
        ("0 0 0\n", [], []),
    ],
    ids=[
        "Windows", "blanks", "no last newline", "an empty row", "labels twice", "empty labels", "no features",
        "no labels", "no rows",
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_layouts(
    tmp_path: Path, content: str, labels: list[Any], features: list[Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.trainer.data.xmc._BLOCK_BYTES", block)

    assert rows_of(write(tmp_path, content)) == (labels, features)


def test_blocks_of_any_size_give_what_a_split_of_every_line_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    labels = [rng.permutation(50)[: rng.integers(0, 5)].tolist() for _ in range(200)]
    features = [
        [(int(feature), float(np.float32(rng.normal()))) for feature in rng.permutation(400)[: rng.integers(0, 9)]]
        for _ in range(200)
    ]
    lines = [
        f"{','.join(map(str, of_row))} {' '.join(f'{feature}:{value!r}' for feature, value in entries)}"
        for of_row, entries in zip(labels, features, strict=True)
    ]
    path = write(tmp_path, "200 400 50\n" + "\n".join(lines) + "\n")
    for block in (1, 100, 1000, 1 << 20):
        monkeypatch.setattr("longtail.trainer.data.xmc._BLOCK_BYTES", block)

        assert rows_of(path) == (labels, features)


BAD = {
    "empty": (b"", "expected a first line `rows features labels`, found ''"),
    "no header": (b"1,2 3:4\n", "expected a first line `rows features labels`, found '1,2 3:4'"),
    "half a header": (b"1 2\n1 3:4\n", "expected a first line `rows features labels`, found '1 2'"),
    "fewer rows": (b"2 9 9\n1 3:4\n", "expected 2 rows as its header says, found 1"),
    "more rows": (b"1 9 9\n1 3:4\n2 1:1\n", "expected 1 rows as its header says, found 2"),
    "more rows after a blank one": (b"1 9 9\n1 3:4\n\n2\n", "expected 1 rows as its header says, found 3"),
    "feature too high": (b"2 4 9\n1 3:1\n1 4:1\n", "line 3: expected features below 4 as its header says, found '4:1'"),
    "feature far too high": (b"1 4 9\n1 99999999999:1\n", "line 2: expected features below 4 .*'99999999999:1'"),
    "negative feature": (b"1 4 9\n1 -3:1\n", "line 2: expected entries `feature:value`, found '-3:1'"),
    "label too high": (b"1 9 2\n1,2 4:1\n", "line 2: expected labels below 2 as its header says, found '2'"),
    "negative label": (b"2 9 10\n7 4:1\n-3 4:1\n", "line 3: expected labels as numbers .*, found '-3'"),
    "label not a number": (b"1 9 2\none 4:1\n", "line 2: expected labels as numbers before the first blank, .* 'one'"),
    "no blank before the features": (b"2 9 2\n1\n4:1 5:2\n", "line 3: expected labels as numbers .* found '4:1'"),
    "entry without colon": (b"1 9 2\n1 3:4 5\n", "line 2: expected entries `feature:value`, found '5'"),
    "entry without value": (b"1 9 2\n1 3:\n", "line 2: expected entries `feature:value`, found '3:'"),
    "two colons": (b"1 9 2\n1 3:4:5\n", "line 2: expected a number after every `feature:`, found '3:4:5'"),
    "value not a number": (b"1 9 2\n1 3:x\n", "line 2: expected a number after every `feature:`, found '3:x'"),
    "value NaN": (b"1 9 2\n1 3:nan\n", "line 2: expected finite feature values, found '3:nan'"),
    "value infinite": (b"1 9 2\n1 3:-inf\n", "line 2: expected finite feature values, found '3:-inf'"),
    "value too large": (b"1 9 2\n1 3:1e39\n", "line 2: expected finite feature values, found '3:1e39'"),
    "value of Python alone": (b"1 9 2\n1 3:1_0\n", "lines 2 to 2: expected plain decimal numbers, found others"),
    "latin-1": (b"1 9 2\n1 3:4 \xe9\n", r"line 2: expected entries `feature:value`, found '\\\\xe9'"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_file_that_cannot_be_read(
    tmp_path: Path, content: bytes, message: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, content)
    monkeypatch.setattr("longtail.trainer.data.xmc._BLOCK_BYTES", block)

    with pytest.raises(DataError, match=f"^{path}: {message}$"):
        read_xmc(path)
    assert path.read_bytes() == content
