"""Check clicks and purchases over shared towers: losses by hand, export, data and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keras import ops
from pydantic import ValidationError

from longtail.bundle import Bundle
from longtail.bundle.tower import onnx_session
from longtail.trainer import fit, load_recipe
from longtail.trainer.config import Recipe
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs, keep_latest
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.loss_terms import KnownPositives
from longtail.trainer.loss_terms.queries import ByObjective
from longtail.trainer.model.towers import ObjectiveMaps
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.warm_start import WarmStart, dense_weights
from tests.trainer import tiny

L, B, D = 6, 4, 4
EVENTS = {"column": "event", "weights": {"view": 1, "click": 2, "purchase": 1, "hover": 0}}
OBJECTIVES: dict[str, Any] = {
    "click": {"events": ["view", "click"]},
    "purchase": {"events": ["purchase"], "weight": 3, "export": 1},
}
TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 3), (2, 4), (3, 5), (3, 0))
TRAIN = replace(TRAIN, objectives=np.int32([0, 1, 0, 1, 0, 1, 0, 1]))
BATCH = tiny.pairs((0, 0), (1, 1), (2, 3), (3, 0), weights=[1, 3, 0.5, 3])
OF_BATCH = np.int32([0, 1, 0, 1])


def recipe(**sections: Any) -> Recipe:
    return tiny.recipe(**({"data": {"events": EVENTS}, "objectives": OBJECTIVES} | sections))


def read_maps(model: TwoTower) -> list[np.ndarray]:
    """I + A_o of every objective."""
    (layer,) = (layer for layer in model.towers.query.layers if isinstance(layer, ObjectiveMaps))
    return [np.eye(D) + ops.convert_to_numpy(variable) for variable in layer.maps]


def scatter_maps(model: TwoTower, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for name, variable in dense_weights(model).items():
        if "ObjectiveMaps" in name:
            variable.assign(0.5 * rng.standard_normal((D, D)).astype(np.float32))


def rows(model: TwoTower, table: str, ids: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(model.tables[table].table)[ids], np.float64)


def unit(rows_BD: np.ndarray) -> np.ndarray:
    return rows_BD / np.linalg.norm(rows_BD, axis=1, keepdims=True)


@pytest.mark.parametrize(("hits", "parts"), [("mask", 1), ("mask", 2), ("mask_known", 1)])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_a_mixed_batch_costs_the_sum_of_each_objective_s_loss_by_its_map(
    similarity: str, hits: str, parts: int
) -> None:
    """In NumPy, objective by objective; a clicked label is a negative of a purchase."""
    job = recipe(
        model={"similarity": similarity, "temperature": 0.5},
        loss={"sampler": "full", "weight": "importance", "hits": hits},
        training={"batch_size": B, "accumulate": parts},
    )
    model = tiny.model(job, tiny.dataset(TRAIN, queries=4, labels=L), batch_size=B)
    scatter_maps(model)
    towers = [rows(model, "user_id", BATCH.queries + 1), rows(model, "item_id", np.arange(L) + 1)]
    queries_BD, labels_LD = (unit(part) for part in towers) if similarity == "cosine" else towers

    expected = 0.0
    for objective, matrix in enumerate(read_maps(model)):
        mapped_BD = queries_BD @ matrix
        logits_BL = (unit(mapped_BD) if similarity == "cosine" else mapped_BD) @ labels_LD.T / 0.5
        for row in np.flatnonzero(objective == OF_BATCH):
            label = BATCH.labels[row]
            same_objective = (TRAIN.queries == BATCH.queries[row]) & (TRAIN.objectives == objective)
            masked = {label, *(TRAIN.labels[same_objective] if hits == "mask_known" else [])}
            others = [other for other in range(L) if other not in masked]
            loss = np.log1p(sum(np.exp(logits_BL[row, other] - logits_BL[row, label]) for other in others))
            expected += BATCH.weights[row] * loss / B

    batch = tiny.batch(BATCH, _objective=OF_BATCH)
    if hits == "mask_known":
        owners_B = BATCH.queries * 2 + OF_BATCH
        batch["_known"], batch["_known_rows"] = KnownPositives.collect(TRAIN).list_positives(owners_B)
    assert float(model.train_step(batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("xla")  # whose losses are equal to the last bit
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_objectives_begin_as_the_plain_model(similarity: str) -> None:
    """Their maps are the identity: embeddings and loss to the bit, and a step moves the tables alike."""
    descent = {"embeddings": "sgd", "dense": "sgd"}
    equal = {name: section | {"weight": 1, "export": 1} for name, section in OBJECTIVES.items()}
    sections = {"model": {"similarity": similarity}, "optimizer": descent}
    data = tiny.dataset(TRAIN, queries=4, labels=L)
    plain = tiny.model(tiny.recipe(**sections), data, batch_size=B)
    several = tiny.model(recipe(**sections | {"objectives": equal}), data, batch_size=B)
    users = {"user_id": np.arange(5, dtype=np.int32)}

    np.testing.assert_array_equal(several.embed_queries(users), plain.embed_queries(users))
    assert float(several.train_step(tiny.batch(BATCH, _objective=OF_BATCH))) == float(
        plain.train_step(tiny.batch(BATCH))
    )
    for table in ("user_id", "item_id"):
        np.testing.assert_allclose(rows(several, table, ...), rows(plain, table, ...), atol=1e-7)
    assert all(np.abs(matrix - np.eye(D)).max() > 1e-6 for matrix in read_maps(several)), "the maps learn"


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_one_vector_scores_the_weighted_sum_of_the_objectives(similarity: str) -> None:
    """Shares are divided by their sum: clicks' weight 1, purchases' export 1."""
    model = tiny.model(recipe(model={"similarity": similarity}), tiny.dataset(TRAIN, queries=4, labels=L), batch_size=B)
    scatter_maps(model)
    tower_BD, labels_LD = rows(model, "user_id", np.arange(1, 5)), model.embed_labels()
    mapped = [tower_BD @ matrix for matrix in read_maps(model)]
    mapped = [unit(vectors_BD) for vectors_BD in mapped] if similarity == "cosine" else mapped

    expected_BL = sum(0.5 * vectors_BD @ labels_LD.T for vectors_BD in mapped)
    served_BD = model.embed_queries({"user_id": np.arange(1, 5, dtype=np.int32)})
    np.testing.assert_allclose(served_BD @ labels_LD.T, expected_BL, rtol=1e-4, atol=1e-6)


def test_a_step_without_objectives_is_refused() -> None:
    model = tiny.model(recipe(), tiny.dataset(TRAIN, queries=4, labels=L), batch_size=B)
    with pytest.raises(ValueError, match="a step with objectives: expected _objective in its batch, received none"):
        model.train_step(tiny.batch(BATCH))


def test_repeats_are_of_a_pair_and_its_objective() -> None:
    """A label that was clicked twice and bought once is two pairs."""
    log = tiny.pairs((0, 1), (0, 1), (0, 1), weights=[1, 2, 3])
    assert keep_latest(log).weights.tolist() == [3]
    latest = keep_latest(replace(log, objectives=np.int32([0, 1, 0])))
    assert (latest.objectives.tolist(), latest.weights.tolist()) == ([1, 0], [2, 3])


USERS, ITEMS = 48, 12


def write_shop(folder: Path) -> Path:
    """Two groups of users: each clicks three labels of its half of the catalogue and buys the other three of it."""
    user, event, item = np.indices((USERS, 3, 3)).reshape(3, -1)
    bought = event == 2
    log = {
        "query_id": user,
        "label_id": user % 2 * 6 + bought * 3 + item,
        "event": np.array(["view", "click", "purchase"])[event],
        "at": np.random.default_rng(0).permutation(len(user)),
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    return tiny.write_recipe(
        folder, name="shop", objectives=OBJECTIVES | {"purchase": OBJECTIVES["purchase"] | {"weight": 2}},
        data={
            "train": folder / "log.parquet", "query_id": "query_id", "label_id": "label_id", "timestamp": "at",
            "repeats": "drop", "events": EVENTS, "split": {"strategy": "random", "valid": 0.1, "test": 0},
        },
        query={"features": [{"name": "query_id", "kind": "id", "dim": 4}]},
        label={"features": [{"name": "label_id", "kind": "id", "dim": 4}]},
        optimizer={"embedding_learning_rate": 0.05, "dense_learning_rate": 0.05},
        training={"epochs": 30, "evaluate_every": 30, "batch_size": 64},
        evaluation={
            "ks": [3], "metric": "recall@3", "exclude_seen": False, "bias_removal": [0, 1], "baselines": [],
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    reporter, screen = tiny.record_output()
    fit(write_shop(folder), folder / "bundle", reporter)
    (folder / "screen.txt").write_text(screen.getvalue())
    return folder


def scores(shop: Path, export: dict[str, float]) -> np.ndarray:
    """u·v of the users with the bundle's weights and other shares, [USERS, ITEMS] by the ids' numbers."""
    overrides = [f"objectives.{name}.export={share}" for name, share in export.items()]
    job = load_recipe(shop / "recipe.toml", overrides)
    data = read_dataset(job)
    encoding = Encoding.fit(job, data)
    model = TwoTower(job, encoding, ITEMS)
    carried = WarmStart.read(shop / "bundle").carry_over(model, encoding.vocabularies, data.label_ids)
    assert carried.skipped == {}
    assert carried.dense == ["query/0.ObjectiveMaps.click", "query/0.ObjectiveMaps.purchase"]
    orders = [np.argsort(np.array(ids.to_pylist(), int)) for ids in (data.query_ids, data.label_ids)]
    queries_BD = model.embed_queries(encoding.query.query_inputs(orders[0].astype(np.int32)))
    return queries_BD @ model.embed_labels()[orders[1]].T


def test_bundles_serve_and_describe_the_weighted_sum(shop: Path) -> None:
    """Its scores are inner products, of unit labels with a sum of cosines' queries; metrics.json has each objective."""
    bundle, expected = Bundle.load(shop / "bundle"), scores(shop, {"click": 1, "purchase": 1})
    names = np.array(bundle.vocabularies["query_id"].find_all([str(user) for user in range(USERS)]), np.int32)
    (queries_BD,) = onnx_session(bundle.query_tower, "query_tower.onnx").run(None, {"query_id": names})
    order = np.argsort(np.array(bundle.labels.ids.to_pylist(), int))
    np.testing.assert_allclose(queries_BD @ bundle.embeddings[order].T, expected, atol=1e-5)
    assert bundle.manifest.similarity == "dot"
    np.testing.assert_allclose(np.linalg.norm(bundle.embeddings, axis=1), 1, atol=1e-6)
    assert np.linalg.norm(queries_BD, axis=1).max() < 0.95
    assert bundle.manifest.bias_removal.noise.endswith(", of all objectives' pairs")

    figures = json.loads((shop / "bundle" / "metrics.json").read_text())["objectives"]
    assert {name: (figure["share"], figure["split"]) for name, figure in figures.items()} == {
        "click": (0.5, "valid"), "purchase": (0.5, "valid"),
    }  # fmt: skip
    assert figures["click"]["pairs"] + figures["purchase"]["pairs"] <= 43, "a tenth of 432 pairs"
    assert 0 < figures["click"]["low"] <= figures["click"]["value"] <= figures["click"]["high"] <= 1
    assert figures["click"]["in_words"].startswith(f"0.5 of the score; recall@3 {figures['click']['value']:.4f} of ")
    assert "Objective purchase" in (shop / "bundle" / "report.html").read_text()
    screen = (shop / "screen.txt").read_text()
    assert re.search(r"Objectives, by training pairs: click \d+, purchase \d+\n", screen)
    assert f"Objective click: {figures['click']['in_words']}" in screen


def test_pairs_have_the_objective_and_weight_of_their_event(shop: Path) -> None:
    """A view and a click of one label are one pair of weight 2; a purchase weighs 1 · 2."""
    job = load_recipe(shop / "recipe.toml", ["data.split.valid=0"])
    data = read_dataset(job)
    assert len(data.train) == USERS * 6
    labels = np.array(data.label_ids.to_pylist(), int)[data.train.labels]
    np.testing.assert_array_equal(data.train.objectives, labels % 6 // 3)
    assert set(data.train.weights) == {2.0}
    assert read_dataset(replace_weight(job, 5)).train.weights.max() == 5

    positives = KnownPositives.collect(data.train)
    ((_, batch),) = epoch_batches(
        data.train, Encoding.fit(job, data).query, [positives, ByObjective(data.train)],
        batch_size=200, seed=0, epoch=0,
    )  # fmt: skip
    np.testing.assert_array_equal(batch["_objective"], data.train.objectives[batch["_pair"]])
    for row in range(5):
        same = (data.train.queries == data.train.queries[batch["_pair"][row]]) & (
            data.train.objectives == batch["_objective"][row]
        )
        assert set(batch["_known"][batch["_known_rows"] == row]) == set(data.train.labels[same])


def replace_weight(job: Recipe, weight: float) -> Recipe:
    purchase = job.objectives["purchase"].model_copy(update={"weight": weight})
    return job.model_copy(update={"objectives": job.objectives | {"purchase": purchase}})


def test_splits_keep_the_objectives_of_pairs() -> None:
    shuffled = TRAIN.take(np.arange(len(TRAIN))[::-1]).sorted()
    assert dict(zip(zip(shuffled.queries, shuffled.labels, strict=True), shuffled.objectives, strict=True)) == dict(
        zip(zip(TRAIN.queries, TRAIN.labels, strict=True), TRAIN.objectives, strict=True)
    )
    both = TRAIN.take(slice(0, 4)).merge_later(TRAIN.take(slice(4, 8)))
    np.testing.assert_array_equal(both.objectives, TRAIN.objectives)
    plain = Pairs(TRAIN.queries, TRAIN.labels)
    np.testing.assert_array_equal(plain.owner_keys, TRAIN.queries)
    assert tiny.dataset(plain, queries=4, labels=L).fingerprint != tiny.dataset(TRAIN, queries=4, labels=L).fingerprint


CLICK, PURCHASE = OBJECTIVES["click"], OBJECTIVES["purchase"]
TYPES = r"objectives: expected each type of data\.events\.weights once,"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objectives": {"click": CLICK}}, r"expected at least two, or no \[objectives\] at all, received \['click'\]"),
        ({"objectives": {"a b": CLICK, "c": PURCHASE}}, r"expected names of letters, digits and _, received \['a b'\]"),
        ({"data": {}}, r"objectives: expected each type of data\.events\.weights once, \[\],"),
        ({"objectives": {"click": CLICK, "purchase": {"events": ["purchase", "cart"]}}}, TYPES),
        ({"objectives": {"click": CLICK, "purchase": {"events": ["hover"]}}}, TYPES),
        ({"objectives": {"click": CLICK, "purchase": {"events": ["purchase", "view"]}}}, TYPES),
        ({"objectives": {"click": {"events": ["click"]}, "purchase": PURCHASE}}, TYPES),
        (
            {"objectives": {"click": CLICK | {"export": 0}, "purchase": PURCHASE | {"export": 0}}},
            "objectives: expected some export > 0, received only zeros",
        ),
        ({"objectives": {"click": CLICK | {"weight": 0}, "purchase": PURCHASE}}, "greater than 0"),
        ({"objectives": {"click": CLICK | {"export": -1}, "purchase": PURCHASE}}, "greater than or equal to 0"),
        ({"objectives": {"click": {"events": []}, "purchase": PURCHASE}}, "at least 1 item"),
        (
            {"evaluation": {"log_likelihood": True}, "loss": {"weight": "importance"}},
            r"evaluation\.log_likelihood: expected false with objectives, whose served",
        ),
    ],
)
def test_impossible_objectives_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(**sections)


def test_one_exported_objective_of_cosines_is_a_cosine() -> None:
    alone = {"click": CLICK | {"export": 0}, "purchase": PURCHASE}
    assert recipe(objectives=alone).served_similarity == "cosine"
    assert recipe().served_similarity == "dot"
    assert recipe(objectives=alone).export_shares == {"click": 0, "purchase": 1}
    assert recipe(objectives={"click": CLICK, "purchase": {"events": ["purchase"], "weight": 3}}).export_shares == {
        "click": 0.25, "purchase": 0.75,
    }  # fmt: skip
    assert tiny.recipe().served_similarity == "cosine"
    assert tiny.recipe().export_shares == {}
