"""The weights' moving average over all steps, from steps that touch some rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer import fit
from longtail.trainer.model.embedding import EmbeddingTable
from longtail.trainer.optimizers import LazyAverage
from tests.trainer import tiny

ROWS = tiny.pairs((0, 0), (1, 1), (0, 2), (2, 1), (2, 3), (0, 4), (1, 3), (2, 0))


def compute_average(values: list[np.ndarray], decay: float) -> np.ndarray:
    """Average values after steps 0 … T, each with `decay` times the weight of the next."""
    weights = decay ** np.arange(len(values) - 1, -1, -1.0)
    return np.average(np.array(values, np.float64), axis=0, weights=weights)


@pytest.mark.parametrize("decay", [0.5, 0.97])
def test_averages_count_steps_that_do_not_touch_a_row(decay: float) -> None:
    rng = np.random.default_rng(0)
    table = EmbeddingTable(6, 3, scale=1.0, seed=0, name="rows")
    average = LazyAverage(table, decay)
    values = [ops.convert_to_numpy(table.table).copy()]
    np.testing.assert_allclose(average.mean(np.float32(0)), values[0], rtol=1e-6)
    for step in range(1, 41):
        # Row 5 is never touched, row 4 only once.
        ids = np.unique(rng.integers(0, 4, 2)) if step != 7 else np.array([4])
        average.touch(ids.astype(np.int32), values[-1][ids], step=np.float32(step))
        after = values[-1].copy()
        after[ids] += rng.standard_normal((len(ids), 3)).astype(np.float32)
        table.table.assign(after)
        values.append(after)
        if step % 13 == 0:
            np.testing.assert_allclose(
                average.mean(np.float32(step)), compute_average(values, decay), rtol=2e-5, atol=1e-5
            )


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {}, "penalty": {"l2": 0.1}, "descent": {"embeddings": "sgd", "dense": "sgd"},
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_averaged_gives_the_model_averages_of_all_weights(optimizer: dict[str, Any]) -> None:
    recipe = tiny.recipe(
        query={"features": [tiny.USER], "hidden": [5]},
        model={"learn_temperature": True, "label_bias": True},
        optimizer={"average": 0.8, "embedding_learning_rate": 0.1, "dense_learning_rate": 0.1} | optimizer,
    )
    model = tiny.model(recipe, tiny.dataset(ROWS, queries=3, labels=6), batch_size=3)
    weights = [*(table.table for table in model.tables.values()), *model.dense_variables]

    def now() -> list[np.ndarray]:
        return [ops.convert_to_numpy(weight).copy() for weight in weights]

    history = [now()]
    for step in range(7):
        model.train_step(tiny.batch(ROWS.take(np.arange(3) + step % 6)))
        history.append(now())
    with model.train_step.updates.use_averages():
        for at, value in enumerate(now()):
            expected = compute_average([values[at] for values in history], 0.8)
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    for before, after in zip(history[-1], now(), strict=True):
        np.testing.assert_array_equal(before, after)
    model.train_step.updates.take_averages()
    assert not np.array_equal(now()[0], history[-1][0])


@pytest.mark.process
def test_a_bundle_holds_averaged_weights(tmp_path: Path) -> None:
    recipe, once = tiny.write_job(tmp_path), ["training.epochs=1", "evaluation.baselines=[]"]
    plain = fit(recipe, tmp_path / "plain", overrides=once)
    average = fit(recipe, tmp_path / "average", overrides=[*once, "optimizer.average=0.9"])
    assert np.abs(average.embeddings - plain.embeddings).max() > 1e-3
