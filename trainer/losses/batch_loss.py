"""The logits of one batch and their mean loss, compiled as one kernel of a step.

Legend: `B` batch, `M` candidates per row, `S` impressions of a row, then its retrieved negatives, `C` embedded labels
(the B positives, then what was drawn, then all S of every row), `D` dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.backend.tensors import Tensors
from longtail.trainer.losses.draws import stands_for
from longtail.trainer.losses.hits import Hits, hits_of
from longtail.trainer.losses.objective import Objective, SampledLogits
from longtail.trainer.losses.top_k import QueryStates, TopK
from longtail.trainer.losses.weights import MASKED

_CACHED_BYTES, _DEVICE_BYTES = 1 << 23, 1 << 30
"""Of logits that a device computes at a time: what stays in a processor's cache, and what fills an accelerator."""
_LEAST_ROWS = 128
"""Of a block: the gradient by the candidates is read and written for each."""
_OF_CANDIDATES = ("candidates", "log_pi_candidates", "log_q_candidates", "excluded", "group_of_candidates")


class Embedded(NamedTuple):
    """What the model computes of a batch; the loss is differentiated with respect to it.

    Attributes:
        queries_BD: query embeddings, float32.
        labels_CD: embeddings of the positives, then of the drawn labels, then of `shown_BS`, float32.
        bias_C: their biases, float32, in logits.
        scale: 1/T, float32 scalar.
    """

    queries_BD: Tensor
    labels_CD: Tensor
    bias_C: Tensor
    scale: Tensor

    def with_recalled(self, labels_MD: Tensor, bias_M: Tensor, *, after: int) -> Embedded:
        """Return labels that were embedded before, where drawn ones stand: after the positives, `after` of them."""
        labels = [self.labels_CD[:after], labels_MD, self.labels_CD[after:]]
        bias = [self.bias_C[:after], bias_M, self.bias_C[after:]]
        return self._replace(labels_CD=ops.concatenate(labels), bias_C=ops.concatenate(bias))


class Candidates(NamedTuple):
    """The labels that a batch's positives are contrasted with, and their log-probabilities; constant in a step.

    Attributes:
        positive_B: label rows of the positives, int32.
        candidates: label rows of the candidates, int32 [M] shared by all rows, or [B, M].
        log_pi_positive_B, log_pi_candidates: log label frequencies of both, float32.
        log_q_positive_B, log_q_candidates: log sampling probabilities of both, float32.
        weight_B: weights of the pairs, float32.
        log_miss_B: log(1 − q_y), float32, of a sampler that never draws the positive; None if it may.
        excluded: candidates that are no negatives of any row, bool of their shape; None if there are none.
        known_BM: candidates that are known positives of the row's query, bool; None unless hits are `mask_known`.
        log_eta_B: log η of the pairs, float32; None for a family without.
        eta_rate: step size of η, float32 scalar; None for a family without.
        shown_BS: label rows of the impressions, then of the retrieved negatives, int32, the row's positive where it has
            fewer; None without.
        excluded_shown_BS: which of them are no negatives, bool: as `excluded` and `known_BM`; None if there are none.
        ranks_BN: ranks of the candidates that count, int32, as `Mining.ranks` draws them; None unless it does.
        groups_B: rows of equal number ask the same query, int32, below B; None unless the family pools them.
        log_pairs_B: log n, what the pairs of the rows' queries weigh, float32; None unless they share negatives.
        queries: what is kept of the rows' queries; None without `top_k`.
        places_B: the rows' places in the batch, int32; None where all B are there.
    """

    positive_B: Tensor
    candidates: Tensor
    log_pi_positive_B: Tensor
    log_pi_candidates: Tensor
    log_q_positive_B: Tensor
    log_q_candidates: Tensor
    weight_B: Tensor
    log_miss_B: Tensor | None = None
    excluded: Tensor | None = None
    known_BM: Tensor | None = None
    log_eta_B: Tensor | None = None
    eta_rate: Tensor | None = None
    shown_BS: Tensor | None = None
    excluded_shown_BS: Tensor | None = None
    ranks_BN: Tensor | None = None
    groups_B: Tensor | None = None
    log_pairs_B: Tensor | None = None
    queries: QueryStates | None = None
    places_B: Tensor | None = None

    def by_rows(self) -> Tensors:
        """Return what every row has of its own, first axis B, by name, their places among them."""
        columns = self._asdict() | ({} if self.queries is None else self.queries._asdict())
        return {"places_B": ops.arange(self.positive_B.shape[0])} | {
            name: column
            for name, column in columns.items()
            if column is not None
            and (name.split("_")[-1][0] == "B" or (name in _OF_CANDIDATES and len(column.shape) == 2))
        }

    def at(self, columns: Tensors) -> Candidates:
        """Return some rows, by their part of `by_rows`."""
        own, of_queries = (
            {name: column for name, column in columns.items() if name in kind._fields}
            for kind in (Candidates, QueryStates)
        )
        queries = None if self.queries is None else self.queries._replace(**of_queries)
        return self._replace(**own, queries=queries)


class RetrievedNegatives(NamedTuple):
    """The last of what a row brings with it, which the model itself has retrieved."""

    number: int
    weight: float


class Visited(NamedTuple):
    """What a step keeps of the rows that it has visited, without gradient.

    Attributes:
        log_eta_B: log η of the pairs, float32; None for a family without.
        states_BS: what `TopK` keeps of the rows' queries, float32; None without.
    """

    log_eta_B: Tensor | None = None
    states_BS: Tensor | None = None


@dataclass(frozen=True)
class BatchLoss:
    """Positives against candidates, by one objective [METHODS §2].

    Attributes:
        in_batch: the batch's positives are candidates too, before the drawn ones.
        bfloat16: compute inner products in bfloat16.
        impressions: weight of a label that was shown and not chosen.
        retrieved: number and weight of the negatives that come after the impressions; None without.
        top_k: weighs positives by the K-th highest scores of their queries; None weighs all alike.
        smoothed: labels that a smoothed target is spread over, where the objective has one.
    """

    objective: Objective
    in_batch: bool
    bfloat16: bool
    hits: Hits = "mask"
    impressions: float = 0.0
    retrieved: RetrievedNegatives | None = None
    top_k: TopK | None = None
    smoothed: int = 0

    def __call__(self, embedded: Embedded, batch: Candidates) -> tuple[Tensor, Visited]:
        """Return mean weighted loss, float32 scalar, nats; and what is kept of the rows."""
        rows, blocks = batch.positive_B.shape[0], _blocks(batch)
        shared, of_rows = self._parts(embedded, batch)
        if blocks == 1:
            losses_B, visited = self._of_rows(shared | of_rows, batch)
            return ops.mean(losses_B), visited

        def loss(shared: Tensors, of_rows: Tensors, fixed: Tensors) -> tuple[Tensor, Tensors]:
            losses_B, visited = self._of_rows(shared | of_rows, batch.at(fixed))
            kept = {name: column for name, column in visited._asdict().items() if column is not None}
            return ops.sum(losses_B), kept

        fixed = batch.by_rows()
        if rows % blocks:  # the last row again, of weight 0
            more = -(-rows // blocks) * blocks
            places = ops.minimum(ops.arange(more), rows - 1)
            of_rows, fixed = (
                {name: ops.take(x, places, axis=0) for name, x in part.items()} for part in (of_rows, fixed)
            )
            fixed["weight_B"] = ops.where(ops.arange(more) < rows, fixed["weight_B"], 0.0)
        value, kept = backend.sum_of_blocks(loss, shared, of_rows, fixed, blocks=blocks)
        return value / rows, Visited(**{name: column[:rows] for name, column in kept.items()})

    def _parts(self, embedded: Embedded, batch: Candidates) -> tuple[Tensors, Tensors]:
        """Return what is embedded, by name: what all rows see, and what every row has of its own."""
        rows, candidates = batch.positive_B.shape[0], batch.candidates
        labels_CD, bias_C = embedded.labels_CD, embedded.bias_C
        start = 0 if self.in_batch else rows
        end = start + math.prod(candidates.shape)
        dim = labels_CD.shape[1]
        shared = {"scale": embedded.scale}
        of_rows = {"queries": embedded.queries_BD, "positives": labels_CD[:rows], "positive_bias": bias_C[:rows]}
        sampled = {
            "labels": ops.reshape(labels_CD[start:end], (*candidates.shape, dim)),
            "bias": ops.reshape(bias_C[start:end], candidates.shape),
        }
        if len(candidates.shape) == 2:
            of_rows |= sampled
        else:
            shared |= sampled
        if batch.shown_BS is not None:
            of_rows["shown"] = ops.reshape(labels_CD[end:], (*batch.shown_BS.shape, dim))
            of_rows["shown_bias"] = ops.reshape(bias_C[end:], batch.shown_BS.shape)
        return shared, of_rows

    def _of_rows(self, parts: Tensors, batch: Candidates) -> tuple[Tensor, Visited]:
        """Weighted losses of some rows, float32 [B], and what is kept of them."""
        candidates, scaled_BD = batch.candidates, parts["queries"] * parts["scale"]
        positive_logits_B = self._product("bd,bd->b", scaled_BD, parts["positives"]) + parts["positive_bias"]
        equation = "bd,bmd->bm" if len(candidates.shape) == 2 else "bd,md->bm"
        logits_BM = self._product(equation, scaled_BD, parts["labels"]) + parts["bias"]
        masked_BM = self._hits(self.hits, batch, known_BM=batch.known_BM)
        if batch.excluded is not None:
            masked_BM = ops.logical_or(masked_BM, batch.excluded)
        logits = SampledLogits(
            positive_logits_B,
            logits_BM,
            masked_BM,
            batch.log_pi_positive_B,
            batch.log_pi_candidates,
            batch.log_q_positive_B,
            batch.log_q_candidates,
            m_B=ops.zeros_like(batch.weight_B) + (logits_BM.shape[1] - self.in_batch),
            log_miss_B=batch.log_miss_B,
            ranks_BN=batch.ranks_BN,
            groups_B=batch.groups_B,
            log_pairs_B=batch.log_pairs_B,
        )
        if batch.shown_BS is not None:
            logits = self._with_shown(logits, scaled_BD, parts, batch.shown_BS, batch)
        if self.objective.label_smoothing:
            stands_BM = self._stands(logits, batch)
            if batch.excluded is not None:
                stands_BM = ops.where(batch.excluded, 0.0, stands_BM)
            logits = logits._replace(share_BM=stands_BM / self.smoothed)
        logits, states_BS = self._with_beta(logits, batch)
        if batch.log_eta_B is None or batch.eta_rate is None:
            return batch.weight_B * self.objective(logits), Visited(states_BS=states_BS)
        losses_B, log_eta_B = self.objective.with_eta(logits, log_eta_B=batch.log_eta_B, rate=batch.eta_rate)
        return batch.weight_B * losses_B, Visited(log_eta_B, states_BS)

    def _with_beta(self, logits: SampledLogits, batch: Candidates) -> tuple[SampledLogits, Tensor | None]:
        """Get the logits with the K-th highest scores that positives are held to, and the states of their queries."""
        if self.top_k is None or batch.queries is None:
            return logits, None
        at_B, states_BS = self.top_k.visited(
            batch.queries,
            logits.positive_B,
            logits.negative_BM,
            self._stands(logits, batch),
            m=logits.negative_BM.shape[1] - self.in_batch,
        )
        return logits._replace(beta_B=self.top_k.beta(at_B)), states_BS

    def _stands(self, logits: SampledLogits, batch: Candidates) -> Tensor:
        """Return labels that every candidate stands for, float32 [B, M], hits among them."""
        # `popularity` may still draw a positive that it should not, which is no draw by q/(1 − q_y).
        hits: Hits = "keep" if batch.log_miss_B is None else "mask"
        own_BM = self._hits(hits, batch, known_BM=None)
        m = logits.negative_BM.shape[1] - self.in_batch
        return stands_for(batch.log_q_candidates, own_BM, m=m, log_miss_B=batch.log_miss_B)

    def _hits(self, hits: Hits, batch: Candidates, known_BM: Tensor | None) -> Tensor:
        """Return candidates that are positives of their rows, bool [B, M]."""
        return hits_of(
            hits, batch.candidates, batch.positive_B, in_batch=self.in_batch, known_BM=known_BM, places_B=batch.places_B
        )

    def _with_shown(
        self, logits: SampledLogits, scaled_BD: Tensor, parts: Tensors, shown_BS: Tensor, batch: Candidates
    ) -> SampledLogits:
        """Return the logits with those of the impressions; the row's positive is no negative among them."""
        logits_BS = self._product("bd,bsd->bs", scaled_BD, parts["shown"]) + parts["shown_bias"]
        masked_BS = hits_of("mask", shown_BS, batch.positive_B, in_batch=False, known_BM=batch.excluded_shown_BS)
        number, weight = (0, 1.0) if self.retrieved is None else self.retrieved
        weights = [self.impressions] * (shown_BS.shape[1] - number) + [weight] * number
        log_weight_S = ops.convert_to_tensor([math.log(weight) for weight in weights], "float32")
        log_weight_BS = ops.where(masked_BS, MASKED, log_weight_S)
        return logits._replace(shown_BS=logits_BS, log_weight_shown_BS=log_weight_BS)

    def _product(self, equation: str, queries_BD: Tensor, labels: Tensor) -> Tensor:
        """Inner products in the compute precision, returned as float32."""
        if self.bfloat16:
            sides = [ops.cast(side, "bfloat16") for side in (queries_BD, labels)]
            products: Tensor = ops.cast(ops.einsum(equation, *sides), "float32")
        else:
            products = ops.einsum(equation, queries_BD, labels)
        return products


def _blocks(batch: Candidates) -> int:
    """Return how many blocks of rows have their logits computed one after the other: [B, M] is never whole where it is
    large. Rows that share a positive term are not parted."""
    if batch.groups_B is not None:
        return 1
    logits = (_CACHED_BYTES if backend.on_cpu() else _DEVICE_BYTES) // 4
    rows_at_once = max(_LEAST_ROWS, logits // batch.candidates.shape[-1]) * backend.devices()
    blocks: int = -(-batch.positive_B.shape[0] // rows_at_once)
    return blocks
