"""The picture of the product that is looked at, by the product's id: Parquet → fit → index → HTTP → merge."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, Feature
from longtail.index import merge_labels, refused_features
from longtail.trainer.config import load_recipe
from longtail.trainer.data.dataset import load_dataset
from longtail.trainer.data.encode import Encoding
from tests.bundles import make_bundle
from tests.serving.process import server

pytestmark = [pytest.mark.process, pytest.mark.slow]

USERS, ITEMS, DIMS = 30, 20, 4
RECIPE = """
name = "looks"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
queries = "users.parquet"
labels = "items.parquet"
[query]
features = [
    { name = "seen", kind = "vector", dims = 4, of_label = "picture", from = "row" },
    { name = "last", kind = "vector", dims = 4, of_label = "picture", projection = 3 },
]
hidden = [8]
[label]
features = [
    { name = "item_id", kind = "id", dim = 4 },
    { name = "picture", kind = "vector", dims = 4 },
]
hidden = [8]
[model]
dim = 4
[training]
epochs = 2
batch_size = 60
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
"""
WITHOUT = 3
"""The item without a picture."""


@dataclass(frozen=True)
class Shop:
    """A release that is served, and the pictures it was trained on."""

    root: Path
    http: httpx.Client
    pictures: list[list[float] | None]

    def scores(self, *features: dict[str, Any]) -> list[dict[str, float]]:
        """Scores of the catalogue's labels for each query of one batch."""
        allow = [str(item) for item in range(ITEMS)]
        queries = [{"features": of, "k": ITEMS, "allow": allow, "bias_removal": 0} for of in features]
        answer = self.http.post("/v1/retrieve", json={"queries": queries})
        assert answer.status_code == 200, answer.text
        return [{label["id"]: label["score"] for label in result["labels"]} for result in answer.json()["results"]]

    def change(self, method: str, path: str, **content: Any) -> None:
        answer = self.http.request(method, path, **content)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root, rng = tmp_path_factory.mktemp("looks"), np.random.default_rng(3)
    pictures = [None if item == WITHOUT else rng.normal(size=DIMS).astype(np.float32).tolist() for item in range(ITEMS)]
    user, item = np.repeat(np.arange(USERS), 6), rng.integers(0, ITEMS, USERS * 6)
    seen = [None if at % 9 == 0 else str(one) for at, one in enumerate((item + 1) % ITEMS)]
    last = [str(one) for one in rng.integers(0, ITEMS, USERS - 1)] + ["gone"]
    pq.write_table(pa.table({"user_id": user, "item_id": item, "seen": seen}), root / "pairs.parquet")
    pq.write_table(pa.table({"user_id": range(USERS), "last": last}), root / "users.parquet")
    pq.write_table(
        pa.table({"item_id": range(ITEMS), "picture": pa.array(pictures, pa.list_(pa.float32()))}),
        root / "items.parquet",
    )
    (root / "recipe.toml").write_text(RECIPE)

    def longtail(room: str, *words: object) -> None:
        subprocess.run([sys.executable, "-m", f"longtail.{room}", *map(str, words)], check=True)

    longtail("trainer", "fit", root / "recipe.toml", "--out", root / "model")
    longtail("index", "build", root / "model", "--releases", root / "releases", "--publish")
    with server(root / "releases", root / "server.log") as running:
        running.wait_until_ready()
        with httpx.Client(base_url=running.url, timeout=30) as http:
            yield Shop(root, http, pictures)


def test_an_id_scores_as_its_vector_does_to_the_last_bit_also_beside_it(shop: Shop) -> None:
    items = [item for item in range(ITEMS) if item != WITHOUT]
    queries: list[dict[str, Any]] = []
    for item in items:
        queries += [{"seen": str(item), "last": item}, {"seen": shop.pictures[item], "last": shop.pictures[item]}]

    found = shop.scores(*queries)

    for by_id, by_value in zip(found[::2], found[1::2], strict=True):
        assert by_id == by_value
        assert len(by_id) == ITEMS
    assert len({tuple(scores.values()) for scores in found}) == len(items), "pictures tell queries apart"


def test_an_id_without_a_vector_is_a_missing_one(shop: Shop) -> None:
    absent, null, unknown, empty, huge, bare = shop.scores(
        {}, {"seen": None}, {"seen": "nobody"}, {"seen": ""}, {"seen": 10**30}, {"seen": str(WITHOUT)}
    )

    assert absent == null == unknown == empty == huge == bare


def test_http_scores_are_the_evaluation_s(shop: Shop) -> None:
    """What training and evaluation read of the columns, through the bundle's tower and NumPy."""
    recipe, bundle = load_recipe(shop.root / "recipe.toml"), Bundle.load(shop.root / "model")
    dataset = load_dataset(recipe.data, seed=recipe.seed, strings=recipe.string_columns, context=recipe.context_columns)
    encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
    asked = dataset.requests
    assert asked is not None
    assert asked.contexts is not None
    assert dataset.contexts is not None
    rows = np.arange(len(asked.queries), dtype=np.int32)
    embedded = ort.InferenceSession(bundle.query_tower).run(None, encoding.query.of_queries(rows))[0]
    expected = embedded @ bundle.embeddings.T / bundle.manifest.temperature
    last = dict(
        zip(
            *(pq.read_table(shop.root / "users.parquet")[name].to_pylist() for name in ("user_id", "last")), strict=True
        )
    )
    seen = dataset.contexts["seen"].take(pa.array(asked.contexts)).to_pylist()
    users = dataset.query_ids.take(pa.array(asked.queries)).to_pylist()
    queries = [{"seen": one, "last": last[int(user)]} for one, user in zip(seen, users, strict=True)]

    found = shop.scores(*queries[:60])

    labels = dataset.label_ids.to_pylist()
    for scores, expected_L in zip(found, expected, strict=False):
        assert scores == pytest.approx(dict(zip(labels, expected_L.tolist(), strict=True)), rel=1e-4, abs=1e-4)


BAD = {
    "another length": ([1, 2, 3], "", "expected a list of 4 finite numbers, or a label's id .* received a list of 3"),
    "ids": (["1", "2", "3", "4"], ".0", 'a finite number, received "1"'),
    "a truth": (True, "", "or a label's id .a string or an integer., received true"),
    "a fraction": (1.5, "", "or a label's id .* received 1.5"),
    "an object": ({"id": "1"}, "", "or a label's id .* received an object"),
}


@pytest.mark.parametrize(("value", "part", "message"), BAD.values(), ids=BAD)
def test_anything_else_is_refused(shop: Shop, value: Any, part: str, message: str) -> None:
    answer = shop.http.post(
        "/v1/retrieve", json={"queries": [{"features": {"last": "1"}}, {"features": {"seen": value}}]}
    )

    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == f"queries.1.features.seen{part}"
    assert re.search(message, error["message"]), error["message"]


def test_the_release_says_so_and_its_example_is_answered(shop: Shop) -> None:
    answer = shop.http.get("/v1/release").json()
    seen = answer["query_features"][0]
    assert (seen["kind"], seen["dims"]) == ("vector", DIMS)
    assert seen["expects"] == "a list of 4 finite numbers, or a label's id (a string or an integer)"
    assert answer["example"]["seen"] in {str(item) for item in range(ITEMS)}
    shop.scores(answer["example"])


def test_labels_that_change_while_serving_are_found_and_merged(shop: Shop) -> None:
    """Added with and without a picture, embedded anew with another, deleted, brought back; then as rows of a bundle."""
    new, other = [0.25, -1.0, 0.5, 2.0], [1.0, 1.0, -1.0, 0.125]
    labels = [
        {"id": "new", "features": {"picture": new}},
        {"id": "bare", "features": {"item_id": "bare"}},
        {"id": "7", "features": {"picture": other}},
    ]
    missing, before = shop.scores({}, {"seen": "5"})
    shop.change("POST", "/v1/labels", json={"labels": labels})
    shop.change("DELETE", "/v1/labels/5")
    ids = shop.scores({"seen": "new"}, {"seen": "bare"}, {"seen": "7"}, {"seen": "5"}, {})
    values = shop.scores({"seen": new}, {}, {"seen": other}, {}, {})
    assert ids == values
    assert set(ids[0]) == {str(item) for item in range(ITEMS)} - {"5"}
    shop.change("DELETE", "/v1/labels/new")
    gone, empty = shop.scores({"seen": "new"}, {})
    assert gone == empty
    shop.change("POST", "/v1/labels", json={"labels": [{"id": "5"}, {"id": "new", "features": {"picture": other}}]})
    again, added, by_value = shop.scores({"seen": "5"}, {"seen": "new"}, {"seen": other})
    assert (again["0"], added) == (before["0"], by_value)
    assert missing["0"] != before["0"]
    shop.change("DELETE", "/v1/labels/9")

    (changes,) = shop.root.rglob("labels.sqlite")
    merge_labels(shop.root / "model", changes, shop.root / "merged")
    merged = Bundle.load(shop.root / "merged")
    kept = dict(zip(merged.labels.ids.to_pylist(), merged.label_vectors["picture"], strict=True))
    assert kept["new"].tolist() == kept["7"].tolist() == other
    assert np.isnan(kept["bare"]).all()
    assert np.isnan(kept[str(WITHOUT)]).all()
    assert kept["4"].tolist() == shop.pictures[4]
    assert "9" not in kept


def test_a_release_that_takes_no_ids_is_not_published_over_one_that_does() -> None:
    seen = Feature(name="seen", kind="vector", dims=2, missing=None, of_label="picture")
    by_id, by_value = (
        make_bundle(labels=4).manifest.model_copy(update={"query_features": [seen.model_copy(update={"of_label": of})]})
        for of in ("picture", None)
    )

    assert refused_features(by_value, by_id) == []
    assert refused_features(by_id, by_value) == [
        "query feature 'seen': expected a list of 2 finite numbers, or a label's id (a string or an integer), as in "
        "the published release, found a list of 2 finite numbers"
    ]
