"""Check that losses computed in blocks of rows equal losses of the whole batch."""

from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer.config import Recipe
from longtail.trainer.losses import batch_loss
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny
from tests.trainer.test_compiled import LOSSES
from tests.trainer.test_model import BATCH, SAMPLES, B, build_model

EACH_B = np.arange(B, dtype=np.int32)
OF_ROWS = {"_pair": EACH_B, "_group": EACH_B, "_request": BATCH.queries, "_pairs": np.float32(EACH_B + 1)}
KNOWN_POSITIVES = {"_known": np.int32([1, 1, 2, 4, 6]), "_known_rows": np.int32([0, 1, 1, 3, 5])}
SHOWN_LABELS = {"_shown": np.int32([[1, 3], [0, 1], [5, 4], [4, 2], [0, 6], [6, 6]])}

JOBS: dict[str, dict[str, Any]] = {
    **{f"{name}, softmax": {"sampler": sampler, "weight": "importance"} for name, sampler in SAMPLES.items()},
    **{name: {"sampler": SAMPLES["in_batch"]} | loss for name, loss in LOSSES.items()},
    "top_k of draws per row": {"sampler": SAMPLES["uniform per row"], "top_k": {"k": 2}, "weight": "importance"},
    "hits kept of draws": {"sampler": SAMPLES["mixed"], "hits": "keep"},
    "impressions": {"sampler": SAMPLES["in_batch"], "impressions": 0.5},
    "impressions beside draws": {"sampler": SAMPLES["mixed"], "impressions": 0.5, "hits": "mask_known"},
    "mining by chance": {"sampler": SAMPLES["full"], "mining": {"keep": 2, "draw": 3}},
}


def stepped(model: TwoTower) -> tuple[list[float], list[np.ndarray]]:
    impressions = SHOWN_LABELS if model.recipe.loss.impressions else {}
    batch = tiny.batch(BATCH, **OF_ROWS, **KNOWN_POSITIVES, **impressions)
    losses = [float(model.train_step(batch)) for _ in range(2)]
    return losses, [np.array(ops.convert_to_numpy(variable)) for variable in model.variables]


def assert_equal_in_blocks(recipe: Recipe, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, variables = stepped(build_model(recipe))
    monkeypatch.setattr(batch_loss, "_CACHED_BYTES", 0)
    monkeypatch.setattr(batch_loss, "_LEAST_ROWS", rows)
    in_blocks, others = stepped(build_model(recipe))
    assert in_blocks == pytest.approx(losses, rel=1e-6)
    for actual, expected in zip(others, variables, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


LIKE_ANOTHER = (
    "uniform, softmax", "popularity, softmax", "softmax", "contrastive", "hinge", "squared_hinge", "exponential",
    "ramp", "nce", "pairwise_softmax", "mined contrastive", "regularized", "hits kept", "top_k of draws per row",
    "hits kept of draws", "impressions",
)  # fmt: skip
"""Jobs of whose parts every one is in another of the table too."""


@pytest.mark.parametrize(
    ("job", "rows"),
    [
        *(pytest.param(job, 4, id=job, marks=pytest.mark.nightly if job in LIKE_ANOTHER else ()) for job in JOBS),
        pytest.param("mixed, softmax", 2, id="mixed, softmax, thirds"),
    ],
)
@pytest.mark.usefixtures("eager")
def test_a_step_in_blocks_equals_a_step_of_the_batch(job: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = "contrastive" in str(JOBS[job].get("family"))  # it is defined on cosines as they are
    more = {} if bare else {"label_bias": True, "learn_temperature": True}
    recipe = tiny.recipe(
        data={"impressions": "shown"},
        loss=JOBS[job],
        model={"dim": 4, "temperature": 1.0} | more,
        query={"features": [tiny.USER], "hidden": [5]},
        optimizer={"embeddings": "sgd", "dense": "sgd"},
    )
    assert_equal_in_blocks(recipe, rows, monkeypatch)


@pytest.mark.usefixtures("xla")
def test_the_step_is_compiled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny.recipe(loss={"sampler": SAMPLES["in_batch"], "weight": "tail"}, model={"dim": 4, "temperature": 1.0})
    assert_equal_in_blocks(recipe, 4, monkeypatch)
