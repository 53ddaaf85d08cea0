"""Overlap of the noise p_n of [BM20 Fig. 1] with the distribution of the generated rows.

Legend: `X` test rows, `L` labels of the catalogue, `D` coordinates.
"""

from __future__ import annotations

import numpy as np

from benchmarks.seeds.data import MIXTURE_NOISE, mixture, rows_around_means
from benchmarks.seeds.run import Bench
from longtail.bundle import log_frequencies
from longtail.bundle.arrays import Float64, Int64
from longtail.trainer.evaluation.ranking import log_proposal_of

_ROWS = 1_000


def overlaps(bench: Bench) -> dict[str, float]:
    """Average 2 Σ_y α_xy over test rows of the study `mixture-10k`, by noise, the tree included [BM20 eq. 16]."""
    labels, parts = mixture()
    rows_X = np.arange(parts["train"] + parts["valid"], len(labels))[:_ROWS]
    dataset = bench.dataset
    named_L = np.array([int(label) for label in dataset.label_ids.to_pylist()])
    data_XL = _posterior(labels, rows_X)[:, named_L]
    data_XL /= data_XL.sum(axis=1, keepdims=True)
    trained = bench.prepare(bench.study.method("adversarial"), {}, 0).trained
    log_tree = log_proposal_of(trained.model.proposal, trained.encoding.query)
    assert log_tree is not None
    index = {query: row for row, query in enumerate(dataset.query_ids.to_pylist())}
    tree_XL = np.exp(log_tree(np.array([index[f"r{row}"] for row in rows_X], np.int32)).astype(np.float64))
    shape = data_XL.shape
    pi_L = np.exp(log_frequencies(np.bincount(dataset.train.labels, minlength=shape[1]), smoothing=0.5))
    noises = {
        "uniform": np.full(shape, 1 / shape[1]), "frequency": np.broadcast_to(pi_L, shape), "adversarial": tree_XL,
    }  # fmt: skip
    return {name: round(float(overlap(data_XL, noise_XL).mean()), 4) for name, noise_XL in noises.items()}


def overlap(data_XL: Float64, noise_XL: Float64) -> Float64:
    """Compute 2 Σ_y p_D p_n/(p_D + p_n) of every query, float64 [X] [BM20 eq. 16].

    It is 1 if p_n = p_D, and 0 if the two have no common label. It is also twice the share of pairs that a trained
    discriminator classifies as noise, E_{y∼p_D} σ(−f_y).
    """
    total_XL = data_XL + noise_XL
    overlap_X: Float64 = 2 * (data_XL * noise_XL / np.where(total_XL > 0, total_XL, 1)).sum(axis=1)
    return overlap_X


def _posterior(labels: Int64, rows_X: Int64) -> Float64:
    """Compute the generator's unnormalised p_D(y|x) ∝ p(y)·N(x; mean of y, σ²), float64 [X, all its labels]."""
    x_ND, means_LD = rows_around_means(labels, noise=MIXTURE_NOISE)
    x_XD = x_ND[rows_X].astype(np.float64)
    squared_XL = (x_XD**2).sum(1)[:, None] - 2 * x_XD @ means_LD.T + (means_LD**2).sum(1)
    logits_XL = -squared_XL / (2 * MIXTURE_NOISE**2) - np.log(np.arange(len(means_LD)) + 10.0)
    posterior_XL: Float64 = np.exp(logits_XL - logits_XL.max(axis=1, keepdims=True))
    return posterior_XL
