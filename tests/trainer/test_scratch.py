"""What is read in bounded memory is what is read at once."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer.config import DataConfig, load_recipe
from longtail.trainer.data import interactions
from longtail.trainer.data import scratch as scratch_module
from longtail.trainer.data.dataset import Dataset, load_dataset
from longtail.trainer.data.ids import distinct_ids
from longtail.trainer.data.prepared import prepare, read_dataset
from longtail.trainer.data.scratch import Scratch
from longtail.trainer.errors import DataError
from tests.trainer.test_prepared import kept, same, write_rich

SMALL = 4_000
"""Bytes: 15 pairs, or 7 rows of a file, at a time."""
ROWS = 300
BY_ORDER = ["random", "random_per_query", "temporal_per_query", "leave_last_out"]
STRATEGIES = ["temporal", *BY_ORDER]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Files of several groups of rows, with equal times, repeats, and one query that has more than fits."""
    rng = np.random.default_rng(0)
    for number in range(3):
        users = np.where(rng.random(ROWS) < 0.2, 3, rng.integers(0, 40, ROWS))
        table = pa.table(
            {
                "query_id": [f"user-{user}" for user in users],
                "label_id": [f"i{item}" for item in rng.integers(0, 30, ROWS)],
                "time": rng.integers(1_600_000_000, 1_600_000_060, ROWS),
                "weight": rng.random(ROWS),
            }
        )
        (tmp_path / "log").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "log" / f"{number}.parquet", row_group_size=13)
    return tmp_path / "log"


def read(log: Path, scratch: Scratch | None = None, **settings: Any) -> Dataset:
    data = DataConfig.model_validate({"train": log, "weight": "weight"} | settings)
    return load_dataset(data, seed=4) if scratch is None else load_dataset(data, seed=4, scratch=scratch)


@pytest.mark.parametrize("repeats", ["keep", "drop"])
@pytest.mark.parametrize(
    ("strategy", "timestamp"), [*((name, "time") for name in STRATEGIES), *((name, None) for name in BY_ORDER)]
)
def test_the_data_set_is_the_same(
    log: Path, tmp_path: Path, strategy: str, timestamp: str | None, repeats: str
) -> None:
    settings = {"split": {"strategy": strategy, "valid": 0.2, "test": 0.1}, "timestamp": timestamp, "repeats": repeats}
    at_once, scratch = read(log, **settings), Scratch(tmp_path / "scratch", SMALL)
    assert len(at_once.train) > 10 * scratch.pairs
    assert same(at_once, read(log, scratch, **settings))


def test_all_that_a_data_set_can_have_is_the_same(tmp_path: Path) -> None:
    recipe = write_rich(tmp_path)
    log = pq.read_table(tmp_path / "log.parquet")
    pq.write_table(log, tmp_path / "log.parquet", row_group_size=30)
    small = kept(recipe)
    small = small.model_copy(update={"data": small.data.model_copy(update={"memory": SMALL})})

    dataset, folder = prepare(small)
    assert same(read_dataset(load_recipe(recipe)), dataset)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_attempt_after_another_reads_only_what_that_has_not(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, read_file, names = read(log, timestamp="time"), interactions._read, []

    def stopped_at(stop: int) -> Any:
        def made(file: Any, *arguments: Any) -> Any:
            if len(names) == stop:
                raise KeyboardInterrupt
            names.append((Path(file.name).name, file.first))
            return read_file(file, *arguments)

        return made

    for stop in (10, 25):
        monkeypatch.setattr(interactions, "_read", stopped_at(stop))
        with pytest.raises(KeyboardInterrupt):
            read(log, Scratch(tmp_path / "scratch", SMALL), timestamp="time")
    (tmp_path / "scratch" / ".train-000002-5-6.1").write_bytes(b"half")
    monkeypatch.setattr(interactions, "_read", stopped_at(-1))
    again = read(log, Scratch(tmp_path / "scratch", SMALL), timestamp="time")
    assert same(whole, again)
    assert again.report.read == 3 * ROWS
    assert len(set(names)) == len(names) == 3 * -(-ROWS // 13)

    assert same(whole, read(log, Scratch(tmp_path / "scratch", 4 * SMALL), timestamp="time"))
    assert len(names) > 3 * -(-ROWS // 13), "pieces of more groups are others"


def test_bad_rows_are_told_by_their_numbers_in_the_file(log: Path, tmp_path: Path) -> None:
    path = log / "1.parquet"
    table = pq.read_table(path)
    labels = table["label_id"].to_pylist()
    labels[40] = labels[200] = None
    pq.write_table(table.set_column(1, "label_id", pa.array(labels)), path, row_group_size=13)
    with pytest.raises(DataError) as at_once:
        read(log)
    with pytest.raises(DataError) as by_pieces:
        read(log, Scratch(tmp_path / "scratch", SMALL))
    assert str(at_once.value) == str(by_pieces.value)
    assert "2 rows (40, 200)" in str(by_pieces.value)


@pytest.mark.parametrize("weights", ["some", "none"])
def test_weights_are_looked_for_in_the_whole_file(log: Path, tmp_path: Path, weights: str) -> None:
    path = log / "2.parquet"
    table = pq.read_table(path)
    weight = np.zeros(ROWS)
    weight[-1] = weights == "some"
    pq.write_table(table.set_column(3, "weight", pa.array(weight)), path, row_group_size=13)
    scratch = Scratch(tmp_path / "scratch", SMALL)
    if weights == "some":
        assert same(read(log), read(log, scratch))
    else:
        with pytest.raises(DataError, match=r"2.parquet: column 'weight': expected some weight > 0, found only zeros"):
            read(log, scratch)


def test_a_file_that_was_not_written_to_its_end_is_made_again(log: Path, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "scratch", SMALL)
    whole = read(log, scratch, timestamp="time")
    for path, content in zip(sorted((tmp_path / "scratch").iterdir()), (b"", b"ARROW1", b"no"), strict=False):
        path.write_bytes(content)
    assert same(whole, read(log, scratch, timestamp="time"))


def test_a_folder_that_another_job_removes_is_missed_by_nobody(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, mapped, folder = read(log, timestamp="time"), scratch_module._mapped, tmp_path / "scratch"

    def meanwhile(*arguments: Any) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return mapped(*arguments)

    monkeypatch.setattr(scratch_module, "_mapped", meanwhile)
    assert same(whole, read(log, Scratch(folder, SMALL), timestamp="time"))


@pytest.mark.parametrize("memory", [100, 1_000, 1_000_000])
def test_ids_come_in_the_order_of_their_first_occurrence(tmp_path: Path, memory: int) -> None:
    parts = [
        pa.array(["b", "", "a", "bb"]).slice(1),
        pa.array([], pa.string()),
        pa.array([f"a long id that differs in front {at % 40:03} and not in its end at all" for at in range(90)]),
        pa.array(["é", "b", "bb", "a"]),
    ]
    ids, rows = distinct_ids(parts, Scratch(tmp_path, memory))
    together = [text for part in parts for text in part.to_pylist()]
    assert ids.to_pylist() == list(dict.fromkeys(together))
    assert [ids[int(row)].as_py() for part in rows for row in part] == together
    ids.validate(full=True)
