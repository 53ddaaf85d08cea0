import math

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.losses import LOSSES, MASKED


def softmax(
    positive: list[float], negative: list[list[float]], log_weight: list[list[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The loss of every row, and the gradients of their sum by positive and negative."""

    def total(logits: list[object]) -> tuple[object, object]:
        losses_B = LOSSES["softmax"].loss(*logits, ops.convert_to_tensor(log_weight, "float32"))
        return ops.sum(losses_B), losses_B

    logits = [ops.convert_to_tensor(positive, "float32"), ops.convert_to_tensor(negative, "float32")]
    (_, losses_B), gradients, _ = backend.value_and_gradients(total, logits, [])
    return ops.convert_to_numpy(losses_B), ops.convert_to_numpy(gradients[0]), ops.convert_to_numpy(gradients[1])


def test_softmax_by_hand() -> None:
    loss, by_positive, by_negative = softmax([1, 0], [[0, 2], [1, 1]], [[0, math.log(3)], [math.log(0.5)] * 2])

    odds = [math.exp(-1) + 3 * math.exp(1), 0.5 * math.e + 0.5 * math.e]
    np.testing.assert_allclose(loss, [math.log(1 + odds[0]), math.log(1 + odds[1])], rtol=1e-6)
    np.testing.assert_allclose(by_positive, [-odds[0] / (1 + odds[0]), -odds[1] / (1 + odds[1])], rtol=1e-6)
    np.testing.assert_allclose(
        by_negative,
        [
            [math.exp(-1) / (1 + odds[0]), 3 * math.e / (1 + odds[0])],
            [0.5 * math.e / (1 + odds[1]), 0.5 * math.e / (1 + odds[1])],
        ],
        rtol=1e-6,
    )


def test_masked_negatives_affect_neither_value_nor_gradient() -> None:
    with_mask = softmax([1], [[0, 50, 2]], [[0, MASKED, 0]])
    without = softmax([1], [[0, 2]], [[0, 0]])

    assert with_mask[0].tolist() == without[0].tolist()
    assert with_mask[1].tolist() == without[1].tolist()
    assert with_mask[2][0, 1] == 0
    assert with_mask[2][0, [0, 2]].tolist() == without[2][0].tolist()


def test_a_row_without_negatives_has_loss_and_gradient_zero() -> None:
    loss, by_positive, by_negative = softmax([-30], [[3, 90]], [[MASKED, MASKED]])

    assert loss.tolist() == [0]
    assert by_positive.tolist() == [0]
    assert by_negative.tolist() == [[0, 0]]


@pytest.mark.parametrize("positive", [-1e4, 1e4])
@pytest.mark.parametrize("negative", [-1e4, 1e4])
def test_huge_logits_stay_finite(positive: float, negative: float) -> None:
    loss, by_positive, by_negative = softmax([positive], [[negative, negative, 0]], [[0, -20, MASKED]])

    assert loss.tolist() == pytest.approx([max(negative - positive, math.log(2) if negative == positive else 0)])
    assert -1 <= by_positive[0] <= 0
    assert np.isfinite(by_negative).all()


def test_the_mask_is_a_weight_of_zero() -> None:
    assert np.exp(np.float32(MASKED)) == 0
    assert np.float32(MASKED) + np.float32(1e4) == np.float32(MASKED)
