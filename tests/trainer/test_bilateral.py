"""The bilateral softmax loss by hand, in a step, and where a query's positives share their term (BSL) [METHODS §10]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.loss_terms.queries import PooledPositives
from longtail.trainer.losses import LOSSES, MASKED, Objective, SampledLogits
from longtail.trainer.losses.families import pool_positives
from tests.trainer import tiny

BSL = {"name": "bilateral_softmax", "power": 1.25}
COSINES = {"similarity": "cosine", "temperature": 0.1}
ROWS = tiny.pairs((0, 0), (1, 1), (0, 2), (2, 1), (2, 3), (0, 4))
GROUPS = np.int32([0, 1, 0, 2, 2, 0])


def logits(rows: int = 6, negatives: int = 5) -> SampledLogits:
    rng = np.random.default_rng(0)
    nothing_B, nothing_M = np.zeros(rows, np.float32), np.zeros(negatives, np.float32)
    return SampledLogits(
        rng.normal(0, 3, rows).astype(np.float32),
        rng.normal(0, 3, (rows, negatives)).astype(np.float32),
        rng.random((rows, negatives)) < 0.2,
        nothing_B, nothing_M, nothing_B, nothing_M,
    )  # fmt: skip


POOLED = PooledPositives(tiny.pairs((0, 0)), 1)


def by_hand(of: SampledLogits, power: float, groups_B: np.ndarray | None = None) -> np.ndarray:
    losses = []
    for row, positive in enumerate(of.positive_B):
        shared = [positive] if groups_B is None else of.positive_B[groups_B == groups_B[row]]
        unmasked = of.negative_BM[row][~of.hits_BM[row]].astype(np.float64)
        losses.append(power * np.log(np.exp(unmasked).sum()) - np.log(np.exp(np.float64(shared)).mean()))
    return np.array(losses)


@pytest.mark.parametrize("groups_B", [None, GROUPS], ids=["alone", "pooled"])
@pytest.mark.parametrize("power", [1.0, 1.25])
def test_the_loss_by_hand(power: float, groups_B: np.ndarray | None) -> None:
    of = logits()
    rows, terms = ({}, ()) if groups_B is None else ({"group": groups_B}, (POOLED,))
    losses_B = Objective("bilateral_softmax", "unit", {"power": power}, terms=terms)(of._replace(rows=rows))

    np.testing.assert_allclose(losses_B, by_hand(of, power, groups_B), rtol=1e-5)


def test_gradients_equal_central_differences() -> None:
    of = logits()
    groups_B = ops.convert_to_tensor(GROUPS)

    def total(rows: list[Any]) -> tuple[Any, Any]:
        moved = of._replace(positive_B=rows[0], negative_BM=rows[1], rows={"group": groups_B})
        losses_B = Objective("bilateral_softmax", "unit", {"power": 1.25}, terms=(POOLED,))(moved)
        return ops.sum(losses_B), losses_B

    tensors = [ops.convert_to_tensor(of.positive_B), ops.convert_to_tensor(of.negative_BM)]
    _, (by_positive_B, by_negative_BM), _ = backend.value_and_gradients(total, tensors, [])

    for row in range(len(of.positive_B)):
        step_B = 1e-4 * (np.arange(len(of.positive_B)) == row)
        up, down = (of._replace(positive_B=of.positive_B + sign * step_B) for sign in (1, -1))
        slope = (by_hand(up, 1.25, GROUPS).sum() - by_hand(down, 1.25, GROUPS).sum()) / 2e-4
        assert ops.convert_to_numpy(by_positive_B)[row] == pytest.approx(slope, rel=1e-4, abs=1e-5)
    shares_BM = np.where(of.hits_BM, 0, np.exp(of.negative_BM))
    np.testing.assert_allclose(by_negative_BM, 1.25 * shares_BM / shares_BM.sum(axis=1, keepdims=True), rtol=1e-4)


def test_the_loss_without_negatives_is_minus_the_positive() -> None:
    row = np.float32([3]), np.float32([[5, 90]]), np.float32([[MASKED, MASKED]])

    assert float(LOSSES["bilateral_softmax"].loss(*row, power=1.25)[0]) == -3


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_pooled_logits_may_be_huge(size: float) -> None:
    pooled_B = pool_positives(np.float32([size, 0, size - 1, 1]), np.int32([2, 0, 2, 0]))

    both = np.log1p(np.exp(-1)) - np.log(2)
    np.testing.assert_allclose(pooled_B, [size + both, 1 + both, size + both, 1 + both], rtol=1e-6)


def test_batches_number_distinct_requests() -> None:
    data = tiny.dataset(ROWS, queries=3, labels=5)
    features = Encoding.fit(tiny.recipe(), data).query
    settings: dict[str, Any] = {"batch_size": 5, "seed": 0, "epoch": 0, "first": 0}
    ((_, batch),) = epoch_batches(data.train, features, [PooledPositives(data.train, 1)], **settings)
    asked_B = data.train.queries[batch["_pair"]]

    assert batch["_group"].dtype == np.int32
    assert batch["_group"].max() < 5
    np.testing.assert_array_equal(
        batch["_group"][:, None] == batch["_group"], asked_B[:, None] == asked_B
    )  # fmt: skip
    ((_, plain),) = epoch_batches(data.train, features, **settings)
    assert "_group" not in plain
    # A query is asked in a way of its own for every objective.
    several = replace(data.train, objectives=np.int32([0, 0, 1, 0, 0, 1]))
    ((_, batch),) = epoch_batches(several, features, [PooledPositives(several, 1)], **settings)
    asked_B = asked_B * 2 + several.objectives[batch["_pair"]]
    np.testing.assert_array_equal(
        batch["_group"][:, None] == batch["_group"], asked_B[:, None] == asked_B
    )  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_pools_the_positives_of_a_query_within_a_part(parts: int) -> None:
    recipe = tiny.recipe(loss={"family": BSL, "sampler": "full"}, model=COSINES, training={"accumulate": parts})
    data = tiny.dataset(ROWS, queries=3, labels=6)
    model, features = tiny.model(recipe, data, batch_size=6), Encoding.fit(recipe, data).query
    terms = [PooledPositives(data.train, parts)]
    ((_, batch),) = epoch_batches(data.train, features, terms, batch_size=6, seed=1, epoch=0)
    queries_B, labels_B, part_B = data.train.queries[batch["_pair"]], batch["_positive"], np.arange(6) * parts // 6
    logits_BL = model.embed_queries({"user_id": queries_B + 1}) @ model.embed_labels().T / 0.1
    expected_B = []
    for row in range(6):
        rows = np.flatnonzero((queries_B == queries_B[row]) & (part_B == part_B[row]))
        # Hits are kept: the positive is a label like any other. The sixth label is in no pair.
        pooled = np.log(np.exp(logits_BL[rows, labels_B[rows]]).mean())
        expected_B.append(1.25 * np.log(np.exp(logits_BL[row]).sum()) - pooled)

    queries_of_parts = len(set(zip(part_B, queries_B, strict=True)))
    assert queries_of_parts > 3 if parts == 2 else queries_of_parts == 3, "a query is in both parts"
    assert batch["_group"].max() < 3
    batch["user_id"] = queries_B + 1
    assert float(model.train_step(batch)) == pytest.approx(np.mean(expected_B), rel=1e-5)
