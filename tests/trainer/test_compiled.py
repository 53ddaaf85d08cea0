"""Losses as users have them, compiled by XLA: other tests' run in TensorFlow's graph, which accepts more."""

from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny
from tests.trainer.test_model import BATCH, FAMILIES, SAMPLES, B, build_model, hidden

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("xla")]

LOSSES: dict[str, dict[str, Any]] = FAMILIES | {
    "top_k": {"top_k": {"k": 2}, "weight": "importance"},
    "hits kept": {"hits": "keep"},
    "known positives masked": {"hits": "mask_known"},
    "negatives per query": {"family": "logistic", "hits": "mask_known", "negatives_per": "query"},
    "kept from batch to batch": {"sampler": {"name": "cross_batch", "negatives": 4}},
}  # fmt: skip


def same(compiled: TwoTower, eager: TwoTower, batch: Any) -> None:
    for _ in range(2):
        losses = [float(model.train_step(batch)) for model in (compiled, eager)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for variable, of_other in zip(compiled.variables, eager.variables, strict=True):
        actual, expected = (ops.convert_to_numpy(value) for value in (variable, of_other))
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4, err_msg=variable.path)


LIKE_ANOTHER = (
    "softmax", "logistic", "hinge", "squared_hinge", "ramp", "exponential", "nce", "contrastive", "mined contrastive",
    "regularized", "hits kept", "known positives masked", "pairwise_softmax", "pairwise hinge", "augment_and_reduce",
    "negatives per query",
)  # fmt: skip
"""Losses of whose operations XLA compiles nearly every one in another of the table too."""


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=pytest.mark.nightly if name in LIKE_ANOTHER else ()) for name in LOSSES]
)
def test_compiled_losses_equal_eager_losses(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"sampler": SAMPLES["in_batch"]} | LOSSES[loss]
    recipe = tiny.recipe(loss=settings, model={"dim": 4, "temperature": 1.0})
    compiled = build_model(recipe)
    monkeypatch.setattr(backend, "compile_loss", lambda function: function)
    each_B = np.arange(B, dtype=np.int32)
    columns = {"_pair": each_B, "_group": each_B, "_request": BATCH.queries, "_pairs": np.float32(each_B + 1)}
    known_columns = {"_known": np.int32([1, 1, 2, 4]), "_known_rows": np.int32([0, 1, 1, 3])}
    same(compiled, build_model(recipe), tiny.batch(BATCH, **columns, **known_columns))


def test_compiled_steps_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = build_model(hidden("float32"))
    monkeypatch.setattr(backend, "compile_step", lambda step, _: step)
    monkeypatch.setattr(backend, "compile_loss", lambda function: function)
    same(compiled, build_model(hidden("float32")), tiny.batch(BATCH))
