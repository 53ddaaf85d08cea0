"""Check that a warm start carries weights over by id, and refuses bundles without weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keras import ops

from longtail.bundle import Bundle, Vocabulary
from longtail.trainer import CheckpointError, fit, load_recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.model.two_tower import LABEL_BIAS, TwoTower
from longtail.trainer.warm_start import WarmStart, dense_weights
from tests.trainer import tiny
from tests.trainer.conftest import Finished

FIXTURES = Path(__file__).parents[1] / "fixtures"


def fresh(*, users: int, items: int, **sections: object) -> tuple[TwoTower, Encoding, pa.Array]:
    """A model of users and items whose ids are those of the tiny job, `0`, `1`, …, reversed."""
    data = tiny.dataset(tiny.pairs(*[(row, row % items) for row in range(users)]), queries=users, labels=items)
    renamed = {
        "query_ids": pa.array([str(row) for row in reversed(range(users))]),
        "label_ids": pa.array([str(row) for row in reversed(range(items))]),
    }
    data = type(data)(**(data.__dict__ | renamed))
    recipe = tiny.recipe(seed=9, **sections)
    encoding = Encoding.fit(recipe, data)
    return TwoTower(recipe, encoding, items), encoding, data.label_ids


def rows(model: TwoTower, table: str) -> np.ndarray:
    return ops.convert_to_numpy(model.tables[table].table)


def test_rows_follow_their_ids_and_new_ones_start_fresh(finished: Finished) -> None:
    """Of 40 users and 16 items, 30 and 12 are still there, and two items are new."""
    warm, old = WarmStart.read(finished.out), finished.trained.model
    model, encoding, label_ids = fresh(users=30, items=18, model={"label_bias": True})
    untouched = rows(model, "item_id").copy()

    carried = warm.carry_over(model, encoding.vocabularies, label_ids)

    assert carried.tables == {"user_id": (31, 0, 10), "item_id": (17, 2, 0), LABEL_BIAS: (17, 2, 0)}
    rows_by_id = {
        name: {id_: row + 1 for row, id_ in enumerate(it.ids.to_pylist())} for name, it in warm_ids(finished).items()
    }
    for name in ("user_id", "item_id"):
        for row, id_ in enumerate(encoding.vocabularies[name].ids.to_pylist(), start=1):
            if id_ in rows_by_id[name]:
                np.testing.assert_array_equal(rows(model, name)[row], rows(old, name)[rows_by_id[name][id_]])
            else:
                np.testing.assert_array_equal(rows(model, name)[row], untouched[row])
        np.testing.assert_array_equal(rows(model, name)[0], rows(old, name)[0])
    bias = dict(zip(finished.trained.dataset.label_ids.to_pylist(), rows(old, LABEL_BIAS)[1:, 0], strict=True))
    assert rows(model, LABEL_BIAS)[1:, 0].tolist() == [bias.get(id_, 0.0) for id_ in label_ids.to_pylist()]


def warm_ids(finished: Finished) -> dict[str, Vocabulary]:
    return dict(Bundle.load(finished.out).vocabularies)


def test_weights_that_do_not_fit_are_listed_with_reasons(finished: Finished) -> None:
    query = {"features": [tiny.USER | {"dim": 6}], "hidden": [3]}
    model, encoding, label_ids = fresh(users=30, items=18, query=query, model={"label_bias": True})

    carried = WarmStart.read(finished.out).carry_over(model, encoding.vocabularies, label_ids)

    assert carried.skipped["tables/user_id"] == "expected 6 dimensions, found 4"
    assert carried.skipped["query/0.Dense.kernel"] == "the bundle has no such weight"
    assert "tables/user_id: starts fresh: expected 6 dimensions, found 4" in carried.lines()
    assert "table item_id: 17 rows carried over, 2 new, 0 vanished" in carried.lines()


def test_dense_weights_match_by_index_layer_and_shape() -> None:
    def recipe(hidden: list[int]) -> dict[str, object]:
        return {"query": {"features": [tiny.USER], "hidden": hidden}, "model": {"learn_temperature": True}}

    old, _, _ = fresh(users=6, items=4, **recipe([5]))
    other, encoding, label_ids = fresh(users=6, items=4, **recipe([7]))
    weights = {name: ops.convert_to_numpy(variable) + 1 for name, variable in dense_weights(old).items()}

    carried = WarmStart("", weights, {}, 0.1).carry_over(other, encoding.vocabularies, label_ids)

    assert carried.dense == ["query/1.Dense.bias", "log_temperature"]
    assert carried.skipped["query/0.Dense.kernel"] == "expected shape (4, 7), found (4, 5)"
    assert float(ops.convert_to_numpy(other.log_temperature)) == pytest.approx(np.log(0.1) + 1)


@pytest.mark.slow
def test_a_warm_start_begins_where_the_bundle_ended(finished: Finished, tmp_path: Path) -> None:
    """On the same data with rates near 0, the second bundle is the first."""
    still = ["optimizer.embedding_learning_rate=1e-9", "training.epochs=1"]
    recipe = load_recipe(finished.recipe, still)

    again = fit(recipe, tmp_path / "again", warm_start=finished.out)

    np.testing.assert_allclose(again.embeddings, Bundle.load(finished.out).embeddings, atol=1e-5)
    assert again.manifest.files["weights.npz"].bytes > 0


def test_old_bundles_are_refused() -> None:
    old = next(
        path.parent for path in sorted(FIXTURES.rglob("manifest.json")) if (path.parent / "embeddings.npy").exists()
    )
    with pytest.raises(CheckpointError, match=r"expected weights.npz, the weights to train on from: fit"):
        WarmStart.read(old)


def test_a_damaged_file_is_refused(finished: Finished, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.out, tmp_path / "copy")
    (copy / "weights.npz").write_bytes((copy / "weights.npz").read_bytes()[:-1])
    with pytest.raises(Exception, match=r"weights\.npz: expected \d+ bytes"):
        WarmStart.read(copy)


@pytest.mark.slow
def test_new_labels_join_and_vanished_ones_leave(finished: Finished, tmp_path: Path) -> None:
    """Item 15 is gone, item 16 is new: the job trains, and the catalogue is today's."""
    recipe = tiny.write_job(tmp_path)
    table = pq.read_table(tmp_path / "interactions.parquet")
    items = np.where(table["item_id"].to_numpy() == 15, 16, table["item_id"].to_numpy())
    pq.write_table(table.set_column(1, "item_id", pa.array(items)), tmp_path / "interactions.parquet")
    catalogue = pq.read_table(tmp_path / "items.parquet").to_pydict() | {"item_id": [*range(15), 16]}
    pq.write_table(pa.table(catalogue), tmp_path / "items.parquet")

    bundle = fit(recipe, tmp_path / "out", overrides=["training.epochs=1"], warm_start=finished.out)

    assert set(bundle.labels.ids.to_pylist()) == {*map(str, range(15)), "16"}


@pytest.mark.slow
def test_a_warm_start_warns_of_learnt_held_out_pairs(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    table = pq.read_table(tmp_path / "interactions.parquet")
    order = np.argsort(table["timestamp"].to_numpy(), kind="stable")
    table = table.take(order).set_column(2, "timestamp", pa.array(np.arange(len(order)) + 1_700_000_000))
    split = ["data.split={strategy='temporal', valid=0.1, test=0.0}", "training.refit=true", "training.epochs=1"]
    pq.write_table(table[:200], tmp_path / "interactions.parquet")
    yesterday = fit(load_recipe(recipe, split), tmp_path / "yesterday")
    assert yesterday.manifest.training_data["newest"] == 1_700_000_000 + 199  # refitted on train and valid
    pq.write_table(table, tmp_path / "interactions.parquet")

    for out, shares, is_warned in (("today", "valid=0.1, test=0.0", False), ("late", "valid=0.5, test=0.1", True)):
        job = load_recipe(recipe, [*split, f"data.split={{strategy='temporal', {shares}}}"])
        reporter, screen = tiny.record_output()
        fit(job, tmp_path / out, reporter, warm_start=tmp_path / "yesterday")
        warning = "valid pairs are no newer than the last one that the bundle has learnt from"
        assert (warning in screen.getvalue()) == is_warned
