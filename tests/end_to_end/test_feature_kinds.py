"""Vectors, dates, audiences and numbers of every transform, on both backends: Parquet → fit → index → HTTP.

The reference encodes by the trainer's columns and multiplies in NumPy; the service reads the request's JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset, load_dataset
from longtail.trainer.data.encode import Encoding
from tests.backends import environment
from tests.serving.process import server

USERS, ITEMS, DIMS = 40, 24, 6

RECIPE = """
name = "kinds"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "at"
events = { column = "event", weights = { view = 1, purchase = 2 } }
queries = "users.parquet"
labels = "items.parquet"
split = { strategy = "leave_last_out" }
[query]
features = [
    { name = "taste", kind = "vector", dims = 6, projection = 4, normalise = true, unknown_rate = 0.1 },
    { name = "joined", kind = "date", dim = 4 },
    { name = "income", kind = "number", transform = "log", missing = "flag" },
    { name = "visits", kind = "number", transform = "quantile", buckets = 4, dim = 4 },
    { name = "spent", kind = "number", transform = "log" },
    { name = "seen", kind = "history", table = "item_id", dim = 4, max_length = 4, half_life = 2, combiner = "sqrtn" },
    { name = "bought", kind = "history", entries = "both", dim = 4, events = ["purchase"], weights = "symmetric" },
    { name = "again", kind = "bag", table = "item_id", dim = 4, column = "recent", combiner = "attention" },
]
hidden = [8]
cross = 2
residual = true
layer_norm = true
[label]
features = [
    { name = "item_id", kind = "id", dim = 4, unknown_rate = 0.1 },
    { name = "image", kind = "vector", dims = 6, unknown_rate = 0.1 },
    { name = "released", kind = "date", dim = 4, parts = ["month", "age"] },
    { name = "price", kind = "number", missing = "flag" },
    { name = "stock", kind = "number", transform = "quantile", dim = 4 },
    { name = "buyers", kind = "audience", dim = 4, max_length = 3, weights = "symmetric", min_count = 4 },
]
hidden = [8]
cross = 1
residual = true
[model]
dim = 4
[training]
epochs = 1
batch_size = 80
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
bias_removal = [0, 1]
"""


def write_shop(folder: Path) -> None:
    rng = np.random.default_rng(5)

    def vectors(rows: int) -> list[list[float] | None]:
        return [None if row % 8 == 1 else rng.normal(size=DIMS).tolist() for row in range(rows)]

    def sometimes(values: Any, every: int) -> list[Any]:
        return [None if row % every == 2 else value for row, value in enumerate(values)]

    start = datetime(2026, 5, 1, 8, 30, 15, 250_000, UTC)
    users = {
        "user_id": [f"u{user}" for user in range(USERS)],
        "taste": pa.array(vectors(USERS), pa.list_(pa.float32(), DIMS)),
        "joined": sometimes([start + timedelta(hours=37 * user) for user in range(USERS)], 9),
        "income": sometimes(rng.lognormal(8, 1, USERS), 5),
        "visits": sometimes(rng.integers(0, 9, USERS).tolist(), 7),
        "spent": sometimes(rng.uniform(-5, 500, USERS), 6),
        "recent": [rng.choice(ITEMS, user % 4, replace=False).tolist() for user in range(USERS)],
    }
    items = {
        "item_id": list(range(ITEMS)),
        "image": pa.array(vectors(ITEMS), pa.list_(pa.float64())),
        "released": sometimes([date(2024, 2, 28) + timedelta(days=11 * item) for item in range(ITEMS)], 9),
        "price": sometimes(rng.uniform(1, 100, ITEMS), 7),
        "stock": rng.integers(0, 1000, ITEMS),
    }
    visits = np.repeat(np.arange(USERS), 6)
    pairs = {
        "user_id": [f"u{user}" for user in visits],
        "item_id": np.minimum(rng.geometric(0.12, len(visits)), ITEMS) - 1,
        "at": rng.integers(0, 10**6, len(visits)),
        "event": rng.choice(["view", "purchase"], len(visits), p=[0.7, 0.3]),
    }
    for name, table in {"users": users, "items": items, "pairs": pairs}.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    (folder / "recipe.toml").write_text(RECIPE)


@dataclass(frozen=True)
class Shop:
    """A release that is served, and what it was trained on."""

    root: Path
    http: httpx.Client
    recipe: Recipe
    dataset: Dataset
    bundle: Bundle
    encoding: Encoding

    def values(self, name: str) -> list[dict[str, Any]]:
        """Rows of a feature table as the JSON of requests, without the id."""
        rows = pq.read_table(self.root / f"{name}.parquet").to_pylist()
        named = {"recent": "again"}
        return [
            {
                named.get(key, key): at.isoformat() if isinstance(at, date) else at
                for key, at in row.items()
                if key[-2:] != "id"
            }
            for row in rows
        ]


@pytest.fixture(scope="module", params=["tensorflow", "jax"])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root = tmp_path_factory.mktemp(request.param)
    write_shop(root)

    def longtail(room: str, *words: object) -> None:
        command = [sys.executable, "-m", f"longtail.{room}", *map(str, words)]
        subprocess.run(command, check=True, env=os.environ | environment(request.param))

    longtail("trainer", "fit", root / "recipe.toml", "--out", root / "model")
    longtail("index", "build", root / "model", "--releases", root / "releases", "--publish")
    recipe, bundle = load_recipe(root / "recipe.toml"), Bundle.load(root / "model")
    dataset = load_dataset(recipe.data, seed=recipe.seed, strings=recipe.string_columns)
    encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
    with server(root / "releases", root / "server.log") as running:
        running.wait_until_ready()
        with httpx.Client(base_url=running.url, timeout=30) as http:
            yield Shop(root, http, recipe, dataset, bundle, encoding)


def scores(results: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{label["id"]: label["score"] for label in result["labels"]} for result in results]


def test_http_scores_are_numpys(shop: Shop) -> None:
    names = shop.dataset.query_ids.to_pylist()
    rows = np.array([names.index(f"u{user}") for user in range(USERS)], np.int32)
    inputs = shop.encoding.query.of_queries(rows)
    queries_BD = ort.InferenceSession(shop.bundle.query_tower).run(None, inputs)[0]
    expected_BL = queries_BD @ shop.bundle.embeddings.T / shop.bundle.manifest.temperature
    labels, train = shop.dataset.label_ids.to_pylist(), shop.dataset.train
    assert train.events is not None
    bought = train.events == 1

    def histories(chosen: np.ndarray) -> list[list[str]]:
        return [[labels[label] for label in train.labels[chosen & (train.queries == row)]] for row in rows]

    queries = [
        {"features": features | {"seen": seen, "bought": some}, "k": ITEMS, "bias_removal": 0, "popularity": 0}
        for features, seen, some in zip(
            shop.values("users"), histories(train.events >= 0), histories(bought), strict=True
        )
    ]

    answer = shop.http.post("/v1/retrieve", json={"queries": queries})

    assert answer.status_code == 200, answer.text
    for found, expected_L in zip(scores(answer.json()["results"]), expected_BL, strict=True):
        assert found == pytest.approx(dict(zip(labels, expected_L.tolist(), strict=True)), rel=1e-4, abs=1e-4)


def test_a_label_that_is_added_by_value_scores_as_numpy_says(shop: Shop) -> None:
    assert shop.bundle.label_tower is not None
    items = [3, 9, 11]
    names = shop.dataset.label_ids.to_pylist()
    rows = [names.index(str(item)) for item in items]
    audience, train = shop.encoding.audience, shop.dataset.train
    assert audience is not None
    inputs = {name: column[rows] for name, column in shop.encoding.label_inputs.items()}
    inputs |= audience.inputs(np.int32(rows))
    assert inputs["buyers__weight"].sum(axis=1).tolist() == [(train.labels == row).sum() for row in rows]
    assert inputs["image__missing"].tolist() == [0, 1, 0]
    users = shop.dataset.query_ids.to_pylist()
    features = [
        shop.values("items")[item] | {"buyers": [users[query] for query in np.sort(train.queries[train.labels == row])]}
        for item, row in zip(items, rows, strict=True)
    ]
    assert len(features[0]["buyers"]) > 3, "more than a training step draws"
    inputs["buyers"][1, 0], features[1]["buyers"][0] = 0, "nobody that training knew"
    unknown = inputs | {"item_id": np.zeros(3, np.int32)}
    labels_BD = ort.InferenceSession(shop.bundle.label_tower).run(None, unknown)[0]
    new = [{"id": f"new-{item}", "features": features[at]} for at, item in enumerate(items)]

    assert shop.http.post("/v1/labels", json={"labels": new}).status_code == 200
    asked = {"features": {"income": 900.5}, "k": 3, "allow": [label["id"] for label in new], "bias_removal": 0}
    answer = shop.http.post("/v1/retrieve", json={"queries": [asked | {"popularity": 0}]})

    inputs = {
        "taste": np.zeros((1, DIMS), np.float32), "taste__missing": np.ones(1, np.float32),
        "joined": np.zeros((1, 4), np.int32), "visits": np.zeros(1, np.int32),
        "income": np.float32([900.5]), "income__missing": np.zeros(1, np.float32),
        "spent": np.float32([shop.encoding.query_features[4].missing]),
        "seen": np.zeros((1, 1), np.int32), "seen__weight": np.zeros((1, 1), np.float32),
        "bought": np.zeros((1, 1), np.int32), "bought__weight": np.zeros((1, 1), np.float32),
        "again": np.zeros((1, 1), np.int32), "again__weight": np.zeros((1, 1), np.float32),
    }  # fmt: skip
    query = ort.InferenceSession(shop.bundle.query_tower).run(None, inputs)[0][0]
    expected = labels_BD @ query / shop.bundle.manifest.temperature
    assert scores(answer.json()["results"])[0] == pytest.approx(
        {f"new-{item}": float(score) for item, score in zip(items, expected, strict=True)}, rel=1e-4, abs=1e-4
    )


BAD = {
    "a vector of another length": ("taste", [1, 2, 3], "", "a list of 6 finite numbers, received a list of 3"),
    "a vector of words": ("taste", [1, 2, "3", 4, 5, 6], ".2", 'a finite number, received "3"'),
    "a vector of a null": ("taste", [1, 2, 3, None, 5, 6], ".3", "a finite number, received null"),
    "a vector beyond float32": ("taste", [1, 2, 3, 4, 5, 1e39], ".5", "float32 can hold, received 1e+39"),
    "a vector of an integer that is no float": ("taste", [10**400, 2, 3, 4, 5, 6], ".0", "an integer of 401 digits"),
    "a number for a vector": ("taste", 4, "", "a list of 6 finite numbers, received 4"),
    "a date of another form": ("joined", "1 May 2026", "", 'ISO 8601, such as "2026-11-22T08:30:00Z", received "1 May'),
    "a number for a date": ("joined", 1_777_624_215, "", "received 1777624215"),
    "a word for a number": ("income", "high", "", 'a finite number, received "high"'),
    "a truth for a range": ("visits", True, "", "a finite number, received true"),
}


@pytest.mark.parametrize(("name", "value", "part", "message"), BAD.values(), ids=BAD)
def test_a_bad_value_is_refused_with_its_feature(shop: Shop, name: str, value: Any, part: str, message: str) -> None:
    answer = shop.http.post("/v1/retrieve", json={"queries": [{"features": {}}, {"features": {name: value}}]})

    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == f"queries.1.features.{name}{part}"
    assert "expected" in error["message"]
    assert message in error["message"]


def test_a_bad_value_of_a_new_label_is_refused(shop: Shop) -> None:
    labels = [{"id": "bad", "features": {"released": "2026-02-30"}}]
    error = shop.http.post("/v1/labels", json={"labels": labels}).json()["error"]
    assert error["field"] == "labels.0.features.released"
    assert 'received "2026-02-30"' in error["message"]


def test_the_release_says_what_each_kind_expects(shop: Shop) -> None:
    answer = shop.http.get("/v1/release").json()
    said = {feature["name"]: (feature["kind"], feature["dims"]) for feature in answer["query_features"]}
    assert said["taste"] == ("vector", DIMS)
    assert said["joined"] == ("date", None)
    assert answer["query_features"][0]["expects"] == "a list of 6 finite numbers"
    asked = shop.http.post("/v1/retrieve", json={"queries": [{"features": answer["example"]}]})
    assert asked.status_code == 200
