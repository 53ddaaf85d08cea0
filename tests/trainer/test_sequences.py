"""Check sequence encoders: packed and padded histories, attention masks, training and export."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keras import ops
from pydantic import ValidationError

from longtail.trainer.config import Recipe
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.export.onnx import dump_towers
from longtail.trainer.job import fit
from longtail.trainer.model.sequences import AttentionMask, PackedHistories, Smoothing
from tests.trainer import tiny

ENCODERS = ["sasrec", "smoothed", "hstu"]
HSTU_ALWAYS = [pytest.param("sasrec", marks=pytest.mark.nightly), "hstu"]
LABELS = 9


def history(name: str, *, dropout: float = 0.0, **more: Any) -> dict[str, Any]:
    encoder = {"name": name, "layers": 2, "heads": 2, "dropout": dropout}
    if name == "smoothed":
        encoder |= {"name": "sasrec", "smoothing": [0.5, 1.0]}
    return {
        "name": "history", "kind": "history", "table": "item_id", "dim": 4, "max_length": 6, "unknown_rate": 0,
        "encoder": encoder, **more,
    }  # fmt: skip


def job(feature: dict[str, Any], *others: dict[str, Any], **sections: Any) -> Any:
    sections = {"data": {"timestamp": "time"}, "loss": {"sampler": "full", "weight": "unit"}} | sections
    return tiny.recipe(query={"features": [feature, *others], "combine": "sum"}, **sections)


def data(*, lengths: tuple[int, ...] = (1, 4, 6, 2, 3)) -> Any:
    rng = np.random.default_rng(0)
    rows = [(query, int(label)) for query, n in enumerate(lengths) for label in rng.integers(0, LABELS, n)]
    return tiny.dataset(tiny.pairs(*rows), queries=len(lengths), labels=LABELS, ordered=True)


def scatter_weights(model: Any) -> Any:
    """The model with weights that make every part of it matter."""
    rng = np.random.default_rng(1)
    for variable in [*(table.table for table in model.tables.values()), *model.dense_variables]:
        variable.assign(0.7 * rng.standard_normal(variable.shape).astype(np.float32))
    return model


def convert_to_tensors(*columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """What a compiled step makes of a batch, and one that is not would not."""
    return {name: ops.convert_to_tensor(values) for group in columns for name, values in group.items()}


def embed_batch(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    with PackedHistories().context(model.towers.query, batch):
        return np.asarray(model.towers.query({name: batch[name] for name in model.towers.query.input}))


@pytest.mark.parametrize("name", [*HSTU_ALWAYS, "smoothed"])
def test_one_pass_over_packed_histories_is_a_pass_for_every_pair(name: str) -> None:
    """Also of pairs in any order, of a part of a query's, and of queries without a history yet."""
    recipe, dataset = job(history(name), tiny.USER), data()
    model, encoding = scatter_weights(tiny.model(recipe, dataset, batch_size=4)), Encoding.fit(recipe, dataset)

    def of(rows: np.ndarray, *, packed: bool) -> np.ndarray:
        return embed_batch(model, encoding.query.pair_inputs(rows, np.random.default_rng(0), packed=packed))

    for rows in (np.arange(16), np.array([9, 3, 15, 10, 0]), np.array([0, 1])):
        one_by_one = np.concatenate([of(row[None], packed=False) for row in rows])
        np.testing.assert_allclose(of(rows, packed=False), one_by_one, atol=2e-5)
        np.testing.assert_allclose(of(rows, packed=True), one_by_one, atol=2e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_entry_attends_only_to_earlier_entries(name: str) -> None:
    recipe, dataset = job(history(name)), data()
    model, encoding = scatter_weights(tiny.model(recipe, dataset, batch_size=4)), Encoding.fit(recipe, dataset)
    batch = encoding.query.pair_inputs(np.arange(16), np.random.default_rng(0), packed=True)
    before = embed_batch(model, batch)
    slot = int(batch["_history__last"][8])  # the third entry of query 2, pairs 5 to 10
    changed = batch["history"].copy()
    changed.flat[slot] = 1 + changed.flat[slot] % LABELS
    moved = np.abs(embed_batch(model, batch | {"history": changed}) - before).max(axis=1) > 1e-4
    np.testing.assert_array_equal(np.flatnonzero(moved), [8, 9, 10])


def test_smoothing_adds_means_of_the_entries_so_far() -> None:
    """Two histories in a block: entries (8, 4), (2, 10), (5, 1), and (3, 7); then an empty place."""
    layer = Smoothing(2, [0.5, 1.0], name="smoothing")
    layer.gains.assign(np.array([[1.0, 2.0], [10.0, 20.0]]))
    mask = AttentionMask.build(
        ops.convert_to_tensor([[1, 1, 1, 2, 0]]), ops.convert_to_tensor([[0, 1, 2, 0, 0]]), with_previous=False
    )
    x_SPD = np.array([[[8, 4], [2, 10], [5, 1], [3, 7], [9, 9]]], np.float32)
    expected = [
        [11 * 8, 22 * 4],
        [(2 + 8 / 2) / 1.5 + 10 * 5, 2 * (10 + 4 / 2) / 1.5 + 20 * 7],
        [(5 + 2 / 2 + 8 / 4) / 1.75 + 10 * 5, 2 * (1 + 10 / 2 + 4 / 4) / 1.75 + 20 * 5],
        [11 * 3, 22 * 7],
        [0, 0],
    ]
    np.testing.assert_allclose(np.asarray(layer(ops.convert_to_tensor(x_SPD), mask))[0], expected, rtol=1e-5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", HSTU_ALWAYS)
def test_a_packed_step_is_a_step_of_padded_rows(name: str) -> None:
    """The same loss and the same updates of tables and layers: every place is trained, each by its own pair."""
    recipe, dataset = job(history(name), optimizer={"embeddings": "sgd", "dense": "sgd"}), data()
    encoding, after = Encoding.fit(recipe, dataset), []
    rows = np.array([5, 6, 7, 8, 12, 13, 14, 1])
    for packed in (True, False):
        model = scatter_weights(tiny.model(recipe, dataset, batch_size=len(rows)))
        batch = encoding.query.pair_inputs(rows, np.random.default_rng(0), packed=packed)
        labels = {"_positive": dataset.train.labels[rows], "_weight": np.ones(len(rows), np.float32)}
        loss = float(model.train_step(convert_to_tensors(batch, labels, {"_pair": rows.astype(np.int32)})))
        after.append(
            [loss, *(np.asarray(variable) for variable in [model.tables["item_id"].table, *model.dense_variables])]
        )
    for packed_variable, padded_variable in zip(*after, strict=True):
        np.testing.assert_allclose(packed_variable, padded_variable, atol=2e-5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", HSTU_ALWAYS)
def test_a_batch_in_parts_is_a_step_of_the_whole(name: str) -> None:
    """Parts are not packed; gradients of positions and distances, which a part reads some of, add up."""
    dataset, after, rows = data(), [], np.array([5, 6, 7, 8, 12, 13, 14, 1])
    for parts in (1, 2):
        training = {"accumulate": parts, "batch_size": 8}
        recipe = job(history(name), training=training, optimizer={"embeddings": "sgd", "dense": "sgd", "l2": 0.01})
        encoding, model = Encoding.fit(recipe, dataset), scatter_weights(tiny.model(recipe, dataset, batch_size=8))
        batch = encoding.query.pair_inputs(rows, np.random.default_rng(0), packed=parts == 1)
        labels = {"_positive": dataset.train.labels[rows], "_weight": np.ones(8, np.float32)}
        model.train_step(convert_to_tensors(batch, labels, {"_pair": rows.astype(np.int32)}))
        after.append([np.asarray(variable) for variable in [model.tables["item_id"].table, *model.dense_variables]])
    for variable, other in zip(*after, strict=True):
        np.testing.assert_allclose(variable, other, atol=2e-5)


@pytest.mark.usefixtures("eager")
def test_dropout_masks_entries_in_training_only() -> None:
    dataset = data()
    recipes = {rate: job(history("sasrec", dropout=rate)) for rate in (0.0, 0.5)}
    models = {rate: scatter_weights(tiny.model(recipe, dataset, batch_size=8)) for rate, recipe in recipes.items()}
    encoding, rows = Encoding.fit(recipes[0.0], dataset), np.arange(5, 13)
    batch = encoding.query.pair_inputs(rows, np.random.default_rng(0), packed=True)
    np.testing.assert_array_equal(embed_batch(models[0.5], batch), embed_batch(models[0.0], batch))
    labels = {
        "_positive": dataset.train.labels[rows],
        "_weight": np.ones(8, np.float32),
        "_pair": rows.astype(np.int32),
    }
    losses = {rate: float(model.train_step(convert_to_tensors(batch, labels))) for rate, model in models.items()}
    assert abs(losses[0.5] - losses[0.0]) > 0.01


def test_an_epoch_visits_every_query_s_pairs_together_and_goes_on_where_it_was() -> None:
    recipe, dataset = job(history("sasrec")), data(lengths=(3, 5, 2, 6, 4, 4))
    encoding = Encoding.fit(recipe, dataset)

    def batches(epoch: int, first: int) -> list[dict[str, np.ndarray]]:
        arguments = {"batch_size": 6, "seed": 3}
        return [
            batch for _, batch in epoch_batches(dataset.train, encoding.query, epoch=epoch, first=first, **arguments)
        ]

    every_batch = batches(0, 0)
    order = np.concatenate([batch["_pair"] for batch in every_batch])
    np.testing.assert_array_equal(np.sort(order), np.arange(24))
    assert (np.diff(dataset.train.queries[order]) != 0).sum() == 5
    for batch, other in zip(every_batch[2:], batches(0, 2), strict=True):
        assert batch.keys() == other.keys()
        assert all(np.array_equal(batch[name], other[name]) for name in batch)
    assert not np.array_equal(order, np.concatenate([batch["_pair"] for batch in batches(1, 0)]))


def test_queries_of_all_lengths_are_embedded_as_one_by_one() -> None:
    """In blocks of similar lengths, so that short histories are not padded to the longest."""
    lengths = tuple(int(n) for n in np.random.default_rng(3).integers(0, 8, 600))
    recipe, dataset = job(history("sasrec"), tiny.USER), data(lengths=lengths)
    model, encoding = scatter_weights(tiny.model(recipe, dataset, batch_size=4)), Encoding.fit(recipe, dataset)
    inputs = encoding.query.query_inputs(np.arange(600, dtype=np.int32))
    together = np.asarray(model.towers.query(inputs))
    np.testing.assert_allclose(model.embed_queries(inputs), together, atol=2e-5)
    assert sum(n == 0 for n in lengths) > 10
    no_queries = {name: column[:0] for name, column in inputs.items()}
    assert model.embed_queries(no_queries).shape == (0, 4)


def walks(folder: Path) -> tuple[Path, np.ndarray]:
    """Interactions of users whose next label is a function of the last one, but for a tenth; and that function."""
    rng = np.random.default_rng(0)
    order = rng.permutation(12)
    following = np.empty(12, np.int64)
    following[order] = np.roll(order, -1)
    rows = []
    for user in range(120):
        label = int(rng.integers(12))
        for time in range(int(rng.integers(4, 14))):
            rows.append((f"u{user}", f"i{label:02}", time))
            label = int(following[label] if rng.random() < 0.9 else rng.integers(12))
    columns = zip(("user_id", "item_id", "time"), zip(*rows, strict=True), strict=True)
    pq.write_table(pa.table(dict(columns)), folder / "walks.parquet")
    return folder / "walks.parquet", following


@pytest.mark.parametrize("name", ENCODERS)
def test_an_export_in_a_child_process_reads_the_recipe(name: str) -> None:
    recipe = job(history(name))
    read = Recipe.model_validate(json.loads(json.dumps(dump_towers(recipe))))
    assert (read.query, read.label, read.model) == (recipe.query, recipe.label, recipe.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hstu", pytest.param("sasrec", marks=pytest.mark.nightly)])
def test_sequences_are_learnt_exported_and_served_at_any_length(tmp_path: Path, name: str) -> None:
    """A pooled history cannot tell what was last: 12 labels in a cycle, of which the last decides the next."""
    path, following = walks(tmp_path)
    recipe = job(
        history(name, dim=16, encoder={"name": name, "layers": 1, "heads": 2, "dropout": 0.1}),
        data={"train": str(path), "timestamp": "time", "split": {"strategy": "leave_last_out"}},
        label={"features": [{**tiny.ITEM, "dim": 16}]},
        model={"dim": 16, "similarity": "dot", "temperature": 1.0},
        optimizer={"embedding_learning_rate": 0.01, "dense_learning_rate": 0.01},
        training={"epochs": 12, "evaluate_every": 12, "batch_size": 64},
        evaluation={"ks": [1], "metric": "recall@1", "exclude_seen": False, "baselines": []},
    )
    bundle = fit(recipe, tmp_path / "bundle")

    tower = onnxruntime.InferenceSession(bundle.query_tower, providers=["CPUExecutionProvider"])
    rows_L = bundle.vocabularies["item_id"].encode(pa.array([f"i{label:02}" for label in range(12)]))
    names = bundle.labels.ids.to_pylist()
    for before in (1, 3, 6):
        last = np.arange(12)
        walk = [last]
        for _ in range(before - 1):
            walk.insert(0, np.argsort(following)[walk[0]])
        ids = rows_L[np.stack(walk, axis=1)]
        u_BD = tower.run(None, {"history": ids, "history__weight": np.ones(ids.shape, np.float32)})[0]
        nearest = [names[row] for row in (u_BD @ bundle.embeddings.T).argmax(axis=1)]
        assert sum(name == f"i{label:02}" for name, label in zip(nearest, following, strict=True)) >= 11
        padded = {"history": np.pad(ids, ((0, 0), (0, 2)))[:, :6]}
        padded["history__weight"] = np.pad(np.ones(ids.shape, np.float32), ((0, 0), (0, 2)))[:, :6]
        np.testing.assert_allclose(tower.run(None, padded)[0], u_BD, atol=1e-4)
    nothing = tower.run(None, {"history": np.zeros((2, 3), np.int32), "history__weight": np.zeros((2, 3), np.float32)})[
        0
    ]
    assert np.isfinite(nothing).all()


@pytest.mark.parametrize(
    ("feature", "sections", "message"),
    [
        ({}, {"data": {"timestamp": None}}, r"'history': expected data\.timestamp, or a data\.split by time"),
        (
            {}, {"loss": {"sampler": "in_batch"}},
            r"loss\.hits: expected 'mask_known' or 'keep' with sampler 'in_batch' and",
        ),
        ({"combiner": "sum"}, {}, "feature 'history' of kind 'history': expected no combiner: an encoder"),
        ({"encoder": {"name": "hstu", "heads": 3}}, {}, "expected a dim that encoder.heads = 3 divides, received 4"),
        (
            {"encoder": {"name": "hstu", "smoothing": [0.5]}}, {},
            "expected smoothing with 'sasrec' only, received 'hstu'",
        ),
        ({"kind": "bag"}, {}, "expected no encoder: only for history"),
        ({"encoder": "gru"}, {}, r"name\n.*'sasrec' or 'hstu'"),
    ],
)  # fmt: skip
def test_impossible_sequences_are_refused(feature: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(history("sasrec") | feature, **sections)
