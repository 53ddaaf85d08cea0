import math
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer.losses import LOSSES, MASKED, Mining, Objective, SampledLogits


def mined(mining: Mining, negative: list[float], log_weight: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Kept logits and their weights, of one row."""
    outputs = mining(ops.convert_to_tensor([negative], "float32"), ops.convert_to_tensor([log_weight], "float32"))
    return ops.convert_to_numpy(outputs[0])[0], np.exp(ops.convert_to_numpy(outputs[1])[0])


@pytest.mark.parametrize(
    ("mining", "logits", "weights"),
    [
        (Mining(keep=1), [5], [1]),
        (Mining(keep=2), [5, 3], [1 / 2, 1 / 2]),
        (Mining(keep=4), [5, 3, 0, -1], [1 / 4] * 4),
        (Mining(power=1), [5, 3, 0, -1], np.array([12, 6, 4, 3]) / 25),
        (Mining(keep=2, power=2), [5, 3], [4 / 5, 1 / 5]),
        (Mining(keep=3, power=0.5), [5, 3, 0], np.array([1, 2**-0.5, 3**-0.5]) / (1 + 2**-0.5 + 3**-0.5)),
        (Mining(theta=(3, 0.5, 0.25)), [5, 3, 0], [3, 0.5, 0.25]),
        (Mining(theta=(2, 0)), [5, 3], [2, 0]),
        (Mining(keep=2, epsilon=0.125), [5, 3, 0, -1], [1 / 2, 1 / 2, 1 / 8, 1 / 8]),
        (Mining(theta=(2, 1), epsilon=0.25), [5, 3, 0, -1], [2, 1, 1 / 4, 1 / 4]),
    ],
)
def test_theta_by_hand(mining: Mining, logits: list[float], weights: list[float]) -> None:
    hardest = mined(mining, [0, 5, -1, 3], [0, 0, 0, 0])

    assert hardest[0].tolist() == logits
    np.testing.assert_allclose(hardest[1], weights, rtol=1e-6)


def test_mining_ranks_masked_negatives_last() -> None:
    """The positive itself has the highest logit: it would be the hardest of all."""
    logits, weights = mined(Mining(keep=2), [90, 1, 2, 3], [MASKED, 0, 0, 0])

    assert logits.tolist() == [3, 2]
    np.testing.assert_allclose(weights, [0.5, 0.5])


@pytest.mark.parametrize(
    "mining", [Mining(keep=3, draw=5), Mining(power=1, draw=2), Mining(theta=(3, 0.5, 0), epsilon=0, draw=4)]
)
def test_ranks_are_drawn_in_proportion_to_theta_and_weigh_it_together(mining: Mining) -> None:
    """In 10,000 rows of 4 negatives, a rank weighs ϑ_j on average, and a row always weighs Σϑ."""
    rows, theta = 10_000, np.pad(mining.compute_theta(4), (0, 4 - len(mining.compute_theta(4))))
    ranks_BN = mining.ranks(rows, 4, keras.random.SeedGenerator(3))
    negative_BM = np.tile(np.float32([0, 5, -1, 3]), (rows, 1))
    logits_BN, log_weight_BN = (
        ops.convert_to_numpy(values) for values in mining(negative_BM, negative_BM * 0, ranks_BN)
    )

    assert logits_BN.shape == (rows, mining.draw)
    np.testing.assert_allclose(np.exp(log_weight_BN), theta.sum() / mining.draw, rtol=1e-6)
    weight_sums = np.array([np.exp(log_weight_BN[logits_BN == logit]).sum() / rows for logit in (5, 3, 0, -1)])
    assert (weight_sums[theta == 0] == 0).all()
    np.testing.assert_allclose(weight_sums, theta, atol=4 * theta.sum() / 2 / math.sqrt(rows * mining.draw))


def test_a_rank_of_a_masked_negative_weighs_nothing() -> None:
    negative, log_weight = np.float32([[90, 1, 2]]), np.float32([[MASKED, 0, 0]])
    logits, log_weights = Mining(power=1, draw=3)(negative, log_weight, np.int32([[2, 0, 2]]))

    assert ops.convert_to_numpy(logits).tolist() == [[90, 2, 90]]
    np.testing.assert_allclose(np.exp(ops.convert_to_numpy(log_weights)), [[0, 1 / 3, 0]], rtol=1e-6)


@pytest.mark.parametrize("family", [name for name, family in LOSSES.items() if family.weights is None])
def test_mining_works_with_every_family(family: str) -> None:
    """As if the two hardest had been drawn alone with half their weights, 1/(4·q_y')."""
    negative, log_q = np.float32([[0.9, 0.2, 0.5, -0.3]]), np.float32(np.log([[0.1, 0.2, 0.4, 0.3]]))
    hits, positive, logs = np.array([[True, False, False, False]]), np.float32([0.4]), (log_q[:, 0], log_q)
    loss = Objective(family, "importance", mining=Mining(keep=2))(SampledLogits(positive, negative, hits, *logs, *logs))

    log_weight = np.float32(np.log([[1 / (4 * 0.4) / 2, 1 / (4 * 0.2) / 2]]))
    expected = LOSSES[family].loss(positive, np.float32([[0.5, 0.2]]), log_weight)
    assert np.asarray(loss).item() == pytest.approx(np.asarray(expected).item(), rel=1e-6)


@pytest.mark.parametrize("weight", ["unit", "importance", "tail"])
def test_the_softmax_of_the_hardest_by_hand(weight: str) -> None:
    """`log[1 + (w_1 e^(f_1 − f_y) + w_2 e^(f_2 − f_y))/2]`, with q_y = 0.1, m = 4."""
    log_q: Any = np.float32(np.log([[0.1, 0.2, 0.4, 0.3]]))
    logs = (log_q[:, 0], log_q)
    logits = np.float32([0.4]), np.float32([[0.9, 0.2, 0.5, -0.3]])
    loss = Objective("softmax", weight, mining=Mining(keep=2))(
        SampledLogits(*logits, np.array([[True, False, False, False]]), *logs, *logs)
    )

    w = {"unit": [1, 1], "importance": [1 / (4 * 0.4), 1 / (4 * 0.2)], "tail": [1 / (4 * 0.1)] * 2}[weight]
    expected = math.log(1 + (w[0] * math.exp(0.1) + w[1] * math.exp(-0.2)) / 2)
    assert np.asarray(loss).item() == pytest.approx(expected, rel=1e-6)


def test_negatives_keep_their_own_weights() -> None:
    """Ranked by logit, not by weight: the kept are of weight 2 and 7, each times ½."""
    logits, weights = mined(Mining(keep=2), [0, 5, 4], np.log([9, 2, 7]).tolist())

    assert logits.tolist() == [5, 4]
    np.testing.assert_allclose(weights, [1, 3.5], rtol=1e-6)


def test_mining_gives_missing_negatives_weight_zero() -> None:
    logits, weights = mined(Mining(keep=3), [90, 1, 80], [MASKED, 0, MASKED])

    assert logits[0] == 1
    np.testing.assert_allclose(weights, [1 / 3, 0, 0], rtol=1e-6)
