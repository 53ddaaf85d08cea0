"""Negatives of earlier batches: `cross_batch` (Wang, Zhu and He 2021; for metric learning Wang et al. 2020).

Legend: `B` batch size, `M` remembered labels, `L` labels, `D` model dimensions.

The example has a catalogue of four labels with frequencies ½, ¼, ⅛ and ⅛, and batches of 8:

    >>> setup = SamplerSetup(np.log([0.5, 0.25, 0.125, 0.125]), batch_size=8, dim=3)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, keras, ops
from longtail.trainer.sampling.base import Count, DrawContext, LabelTable, Sampler, SamplerSetup
from longtail.trainer.sampling.independent import in_batch

if TYPE_CHECKING:
    from keras.random import SeedGenerator


def cross_batch(setup: SamplerSetup, *, negatives: Count, gradients: bool = False) -> Sampler:
    """Use the batch's labels and the last M positives of earlier batches as negatives; q = π in expectation.

    Every batch holds labels in proportion to π, so labels of the memory have the q of `in_batch`, and B − 1 + M draws
    per row cost the embedding of only B labels. The memory keeps embeddings from up to M/B steps ago, without gradient.
    To make up for this, the gradient of the batch's labels as negatives is multiplied by (B − 1 + M)/(B − 1). The
    embeddings are renewed at the beginning of every epoch. Before the first step the memory holds M draws from π.

    Args:
        negatives: M, the size of the memory.
        gradients: the memory holds only labels, which every step embeds again, with gradient.

    Relations: acts like `in_batch` with larger batches but the same number of positives.

    Example:
        >>> sampler = cross_batch(setup, negatives=100)
        >>> np.exp(sampler.log_q_L)
        array([0.5  , 0.25 , 0.125, 0.125], dtype=float32)
        >>> sampler.draw(None, None).shape[0]
        100
    """
    batch = in_batch(setup)
    share_L = np.exp(setup.log_pi_L if setup.log_share_L is None else setup.log_share_L)
    first_M = np.random.default_rng(0).choice(len(share_L), negatives, p=share_L / share_L.sum())
    labels_M = untrained_variable(first_M.astype(np.int32), "memory_labels")

    # Copies, because `remember` assigns to the variables later in the same step.
    def draw(_seed: SeedGenerator, _context: DrawContext) -> Tensor:
        return ops.copy(labels_M)

    if gradients:

        def remember_labels(positive_B: Tensor, _labels_BD: Tensor, _bias_B: Tensor) -> None:
            _push(labels_M, positive_B)

        return replace(batch, draw=draw, remember=remember_labels, variables=(labels_M,))

    rows_MD = untrained_variable(np.zeros((negatives, setup.dim), np.float32), "memory_embeddings")
    bias_M = untrained_variable(np.zeros(negatives, np.float32), "memory_biases")

    def remember(positive_B: Tensor, labels_BD: Tensor, bias_B: Tensor) -> None:
        _push(labels_M, positive_B)
        _push(rows_MD, labels_BD)
        _push(bias_M, bias_B)

    def recall() -> tuple[Tensor, Tensor]:
        return ops.copy(rows_MD), ops.copy(bias_M)

    def refresh(table: LabelTable) -> None:
        labels = ops.convert_to_numpy(labels_M)
        rows_MD.assign(table.embeddings_LD[labels])
        bias_M.assign(np.zeros(negatives, np.float32) if table.bias_L is None else table.bias_L[labels])

    variables = (labels_M, rows_MD, bias_M)
    return replace(batch, draw=draw, recall=recall, remember=remember, refresh=refresh, variables=variables)


def _push(memory: keras.Variable, newest: Tensor) -> None:
    """Append the newest entries, and drop the same number of the oldest."""
    memory.assign(ops.concatenate([ops.copy(memory), newest])[-memory.shape[0] :])
