"""Small recipes, data sets and models that tests build in memory, and a whole job on disk."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from longtail.bundle import BiasRemoval
from longtail.trainer.config import Recipe, recipe_toml
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.loss_terms import build_loss_terms
from longtail.trainer.model.step import TrainStep
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.progress import Reporter
from longtail.trainer.train import train as train_towers
from longtail.trainer.trained import Trained

USER = {"name": "user_id", "kind": "id", "dim": 4, "unknown_rate": 0}
ITEM = {"name": "item_id", "kind": "id", "dim": 4}


def recipe(**sections: Any) -> Recipe:
    """Id towers of 4 dimensions over `user_id` and `item_id`; sections replace or extend the defaults."""
    defaults: dict[str, Any] = {
        "name": "tiny",
        "data": {"train": "train.parquet", "query_id": "user_id", "label_id": "item_id"},
        "query": {"features": [USER]},
        "label": {"features": [ITEM]},
        "model": {"dim": 4},
        "training": {"epochs": 1, "batch_size": 8},
        "evaluation": {"ks": [2], "metric": "recall@2", "bootstrap": 10},
    }
    merged = {
        name: defaults[name] | section if isinstance(section, dict) and name in defaults else section
        for name, section in (defaults | sections).items()
    }
    return Recipe.model_validate(merged)


def pairs(*rows: tuple[int, int], weights: Sequence[float] | None = None) -> Pairs:
    """(query row, label row) pairs in the given order."""
    table = np.array(rows, np.int32).reshape(-1, 2)
    return Pairs(table[:, 0], table[:, 1], None if weights is None else np.array(weights, np.float32))


def dataset(train: Pairs, *, queries: int, labels: int, ordered: bool = False, **more: Any) -> Dataset:
    """Queries `u0 …` and labels `i0 …`, with nothing held out unless given."""
    nothing = train.take(slice(0))
    columns = {"valid": nothing, "test": nothing, "query_table": None, "label_table": None} | more
    return Dataset(
        query_ids=pa.array([f"u{row}" for row in range(queries)]),
        label_ids=pa.array([f"i{row}" for row in range(labels)]),
        train=train.sorted(),
        ordered=ordered,
        **columns,
    )


def model(job: Recipe, data: Dataset, *, batch_size: int, total_steps: int = 100) -> TwoTower:
    """A fresh model of a job, and beside its own attributes those of its training step."""
    encoding = Encoding.fit(job, data)
    fresh = TwoTower(job, encoding, len(data.label_ids))
    visits_L = data.label_counts().astype(np.float64)
    step = TrainStep(
        fresh, visits_L, batch_size=batch_size, total_steps=total_steps, pairs=len(data.train),
        terms=build_loss_terms(job, data, encoding),
    )  # fmt: skip
    fresh.train_step, fresh.variables = step, step.variables
    fresh.sampler, fresh.begin_epoch = step.sampler, step.begin_epoch
    return fresh


def fill_tables(model: TwoTower) -> None:
    """Make the rows of a model's tables larger than fresh ones."""
    for seed, table in enumerate(model.tables.values()):
        table.table.assign(np.random.default_rng(seed).standard_normal(table.table.shape).astype(np.float32))


def record_output(width: int = 200) -> tuple[Reporter, io.StringIO]:
    """A reporter, and the text that it prints."""
    text = io.StringIO()
    return Reporter(Console(file=text, width=width)), text


def train(job: Recipe, data: Dataset, work: Path, *, epochs: int = 1) -> Trained:
    return train_towers(job, data, epochs=epochs, work=work, logs=work / "logs", reporter=record_output()[0])


def batch(rows: Pairs, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """A training batch of id towers: u0 has vocabulary row 1."""
    weights = np.ones(len(rows), np.float32) if rows.weights is None else rows.weights
    return {"user_id": rows.queries + 1, "_positive": rows.labels, "_weight": weights} | inputs


def clustered(*, users: int, items: int, per_user: int, seed: int) -> pa.Table:
    """Interactions `user_id`, `item_id`, `timestamp` of users who mostly keep to one of two halves of the items."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(users), per_user)
    half = (user % 2) ^ (rng.random(len(user)) < 0.1)
    item = (half * (items // 2) + np.minimum(rng.geometric(0.25, len(user)), items // 2) - 1).astype(np.int64)
    return pa.table({"user_id": user, "item_id": item, "timestamp": rng.permutation(len(user))})


RECIPE = """
name = "tiny"

[data]
train = "interactions.parquet"
query_id = "user_id"
label_id = "item_id"
timestamp = "timestamp"
labels = "items.parquet"
display = ["title"]
split = { strategy = "leave_last_out" }

[query]
combine = "sum"
features = [
    { name = "user_id", kind = "id", dim = 4 },
    { name = "history", kind = "history", table = "item_id", dim = 4, max_length = 8 },
]

[label]
combine = "sum"
features = [
    { name = "item_id", kind = "id", dim = 4 },
    { name = "genres", kind = "bag", separator = "|", dim = 4 },
]

[model]
dim = 4
label_bias = true

[training]
epochs = 3
batch_size = 32

[evaluation]
ks = [3, 5]
metric = "recall@5"
bias_removal = [0.0, 0.5, 1.0]
bootstrap = 10
baselines = []
"""


def read_curve(bundle: Path) -> BiasRemoval:
    """The curve in a bundle's `metrics.json`, which has baselines beside it."""
    content = json.loads((bundle / "metrics.json").read_text())
    return BiasRemoval.model_validate({name: content[name] for name in BiasRemoval.model_fields})


def write_recipe(folder: Path, **sections: Any) -> Path:
    """Write the recipe of `recipe`, with paths relative to the folder."""
    (folder / "recipe.toml").write_text(recipe_toml(recipe(**sections), folder))
    return folder / "recipe.toml"


def write_job(folder: Path, *, recipe: str = RECIPE) -> Path:
    """A recipe and its data in `folder`; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(clustered(users=40, items=16, per_user=8, seed=0), folder / "interactions.parquet")
    items = {
        "item_id": range(16),
        "title": [f"Title {item}" for item in range(16)],
        "genres": ["low|both" if item < 8 else "high|both" for item in range(16)],
    }
    pq.write_table(pa.table(items), folder / "items.parquet")
    (folder / "recipe.toml").write_text(recipe)
    return folder / "recipe.toml"
