"""The whole road by its commands: Parquet → fit → index → serve → HTTP, with every kind of feature.

The reference encodes queries by the trainer's columns, the service by the request's JSON: equal answers
prove that both mean the same.
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
from longtail.trainer.data.dataset import load_dataset
from longtail.trainer.data.encode import Encoding
from tests.end_to_end.commands import fitted_and_published, served

USERS, ITEMS = 40, 30
WORDS = ("red", "Green", "blue", "wide", "small", "old")

RECIPE = """
name = "every-feature"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "at"
weight = "strength"
queries = "users.parquet"
labels = "items.parquet"
display = ["title"]
split = { strategy = "leave_last_out" }
[query]
features = [
    { name = "user_id", kind = "id", dim = 8, min_count = 4 },
    { name = "country", kind = "id", dim = 4 },
    { name = "history", kind = "history", dim = 8, table = "item_id", max_length = 4 },
    { name = "interests", kind = "bag", dim = 4, max_length = 3, combiner = "sqrtn" },
    { name = "about", kind = "text", dim = 4, hash_rows = 64, max_length = 3, combiner = "sum" },
    { name = "age", kind = "number" },
]
hidden = [16]
[label]
features = [
    { name = "item_id", kind = "id", dim = 8 },
    { name = "title", kind = "text", dim = 4 },
    { name = "genres", kind = "bag", dim = 4, separator = "|" },
    { name = "price", kind = "number" },
]
hidden = [16]
[model]
dim = 8
label_bias = true
learn_temperature = true
[loss]
weight = "tail"
sampler = { name = "mixed", negatives = 16 }
[training]
epochs = 3
batch_size = 32
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
"""


def write_shop(folder: Path) -> None:
    rng = np.random.default_rng(5)
    interests = [
        [(word, float(rng.uniform(0.2, 2))) for word in rng.choice(WORDS, rng.integers(0, 5), replace=False)]
        for _ in range(USERS)
    ]
    pq.write_table(
        pa.table(
            {
                "user_id": [f"u{user}" for user in range(USERS)],
                "country": [None if user % 9 == 0 else ["de", "fr", "it"][user % 3] for user in range(USERS)],
                "interests": pa.array(interests, pa.map_(pa.string(), pa.float32())),
                "about": [" ".join(rng.choice(WORDS, rng.integers(0, 6))) for _ in range(USERS)],
                "age": [None if user % 7 == 0 else float(rng.integers(18, 80)) for user in range(USERS)],
            }
        ),
        folder / "users.parquet",
    )
    pq.write_table(
        pa.table(
            {
                "item_id": list(range(ITEMS + 2)),
                "title": [f"The {WORDS[item % 6]} thing, no. {item}" for item in range(ITEMS + 2)],
                "genres": [
                    "|".join(rng.choice(["a", "b", "c"], rng.integers(1, 4), replace=False)) for _ in range(ITEMS + 2)
                ],
                "price": rng.uniform(1, 100, ITEMS + 2),
            }
        ),
        folder / "items.parquet",
    )
    visits = rng.integers(2, 12, USERS)
    users = np.repeat(np.arange(USERS), visits)
    pq.write_table(
        pa.table(
            {
                "user_id": [f"u{user}" for user in users],
                "item_id": np.minimum(rng.geometric(0.12, len(users)), ITEMS) - 1,
                "at": rng.integers(0, 10**6, len(users)),
                "strength": rng.uniform(0.5, 2, len(users)),
            }
        ),
        folder / "pairs.parquet",
    )
    (folder / "recipe.toml").write_text(RECIPE)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shop")
    write_shop(root)
    fitted_and_published(root)
    return root


@pytest.fixture(scope="module")
def client(shop: Path) -> Iterator[httpx.Client]:
    with served(shop) as http:
        yield http


def raw_features(shop: Path, user: int, history: list[str]) -> dict[str, Any]:
    row = pq.read_table(shop / "users.parquet").slice(user, 1).to_pylist()[0]
    return row | {"interests": dict(row["interests"]), "history": history}


@pytest.mark.parametrize("bias_removal", [-0.5, 0.0, 0.4, 1.0])
def test_http_answers_are_the_trained_models(shop: Path, client: httpx.Client, bias_removal: float) -> None:
    recipe = load_recipe(shop / "recipe.toml")
    dataset, bundle = (
        load_dataset(recipe.data, seed=recipe.seed, strings=recipe.string_columns),
        Bundle.load(shop / "model"),
    )
    features = Encoding.fit(recipe, dataset, dict(bundle.vocabularies)).query
    users = list(range(0, USERS, 3))
    rows = np.array([dataset.query_ids.to_pylist().index(f"u{user}") for user in users], np.int32)
    queries_BD = ort.InferenceSession(bundle.query_tower).run(None, features.of_queries(rows))[0].astype(np.float64)
    manifest, labels = bundle.manifest, bundle.labels
    assert labels.bias is not None
    expected_BL = queries_BD @ bundle.embeddings.T.astype(np.float64) / manifest.temperature
    expected_BL += bias_removal * labels.log_pn + labels.bias

    train = dataset.train
    names = dataset.label_ids.to_pylist()
    queries = [
        {
            "features": raw_features(shop, user, [names[label] for label in train.labels[train.queries == row]]),
            "k": len(names),
            "bias_removal": bias_removal,
        }
        for user, row in zip(users, rows, strict=True)
    ]
    answer = client.post("/v1/retrieve", json={"queries": queries})
    assert answer.status_code == 200, answer.text

    row_of = {id_: row for row, id_ in enumerate(labels.ids.to_pylist())}
    for result, expected_L in zip(answer.json()["results"], expected_BL, strict=True):
        found = [(row_of[label["id"]], label["score"]) for label in result["labels"]]
        assert sorted(row for row, _ in found) == list(range(len(names)))
        np.testing.assert_allclose([score for _, score in found], np.sort(expected_L)[::-1], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            [expected_L[row] for row, _ in found], np.sort(expected_L)[::-1], rtol=1e-4, atol=1e-4
        )


def test_answers_carry_the_users_columns(client: httpx.Client) -> None:
    answer = client.get("/v1/labels/31").json()
    assert answer["display"] == {"title": "The Green thing, no. 31"}
    assert answer["bucket"] == "new", "a label that was never interacted with is in the catalogue"
    assert answer["count"] == 0


def test_a_stranger_gets_an_answer(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/retrieve", json={"queries": [{"features": {"user_id": "nobody", "history": ["nothing"]}}]}
    )
    assert [len(result["labels"]) for result in answer.json()["results"]] == [10]
