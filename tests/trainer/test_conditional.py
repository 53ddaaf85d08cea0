"""Samplers that look at the query, on the device: the adversarial tree [BM20 §3] and the model itself (RF-softmax).

Legend: `B` rows, `M` draws a row, `L` labels.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.bundle import Proposal
from longtail.trainer import backend
from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.sampling import SAMPLERS, DrawContext, Sampler, SamplerSetup
from tests.trainer import tiny

L, DIM = 6, 3
UNIFORM = np.full(L, -np.log(L))
RNG = np.random.default_rng(21)


def hand_made_tree() -> Proposal:
    """Three levels, six labels and two paddings: the parents of leaves 5 and 7 always turn left."""
    weights = RNG.normal(0, 1, (8, 2)).astype(np.float32)
    biases = RNG.normal(0, 0.5, 8).astype(np.float32)
    weights[[6, 7]], biases[[6, 7]] = 0, -1e4
    projection = {
        "user": RNG.normal(0, 1, (4, 2)).astype(np.float32),
        "tags": RNG.normal(0, 1, (5, 2)).astype(np.float32),
        "age": np.float32([[0.3, -0.2]]),
    }
    tree = Proposal(projection, np.float32([0.1, -0.4]), weights, biases, np.int32([3, 0, 5, 1, 4, -1, 2, -1]))
    tree.validate(L)
    return tree


TREE = hand_made_tree()
INPUTS = {
    "user": np.int32([1, 3]),
    "tags": np.int32([[1, 4, 0], [2, 0, 0]]),
    "tags__weight": np.float32([[0.5, 0.5, 0], [2, 0, 0]]),
    "age": np.float32([1.5, -1]),
    "colour": np.int32([7, 8]),
}
LOG_P = TREE.all_log_probabilities(TREE.project(INPUTS))


def context(positive: list[int], *, inputs: dict[str, Any] | None = None, queries: Any = None) -> DrawContext:
    return DrawContext(
        ops.convert_to_tensor(np.int32(positive)),
        {name: ops.convert_to_tensor(column) for name, column in (inputs or {}).items()},
        None if queries is None else ops.convert_to_tensor(queries),
    )


def tree(*, negatives: int) -> Sampler:
    return SAMPLERS["adversarial"](SamplerSetup(UNIFORM, 2, DIM, TREE), negatives=negatives)


def unit(shape: tuple[int, int]) -> np.ndarray:
    rows = RNG.normal(0, 1, shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


LABELS, QUERIES = unit((L, DIM)), unit((2, DIM))


def by_the_model(*, negatives: int = 4, **arguments: float) -> Sampler:
    sampler = SAMPLERS["model"](SamplerSetup(UNIFORM, 2, DIM), negatives=negatives, **arguments)
    sampler.refresh(LABELS)
    return sampler


def log_q_of_all(sampler: Sampler, of: DrawContext) -> np.ndarray:
    """log q of every label for both rows, [2, L]."""
    return np.asarray(sampler.log_q(of, ops.convert_to_tensor(np.tile(np.arange(L, dtype=np.int32), (2, 1)))))


def assert_drawn_by(drawn_BM: np.ndarray, q_BL: np.ndarray) -> None:
    for drawn_M, q_L in zip(drawn_BM, q_BL, strict=True):
        found, expected = np.bincount(drawn_M, minlength=L), len(drawn_M) * q_L
        assert len(found) == L
        assert ((found - expected) ** 2 / expected).sum() < 20.52, "the 99.9 % quantile of χ² with 5 degrees of freedom"


def test_the_tree_s_draws_follow_the_proposal() -> None:
    drawn_BM = np.asarray(tree(negatives=50_000).draw(keras.random.SeedGenerator(1), context([0, 1], inputs=INPUTS)))

    assert drawn_BM.dtype == np.int32
    assert drawn_BM.shape == (2, 50_000)
    assert not np.allclose(LOG_P[0], LOG_P[1], atol=0.5), "two queries, two distributions"
    assert_drawn_by(drawn_BM, np.exp(LOG_P))


def test_the_tree_s_log_q_is_the_proposal_s() -> None:
    """Of an id, a weighted bag and a number, for labels of each row and for one label a row."""
    sampler, of = tree(negatives=2), context([5, 2], inputs=INPUTS)

    np.testing.assert_allclose(log_q_of_all(sampler, of), LOG_P, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(LOG_P).sum(axis=1), 1, rtol=1e-6)
    one = np.asarray(sampler.log_q(of, of.positive_B))
    np.testing.assert_allclose(one, [LOG_P[0, 5], LOG_P[1, 2]], rtol=1e-5)


@pytest.mark.parametrize("sampler", ["adversarial", "model"])
@pytest.mark.parametrize("least", [True, False], ids=["0", "just below 1"])
def test_padding_is_never_drawn(sampler: str, least: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform number may be exactly 0: below any odds that are not 0 themselves."""
    extreme = 0.0 if least else np.nextafter(np.float32(1), np.float32(0))
    monkeypatch.setattr(keras.random, "uniform", lambda shape, **_: ops.full(shape, extreme, "float32"))
    made = tree(negatives=3) if sampler == "adversarial" else by_the_model(negatives=3)
    of = context([0, 1], inputs=INPUTS, queries=QUERIES)
    drawn_BM = np.asarray(made.draw(keras.random.SeedGenerator(1), of))

    rightmost = 2 if sampler == "adversarial" else 5
    leftmost = 3 if sampler == "adversarial" else 0
    assert (drawn_BM == (rightmost if least else leftmost)).all()


def test_the_tree_needs_to_be_fitted() -> None:
    with pytest.raises(ValueError, match="expected a catalogue with a fitted proposal, received none"):
        SAMPLERS["adversarial"](SamplerSetup(UNIFORM, 2, DIM), negatives=2)


@pytest.mark.parametrize("arguments", [{}, {"features": 8, "bandwidth": 9.0}], ids=["usual", "few features"])
def test_the_model_s_draws_follow_its_own_log_q(arguments: dict[str, float]) -> None:
    """Exactly, however rough the features: with few of them sums come out negative and are lifted."""
    sampler, of = by_the_model(negatives=50_000, **arguments), context([0, 1], queries=QUERIES)
    q_BL = np.exp(log_q_of_all(sampler, of))

    np.testing.assert_allclose(q_BL.sum(axis=1), 1, rtol=1e-5)
    assert q_BL.min() > 0
    assert_drawn_by(np.asarray(sampler.draw(keras.random.SeedGenerator(2), of)), q_BL)


def test_with_many_features_q_is_the_softmax_of_the_scaled_cosines() -> None:
    exact = 2.0 * QUERIES @ LABELS.T
    exact -= np.logaddexp.reduce(exact, axis=1, keepdims=True)
    of = context([0, 1], queries=QUERIES)
    errors = [
        np.abs(np.exp(log_q_of_all(by_the_model(features=features, bandwidth=2.0), of)) - np.exp(exact)).max()
        for features in (32, 200_000)
    ]

    assert errors[1] < 0.01 < errors[0]


def test_before_the_first_refresh_labels_are_about_as_likely() -> None:
    sampler = SAMPLERS["model"](SamplerSetup(UNIFORM, 2, DIM), negatives=2)

    np.testing.assert_allclose(np.exp(log_q_of_all(sampler, context([0, 1], queries=QUERIES))), 1 / L, rtol=1e-5)


@pytest.mark.parametrize("sampler", ["adversarial", "model"])
def test_importance_weights_bound_the_full_softmax(sampler: str) -> None:
    """The bracket is exact in expectation, its logarithm below [R21 Lemma 2], whatever the query's q."""
    rows, m, positive = 20_000, 4, 2
    catalogue = SamplerSetup(UNIFORM, rows, DIM, TREE)
    made = SAMPLERS[sampler](catalogue, negatives=m)
    if made.refresh is not None:
        made.refresh(LABELS)
    inputs = {name: np.repeat(column[:1], rows, axis=0) for name, column in INPUTS.items()}
    of = context([positive] * rows, inputs=inputs, queries=np.repeat(QUERIES[:1], rows, axis=0))
    drawn = made.draw(keras.random.SeedGenerator(3), of)
    logits = (3 * LABELS @ QUERIES[0]).astype(np.float32)
    log_q = made.log_q(of, of.positive_B), made.log_q(of, drawn)
    losses_B = np.asarray(
        Objective("softmax", "importance")(
            SampledLogits(
                ops.full((rows,), logits[positive]), ops.take(logits, drawn), drawn == positive, *log_q, *log_q
            )
        )
    ).astype(np.float64)[(np.asarray(drawn) != positive).any(axis=1)]

    exact = np.log(np.exp(logits - logits[positive]).sum())
    bracket_B = np.exp(losses_B)
    assert abs(bracket_B.mean() - np.exp(exact)) < 4 * bracket_B.std() / np.sqrt(len(losses_B))
    assert losses_B.mean() < exact


@pytest.mark.slow
@pytest.mark.parametrize("family", ["softmax", "logistic", "nce"])
def test_a_model_samples_by_itself_and_learns(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compile_step", lambda step, _: step)
    monkeypatch.setattr(backend, "compile_loss", lambda function: function)
    rows = tiny.pairs((0, 0), (1, 1), (2, 2), (3, 3))
    weight = "importance" if family == "softmax" else "unit"
    recipe = tiny.recipe(
        loss={"family": family, "weight": weight, "sampler": {"name": "model", "negatives": 3, "features": 64}},
        optimizer={"embedding_learning_rate": 0.1}, model={"dim": 4, "temperature": 0.25},
    )  # fmt: skip
    model = tiny.model(recipe, tiny.dataset(rows, queries=4, labels=5), batch_size=4)
    q = np.asarray(model.sampler.variables[0])
    model.begin_epoch()
    losses = [float(model.train_step(tiny.batch(rows))) for _ in range(20)]

    assert (np.asarray(model.sampler.variables[0]) != q).any(), "it has seen the label embeddings"
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
