"""Exports of a service's feedback train beside a log, or alone: their ids, times, weights and impressions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer.check import check
from longtail.trainer.config import DataConfig, load_recipe
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.errors import DataError
from longtail.trainer.init.recipe import draft_recipe
from tests.trainer import logs, tiny
from tests.trainer.logs import name_pairs
from tests.trainer.test_cli import run

load = partial(logs.load, query_id="user_id", label_id="item_id")
START = datetime(2026, 1, 1, tzinfo=UTC)
TEXT, NUMBER, TEXTS = pa.string(), pa.float64(), pa.list_(pa.string())
COLUMNS = {
    "answer": TEXT, "idempotency_key": TEXT, "event": TEXT, "weight": NUMBER, "propensity": NUMBER,
    "debiased_weight": NUMBER, "position": pa.int32(), "bias_removal": NUMBER, "popularity": NUMBER, "release": TEXT,
    "source": TEXT, "time": pa.timestamp("us", "UTC"), "arm": TEXT, "run": TEXT, "unit": TEXT, "impressions": TEXTS,
}  # fmt: skip
FEATURES = {"user_id": TEXT, "history": TEXTS, "age": NUMBER, "taste": pa.list_(NUMBER), "page": TEXT}


def choice(user: object, label: object, **more: Any) -> dict[str, Any]:
    """One row of an export, of a label that exploring showed with a chance of 1/4."""
    row = {
        "user_id": str(user), "history": ["1"], "age": 30.0, "taste": [0.5, 1.0], "label": str(label), "answer": "a",
        "idempotency_key": "k", "event": "click", "weight": 1.0, "propensity": 0.25, "debiased_weight": 4.0,
        "position": 1, "bias_removal": 0.0, "popularity": 0.0, "release": "r", "source": "answer",
        "time": START + timedelta(days=20), "impressions": ["1", str(label), "no label"],
    }  # fmt: skip
    return row | more


def write_export(folder: Path, *rows: dict[str, Any], label_id: str = "item_id", **features: pa.DataType) -> Path:
    """What `longtail-serve export-feedback` writes."""
    schema = pa.schema({**FEATURES, **features, "label": TEXT, **COLUMNS})
    table = pa.Table.from_pylist(list(rows), schema)
    pq.write_table(
        table.rename_columns([label_id if name == "label" else name for name in schema.names]), folder / "fb.parquet"
    )
    return folder / "fb.parquet"


def write_log(folder: Path, **more: Any) -> Path:
    """Ratings as MovieLens has them: integers, and seconds since 1970."""
    columns = tiny.clustered(users=30, items=20, per_user=10, seed=1).to_pydict()
    rows = len(columns["user_id"])
    seconds = [int((START + timedelta(hours=row)).timestamp()) for row in range(rows)]
    pq.write_table(pa.table(columns | {"timestamp": seconds, "rating": [4] * rows} | more), folder / "log.parquet")
    return folder / "log.parquet"


def test_an_export_s_text_ids_are_a_log_s_integers(tmp_path: Path) -> None:
    """Also beside a label table with integers, where whole floats are integers."""
    pq.write_table(pa.table({"user_id": [1, 2], "item_id": [42.0, 7.0]}), tmp_path / "log.parquet")
    pq.write_table(pa.table({"item_id": [42, 7, 9], "year": [1990, 1991, 1992]}), tmp_path / "items.parquet")
    exported = write_export(tmp_path, choice(2, 42), choice(3, 9))

    both = load([tmp_path / "log.parquet", exported], labels=tmp_path / "items.parquet")
    assert sorted(name_pairs(both)) == ["1-42", "2-42", "2-7", "3-9"]
    assert sorted(both.label_ids.to_pylist()) == ["42", "7", "9"]
    assert both.label_table["year"].null_count == 0
    alone = load(exported, labels=tmp_path / "items.parquet")
    assert sorted(name_pairs(alone)) == ["2-42", "3-9"]
    pq.write_table(pa.table({"user_id": [1], "item_id": [True]}), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log.parquet: column 'item_id': expected ids as strings or integers"):
        load([tmp_path / "log.parquet", exported])


def test_an_export_without_events_adds_nothing(tmp_path: Path) -> None:
    """One quiet night does not fail the training of all."""
    clicks, exported = write_log(tmp_path), write_export(tmp_path)
    settings = {"timestamp": "timestamp", "weight": "debiased_weight"}

    dataset, expected = load([clicks, exported], **settings), load(clicks, timestamp="timestamp")
    assert name_pairs(dataset) == name_pairs(expected)
    assert dataset.report.unit == expected.report.unit == "seconds"
    with pytest.raises(DataError, match=r"fb.parquet: expected at least one interaction, found none"):
        load(exported, **settings)
    with pytest.raises(DataError, match=r"fb.parquet: expected at least one row, found none"):
        draft_recipe(exported, tmp_path / "r.toml")


def test_export_columns_replace_recipe_columns(tmp_path: Path) -> None:
    clicks = write_log(tmp_path, kind=["view"] * 300, stars=[2.0] * 300, seen=[[1, 2]] * 300)
    exported = write_export(tmp_path, choice(1, 1), choice(500, 2, event="buy", impressions=None), label_id="label_id")
    dataset = load(
        [clicks, exported], timestamp="timestamp", weight="stars", impressions="seen",
        events={"column": "kind", "weights": {"view": 1, "click": 1, "buy": 3}},
    )  # fmt: skip

    times = dict(zip(name_pairs(dataset), dataset.train.times, strict=True))
    assert times["500-2"] == (START + timedelta(days=20)).timestamp()
    assert dataset.report.unit == "seconds"
    weights = dict(zip(name_pairs(dataset), dataset.train.weights, strict=True))
    assert weights["500-2"] == 12
    assert sorted(dataset.train.weights)[:-2] == [2.0] * 300
    assert len(dataset.impressions.ids) == 2 * 300 + 2, "of the three of a choice one is no label"


def test_log_rows_weigh_1_next_to_propensities(tmp_path: Path) -> None:
    train = [write_log(tmp_path), write_export(tmp_path, choice(1, 1), choice(1, 2))]
    dataset = load(train, timestamp="timestamp", weight="debiased_weight", impressions="impressions")

    assert sorted(dataset.train.weights) == [1.0] * 300 + [4.0] * 2
    assert dataset.report.lines() == [
        "300 of 302 rows lack a column 'debiased_weight': each weighs 1",
        "300 of 302 rows lack a column 'impressions': what was shown with them is unknown",
    ]
    assert load(train, timestamp="timestamp").report.lines() == [
        "2 of 302 rows are feedback of a service without its propensities, which data.weight = 'debiased_weight' takes"
    ]
    with pytest.raises(DataError, match=r"log.parquet: expected a column 'weight', found user_id, "):
        load(train, weight="weight")


def test_dates_mixed_with_plain_numbers_are_refused(tmp_path: Path) -> None:
    train = [write_log(tmp_path, timestamp=list(range(300))), write_export(tmp_path, choice(1, 1))]

    with pytest.raises(DataError, match=r"data.timestamp: expected seconds, .* since 1970 in .*log.parquet, as there"):
        load(train, timestamp="timestamp")


def test_features_of_the_request_are_read_from_both(tmp_path: Path) -> None:
    """Integers, lists of them and dates as an export has them, text; a feature of a reserved name; one not sent."""
    days = [START.replace(tzinfo=None)] * 300
    ids = pa.array([[1, 2]] * 300, pa.large_list(pa.int64()))
    clicks = write_log(tmp_path, page=[7] * 300, history=ids, born=days, unit=["x"] * 300, age=[1] * 300)
    exported = write_export(tmp_path, choice(1, 1, born="2026-01-02", feature_unit="y"), born=TEXT, feature_unit=TEXT)
    data = DataConfig(train=[clicks, exported], query_id="user_id", label_id="item_id", timestamp="timestamp")

    dataset = load_dataset(data, seed=0, context=["page", "history", "born", "unit", "age"])

    assert dataset.contexts is not None
    assert set(dataset.contexts["page"].to_pylist()) == {"7", None}
    assert set(map(tuple, dataset.contexts["history"].to_pylist())) == {("1", "2"), ("1",)}
    assert set(dataset.contexts["unit"].to_pylist()) == {"x", "y"}
    assert {text[:10] for text in dataset.contexts["born"].to_pylist()} == {"2026-01-01", "2026-01-02"}
    assert set(dataset.contexts["age"].to_pylist()) == {1.0, 30.0}
    pq.write_table(pa.table({"user_id": [1], "item_id": [1], "timestamp": [1.7e9], "page": [{"a": 1}]}), clicks)
    with pytest.raises(DataError, match=r"data.train: expected files whose columns are of one type each, found 'page'"):
        load_dataset(data, seed=0, context=["page"])


@pytest.mark.parametrize("label_id", ["label_id", "product_id"])
def test_an_export_alone_becomes_a_recipe(tmp_path: Path, label_id: str) -> None:
    rng = np.random.default_rng(0)
    rows = [
        choice(rng.integers(20), rng.integers(30), page=f"p{row % 40}", time=START + timedelta(hours=row))
        for row in range(400)
    ]
    roles = draft_recipe(write_export(tmp_path, *rows, label_id=label_id), tmp_path / "r.toml")

    assert (roles.query_id, roles.label_id, roles.timestamp, roles.event) == ("user_id", label_id, "time", None)
    recipe = load_recipe(tmp_path / "r.toml")
    assert (recipe.data.weight, recipe.data.impressions) == ("debiased_weight", "impressions")
    assert [feature.name for feature in recipe.query.features] == ["user_id", "history"]
    assert [feature.name for feature in recipe.label.features] == [label_id]
    assert "# Not read: history, age, taste, page." in (tmp_path / "r.toml").read_text()
    assert check(tmp_path / "r.toml").problems == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_log_and_an_export_train_in_two_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clicks = write_log(tmp_path, action=["view", "purchase"] * 150)
    rows = [
        choice(row % 30, row % 20, event="shared", impressions=None, time=START + timedelta(hours=row))
        for row in range(30)
    ]
    exported, recipe = write_export(tmp_path, *rows), tmp_path / "recipe.toml"

    code, _, errors = run(capsys, "init", clicks, exported, "--out", recipe)
    assert (code, "label id  item_id" in errors) == (0, True)
    drafted = load_recipe(recipe).data
    assert (drafted.timestamp, drafted.weight, drafted.impressions) == ("timestamp", "debiased_weight", None)
    assert drafted.events is not None
    assert drafted.events.weights == {"view": 1, "purchase": 3, "shared": 1}
    report = check(recipe)
    assert report.problems == []
    assert "300 of 330 rows lack a column 'debiased_weight': each weighs 1" in report.rows
    small = ["--set", "training.epochs=1", "--set", "training.batch_size=64", "--set", "evaluation.baselines=[]"]
    code, out, errors = run(capsys, "fit", recipe, "--out", tmp_path / "bundle", *small)
    assert code == 0, errors
    assert "each weighs 1" in out
    ids = pa.ipc.open_file(tmp_path / "bundle" / "labels.arrow").read_all()["label_id"]
    assert set(ids.to_pylist()) == {str(item) for item in range(20)}
