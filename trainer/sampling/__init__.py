"""Samplers of negatives [METHODS §2.1].

`independent.py`, `conditional.py` and `model_based.py` have the samplers, and `walk.py` draws from the trees of the
last two. `proposal.py`, with `projection.py` and `tree_fit.py`, fits the tree of `adversarial`. `frequencies.py` counts
label frequencies, or estimates them during training.
"""

from collections.abc import Callable

from longtail.trainer.sampling.base import DrawContext, LabelTable, Sampler, SamplerSetup
from longtail.trainer.sampling.conditional import adversarial
from longtail.trainer.sampling.independent import cross_batch, full, in_batch, mixed, popularity, uniform
from longtail.trainer.sampling.model_based import minimum_variance, model

__all__ = ["SAMPLERS", "DrawContext", "LabelTable", "Sampler", "SamplerSetup"]

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "in_batch": in_batch,
    "uniform": uniform,
    "popularity": popularity,
    "mixed": mixed,
    "cross_batch": cross_batch,
    "full": full,
    "adversarial": adversarial,
    "model": model,
    "minimum_variance": minimum_variance,
}
"""Samplers of negatives, by their names in a recipe's `[loss] sampler`.

A row is a function from a `SamplerSetup` to a `Sampler`. Its keyword-only parameters are the keys that a recipe may
set. To add the sampler of a paper, add a row.

Example:
    >>> import numpy as np
    >>> sampler = SAMPLERS["uniform"](SamplerSetup(np.log([0.75, 0.25]), batch_size=8), negatives=3)
    >>> np.exp(sampler.log_q_L)
    array([0.5, 0.5], dtype=float32)
"""
