"""Exact top-k over the whole catalogue for settings of λ and μ, through the rows and queries that serve.

A query that is asked in several ways (`Pairs.askings`: another context, attributes of another time) is ranked once for
each, with the held-out pairs of that way as its positives and the labels the query had in training left out of all.

Legend: `N` queries, `B` a block of them, `L` labels, `E` augmented dimensions, `K` list length, `G` settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longtail.bundle import Augmentation, Buckets, CurvePoint, Labels, Proposal
from longtail.bundle.arrays import Bools, Float32, Float64, Int8, Int32, Int64
from longtail.trainer.backend import ops
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.batches import QueryFeatures
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.metrics import Positives, inverse_propensity
from longtail.trainer.evaluation.task import Seen, Task

EmbedQueries = Callable[[Int32], Float32]
LogProposal = Callable[[Int32], Float32]
"""log p_n(y|x) of query rows [B] and every label, float32 [B, L]: what λ multiplies instead of log ν of the labels."""
Watch = Callable[[Setting, Int32, Positives], None]
"""Is shown the lists of a setting, int32 [N, K], best first, and what they should find."""

_BLOCK_BYTES = 256 << 20
_EMBED_BLOCK = 4096


@dataclass(frozen=True)
class LabelSide:
    """All labels as an evaluation ranks them: as they will be served.

    Attributes:
        embeddings: float32 [L, D].
        log_pn: float32 [L], log ν; log π beside a tree.
        bias: float32 [L] in logits, or None.
        counts: int64 [L], training pairs.
        training_queries: distinct queries of these pairs.
        buckets: int8 [L].
        augmentation: the constants that rows and queries share.
        log_popularity: float32 [L], log π; None where `log_pn` is it.
    """

    embeddings: Float32
    log_pn: Float32
    bias: Float32 | None
    counts: Int64
    training_queries: int
    buckets: Int8
    augmentation: Augmentation
    log_popularity: Float32 | None = None

    @classmethod
    def of(
        cls, embeddings: Float32, bias: Float32 | None, counts: Int64, *, training_queries: int,
        temperature: float, log_pn: Float32, buckets: Buckets, log_popularity: Float32 | None = None,
    ) -> LabelSide:  # fmt: skip
        """From what a model computes of its labels, and their training counts, [L] or [L, D] as the attributes are."""
        augmentation = Augmentation.fitted(temperature, embeddings, log_pn, bias, log_popularity)
        bucket_L = buckets.assign(counts)
        return cls(embeddings, log_pn, bias, counts, training_queries, bucket_L, augmentation, log_popularity)

    @classmethod
    def of_bundle(
        cls, labels: Labels, embeddings: Float32, augmentation: Augmentation, *, training_queries: int
    ) -> LabelSide:
        """From the label side of a bundle, embeddings float32 [L, D]."""
        return cls(
            embeddings, labels.log_pn, labels.bias, labels.counts, training_queries, labels.buckets, augmentation,
            labels.log_popularity,
        )  # fmt: skip

    def among(self, rows: Int32) -> LabelSide:
        """Some of the labels, by their rows, int32 [n], with the same constants."""
        bias = None if self.bias is None else self.bias[rows]
        popularity = None if self.log_popularity is None else self.log_popularity[rows]
        return replace(
            self, embeddings=self.embeddings[rows], log_pn=self.log_pn[rows], bias=bias, counts=self.counts[rows],
            buckets=self.buckets[rows], log_popularity=popularity,
        )  # fmt: skip

    def rows(self) -> Float32:
        """Augmented label rows, float32 [L, E]."""
        return self.augmentation.rows(self.embeddings, self.log_pn, self.bias, self.log_popularity)

    def inverse_propensity(self, config: EvaluationConfig) -> Float64 | None:
        """1 / p_y, float64 [L], if the recipe asks for it."""
        if config.propensity is None:
            return None
        return inverse_propensity(
            self.counts, queries=self.training_queries, a=config.propensity.a, b=config.propensity.b
        )


def buckets_for(config: EvaluationConfig, counts: Int64) -> Buckets:
    """Head, torso, tail and new as the recipe asks, of training counts [L]."""
    return Buckets.by_quantile(counts) if config.buckets == "quantile" else Buckets.by_count()


def log_proposal_of(proposal: Proposal | None, features: QueryFeatures) -> LogProposal | None:
    """The tree's log p_n(y|x) of query rows; None for a model without a tree."""
    if proposal is None:
        return None
    return lambda rows_B: proposal.all_log_probabilities(proposal.project(features.of_queries(rows_B)))


def bias_removal_curve(
    held_out: Pairs,
    known: Pairs,
    embed_queries: EmbedQueries,
    label_side: LabelSide,
    config: EvaluationConfig,
    *,
    queries: int,
    seed: int,
    askers: Int32 | None = None,
    max_queries: int | None = None,
    settings: Sequence[Setting] | None = None,
    log_proposal: LogProposal | None = None,
    calibrated_at: float = 1.0,
    described: bool = False,
    watch: Watch | None = None,
) -> list[CurvePoint]:
    """Every metric at every setting of λ and μ.

    Args:
        held_out: pairs to find.
        known: pairs seen in training; out of each query's ranking if `exclude_seen`, and then no positive.
        embed_queries: rows of queries as they are asked, int32 [B] → float32 [B, D].
        label_side: all labels.
        config: what to measure.
        queries: number of query rows.
        seed: of the bootstrap and of the choice of queries.
        askers: query row of every way to ask, int32 [A]; None where it is one of each.
        max_queries: measure at most this many queries, drawn by seed.
        settings: of λ and μ; by default the recipe's grid of λ, at μ = 0.
        log_proposal: of a model trained against a conditional p_n; by default λ multiplies the labels' log ν.
        calibrated_at: the λ where scores are log-probabilities, at which alone their likelihood is of anything.
        described: labels without training pairs were no negatives, so that their scores have no optimum: neither they
            nor held-out pairs of them are in the likelihood.
        watch: called with every setting's lists.

    Raises:
        DataError: no held-out pair is left to find, or as `check_metric`.
    """
    task = Task.of(
        held_out, known, config, labels=len(label_side.counts), seed=seed, max_queries=max_queries, askers=askers
    )
    settings = [Setting(bias_removal) for bias_removal in config.bias_removal] if settings is None else settings
    never_L = label_side.counts == 0 if described else None
    likely = (task.positives if never_L is None else task.positives.among(~never_L)) if config.log_likelihood else None
    ranked = rank(
        task.rows_N,
        embed_queries,
        label_side,
        task.seen_keys,
        settings,
        k=task.k,
        queries=queries,
        askers=askers,
        log_proposal=log_proposal,
        likely=likely,
        never_L=never_L,
    )
    for setting, top_NK in zip(settings, ranked[0], strict=True):
        if watch is not None:
            watch(setting, top_NK, task.positives)
    inverse_propensity_L = label_side.inverse_propensity(config)
    return [
        CurvePoint(
            bias_removal=setting.bias_removal,
            popularity=setting.popularity,
            metrics=task.metrics(
                top_NK,
                buckets_L=label_side.buckets,
                counts_L=label_side.counts,
                inverse_propensity_L=inverse_propensity_L,
            )
            | (
                {}
                if log_p_N is None or likely is None or setting != Setting(calibrated_at)
                else {"log_likelihood": task.bootstrap.interval(log_p_N, likely.per_query)}
            ),
        )
        for setting, top_NK, log_p_N in zip(settings, *ranked, strict=True)
    ]


def rank(
    rows_N: Int32,
    embed_queries: EmbedQueries,
    label_side: LabelSide,
    seen_keys: Int64,
    settings: Sequence[Setting],
    *,
    k: int,
    queries: int,
    askers: Int32 | None = None,
    log_proposal: LogProposal | None = None,
    likely: Positives | None = None,
    never_L: Bools | None = None,
) -> tuple[Int32, list[Float64 | None]]:
    """Exact top-k label rows for every setting, int32 [G, N, K]; −1 where fewer labels are left.

    And for every setting the log-likelihood of each query's positives, `Σ_y log softmax(s)_y` over the labels that may
    be ranked, float64 [N], nats; None unless `likely` names the positives.

    Args:
        rows_N: rows of queries as they are asked.
        embed_queries: such rows → embeddings.
        label_side: all labels.
        seen_keys: `query · L + label` to leave out, sorted.
        settings: of λ and μ.
        k: K.
        queries: number of query rows.
        askers: as `bias_removal_curve` takes them.
        log_proposal: log p_n(y|x) in place of the labels' log ν.
        likely: positives of the N queries whose log-likelihood is asked for.
        never_L: labels that the likelihood is not over, none of them in `likely`, bool [L]; None for none.
    """
    labels_EL = ops.convert_to_tensor(label_side.rows().T.copy())
    labels = labels_EL.shape[1]
    seen = Seen(seen_keys, queries=queries, labels=labels)
    block = block_of(labels, matrices=1 if log_proposal is None else 4)
    top_GNK = np.empty((len(settings), len(rows_N), k), np.int32)
    log_p_GN = np.zeros((len(settings), len(rows_N)))
    for start in range(0, len(rows_N), block):
        rows_B = rows_N[start : start + block]
        embedded_BD = embed_queries(rows_B)
        places = seen.places(rows_B if askers is None else askers[rows_B])
        if log_proposal is not None:
            scaled_BL = ops.convert_to_tensor(label_side.augmentation.temperature * log_proposal(rows_B))
        for at, (bias_removal, popularity) in enumerate(settings):
            of_labels = bias_removal if log_proposal is None else 0.0
            scores_BL = ops.matmul(label_side.augmentation.queries(embedded_BD, of_labels, popularity), labels_EL)
            if log_proposal is not None:
                scores_BL = scores_BL + bias_removal * scaled_BL
            scores_BL = without(scores_BL, places)
            top_GNK[at, start : start + block] = top_rows(scores_BL, k)
            if likely is not None:
                wanted = likely.between(start, start + len(rows_B))
                over_BL = scores_BL if never_L is None else ops.where(never_L, -np.inf, scores_BL)
                log_p_GN[at, start : start + block] = _log_likelihood(
                    over_BL / label_side.augmentation.temperature, wanted
                )
    return top_GNK, list(log_p_GN) if likely is not None else [None] * len(settings)


def without(scores_BL: Any, places: Int64) -> Any:
    """Scores with −inf at (row, label) places int [n, 2]."""
    if not len(places):
        return scores_BL
    return ops.scatter_update(scores_BL, places, np.full(len(places), -np.inf, np.float32))


def top_rows(scores_BL: Any, k: int) -> Int32:
    """Labels of the k highest scores, best first, equal ones by row, int32 [B, K]; −1 where only −inf is left."""
    values, indices = ops.top_k(scores_BL, k)
    top_BK: Int32 = np.where(np.isneginf(ops.convert_to_numpy(values)), -1, ops.convert_to_numpy(indices))
    return top_BK


def block_of(labels: int, *, matrices: int = 1) -> int:
    """Queries that are ranked at a time, so that this many matrices of their scores stay within 256 MiB."""
    return int(np.clip(_BLOCK_BYTES // (4 * labels * matrices), 1, _EMBED_BLOCK))


def _log_likelihood(scores_BL: Any, positives: Positives) -> Float64:
    """`Σ_y log softmax(s)_y` over each query's positives, float64 [B]."""
    places = np.stack([positives.query_rows, positives.label_rows], axis=1).astype(np.int32)
    log_z_B = ops.convert_to_numpy(ops.logsumexp(scores_BL, axis=1))
    flat = ops.take(ops.reshape(scores_BL, (-1,)), places[:, 0] * positives.labels + places[:, 1])
    log_p = ops.convert_to_numpy(flat) - log_z_B[places[:, 0]]
    return np.bincount(places[:, 0], weights=log_p, minlength=positives.queries).astype(np.float64)
