"""What a sampler of negatives is [METHODS §2.1]: what it is made from, what it draws by, and what it says of a draw.

Legend: `B` batch size, `M` drawn negatives, `L` labels, `D` model dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from longtail.bundle import Proposal
from longtail.bundle.arrays import Float32, Float64
from longtail.trainer.backend import Tensor

if TYPE_CHECKING:
    import keras


class SamplerSetup(NamedTuple):
    """What a sampler is made from, before training.

    Attributes:
        log_pi_L: natural log of the smoothed label frequencies, float64 [L].
        dim: D; of `model` and `minimum_variance` alone.
        proposal: the fitted tree; None but for `adversarial`.
        log_share_L: log of a label's share of an epoch's visits, which batches hold, float64 [L], −inf without any;
            None where it is `log_pi_L`.
        log_terms: label rows of the positives [B] and logits of all labels [B, L] to log(ρ φ), what each of them would
            add to the full loss, float32 [B, L], nats; of `minimum_variance` alone.
    """

    log_pi_L: Float64
    batch_size: int
    dim: int = 0
    proposal: Proposal | None = None
    log_share_L: Float64 | None = None
    log_terms: Callable[[Tensor, Tensor], Tensor] | None = None


class LabelTable(NamedTuple):
    """The label side of the model when an epoch begins; biases are in logits, None for a model without."""

    embeddings_LD: Float32
    bias_L: Float32 | None
    temperature: float


class DrawContext(NamedTuple):
    """What is known of a step's rows when their negatives are drawn.

    Attributes:
        positive_B: label rows, int32.
        queries_BD: query embeddings, float32, without gradients; None unless the sampler `sees_embeddings`.
    """

    positive_B: Tensor
    inputs: dict[str, Tensor]
    queries_BD: Tensor | None


Draw = Callable[[Any, DrawContext], Tensor]
"""Label rows from a `keras.random.SeedGenerator` and what is known of the rows."""


@dataclass(frozen=True)
class Sampler:
    """One distribution of negatives.

    Attributes:
        log_q_L: float32 [L], natural log of the probability that one draw is this label; None where it depends
            on the query.
        in_batch: the batch's labels are negatives of every row.
        draw: label rows, int32 [M] shared by the batch or [B, M] one set per row; None if all are the batch's.
        log_q: of labels [B] (one per row) or [B, M], where it depends on the query; float32 of their shape.
        q_of_pi: log q from log π, where q follows frequencies that may be estimated while training.
        log_miss: of a sampler that does not draw the positive, from the positives' log q: log(1 − q_y), draws of other
            labels being of q/(1 − q_y); None if it draws by q whatever the positive is.
        remember: called after every step with its positives' label rows, int32 [B], embeddings, float32 [B, D], and
            biases, float32 [B], as that step embedded them.
        recall: embeddings, float32 [M, D], and biases, float32 [M], of what is drawn, which is then not embedded; None
            if it is.
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

    @property
    def changes(self) -> bool:
        """Return whether training changes its variables."""
        return self.refresh is not None or self.remember is not None
