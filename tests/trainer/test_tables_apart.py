"""Check exports with embedding tables in files of their own, here with a limit that moves every table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from longtail.bundle import BiasRemoval, Bundle
from longtail.bundle.tower import onnx_session
from longtail.trainer import evaluate
from longtail.trainer.config import load_recipe
from longtail.trainer.errors import ExportError
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.export import tables as tables_module
from longtail.trainer.export.bundle import to_bundle
from longtail.trainer.export.onnx import export_towers
from longtail.trainer.export.tables import _without_large_tables, link_tables
from longtail.trainer.job import fit
from longtail.trainer.trained import Trained
from longtail.trainer.warm_start import WarmStart
from tests.bundles import make_bundle
from tests.trainer import tiny
from tests.trainer.conftest import Finished


@pytest.fixture
def every_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(tables_module, "LEAST_BYTES", 0)
        yield


def train_on(tmp_path: Path, **sections: Any) -> Trained:
    pairs = tiny.pairs((0, 0), (1, 1), (2, 2), (3, 0), (0, 1), (2, 0))
    recipe, dataset = tiny.recipe(**sections), tiny.dataset(pairs, queries=4, labels=3, ordered=True)
    return tiny.train(recipe, dataset, tmp_path / "work")


def read_rows(trained: Trained, name: str) -> np.ndarray:
    return np.asarray(trained.model.tables[name].table)


HISTORY = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4}
QUERIES = {
    "a history of labels": ([tiny.USER, HISTORY | {"weights": "symmetric"}], "item_id pairs-query-seen user_id"),
    "both": ([tiny.USER, HISTORY | {"entries": "both"}], "label-rows-item_id user_id"),
    "sasrec": ([HISTORY | {"encoder": {"name": "sasrec", "heads": 2}}], "item_id"),
}
"""Ways in which a query tower reads tables, and which."""


@pytest.mark.slow
@pytest.mark.usefixtures("every_table")
@pytest.mark.parametrize(
    ("features", "read"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.nightly if name == "sasrec" else ())
        for name, case in QUERIES.items()
    ],
)
def test_readers_of_a_large_table_find_its_rows(tmp_path: Path, features: list[dict[str, Any]], read: str) -> None:
    trained = train_on(
        tmp_path, query={"features": features, "hidden": [5]}, data={"timestamp": "time"}, loss={"hits": "keep"}
    )
    train, past = trained.dataset.with_past(trained.dataset.train, trained.dataset.train)
    draft = to_bundle(trained, train, np.arange(4), past, Dial(BiasRemoval(default=0)), {}, tmp_path)
    bundle = draft.write(tmp_path / "bundle")

    for name in trained.model.towers.tables:
        assert np.array_equal(np.load(bundle.tables[name]), read_rows(trained, name))
    tensors = onnx.load_from_string(bundle.query_tower).graph.initializer
    entries = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    assert {entry.value for entry in entries} == {f"tables/{name}.npy" for name in read.split()}
    inputs = trained.encoding.query.query_inputs(np.arange(4, dtype=np.int32))
    embedded = onnx_session(bundle.query_model, "query_tower.onnx").run(None, inputs)[0]
    np.testing.assert_allclose(embedded, trained.model.embed_queries(inputs), atol=1e-5)


@pytest.mark.usefixtures("every_table")
def test_a_job_s_bundle_holds_each_table_once(finished: Finished, tmp_path: Path) -> None:
    bundle = fit(load_recipe(finished.recipe), tmp_path / "bundle")
    assert sorted(bundle.tables) == ["genres", "item_id", "user_id"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    with np.load(tmp_path / "bundle" / "weights.npz") as weights:
        assert weights.files == ["tables/label bias"]
    assert all(path.stat().st_nlink == 1 for path in bundle.tables.values())
    before = Bundle.load(finished.out)
    assert not before.tables
    assert bundle.manifest.bias_removal.curve == before.manifest.bias_removal.curve
    again = evaluate(tmp_path / "bundle", finished.recipe)
    assert again.value("recall@5", bias_removal=0.5) == evaluate(finished.out).value("recall@5", bias_removal=0.5)

    from_bundle, from_job = WarmStart.read(tmp_path / "bundle"), WarmStart.read(finished.out)
    assert sorted(from_bundle.weights) == sorted(from_job.weights)
    for name, weight in from_job.weights.items():
        np.testing.assert_allclose(from_bundle.weights[name], weight, atol=1e-6, err_msg=name)
    files = json.loads((tmp_path / "bundle" / "manifest.json").read_text())["files"]
    assert all(files[f"tables/{name}.npy"]["sha256"] in from_bundle.sha256 for name in bundle.tables)
    assert from_job.sha256 == before.manifest.files["weights.npz"].sha256


def test_tables_from_a_mebibyte_on_have_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train_on(tmp_path, query={"features": [tiny.USER, HISTORY | {"weights": "symmetric"}]})
    item = trained.model.towers.tables["item_id"]
    assert not export_towers(trained, tmp_path)[1]
    monkeypatch.setattr(tables_module, "LEAST_BYTES", item.rows * item.dim * 4)
    _, tables = export_towers(trained, tmp_path)
    assert sorted(tables) == ["item_id", "pairs-query-seen", "user_id"]
    monkeypatch.setattr(tables_module, "LEAST_BYTES", (item.rows + 1) * item.dim * 4)
    assert sorted(export_towers(trained, tmp_path / "work")[1]) == ["user_id"]


@pytest.mark.usefixtures("every_table")
def test_a_tower_without_the_rows_of_a_table_is_refused(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(model: bytes, stand_in: dict[str, np.ndarray], files: dict[str, Path]) -> tuple[bytes, set[str]]:
        return link_tables(model, {name: rows + 1 for name, rows in stand_in.items()}, files)

    monkeypatch.setattr("longtail.trainer.export.onnx.link_tables", without)
    with pytest.raises(ExportError, match="query tower: expected a model that looks up rows of item_id, user_id"):
        export_towers(finished.trained, tmp_path)


def test_large_tables_of_any_model_are_moved_to_files(tmp_path: Path) -> None:
    model = make_bundle(labels=5000, dim=64).query_tower
    written, files = _without_large_tables({"query": model}, tmp_path)
    assert {name: np.load(file).shape for name, file in files.items()} == {"query-0": (5001, 64)}
    assert len(written["query"]) < 50_000 < len(model)
    (tmp_path / "query_tower.onnx").write_bytes(written["query"])
    inputs = {
        "user_id": np.array([3, 0], np.int32),
        "history": np.array([[1, 60], [5, 0]], np.int32),
        "history__weight": np.array([[1, 1], [0.5, 0]], np.float32),
    }
    (expected,) = onnx_session(model, "tower").run(None, inputs)
    (output,) = onnx_session(tmp_path / "query_tower.onnx", "tower").run(None, inputs)
    assert np.array_equal(output, expected)
