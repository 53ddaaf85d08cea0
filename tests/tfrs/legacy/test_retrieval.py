"""`SampledRetrieval` beside `tfrs.tasks.Retrieval`: same numbers where they mean the same, ours where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.trainer.losses import LOSSES, WEIGHTS
from longtail.trainer.tfrs import SampledRetrieval

Retrieval = tfrs.tasks.Retrieval
B, C, D, L = 12, 17, 6, 9
RNG = np.random.default_rng(3)
QUERIES = RNG.standard_normal((B, D)).astype(np.float32)
CANDIDATES = RNG.standard_normal((C, D)).astype(np.float32)
IDS = RNG.integers(0, L, C)
COUNTS = np.arange(1, L + 1) ** 3
SAMPLE_WEIGHT = RNG.uniform(0.5, 2, B).astype(np.float32)
PROBABILITY = RNG.uniform(0.01, 0.3, C).astype(np.float32)


def loss_and_gradients(task: tf.keras.layers.Layer, *, candidates: int = C, **call: Any) -> list[np.ndarray]:
    queries, embeddings = tf.Variable(QUERIES), tf.Variable(CANDIDATES[:candidates])
    with tf.GradientTape() as tape:
        loss = task(queries, embeddings, compute_metrics=False, **call)
    return [loss.numpy(), *(np.asarray(gradient) for gradient in tape.gradient(loss, [queries, embeddings]))]


def same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("candidates", [B, C], ids=["in-batch", "extra negatives"])
@pytest.mark.parametrize("remove_accidental_hits", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.2])
@pytest.mark.parametrize("corrected", [False, True])
def test_parity(candidates: int, remove_accidental_hits: bool, temperature: float | None, corrected: bool) -> None:
    task = {"remove_accidental_hits": remove_accidental_hits, "temperature": temperature}
    call = {"candidate_ids": IDS[:candidates], "sample_weight": SAMPLE_WEIGHT, "candidates": candidates}
    if corrected:
        call["candidate_sampling_probability"] = PROBABILITY[:candidates]
    ours = SampledRetrieval(weight="relative" if corrected else "unit", **task)
    same(loss_and_gradients(ours, **call), loss_and_gradients(Retrieval(**task), **call))


def test_parity_of_score_masks_and_of_string_ids() -> None:
    mask = (np.random.default_rng(1).random((B, C)) < 0.7) | np.eye(B, C, dtype=bool)
    call = {"score_mask": tf.constant(mask), "candidate_ids": tf.strings.as_string(IDS)}
    task = {"remove_accidental_hits": True}
    same(loss_and_gradients(SampledRetrieval(**task), **call), loss_and_gradients(Retrieval(**task), **call))


def test_rare_candidates_are_not_clipped() -> None:
    queries, candidates = np.array([[0.0], [0.0]], np.float32), np.zeros((2, 1), np.float32)
    call = {"candidate_sampling_probability": np.array([0.5, 1e-9], np.float32)}
    # Two rows of one negative each, logits 0: log(1 + q_y/q_y') with q_y/q_y' = 5e8, then 2e-9.
    assert float(SampledRetrieval(weight="relative")(queries, candidates, **call)) == pytest.approx(np.log(5e8), 1e-6)
    assert float(Retrieval()(queries, candidates, **call)) == pytest.approx(np.log(5e5), 1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_mining_is_the_mean_of_tfrs_hard_negatives(k: int) -> None:
    for row in range(B):
        only = {"sample_weight": np.eye(B, dtype=np.float32)[row], "compute_metrics": False}
        theirs = float(Retrieval(num_hard_negatives=k)(QUERIES, CANDIDATES, **only))
        ours = float(SampledRetrieval(mining={"keep": k})(QUERIES, CANDIDATES, **only))
        assert ours == pytest.approx(np.log1p(np.expm1(theirs) / k), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("weight", ["relative", "importance", "tail"])
def test_counts_are_the_default_sampling_probability(weight: str) -> None:
    pi = (COUNTS + 0.5) / (COUNTS.sum() + 0.5 * L)
    call = {"candidate_sampling_probability": pi[IDS].astype(np.float32)}
    expected = loss_and_gradients(SampledRetrieval(weight=weight), **call)
    same(loss_and_gradients(SampledRetrieval(weight=weight, counts=COUNTS), candidate_ids=IDS), expected)


@pytest.mark.parametrize("text", [False, True])
def test_counts_by_id(text: bool) -> None:
    # With the label that stands for all unknown ids, counts are 8, 1, 0: π = 8.5/10.5, 1.5/10.5, 0.5/10.5.
    counts = {"b": 8, "ä": 1} if text else {70: 8, -2: 1}
    ids = tf.constant(["b", "ä", "?"] if text else [70, -2, 5])
    task = SampledRetrieval(weight="relative", counts=counts)
    zeros = np.zeros((3, 1), np.float32)
    odds = [8.5 / 1.5 + 8.5 / 0.5, 1.5 / 8.5 + 1.5 / 0.5, 0.5 / 8.5 + 0.5 / 1.5]
    actual = task(zeros, zeros, candidate_ids=ids, compute_metrics=False)
    assert float(actual) == pytest.approx(np.log1p(odds).sum(), rel=1e-5)


class Model(tfrs.Model):
    def __init__(self, task: Retrieval) -> None:
        super().__init__()
        self.queries, self.candidates = (tf.keras.layers.Embedding(L, D) for _ in range(2))
        self.task = task

    def compute_loss(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        queries, candidates = self.queries(inputs["query"]), self.candidates(inputs["candidate"])
        return self.task(queries, candidates, candidate_ids=inputs["candidate"], compute_metrics=not training)


def fit(task: Retrieval) -> tuple[Model, list[np.ndarray]]:
    """The trained model, and its tables before."""
    tf.keras.utils.set_random_seed(1)
    model = Model(task)
    model.queries(IDS), model.candidates(IDS)
    before = [table.numpy() for table in model.trainable_variables]
    model.compile(optimizer=tf.keras.optimizers.Adagrad(0.1))
    data = tf.data.Dataset.from_tensor_slices({"query": IDS % 4, "candidate": IDS})
    model.fit(data.batch(12), epochs=2, verbose=0)  # the second batch has 5
    return model, before


MINING = (None, {"keep": 6}, {"keep": 3, "power": 1.0})


@pytest.mark.parametrize(
    ("weight", "mining"),
    [
        pytest.param(weight, mining, marks=() if weight == "tail" else pytest.mark.nightly)
        for weight in WEIGHTS
        for mining in MINING
    ],
)
def test_every_weight_and_mining_trains_a_tfrs_model(weight: str, mining: dict[str, float] | None) -> None:
    model, before = fit(SampledRetrieval(weight=weight, mining=mining, counts=COUNTS, remove_accidental_hits=True))
    for table, untrained in zip(model.trainable_variables, before, strict=True):
        assert np.isfinite(table.numpy()).all()
        assert np.abs(table.numpy() - untrained).max() > 1e-3


@pytest.mark.parametrize("family", [name for name, family in LOSSES.items() if not family.stateful])
def test_every_family_has_finite_gradients(family: str) -> None:
    regularizer = 0.0 if LOSSES[family].cosine else 0.01
    masks = not LOSSES[family].shifted
    task = SampledRetrieval(family=family, counts=COUNTS, remove_accidental_hits=masks, regularizer=regularizer)
    for array in loss_and_gradients(task, candidate_ids=IDS):
        assert np.isfinite(array).all()
        assert np.abs(array).max() > 0


def test_training_equals_tfrs_step_for_step() -> None:
    (ours, before), (theirs, _) = (fit(task(remove_accidental_hits=True)) for task in (SampledRetrieval, Retrieval))
    for table, expected, untrained in zip(ours.trainable_variables, theirs.trainable_variables, before, strict=True):
        np.testing.assert_allclose(table, expected, atol=1e-6)
        assert np.abs(table.numpy() - untrained).max() > 1e-3


def test_metrics_equal_tfrs() -> None:
    results = []
    for task in (Retrieval, SampledRetrieval):
        catalogue = tf.data.Dataset.from_tensor_slices((np.arange(C), CANDIDATES)).batch(5)
        top = tfrs.metrics.FactorizedTopK(candidates=catalogue, ks=(1, 3))
        batch = tf.keras.metrics.CategoricalAccuracy()
        mean = tf.keras.metrics.Mean()
        built = task(metrics=top, batch_metrics=[batch], loss_metrics=[mean], remove_accidental_hits=True)
        built(
            QUERIES, CANDIDATES[:B], candidate_ids=np.arange(B), sample_weight=SAMPLE_WEIGHT,
            candidate_sampling_probability=PROBABILITY[:B],
        )  # fmt: skip
        results.append([*(float(metric) for metric in top.result()), float(batch.result()), float(mean.result() > 0)])
    assert results[0] == pytest.approx(results[1])
    assert 0 < results[0][1] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"family": "soft"}, "expected one of softmax"),
        ({"weight": {"name": "tail", "tau": 1.0}}, "received 'tau'"),
        ({"mining": {}}, "expected keep, power, both or theta"),
        ({"family": "augment_and_reduce", "weight": "importance"}, "a number per training pair"),
        ({"family": "hinge", "mining": {"keep": 2, "draw": 1}}, "no draw, received keep = 2, draw = 1"),
        ({"family": "contrastive", "temperature": 0.1}, "a loss of cosines, received 0.1"),
        ({"temperature": 0.0}, "expected a number > 0, received 0.0"),
        ({"family": "nce", "remove_accidental_hits": True}, "remove_accidental_hits = True is not allowed with nce,"),
    ],
)
def test_invalid_arguments_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampledRetrieval(**words)


def test_invalid_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="expected candidate_sampling_probability in the call, or counts in the task"):
        SampledRetrieval(weight="relative")(QUERIES, CANDIDATES)
    with pytest.raises(ValueError, match="which counts needs, received none"):
        SampledRetrieval(counts=COUNTS)(QUERIES, CANDIDATES)
    with pytest.raises(ValueError, match="which remove_accidental_hits needs, received none"):
        SampledRetrieval(remove_accidental_hits=True)(QUERIES, CANDIDATES)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a candidate per query, received fewer"):
        SampledRetrieval()(QUERIES, CANDIDATES[: B - 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected sampling probabilities > 0"):
        SampledRetrieval()(QUERIES, CANDIDATES, candidate_sampling_probability=np.zeros(C, np.float32))
