"""A tower and feature kinds of one's own, of a package that only the trainer has, on both backends: fit → index → HTTP.

The reference is the Keras model itself, with the weights that the bundle keeps; no ONNX is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.trainer.config import load_recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.warm_start import WarmStart
from tests.backends import environment
from tests.end_to_end.commands import fitted_and_published, served
from tests.trainer.conftest import KERAS_VARIABLES_PREDATE_NUMPY_2
from tests.trainer.page import registered, tables_as_they_are, write_package

pytestmark = pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2)

USERS, ITEMS = 40, 24
RECIPE = """
name = "own"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "at"
labels = "items.parquet"
split = { strategy = "leave_last_out" }
[query]
tower = { name = "gated", experts = 2, width = 6 }
features = [
    { name = "user_id", kind = "id", dim = 4 },
    { name = "hour", kind = "cyclic", period = 24, from = "row", missing = "flag" },
    { name = "seen", kind = "self_attention", table = "item_id", dim = 4, max_length = 4 },
]
[label]
tower = "gated"
features = [
    { name = "item_id", kind = "id", dim = 4 },
    { name = "month", kind = "cyclic", period = 12 },
]
[model]
dim = 4
[training]
epochs = 1
batch_size = 40
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
bias_removal = [0, 1]
"""


def write_shop(folder: Path) -> None:
    rng = np.random.default_rng(5)
    visits = np.repeat(np.arange(USERS), 6)
    pairs = {
        "user_id": [f"u{user}" for user in visits],
        "item_id": np.minimum(rng.geometric(0.12, len(visits)), ITEMS) - 1,
        "hour": [None if at % 9 == 4 else int(at) % 24 for at in rng.integers(0, 24, len(visits))],
        "at": rng.integers(0, 10**6, len(visits)),
    }
    items = {"item_id": range(ITEMS), "month": [None if item % 8 == 3 else item % 12 for item in range(ITEMS)]}
    for name, table in {"pairs": pairs, "items": items}.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    (folder / "recipe.toml").write_text(RECIPE)


@dataclass(frozen=True)
class Shop:
    """A release that is served, its bundle, and the Keras model that it was exported from."""

    http: httpx.Client
    bundle: Bundle
    model: TwoTower

    def rows(self, table: str, ids: list[str]) -> list[int]:
        found: list[int] = self.bundle.vocabularies[table].encode(pa.array(ids, pa.string())).tolist()
        return found

    def scores(self, queries: list[dict[str, Any]], labels_CD: np.ndarray) -> np.ndarray:
        """Of queries as requests have them, against embeddings of labels, [B, C]."""
        found = []
        for query in queries:
            seen = query.get("seen", [])[-4:]
            inputs = {
                "user_id": np.int32(self.rows("user_id", [query.get("user_id", "nobody")])),
                "hour": np.float32([query.get("hour", 0)]),
                "hour__missing": np.float32(["hour" not in query]),
                "seen": np.int32([self.rows("item_id", seen) or [0]]),
                "seen__weight": np.float32([[1] * len(seen) or [0]]),
            }
            found.append(self.model.embed_queries(inputs)[0] @ labels_CD.T / self.bundle.manifest.temperature)
        return np.array(found)

    def asked(self, queries: list[dict[str, Any]], **more: Any) -> list[dict[str, float]]:
        asked = [{"features": query, "k": ITEMS, "bias_removal": 0, "popularity": 0} | more for query in queries]
        answer = self.http.post("/v1/retrieve", json={"queries": asked})
        assert answer.status_code == 200, answer.text
        return [{label["id"]: label["score"] for label in result["labels"]} for result in answer.json()["results"]]


@pytest.fixture(scope="module", params=["tensorflow", "jax"])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root = tmp_path_factory.mktemp(request.param)
    write_shop(root)
    write_package(root / "site")
    precision = "mixed_bfloat16" if request.param == "jax" else "float32"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(root / "site"))
        for name, value in environment(request.param).items():
            patched.setenv(name, value)
        fitted_and_published(root, "--set", f"training.precision={precision}")
    with tables_as_they_are():
        registered()
        recipe, bundle = load_recipe(root / "recipe.toml"), Bundle.load(root / "model")
        dataset = read_dataset(recipe)
        encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
        model = TwoTower(recipe, encoding, len(dataset.label_ids))
    carried = WarmStart.read(root / "model").carry_over(model, encoding.vocabularies, dataset.label_ids)
    assert carried.left == {}
    with served(root) as http:
        yield Shop(http, bundle, model)


QUERIES = [
    {"user_id": "u3", "hour": 23, "seen": ["1", "2", "5"]},
    {"user_id": "u3", "hour": 23, "seen": ["5", "1", "2"]},
    {"user_id": "u7", "hour": 11.5},
    {"seen": ["9", "9", "never", "1", "2", "3"]},
    {},
]


def test_http_scores_are_keras_s(shop: Shop) -> None:
    labels = shop.bundle.labels.ids.to_pylist()
    expected_BL = shop.scores(QUERIES, shop.model.embed_labels())

    for found, expected_L in zip(shop.asked(QUERIES), expected_BL, strict=True):
        assert found == pytest.approx(dict(zip(labels, expected_L.tolist(), strict=True)), rel=1e-4, abs=1e-4)
    assert np.abs(expected_BL[0] - expected_BL[1]).max() > 1e-3, "the order of a history counts"


def test_a_label_added_by_value_is_embedded_by_the_own_tower(shop: Shop) -> None:
    months = [0, 11.5]
    given = [{"id": f"new-{month}", "features": {"month": month}} for month in months]
    assert shop.http.post("/v1/labels", json={"labels": given}).status_code == 200

    (found,) = shop.asked(QUERIES[:1], k=2, allow=[label["id"] for label in given])
    inputs = {"item_id": np.zeros(2, np.int32), "month": np.float32(months)}
    (expected,) = shop.scores(QUERIES[:1], np.asarray(shop.model.towers.label(inputs)))
    assert found == pytest.approx(
        {f"new-{month}": score for month, score in zip(months, expected, strict=True)}, abs=1e-4
    )


def test_the_release_and_its_refusals_are_of_what_is_read(shop: Shop) -> None:
    said = {feature["name"]: feature["kind"] for feature in shop.http.get("/v1/release").json()["query_features"]}
    assert said == {"user_id": "id", "hour": "number", "seen": "history"}
    answer = shop.http.post("/v1/retrieve", json={"queries": [{"features": {"hour": "noon"}}]})
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == "queries.0.features.hour"
    assert 'a finite number, received "noon"' in answer.json()["error"]["message"]


def test_the_manifest_says_where_the_rows_are_from(shop: Shop) -> None:
    own = {name: where for name, where in shop.bundle.manifest.software.items() if " " in name}
    assert own.keys() == {"tower gated", "feature cyclic", "feature self_attention"}
    assert own["feature cyclic"].startswith("shop.layers:cyclic of shop 1.0 ")
