"""What a release's calibration queries are answered, which live traffic is compared with.

Legend: `B` calibration queries, `K` labels per query, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float32, Float64, Int8, Int64
from longtail.bundle.exposure import coverage_by_bucket

DECILES = 10


@dataclass(frozen=True, slots=True)
class Baseline:
    """The distributions of a retrieval of calibration queries.

    Attributes:
        bias_removal, popularity_weight: λ and μ of the retrieval.
        k: labels per query.
        queries: B.
        shares: of the answered labels, by bucket; they sum to 1.
        coverage: of each bucket's labels, those answered at all.
        popularity: mean training pairs of the answered labels.
        score_edges: nine deciles of the scores, ascending.
        score_shares: of the scores between them, ten; near 1/10 each, unless scores tie.
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

    def report_json(self) -> dict[str, Any]:
        """Return it as GET /v1/monitoring shows it."""
        shown = asdict(self)
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
    """Measure the baseline of a retrieval; None if it returned nothing.

    Args:
        scores_BK: best first.
        rows_BK: label rows; −1 where a list ends early.
        buckets_L, counts_L: bucket and training pairs of every label.
        bias_removal, popularity_weight: λ and μ, the same for all queries.
        k: K.
    """
    listed_BK = rows_BK >= 0
    rows_N, scores_N = rows_BK[listed_BK], scores_BK[listed_BK].astype(np.float64)
    if not len(rows_N):
        return None
    edges = np.quantile(scores_N, np.arange(1, DECILES) / DECILES)
    exposures = np.bincount(buckets_L[rows_N], minlength=len(BUCKET_NAMES))
    shown_L = np.bincount(rows_N, minlength=len(buckets_L))
    in_decile = np.bincount(decile_of(scores_N, edges), minlength=DECILES)
    return Baseline(
        bias_removal=float(bias_removal),
        k=int(k),
        shares=tuple((exposures / len(rows_N)).tolist()),
        popularity=float(counts_L[rows_N].mean()),
        score_edges=tuple(edges.tolist()),
        score_shares=tuple((in_decile / len(rows_N)).tolist()),
        popularity_weight=float(popularity_weight),
        queries=len(rows_BK),
        coverage=tuple(coverage_by_bucket(shown_L, buckets_L, np.bincount(buckets_L, minlength=len(BUCKET_NAMES)))),
    )


def decile_of(scores_N: npt.NDArray[np.floating[Any]], edges: Float64) -> npt.NDArray[np.intp]:
    """Return the decile of every score in logits, 0 … 9, int [N]; one on an edge, of nine, is in the decile above."""
    return np.searchsorted(edges, scores_N, side="right")
