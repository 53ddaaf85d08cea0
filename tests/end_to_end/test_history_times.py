"""When the entries of a history were: timestamps in Parquet → fit → index → HTTP, with both encoders in one tower."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.trainer.config import load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.bundle import evaluate
from tests.serving.process import server

pytestmark = [pytest.mark.process, pytest.mark.slow]

USERS, ITEMS = 30, 12
RECIPE = """
name = "times"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "at"
events = { column = "event", weights = { view = 1, purchase = 2 } }
split = { strategy = "leave_last_out" }
[query]
combine = "sum"
[[query.features]]
name = "seen"
kind = "history"
table = "item_id"
dim = 4
max_length = 6
encoder = { name = "hstu", layers = 1, time_buckets = 20 }
[[query.features]]
name = "bought"
kind = "history"
table = "item_id"
dim = 4
events = ["purchase"]
encoder = { name = "sasrec", layers = 1, time_buckets = 20 }
[label]
features = [{ name = "item_id", kind = "id", dim = 4 }]
[model]
dim = 4
[loss]
hits = "mask_known"
[optimizer]
embedding_learning_rate = 0.2
dense_learning_rate = 0.2
[training]
epochs = 3
batch_size = 40
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
bias_removal = [0, 1]
baselines = []
"""


@dataclass(frozen=True)
class Shop:
    """A release that is served, and what it was trained on."""

    root: Path
    http: httpx.Client
    dataset: Dataset
    bundle: Bundle
    encoding: Encoding

    def scores(self, features: dict[str, Any]) -> dict[str, float]:
        """Of every label, over HTTP."""
        query = {"features": features, "k": ITEMS, "bias_removal": 0, "popularity": 0}
        answer = self.http.post("/v1/retrieve", json={"queries": [query]})
        assert answer.status_code == 200, answer.text
        return {label["id"]: label["score"] for label in answer.json()["results"][0]["labels"]}

    def expected(self, inputs: dict[str, np.ndarray]) -> dict[str, float]:
        """The same of a row of tower inputs, multiplied in NumPy."""
        u_1D = ort.InferenceSession(self.bundle.query_tower).run(None, inputs)[0]
        scores_L = (u_1D @ self.bundle.embeddings.T)[0] / self.bundle.manifest.temperature
        return dict(zip(self.bundle.labels.ids.to_pylist(), scores_L.tolist(), strict=True))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root, rng = tmp_path_factory.mktemp("times"), np.random.default_rng(3)
    user = np.repeat(np.arange(USERS), 8)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    seconds = np.exp(rng.uniform(0, 15, len(user))) + rng.random(len(user))
    table = {
        "user_id": [f"u{each}" for each in user],
        "item_id": [f"i{each}" for each in rng.integers(0, ITEMS, len(user))],
        "at": [start + timedelta(seconds=float(each)) for each in seconds],
        "event": rng.choice(["view", "purchase"], len(user)),
    }
    pq.write_table(pa.table(table), root / "pairs.parquet")
    (root / "recipe.toml").write_text(RECIPE)

    def longtail(room: str, *words: object) -> None:
        subprocess.run([sys.executable, "-m", f"longtail.{room}", *map(str, words)], check=True)

    longtail("trainer", "fit", root / "recipe.toml", "--out", root / "model")
    longtail("index", "build", root / "model", "--releases", root / "releases", "--publish")
    recipe, bundle = load_recipe(root / "recipe.toml"), Bundle.load(root / "model")
    dataset = read_dataset(recipe)
    encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
    with server(root / "releases", root / "server.log") as running:
        running.wait_until_ready()
        with httpx.Client(base_url=running.url, timeout=30) as http:
            yield Shop(root, http, dataset, bundle, encoding)


def test_http_scores_are_numpys_with_times_and_without(shop: Shop) -> None:
    train, ids = shop.dataset.train, shop.dataset.label_ids.to_pylist()
    assert train.times is not None
    assert train.events is not None
    now = datetime.fromtimestamp(float(train.times.max()) / 1e6, UTC).isoformat()
    moved = []
    for row in range(6):
        features: dict[str, dict[str, Any]] = {}
        for name, chosen in (("seen", train.queries == row), ("bought", (train.queries == row) & (train.events == 1))):
            times = [datetime.fromtimestamp(at / 1e6, UTC).isoformat() for at in train.times[chosen]]
            features[name] = {"ids": [ids[label] for label in train.labels[chosen]], "times": times, "now": now}
        inputs = shop.encoding.query.of_queries(np.int32([row]))
        timed = shop.scores(features)
        assert timed == pytest.approx(shop.expected(inputs), rel=1e-4, abs=1e-4)
        unknown = {name: np.where(inputs[f"{name}__weight"] > 0, -1, 0).astype(np.int32) for name in features}
        untimed = shop.scores({name: value["ids"] for name, value in features.items()})
        expected = shop.expected(inputs | {f"{name}__time": ages for name, ages in unknown.items()})
        assert untimed == pytest.approx(expected, rel=1e-4, abs=1e-4)
        later = {name: value | {"now": "2026-12-01T00:00:00Z"} for name, value in features.items()}
        moved.append([
            max(abs(other[id_] - timed[id_]) for id_ in ids) for other in (untimed, shop.scores(later))
        ])  # fmt: skip
    assert (np.max(moved, axis=0) > 0.01).all(), "times matter"


def test_a_bundle_evaluates_as_its_training_did(shop: Shop) -> None:
    """Queries are asked when their held-out pair was chosen, by the trainer and from the bundle's files."""
    stored = shop.bundle.manifest.bias_removal
    again = evaluate(shop.bundle, shop.root / "recipe.toml", split=stored.curve_split)
    found = [{point.bias_removal: point.metrics["recall@5"].value for point in curve if point.popularity == 0}
             for curve in (stored.curve, again.curve)]  # fmt: skip
    assert found[0].keys() >= {0, 1}
    assert found[0] == pytest.approx(found[1])


BAD = {
    "a time that is no date": ({"ids": ["i1"], "times": [5]}, ".times.0", "received 5"),
    "times that fall": ({"ids": ["i1", "i2"], "times": ["2026-02-02", "2026-02-01"]}, ".times.1", "oldest first"),
    "fewer times than ids": ({"ids": ["i1", "i2"], "times": ["2026-02-02"]}, ".times", "received a list of 1"),
    "a request before its history": (
        {"ids": ["i1"], "times": ["2026-02-02"], "now": "2026-02-01"}, ".now", "no time before",
    ),
    "another key": ({"ids": [], "times": [], "weights": []}, ".weights", "expected one of ids, times, now"),
}  # fmt: skip


@pytest.mark.parametrize(("value", "part", "message"), BAD.values(), ids=BAD)
def test_a_bad_history_is_refused_with_its_place(shop: Shop, value: Any, part: str, message: str) -> None:
    answer = shop.http.post("/v1/retrieve", json={"queries": [{"features": {}}, {"features": {"seen": value}}]})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == f"queries.1.features.seen{part}"
    assert "expected" in error["message"]
    assert message in error["message"]


def test_the_release_says_what_a_history_takes(shop: Shop) -> None:
    answer = shop.http.get("/v1/release").json()
    assert "an object of such ids, as many times, each a date or time" in answer["query_features"][0]["expects"]
    assert shop.scores(answer["example"])
