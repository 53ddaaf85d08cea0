"""What `test_devices` runs in processes of its own: `device_steps FOLDER NAME [COORDINATOR PROCESS]`.

Steps of a few jobs, whose losses and models go to FOLDER/NAME.npz.
Half way each job is kept as a checkpoint, from which NAME `resumed` goes on: that of `processes`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from longtail.trainer import devices
from longtail.trainer.arrays import read_values
from longtail.trainer.checkpoint import SharedCheckpoints
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.losses import batch_loss
from tests.trainer import tiny

QUERIES, LABELS, PAIRS, BATCH = 37, 23, 640, 24  # tables of rows that no number of devices divides
HISTORY = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4}
STEPS = {"remembered": 50, "sequences": 16}
"""Of jobs that are not 200 long: the last doubles what differs in the last bit every few steps."""
JOBS: dict[str, dict[str, Any]] = {
    "in batch": {
        "loss": {"sampler": "in_batch", "weight": "importance"},
        "optimizer": {"embeddings": "adam"},
    },
    "remembered": {
        "loss": {"sampler": {"name": "cross_batch", "negatives": 8}, "weight": "tail", "top_k": {"k": 2}},
        "optimizer": {"embeddings": "adagrad", "l2": 0.001, "average": 0.9},
        "training": {"accumulate": 2},
    },
    "sequences": {
        "model": {"dim": 4, "similarity": "dot", "temperature": 1.0, "init_scale": 0.5},
        "query": {"features": [HISTORY | {"encoder": {"name": "sasrec", "heads": 2, "dropout": 0.1}}]},
        "loss": {"sampler": "in_batch", "frequencies": "streaming", "hits": "mask_known"},
        "optimizer": {"embeddings": "sgd", "dense": "sgd", "l2": 0.001},
    },
}
"""What differs from the recipe of all."""


def build_job(sections: dict[str, Any]) -> Any:
    """A recipe on all devices."""
    every: dict[str, Any] = {
        "data": {"timestamp": "time"},
        "query": {"features": [tiny.USER | {"unknown_rate": 0.01}, HISTORY], "hidden": [8]},
        "model": {"dim": 4, "label_bias": True, "learn_temperature": True},
    }
    training = {"batch_size": BATCH, "devices": "all"} | sections.get("training", {})
    return tiny.recipe(**(every | sections | {"training": training}))


def run(name: str, checkpoints: Path, results: dict[str, Any], restored: bool) -> None:
    """Take a job's steps; `restored`, those of its second half."""
    job, steps, rng = build_job(JOBS[name]), STEPS.get(name, 200), np.random.default_rng(0)
    labels = np.minimum(rng.geometric(0.15, PAIRS) - 1, LABELS - 1)
    pairs = tiny.pairs(*zip(rng.integers(0, QUERIES, PAIRS).tolist(), labels.tolist(), strict=True))
    pairs = replace(pairs, times=np.arange(float(PAIRS)))
    data = tiny.dataset(pairs, queries=QUERIES, labels=LABELS, ordered=name == "sequences")
    devices.use_devices(job)
    keras.utils.set_random_seed(0)
    model, query = tiny.model(job, data, batch_size=BATCH, total_steps=steps), Encoding.fit(job, data).query
    saved = SharedCheckpoints(checkpoints / name, name)
    done, losses = 0, []
    if restored:
        state = saved.load("latest", model.variables)
        assert state is not None
        done = state["step"]
    steps_per_epoch = PAIRS // BATCH
    for epoch in range(done // steps_per_epoch, -(-steps // steps_per_epoch)):
        for step, batch in epoch_batches(
            data.train, query if job.training.accumulate == 1 else query.unpacked(), model.train_step.terms,
            batch_size=BATCH, seed=1, epoch=epoch, first=done % steps_per_epoch,
        ):  # fmt: skip
            losses.append(float(model.train_step(batch)))
            done = epoch * steps_per_epoch + step + 1
            if done == steps // 2 and not restored:
                saved.save("latest", model.variables, {"step": done})
            if done == steps:
                break
    results[f"{name}: losses"] = np.array(losses)
    results[f"{name}: labels"] = model.embed_labels()
    results[f"{name}: queries"] = model.embed_queries(query.query_inputs(np.arange(QUERIES, dtype=np.int32)))
    results[f"{name}: tables"] = np.concatenate([read_values(table.table).ravel() for table in model.tables.values()])


def main(folder: Path, name: str, coordinator: str | None = None, process: int | None = None) -> None:
    """As the head of this file says."""
    batch_loss._CACHED_BYTES, batch_loss._LEAST_ROWS = 1, 5  # a few blocks, on one device the last not full
    if coordinator is not None:
        devices.join(coordinator, 2, process)
    results: dict[str, Any] = {}
    for job in JOBS:
        run(job, folder / ("processes" if name == "resumed" else name), results, restored=name == "resumed")
    if not devices.WORLD.process:
        np.savez(folder / f"{name}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *sys.argv[3:4], *map(int, sys.argv[4:5]))
