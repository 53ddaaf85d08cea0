from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from keras import ops

from longtail.trainer.checkpoint import Checkpoints, hash_run
from longtail.trainer.errors import CheckpointError
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny

TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 1), (2, 3))
DATA = tiny.dataset(TRAIN, queries=3, labels=4)
BATCH = tiny.batch(tiny.pairs((0, 0), (1, 2)))


def values(model: TwoTower) -> list[np.ndarray]:
    return [ops.convert_to_numpy(variable.value) for variable in model.variables]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def trained() -> TwoTower:
    model = tiny.model(tiny.recipe(), DATA, batch_size=2)
    model.train_step(BATCH)
    return model


STATES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "weights, moments, schedule and seed": ({}, set()),
    "velocities, dues of l2": (
        {
            "query": {"features": [tiny.USER], "hidden": [3]},
            "optimizer": {"embeddings": "sgd", "dense": "sgd", "momentum": 0.9, "l2": 0.01, "schedule": "cosine"},
        },
        {"table_user_id_velocity", "table_item_id_velocity", "table_user_id_touched"},
    ),
    "averages": ({"optimizer": {"average": 0.9}}, {"table_user_id_average"}),
    "remembered embeddings": ({"loss": {"sampler": {"name": "cross_batch", "negatives": 5}}}, set()),
    "remembered labels": ({"loss": {"sampler": {"name": "cross_batch", "negatives": 5, "gradients": True}}}, set()),
    "β of queries": ({"loss": {"sampler": "full", "weight": "importance", "top_k": {"k": 2}}}, {"top_k"}),
    "η of pairs": ({"loss": {"family": "augment_and_reduce", "weight": "importance"}}, {"log_eta"}),
    "streamed frequencies": ({"loss": {"frequencies": "streaming", "weight": "relative"}}, set()),
    "maps of objectives": (
        {
            "data": {"events": {"column": "event", "weights": {"click": 1, "purchase": 2}}},
            "objectives": {"click": {"events": ["click"]}, "purchase": {"events": ["purchase"]}},
        },
        set(),
    ),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("sections", "names"), STATES.values(), ids=STATES)
def test_checkpoints_hold_what_steps_change(tmp_path: Path, sections: dict[str, Any], names: set[str]) -> None:
    """After two steps; the third is the same, to the bit."""
    train = replace(TRAIN, objectives=np.int32([0, 1, 0, 1, 0, 1]))
    data = tiny.dataset(train, queries=3, labels=4)
    trained, other = (
        tiny.model(tiny.recipe(seed=seed, **sections), data, batch_size=2, total_steps=4) for seed in (0, 5)
    )
    progress = {"epoch": 3, "step": 7, "loss": 0.1 + 0.2}

    def step(model: TwoTower, *rows: int) -> float:
        columns = {"_request": train.queries[[*rows]], "_objective": train.objectives[[*rows]], "_pair": np.int32(rows)}
        return float(model.train_step(tiny.batch(TRAIN.take(np.array(rows)), **columns)))

    for rows in ((0, 2), (3, 4)):
        step(trained, *rows)
    Checkpoints(tmp_path, "run").save("latest", trained.variables, progress)
    assert Checkpoints(tmp_path, "run").load("latest", other.variables) == progress

    assert step(other, 0, 5) == step(trained, 0, 5)
    for expected, actual in zip(values(trained), values(other), strict=True):
        np.testing.assert_array_equal(expected, actual)
    assert names <= {it.name for it in trained.variables}


def test_only_the_newest_checkpoint_of_a_kind_remains(tmp_path: Path, trained: TwoTower) -> None:
    checkpoints = Checkpoints(tmp_path, "run")
    for epoch in range(12):
        checkpoints.save("latest", trained.variables, {"epoch": epoch})
    checkpoints.save("best", trained.variables, {"epoch": 2})

    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-0", "latest-11"]
    assert checkpoints.load("latest", trained.variables) == {"epoch": 11}
    assert checkpoints.load("best", trained.variables) == {"epoch": 2}


def test_after_a_crash_before_removal_the_newest_checkpoint_counts(
    tmp_path: Path, trained: TwoTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, "run")
    with monkeypatch.context() as patched:
        patched.setattr("longtail.trainer.checkpoint.shutil.rmtree", lambda _: None)
        for epoch in range(11):
            checkpoints.save("latest", trained.variables, {"epoch": epoch})

    assert checkpoints.load("latest", trained.variables) == {"epoch": 10}
    checkpoints.save("latest", trained.variables, {"epoch": 11})
    assert [path.name for path in tmp_path.iterdir()] == ["latest-11"]


def test_a_checkpoint_of_another_run_is_refused_and_unchanged(tmp_path: Path, trained: TwoTower) -> None:
    Checkpoints(tmp_path, "one").save("latest", trained.variables, {"epoch": 1})
    before, untouched = contents(tmp_path), values(trained)

    with pytest.raises(
        CheckpointError,
        match=r"latest-0: expected a checkpoint of this recipe and data \(other\), found one of another \(one\): "
        "choose another --out, or remove",
    ):
        Checkpoints(tmp_path, "other").load("latest", trained.variables)

    assert contents(tmp_path) == before
    for expected, actual in zip(untouched, values(trained), strict=True):
        np.testing.assert_array_equal(expected, actual)


RECIPE = tiny.recipe()
OTHERS = {
    "a seed": (tiny.recipe(seed=1), DATA),
    "a width": (tiny.recipe(model={"dim": 8}), DATA),
    "a weight": (tiny.recipe(loss={"weight": "tail"}), DATA),
    "a penalty": (tiny.recipe(optimizer={"l2": 0.1}), DATA),
    "a pair": (RECIPE, tiny.dataset(TRAIN.take(slice(5)), queries=3, labels=4)),
    "a label": (RECIPE, tiny.dataset(TRAIN, queries=3, labels=5)),
    "pair weights": (
        RECIPE,
        tiny.dataset(tiny.pairs(*zip(TRAIN.queries, TRAIN.labels, strict=True), weights=[2] * 6), queries=3, labels=4),
    ),
    "a validation pair": (RECIPE, tiny.dataset(TRAIN, queries=3, labels=4, valid=tiny.pairs((0, 2)))),
    "a feature": (
        RECIPE,
        tiny.dataset(TRAIN, queries=3, labels=4, label_table=pa.table({"genre": ["a", "b", "c", "d"]})),
    ),
    "another feature": (
        RECIPE,
        tiny.dataset(TRAIN, queries=3, labels=4, label_table=pa.table({"genre": ["a", "b", "c", "e"]})),
    ),
    "the order of pairs": (RECIPE, tiny.dataset(TRAIN, queries=3, labels=4, ordered=True)),
}


def test_identity_depends_on_recipe_data_and_first_weights() -> None:
    identities = [hash_run(RECIPE, DATA), *(hash_run(*other) for other in OTHERS.values())]

    for name, identity in zip(OTHERS, identities[1:], strict=True):
        assert identities.count(identity) == 1, name


def test_identity_ignores_names_and_paths() -> None:
    moved = tiny.recipe(name="moved", data={"train": "elsewhere/train.parquet"})

    assert hash_run(moved, DATA) == hash_run(RECIPE, DATA)
