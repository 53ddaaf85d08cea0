"""The same code on both backends: TensorFlow here, JAX in a process of its own."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.trainer import backend
from longtail.trainer.evaluation.bundle import evaluate
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.tables import evaluation_markdown
from tests.backends import environment
from tests.trainer import tiny
from tests.trainer.conftest import Finished

pytestmark = pytest.mark.process

STEPS = """
import sys
from dataclasses import replace
import numpy as np
from tests.trainer import tiny
from longtail.trainer.data.encode import Encoding
from longtail.trainer.loss_terms.neighbours import Neighbours

history = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4, "unknown_rate": 0}
of_labels = {"name": "seen", "kind": "history", "entries": "both", "dim": 4, "damping": 2}
smoothed = {"sasrec": {"smoothing": [0.5, 1.0]}, "hstu": {}}
encoders = {
    name: history | {"encoder": {"name": name, "heads": 2, "dropout": 0} | more} for name, more in smoothed.items()
}
rows = [(0, 0), (0, 1), (1, 2), (1, 1), (2, 1), (2, 3), (3, 4), (3, 5)]
results = {}
descent = {"embeddings": "sgd", "dense": "sgd", "momentum": 0.9, "schedule": "cosine", "l2": 0.01}
for name, sampler, weight, optimizer in [
    ("adam", "in_batch", "tail", {"embeddings": "adam"}),
    ("adagrad", "full", "importance", {"embeddings": "adagrad", "dense": "adagrad"}),
    ("remembered", {"name": "cross_batch", "negatives": 4}, "unit", descent),
    ("impressions", "in_batch", "unit", {"embeddings": "adam"}),
    ("objectives", "in_batch", "unit", descent),
    ("label tower", "in_batch", "unit", descent),
    ("sasrec", "full", "unit", {"embeddings": "adam"}),
    ("hstu", "full", "unit", {"embeddings": "adam"}),
]:
    if name not in sys.argv[2:]:
        continue
    pairs = replace(tiny.pairs(*rows), times=np.cumsum(7.0 ** np.arange(8)))
    data = tiny.dataset(pairs, queries=4, labels=6, ordered=name in encoders)
    read = of_labels if name == "label tower" else encoders.get(name, history)
    shown = {"impressions": 0.5, "retrieved_negatives": {"negatives": 1, "depth": 2}} if name == "impressions" else {}
    near = {"neighbours": {"k": 2, "weight": 0.5}} if name == "label tower" else {}
    chosen_by = {"adam": {"hits": "mask_known"}, "remembered": {"top_k": {"k": 2}}}.get(name, {})
    several = {"click": {"events": ["c"]}, "purchase": {"events": ["p"], "weight": 3}} if name == "objectives" else {}
    recipe = tiny.recipe(
        data={"impressions": "shown", "events": {"column": "event", "weights": {"c": 1, "p": 1}}, "timestamp": "time"},
        objectives=several,
        query={"features": [tiny.USER, read], "hidden": [8]},
        model={"dim": 4, "label_bias": True, "learn_temperature": True},
        loss={"sampler": sampler, "weight": weight} | shown | near | chosen_by,
        optimizer={"schedule": "linear"} | optimizer,
    )
    model = tiny.model(recipe, data, batch_size=4, total_steps=10)
    query, rng = Encoding.fit(recipe, data).query, np.random.default_rng(0)
    tables = [table.table for table in model.tables.values()]
    for weights in [*model.towers.query.weights, *model.towers.label.weights, *tables]:
        weights.assign(0.3 * rng.standard_normal(weights.shape).astype("float32"))
    for step in range(3):
        chosen = np.arange(4) + step
        batch = query.pair_inputs(chosen, rng, packed=name in encoders)
        batch |= {"_positive": data.train.labels[chosen], "_weight": np.float32([1, 2, 0.5, 1])}
        batch |= {"_shown": np.int32([[1, 3], [0, 0], [5, 4], [2, 2]])} if shown else {}
        batch |= {"_retrieved": np.int32([[4], [5], [0], [1]])} if shown else {}
        batch |= {"_objective": np.int32([0, 1, 1, 0])} if several else {}
        batch |= {"_request": data.train.queries[chosen]} if "top_k" in chosen_by else {}
        batch |= {"_known": np.int32([1, 0, 4, 5]), "_known_rows": np.int32([0, 1, 3, 3])} if name == "adam" else {}
        if recipe.loss.neighbours is not None:
            nearest = Neighbours(recipe.loss.neighbours, data, query.query_inputs)
            batch |= nearest.columns(chosen, batch, rng)
        results[f"{name}: loss {step}"] = float(model.train_step(batch))
    results[f"{name}: labels"] = model.embed_labels()
    results[f"{name}: queries"] = model.embed_queries(query.query_inputs(np.arange(4, dtype=np.int32)))
    results[f"{name}: biases"] = model.label_biases()
    results[f"{name}: temperature"] = model.temperature
np.savez(sys.argv[1], **results)
"""
"""Three steps of each named job from the same initial weights; what they give goes to a file."""
JOBS = ("remembered", "hstu", "adam", "adagrad", "impressions", "objectives", "label tower", "sasrec")
FIT = """
import sys
from longtail.trainer import fit
from longtail.trainer.export import tables

tables.LEAST_BYTES = 0
fit(sys.argv[1], sys.argv[2], overrides=["training.epochs=2"])
"""
"""A job whose tables all lie beside its towers, as large ones do."""
_HANGS_SECONDS = 1200
"""The longest takes four minutes on two cores, and more beside other work."""


def start(backend: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | environment(backend) | {"LONGTAIL_TEST_BACKEND": backend},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait(*processes: "subprocess.Popen[str]") -> None:
    """Wait for success; processes that are left when one fails are ended."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=_HANGS_SECONDS)
            assert process.returncode == 0, output
    finally:
        end(*processes)


def end(*processes: "subprocess.Popen[str]") -> None:
    """Kill what still runs, and close its pipe: a process left behind fails any later test, by a warning."""
    for process in processes:
        with process:
            process.kill()


@pytest.mark.nightly
def test_tensorflow_and_jax_take_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait(start("jax", "-c", STEPS, tmp_path / "jax.npz", *JOBS))
    monkeypatch.setattr(sys, "argv", ["steps", str(tmp_path / "tensorflow.npz"), *JOBS])
    exec(STEPS, {})

    by_tensorflow, by_jax = (np.load(tmp_path / f"{name}.npz") for name in ("tensorflow", "jax"))
    assert len(by_tensorflow.files) == len(JOBS) * 7
    for name in by_tensorflow.files:
        np.testing.assert_allclose(by_tensorflow[name], by_jax[name], atol=1e-5, err_msg=name)
    for name in JOBS:
        assert by_tensorflow[f"{name}: loss 0"] != by_tensorflow[f"{name}: loss 1"]
        assert by_tensorflow[f"{name}: biases"].any()


@pytest.mark.nightly
def test_a_model_trained_on_jax_is_exported_and_measures_the_same_in_onnx(tmp_path: Path, finished: Finished) -> None:
    """From recipe to bundle on JAX; measured again here, from the bundle's files."""
    out = tmp_path / "bundle"
    wait(start("jax", "-c", FIT, finished.recipe, out))

    bundle = Bundle.load(out)
    assert bundle.manifest.software["backend"] == "jax"
    assert sorted(bundle.tables) == ["genres", "item_id", "user_id"]
    assert bundle.label_tower is not None
    stored = tiny.read_curve(out)
    again = evaluate(out, finished.recipe)
    assert evaluation_markdown(again.dial, again.metric) == evaluation_markdown(Dial(stored), "recall@5")


def test_backends_have_the_same_operations() -> None:
    """Read as source: a process can load only one of them."""
    signatures = {}
    for name in ("tensorflow", "jax", "mesh"):
        module = ast.parse((Path(backend.__file__).parent / f"{name}.py").read_text())
        (names,) = (
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        signatures[name] = {
            node.name: [argument.arg for argument in node.args.args]
            for node in module.body
            if isinstance(node, ast.FunctionDef) and node.name in names
        }
        assert set(signatures[name]) == set(names)

    assert signatures["tensorflow"] == signatures["jax"]
    assert signatures["mesh"].items() <= signatures["jax"].items()
