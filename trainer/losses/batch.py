"""What a loss reads of one batch: embeddings, candidates, logits, and the rows before their loss is computed.

Legend: `B` rows of a batch, `M` candidates per row, `S` labels that a term adds to a row, `C` embedded labels (B
positives, labels drawn, then all S of every row), `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from longtail.trainer.backend import Tensor, Tensors, ops

if TYPE_CHECKING:
    import keras

FamilyInputs = tuple[Tensor, Tensor, Tensor]
"""Positives' logits [B], negatives' logits [B, M] and their log-weights [B, M]: the arguments of a family."""


class Embedded(NamedTuple):
    """Hold embeddings of a batch, float32, with respect to which the loss is differentiated.

    Attributes:
        labels_CD, bias_C: of the positives, of the drawn labels, then of labels that terms add; biases in logits.
        scale: 1/T.
    """

    queries_BD: Tensor
    labels_CD: Tensor
    bias_C: Tensor
    scale: Tensor

    def insert_recalled(self, labels_MD: Tensor, bias_M: Tensor, *, after: int) -> Embedded:
        """Insert labels from an earlier step behind the first `after` labels (the positives)."""
        labels_CD, bias_C = (
            ops.concatenate([current[:after], recalled, current[after:]])
            for current, recalled in ((self.labels_CD, labels_MD), (self.bias_C, bias_M))
        )
        return self._replace(labels_CD=labels_CD, bias_C=bias_C)


class BatchCandidates(NamedTuple):
    """Hold a batch's candidates and their log-probabilities, which are constant in a step.

    Attributes:
        positive_B, candidates: label rows, int32; candidates are [M], shared by all rows, or [B, M].
        log_pi_positive_B, log_pi_candidates: log label frequencies of both, float32.
        log_q_positive_B, log_q_candidates: log sampling probabilities of both, float32.
        log_miss_B: log(1 − q_y), float32, for a sampler that never draws the positive; None if it may.
        candidate_tensors: tensors of terms about the candidates, by name, of the shape of `candidates`; `excluded`
            masks labels that are never negatives.
        rows: tensors of terms about the rows, by name, first axis B.
        positions_B: positions of the rows in the batch, int32; None if all B rows are present.
    """

    positive_B: Tensor
    candidates: Tensor
    log_pi_positive_B: Tensor
    log_pi_candidates: Tensor
    log_q_positive_B: Tensor
    log_q_candidates: Tensor
    weight_B: Tensor
    log_miss_B: Tensor | None = None
    candidate_tensors: Tensors = {}  # noqa: RUF012 (never written)
    rows: Tensors = {}  # noqa: RUF012
    positions_B: Tensor | None = None


class SampledLogits(NamedTuple):
    """Hold logits of a batch's positives and negatives, and the natural logs of their probabilities.

    Attributes:
        positive_B, negative_BM: logits, any float type; the loss is computed in float32.
        hits_BM: masked negatives, bool.
        log_pi_positive_B, log_pi_negative: log label frequencies, float32; for negatives [M] for all rows, or [B, M].
        log_q_positive_B, log_q_negative: log-probabilities that one draw is this label, of the same shapes.
        m_B: number of draws among a row's negatives, masked or not, float32; None if all M are draws.
        log_miss_B: log(1 − q_y), float32, for a sampler that never draws the positive; None if it may.
        rows: tensors of terms about the rows and their negatives, by name.
    """

    positive_B: Tensor
    negative_BM: Tensor
    hits_BM: Tensor
    log_pi_positive_B: Tensor
    log_pi_negative: Tensor
    log_q_positive_B: Tensor
    log_q_negative: Tensor
    m_B: Tensor | None = None
    log_miss_B: Tensor | None = None
    rows: Tensors = {}  # noqa: RUF012 (never written)


class StepInputs(NamedTuple):
    """Hold the rows of a step before their loss is computed.

    Attributes:
        positive_B, candidates: label rows, int32; candidates are [M], shared by all rows, or [B, M].
        excluded: function that masks label rows [B, S] which must not be negatives of their rows, bool; its result is
            None if all may be.
    """

    batch: Mapping[str, Tensor]
    positive_B: Tensor
    candidates: Tensor
    excluded: Callable[[Tensor], Tensor | None]
    seed: keras.random.SeedGenerator
    steps_done: Tensor
