"""A batch in parts: one update by their mean gradient."""

from __future__ import annotations

import numpy as np
import pytest
from keras import ops
from pydantic import ValidationError

from tests.trainer import tiny

TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 1), (2, 3))
DATA = tiny.dataset(TRAIN, queries=3, labels=4)
SGD = {"embeddings": "sgd", "dense": "sgd", "embedding_learning_rate": 0.5, "dense_learning_rate": 0.5, "l2": 0.01}
FULL = {"sampler": "full", "weight": "importance"}


def test_accumulated_parts_equal_one_batch() -> None:
    """All labels are negatives, so that a row's loss depends on no other row. Adam steps by rounding errors."""
    models = []
    for parts in (1, 3):
        training = {"batch_size": 6, "accumulate": parts}
        job = tiny.recipe(loss=FULL, training=training, query={"features": [tiny.USER], "hidden": [3]}, optimizer=SGD)
        model = tiny.model(job, DATA, batch_size=6)
        losses = [float(model.train_step(tiny.batch(TRAIN))) for _ in range(3)]
        models.append((losses, [ops.convert_to_numpy(variable) for variable in model.variables if variable.shape]))

    np.testing.assert_allclose(models[0][0], models[1][0], rtol=1e-5)
    for unsplit, in_parts in zip(models[0][1], models[1][1], strict=True):
        if unsplit.dtype == np.float32:
            np.testing.assert_allclose(unsplit, in_parts, rtol=1e-3, atol=2e-5)


def test_in_batch_negatives_come_from_the_part() -> None:
    model = tiny.model(tiny.recipe(training={"batch_size": 6, "accumulate": 3}), DATA, batch_size=6)
    pairs = [tiny.batch(TRAIN.take(slice(at, at + 2))) for at in (0, 2, 4)]
    alone = [
        float(tiny.model(tiny.recipe(training={"batch_size": 2}), DATA, batch_size=2).train_step(pair))
        for pair in pairs
    ]

    assert float(model.train_step(tiny.batch(TRAIN))) == pytest.approx(np.mean(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"batch_size": 8, "accumulate": 3}},
            "accumulate: expected equal parts, of at least 2 pairs, of batch_size = 8",
        ),
        (
            {"training": {"batch_size": 4, "accumulate": 4}},
            "accumulate: expected equal parts, of at least 2 pairs, of batch_size = 4",
        ),
        (
            {"training": {"batch_size": 8, "accumulate": 2}, "loss": {"hits": "mask_known"}},
            "accumulate: expected 1 with loss.hits 'mask_known'",
        ),
    ],
)
def test_parts_that_are_not_defined_are_refused(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny.recipe(**sections)
