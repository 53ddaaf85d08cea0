"""`tfrs.tasks.Retrieval` with every family, weight and mining of this project.

Legend: `B` queries, `C` candidates (the B positives, then any extra negatives), `D` dimensions, `L` labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.bundle import Loss, log_frequencies
from longtail.bundle.arrays import Int64
from longtail.trainer.config import LossConfig
from longtail.trainer.losses import LOSSES, Family, SampledLogits

Counts = Mapping[str, int] | Mapping[int, int] | Int64
"""Training pairs per candidate id, or, where candidate ids are rows 0..L-1, int64 [L]."""

Choice = str | Mapping[str, Any]
"""A row of a table by its name, or a mapping with `name` and the row's parameters; as in a recipe."""

_WITHOUT_Q = ("unit", "constant")


class SampledRetrieval(tfrs.tasks.Retrieval):
    """Replace `tfrs.tasks.Retrieval` by another loss.

    Family, weight and mining are the keys of a recipe's `[loss]` table (`longtail.trainer.config.LossConfig`). The
    defaults give the loss of Retrieval. Weight `relative` gives that of Retrieval with
    `candidate_sampling_probability`, without clipping. Negatives are the batch's other candidates, and further rows of
    `candidate_embeddings` beyond the number of queries.

    `mining={"keep": k}` corresponds to `num_hard_negatives=k`, with two differences: it takes the *mean* of the k
    negatives, while TFRS takes their sum; and it ranks negatives by logit, while TFRS ranks by corrected logit.

    Args:
        family: loss family, such as `softmax`, or a mapping with parameters: `{"name": "contrastive", "margin": 0.3}`
            [METHODS §2].
        weight: weight of negatives, such as `unit` or `{"name": "logit_adjusted", "tau": 0.5}` [METHODS §2.2].
        mining: weights of the hardest negatives: `{"keep": k}`, `{"power": p}` or both, or a `theta` [METHODS §3].
        regularizer: strength of (f + log q)² [BM20 eq. 6].
        metrics, batch_metrics, loss_metrics: as for Retrieval. Batch metrics see the logits minus log q if the call
            gives it, with accidental hits at the smallest float, as in Retrieval; mining does not affect them.
        temperature: T > 0; logits are `u·v / T`.
        remove_accidental_hits: masks negatives that are their row's positive; calls then need `candidate_ids`. Family
            `nce` does not allow it, because it counts accidental hits as noise.
        counts: label frequencies π, for weights that depend on π, and as the sampling probability of calls without one
            (in-batch negatives have q = π); calls then need `candidate_ids`. Counts are smoothed as in the bundle; an
            unknown id counts 0.
    """

    def __init__(
        self,
        *,
        family: Choice = "softmax",
        weight: Choice = "unit",
        mining: Mapping[str, Any] | None = None,
        regularizer: float = 0.0,
        metrics: Sequence[tfrs.metrics.Factorized] | tfrs.metrics.Factorized | None = None,
        batch_metrics: list[tf.keras.metrics.Metric] | None = None,
        loss_metrics: list[tf.keras.metrics.Metric] | None = None,
        temperature: float | None = None,
        remove_accidental_hits: bool = False,
        counts: Counts | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            metrics=metrics, batch_metrics=batch_metrics, loss_metrics=loss_metrics, temperature=temperature,
            remove_accidental_hits=remove_accidental_hits, name=name,
        )  # fmt: skip
        self._config = LossConfig.model_validate(
            {"family": family, "weight": weight, "mining": mining, "regularizer": regularizer}
        )
        _check(LOSSES[self._config.family.name], self._config, temperature, masks=remove_accidental_hits)
        self.objective = self._config.objective()
        self._log_pi = None if counts is None else _log_pi_table(counts, self._config.smoothing)

    def call(
        self,
        query_embeddings: tf.Tensor,
        candidate_embeddings: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        candidate_sampling_probability: tf.Tensor | None = None,
        candidate_ids: tf.Tensor | None = None,
        compute_metrics: bool = True,
        compute_batch_metrics: bool = True,
        score_mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Compute the loss, a float32 scalar in nats: the sum over queries, as Retrieval's; updates the metrics.

        Args:
            query_embeddings: [B, D], or [B, H, D] for H heads of which the best counts.
            candidate_embeddings: [C, D]; row i < B is the positive of query i.
            candidate_sampling_probability: q of every candidate, [C], in (0, 1], for weights that depend on it;
                `unit` and `constant` do not, where Retrieval always corrects: `relative` is its equal.
            candidate_ids: [C]; strings, or integers.
            score_mask: bool [B, C]; False takes a negative out. A positive always counts.

        Raises ValueError where candidate ids or probabilities are needed and missing.
        """
        several_heads = len(query_embeddings.shape) == 3
        scores_BC = self._scores(query_embeddings, candidate_embeddings)
        batch, candidates = tf.shape(scores_BC)[0], tf.shape(scores_BC)[1]
        tf.debugging.assert_less_equal(batch, candidates, "expected a candidate per query, received fewer")
        labels_BC = tf.eye(batch, candidates)
        left_out_BC = hits_BC = labels_BC > 0
        if score_mask is not None:
            left_out_BC = hits_BC = hits_BC | ~tf.cast(score_mask, tf.bool)
        if self._remove_accidental_hits:
            ids_C = tf.unique(self._require_ids(candidate_ids, "remove_accidental_hits")).idx  # far faster than strings
            hits_BC |= ids_C[:batch, None] == ids_C[None, :]
        log_pi_C, log_q_C = self._log_probabilities(candidates, candidate_sampling_probability, candidate_ids)

        padded = self._pad(scores_BC, hits_BC, log_pi_C, log_q_C)
        losses_B = self.objective(
            SampledLogits(
                positive_B=tf.linalg.diag_part(scores_BC),
                negative_BM=padded[0],
                hits_BM=padded[1],
                log_pi_positive_B=log_pi_C[:batch],
                log_pi_negative=padded[2],
                log_q_positive_B=log_q_C[:batch],
                log_q_negative=padded[3],
                m_B=tf.reduce_sum(tf.cast(~left_out_BC, tf.float32), axis=1),
            )
        )
        if sample_weight is not None:
            losses_B *= tf.reshape(tf.cast(sample_weight, losses_B.dtype), [-1])
        loss = tf.reduce_sum(losses_B)

        updates = [metric.update_state(loss) for metric in self._loss_metrics]
        if compute_metrics and not several_heads:
            positive_ids_B = None if candidate_ids is None else candidate_ids[:batch]
            updates += [
                metric.update_state(
                    query_embeddings, candidate_embeddings[:batch], true_candidate_ids=positive_ids_B,
                    sample_weight=sample_weight,
                )
                for metric in self._factorized_metrics
            ]  # fmt: skip
        if compute_batch_metrics:
            corrected_BC = scores_BC if candidate_sampling_probability is None else scores_BC - log_q_C
            seen_BC = tf.where(hits_BC & (labels_BC == 0), tf.float32.min / 100, corrected_BC)
            updates += [
                metric.update_state(labels_BC, seen_BC, sample_weight=sample_weight) for metric in self._batch_metrics
            ]
        with tf.control_dependencies(updates):
            return tf.identity(loss)

    @property
    def trained_with(self) -> Loss:
        """Return the description of this loss for a bundle's manifest."""
        return Loss(family=str(self._config.family), sampler="in_batch", weight=str(self._config.weight))

    def _scores(self, queries: tf.Tensor, candidates_CD: tf.Tensor) -> tf.Tensor:
        """Compute logits, float32 [B, C]."""
        if len(queries.shape) == 3:
            scores_BC = tf.reduce_max(tf.einsum("bhd,cd->bhc", queries, candidates_CD), axis=1)
        else:
            scores_BC = tf.linalg.matmul(queries, candidates_CD, transpose_b=True)
        return tf.cast(scores_BC, tf.float32) / (self._temperature or 1.0)

    def _log_probabilities(
        self, candidates: tf.Tensor, probability_C: tf.Tensor | None, candidate_ids: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return log π and log q of the candidates, float32 [C] each; one replaces the other if it is unknown."""
        log_pi_C = log_q_C = None
        if self._log_pi is not None:
            ids_C = self._require_ids(candidate_ids, "counts")
            if isinstance(self._log_pi, tf.lookup.StaticHashTable):
                log_pi_C = self._log_pi.lookup(tf.cast(ids_C, self._log_pi.key_dtype))
            else:
                log_pi_C = tf.gather(self._log_pi, ids_C)
        if probability_C is not None:
            probability_C = tf.reshape(tf.cast(probability_C, tf.float32), [-1])
            tf.debugging.assert_positive(probability_C, "expected sampling probabilities > 0")
            log_q_C = tf.math.log(probability_C)
        if log_pi_C is None and log_q_C is None:
            config = self._config
            if config.weight.name not in _WITHOUT_Q or LOSSES[config.family.name].shifted or config.regularizer > 0:
                raise ValueError(
                    f"{self.name}: expected candidate_sampling_probability in the call, or counts in the task, which "
                    f"{config} depends on; received neither"
                )
            log_pi_C = tf.zeros([candidates])
        return (log_q_C if log_pi_C is None else log_pi_C), (log_pi_C if log_q_C is None else log_q_C)

    def _pad(self, scores_BC: tf.Tensor, *columns: tf.Tensor) -> list[tf.Tensor]:
        """Pad a batch with hits to the negatives that mining keeps."""
        mining = self.objective.mining
        if mining is None or (mining.kept_count is None and scores_BC.shape[1] is not None):
            return [scores_BC, *columns]
        if mining.kept_count is None:
            raise ValueError(f"{self.name}: expected batches of one size (drop_remainder=True) for {mining}")
        missing = tf.maximum(mining.kept_count - tf.shape(scores_BC)[1], 0)
        hits_BC, log_pi_C, log_q_C = columns
        wide, long = [[0, 0], [0, missing]], [[0, missing]]
        return [
            tf.pad(scores_BC, wide), tf.pad(hits_BC, wide, constant_values=True),
            tf.pad(log_pi_C, long), tf.pad(log_q_C, long),
        ]  # fmt: skip

    def _require_ids(self, candidate_ids: tf.Tensor | None, why: str) -> tf.Tensor:
        if candidate_ids is None:
            raise ValueError(f"{self.name}: expected candidate_ids in the call, which {why} needs, received none")
        return tf.reshape(candidate_ids, [-1])


def _check(family: Family, config: LossConfig, temperature: float | None, *, masks: bool) -> None:
    """Raise ValueError for what a task cannot compute."""
    if family.stateful:
        raise ValueError(
            f"family: expected one without a number per training pair, received {config.family}: a task is not told "
            "which pairs it sees (longtail-train is)"
        )
    if family.shifted and masks:
        raise ValueError(
            f"remove_accidental_hits = True is not allowed with {config.family}, which must count accidental hits as "
            "noise; use False"
        )
    if config.mining is not None and config.mining.draw is not None:
        raise ValueError(
            f"mining: expected no draw, received {config.mining}: a task has no seed of its own (longtail-train has)"
        )
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, received {temperature}")
    if family.cosine and temperature not in (None, 1):
        raise ValueError(f"temperature: expected 1 with {config.family}, a loss of cosines, received {temperature}")


def _log_pi_table(counts: Counts, smoothing: float) -> tf.Tensor:
    """Build a table of log π by row or by id, nats."""
    if not isinstance(counts, Mapping):
        return tf.constant(log_frequencies(np.asarray(counts), smoothing=smoothing), tf.float32)
    ids = list(counts)
    # One more label without pairs represents every unknown id.
    counts_L = np.array([*counts.values(), 0], np.int64)
    log_pi_L = log_frequencies(counts_L, smoothing=smoothing).astype(np.float32)
    keys = tf.constant(ids, tf.int64 if all(isinstance(id_, int | np.integer) for id_ in ids) else tf.string)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, log_pi_L[:-1]), float(log_pi_L[-1]))
