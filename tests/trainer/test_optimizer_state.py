"""A warm start with the optimisers' state goes on as if training had not stopped."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from keras import ops

from longtail.bundle import Bundle
from longtail.trainer import fit, load_recipe
from longtail.trainer.config import Recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.optimizer_state import carry_over_state, optimizer_state_of
from longtail.trainer.warm_start import CarriedOver, WarmStart, weights_of
from tests.trainer import tiny

ADAM = {"embeddings": "adam", "dense": "adam", "l2": 0.01}
ADAGRAD = {"embeddings": "adagrad", "dense": "adagrad", "weight_decay": 0.5}
OPTIMIZERS = {
    "adam": ADAM,
    "adagrad": ADAGRAD,
    "adagrad_elementwise": {"embeddings": "adagrad_elementwise", "dense": "sgd"},
    "momentum": {"embeddings": "sgd", "dense": "sgd", "momentum": 0.9, "l2": 0.01, "clip_norm": 0.5},
}
QUERY = {"features": [tiny.USER], "hidden": [5]}
DATA = tiny.dataset(tiny.pairs((0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (1, 2)), queries=4, labels=4)


@pytest.fixture(autouse=True)
def eager_but_whole_fits(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("slow"):
        request.getfixturevalue("eager")


def job(optimizer: dict[str, object], **sections: object) -> Recipe:
    model = {"learn_temperature": True, "label_bias": True}
    loss = {"sampler": {"name": "in_batch"}}
    return tiny.recipe(**({"query": QUERY, "model": model, "loss": loss, "optimizer": optimizer} | sections))


def trained(recipe: Recipe, steps: range, *, at: TwoTower | None = None) -> TwoTower:
    model = at or tiny.model(recipe, DATA, batch_size=3)
    for step in steps:
        rows = np.array([step, step + 1, step + 3]) % len(DATA.train)
        model.train_step(tiny.batch(DATA.train.take(rows)))
    return model


def kept(model: TwoTower, *, state: bool = True) -> WarmStart:
    """What a bundle would hold of a model."""

    def arrays(content: bytes) -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return dict(file)

    vocabularies = Encoding.fit(model.recipe, DATA).vocabularies
    ids = {name: vocabulary.ids for name, vocabulary in vocabularies.items()} | {"label bias": DATA.label_ids}
    slots = arrays(optimizer_state_of(model, model.train_step.updates)) if state else None
    return WarmStart("", arrays(weights_of(model)), ids, 0.1, slots)


def begun(recipe: Recipe, warm: WarmStart, data: object = DATA) -> tuple[TwoTower, CarriedOver]:
    """A fresh model of a job after the warm start."""
    model, encoding = tiny.model(recipe, data, batch_size=3), Encoding.fit(recipe, data)
    carried = warm.carry_over(model, encoding.vocabularies, data.label_ids)
    carry_over_state(warm, model, model.train_step.updates, carried)
    return model, carried


def values(model: TwoTower) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(weights_of(model))) as file:
        return dict(file)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_runs_with_state_are_one_to_the_last_bit(name: str) -> None:
    """Six steps, and three with a warm start for three more, on the same batches; without the state they part."""
    recipe = job(OPTIMIZERS[name])
    whole = values(trained(recipe, range(6)))
    first = trained(recipe, range(3))

    second, carried = begun(recipe, kept(first))
    fresh, without = begun(recipe, kept(first, state=False))

    assert {"query/0.Dense.kernel", "log_temperature"} <= set(carried.state) or name == "adagrad_elementwise"
    assert {f"tables/{table}/{recipe.optimizer.embeddings}" for table in ("user_id", "item_id", "label bias")} <= set(
        carried.state
    )
    assert not carried.left
    assert without.left == {"optimizer": "the bundle keeps no optimiser state (training.keep_optimizer)"}
    after, parted = values(trained(recipe, range(3, 6), at=second)), values(trained(recipe, range(3, 6), at=fresh))
    for weight, expected in whole.items():
        np.testing.assert_array_equal(after[weight], expected, err_msg=weight)
    assert np.abs(parted["tables/item_id"] - whole["tables/item_id"]).max() > 1e-3


def test_state_follows_the_ids_of_rows_and_new_ones_start_fresh() -> None:
    recipe = job(ADAGRAD)
    first = trained(recipe, range(3))
    changed = tiny.dataset(tiny.pairs((0, 0), (1, 1), (2, 2), (2, 3)), queries=3, labels=4)
    changed = type(changed)(**(changed.__dict__ | {"label_ids": pa.array(["i3", "new", "i0", "i1"])}))
    old = kept(first).slots["tables/item_id/adagrad.accumulator"]

    model, carried = begun(recipe, kept(first), changed)

    rows = model.train_step.updates.rows["item_id"].slots["accumulator"]
    places = Encoding.fit(recipe, changed).vocabularies["item_id"].ids.to_pylist()
    expected = {"i0": old[1], "i1": old[2], "i3": old[4], "new": [0.0]}
    got = ops.convert_to_numpy(rows)
    assert got[0] == old[0]
    for at, label in enumerate(places, start=1):
        assert got[at] == expected[label]
    touched = ops.convert_to_numpy(model.train_step.updates.decay["item_id"].touched)
    assert touched.min() == -3
    assert "tables/item_id/decay" in carried.state


def test_what_does_not_fit_is_told_with_expected_and_found() -> None:
    warm = kept(trained(job(ADAM), range(2)))

    adagrad = begun(job(ADAGRAD), warm)[1]
    assert adagrad.left["tables/item_id/adagrad"] == (
        "expected adagrad.accumulator, found adam.mean, adam.square, adam.steps, l2.touched"
    )
    assert adagrad.left["query/0.Dense.bias/state"] == (
        "expected adagrad.accumulator, found adam.momentum, adam.velocity"
    )
    assert not adagrad.state

    features = [tiny.USER | {"dim": 6}]
    wider = begun(job(ADAM, query={"features": features, "hidden": [5]}), warm)[1]
    assert not any(name.startswith("tables/user_id") for name in wider.state), "the rows themselves did not fit"
    assert wider.left["query/0.Dense.kernel/state"] == "the weight itself starts fresh"
    assert wider.left["dense/state"] == (
        "Adam counts its steps for all dense weights at once, and query/0.Dense.kernel has none"
    )
    assert wider.state == [f"tables/{table}/{group}" for table in ("item_id", "label bias") for group in ("adam", "l2")]
    assert f"optimiser state: {', '.join(wider.state)} carried over" in wider.lines()


@pytest.mark.slow
def test_an_epoch_and_a_warm_start_are_two_epochs(tmp_path: Path) -> None:
    """From files, one batch an epoch, so that the batches are the same but for the order of their rows."""
    recipe = tiny.write_job(tmp_path, recipe=tiny.RECIPE.replace('split = { strategy = "leave_last_out" }', ""))
    same = ["training.batch_size=320", 'loss.sampler="in_batch"', "training.keep_optimizer=true"]
    same += [f"{part}.unknown_rate=0.0" for part in ("query.features.0", "query.features.1", "label.features.0")]
    one, two = (load_recipe(recipe, [*same, f"training.epochs={epochs}"]) for epochs in (1, 2))
    whole, first = fit(two, tmp_path / "whole"), fit(one, tmp_path / "first")

    second = fit(one, tmp_path / "second", warm_start=first.path)
    without = fit(one, tmp_path / "without", warm_start=first.path, fresh_optimizer=True)

    # Only sums over rows in another order differ: float32, of 320 terms. A step moves rows by about 0.01.
    np.testing.assert_allclose(second.embeddings, whole.embeddings, atol=1e-5)
    assert np.abs(without.embeddings - whole.embeddings).max() > 1e-4
    assert Bundle.load(whole.path).manifest.files["optimizer.npz"].bytes > 0
    assert WarmStart.read(first.path).sha256 != WarmStart.read(first.path, optimizer=False).sha256
