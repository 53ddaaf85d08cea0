"""Check the contrast with nearest neighbours: the neighbours, the loss of a step, and a gain in recall.

Legend: `B` batch, `K` neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from keras import ops, random
from pydantic import ValidationError

from longtail.bundle import Inputs
from longtail.trainer import backend
from longtail.trainer.config import Recipe
from longtail.trainer.config.loss import NeighboursConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.loss_terms.neighbours import NeighbourLoss, Neighbours, nearest_rows
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny

T, WEIGHT, B = 0.2, 0.5, 6
ROWS = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (4, 3), (4, 4), (5, 5)]
"""Queries 0 to 2 and labels 0 to 2 are near each other, 3 and 4 as well; query 5 and label 5 have nobody."""
DATA = tiny.dataset(tiny.pairs(*ROWS), queries=7, labels=7)
NEAR = {"k": 2, "temperature": T, "weight": WEIGHT}
BATCH = np.array([0, 3, 5, 7, 10, 2])
"""Pairs (0, 0), (1, 1), (2, 1), (3, 3), (5, 5) and (1, 0): label 0, label 1 and query 1 come twice."""


def sort_cosines(rows: np.ndarray, columns: np.ndarray, *, shape: tuple[int, int], k: int) -> list[list[int]]:
    """The dense matrix of cosines, sorted; NumPy."""
    ones = np.zeros(shape)
    ones[rows, columns] = 1
    norms = np.maximum(np.linalg.norm(ones, axis=1), 1)
    cosines = ones @ ones.T / norms / norms[:, None]
    np.fill_diagonal(cosines, 0)
    return [[int(at) for at in np.argsort(-row, kind="stable")[:k] if row[at] > 0] for row in cosines]


def test_nearest_labels_equal_the_dense_matrix() -> None:
    """Up to the order of equal cosines."""
    rng = np.random.default_rng(1)
    rows, columns = (rng.integers(0, size, 400).astype(np.int32) ** 2 // size for size in (60, 40))
    nearest = nearest_rows(rows, columns, shape=(61, 40), k=5)
    ones = np.zeros((61, 40))
    ones[rows, columns] = 1
    norms = np.maximum(np.linalg.norm(ones, axis=1), 1)
    cosines = ones @ ones.T / norms / norms[:, None]
    assert nearest.shape == (61, 5)
    for row, (mine, theirs) in enumerate(zip(nearest, sort_cosines(rows, columns, shape=(61, 40), k=5), strict=True)):
        listed = mine[mine >= 0]
        assert len(listed) == len(theirs) == len(set(listed))
        assert row not in listed
        np.testing.assert_allclose(cosines[row, listed], cosines[row, theirs], atol=1e-6)
    assert (nearest[60] == -1).all(), "no pair"
    assert (nearest_rows(rows, columns, shape=(61, 40), k=5) == nearest).all()


def test_the_nearest_are_of_the_training_pairs_alone() -> None:
    held_out = tiny.dataset(tiny.pairs(*ROWS), queries=7, labels=7, valid=tiny.pairs((5, 0), (6, 6)))
    nearest = Neighbours(NeighboursConfig(k=2), held_out, dict).nearest
    assert nearest["query"].tolist() == near_padded(DATA.train.queries, DATA.train.labels)
    assert nearest["label"].tolist() == near_padded(DATA.train.labels, DATA.train.queries)
    assert nearest["label"][:4].tolist() == [[1, 2], [0, 2], [1, 0], [4, -1]]
    assert set(Neighbours(NeighboursConfig(sides=("label",)), DATA, dict).nearest) == {"label"}


def near_padded(rows: np.ndarray, columns: np.ndarray) -> list[list[int]]:
    return [[*row, -1, -1][:2] for row in sort_cosines(rows, columns, shape=(7, 7), k=2)]


def test_every_neighbour_that_there_is_is_drawn_alike_often() -> None:
    nearest = Neighbours(NeighboursConfig(k=2), DATA, lambda rows_B: {"row": rows_B})
    rows = np.repeat([0, 7, 10], 4000)
    drawn = nearest.columns(rows, {}, np.random.default_rng(0))
    for column, expected in (("_neighbour", [{1, 2}, {4}, {5}]), ("_neighbour row", [{1, 2}, {4}, {5}])):
        for at, allowed in enumerate(expected):
            values, counts = np.unique(drawn[column][at * 4000 : (at + 1) * 4000], return_counts=True)
            assert set(values) == allowed, "those there are, or oneself"
            np.testing.assert_allclose(counts, 4000 / len(allowed), atol=4 * np.sqrt(1000))


def job(near: dict[str, Any] | None = NEAR, **sections: Any) -> Recipe:
    loss = {} if near is None else {"neighbours": near}
    return tiny.recipe(**{"training": {"batch_size": B}} | sections | {"loss": sections.get("loss", {}) | loss})


def build_model(recipe: Recipe, data: Dataset = DATA) -> TwoTower:
    model = tiny.model(recipe, data, batch_size=B)
    tiny.fill_tables(model)
    return model


def draw_batch(recipe: Recipe, data: Dataset = DATA, *, seed: int = 0) -> Inputs:
    """The pairs of `BATCH`, with weights of their own, and what is drawn of their neighbours."""
    encoding = Encoding.fit(recipe, data)
    query = encoding.query
    batch = query.pair_inputs(BATCH, np.random.default_rng(0))
    batch |= {"_positive": data.train.labels[BATCH], "_weight": np.float32([1, 2, 0.5, 1, 3, 1])}
    if encoding.audience is not None:
        batch["_own"] = encoding.audience.entry_ranges[BATCH]
    if recipe.loss.neighbours is not None:
        nearest = Neighbours(recipe.loss.neighbours, data, query.query_inputs)
        batch |= nearest.columns(BATCH, batch, np.random.default_rng(seed))
    return batch


def term(anchors: np.ndarray, neighbours: np.ndarray, ids: np.ndarray, near: list[list[int]]) -> list[float]:
    """METHODS §10.3, row by row."""
    anchors, neighbours = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (anchors, neighbours))
    losses = []
    for id_, anchor, neighbour in zip(ids, anchors, neighbours, strict=True):
        others = [at for at, other in enumerate(ids) if other != id_ and other not in near[id_]]
        total = np.exp(anchor @ neighbour / T) + sum(np.exp(anchor @ anchors[at] / T) for at in others)
        losses.append(-anchor @ neighbour / T + np.log(total) if near[id_] else 0.0)
    return losses


SEEN_FEATURE = {"name": "seen", "kind": "history", "entries": "both", "dim": 4, "damping": 2, "unknown_rate": 0}
BY = {"name": "by", "kind": "audience", "table": "user_id", "dim": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosines": ({}, {}),
    "inner products": ({}, {"model": {"dim": 4, "similarity": "dot", "temperature": 0.5}}),
    "queries alone": ({"sides": ["query"]}, {}),
    "labels alone": ({"sides": ["label"]}, {"model": {"dim": 4, "label_bias": True}}),
    "histories": ({}, {"query": {"features": [tiny.USER, SEEN_FEATURE]}}),
    "beside_audiences": ({}, {"label": {"features": [{**tiny.ITEM, "unknown_rate": 0}, BY], "combine": "sum"}}),
    "beside_logistic": (
        {},
        {"loss": {"family": "logistic", "sampler": {"name": "uniform", "negatives": 3, "shared": False}}},
    ),
    "beside_memory": ({}, {"loss": {"sampler": {"name": "cross_batch", "negatives": 3}}}),
    "beside_bilateral": ({}, {"loss": {"family": {"name": "bilateral_softmax", "power": 1.2}, "sampler": "full"}}),
    "beside_reweight": ({}, {"loss": {"reweight": 1.0}}),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("near", "sections"), CASES.values(), ids=CASES)
def test_a_step_s_loss_is_the_formula_s(near: dict[str, Any], sections: dict[str, Any]) -> None:
    """What is added to the same job's without, in NumPy. Two labels of the batch and a query come twice; audiences of
    the batch's labels are without the query that a label is to be found for, those of the neighbours are whole."""
    losses = []
    for recipe in (job(None, **sections), job(NEAR | near, **sections)):
        model, batch = build_model(recipe), draw_batch(recipe)
        labels = model.embed_labels()
        inputs = model.gather_label_inputs(batch["_positive"], random.SeedGenerator(0), batch.get("_own"))
        positives = ops.convert_to_numpy(model.towers.label(inputs))
        query = Encoding.fit(recipe, DATA).query
        anchors = model.embed_queries({name: column for name, column in batch.items() if name[0] != "_"})
        drawn = batch.get("_neighbour user_id", np.int32([1] * B)) - 1
        neighbours = model.embed_queries(query.query_inputs(drawn))
        columns = batch | {"_group": np.int32([0, 1, 2, 3, 4, 1])}
        tensors = {name: ops.convert_to_tensor(column) for name, column in columns.items()}
        losses.append(float(model.train_step(tensors)))
    pairs, expected = DATA.train.take(BATCH), np.zeros(B)
    assert recipe.loss.neighbours is not None
    if "query" in recipe.loss.neighbours.sides:
        of_query = sort_cosines(DATA.train.queries, DATA.train.labels, shape=(7, 7), k=2)
        is_near = {int(other) in of_query[query] for query, other in zip(pairs.queries, drawn, strict=True)}
        assert is_near == {True, False}
        expected += term(anchors, neighbours, pairs.queries, of_query)
    if "label" in recipe.loss.neighbours.sides:
        of_label = sort_cosines(DATA.train.labels, DATA.train.queries, shape=(7, 7), k=2)
        expected += term(positives, labels[batch["_neighbour"]], pairs.labels, of_label)
    weights = batch["_weight"].astype(np.float64)
    if recipe.loss.reweight:
        share = np.bincount(DATA.train.labels, minlength=7)
        pi = (share + 0.5) / (share + 0.5).sum()
        weights *= 1 / pi[pairs.labels] / np.sum(share / share.sum() / pi)
    assert losses[1] - losses[0] == pytest.approx(WEIGHT * np.mean(weights * expected), rel=2e-4)


@pytest.mark.usefixtures("eager")
def test_gradients_reach_the_neighbours_and_no_one_else_outside_of_the_batch() -> None:
    """With in-batch negatives, only rows of the batch and their neighbours move."""
    for side, table in (("query", "user_id"), ("label", "item_id")):
        moved = []
        for near in (None, NEAR | {"sides": [side]}):
            recipe = job(near, label={"features": [{**tiny.ITEM, "unknown_rate": 0}]})
            model = build_model(recipe)
            chosen = np.array([0, 10])
            query = Encoding.fit(recipe, DATA).query
            nearest = Neighbours(recipe.loss.neighbours or NeighboursConfig(), DATA, query.query_inputs)
            batch = tiny.batch(DATA.train.take(chosen))
            batch |= nearest.columns(chosen, batch, np.random.default_rng(0)) if near else {}
            before = ops.convert_to_numpy(model.tables[table].table).copy()
            model.train_step(batch)
            after = ops.convert_to_numpy(model.tables[table].table)
            moved.append(set(np.flatnonzero((after != before).any(axis=1)) - 1))
        assert moved[0] == {0, 5}
        drawn = int(batch["_neighbour user_id"][0] - 1 if side == "query" else batch["_neighbour"][0])
        assert drawn in {1, 2}
        assert moved[1] == {0, 5, drawn}


@pytest.mark.usefixtures("eager")
def test_a_batch_in_parts_is_a_step_of_each_part() -> None:
    """Rows of a part are contrasted with those of the same part; no draw of a step depends on the device's seed."""
    recipe = job(loss={"sampler": "full"})
    parts = job(loss={"sampler": "full"}, training={"batch_size": B, "accumulate": 2})
    batch = draw_batch(recipe)
    halves = [{name: column[at : at + 3] for name, column in batch.items()} for at in (0, 3)]
    expected = [float(build_model(recipe).train_step(half)) for half in halves]
    assert float(build_model(parts).train_step(batch)) == pytest.approx(np.mean(expected), rel=1e-5)


def test_an_embedding_of_length_0_has_a_gradient() -> None:
    both = ([[0, 0], [3, 4], [1, 0]], [[1, 0], [0, 1], [0, 0]])
    rows_BD = [ops.convert_to_tensor(np.float32(rows)) for rows in both]
    ids_B, near_BK = ops.convert_to_tensor(np.int32([0, 1, 2])), ops.convert_to_tensor(np.int32([[1], [2], [0]]))

    def loss(rows: list[Any]) -> tuple[Any, None]:
        return NeighbourLoss(T, 1.0)(*rows, ids_B, near_BK, ops.ones((3,))), None

    _, gradients, _ = backend.value_and_gradients(loss, rows_BD, [])
    largest = [float(np.abs(ops.convert_to_numpy(gradient)).max()) for gradient in gradients]
    assert 0 < max(largest) < 2 / T, "of a mean of three"


ENCODED = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4, "encoder": {"name": "sasrec"}}
OF_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "context": (
        {"query": {"features": [tiny.USER, {"name": "hour", "kind": "id", "dim": 4, "from": "row"}]}},
        "hour",
    ),
    "a sequence": (
        {
            "query": {"features": [tiny.USER, ENCODED]},
            "data": {"timestamp": "time"},
            "loss": {"sampler": {"name": "uniform", "negatives": 2}},
        },
        "seen",
    ),
    "versions": (
        {"data": {"queries": "users.parquet", "valid_from": "since", "timestamp": "time"}},
        "data.valid_from",
    ),
}


@pytest.mark.parametrize(("sections", "received"), OF_ROWS.values(), ids=OF_ROWS)
def test_queries_that_are_another_in_every_row_have_no_neighbours(sections: dict[str, Any], received: str) -> None:
    with pytest.raises(ValidationError, match=rf"sides includes 'query', .* {received}"):
        job(**sections)
    job(NEAR | {"sides": ["label"]}, **sections)
