"""The baseline of a release, which drift is measured against: made of calibration queries, kept beside the rings.

Legend: `B` calibration queries, `K` labels per query, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES, replace_file
from longtail.bundle.arrays import Float32, Float64, Int8, Int64
from longtail.bundle.exposure import coverage_by_bucket
from longtail.serving.monitoring.likeness import pairs_of, telling

DECILES = 10
_FILE = "baseline.json"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What calibration queries get from a release: the distributions that live traffic is compared with.

    Attributes:
        bias_removal: λ of the retrieval.
        k: labels per query.
        shares: of the answered labels, by bucket; they sum to 1.
        popularity: mean training pairs of the answered labels.
        score_edges: nine deciles of the scores, ascending.
        score_shares: of the scores between them, ten; near 1/10 each, unless scores tie.
        popularity_weight: μ of the retrieval.
        queries: B; 0 where it is not known, as of a baseline of an older version.
        telling: labels that each bucket's share rests on, as `likeness.telling`; empty where they are not known.
        coverage: by bucket; empty where it is not known.
    """

    bias_removal: float
    k: int
    shares: tuple[float, ...]
    popularity: float
    score_edges: tuple[float, ...]
    score_shares: tuple[float, ...]
    popularity_weight: float = 0.0
    queries: int = 0
    telling: tuple[float, ...] = ()
    coverage: tuple[float, ...] = ()

    def report_json(self) -> dict[str, Any]:
        """As GET /v1/monitoring shows it."""
        return {
            "bias_removal": self.bias_removal,
            "popularity_weight": self.popularity_weight,
            "k": self.k,
            "queries": self.queries,
            "shares": dict(zip(BUCKET_NAMES, self.shares, strict=True)),
            "telling": dict(zip(BUCKET_NAMES, self.telling, strict=True)) if self.telling else None,
            "coverage": dict(zip(BUCKET_NAMES, self.coverage, strict=True)) if self.coverage else None,
            "popularity": self.popularity,
            "scores": {"edges": list(self.score_edges), "shares": list(self.score_shares)},
        }

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """What `to_json` wrote, of a bucket that it did not know a share of 0; raises TypeError if fields are missing
        or unknown.
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        baseline = cls(**values)
        none = (0.0,) * (len(BUCKET_NAMES) - len(baseline.shares))
        return replace(baseline, shares=(*baseline.shares, *none))


def measure_baseline(
    scores_BK: Float32,
    rows_BK: npt.NDArray[np.integer[Any]],
    buckets_L: Int8,
    counts_L: Int64,
    bias_removal: float,
    k: int,
    popularity_weight: float = 0.0,
) -> Baseline | None:
    """The baseline from a retrieval of calibration queries; None if it returned nothing.

    Args:
        scores_BK: best first.
        rows_BK: label rows; −1 where a list ends early.
        buckets_L: bucket of every label.
        counts_L: training pairs of every label.
        bias_removal: λ of the retrieval, the same for all queries.
        k: K.
        popularity_weight: μ of the retrieval, the same for all queries.
    """
    listed_BK = rows_BK >= 0
    rows_N, scores_N = rows_BK[listed_BK], scores_BK[listed_BK].astype(np.float64)
    if not len(rows_N):
        return None
    edges = np.quantile(scores_N, np.arange(1, DECILES) / DECILES)
    exposures = np.bincount(buckets_L[rows_N], minlength=len(BUCKET_NAMES))
    sizes = np.bincount(buckets_L, minlength=len(BUCKET_NAMES))
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
        telling=tuple(telling(exposures, pairs_of(buckets_L[rows_N], listed_BK.sum(axis=1).cumsum()), len(rows_BK))),
        coverage=tuple(coverage_by_bucket(shown_L, buckets_L, sizes)),
    )


def decile_of(scores_N: npt.NDArray[np.floating[Any]], edges: Float64) -> npt.NDArray[np.intp]:
    """The decile of every score, 0 … 9, int [N]: a score on an edge belongs to the decile above it.

    Args:
        scores_N: in logits, any float type.
        edges: the nine deciles, float64 [9], ascending.
    """
    return np.searchsorted(edges, scores_N, side="right")


def save_baseline(directory: Path, baseline: Baseline | None) -> None:
    """Write a release's baseline beside its rings, so that its minutes keep it once it is out of service."""
    if baseline is None:
        (directory / _FILE).unlink(missing_ok=True)
    else:
        replace_file(directory / _FILE, json.dumps(baseline.to_json()).encode())


def load_baseline(directory: Path) -> Baseline | None:
    """What `save_baseline` wrote there; None if there is none or it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return Baseline.from_json(json.loads((directory / _FILE).read_bytes()))
    return None
