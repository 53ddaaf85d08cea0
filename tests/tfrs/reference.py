"""Runs where tensorflow-recommenders is installed: what its `Retrieval` task computes on given embeddings.

TF_USE_LEGACY_KERAS=1 python reference.py CASE.npz ANSWER.npz
"""

import sys

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

case = np.load(sys.argv[1])
queries, candidates = tf.Variable(case["queries"]), tf.Variable(case["candidates"])
task = tfrs.tasks.Retrieval(temperature=float(case["temperature"]), remove_accidental_hits=True)
with tf.GradientTape() as tape:
    loss = task(
        queries,
        candidates,
        candidate_sampling_probability=tf.constant(case["probability"]),
        candidate_ids=tf.constant(case["ids"]),
        sample_weight=tf.constant(case["weight"]),
        compute_metrics=False,
    )
gradients = tape.gradient(loss, [queries, candidates])
np.savez(sys.argv[2], loss=loss.numpy(), queries=gradients[0].numpy(), candidates=gradients[1].numpy())
