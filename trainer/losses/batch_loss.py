"""The logits of one batch and their mean loss, compiled as one function.

Legend: `B` batch, `M` candidates per row, `S` labels that a term adds to a row, `C` embedded labels (B positives,
labels drawn, then all S of every row), `D` dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.losses.batch import BatchCandidates, Embedded, SampledLogits
from longtail.trainer.losses.hits import Hits, mask_hits, multiplicity
from longtail.trainer.losses.objective import Objective

_CACHED_BYTES, _DEVICE_BYTES = 1 << 23, 1 << 30
"""Bytes of logits computed at a time: an amount that fits a processor's cache, and one that fills an accelerator."""
_LEAST_ROWS = 128
"""Smallest number of rows in a block. Every block reads and writes the gradient of all candidates."""


_SHARED = ("candidates", "log_pi_candidates", "log_q_candidates")
"""Fields of `BatchCandidates` that all rows share unless each row has candidates of its own."""


@dataclass(frozen=True)
class BatchLoss:
    """Compute the loss of positives against candidates, by one objective [METHODS §2].

    Attributes:
        in_batch: the batch's positives are candidates too, before the drawn labels.
        repels: factor of the gradient of the batch's labels as negatives. Above 1, they also represent recalled labels,
            which come from the same q but have no gradient [METHODS §2.1].
    """

    objective: Objective
    in_batch: bool
    bfloat16: bool
    hits: Hits = "mask"
    repels: float = 1.0

    def __call__(self, embedded: Embedded, batch: BatchCandidates) -> tuple[Tensor, Tensors]:
        """Compute the mean weighted loss, float32 scalar, nats, and the terms' row tensors by name."""
        shared, by_row = self._split(embedded, batch)
        if any(term.joins_rows for term in self.objective.terms):
            losses_B, state = self._row_losses(shared, by_row, batch._asdict(), {})
            return ops.mean(losses_B), state
        # Blocks of rows bound the part of [B, M] in memory.
        rows, logits = batch.positive_B.shape[0], (_CACHED_BYTES if backend.on_cpu() else _DEVICE_BYTES) // 4  # float32
        blocks = -(-rows // max(_LEAST_ROWS, logits // batch.candidates.shape[-1]))
        fixed = {name: column for name, column in batch._asdict().items() if column is not None}
        fixed["positions_B"] = ops.arange(rows)  # a block has some rows of the batch
        names = {name for name in _SHARED if len(fixed[name].shape) == 1}
        if len(batch.candidates.shape) == 1:
            names.add("candidate_tensors")
        fixed_shared = {name: fixed.pop(name) for name in names}
        value, state = backend.sum_of_blocks(self._row_losses, shared, by_row, fixed, fixed_shared, blocks=blocks)
        return value / rows, state

    def _split(self, embedded: Embedded, batch: BatchCandidates) -> tuple[Tensors, Tensors]:
        """Split embeddings by name into parts shared by all rows, and parts per row."""
        rows, candidates = batch.positive_B.shape[0], batch.candidates
        labels_CD, bias_C = embedded.labels_CD, embedded.bias_C
        start = 0 if self.in_batch else rows  # the positives come first, and are candidates only in batch
        end = start + math.prod(candidates.shape)
        dim = labels_CD.shape[1]
        shared = {"scale": embedded.scale}
        by_row = {"queries": embedded.queries_BD, "positives": labels_CD[:rows], "positive_bias": bias_C[:rows]}
        labels, bias = labels_CD[start:end], bias_C[start:end]
        if self.repels != 1:
            # The added term is 0 in value, and multiplies the gradient of the batch's labels by `repels`.
            labels, bias = (
                ops.concatenate([x[:rows] + (self.repels - 1) * (x[:rows] - ops.stop_gradient(x[:rows])), x[rows:]])
                for x in (labels, bias)
            )
        sampled = by_row if len(candidates.shape) == 2 else shared
        sampled["labels"] = ops.reshape(labels, (*candidates.shape, dim))
        sampled["bias"] = ops.reshape(bias, candidates.shape)
        for name in [term.name for term in self.objective.terms if term.adds_negatives]:
            shape = batch.rows[name].shape
            start, end = end, end + math.prod(shape)
            by_row[name] = ops.reshape(labels_CD[start:end], (*shape, dim))
            by_row[f"{name} bias"] = ops.reshape(bias_C[start:end], shape)
        return shared, by_row

    def _row_losses(
        self, shared: Tensors, by_row: Tensors, fixed: dict[str, Any], fixed_shared: dict[str, Any]
    ) -> tuple[Tensor, Tensors]:
        """Compute weighted losses of some rows, float32 [B], and the terms' tensors of these rows.

        Args:
            fixed, fixed_shared: fields of `BatchCandidates`.
        """
        parts, batch = shared | by_row, BatchCandidates(**fixed, **fixed_shared)
        candidates, scaled_BD = batch.candidates, parts["queries"] * parts["scale"]
        positive_logits_B = self._product("bd,bd->b", scaled_BD, parts["positives"]) + parts["positive_bias"]
        equation = "bd,bmd->bm" if len(candidates.shape) == 2 else "bd,md->bm"
        logits_BM = self._product(equation, scaled_BD, parts["labels"]) + parts["bias"]
        rows = batch.rows | batch.candidate_tensors
        positive_B, in_batch, positions_B = batch.positive_B, self.in_batch, batch.positions_B
        masked_BM = mask_hits(self.hits, candidates, positive_B, in_batch=in_batch, positions_B=positions_B)
        for name in ("known", "excluded"):
            if name in rows:
                masked_BM = ops.logical_or(masked_BM, rows[name])
        draws = logits_BM.shape[1] - in_batch  # a row's own position in the batch is no draw
        if any(term.reads_multiplicity for term in self.objective.terms):
            # After its redraws, `popularity` may still have drawn the positive, which q/(1 − q_y) excludes.
            hits: Hits = "keep" if batch.log_miss_B is None else "mask"
            own_BM = mask_hits(hits, candidates, positive_B, in_batch=in_batch, positions_B=positions_B)
            rows["multiplicity"] = multiplicity(batch.log_q_candidates, own_BM, m=draws, log_miss_B=batch.log_miss_B)
        for name in [term.name for term in self.objective.terms if term.adds_negatives]:
            rows[f"{name} logits"] = self._product("bd,bsd->bs", scaled_BD, parts[name]) + parts[f"{name} bias"]
        logits = SampledLogits(
            positive_logits_B,
            logits_BM,
            masked_BM,
            batch.log_pi_positive_B,
            batch.log_pi_candidates,
            batch.log_q_positive_B,
            batch.log_q_candidates,
            m_B=ops.zeros_like(batch.weight_B) + draws,
            log_miss_B=batch.log_miss_B,
            rows=rows,
        )
        state: Tensors = {}
        for term in self.objective.terms:
            state |= term.row_state(logits, draws=draws)
        logits = logits._replace(rows=rows | state)
        losses_B, log_eta_B = self.objective.compute_losses(
            logits, log_eta_B=rows.get("log_eta"), rate=rows.get("eta_rate")
        )
        return batch.weight_B * losses_B, state if log_eta_B is None else state | {"log_eta": log_eta_B}

    def _product(self, equation: str, queries_BD: Tensor, labels: Tensor) -> Tensor:
        """Compute inner products in the compute precision, and return them as float32."""
        if not self.bfloat16:
            return ops.einsum(equation, queries_BD, labels)
        sides = [ops.cast(side, "bfloat16") for side in (queries_BD, labels)]
        return ops.cast(ops.einsum(equation, *sides), "float32")
