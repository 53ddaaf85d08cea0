"""Check the pairwise softmax loss (PSL) by hand, its gradients, and its limits [METHODS §10]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.losses import LOSSES, MASKED
from longtail.trainer.losses.families import Activation

RNG = np.random.default_rng(0)
POSITIVE, NEGATIVE = RNG.normal(0, 2, 4).astype(np.float32), RNG.normal(0, 2, (4, 6)).astype(np.float32)
LOG_WEIGHT = np.where(RNG.random((4, 6)) < 0.2, MASKED, RNG.normal(0, 1, (4, 6))).astype(np.float32)
SIGMA = {"tanh": lambda d: 1 + np.tanh(d), "arctan": lambda d: 1 + np.arctan(d), "relu": lambda d: np.maximum(1 + d, 0)}
NAMES: tuple[Activation, ...] = ("tanh", "arctan", "relu")
loss = LOSSES["pairwise_softmax"].loss


def by_hand(positive: np.ndarray, negative: np.ndarray, activation: str, width: float) -> np.ndarray:
    gaps = (negative.astype(np.float64) - positive[:, None]) / width
    return np.log((np.exp(LOG_WEIGHT.astype(np.float64)) * np.maximum(SIGMA[activation](gaps), 0) ** width).sum(axis=1))


@pytest.mark.parametrize("width", [4.0, 20.0])
@pytest.mark.parametrize("activation", NAMES)
def test_the_loss_and_its_gradients_by_hand(activation: Activation, width: float) -> None:
    def total(rows: list[Any]) -> tuple[Any, Any]:
        losses_B = loss(*rows, ops.convert_to_tensor(LOG_WEIGHT), activation=activation, width=width)
        return ops.sum(losses_B), losses_B

    logits = [ops.convert_to_tensor(POSITIVE), ops.convert_to_tensor(NEGATIVE)]
    (_, losses_B), (by_positive_B, by_negative_BM), _ = backend.value_and_gradients(total, logits, [])

    np.testing.assert_allclose(losses_B, by_hand(POSITIVE, NEGATIVE, activation, width), rtol=1e-4, atol=1e-5)
    for row in range(4):
        for column in range(6):
            step = np.zeros((4, 6))
            step[row, column] = 1e-4
            up, down = (by_hand(POSITIVE, NEGATIVE + sign * step, activation, width).sum() for sign in (1, -1))
            slope = float(ops.convert_to_numpy(by_negative_BM)[row, column])
            assert slope == pytest.approx((up - down) / 2e-4, rel=1e-3, abs=1e-4)
    # A constant added to all logits changes nothing.
    np.testing.assert_allclose(ops.sum(by_negative_BM, axis=1), -ops.convert_to_numpy(by_positive_B), rtol=1e-4)


@pytest.mark.parametrize("activation", NAMES)
def test_rows_without_effective_negatives_have_no_loss_and_gradient(activation: Activation) -> None:
    """All masked; or, of the two that have an end, all so far below that their weight is 0."""
    positive, negative = np.float32([0, 100]), np.float32([[3, 90], [-100, -200]])
    log_weight = np.float32([[MASKED, MASKED], [0, 0]])

    def total(rows: list[Any]) -> tuple[Any, Any]:
        losses_B = loss(*rows, log_weight, activation=activation, width=10.0)
        return ops.sum(losses_B), losses_B

    logits = [ops.convert_to_tensor(positive), ops.convert_to_tensor(negative)]
    (_, losses_B), gradients, _ = backend.value_and_gradients(total, logits, [])
    assert float(losses_B[0]) == 0
    assert all(np.isfinite(ops.convert_to_numpy(gradient)).all() for gradient in gradients)
    if activation != "tanh":
        assert float(losses_B[1]) == 0
        assert not any(ops.convert_to_numpy(gradient).any() for gradient in gradients)
