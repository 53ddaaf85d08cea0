"""Cost of a training step as the catalogue grows, compared with TFRS on the same work.

    python -m benchmarks.step_cost [--tfrs-python PATH] [--labels 10000 1000000 4000000]

In-batch softmax, batch 4096, d = 64, id towers, 100,000 queries, uniform ids (which touch the most distinct rows per
batch). Sizes take turns in every round, so that a busy machine affects all sizes equally. The table has the median
step, and ratios to the smallest catalogue of the same trainer.

    python -m benchmarks.step_cost --batches 1024 2048 4096

compares steps with their three matrix products by TensorFlow, logits and both gradients, 1,024 rows at a time; once as
`tf.matmul` computes them, and once with the gradient of the labels as [D, B], which it computes several times as fast.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH, DIM, QUERIES = 4096, 64, 100_000
ROUNDS, STEPS = 5, 4


def longtail_step(
    labels: int, optimizer: str, *, batch: int = BATCH, dim: int = DIM, queries: int = QUERIES,
    precision: str = "float32", devices: str = "one",
) -> Callable[[np.ndarray, np.ndarray], object]:  # fmt: skip
    """Compile a training step of a new model; its arguments are rows of queries and of labels."""
    import pyarrow as pa

    from longtail.trainer.config import Recipe
    from longtail.trainer.data.dataset import Dataset
    from longtail.trainer.data.encode import Encoding
    from longtail.trainer.data.pairs import Pairs
    from longtail.trainer.devices import use_devices
    from longtail.trainer.model.step import TrainStep
    from longtail.trainer.model.two_tower import TwoTower

    recipe = Recipe.model_validate(
        {
            "name": "step-cost",
            "data": {"train": "unused", "query_id": "query", "label_id": "label"},
            "query": {"features": [{"name": "query", "kind": "id", "dim": dim}]},
            "label": {"features": [{"name": "label", "kind": "id", "dim": dim}]},
            "model": {"dim": dim},
            "training": {"precision": precision, "devices": devices, "batch_size": batch},
            "optimizer": {"embeddings": optimizer},
        }
    )
    query_ids = pa.array(np.arange(queries)).cast(pa.string())
    label_ids = pa.array(np.arange(labels)).cast(pa.string())
    rows = np.arange(queries, dtype=np.int32)
    pairs = Pairs(rows, rows % labels)
    nothing = pairs.take(slice(0))
    dataset = Dataset(query_ids, label_ids, pairs, nothing, nothing, None, None, ordered=False)
    visits_L = np.full(labels, queries / labels)
    use_devices(recipe)
    model = TwoTower(recipe, Encoding.fit(recipe, dataset), labels)
    train_step = TrainStep(model, visits_L, batch_size=batch, total_steps=1, pairs=len(dataset.train), terms=())
    weight = np.ones(batch, np.float32)

    def step(queries: np.ndarray, positives: np.ndarray) -> object:
        return float(train_step({"query": queries + 1, "_positive": positives, "_weight": weight}))

    return step


def tfrs_step(labels: int, optimizer: str) -> Callable[[np.ndarray, np.ndarray], object]:
    """Compile a training step of TFRS' `Retrieval` task with legacy Keras."""
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    class TwoTower(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            self.query = tf.keras.layers.Embedding(QUERIES, DIM)
            self.label = tf.keras.layers.Embedding(labels, DIM)
            self.task = tfrs.tasks.Retrieval(temperature=0.1, remove_accidental_hits=True)

        def compute_loss(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:  # noqa: ARG002
            queries = tf.math.l2_normalize(self.query(inputs["query"]), axis=1)
            candidates = tf.math.l2_normalize(self.label(inputs["label"]), axis=1)
            return self.task(queries, candidates, candidate_ids=inputs["label"], compute_metrics=False)

    model = TwoTower()
    optimizers = tf.keras.optimizers.legacy
    model.compile(optimizer=optimizers.Adagrad(0.01) if optimizer == "adagrad" else optimizers.Adam(0.01))
    compiled = tf.function(model.train_step)

    def step(queries: np.ndarray, positives: np.ndarray) -> object:
        return float(compiled({"query": tf.constant(queries), "label": tf.constant(positives)})["loss"])

    return step


def measure(
    make: Callable[[int, str], Callable[[np.ndarray, np.ndarray], object]], sizes: list[int], optimizer: str
) -> list[float]:
    """Measure the median milliseconds of a step for every catalogue size."""
    steps = [make(size, optimizer) for size in sizes]
    rng = np.random.default_rng(0)
    milliseconds: list[list[float]] = [[] for _ in sizes]
    for turn in range(ROUNDS + 1):
        for at, (size, step) in enumerate(zip(sizes, steps, strict=True)):
            for _ in range(STEPS):
                queries = rng.integers(0, QUERIES, BATCH).astype(np.int32)
                positives = rng.integers(0, size, BATCH).astype(np.int32)
                begin = time.perf_counter()
                step(queries, positives)
                if turn > 0:
                    milliseconds[at].append(1000 * (time.perf_counter() - begin))
    return [float(np.median(times)) for times in milliseconds]


def compare_products(labels: int, batch: int) -> str:
    """Measure median milliseconds of a step and of its products, which take turns; one line of a Markdown table."""
    import tensorflow as tf

    step, rng, some = longtail_step(labels, "adagrad", batch=batch), np.random.default_rng(0), min(batch, 1024)
    rows_ND, labels_BD = (tf.constant(rng.standard_normal((size, DIM), np.float32)) for size in (some, batch))

    @tf.function(autograph=False)
    def products(*, transposed: bool) -> tf.Tensor:
        logits_NB = tf.matmul(rows_ND, labels_BD, transpose_b=True)
        sides = (rows_ND, logits_NB) if transposed else (logits_NB, rows_ND)
        return tf.matmul(logits_NB, labels_BD)[0, 0] + tf.matmul(*sides, transpose_a=True)[0, 0]

    ways: list[Callable[[], object]] = [
        lambda: [float(products(transposed=False)) for _ in range(batch // some)],
        lambda: [float(products(transposed=True)) for _ in range(batch // some)],
        lambda: step(*(rng.integers(0, size, batch).astype(np.int32) for size in (QUERIES, labels))),
    ]
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(4 * ROUNDS):
        for i, way in enumerate(ways):
            begin = time.perf_counter()
            way()
            if turn >= ROUNDS:
                times[i].append(1000 * (time.perf_counter() - begin))
    products_ms, quickest_ms, step_ms = (float(np.median(milliseconds)) for milliseconds in times)
    cells = (products_ms, quickest_ms, step_ms, products_ms / step_ms, quickest_ms / step_ms)
    return f"| {batch:,} | {labels:,} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tfrs-python", type=Path, help="a Python with tensorflow-recommenders")
    parser.add_argument("--labels", type=int, nargs="+", default=[10_000, 1_000_000, 4_000_000])
    parser.add_argument("--only", choices=["longtail", "tfrs"], help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, nargs="+", help="compare steps of these sizes with their products")
    options = parser.parse_args()
    if options.batches:
        print("| batch | labels | products ms | quickest ms | step ms | products ÷ step | quickest ÷ step |")
        print("|---:" * 7 + "|")
        for labels in options.labels:
            for batch in options.batches:
                print(compare_products(labels, batch), flush=True)
        return
    if options.only:
        make = longtail_step if options.only == "longtail" else tfrs_step
        for optimizer in ("adagrad", "adam"):
            times = measure(make, options.labels, optimizer)
            cells = " | ".join(f"{ms:.1f} ms ({ms / times[0]:.2f}×)" for ms in times)
            print(f"| {options.only} | {optimizer} | {cells} |", flush=True)
        return
    print("| trainer | optimiser | " + " | ".join(f"{labels:,} labels" for labels in options.labels) + " |")
    print("|---" * (2 + len(options.labels)) + "|", flush=True)
    pythons = {"longtail": Path(sys.executable)} | ({"tfrs": options.tfrs_python} if options.tfrs_python else {})
    for trainer, python in pythons.items():
        command = [python, "-m", "benchmarks.step_cost", "--only", trainer, "--labels", *map(str, options.labels)]
        quiet = os.environ | {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
        subprocess.run(command, env=quiet if trainer == "tfrs" else quiet | {"TF_USE_LEGACY_KERAS": "0"}, check=True)


if __name__ == "__main__":
    main()
