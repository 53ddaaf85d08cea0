"""Check labels without training pairs and rare labels: rows that they read, training, and negatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.trainer.backend import ops
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny

HISTORY = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4, "unknown_rate": 0}
KIND = {"name": "kind", "kind": "id", "dim": 4}


def shop() -> Dataset:
    """i0 has three pairs, i1 two, i2 one, i3 none; every one is of a kind of its own."""
    rows = tiny.pairs((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0))
    return tiny.dataset(rows, queries=3, labels=4, label_table=pa.table({"kind": ["a", "b", "c", "d"]}))


def job(
    id_keys: dict[str, Any], *, described: bool = True, query: list[dict[str, Any]] | None = None, **more: Any
) -> Recipe:
    label = {"features": [tiny.ITEM | id_keys, *([KIND] if described else [])], "combine": "sum"}
    return tiny.recipe(label=label, query={"features": query or [tiny.USER]}, **more)


def test_rare_own_ids_read_row_0_in_towers_and_histories() -> None:
    encoding = Encoding.fit(job({"min_count": 2}, query=[tiny.USER, HISTORY]), shop())
    assert encoding.vocabularies["item_id"].ids.to_pylist() == ["i0", "i1"]
    assert encoding.label_inputs["item_id"].tolist() == [1, 2, 0, 0]
    # u1 took i0, i1 and i2. Its positive is in no history; i2 is, as row 0 with its weight.
    inputs = encoding.query.pair_inputs(np.array([2, 3, 4]), np.random.default_rng(0))
    assert (inputs["seen"] * inputs["seen__weight"]).astype(int).tolist() == [[0, 2, 0, 0], [1, 0, 0, 0], [1, 2, 0, 0]]
    assert inputs["seen__weight"].tolist() == [[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]]


def test_a_history_excludes_its_positive_by_label_not_by_row() -> None:
    encoding = Encoding.fit(job({"min_count": 3}, query=[tiny.USER, HISTORY]), shop())
    inputs = encoding.query.pair_inputs(np.array([4]), np.random.default_rng(0))
    assert (inputs["seen"].tolist(), inputs["seen__weight"].tolist()) == ([[1, 0, 0, 0]], [[1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("id_keys", "described", "rate"),
    [({}, True, 0.1), ({}, False, 0.0), ({"unknown_rate": 0}, True, 0), ({"unknown_rate": 0.5}, False, 0.5)],
)
def test_own_ids_become_unknown_if_labels_have_features(id_keys: dict[str, Any], described: bool, rate: float) -> None:
    recipe = job(id_keys, described=described)
    assert recipe.own_id is not None
    assert recipe.label_unknown_rate(recipe.own_id) == rate
    assert [recipe.label_unknown_rate(feature) for feature in recipe.label.features[1:]] == [0] * described


def moved(recipe: Recipe, table: str) -> tuple[list[bool], TwoTower]:
    """Which rows of a table two steps change."""
    data = shop()
    model = tiny.model(recipe, data, batch_size=6)
    before = ops.convert_to_numpy(model.tables[table].table).copy()
    for _ in range(2):
        model.train_step(tiny.batch(data.train, _pair=np.arange(6, dtype=np.int32)))
    return (ops.convert_to_numpy(model.tables[table].table) != before).any(axis=1).tolist(), model


@pytest.mark.slow
def test_unseen_labels_with_features_are_not_negatives() -> None:
    full = {"sampler": "full", "weight": "importance"}
    rows, model = moved(job({"unknown_rate": 0}, loss=full), "kind")
    assert rows == [False, True, True, True, False]
    assert len(np.unique(model.embed_labels().round(4), axis=0)) == 4
    # Nothing but its id is known of it: that nobody took it is all there is to learn.
    rows, model = moved(job({}, described=False, loss=full), "item_id")
    assert rows == [True, True, True, True]
