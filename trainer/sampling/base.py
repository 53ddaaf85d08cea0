"""The interface of samplers of negatives [METHODS §2.1]: their inputs, draws and sampling probabilities.

Legend: `B` batch size, `M` drawn negatives, `L` labels, `D` model dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from longtail.bundle import Proposal
from longtail.bundle.arrays import Float32, Float64
from longtail.trainer.backend import Tensor

if TYPE_CHECKING:
    import keras

Count = Annotated[int, Field(ge=1)]


class SamplerSetup(NamedTuple):
    """Hold the inputs of a sampler before training.

    Attributes:
        log_pi_L: natural log of the smoothed label frequencies, float64 [L].
        dim: D, for samplers that remember or read embeddings.
        proposal: the fitted tree of `adversarial`; else None.
        log_share_L: log of a label's share of an epoch's visits, and so of the rows of batches, float64 [L], −inf
            without a visit; None if it equals `log_pi_L`.
        log_terms: function from label rows of the positives [B] and logits of all labels [B, L] to log(ρ φ), the log
            of each label's term in the full loss, float32 [B, L], nats; for `minimum_variance`.
    """

    log_pi_L: Float64
    batch_size: int
    dim: int = 0
    proposal: Proposal | None = None
    log_share_L: Float64 | None = None
    log_terms: Callable[[Tensor, Tensor], Tensor] | None = None


class LabelTable(NamedTuple):
    """Hold the label side of the model at the beginning of an epoch; biases are in logits, or None."""

    embeddings_LD: Float32
    bias_L: Float32 | None
    temperature: float


class DrawContext(NamedTuple):
    """Hold the rows of a step for which negatives are drawn.

    Attributes:
        positive_B: label rows, int32.
        queries_BD: query embeddings, float32, without gradients; None unless the sampler `sees_embeddings`.
    """

    positive_B: Tensor
    inputs: dict[str, Tensor]
    queries_BD: Tensor | None


Draw = Callable[[Any, DrawContext], Tensor]
"""A function from a `keras.random.SeedGenerator` and the rows of a step to label rows."""


@dataclass(frozen=True)
class Sampler:
    """Define one distribution of negatives.

    Attributes:
        log_q_L: log of the probability that one draw is this label, float32 [L]; None if it depends on the query.
        in_batch: the batch's labels are negatives of every row.
        draw: function that draws label rows, int32 [M] shared by the batch or [B, M] with one set per row; None if all
            negatives are the batch's labels.
        log_q: function from labels [B] (one per row) or [B, M] to their log q, float32 of the same shape, if q depends
            on the query.
        q_of_pi: function from log π to log q, if q follows frequencies that training may estimate.
        log_miss: function from the positives' log q to log(1 − q_y), for a sampler that excludes the positive and so
            draws other labels from q/(1 − q_y); None if it draws from q for every positive.
        sees_embeddings: `draw` and `log_q` read the query embeddings of `DrawContext`.
        refresh: called at the beginning of every epoch with the label side of the model.
        remember: called after every step with the label rows of the positives, int32 [B], and their embeddings, float32
            [B, D], and biases, float32 [B], from this step.
        recall: function that returns embeddings, float32 [M, D], and biases, float32 [M], of the draws, which are then
            not embedded again; None if draws are embedded.
    """

    log_q_L: Float32 | None
    in_batch: bool
    draw: Draw | None
    log_q: Callable[[DrawContext, Tensor], Tensor] | None = None
    q_of_pi: Callable[[Tensor], Tensor] | None = None
    log_miss: Callable[[Tensor], Tensor] | None = None
    sees_embeddings: bool = False
    refresh: Callable[[LabelTable], None] | None = None
    remember: Callable[[Tensor, Tensor, Tensor], None] | None = None
    recall: Callable[[], tuple[Tensor, Tensor]] | None = None
    variables: tuple[keras.Variable, ...] = ()
