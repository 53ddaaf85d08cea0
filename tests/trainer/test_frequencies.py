"""Label frequencies from the stream of batches [Yi19 Algorithm 2]."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.sampling import SAMPLERS, SamplerSetup
from longtail.trainer.sampling.frequencies import StreamingFrequencies
from tests.trainer import tiny


def gaps(stream: StreamingFrequencies, labels: list[int]) -> np.ndarray:
    """Pairs between two occurrences of a label, as estimated."""
    return np.exp(-np.asarray(stream.log_pi(ops.convert_to_tensor(np.int32(labels)))).astype(np.float64))


def streaming(labels: int, *, rate: float, initial_gap: float) -> StreamingFrequencies:
    log_pi_L = np.full(labels, -np.log(labels))
    sampler = SAMPLERS["in_batch"](SamplerSetup(log_pi_L, batch_size=8))
    return StreamingFrequencies(log_pi_L, sampler, rate=rate, initial_gap=initial_gap)


@functools.cache
def compiled(stream: StreamingFrequencies) -> Any:
    return backend.compile_step(lambda batch: stream.update(batch["labels"]), stream.variables)


def feed(stream: StreamingFrequencies, batches_NB: np.ndarray) -> None:
    for batch_B in batches_NB:
        compiled(stream)({"labels": ops.convert_to_tensor(batch_B.astype(np.int32))})


def test_gaps_by_hand() -> None:
    """With rate ½: the mean of the first two gaps, then half the old and half the new gap."""
    stream = streaming(1000, rate=0.5, initial_gap=100)
    for batch, expected in [
        ([0, 0, 1, 2], [4 / 2, 4, 4, 100]),
        ([0, 3, 3, 1], [(2 + 4) / 2, (4 + 4) / 2, 4, 8 / 2]),
        ([5, 5, 1, 5], [3, (4 + 4) / 2, 4, 4]),
        ([0, 0, 0, 2], [3 / 8 + 7 / 8 * 8 / 3, 4, (4 + 12) / 2, 4]),
    ]:
        stream.update(ops.convert_to_tensor(np.int32(batch)))
        np.testing.assert_allclose(gaps(stream, [0, 1, 2, 3]), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_estimates_of_rare_labels_have_the_stated_error(rate: float) -> None:
    """400 labels of π = 1/400 in batches of 64: gaps have no bias and a relative standard deviation of
    √(rate·(1 − π)/(2 − rate)), over labels and at several times."""
    labels, snapshots = 400, []
    stream = streaming(labels, rate=rate, initial_gap=800)
    rng = np.random.default_rng(1)
    for _ in range(4):
        feed(stream, rng.integers(0, labels, (400, 64)))
        snapshots.append(gaps(stream, list(range(labels))) / labels)

    settled = np.concatenate(snapshots[1:])
    expected = np.sqrt(rate * (1 - 1 / labels) / (2 - rate))
    assert settled.std() == pytest.approx(expected, rel=0.12)
    assert settled.mean() == pytest.approx(1, abs=4 * expected / np.sqrt(len(settled)))


def test_frequencies_follow_a_change() -> None:
    stream = streaming(2, rate=0.1, initial_gap=100)
    rng = np.random.default_rng(3)
    feed(stream, rng.choice(2, (100, 32), p=[0.9, 0.1]))
    before = gaps(stream, [0, 1])
    feed(stream, rng.choice(2, (100, 32), p=[0.1, 0.9]))
    after = gaps(stream, [0, 1])

    np.testing.assert_allclose(before, [1 / 0.9, 10], rtol=0.6)
    np.testing.assert_allclose(after, [10, 1 / 0.9], rtol=0.6)


TRAIN = tiny.pairs((0, 0), (1, 1), (2, 1), (3, 2), (4, 1), (5, 3))


def build_model(**loss: Any) -> TwoTower:
    recipe = tiny.recipe(loss={"frequencies": "streaming", "weight": "relative", **loss})
    return tiny.model(recipe, tiny.dataset(TRAIN, queries=6, labels=5), batch_size=6)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("sampler", [{"name": "in_batch"}, {"name": "mixed", "negatives": 3}])
def test_weights_use_streamed_frequencies(sampler: dict[str, Any]) -> None:
    """After one batch, π of its labels is 1/6, 3/6, 1/6 and 1/6, and of other labels half a pair in twelve."""
    model = build_model(sampler=sampler)
    logits_BL = model.embed_queries({"user_id": TRAIN.queries + 1}) @ model.embed_labels().T / 0.1
    loss = float(model.train_step(tiny.batch(TRAIN)))

    pi_L = np.array([1 / 6, 3 / 6, 1 / 6, 1 / 6, 1 / 12])
    if sampler["name"] == "in_batch":
        q_L, drawn = pi_L, TRAIN.labels
        log_q_L = np.log(q_L).astype(np.float32)
        rows = np.arange(6)
        expected = Objective("softmax", "relative")(
            SampledLogits(
                logits_BL[rows, TRAIN.labels], logits_BL[:, drawn], TRAIN.labels[:, None] == drawn,
                log_q_L[TRAIN.labels], log_q_L[drawn], log_q_L[TRAIN.labels], log_q_L[drawn],
            )
        )  # fmt: skip
        assert loss == pytest.approx(float(np.mean(np.asarray(expected))), rel=1e-5)
    np.testing.assert_allclose(
        np.exp(np.asarray(model.train_step._frequencies.log_pi(np.arange(5, dtype=np.int32)))), pi_L, rtol=1e-6
    )
    q = np.exp(np.asarray(model.sampler.q_of_pi(ops.log(ops.convert_to_tensor(pi_L.astype(np.float32))))))
    np.testing.assert_allclose(q, pi_L if sampler["name"] == "in_batch" else (5 * pi_L + 3 / 5) / 8, rtol=1e-6)
