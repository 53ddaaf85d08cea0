"""Clicks and purchases over shared towers: recipe → fit → index → HTTP, against NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from tests.end_to_end.commands import fitted_and_published, served

USERS, ITEMS = 30, 20
SHARES = {"click": 0.25, "purchase": 0.75}
RECIPE = """
name = "objectives"
[data]
train = "log.parquet"
query_id = "user_id"
label_id = "item_id"
events = { column = "event", weights = { view = 1, click = 2, purchase = 4 } }
split = { strategy = "random", valid = 0.1, test = 0.1 }
[objectives.click]
events = ["view", "click"]
[objectives.purchase]
events = ["purchase"]
weight = 3
[query]
features = [{ name = "user_id", kind = "id", dim = 4 }]
[label]
features = [{ name = "item_id", kind = "id", dim = 4 }]
hidden = [8]
[model]
dim = 4
label_bias = true
[training]
epochs = 2
batch_size = 64
[evaluation]
ks = [5]
metric = "recall@5"
exclude_seen = false
bootstrap = 10
bias_removal = [0, 1]
baselines = []
"""


def write_log(folder: Path) -> None:
    rng = np.random.default_rng(3)
    user = np.repeat(np.arange(USERS), 12)
    log = {
        "user_id": user,
        "item_id": np.minimum(rng.geometric(0.15, len(user)), ITEMS) - 1,
        "event": rng.choice(["view", "click", "purchase"], len(user), p=[0.5, 0.3, 0.2]),
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    (folder / "recipe.toml").write_text(RECIPE)


def test_http_scores_are_the_weighted_sum_of_the_objectives(tmp_path: Path) -> None:
    """s = Σ ŝ_o û_o·v / T + b + λ log ν + μ log π, from the arrays of weights.npz."""
    write_log(tmp_path)
    fitted_and_published(tmp_path)
    bundle = Bundle.load(tmp_path / "model")
    by_objective = json.loads((tmp_path / "model" / "metrics.json").read_text())["objectives"]
    assert {name: (each["share"], each["split"]) for name, each in by_objective.items()} == {
        name: (share, "test") for name, share in SHARES.items()
    }
    with np.load(tmp_path / "model" / "weights.npz") as weights:
        maps = {name: np.eye(4) + weights[f"query/0.ObjectiveMaps.{name}"] for name in SHARES}
        users = ["3", "17", "nobody"]
        rows = weights["tables/user_id"][bundle.vocabularies["user_id"].lookup_all(users)]
    assert all(np.abs(each - np.eye(4)).max() > 1e-4 for each in maps.values())
    mapped = {name: rows @ each for name, each in maps.items()}
    queries = sum(SHARES[name] * each / np.linalg.norm(each, axis=1)[:, None] for name, each in mapped.items())
    labels, dial = bundle.labels, bundle.manifest.bias_removal
    assert labels.log_popularity is not None
    assert labels.bias is not None
    expected = queries @ bundle.embeddings.T / bundle.manifest.temperature + labels.bias
    expected = expected + 0.5 * labels.log_pn + 0.25 * labels.log_popularity
    assert dial.noise.endswith(", of all objectives' pairs")

    asked = [{"features": {"user_id": user}, "k": ITEMS, "bias_removal": 0.5, "popularity": 0.25} for user in users]
    with served(tmp_path) as http:
        answer = http.post("/v1/retrieve", json={"queries": asked})
        noise = http.get("/v1/release").json()["bias_removal"]["noise"]

    assert noise == dial.noise
    for result, expected_L in zip(answer.json()["results"], expected, strict=True):
        found = {label["id"]: label["score"] for label in result["labels"]}
        wanted = dict(zip(labels.ids.to_pylist(), expected_L.tolist(), strict=True))
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
