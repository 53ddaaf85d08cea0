"""Measure what a release promises: answers to its calibration queries, and recall of its offline evaluation.

Legend: `B` calibration queries, `K` labels per query, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES, Manifest
from longtail.bundle.arrays import Float32, Int8, Int64
from longtail.bundle.exposure import coverage_by_bucket

DECILES = 10
ALL = "all"
_RECALL = re.compile(rf"recall@(\d+)(?:/({'|'.join(BUCKET_NAMES)}))?")
_NEAR = 1e-6


@dataclass(frozen=True, slots=True)
class Baseline:
    """Distributions of the answers to calibration queries.

    Attributes:
        shares: shares of the buckets in the answered labels; the sum is 1.
        coverage: share of each bucket's labels that were answered at all.
        by_k: for the first 1, 2, …, k labels of every query: labels per query in each bucket, and in each decile of
            `score_edges`.
        score_edges: nine deciles of the scores, ascending.
        score_shares: shares of the scores in the ten ranges; near 1/10 each, unless scores tie.
    """

    bias_removal: float
    k: int
    shares: tuple[float, ...]
    popularity: float
    score_edges: tuple[float, ...]
    score_shares: tuple[float, ...]
    popularity_weight: float
    queries: int
    coverage: tuple[float, ...]
    by_k: tuple[tuple[float, ...], ...]

    def report_json(self) -> dict[str, Any]:
        """Return the baseline in the form of GET /v1/monitoring."""
        shown = asdict(self)
        del shown["by_k"]
        scores = {"edges": list(shown.pop("score_edges")), "shares": list(shown.pop("score_shares"))}
        of_buckets = {name: dict(zip(BUCKET_NAMES, shown[name], strict=True)) for name in ("shares", "coverage")}
        return shown | of_buckets | {"scores": scores}


def measure_baseline(
    scores_BK: Float32,
    rows_BK: npt.NDArray[np.integer[Any]],
    buckets_L: Int8,
    counts_L: Int64,
    bias_removal: float,
    k: int,
    popularity_weight: float = 0.0,
) -> Baseline | None:
    """Measure the baseline of answers; None if they are empty.

    Args:
        rows_BK: label rows; −1 fills short answers.
    """
    listed_BK = rows_BK >= 0
    rows_N, scores_N, rank_N = rows_BK[listed_BK], scores_BK[listed_BK].astype(np.float64), np.nonzero(listed_BK)[1]
    if not len(rows_N):
        return None
    edges = np.quantile(scores_N, np.arange(1, DECILES) / DECILES)
    exposures = np.bincount(buckets_L[rows_N], minlength=len(BUCKET_NAMES))
    sizes = np.bincount(buckets_L, minlength=len(BUCKET_NAMES))
    # A score equal to an edge counts in the upper decile.
    decile_N = np.searchsorted(edges, scores_N, side="right")
    in_decile = np.bincount(decile_N, minlength=DECILES)
    counts_KC = np.zeros((rows_BK.shape[1], len(BUCKET_NAMES) + DECILES))
    for columns_N in (buckets_L[rows_N], len(BUCKET_NAMES) + decile_N):
        np.add.at(counts_KC, (rank_N, columns_N), 1 / len(rows_BK))
    coverage = coverage_by_bucket(np.bincount(rows_N, minlength=len(buckets_L)), buckets_L, sizes)
    return Baseline(
        bias_removal=float(bias_removal),
        k=int(k),
        shares=tuple((exposures / len(rows_N)).tolist()),
        popularity=float(counts_L[rows_N].mean()),
        score_edges=tuple(edges.tolist()),
        score_shares=tuple((in_decile / len(rows_N)).tolist()),
        popularity_weight=float(popularity_weight),
        queries=len(rows_BK),
        coverage=tuple(coverage),
        by_k=tuple(map(tuple, counts_KC.cumsum(axis=0).tolist())),
    )


class OfflineRecall(NamedTuple):
    """Recall on held-out queries, with a 95 % interval if there is one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """Offline figures of one release.

    Attributes:
        recall: recall at the default λ, μ and ω, by k, then by bucket and `all`; empty if the model was not evaluated.
        data_until: time when the training data was read, in seconds since 1970; None: unknown.
    """

    recall: Mapping[int, Mapping[str, OfflineRecall]] = field(default_factory=dict)
    data_until: float | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Read the offline figures from a bundle's manifest."""
        together = 0.0 if manifest.cooccurrence is None else manifest.cooccurrence.default
        wanted = np.array([manifest.bias_removal.default, manifest.popularity.default, together])
        recall: dict[int, dict[str, OfflineRecall]] = {}
        for point in manifest.bias_removal.curve:
            dials = point.bias_removal, point.popularity, point.cooccurrence
            if np.abs(wanted - dials).max() > _NEAR:
                continue
            for name, found in point.metrics.items():
                if named := _RECALL.fullmatch(name):
                    of_k = recall.setdefault(int(named[1]), {})
                    of_k[named[2] or ALL] = OfflineRecall(found.value, found.low, found.high)
        return cls(recall, manifest.data_until.timestamp())

    def recall_within(self, k: float) -> tuple[int, Mapping[str, OfflineRecall]] | None:
        """Return recall at the largest measured k up to `k`: a lower bound, as recall grows with k."""
        measured = [cutoff for cutoff in self.recall if cutoff <= k]
        return (max(measured), self.recall[max(measured)]) if measured else None
