"""Check histories whose entries are outputs of the label tower."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.trainer.data.encode import Encoding
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny

ROWS = [(0, 0), (0, 1), (1, 2), (1, 1), (2, 1), (2, 3), (3, 4), (3, 5)]
LABELS = 7
"""Label 6 has no training pair."""

OF_TABLE = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4, "unknown_rate": 0}
OF_LABELS = {"name": "seen", "kind": "history", "entries": "label_tower", "dim": 4, "unknown_rate": 0}
BRAND = {"name": "brand", "kind": "id", "dim": 4}


def job(history: dict[str, Any], *, label: dict[str, Any] | None = None, **sections: Any) -> Any:
    features = {"features": [{**tiny.ITEM, "unknown_rate": 0}]} if label is None else label
    return tiny.recipe(query={"features": [history]}, label=features, **sections)


def data() -> Any:
    brands = pa.table({"item_id": [f"i{row}" for row in range(LABELS)], "brand": list("aabbccb")})
    return tiny.dataset(tiny.pairs(*ROWS), queries=4, labels=LABELS, ordered=True, label_table=brands)


def trained(recipe: Any, *, steps: int = 4) -> tuple[TwoTower, Encoding]:
    """A model after some steps of four pairs each, from weights that the tables' names decide."""
    dataset = data()
    model, encoding = tiny.model(recipe, dataset, batch_size=4), Encoding.fit(recipe, dataset)
    for name, table in sorted(model.tables.items()):
        rng = np.random.default_rng(len(name))
        table.table.assign(0.5 * rng.standard_normal(table.table.shape).astype(np.float32))
    model.begin_epoch()
    for step in range(steps):
        chosen = np.arange(4) + step
        inputs = encoding.query.pair_inputs(chosen, np.random.default_rng(step))
        labels = dataset.train.labels[chosen]
        model.train_step(inputs | {"_positive": labels, "_weight": np.ones(4, np.float32)})
    return model, encoding


def embed_histories(model: TwoTower, histories: list[list[int]]) -> np.ndarray:
    """Embeddings of histories by rows of the vocabulary, which are label rows + 1."""
    ids = np.zeros((len(histories), max(map(len, histories))), np.int32)
    weights = np.zeros(ids.shape, np.float32)
    for row, history in enumerate(histories):
        ids[row, : len(history)], weights[row, : len(history)] = history, 1
    return model.embed_queries({"seen": ids, "seen__weight": weights})


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_label_embeddings_of_plain_ids_equal_the_shared_table(similarity: str) -> None:
    """Two ways to the same sums and the same gradients: entries of the label tower are then rows of its table, divided
    by their norms under a cosine, which we leave out of the comparison by histories of one."""
    shared, _ = trained(job(OF_TABLE, model={"similarity": similarity}), steps=0)
    tower_model, _ = trained(job(OF_LABELS, model={"similarity": similarity}), steps=0)
    assert list(tower_model.tables) == ["item_id"]
    tower_model.embed_labels()
    histories = [[1], [5], [6]]
    np.testing.assert_allclose(embed_histories(tower_model, histories), embed_histories(shared, histories), rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_label_embeddings_have_the_gradient_of_the_shared_table(accumulate: int) -> None:
    sections = {"model": {"similarity": "dot"}, "training": {"accumulate": accumulate}}
    shared, _ = trained(job(OF_TABLE, **sections))
    tower_model, _ = trained(job(OF_LABELS, **sections))

    table = np.asarray(tower_model.tables["item_id"].table)
    np.testing.assert_allclose(table, np.asarray(shared.tables["item_id"].table), atol=1e-6)
    np.testing.assert_allclose(tower_model.embed_labels(), shared.embed_labels(), atol=1e-6)
    histories = [[1, 2], [0], [3, 4, 5]]
    np.testing.assert_allclose(
        embed_histories(tower_model, histories[::2]), embed_histories(shared, histories[::2]), atol=1e-6
    )
    assert not embed_histories(tower_model, histories)[1].any(), "an id that no label has says nothing"


def test_entries_both_adds_table_rows_to_label_embeddings() -> None:
    """As two histories of the same labels, one of either kind."""
    mine = {**OF_TABLE, "name": "mine", "table": "mine"}
    sections = {"model": {"similarity": "dot"}, "label": {"features": [{**tiny.ITEM, "unknown_rate": 0}, BRAND]}}
    two, _ = trained(tiny.recipe(query={"features": [OF_LABELS, mine], "combine": "sum"}, **sections))
    both, encoding = trained(
        tiny.recipe(query={"features": [{**OF_LABELS, "entries": "both", "table": "mine"}]}, **sections)
    )

    assert encoding.vocabularies["label-rows-mine"].ids.to_pylist() == [f"i{row}" for row in range(LABELS)]
    assert len(encoding.vocabularies["mine"].ids) == LABELS - 1
    assert list(both.tables) == ["mine", "item_id", "brand"]
    for name, table in both.tables.items():
        np.testing.assert_allclose(table.table, np.asarray(two.tables[name].table), atol=1e-6, err_msg=name)
    embedded, rows = embed_histories(both, [[1], [7], [0]]), np.asarray(both.tables["mine"].table)
    labels = both.embed_labels()
    np.testing.assert_allclose(embedded, [labels[0] + rows[1], labels[6] + rows[0], np.zeros(4)], atol=1e-6)


def test_history_entries_train_the_features_of_their_labels() -> None:
    """Label 0 is in histories of the first step and never a positive there; brand c is of labels 4 and 5 alone."""
    recipe = job(OF_LABELS, label={"features": [{**tiny.ITEM, "unknown_rate": 0}, BRAND], "combine": "sum"})
    before, encoding = trained(recipe, steps=0)
    start = {name: np.asarray(table.table).copy() for name, table in before.tables.items()}
    batch = {"seen": np.int32([[1, 0], [0, 0]]), "seen__weight": np.float32([[1, 0], [0, 0]])}
    positives = np.int32([2, 3])
    model = tiny.model(recipe, data(), batch_size=2)
    for name, table in model.tables.items():
        table.table.assign(start[name])
    model.train_step(batch | {"_positive": positives, "_weight": np.ones(2, np.float32)})

    moved = {name: (np.asarray(table.table) != start[name]).any(axis=1) for name, table in model.tables.items()}
    brands = encoding.vocabularies["brand"].ids.to_pylist()
    assert moved["item_id"].tolist() == [False, True, False, True, True, False, False]
    assert dict(zip(brands, moved["brand"][1:].tolist(), strict=True)) == {"a": True, "b": True, "c": False}


def test_features_distinguish_labels_without_pairs() -> None:
    recipe = job(OF_LABELS, label={"features": [tiny.ITEM, BRAND]})
    model, encoding = trained(recipe)
    assert encoding.vocabularies["label-rows"].ids.to_pylist() == [f"i{row}" for row in range(LABELS)]
    assert len(encoding.vocabularies["item_id"].ids) == LABELS - 1

    labels = model.embed_labels()
    np.testing.assert_allclose(embed_histories(model, [[7]])[0], labels[6], rtol=1e-5)


@pytest.mark.parametrize(("sampler", "copies"), [("in_batch", 0), ({"name": "model", "negatives": 2}, 1)])
def test_checkpoints_hold_label_embeddings_that_samplers_read(sampler: Any, copies: int) -> None:
    model = tiny.model(job(OF_LABELS, loss={"sampler": sampler}), data(), batch_size=4)
    (rows,) = model.towers.label_rows.values()
    assert sum(variable is rows.table for variable in model.variables) == copies
