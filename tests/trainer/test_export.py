import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from longtail.bundle import BiasRemoval, Bundle
from longtail.trainer import job
from longtail.trainer.errors import ExportError
from longtail.trainer.evaluation.baselines import BASELINES
from longtail.trainer.evaluation.bundle import evaluate
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.tables import evaluation_markdown, evaluation_table
from longtail.trainer.export.bundle import to_bundle
from longtail.trainer.history import TrainingHistory
from longtail.trainer.trained import Trained
from tests.bundles import onnx_query_tower
from tests.trainer import tiny
from tests.trainer.conftest import Finished


def run(model: bytes, inputs: dict[str, Any]) -> np.ndarray:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, inputs)[0]


@pytest.fixture(scope="module")
def bundle(finished: Finished) -> Bundle:
    return Bundle.load(finished.out)


def test_the_bundle_describes_the_job(bundle: Bundle) -> None:
    manifest = bundle.manifest

    assert (manifest.name, manifest.labels, manifest.dim, manifest.similarity) == ("tiny", 16, 4, "cosine")
    assert (manifest.temperature, manifest.label_bias) == (pytest.approx(0.1), True)
    assert manifest.loss.model_dump() == {"family": "softmax", "sampler": "in_batch", "weight": "unit"}
    assert [feature.name for feature in manifest.query_features] == ["user_id", "history"]
    assert [feature.name for feature in manifest.label_features] == ["item_id", "genres"]
    assert manifest.display == ["title"]
    assert sorted(bundle.vocabularies) == ["genres", "item_id", "user_id"]
    assert manifest.training_data["pairs"] == 40 * 6
    assert {*manifest.training_data} >= {"query_id", "label_id"}
    assert manifest.training_data["epochs"] == 3
    assert manifest.software["backend"] == "tensorflow"
    assert manifest.bias_removal.chosen_by == "valid recall@5"
    assert manifest.bias_removal.curve_split == "test"
    assert [point.bias_removal for point in manifest.bias_removal.curve] == [0, 0.5, 1]
    assert len(bundle.calibration_queries) == 40


def test_calibration_queries_know_what_their_answers_leave_out(bundle: Bundle, finished: Finished) -> None:
    pairs = pq.read_table(finished.recipe.parent / "interactions.parquet").sort_by("timestamp").to_pylist()
    rows, seen_rows = {id_: row for row, id_ in enumerate(bundle.labels.ids.to_pylist())}, dict[str, list[int]]()
    for pair in pairs:
        seen_rows.setdefault(str(pair["user_id"]), []).append(rows[str(pair["item_id"])])
    queries = finished.trained.dataset.query_ids.to_pylist()
    expected = [[i, row] for i, query in enumerate(queries) for row in sorted({*seen_rows[query][:-1]})]
    assert bundle.manifest.exclude_history
    assert bundle.calibration_seen.tolist() == expected


@pytest.mark.parametrize("positions", [1, 3, 8])
def test_the_query_tower_computes_what_keras_does(finished: Finished, bundle: Bundle, positions: int) -> None:
    rng = np.random.default_rng(positions)
    inputs = {
        "user_id": rng.integers(0, 41, 5).astype(np.int32),
        "history": rng.integers(0, 17, (5, positions)).astype(np.int32),
        "history__weight": rng.integers(0, 2, (5, positions)).astype(np.float32),
    }

    embeddings = run(bundle.query_tower, inputs)

    np.testing.assert_allclose(embeddings, finished.trained.model.embed_queries(inputs), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)


def test_the_label_tower_computes_the_embeddings(finished: Finished, bundle: Bundle) -> None:
    assert bundle.label_tower is not None
    np.testing.assert_allclose(
        run(bundle.label_tower, finished.trained.encoding.label_inputs), bundle.embeddings, atol=1e-5
    )


def test_a_fit_ends_with_baselines_on_its_own_test(finished: Finished) -> None:
    figures = json.loads((finished.out / "metrics.json").read_text())
    (default,) = [point for point in figures["curve"] if point["bias_removal"] == figures["default"]]

    assert list(figures["baselines"]) == [name for name in BASELINES if name != "attribute share"], (
        "no column of kind id"
    )
    values = {name: metrics["recall@5"]["value"] for name, metrics in figures["baselines"].items()}
    for metrics in figures["baselines"].values():
        assert metrics.keys() == default["metrics"].keys()
    against = figures["against_best_baseline"]
    assert values[against["baseline"]] == max(values.values())
    assert against["difference"]["value"] == pytest.approx(
        default["metrics"]["recall@5"]["value"] - max(values.values())
    )  # fmt: skip
    for text in (finished.output.replace("\n", " "), (finished.out / "report.html").read_text()):
        assert against["in_words"].split(":")[0] in text
        assert "item-kNN" in text
    reading = {"share": figures["baseline_settings"]["recent popularity"]["share"]}
    assert reading["share"] in [0.5**halvings for halvings in range(1, 9)]


def test_measuring_the_bundle_again_prints_the_table_that_fit_printed(finished: Finished) -> None:
    """One goes through Keras, the other through ONNX and the bundle's files."""
    screen = io.StringIO()
    for result in (evaluate(finished.out, finished.recipe), evaluate(finished.out)):
        assert (result.name, result.bias_removal.curve_split) == ("tiny", "test")
        Console(file=screen, width=120).print(evaluation_table("tiny: test", result.dial, result.metric).rich())
    again, stored = screen.getvalue().split("tiny: test, top 5")[1:]

    assert again == stored
    rows = [line for line in stored.splitlines() if "│" in line]
    assert len(rows) == 3
    for row in rows:
        assert row in finished.output

    valid = evaluate(finished.out, finished.recipe, split="valid")
    assert evaluation_markdown(valid.dial, valid.metric).count("\n| ") == 3


def id_towers(tmp_path: Path, **sections: Any) -> Trained:
    recipe = tiny.recipe(**sections)
    dataset = tiny.dataset(tiny.pairs((0, 0), (1, 1), (2, 2)), queries=3, labels=3)
    return tiny.train(recipe, dataset, tmp_path / "work")


def test_a_tower_away_from_the_centre_of_the_labels_is_measured_as_at_it(finished: Finished, tmp_path: Path) -> None:
    bundle, centre = Bundle.load(finished.out), [4.0, -8.0, 2.0, 1.0]
    model = onnx.load_from_string(bundle.query_tower)
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["at_centre" if name == output.name else name for name in node.output]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(centre), "centre"))
    model.graph.node.append(onnx.helper.make_node("Add", ["at_centre", "centre"], [output.name]))
    manifest = bundle.manifest.model_copy(update={"centre": centre})
    dataclasses.replace(bundle, manifest=manifest, query_tower=model.SerializeToString()).write(tmp_path / "moved")
    before, after = (evaluate(path, finished.recipe).dial.curve for path in (finished.out, tmp_path / "moved"))
    assert [point.metrics["recall@5"] for point in after] == [point.metrics["recall@5"] for point in before]


@pytest.mark.slow
def test_a_model_trained_in_mixed_precision_is_exported_in_full(tmp_path: Path) -> None:
    training, query = {"precision": "mixed_bfloat16", "batch_size": 3}, {"features": [tiny.USER], "hidden": [8]}
    trained = id_towers(tmp_path, training=training, query=query)

    train, past = trained.dataset.with_past(trained.dataset.train, trained.dataset.train)
    bundle = to_bundle(trained, train, np.arange(3), past, Dial(BiasRemoval(default=0)), {}, tmp_path)
    inputs = {"user_id": np.int32([0, 1, 2, 3])}
    np.testing.assert_allclose(run(bundle.query_tower, inputs), trained.model.embed_queries(inputs), atol=1e-5)


ALTERED: dict[str, tuple[Callable[[bytes, bytes], tuple[bytes, bytes]], str]] = {
    "another model": (
        lambda _, label: (onnx_query_tower(np.eye(41, 4, dtype="f4"), np.eye(17, 4, dtype="f4"), cosine=True), label),
        "query_tower.onnx: expected the trained outputs within 0.0001, found ",
    ),
    "another tower": (
        lambda query, _: (query, query),
        r"label_tower.onnx: expected queries with the inputs \['history', .*\], received \['genres', .*\]",
    ),
}


@pytest.mark.parametrize(("alter", "message"), ALTERED.values(), ids=ALTERED)
def test_a_tower_that_computes_something_else_is_not_exported(
    finished: Finished,
    bundle: Bundle,
    alter: Callable[[bytes, bytes], tuple[bytes, bytes]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert bundle.label_tower is not None
    altered = dict(zip(("query", "label"), alter(bundle.query_tower, bundle.label_tower), strict=True))
    monkeypatch.setattr("longtail.trainer.export.bundle.export_towers", lambda *_: (altered, {}))
    for side, model in altered.items():
        (tmp_path / f"{side}_tower.onnx").write_bytes(model)

    train, past = (dataset := finished.trained.dataset).with_past(dataset.train, dataset.train)
    with pytest.raises(ExportError, match=message):
        to_bundle(finished.trained, train, np.arange(40), past, Dial(BiasRemoval(default=0)), {}, tmp_path)


def test_a_job_without_a_valid_split_serves_the_recipe_s_default(finished: Finished) -> None:
    dataset = finished.trained.dataset
    alone = tiny.dataset(dataset.train, queries=40, labels=16)
    trained = Trained(
        finished.trained.recipe,
        alone,
        finished.trained.encoding,
        finished.trained.model,
        finished.trained.step,
        TrainingHistory(),
    )

    dial = job.choose_dial(trained, alone).dial.bias_removal

    assert (dial.default, dial.chosen_by, dial.curve) == (1, "theory, for want of validation data", [])
