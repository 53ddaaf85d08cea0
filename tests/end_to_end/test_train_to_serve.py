"""The whole road by its commands, once, with every kind of feature: Parquet → fit → index → serve → HTTP → merge.

The reference is the Keras model with the weights that the bundle keeps, fed by the trainer's own columns; the service
reads the JSON of requests. Equal answers prove that encoding, export, index and service all mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.index import merge_labels
from longtail.trainer.config import load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.bundle import evaluate
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.warm_start import WarmStart
from tests.end_to_end.commands import fitted_and_published, served
from tests.trainer.conftest import KERAS_VARIABLES_PREDATE_NUMPY_2
from tests.trainer.page import registered, restore_tables, write_package

pytestmark = pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2)

USERS, ITEMS, ROWS, DIMS = 30, 24, 340, 6
START = datetime(2026, 1, 1, 8, 30, 15, 250_000, UTC)
TIERS = ("basic", "gold", "past")
WORDS = ("red", "Green", "blue", "wide", "small", "old")
WITHOUT = 9
"""The item without a picture."""

RECIPE = """
name = "every-feature"
[data]
train = "log.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "at"
events = { column = "event", weights = { view = 1, purchase = 2 } }
impressions = "shown"
queries = "users.parquet"
valid_from = "since"
labels = "items.parquet"
display = ["title"]
split = { strategy = "temporal" }
[query]
features = [
    { name = "user_id", kind = "id", dim = 8, min_count = 4 },
    { name = "tier", kind = "id", dim = 4 },
    { name = "taste", kind = "vector", dims = 6, projection = 4, normalise = true, unknown_rate = 0.1 },
    { name = "joined", kind = "date", dim = 4 },
    { name = "income", kind = "number", transform = "log", missing = "flag" },
    { name = "visits", kind = "number", transform = "quantile", buckets = 4, dim = 4 },
    { name = "interests", kind = "bag", dim = 4, max_length = 3, combiner = "sqrtn" },
    { name = "again", kind = "bag", table = "item_id", dim = 8, column = "recent", combiner = "attention" },
    { name = "about", kind = "text", dim = 4, hash_rows = 70000, max_length = 3, combiner = "sum" },
    { name = "seen", kind = "history", table = "item_id", dim = 8, max_length = 6, encoder = { name = "hstu", layers = 1 } },
    { name = "bought", kind = "history", table = "item_id", dim = 8, events = ["purchase"], encoder = { name = "sasrec", layers = 1, smoothing = [0.5, 1.0] } },
    { name = "recently", kind = "history", entries = "both", dim = 8, max_length = 4, half_life = 2, combiner = "sqrtn", weights = "symmetric" },
    { name = "device", from = "row", kind = "id", dim = 4 },
    { name = "hour", from = "row", kind = "cyclic", period = 24, missing = "flag" },
    { name = "searched", column = "words", from = "row", kind = "text", dim = 4, hash_rows = 64 },
]
hidden = [16]
[label]
tower = "gated"
features = [
    { name = "item_id", kind = "id", dim = 8, unknown_rate = 0.1 },
    { name = "title", kind = "text", dim = 4 },
    { name = "genres", kind = "bag", dim = 4, separator = "|" },
    { name = "picture", kind = "vector", dims = 6 },
    { name = "released", kind = "date", dim = 4 },
    { name = "price", kind = "number", missing = "flag" },
    { name = "stock", kind = "number", transform = "quantile", dim = 4 },
    { name = "month", kind = "cyclic", period = 12 },
    { name = "buyers", kind = "audience", dim = 4, max_length = 3, weights = "symmetric", min_count = 4 },
]
[model]
dim = 8
label_bias = true
learn_temperature = true
[loss]
impressions = 0.5
weight = "tail"
hits = "mask_known"
[optimizer]
embedding_learning_rate = 0.1
dense_learning_rate = 0.02
[training]
epochs = 2
batch_size = 64
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
bias_removal = [0.0, 1.0]
baselines = []
"""  # noqa: E501


def sometimes(values: Any, every: int) -> list[Any]:
    """The values, some of them missing."""
    return [None if row % every == 2 else value for row, value in enumerate(values)]


def write_shop(folder: Path) -> None:
    rng = np.random.default_rng(5)
    users = [user for user in range(USERS) for _ in TIERS]  # a row for each time that one changed
    rows = len(users)
    tables: dict[str, dict[str, Any]] = {}
    tables["users"] = {
        "user_id": [f"u{user}" for user in users],
        "since": [START + timedelta(hours=at % 3 * 150 + user) for at, user in enumerate(users)],
        "tier": list(TIERS * USERS),
        "taste": pa.array(sometimes(rng.normal(size=(rows, DIMS)).tolist(), 8), pa.list_(pa.float32(), DIMS)),
        "joined": sometimes([START + timedelta(hours=37 * at) for at in range(rows)], 9),
        "income": sometimes(rng.lognormal(8, 1, rows), 5),
        "visits": sometimes(rng.integers(0, 9, rows).tolist(), 7),
        "interests": pa.array(
            [
                [(word, float(rng.uniform(0.2, 2))) for word in rng.choice(WORDS, at % 5, replace=False)]
                for at in range(rows)
            ],
            pa.map_(pa.string(), pa.float32()),
        ),
        "recent": [rng.choice(ITEMS, at % 4, replace=False).tolist() for at in range(rows)],
        "about": [" ".join(rng.choice(WORDS, rng.integers(0, 6))) for _ in range(rows)],
    }
    pictures = rng.normal(size=(ITEMS + 1, DIMS)).astype(np.float32).tolist()
    pictures[WITHOUT] = None
    tables["items"] = {
        "item_id": range(ITEMS + 1),  # nobody has taken the last one
        "title": [f"The {WORDS[item % 6]} thing, no. {item}" for item in range(ITEMS + 1)],
        "genres": ["|".join(rng.choice(["a", "b", "c"], rng.integers(1, 4), replace=False)) for _ in range(ITEMS + 1)],
        "picture": pa.array(pictures, pa.list_(pa.float32())),
        "released": sometimes([date(2024, 2, 28) + timedelta(days=11 * item) for item in range(ITEMS + 1)], 9),
        "price": sometimes(rng.uniform(1, 100, ITEMS + 1), 7),
        "stock": rng.integers(0, 1000, ITEMS + 1),
        "month": sometimes([item % 12 for item in range(ITEMS + 1)], 8),
    }
    tables["log"] = {
        "user_id": [f"u{user}" for user in rng.integers(0, USERS, ROWS)],
        "item_id": np.minimum(rng.geometric(0.12, ROWS), ITEMS) - 1,
        "at": [START + timedelta(hours=float(hours)) for hours in rng.permutation(ROWS)],
        "event": rng.choice(["view", "purchase"], ROWS, p=[0.7, 0.3]),
        "shown": [rng.choice(ITEMS, rng.integers(0, 6), replace=False).tolist() for _ in range(ROWS)],
        "device": [None if row % 17 == 0 else ["phone", "web", "tv"][row % 3] for row in range(ROWS)],
        "hour": [None if row % 13 == 0 else float(row % 24) for row in range(ROWS)],
        "words": [["red shoe", "hat", "", "green hat small"][row % 4] for row in range(ROWS)],
    }
    for name, table in tables.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    (folder / "recipe.toml").write_text(RECIPE)


@dataclass(frozen=True)
class TrainedShop:
    """A release that is served, what it was trained on, and the Keras model that it was exported from."""

    root: Path
    http: httpx.Client
    dataset: Dataset
    bundle: Bundle
    encoding: Encoding
    model: TwoTower

    def request(self, at: int) -> dict[str, Any]:
        """The features of one way to ask, as a client would write them, from the files."""
        requests, train, ids = self.dataset.requests, self.dataset.train, self.dataset.label_ids.to_pylist()
        query, version = int(requests.queries[at]), int(requests.attributes[at])
        id_, users = self.dataset.query_ids[query].as_py(), pq.read_table(self.root / "users.parquet").to_pylist()
        is_known = version < len(users)
        user = users[3 * int(id_[1:]) + version % 3] if is_known else dict.fromkeys(users[0])
        context = self.dataset.contexts.slice(int(requests.contexts[at]), 1).to_pylist()[0]
        user |= {"user_id": id_, "again": user.pop("recent"), "since": None}
        user |= {"joined": user["joined"] and user["joined"].isoformat(), "interests": dict(user["interests"] or {})}
        context["searched"] = context.pop("words")
        for name, chosen in (("seen", train.events >= 0), ("bought", train.events == 1)):
            chosen = chosen & (train.queries == query)
            user[name] = [ids[label] for label in train.labels[chosen]]
        del user["since"]
        return user | context | {"recently": user["seen"]}

    def scores(self, *features: dict[str, Any], **more: Any) -> list[dict[str, float]]:
        """Scores by label of queries over HTTP."""
        every = {"k": ITEMS + 1, "bias_removal": 0, "popularity": 0, "exclude_history": False}
        queries = [{"features": of, **every, **more} for of in features]
        answer = self.http.post("/v1/retrieve", json={"queries": queries})
        assert answer.status_code == 200, answer.text
        return [{label["id"]: label["score"] for label in result["labels"]} for result in answer.json()["results"]]

    def change(self, method: str, path: str, **content: Any) -> None:
        answer = self.http.request(method, path, **content)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedShop]:
    root = tmp_path_factory.mktemp("shop")
    write_shop(root)
    write_package(root / "site")
    with pytest.MonkeyPatch.context() as patched, restore_tables():
        patched.syspath_prepend(root / "site")
        # A trial of own layers takes a third of the job: test_own_layers.py has it.
        patched.setattr("longtail.trainer.job.try_own_layers", lambda _: None)
        fitted_and_published(root)
    with restore_tables():
        registered()
        recipe, bundle = load_recipe(root / "recipe.toml"), Bundle.load(root / "model")
        dataset = read_dataset(recipe)
        encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
        model = TwoTower(recipe, encoding, len(dataset.label_ids))
        assert WarmStart.read(root / "model").carry_over(model, encoding.vocabularies, dataset.label_ids).skipped == {}
        with served(root) as http:
            yield TrainedShop(root, http, dataset, bundle, encoding, model)


@pytest.mark.parametrize("bias_removal", [-0.5, 0.0, 0.4, 1.0])
def test_http_scores_are_the_trained_models_row_by_row(shop: TrainedShop, bias_removal: float) -> None:
    requests, labels = shop.dataset.requests, shop.bundle.labels
    rows = np.arange(0, len(requests.queries), 10, dtype=np.int32)
    versions = requests.attributes[rows]
    assert len({int(version_id) % 3 for version_id in versions if version_id < 3 * USERS}) == 3, (
        "attributes of every time"
    )
    assert (versions == 3 * USERS).any(), "and missing ones"
    queries_BD = np.asarray(shop.model.embed_queries(shop.encoding.query.query_inputs(rows)), np.float64)
    expected_BL = queries_BD @ np.asarray(shop.model.embed_labels()).T / shop.bundle.manifest.temperature
    expected_BL += bias_removal * labels.log_pn + labels.bias

    scores_B = shop.scores(*(shop.request(int(row)) for row in rows), bias_removal=bias_removal)

    for scores, expected_L in zip(scores_B, expected_BL, strict=True):
        expected_scores = dict(zip(labels.ids.to_pylist(), expected_L.tolist(), strict=True))
        assert scores == pytest.approx(expected_scores, rel=1e-4, abs=1e-4)
        assert list(scores) == sorted(scores, key=lambda id_: -scores[id_])
    assert len({tuple(scores.values()) for scores in scores_B}) == len(scores_B), "features tell queries apart"


def test_missing_features_are_the_unknown_of_training(shop: TrainedShop) -> None:
    features = {"user_id": "u1", "tier": "gold", "recently": ["3"]}
    spelt_out = {"device": "a watch, never seen", "searched": "", "about": "", "interests": {}, "again": [], "seen": []}
    missing, unknown, is_known = shop.scores(
        features, features | spelt_out, features | {"device": "web", "searched": "green hat"}
    )
    assert missing == unknown
    assert missing != is_known
    (stranger,) = shop.scores({"user_id": "nobody", "seen": ["nothing"]})
    assert len(stranger) == ITEMS + 1


def test_added_label_has_the_score_of_the_model(shop: TrainedShop) -> None:
    items, names, train = [3, WITHOUT, 11], shop.dataset.label_ids.to_pylist(), shop.dataset.train
    rows = [names.index(str(item)) for item in items]
    inputs = {name: column[rows] for name, column in shop.encoding.label_inputs.items()}
    inputs |= shop.encoding.audience.inputs(np.int32(rows))
    assert inputs["buyers__weight"].sum(axis=1).tolist() == [(train.labels == row).sum() for row in rows]
    table, users = pq.read_table(shop.root / "items.parquet").to_pylist(), shop.dataset.query_ids.to_pylist()
    new = []
    for item, row in zip(items, rows, strict=True):
        features = {name: value for name, value in table[item].items() if name != "item_id"}
        features |= {"released": str(features["released"]) if features["released"] else None}
        features["genres"] = features["genres"].split("|")
        features["buyers"] = [users[query] for query in np.sort(train.queries[train.labels == row])]
        new.append({"id": f"new-{item}", "features": features})
    assert len(new[0]["features"]["buyers"]) > 3, "more than a training step draws"
    inputs["buyers"][1, 0], new[1]["features"]["buyers"][0] = 0, "nobody that training knew"
    labels_CD = np.asarray(shop.model.towers.label(inputs | {"item_id": np.zeros(3, np.int32)}))
    query_D = np.asarray(shop.model.embed_queries(shop.encoding.query.query_inputs(np.int32([7]))))[0]

    shop.change("POST", "/v1/labels", json={"labels": new})
    (scores_by_id,) = shop.scores(shop.request(7), allow=[label["id"] for label in new])

    expected = labels_CD @ query_D / shop.bundle.manifest.temperature
    differences = {
        id_: scores_by_id[id_] - score for id_, score in zip((label["id"] for label in new), expected, strict=True)
    }
    assert max(differences.values()) - min(differences.values()) < 1e-4, "but for the bias of a label without pairs"
    for label in new:
        shop.change("DELETE", f"/v1/labels/{label['id']}")


BAD: dict[str, tuple[str, Any, str, str]] = {
    "a vector of another length": ("taste", [1, 2, 3], "", "a list of 6 finite numbers, received a list of 3"),
    "a vector of words": ("taste", [1, 2, "3", 4, 5, 6], ".2", 'a finite number, received "3"'),
    "a vector beyond float32": ("taste", [1, 2, 3, 4, 5, 1e39], ".5", r"float32 can hold, received 1e\+39"),
    "a vector of an integer that is no float": ("taste", [10**400, 2, 3, 4, 5, 6], ".0", "an integer of 401 digits"),
    "a date of another form": ("joined", "1 May 2026", "", 'ISO 8601, such as "2026-.*", received "1 May'),
    "a word for a number": ("income", "high", "", 'a finite number, received "high"'),
    "a word for a kind of one's own": ("hour", "noon", "", 'a finite number, received "noon"'),
    "a history with weights": ("seen", {"1": 2.0}, "", "expected a list of ids"),
}


@pytest.mark.parametrize(("name", "value", "part", "message"), BAD.values(), ids=BAD)
def test_a_bad_value_is_refused_with_its_feature(
    shop: TrainedShop, name: str, value: Any, part: str, message: str
) -> None:
    answer = shop.http.post("/v1/retrieve", json={"queries": [{"features": {}}, {"features": {name: value}}]})

    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == f"queries.1.features.{name}{part}"
    assert "expected" in error["message"]
    assert re.search(message, error["message"]), error["message"]


def test_release_route_describes_feature_kinds(shop: TrainedShop) -> None:
    response = shop.http.get("/v1/release")
    assert len(response.content) < 5_000 < len(shop.http.get("/v1/release?include=curve").content)
    answer = response.json()
    features_by_name = {feature["name"]: feature for feature in answer["query_features"]}
    assert (features_by_name["taste"]["kind"], features_by_name["taste"]["dims"]) == ("vector", DIMS)
    assert features_by_name["taste"]["expects"] == "a list of 6 finite numbers"
    assert features_by_name["hour"]["kind"] == "number"
    assert shop.scores(answer["example"])
    label = shop.http.get(f"/v1/labels/{ITEMS}").json()
    assert (label["display"], label["count"], label["bucket"]) == ({"title": "The red thing, no. 24"}, 0, "new")


def test_bundle_records_data_and_reproduces_metrics(shop: TrainedShop) -> None:
    manifest = shop.bundle.manifest
    assert manifest.bias_removal.noise == "π of the draws, not of the impressions"
    own_software = {name: value for name, value in manifest.software.items() if " " in name}
    assert own_software.keys() == {"tower gated", "feature cyclic"}
    assert own_software["feature cyclic"].startswith("shop.layers:cyclic of shop 1.0 ")
    assert "about" in shop.bundle.tables, "a table of a mebibyte lies beside its tower"
    stored, again = evaluate(shop.bundle), evaluate(shop.bundle, shop.root / "recipe.toml")
    for at in (0.0, 1.0):
        assert again.value("recall@5", bias_removal=at) == pytest.approx(stored.value("recall@5", bias_removal=at))


def test_labels_that_change_while_serving_are_found_and_merged(shop: TrainedShop) -> None:
    """Added with and without a picture, embedded again with another, deleted, brought back; then rows of a bundle."""
    first, other = [0.25, -1.0, 0.5, 2.0, 0.0, 1.0], [1.0, 1.0, -1.0, 0.125, 0.5, 0.0]
    labels = [{"id": "new", "features": {"picture": first}}, {"id": "bare", "features": {"price": 3}},
              {"id": "7", "features": {"picture": other}}]  # fmt: skip
    (before,) = shop.scores({"user_id": "u1"})
    shop.change("POST", "/v1/labels", json={"labels": labels})
    shop.change("DELETE", "/v1/labels/5")
    (changed,) = shop.scores({"user_id": "u1"})
    assert {"new", "bare"} < changed.keys()
    assert "5" not in changed
    assert (changed["0"], changed["7"] == before["7"]) == (before["0"], False)
    shop.change("DELETE", "/v1/labels/new")
    assert "new" not in shop.scores({"user_id": "u1"})[0]
    shop.change("POST", "/v1/labels/restore", json={"ids": ["5"]})
    shop.change("POST", "/v1/labels", json={"labels": [{"id": "new", "features": {"picture": other}}]})
    (again,) = shop.scores({"user_id": "u1"})
    assert again["5"] == before["5"]
    assert again["new"] != changed["new"]
    shop.change("DELETE", "/v1/labels/8")

    merge_labels(shop.root / "model", shop.root / "releases" / ".state", shop.root / "merged")
    merged = Bundle.load(shop.root / "merged")
    assert {"new", "bare"} <= {*merged.labels.ids.to_pylist()}
    assert "8" not in merged.labels.ids.to_pylist()
    assert merged.tables.keys() == shop.bundle.tables.keys()
