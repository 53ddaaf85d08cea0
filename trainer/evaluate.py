"""Exact top-k over the whole catalogue for a grid of λ, through the rows and queries that serve.

Legend: `N` queries, `B` a block of them, `L` labels, `E` augmented dimensions, `K` list length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from keras import ops

from bundle import Augmentation, Buckets, CurvePoint, Labels, log_frequencies
from trainer.config import Evaluation
from trainer.data import Pairs
from trainer.errors import DataError
from trainer.metrics import Bootstrap, Positives, metrics_of

Float32 = npt.NDArray[np.float32]
EmbedQueries = Callable[[npt.NDArray[np.int32]], Float32]

_BLOCK_BYTES = 256 << 20
_EMBED_BLOCK = 4096


@dataclass(frozen=True)
class Catalogue:
    """The label side of an evaluation.

    Attributes:
        embeddings: float32 [L, D].
        log_pn: float32 [L].
        bias: float32 [L] in logits, or None.
        counts: int64 [L], training pairs.
        buckets: int8 [L].
        augmentation: the constants that rows and queries share.
    """

    embeddings: Float32
    log_pn: Float32
    bias: Float32 | None
    counts: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int8]
    augmentation: Augmentation

    @classmethod
    def of(
        cls, embeddings: Float32, bias: Float32 | None, counts: npt.NDArray[np.int64], *,
        temperature: float, smoothing: float, buckets: Buckets,
    ) -> Catalogue:  # fmt: skip
        """From a model's label side and the training counts."""
        log_pn = log_frequencies(counts, smoothing=smoothing).astype(np.float32)
        augmentation = Augmentation.conditioned(temperature, embeddings, log_pn, bias)
        return cls(embeddings, log_pn, bias, counts, buckets.assign(counts), augmentation)

    @classmethod
    def of_labels(cls, labels: Labels, embeddings: Float32, augmentation: Augmentation) -> Catalogue:
        """From a bundle."""
        return cls(embeddings, labels.log_pn, labels.bias, labels.counts, labels.buckets, augmentation)


def buckets_for(config: Evaluation, counts: npt.NDArray[np.int64]) -> Buckets:
    """Head, torso and tail as the recipe asks."""
    return Buckets.by_quantile(counts) if config.buckets == "quantile" else Buckets.by_count()


def check_metric(config: Evaluation, *, labels: int) -> None:
    """Refuse a metric over lists longer than the catalogue.

    Raises:
        DataError: says how many labels there are.
    """
    k = int(config.metric.partition("@")[2])
    if k > labels:
        raise DataError(f"evaluation.metric: expected a k of at most {labels}, all labels, received {config.metric}")


def evaluate(
    held_out: Pairs,
    known: Pairs,
    embed_queries: EmbedQueries,
    catalogue: Catalogue,
    config: Evaluation,
    *,
    queries: int,
    seed: int,
    max_queries: int | None = None,
    grid: list[float] | None = None,
) -> list[CurvePoint]:
    """Every metric at every λ of the grid.

    Args:
        held_out: pairs to find.
        known: pairs seen in training; out of each query's ranking if `exclude_seen`, and then no positive.
        embed_queries: query rows, int32 [B] → float32 [B, D].
        catalogue: the label side.
        config: what to measure.
        queries: number of query rows.
        seed: of the bootstrap and of the choice of queries.
        max_queries: measure at most this many queries, drawn by seed.
        grid: λ values; by default the recipe's.

    Raises:
        DataError: no held-out pair is left to find, or as `check_metric`.
    """
    labels = len(catalogue.counts)
    check_metric(config, labels=labels)
    seen_keys = (
        np.unique(known.queries.astype(np.int64) * labels + known.labels)
        if config.exclude_seen
        else np.zeros(0, np.int64)
    )
    keys = np.setdiff1d(held_out.queries.astype(np.int64) * labels + held_out.labels, seen_keys)
    rows_N = np.unique(keys // labels).astype(np.int32)
    if len(rows_N) == 0:
        raise DataError("evaluation: expected held-out pairs that are not in training, found none")
    if max_queries is not None and len(rows_N) > max_queries:
        rows_N = np.sort(np.random.default_rng(seed).choice(rows_N, max_queries, replace=False))
        keys = keys[np.isin(keys // labels, rows_N)]
    positives = Positives.of(np.searchsorted(rows_N, keys // labels), keys % labels, queries=len(rows_N), labels=labels)
    top_GNK = rank(
        rows_N,
        embed_queries,
        catalogue,
        seen_keys,
        grid or config.bias_removal,
        k=min(max(config.ks), labels),
        queries=queries,
    )
    bootstrap = Bootstrap(len(rows_N), resamples=config.bootstrap, seed=seed)
    ks = [k for k in config.ks if k <= labels]
    return [
        CurvePoint(
            bias_removal=bias_removal,
            metrics=metrics_of(
                top_NK, positives, ks=ks, buckets_L=catalogue.buckets, counts_L=catalogue.counts, bootstrap=bootstrap
            ),
        )
        for bias_removal, top_NK in zip(grid or config.bias_removal, top_GNK, strict=True)
    ]


def rank(
    rows_N: npt.NDArray[np.int32],
    embed_queries: EmbedQueries,
    catalogue: Catalogue,
    seen_keys: npt.NDArray[np.int64],
    grid: list[float],
    *,
    k: int,
    queries: int,
) -> npt.NDArray[np.int32]:
    """Exact top-k label rows for every λ, int32 [len(grid), N, K]; −1 where fewer labels are left.

    Args:
        rows_N: query rows.
        embed_queries: query rows → embeddings.
        catalogue: the label side.
        seen_keys: `query · L + label` to leave out, sorted.
        grid: λ values.
        k: K.
        queries: number of query rows.
    """
    labels_EL = ops.convert_to_tensor(
        catalogue.augmentation.rows(catalogue.embeddings, catalogue.log_pn, catalogue.bias).T.copy()
    )
    labels = labels_EL.shape[1]
    seen_offsets = np.searchsorted(seen_keys, np.arange(queries + 1, dtype=np.int64) * labels)
    block = int(np.clip(_BLOCK_BYTES // (4 * labels), 1, _EMBED_BLOCK))
    top_GNK = np.empty((len(grid), len(rows_N), k), np.int32)
    for start in range(0, len(rows_N), block):
        rows_B = rows_N[start : start + block]
        embedded_BD = embed_queries(rows_B)
        hidden = np.concatenate([seen_keys[seen_offsets[row] : seen_offsets[row + 1]] % labels for row in rows_B])
        owners = np.repeat(np.arange(len(rows_B)), seen_offsets[rows_B + 1] - seen_offsets[rows_B])
        places = np.stack([owners, hidden], axis=1)
        hide = np.full(len(places), -np.inf, np.float32)
        for at, bias_removal in enumerate(grid):
            scores_BL = ops.matmul(catalogue.augmentation.queries(embedded_BD, bias_removal), labels_EL)
            if len(places):
                scores_BL = ops.scatter_update(scores_BL, places, hide)
            values, indices = ops.top_k(scores_BL, k)
            top = ops.convert_to_numpy(indices)
            top_GNK[at, start : start + block] = np.where(np.isneginf(ops.convert_to_numpy(values)), -1, top)
    return top_GNK
