from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Vocabulary
from longtail.trainer.config import load_recipe
from longtail.trainer.data import batches
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError
from tests.trainer import tiny
from tests.trainer.logs import load, name_pairs, write_table

USERS, ITEMS, TIMES = ["b", "a", "b", "a", "b", "c"], ["x", "y", "z", "x", "y", "x"], [5, 9, 1, 2, 5, 7]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_table(tmp_path / "train.parquet", user=USERS, item=ITEMS, when=TIMES, much=[1.0, 2, 3, 4, 5, 6])


def test_pairs_are_sorted_by_query_in_the_order_of_the_file(train: Path) -> None:
    dataset = load(train)

    assert dataset.query_ids.to_pylist() == ["b", "a", "c"]
    assert name_pairs(dataset) == ["b-x", "b-z", "b-y", "a-y", "a-x", "c-x"]
    assert (len(dataset.valid), len(dataset.test), dataset.ordered) == (0, 0, False)
    assert (dataset.train.weights, dataset.train.times) == (None, None)


def test_timestamps_order_a_query_s_pairs_and_ties_keep_the_order_of_the_file(train: Path) -> None:
    dataset = load(train, timestamp="when", weight="much")

    assert name_pairs(dataset) == ["b-z", "b-x", "b-y", "a-x", "a-y", "c-x"]
    assert dataset.train.weights.tolist() == [3, 1, 5, 4, 2, 6]
    assert dataset.ordered


def test_leave_last_out_by_hand(train: Path) -> None:
    dataset = load(train, timestamp="when", split={"strategy": "leave_last_out"})

    assert name_pairs(dataset) == ["b-z", "a-x", "a-y", "c-x"], "short queries stay in train whole"
    assert name_pairs(dataset, dataset.valid) == ["b-x"]
    assert name_pairs(dataset, dataset.test) == ["b-y"]


@pytest.mark.parametrize(("file_split", "held_out"), [("test", "valid"), ("valid", "test")])
def test_leave_last_out_with_a_file_holds_out_one(train: Path, file_split: str, held_out: str) -> None:
    file = write_table(train.parent / f"{file_split}.parquet", user=["a"], item=["z"])

    dataset = load(train, split={"strategy": "leave_last_out"}, **{file_split: file})

    assert name_pairs(dataset, getattr(dataset, file_split)) == ["a-z"]
    assert name_pairs(dataset, getattr(dataset, held_out)) == ["b-y"]
    assert name_pairs(dataset) == ["b-x", "b-z", "a-y", "a-x", "c-x"]


def test_temporal_cuts_the_latest_pairs_of_all(train: Path) -> None:
    dataset = load(train, timestamp="when", split={"strategy": "temporal", "valid": 0.34, "test": 0.17})

    assert name_pairs(dataset, dataset.test) == ["a-y"]
    assert name_pairs(dataset, dataset.valid) == ["b-x", "b-y", "c-x"]  # two of them have one time
    assert name_pairs(dataset) == ["b-z", "a-x"]


def merge_splits(dataset: Dataset) -> Pairs:
    return dataset.train.merge_later(dataset.valid).merge_later(dataset.test)


def load_days(folder: Path, *pairs_of_day: int) -> Dataset:
    """Load a log of so many pairs on each day, with a tenth of them in valid and in test."""
    when = [date(2026, 1, day) for day, pairs in enumerate(pairs_of_day, 1) for _ in range(pairs)]
    path = write_table(
        folder / "train.parquet", when=when,
        user=[f"u{n % 7}" for n in range(len(when))], item=[f"i{n % 5}" for n in range(len(when))],
    )  # fmt: skip
    return load(path, timestamp="when", split={"strategy": "temporal", "valid": 0.1, "test": 0.1})


@pytest.mark.parametrize(
    ("pairs_of_day", "sizes"),
    [
        ((150, 150, 150, 150, 150, 150), (600, 150, 150)),
        ((700, 100, 100), (700, 100, 100)),
        ((1, 1, 98), (1, 1, 98)),
        ((98, 1, 1), (98, 1, 1)),
        ((60, 20, 12, 4, 4), (80, 12, 8)),  # 12 are nearer to 10 than 32, and 8 nearer than 20
    ],
)
def test_temporal_split_keeps_equal_times_together(
    tmp_path: Path, pairs_of_day: tuple[int, ...], sizes: tuple[int, int, int]
) -> None:
    dataset = load_days(tmp_path, *pairs_of_day)

    assert tuple(len(part) for part in (dataset.train, dataset.valid, dataset.test)) == sizes
    times = [{*part.times.tolist()} for part in (dataset.train, dataset.valid, dataset.test)]
    assert max(times[0]) < min(times[1]) <= max(times[1]) < min(times[2])


def test_temporal_split_reports_its_size_and_needs_distinct_times(tmp_path: Path) -> None:
    assert load_days(tmp_path, 700, 100, 100, 50, 50).report.remarks == []
    assert load_days(tmp_path, 750, 100, 150).report.remarks == [
        "data.split: test has 150 pairs (15.0%) instead of 100: pairs of one time stay together"
    ]
    with pytest.raises(DataError, match="expected a time of its own for each split by strategy 'temporal'"):
        load_days(tmp_path, 90, 10)


def test_equal_times_across_a_split_are_counted(tmp_path: Path) -> None:
    path = write_table(tmp_path / "train.parquet", user=list("aaabbb"), item=list("xyzxyz"), when=[1, 2, 2, 1, 2, 3])
    dataset = load(path, timestamp="when", split={"strategy": "leave_last_out"})

    assert dataset.report.remarks == [
        "data.split: 1 of 4 held-out pairs have the time of an earlier pair of their query: the order in the file "
        "decides"
    ]


def test_random_split_is_seeded_and_complete(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "train.parquet", user=[f"u{n % 10}" for n in range(100)], item=[f"i{n}" for n in range(100)]
    )
    split = {"strategy": "random", "valid": 0.2, "test": 0.1}
    dataset, again, other = (load(path, split=split, seed=seed) for seed in (1, 1, 2))

    assert [len(part) for part in (dataset.train, dataset.valid, dataset.test)] == [70, 20, 10]
    assert sorted(name_pairs(dataset, merge_splits(dataset))) == sorted(f"u{n % 10}-i{n}" for n in range(100))
    assert name_pairs(dataset, dataset.test) == name_pairs(again, again.test)
    assert name_pairs(dataset, dataset.test) != name_pairs(other, other.test)


def test_random_per_query_splits_each_query_by_seed(tmp_path: Path) -> None:
    sizes = {"a": 20, "b": 10, "c": 8, "d": 2, "e": 1}
    users = [user for user, size in sizes.items() for _ in range(size)]
    users = list(np.random.default_rng(3).permutation(users))
    path = write_table(tmp_path / "train.parquet", user=users, item=[f"i{n}" for n in range(len(users))])
    split = {"strategy": "random_per_query", "valid": 0.1, "test": 0.2}
    dataset, again, other = (load(path, split=split, seed=seed) for seed in (1, 1, 2))

    def by_query(part: Pairs) -> dict[str, int]:
        counts = np.bincount(part.queries, minlength=len(sizes))
        return dict(zip(dataset.query_ids.to_pylist(), counts.tolist(), strict=True))

    assert by_query(dataset.test) == {"a": 4, "b": 2, "c": 2, "d": 0, "e": 0}
    assert by_query(dataset.valid) == {"a": 2, "b": 1, "c": 1, "d": 0, "e": 0}
    assert by_query(merge_splits(dataset)) == sizes
    assert len(set(name_pairs(dataset, merge_splits(dataset)))) == len(users)
    assert name_pairs(dataset, dataset.test) == name_pairs(again, again.test)
    assert name_pairs(dataset, dataset.test) != name_pairs(other, other.test)
    from_file = load(path, test=path, split=split)
    assert by_query(from_file.valid) == by_query(dataset.valid)
    assert len(from_file.train) + len(from_file.valid) == len(from_file.test) == len(users)


def test_temporal_per_query_cuts_the_latest_of_every_query(tmp_path: Path) -> None:
    users, when = ["a"] * 10 + ["b"] * 3 + ["c"], [*range(10, 0, -1), 1, 2, 3, 1]
    path = write_table(tmp_path / "train.parquet", user=users, item=[f"i{n}" for n in range(14)], when=when)
    split = {"strategy": "temporal_per_query", "valid": 0.2, "test": 0.1}

    timed, by_file = load(path, timestamp="when", split=split), load(path, split=split)

    assert name_pairs(timed, timed.test) == ["a-i0"]
    assert name_pairs(timed, timed.valid) == ["a-i2", "a-i1", "b-i12"]
    assert name_pairs(timed) == [f"a-i{n}" for n in range(9, 2, -1)] + ["b-i10", "b-i11", "c-i13"]
    assert name_pairs(by_file, by_file.test) == ["a-i9"]
    assert name_pairs(by_file, by_file.valid) == ["a-i7", "a-i8", "b-i12"]
    assert timed.ordered
    assert by_file.ordered


def test_test_file_is_not_split(train: Path) -> None:
    test = write_table(train.parent / "test.parquet", user=["a", "new"], item=["z", "w"])
    dataset = load(train, test=test, split={"strategy": "random", "valid": 0.5, "test": 0.4})

    assert name_pairs(dataset, dataset.test) == ["a-z", "new-w"]
    assert (len(dataset.train), len(dataset.valid)) == (3, 3)
    assert dataset.query_ids.to_pylist() == ["b", "a", "c", "new"]
    assert dataset.label_ids.to_pylist() == ["x", "y", "z", "w"]


def test_merge_later_inserts_after_equal_times() -> None:
    early, late = tiny.pairs((0, 1), (1, 1)), tiny.pairs((0, 0), (1, 0), (0, 2))

    assert early.merge_later(late).labels.tolist() == [1, 0, 2, 1, 0]

    def timed(pairs: Pairs, *times: float) -> Pairs:
        return Pairs(pairs.queries, pairs.labels, None, np.array(times))

    both = timed(early, 5, 5).merge_later(timed(late, 4, 5, 9))
    assert both.labels.tolist() == [0, 1, 2, 1, 0]
    assert both.times.tolist() == [4, 5, 9, 5, 5]


def test_refit_moves_valid_into_train(train: Path) -> None:
    dataset = load(train, timestamp="when", weight="much", split={"strategy": "leave_last_out"})
    refitted = dataset.refit()

    assert name_pairs(refitted) == ["b-z", "b-x", "a-x", "a-y", "c-x"]
    assert refitted.train.weights.tolist() == [3, 1, 4, 2, 6]
    assert (len(refitted.valid), name_pairs(refitted, refitted.test)) == (0, ["b-y"])


def test_feature_tables_are_aligned_with_ids(train: Path) -> None:
    labels = write_table(train.parent / "labels.parquet", item=["never", "z", "x"], title=["Never", "Zed", "Ex"])
    queries = write_table(train.parent / "queries.parquet", user=["c", "b"], age=[30, 20])
    dataset = load(train, labels=labels, queries=queries)

    titles = dict(zip(dataset.label_ids.to_pylist(), dataset.label_table["title"].to_pylist(), strict=True))
    ages = dict(zip(dataset.query_ids.to_pylist(), dataset.query_table["age"].to_pylist(), strict=True))
    assert titles == {"x": "Ex", "y": None, "z": "Zed", "never": "Never"}
    assert ages == {"b": 20, "a": None, "c": 30}
    assert dataset.label_table.column_names == ["item", "title"]
    assert dataset.label_counts()[dataset.label_ids.index("never").as_py()] == 0


@pytest.mark.parametrize("role", ["valid", "test", "queries", "labels"])
def test_ids_of_two_types_match_by_their_text(tmp_path: Path, role: str) -> None:
    train = write_table(tmp_path / "train.parquet", user=[1, 2], item=[7, 8])
    other = write_table(tmp_path / f"{role}.parquet", user=["1", "2"], item=["7", "8"])

    dataset = load(train, **{role: other})

    assert (dataset.query_ids.to_pylist(), dataset.label_ids.to_pylist()) == (["1", "2"], ["7", "8"])


@pytest.mark.parametrize(
    ("display", "message"),
    [
        (["name"], "data.display: expected columns of .*labels.parquet, found item, title, count, received 'name'"),
        (["title", "count"], "data.display: expected names other than label_id, count, .*, received 'count'"),
    ],
)
def test_columns_that_cannot_be_displayed_are_refused_before_training(
    train: Path, display: list[str], message: str
) -> None:
    labels = write_table(train.parent / "labels.parquet", item=["x"], title=["Ex"], count=[3])

    with pytest.raises(DataError, match=message):
        load(train, labels=labels, display=display)


def test_an_empty_cell_of_a_csv_feature_table_is_missing_and_na_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("query_id,label_id\na,x\nb,y\nc,y\n")
    (tmp_path / "users.csv").write_text("query_id,country,age\na,,30\nb,NA,\nc,DE,40\n")
    columns = {"query_id": "query_id", "label_id": "label_id"}

    table = load(tmp_path / "pairs.csv", queries=tmp_path / "users.csv", **columns).query_table

    assert table is not None
    assert table["country"].to_pylist() == [None, "NA", "DE"]
    assert table["age"].to_pylist() == [30, None, 40]


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 1000])
def test_fingerprint_does_not_depend_on_block_size(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Checkpoints and proposals of earlier versions are found by it."""
    monkeypatch.setattr("longtail.trainer.data.dataset._IDS_AT_ONCE", at_once)
    fingerprint = tiny.dataset(tiny.pairs((0, 0), (1, 1), (2, 2)), queries=5, labels=3).fingerprint
    assert fingerprint == "cd37d587759a019cdcd7266723947dc0c5a32ed16be92912b8262c824d67e516"


def test_ids_beyond_2_gib_of_text_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny.write_job(tmp_path))
    usual = read_dataset(recipe)
    monkeypatch.setattr("longtail.trainer.data.tables.MOST_TEXT", 10)
    large = read_dataset(recipe)
    assert large.query_ids.type == pa.large_string()
    assert large.query_ids.to_pylist() == usual.query_ids.to_pylist()
    for name, vocabulary in Encoding.fit(recipe, large).vocabularies.items():
        vocabulary.write(tmp_path / f"{name}.arrow")
        ids = vocabulary.ids.to_pylist()
        assert ids == Encoding.fit(recipe, usual).vocabularies[name].ids.to_pylist()
        assert Vocabulary.read(tmp_path / f"{name}.arrow").find_all([*ids, "?"]) == [*range(1, len(ids) + 1), 0]


def test_batches_number_pairs_beyond_two_to_the_31st(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny.write_job(tmp_path))
    dataset = read_dataset(recipe)
    features = Encoding.fit(recipe, dataset).query
    assert np.int32(batches.INT32_ROWS - 1) == 2**31 - 1
    for most, kind in ((batches.INT32_ROWS, np.int32), (len(dataset.train), np.int32), (1, np.int64)):
        monkeypatch.setattr(batches, "INT32_ROWS", most)
        _, batch = next(batches.epoch_batches(dataset.train, features, batch_size=2, seed=0, epoch=0))
        assert batch["_pair"].dtype == kind
