"""The loss of one batch: logits, accidental hits, weights, family. One fused kernel per step.

Legend: `B` batch, `M` candidates per row, `C` embedded labels (the B positives, then what was drawn),
`D` dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keras import ops

from trainer.losses import LOSSES, MASKED
from trainer.weights import WEIGHTS, LogProbabilities

Tensor = Any
"""A backend tensor; shapes are in the names."""


@dataclass(frozen=True)
class Contrast:
    """Positives against candidates, by one weight and one family [METHODS §2].

    Attributes:
        family: key of `LOSSES`.
        weight: key of `WEIGHTS`.
        in_batch: the batch's positives are candidates too, before the drawn ones.
        half: compute inner products in bfloat16.
    """

    family: str
    weight: str
    in_batch: bool
    half: bool

    def __call__(
        self,
        queries_BD: Tensor,
        labels_CD: Tensor,
        bias_C: Tensor,
        positive_B: Tensor,
        candidates: Tensor,
        log_pi: tuple[Tensor, Tensor],
        log_q: tuple[Tensor, Tensor],
        weight_B: Tensor,
        scale: Tensor,
    ) -> Tensor:
        """Mean weighted loss, float32 scalar, nats.

        Args:
            queries_BD: query embeddings.
            labels_CD: embeddings of the positives, then of the drawn labels.
            bias_C: their biases, in logits.
            positive_B: label rows of the positives, int32.
            candidates: label rows of the candidates, int32 [M] shared by all rows, or [B, M].
            log_pi: log frequencies of the positives [B] and of the candidates.
            log_q: log sampling probabilities of the same.
            weight_B: weights of the pairs.
            scale: 1/T.
        """
        batch = positive_B.shape[0]
        scaled_BD = queries_BD * scale
        positive_logits_B = self._product("bd,bd->b", scaled_BD, labels_CD[:batch]) + bias_C[:batch]
        start = 0 if self.in_batch else batch
        embedded, bias = labels_CD[start:], bias_C[start:]
        if len(candidates.shape) == 2:
            embedded = ops.reshape(embedded, (*candidates.shape, labels_CD.shape[1]))
            logits_BM = self._product("bd,bmd->bm", scaled_BD, embedded) + ops.reshape(bias, candidates.shape)
        else:
            logits_BM = self._product("bd,md->bm", scaled_BD, embedded) + bias
        hits_BM = ops.equal(candidates, positive_B[:, None])
        kept_B = ops.sum(ops.cast(ops.logical_not(hits_BM), "float32"), axis=1)
        log_m_B = ops.log(ops.maximum(kept_B, 1.0))
        log_weight = WEIGHTS[self.weight](LogProbabilities(*log_pi, *log_q, log_m_B))
        log_weight_BM = ops.where(hits_BM, MASKED, log_weight.row[:, None] + log_weight.col)
        return ops.mean(weight_B * LOSSES[self.family](positive_logits_B, logits_BM, log_weight_BM))

    def _product(self, equation: str, queries_BD: Tensor, labels: Tensor) -> Tensor:
        """Inner products in the compute precision, returned as float32."""
        if not self.half:
            return ops.einsum(equation, queries_BD, labels)
        sides = [ops.cast(side, "bfloat16") for side in (queries_BD, labels)]
        return ops.cast(ops.einsum(equation, *sides), "float32")
