"""Context, attributes as of a time and impressions by the real commands: log → fit → index → serve → HTTP.

The reference scores are NumPy's, of embeddings that the bundle's query tower computes of the trainer's own columns.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.end_to_end.commands import fitted_and_published, served

USERS, ITEMS, ROWS = 30, 20, 400
TIERS = ("basic", "gold", "past")
RECIPE = """
name = "context"
[data]
train = "log.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "at"
impressions = "shown"
queries = "users.parquet"
valid_from = "since"
split = { strategy = "temporal" }
[query]
features = [
    { name = "user_id", kind = "id", dim = 8 },
    { name = "tier", kind = "id", dim = 4 },
    { name = "history", kind = "history", dim = 8, table = "item_id", max_length = 4 },
    { name = "device", from = "row", kind = "id", dim = 4 },
    { name = "hour", from = "row", kind = "number" },
    { name = "searched", column = "words", from = "row", kind = "text", dim = 4, hash_rows = 64 },
]
hidden = [16]
[label]
features = [{ name = "item_id", kind = "id", dim = 8 }]
[model]
dim = 8
[loss]
impressions = 0.5
[training]
epochs = 3
batch_size = 32
[evaluation]
ks = [5]
metric = "recall@5"
bias_removal = [0.0, 1.0]
bootstrap = 10
"""


def write_log(folder: Path) -> None:
    rng = np.random.default_rng(8)
    user = rng.integers(0, USERS, ROWS)
    words = ["red shoe", "hat", "", "green hat small"]
    table = {
        "user_id": [f"u{each}" for each in user],
        "item_id": np.minimum(rng.geometric(0.15, ROWS), ITEMS) - 1,
        "at": pa.array(rng.permutation(ROWS) * 3600 + 1_700_000_000, pa.timestamp("s")),
        "shown": [rng.choice(ITEMS, rng.integers(0, 6), replace=False).tolist() for _ in range(ROWS)],
        "device": [None if row % 17 == 0 else ["phone", "web", "tv"][row % 3] for row in range(ROWS)],
        "hour": [None if row % 13 == 0 else float(row % 24) for row in range(ROWS)],
        "words": [words[row % 4] for row in range(ROWS)],
    }
    pq.write_table(pa.table(table), folder / "log.parquet")
    versions = {
        "user_id": [f"u{each}" for each in range(USERS) for _ in TIERS],
        "since": pa.array(
            [1_700_000_000 + 3600 * (at * 150 + each) for each in range(USERS) for at in range(3)], pa.timestamp("s")
        ),
        "tier": list(TIERS * USERS),
    }
    pq.write_table(pa.table(versions), folder / "users.parquet")
    (folder / "recipe.toml").write_text(RECIPE)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("context")
    write_log(root)
    fitted_and_published(root)
    return root


@pytest.fixture(scope="module")
def client(shop: Path) -> Iterator[httpx.Client]:
    with served(shop) as http:
        yield http


def requested(dataset: Dataset, asking: int) -> dict[str, Any]:
    """The features of one way to ask, as a client would write them, from the files."""
    asked, train = dataset.requests, dataset.train
    assert asked is not None
    assert asked.attributes is not None
    assert asked.contexts is not None
    assert dataset.contexts is not None
    query = int(asked.queries[asking])
    user = dataset.query_ids[query].as_py()
    context = dataset.contexts.slice(int(asked.contexts[asking]), 1).to_pylist()[0]
    version = int(asked.attributes[asking]) % 3 if asked.attributes[asking] < 3 * USERS else None
    labels = train.labels[train.queries == query]
    return {
        "user_id": user,
        "tier": None if version is None else TIERS[version],
        "history": [dataset.label_ids[int(label)].as_py() for label in labels],
        "device": context["device"],
        "hour": context["hour"],
        "searched": context["words"],
    }


@pytest.mark.parametrize("bias_removal", [0.0, 1.0])
def test_http_answers_are_the_trained_model_s_row_by_row(shop: Path, client: httpx.Client, bias_removal: float) -> None:
    recipe, bundle = load_recipe(shop / "recipe.toml"), Bundle.load(shop / "model")
    dataset = read_dataset(recipe)
    encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies))
    assert dataset.requests is not None
    request_rows = np.arange(0, len(dataset.requests.queries), 10, dtype=np.int32)
    assert dataset.requests.attributes is not None
    assert len(set(dataset.requests.attributes[request_rows] % 3)) == 3, "attributes of every time, and missing ones"
    queries_BD = ort.InferenceSession(bundle.query_tower).run(None, encoding.query.of_queries(request_rows))[0]
    expected_BL = queries_BD.astype(np.float64) @ bundle.embeddings.T / bundle.manifest.temperature
    expected_BL += bias_removal * bundle.labels.log_pn

    queries = [
        {"features": requested(dataset, int(asking)), "k": ITEMS, "bias_removal": bias_removal}
        for asking in request_rows
    ]
    answer = client.post("/v1/retrieve", json={"queries": queries})
    assert answer.status_code == 200, answer.text
    rows = {id_: row for row, id_ in enumerate(bundle.labels.ids.to_pylist())}
    for result, expected_L in zip(answer.json()["results"], expected_BL, strict=True):
        scores_L = np.empty(ITEMS)
        scores_L[[rows[label["id"]] for label in result["labels"]]] = [label["score"] for label in result["labels"]]
        np.testing.assert_allclose(scores_L, expected_L, rtol=1e-4, atol=1e-4)


def test_what_is_missing_of_a_context_is_what_training_calls_unknown(shop: Path, client: httpx.Client) -> None:
    bundle = Bundle.load(shop / "model")
    (hour,) = (feature.missing for feature in bundle.manifest.query_features if feature.name == "hour")
    given = {"user_id": "u1", "tier": "gold", "history": ["3"]}
    spelt_out = given | {"device": "a watch, never seen", "hour": hour, "searched": ""}
    with_context = given | {"device": "web", "hour": 3, "searched": "green hat"}
    answer = client.post(
        "/v1/retrieve", json={"queries": [{"features": each} for each in (given, spelt_out, with_context)]}
    )
    missing, unknown, known = (result["labels"] for result in answer.json()["results"])
    assert missing == unknown
    assert missing != known

    refused = client.post("/v1/retrieve", json={"queries": [{"features": given | {"hour": "late"}}]})
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "queries.0.features.hour"


def test_the_bundle_says_what_it_was_trained_on_and_measures_the_same_again(shop: Path) -> None:
    bundle = Bundle.load(shop / "model")
    assert bundle.manifest.bias_removal.noise == "π of the draws, not of the impressions"
    stored, again = evaluate(bundle), evaluate(bundle, shop / "recipe.toml")
    for at in (0.0, 1.0):
        assert again.value("recall@5", bias_removal=at) == pytest.approx(stored.value("recall@5", bias_removal=at))
