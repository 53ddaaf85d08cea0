"""A data set that is kept as mapped files is the one that was read."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.data import prepared
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.prepared import prepare, read_dataset
from longtail.trainer.errors import DataError
from longtail.trainer.job import fit
from tests.trainer import tiny


def write_rich(folder: Path) -> Path:
    """A recipe with all that a data set can have."""
    rng, rows = np.random.default_rng(0), 400
    log = {
        "user": [f"u{user}" for user in rng.integers(0, 30, rows)],
        "item": [None if row == 7 else f"i{item}" for row, item in enumerate(rng.integers(0, 20, rows))],
        "time": np.arange(rows) + 1_700_000_000,
        "event": rng.choice(["click", "buy", "glance"], rows),
        "device": rng.choice(["phone", "desk"], rows),
        "shown": [[f"i{item}" for item in rng.integers(0, 20, 3)] for _ in range(rows)],
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    users = {
        "user": [f"u{user}" for user in range(30) for _ in range(2)],
        "since": [1_600_000_000, 1_700_000_200] * 30,
        "country": rng.choice(["de", "fr"], 60),
    }
    pq.write_table(pa.table(users), folder / "users.parquet")
    items = {"item": [f"i{item}" for item in range(25)], "title": [f"Title {item}" for item in range(25)]}
    pq.write_table(pa.table(items), folder / "items.parquet")
    return tiny.write_recipe(
        folder, name="rich",
        data={
            "train": folder / "log.parquet", "query_id": "user", "label_id": "item", "timestamp": "time",
            "events": {"column": "event", "weights": {"click": 1, "buy": 3, "glance": 0}}, "impressions": "shown",
            "max_bad_rows": 5, "queries": folder / "users.parquet", "valid_from": "since",
            "labels": folder / "items.parquet", "display": ["title"],
            "split": {"strategy": "temporal", "valid": 0.1, "test": 0.1},
        },
        query={"features": [
            {"name": "user", "kind": "id", "dim": 4}, {"name": "device", "kind": "id", "dim": 4, "from": "row"},
            {"name": "country", "kind": "id", "dim": 4},
        ]},
        label={"features": [{"name": "item", "kind": "id", "dim": 4}]},
        objectives={"click": {"events": ["click"]}, "buy": {"events": ["buy"], "weight": 2}},
    )  # fmt: skip


def same(value: Any, other: Any) -> bool:
    """Whether data sets, or parts of them, hold the same."""
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if dataclasses.is_dataclass(value):
        return type(value) is type(other) and all(
            same(getattr(value, field.name), getattr(other, field.name))
            for field in dataclasses.fields(value)
            if field.name != "read_at"
        )
    if isinstance(value, pa.Table | pa.Array | pa.ChunkedArray):
        return bool(value.equals(other))
    return bool(value == other)


def prepared_job(recipe: Path, folder: str = "kept") -> Recipe:
    return load_recipe(recipe, [f"data.prepared={folder}"])


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    return write_rich(tmp_path)


def test_mapped_data_equal_read_data(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MAPPED", 100)
    read = read_dataset(load_recipe(rich))
    assert read.requests is not None
    assert read.impressions is not None
    assert read.report.dropped
    assert read.report.unweighted

    first, folder = prepare(prepared_job(rich))
    again, prepared_folder = prepare(prepared_job(rich))
    assert folder == prepared_folder
    assert folder.parent == rich.parent / "kept"
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    for dataset in (first, again):
        assert same(read, dataset)
        assert dataset.fingerprint == read.fingerprint
        assert dataset.report.lines() == read.report.lines()
        assert isinstance(dataset.train.queries.base, np.memmap)
    assert again.read_at == first.read_at
    assert again.refit().fingerprint == read.refit().fingerprint != read.fingerprint
    untested = [dataclasses.replace(dataset, test=dataset.test.take(slice(0))).fingerprint for dataset in (read, again)]
    assert untested[0] == untested[1] != read.fingerprint


def test_second_job_reads_no_interactions(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(prepared_job(rich))
    monkeypatch.setattr(prepared, "load_dataset", lambda *_, **__: pytest.fail("read again"))
    assert len(read_dataset(prepared_job(rich)).train)


CHANGES = {
    "a seed": lambda recipe: recipe.model_copy(update={"seed": 5}),
    "repeats": lambda recipe: recipe.model_copy(update={"data": recipe.data.model_copy(update={"repeats": "drop"})}),
    "no objectives": lambda recipe: recipe.model_copy(update={"objectives": {}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_read_settings_prepare_another_folder(rich: Path, change: str) -> None:
    before, after = prepared_job(rich), CHANGES[change](prepared_job(rich))
    folders = {prepare(recipe)[1] for recipe in (before, after)}
    assert len(folders) == 2
    assert all(folder.is_dir() for folder in folders)
    assert same(prepare(after)[0], read_dataset(CHANGES[change](load_recipe(rich))))


def test_changed_file_is_read_again_and_stale_data_removed(rich: Path) -> None:
    before, folder = prepare(prepared_job(rich))
    log = pq.read_table(rich.parent / "log.parquet")
    pq.write_table(log.slice(0, 300), rich.parent / "log.parquet")
    after, now = prepare(prepared_job(rich))
    assert now != folder
    assert not folder.exists()
    assert len(after.train) < len(before.train)
    assert int(before.train.labels.max()) >= 0  # what was mapped of the old one can still be read

    os.utime(rich.parent / "items.parquet", ns=(1, 1))
    assert prepare(prepared_job(rich))[1] != now


@pytest.mark.parametrize("damage", ["shorter", "gone", "no manifest"])
def test_damaged_files_are_refused(rich: Path, damage: str) -> None:
    folder = prepare(prepared_job(rich))[1]
    file = folder / ("prepared.json" if damage == "no manifest" else "train.labels.npy")
    if damage == "shorter":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        file.unlink()
    with pytest.raises(DataError, match=f"{folder}.*remove the folder"):
        prepare(prepared_job(rich))


def test_a_job_gives_the_same_bundle_and_names_no_folder(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    read = fit(recipe, tmp_path / "read", overrides=["training.epochs=1"])
    mapped = fit(recipe, tmp_path / "mapped", overrides=["training.epochs=1", "data.prepared=kept"])
    assert np.array_equal(read.embeddings, mapped.embeddings)
    facts = [bundle.manifest.training_data["fingerprint"] for bundle in (read, mapped)]
    assert facts[0] == facts[1]
    assert "prepared" not in json.loads((tmp_path / "mapped" / "recipe.json").read_text())["data"]


def test_concurrent_job_uses_the_first_one_s_files(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = prepared.load_dataset

    def meanwhile(*arguments: Any, **more: Any) -> Dataset:
        monkeypatch.setattr(prepared, "load_dataset", load)
        prepare(prepared_job(rich))
        return load(*arguments, **more)

    monkeypatch.setattr(prepared, "load_dataset", meanwhile)
    assert same(prepare(prepared_job(rich))[0], read_dataset(load_recipe(rich)))


def test_changed_remote_file_of_equal_size_is_read_again(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    recipe = tiny.write_job(tmp_path)
    remote = load_recipe(
        recipe,
        ["data.train=memory://kept/log.csv", "data.prepared=kept", "data.timestamp=time", "data.split.strategy=random"],
    )
    labels = []
    for label in ("3", "4"):
        rows = "".join(f"u{user},{label},{user}\n" for user in range(9))
        store.pipe("/kept/log.csv", f"user_id,item_id,time\n{rows}".encode())
        data = prepare(remote)[0]
        assert prepare(remote)[1] == prepare(remote)[1]
        labels.append(data.label_ids[int(data.train.labels[0])].as_py())
    assert labels == ["3", "4"]
