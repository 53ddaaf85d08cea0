"""The logits of one batch and their loss. One fused kernel per step.

Legend: `B` batch, `M` candidates per row, `C` embedded labels (the B positives, then what was drawn),
`D` dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keras import ops

from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.objective import Objective

Tensor = Any
"""A backend tensor; shapes are in the names."""


@dataclass(frozen=True)
class Contrast:
    """Positives against candidates, by one objective [METHODS §2].

    Attributes:
        objective: family × weight × mining.
        in_batch: the batch's positives are candidates too, before the drawn ones.
        half: compute inner products in bfloat16.
    """

    objective: Objective
    in_batch: bool
    half: bool

    def __call__(
        self,
        queries_BD: Tensor,
        labels_CD: Tensor,
        bias_C: Tensor,
        scale: Tensor,
        positive_B: Tensor,
        candidates: Tensor,
        log_pi: tuple[Tensor, Tensor],
        log_q: tuple[Tensor, Tensor],
        weight_B: Tensor,
        state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Mean weighted loss, float32 scalar, nats; and the rows' new log η [B], for a family that has it.

        Args:
            queries_BD: query embeddings.
            labels_CD: embeddings of the positives, then of the drawn labels.
            bias_C: their biases, in logits.
            scale: 1/T.
            positive_B: label rows of the positives, int32.
            candidates: label rows of the candidates, int32 [M] shared by all rows, or [B, M].
            log_pi: log frequencies of the positives [B] and of the candidates.
            log_q: log sampling probabilities of the same.
            weight_B: weights of the pairs.
            state: log η of the rows [B] and the step size of η; None for a family without.
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
        logits = (positive_logits_B, logits_BM, self._hits(candidates, positive_B), log_pi, log_q)
        if state is None:
            return ops.mean(weight_B * self.objective(*logits)), ops.zeros_like(weight_B)
        losses_B, log_eta_B = self.objective.with_state(*logits, log_eta_B=state[0], rate=state[1])
        return ops.mean(weight_B * losses_B), log_eta_B

    def _hits(self, candidates: Tensor, positive_B: Tensor) -> Tensor:
        """Candidates to mask, bool [B, M]: the row's positive; with NCE only the row's own place in the batch.

        NCE tells data from noise: noise that happens to be the positive is noise, without which the scores it
        learns are log-odds, not log-probabilities.
        """
        if not LOSSES[self.objective.family].shifted:
            return ops.equal(candidates, positive_B[:, None])
        places_M, rows_B = ops.arange(candidates.shape[-1]), ops.arange(positive_B.shape[0])
        return ops.logical_and(ops.equal(places_M, rows_B[:, None]), self.in_batch)

    def _product(self, equation: str, queries_BD: Tensor, labels: Tensor) -> Tensor:
        """Inner products in the compute precision, returned as float32."""
        if not self.half:
            return ops.einsum(equation, queries_BD, labels)
        sides = [ops.cast(side, "bfloat16") for side in (queries_BD, labels)]
        return ops.cast(ops.einsum(equation, *sides), "float32")
