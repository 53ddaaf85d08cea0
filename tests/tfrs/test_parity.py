"""`relative` is what TFRS calls `candidate_sampling_probability`: same loss, same gradients."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from longtail.bundle import log_frequencies
from longtail.trainer.losses import BatchLoss, Candidates, Embedded, Objective

B, D, L = 48, 8, 30
REFERENCE = Path(__file__).with_name("reference.py")


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_relative_equals_tfrs_retrieval(tfrs_python: str, tmp_path: Path, temperature: float, weighted: bool) -> None:
    rng = np.random.default_rng(7)
    labels = rng.zipf(1.3, B).clip(1, L).astype(np.int32) - 1
    assert len(np.unique(labels)) < B, "the batch must hold accidental hits"
    counts = rng.integers(1, 500, L)
    queries, embeddings = (rng.standard_normal((n, D)).astype(np.float32) for n in (B, L))
    weight = rng.uniform(0.5, 2, B).astype(np.float32) if weighted else np.ones(B, np.float32)
    log_pi = log_frequencies(counts)
    np.savez(
        tmp_path / "case.npz", queries=queries, candidates=embeddings[labels], ids=labels, weight=weight,
        temperature=temperature, probability=np.exp(log_pi)[labels].astype(np.float32),
    )  # fmt: skip
    subprocess.run(
        [tfrs_python, REFERENCE, tmp_path / "case.npz", tmp_path / "answer.npz"],
        env=os.environ | {"TF_USE_LEGACY_KERAS": "1"}, check=True, capture_output=True,
    )  # fmt: skip
    expected = np.load(tmp_path / "answer.npz")

    batch_loss = BatchLoss(Objective(weight="relative"), in_batch=True, bfloat16=False)
    rows_B, log_pi_L = tf.constant(labels), log_pi.astype(np.float32)
    log_pi_B = tf.gather(log_pi_L, rows_B)
    queries_BD, candidates_BD = tf.Variable(queries), tf.Variable(embeddings[labels])
    with tf.GradientTape() as tape:
        mean, _ = batch_loss(
            Embedded(queries_BD, candidates_BD, tf.zeros(B), tf.constant(1 / temperature)),
            Candidates(rows_B, rows_B, log_pi_B, log_pi_B, log_pi_B, log_pi_B, tf.constant(weight)),
        )
        loss = mean * B
    gradients = tape.gradient(loss, [queries_BD, candidates_BD])

    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradients[0], expected["queries"], atol=1e-5 / temperature, rtol=1e-5)
    np.testing.assert_allclose(gradients[1], expected["candidates"], atol=1e-5 / temperature, rtol=1e-5)
