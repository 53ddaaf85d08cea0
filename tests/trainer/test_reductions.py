"""The three ways from several labels a query to one [METHODS §7]."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from longtail.trainer.data.batches import one_per_query
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from tests.trainer import logs, tiny
from tests.trainer.logs import write_table

load = partial(logs.load, query_id="query_id", label_id="label_id", reduction="smallest")


def label_by_query(dataset: Dataset, pairs: Pairs) -> dict[str, str]:
    queries, labels = dataset.query_ids.to_pylist(), dataset.label_ids.to_pylist()
    named_pairs = [(queries[query], labels[label]) for query, label in zip(pairs.queries, pairs.labels, strict=True)]
    assert len(dict(named_pairs)) == len(named_pairs), "one label a query"
    return dict(named_pairs)


@pytest.mark.parametrize(
    ("labels", "smallest"),
    [
        (["10", "9", "100", "20", "9"], {"a": "9", "b": "20", "c": "9"}),
        (["10", "9", "100", "2o", "9"], {"a": "10", "b": "100", "c": "9"}),
        (["-1", "-2", "0", "-0", "5"], {"a": "-2", "b": "0", "c": "5"}),
    ],
    ids=["numbers", "text", "negative numbers, and the first of equals"],
)
def test_smallest_is_by_number_where_all_are_numbers(
    tmp_path: Path, labels: list[str], smallest: dict[str, str]
) -> None:
    dataset = load(write_table(tmp_path / "train.parquet", query_id=["a", "a", "b", "b", "c"], label_id=labels))

    assert label_by_query(dataset, dataset.train) == smallest
    assert set(dataset.label_ids.to_pylist()) == set(smallest.values()), "nobody's labels leave the catalogue"


def test_smallest_holds_in_every_file_and_for_every_column(tmp_path: Path) -> None:
    train = write_table(
        tmp_path / "train.parquet", query_id=["a", "b", "a"], label_id=[7, 5, 3], when=[1, 2, 3], much=[0.5, 1, 2]
    )
    test = write_table(
        tmp_path / "test.parquet", query_id=["a", "a", "c"], label_id=[9, 8, 30], when=[4, 5, 6], much=[1, 3, 1]
    )
    labels = write_table(tmp_path / "labels.parquet", label_id=[7, 1])

    dataset = load(train, test=test, labels=labels, timestamp="when", weight="much")

    assert label_by_query(dataset, dataset.train) == {"a": "3", "b": "5"}
    assert label_by_query(dataset, dataset.test) == {"a": "8", "c": "30"}
    assert (dataset.train.weights.tolist(), dataset.train.times.tolist()) == ([2, 1], [3, 2])
    assert sorted(dataset.label_ids.to_pylist(), key=int) == ["1", "3", "5", "7", "8", "30"]


def test_smallest_comes_before_the_split(tmp_path: Path) -> None:
    queries = np.repeat(np.arange(200), 4)
    train = write_table(
        tmp_path / "train.parquet", query_id=queries, label_id=np.random.default_rng(0).integers(0, 50, 800)
    )

    dataset = load(train, split={"strategy": "random"})

    parts = [label_by_query(dataset, pairs) for pairs in (dataset.train, dataset.valid, dataset.test)]
    assert [len(part) for part in parts] == [160, 20, 20]
    assert len(parts[0] | parts[1] | parts[2]) == 200, "each query is in one part"


ROWS = [(query, label) for query in range(10) for label in range(query % 4 + 1)]
MANY = tiny.dataset(tiny.pairs(*ROWS), queries=11, labels=4)


def visits(epoch: int, *, seed: int = 0) -> np.ndarray:
    return one_per_query(MANY.train, np.random.default_rng([seed, epoch]))


def test_an_epoch_visits_every_query_once_with_one_of_its_labels() -> None:
    visited = visits(0)

    assert sorted(MANY.train.queries[visited].tolist()) == list(range(10))
    assert MANY.train.queries[visited].tolist() != list(range(10)), "in shuffled order"
    assert visited.tolist() == visits(0).tolist()
    assert visited.tolist() != visits(1).tolist()
    assert visited.tolist() != visits(0, seed=1).tolist()


def test_samples_are_uniform() -> None:
    drawn = np.bincount(np.concatenate([visits(epoch) for epoch in range(4000)]), minlength=len(ROWS)) / 4000

    expected = [1 / (query % 4 + 1) for query, _ in ROWS]
    np.testing.assert_allclose(drawn, expected, atol=5 * np.sqrt(0.25 / 4000))


def test_frequencies_count_visits() -> None:
    """Label 0 is one of three of query 0 and all of query 1; labels 1 and 2 are only of query 0."""
    data = tiny.dataset(tiny.pairs((0, 0), (0, 1), (0, 2), (1, 0)), queries=2, labels=3)

    assert data.label_visits(one_label_per_query=False).tolist() == [2, 1, 1]
    np.testing.assert_allclose(data.label_visits(one_label_per_query=True), [4 / 3, 1 / 3, 1 / 3])
