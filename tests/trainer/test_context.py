"""Context features of the interactions' own rows, and attributes as of the event's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Buckets
from longtail.trainer.config import EvaluationConfig, load_recipe
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import RankedModel, bias_removal_curve
from tests.trainer import tiny

HEAD = """
name = "context"
[data]
train = "log.parquet"
query_id = "user"
label_id = "item"
timestamp = "at"
"""
TAIL = """
[label]
features = [{ name = "item", kind = "id", dim = 4 }]
[model]
dim = 4
[training]
epochs = 1
batch_size = 4
[evaluation]
ks = [1]
metric = "recall@1"
bias_removal = [0.0]
bootstrap = 10
"""


def write(folder: Path, *, data: str = "", features: str, tail: str = TAIL, **tables: dict[str, Any]) -> Path:
    """A recipe and its tables in a folder; returns the recipe's path."""
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    text = f"{HEAD}{data}[query]\nfeatures = [{features}]\n{tail}"
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


LOG = {
    "user": ["a", "a", "b", "a", "b", "a"],
    "item": ["x", "y", "x", "z", "z", "x"],
    "at": [1, 2, 3, 4, 5, 6],
    "device": ["phone", "web", "phone", "phone", None, "tv"],
    "hour": [8.0, 20.0, 8.0, 8.0, 14.0, None],
    "words": ["red shoe", "", "shoe", "red shoe", "hat", "hat"],
}
CONTEXT = """
    { name = "user", kind = "id", dim = 4, unknown_rate = 0 },
    { name = "device", from = "row", kind = "id", dim = 4, min_count = 2, unknown_rate = 0 },
    { name = "hour", from = "row", kind = "number" },
    { name = "searched", column = "words", from = "row", kind = "text", hash_rows = 64, unknown_rate = 0 },
"""


def test_a_pair_is_encoded_with_the_context_of_its_row(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, features=CONTEXT, log=LOG))
    dataset = read_dataset(recipe)
    encoding = Encoding.fit(recipe, dataset)

    assert dataset.requests is not None
    assert dataset.contexts is not None
    assert dataset.contexts.num_rows == 5, "the first and the fourth row are of one context"
    assert len(dataset.requests.queries) == 5, "and of one user: asked the same way"
    train = dataset.train
    assert train.times is not None
    order = train.times.astype(int) - 1
    encoded = encoding.query.pair_inputs(np.arange(6), np.random.default_rng(0))

    ids = encoding.vocabularies["device"].ids.to_pylist()
    assert ids == ["phone"], "two rows of the log have it; of web and of tv there is one row each"
    assert encoded["device"].tolist() == [int(LOG["device"][row] == "phone") for row in order]
    mean = (8 + 20 + 8 + 8 + 14) / 5
    assert encoded["hour"].tolist() == pytest.approx([LOG["hour"][row] or mean for row in order])
    words = [len(LOG["words"][row].split()) for row in order]
    assert encoded["searched__weight"].sum(axis=1).tolist() == words
    (hour,) = (feature for feature in encoding.query_features if feature.name == "hour")
    assert hour.missing == pytest.approx(mean), "what a request without it is read as"


def test_batches_resume_at_a_step(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, features=CONTEXT, log=LOG))
    dataset = read_dataset(recipe)
    query = Encoding.fit(recipe, dataset).query
    settings = {"batch_size": 2, "seed": 1, "epoch": 2}

    batches_by_step = dict(epoch_batches(dataset.train, query, first=0, **settings))
    rest = dict(epoch_batches(dataset.train, query, first=1, **settings))

    assert sorted(rest) == [1, 2]
    for step, batch in rest.items():
        assert {name: column.tolist() for name, column in batch.items()} == {
            name: column.tolist() for name, column in batches_by_step[step].items()
        }


def test_each_request_has_a_list() -> None:
    """Query 0 wants label 1 in one context and label 2 in another; each list shows one of them first."""
    request_queries = np.int32([0, 0, 1])
    held_out = Pairs(np.int32([0, 0, 0, 1]), np.int32([1, 2, 1, 3]), requests=np.int32([0, 1, 1, 2]))
    known_pairs = Pairs(np.int32([0]), np.int32([0]))
    scores = np.float32([[9, 2, 1, 0], [9, 1, 2, 0], [3, 2, 1, 0]])
    labels = LabelSide.build(
        np.eye(4, dtype=np.float32), None, np.array([3, 2, 1, 1]), training_queries=2, temperature=1.0,
        log_pn=np.zeros(4, np.float32), buckets=Buckets.by_quantile(np.array([3, 2, 1, 1])),
    )  # fmt: skip
    config = EvaluationConfig.model_validate({"ks": [1, 2], "metric": "recall@1", "bootstrap": 10})

    (point,) = bias_removal_curve(
        held_out, Past.fixed(known_pairs, queries=2, requests=request_queries),
        RankedModel(lambda rows: scores[rows], labels), config, seed=0, settings=[Setting(0.0)],
    )  # fmt: skip

    # Label 0 is seen by query 0 and hidden in both of its contexts: first are 1, 2 and, of query 1, label 0.
    assert point.metrics["recall@1"].value == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert point.metrics["recall@2"].value == pytest.approx((1 + 1 + 0) / 3)


USERS = {"user": ["b", "a", "a"], "since": [4, 2, 6], "tier": ["new", "basic", "gold"], "age": [30.0, 40.0, 50.0]}
TIER = """
    { name = "user", kind = "id", dim = 4, unknown_rate = 0 },
    { name = "tier", kind = "id", dim = 4, unknown_rate = 0 },
    { name = "age", kind = "number" },
"""
AS_OF = 'queries = "users.parquet"\nvalid_from = "since"\n'


def test_a_pair_is_encoded_with_the_attributes_of_its_time(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, data=AS_OF, features=TIER, log=LOG, users=USERS))
    dataset = read_dataset(recipe)
    encoding = Encoding.fit(recipe, dataset)
    encoded = encoding.query.pair_inputs(np.arange(6), np.random.default_rng(0))

    names = [None, *encoding.vocabularies["tier"].ids.to_pylist()]
    assert dataset.query_ids.to_pylist() == ["a", "b"]
    assert [names[row] for row in encoded["tier"]] == [None, "basic", "basic", "gold", None, "new"]
    mean = (40 + 50 + 30) / 3
    assert encoded["age"].tolist() == pytest.approx([mean, 40, 40, 50, mean, 30])
    assert encoded["user"].tolist() == [1, 1, 1, 1, 2, 2], "the query's own id has no versions"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"since": pa.array([4, 2, 6], pa.timestamp("s"))}, "expected numbers as in column 'at'.*found timestamps"),
        ({"since": [4, 2, 2]}, "expected one row of a query at a time, found a second of 'a' in row 2"),
        ({"since": [4, None, 2]}, "column 'since': expected finite numbers"),
    ],
)
def test_bad_versions_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    recipe = load_recipe(write(tmp_path, data=AS_OF, features=TIER, log=LOG, users=USERS | change))
    with pytest.raises(DataError, match=message):
        read_dataset(recipe)


@pytest.mark.parametrize(
    ("data", "features", "tail", "message"),
    [
        ('valid_from = "since"\n', TIER, TAIL, "data.valid_from: expected data.queries and data.timestamp"),
        ("", '{ name = "user", kind = "id", from = "row" }', TAIL, "neither a history nor the query's own id"),
        ("", '{ name = "seen", kind = "history", from = "row" }', TAIL, "neither a history nor the query's own id"),
        ("", TIER, TAIL.replace("kind", 'from = "row", kind'), "expected from = 'table', received 'row'"),
        ("", '{ name = "a", kind = "id", form = "row" }', TAIL, "expected one of name, kind, column, from,"),
        ("", TIER, f"{TAIL}[loss]\nimpressions = 1\n", "needs the column of impressions; set data.impressions"),
    ],
)
def test_impossible_contexts_are_refused(tmp_path: Path, data: str, features: str, tail: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, data=data, features=features, tail=tail))


@pytest.mark.parametrize(
    ("feature", "values", "message"),
    [
        ({"kind": "number"}, [*map(float, range(19)), float("inf")], "nulls, found inf$"),
        ({"kind": "date"}, [*(f"2026-01-{n + 1:02}" for n in range(19)), "soon"], "such as 'soon'$"),
        ({"kind": "vector", "dims": 2}, [*([1.0, n] for n in range(19)), [1.0]], "found one of 1$"),
    ],
)
def test_a_context_with_a_bad_value_is_refused_without_a_name(
    tmp_path: Path, feature: dict[str, Any], values: list[Any], message: str
) -> None:
    """There are more contexts than queries, none of whose rows is theirs."""
    log = {"u": ["a", "b"] * 10, "i": [f"i{n % 3}" for n in range(20)], "t": range(20), "x": values}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    recipe = tiny.recipe(
        data={"train": tmp_path / "log.parquet", "query_id": "u", "label_id": "i"},
        query={"features": [tiny.USER | {"name": "u"}, {"name": "x", "from": "row"} | feature]},
        label={"features": [tiny.ITEM | {"name": "i"}]},
    )  # fmt: skip

    with pytest.raises(DataError, match=message):
        Encoding.fit(recipe, read_dataset(recipe))
