"""Measure an index's recall against exact search on held-out queries, along the dials.

Legend: `C` calibration queries, `Q` = C × dial points, `K` results, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import faiss
import numpy as np

from longtail.bundle import Bundle, Prior
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index.errors import RecallFloorError
from longtail.index.manifests import RecallAt
from longtail.index.search.candidates import no_results, top_k
from longtail.index.search.exact import ExactRows
from longtail.index.search.faiss_index import MEASURED_DEPTH
from longtail.index.search.searcher import Searcher
from longtail.index.spec import IndexSpec

Progress = Callable[[str], None]
"""Callback that gets progress reports, one line at a time."""
_QUERIES = 200
_FEW = 10
"""Results of a short answer, for which a search may visit fewer lists."""
_ENOUGH = 0.01
"""Least share of a dial point's exact answers that labels must have for their recall to be measured."""
ROWS_AT_ONCE = 1 << 20
"""Rows of labels in memory at a time, where not all fit: 270 MB with 65 coordinates."""
_ALL_CORNERS_UP_TO = 3
"""Largest number of priors for which every combination of limits is measured, 2^3; with more, each prior alone and all
together."""
_PARTS = (1.0, 1 / 3, 1 / 10, 1 / 30, 1 / 100, 1 / 300)
"""Parts of the limits of slopes, `exposed` (two each) and decay where recall is measured: 1 to 300 times the shortest
half-life."""
DialPoint = tuple[float, float, tuple[float, ...]]
"""Values of λ, μ and the weight of every prior."""
TOLERANCE = 1e-5
"""Bound on the difference of two float32 sums of the same products, relative to the scores' size."""


class Calibration:
    """Queries and exact answers with which a build measures every setting.

    λ takes the values −½, 0, ¼, ½, ¾, 1 and 1½, the bundle's default, and both ends of the range that requests may use,
    all at μ = 0. Where one coordinate holds λ + μ, requests keep the sum in that range, so no other point is needed.
    Where log π has its own coordinate, the default μ and the corners are added: both ends of μ at the default λ and at
    both ends of λ. With a tree p_n(y|x) the coordinate carries μ alone, except in requests for similar labels: λ = 0 is
    then always among the points, with both ends of μ.

    With priors all these points use the default weights, and the corners of the weights are added at the least, the
    default and the largest λ; bonuses, slopes and decay keep their defaults.

    Args:
        rows_LE: float32 [L, E], augmented rows of the bundle; None: read from the bundle in parts, for catalogues
            beyond memory.
        dial_points: settings of λ, μ and priors at which recall is measured; None: `usual_dial_points`.

    Attributes:
        best_QK: label rows of the exact answers, int64 [Q, K], at the largest depth.
    """

    def __init__(
        self, bundle: Bundle, rows_LE: Float32 | None, queries: int = _QUERIES,
        dial_points: Sequence[DialPoint] | None = None,
    ) -> None:  # fmt: skip
        self.dial_points = usual_dial_points(bundle) if dial_points is None else dial_points
        available = bundle.calibration_queries
        queries_CD = np.asarray(available[spread_rows(len(available), queries)])
        self.queries = len(queries_CD)
        self.k = min(MEASURED_DEPTH, len(bundle.embeddings))
        self.depths = sorted({min(_FEW, self.k), self.k})
        self._exact = ExactRows(bundle)
        self._names = bundle.priors.names
        augmented = bundle.augmentation.queries
        self.queries_QE = np.concatenate([augmented(queries_CD, *point) for point in self.dial_points])
        scores_QK, self.best_QK = _exact_best(bundle, rows_LE, self.queries_QE, self.k)
        # An answer counts by its exact score, not by its row: labels that tie with the k-th best are right as well.
        tolerance_Q = TOLERANCE * np.abs(scores_QK).max(axis=1)
        self._least = {k: scores_QK[:, k - 1] - tolerance_Q for k in self.depths}

    def measure(self, searcher: Searcher, k: int | None = None) -> tuple[list[RecallAt], float]:
        """Measure recall@k at every dial point, and queries per second; k defaults to the largest depth.

        A returned label counts if its exact score reaches the exact k-th best, so ties count. Labels that a search
        adds exactly because the lists hold fewer than k do not count: they would hide low recall at smaller k.
        """
        started = time.perf_counter()
        _, hits_QK = self.search(searcher, self.k if k is None else k)
        rate = len(self.queries_QE) / (time.perf_counter() - started)
        return self.recall(hits_QK), rate

    def search(self, searcher: Searcher, k: int) -> tuple[Int64, Bools]:
        """Search every query: label rows int64 [Q, k], and which of the rows are hits, bool [Q, k]."""
        _, rows_QK = searcher.search_index(self.queries_QE, k)
        hits_QK: Bools = self._exact.rescore(self.queries_QE, rows_QK) >= self._least[k][:, None]
        return rows_QK, hits_QK

    def measure_labels(self, labels_L: Bools, rows_QK: Int64, hits_QK: Bools) -> list[float]:
        """Compute recall of some labels, bool [L], at every dial point; 1 where exact answers hold too few."""
        expected_Q = np.count_nonzero(labels_L[self.best_QK[:, : rows_QK.shape[1]]], axis=1)
        # With ties a search may return more of these labels than the exact answers hold.
        hits_Q = np.minimum(np.count_nonzero(hits_QK & labels_L[rows_QK], axis=1), expected_Q)
        shape = len(self.dial_points), -1
        expected, hit_count = expected_Q.reshape(shape).sum(axis=1), hits_Q.reshape(shape).sum(axis=1)
        enough = _ENOUGH * rows_QK.size / len(self.dial_points)
        return np.where(expected < enough, 1.0, hit_count / np.maximum(expected, 1)).tolist()  # type: ignore[no-any-return]

    def recall(self, hits_QK: Bools) -> list[RecallAt]:
        """Compute recall at every dial point from the hits, bool [Q, k], of `search`."""
        recalls = hits_QK.reshape(len(self.dial_points), -1).mean(axis=1)
        return [
            RecallAt(
                bias_removal=bias_removal,
                popularity=popularity,
                priors=dict(zip(self._names, weights, strict=True)),
                recall=float(recall),
            )
            for (bias_removal, popularity, weights), recall in zip(self.dial_points, recalls, strict=True)
        ]


def spread_rows(rows: int, most: int) -> Int64:
    """Choose at most `most` rows, spread evenly and ascending, int64."""
    return np.unique(np.linspace(0, rows - 1, min(most, rows)).astype(np.int64))


def _exact_best(bundle: Bundle, rows_LE: Float32 | None, queries_QE: Float32, k: int) -> tuple[Float32, Int64]:
    """Find the k best of all labels exactly, float32 and int64 [Q, k]."""
    if rows_LE is not None:
        scores_QK, rows_QK = faiss.knn(queries_QE, rows_LE, k, metric=faiss.METRIC_INNER_PRODUCT)
        return scores_QK, rows_QK
    scores_QK, rows_QK = no_results(len(queries_QE), k)
    labels = len(bundle.embeddings)
    for start in range(0, labels, ROWS_AT_ONCE):
        part_RE = bundle.rows(np.arange(start, min(start + ROWS_AT_ONCE, labels)))
        hits = faiss.knn(queries_QE, part_RE, min(k, len(part_RE)), metric=faiss.METRIC_INNER_PRODUCT)
        scores_QK, rows_QK = top_k([scores_QK, hits[0]], [rows_QK, hits[1] + start], k)
    return scores_QK, rows_QK


def usual_dial_points(bundle: Bundle) -> list[DialPoint]:
    """List pairs of λ and μ at default weights, then corners of a table's weights."""
    dial, prior, defaults = bundle.manifest.bias_removal, bundle.manifest.popularity, bundle.priors.defaults.tolist()
    lambdas, ends = sorted({dial.minimum, dial.default, dial.maximum}), (prior.minimum, prior.maximum)
    inside = [value for value in (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5) if dial.minimum <= value <= dial.maximum]
    pairs, pairs_of_corners = {(value, 0.0) for value in (*inside, *lambdas)}, [(value, 0.0) for value in lambdas]
    if bundle.proposal is not None:
        pairs |= {(0.0, value) for value in (0.0, prior.default, *ends)}
        pairs_of_corners = [(0.0, prior.default)]
    elif bundle.augmentation.kappa_popularity is not None:
        pairs |= {(dial.default, prior.default), *product(lambdas, ends)}
    points = [(*pair, tuple(defaults)) for pair in sorted(pairs, key=lambda pair: (pair[1] != 0, pair))]
    if table := bundle.priors.from_table:
        corners = {_replace_weights(tuple(defaults), range(len(table)), weights) for weights in _corners(table)}
        points += [(*pair, corner) for pair in pairs_of_corners for corner in sorted(corners - {tuple(defaults)})]
    return points


def all_dial_points(bundle: Bundle) -> list[DialPoint]:
    """List the usual dial points, then those of derived priors."""
    return [*usual_dial_points(bundle), *derived_dial_points(bundle)]


def derived_dial_points(bundle: Bundle) -> list[DialPoint]:
    """List weights of bonuses, slopes, decay and `exposed` at the default λ and μ.

    Each bonus alone stands at its largest weight, all at their largest and all at their least; a bonus that no label
    gets is left out. Slopes, `exposed` and decay go through parts of their limits, where recall is lower than at the
    ends.
    """
    priors, defaults = bundle.priors, tuple(bundle.priors.defaults.tolist())
    bonuses = [p for p, prior in enumerate(priors.settings) if prior.indicates and priors.values_LP[:, p].any()]
    limits = [(priors.settings[p].minimum, priors.settings[p].maximum) for p in bonuses]
    weights = {_replace_weights(defaults, [p], [most]) for p, (_, most) in zip(bonuses, limits, strict=True)}
    weights |= {_replace_weights(defaults, bonuses, ends) for ends in zip(*limits, strict=True)}
    for p, prior in enumerate(priors.settings):
        parts = {"number": _PARTS[:2], "answers": _PARTS[:2], "date": _PARTS}.get(prior.source, ())
        weights |= {
            _replace_weights(defaults, [p], [end * part]) for end in (prior.minimum, prior.maximum) for part in parts
        }
    noise = 0.0 if bundle.proposal is not None else bundle.manifest.bias_removal.default
    return [(noise, bundle.manifest.popularity.default, weights_P) for weights_P in sorted(weights - {defaults})]


def _replace_weights(
    defaults: tuple[float, ...], numbers: Sequence[int], weights: Sequence[float]
) -> tuple[float, ...]:
    """Replace the weights of some priors."""
    replaced = dict(zip(numbers, weights, strict=True))
    return tuple(replaced.get(number, default) for number, default in enumerate(defaults))


def _corners(settings: Sequence[Prior]) -> Iterable[tuple[float, ...]]:
    """List weights at their limits: every combination, or each prior alone and, unless they stand alone, all."""
    ends, stand_alone = [(prior.minimum, prior.maximum) for prior in settings], any(prior.alone for prior in settings)
    if len(ends) <= _ALL_CORNERS_UP_TO and not stand_alone:
        return product(*ends)
    defaults = [prior.default for prior in settings]
    alone = [(*defaults[:number], end, *defaults[number + 1 :]) for number, both in enumerate(ends) for end in both]
    return alone if stand_alone else [*alone, *zip(*ends, strict=True)]


def check_floor(lowest: RecallAt, spec: IndexSpec, calibration: Calibration, trials: int, remedy: str) -> None:
    """Raise RecallFloorError if the lowest recall of the best setting is below the spec's floor."""
    if lowest.recall < spec.recall_floor:
        raise RecallFloorError(
            f"index spec {spec.text!r}: expected recall@{calibration.k} >= {spec.recall_floor} against exact search at "
            f"every dial point, measured {lowest.recall:.4f} at {lowest.coordinates} with the best of {trials} "
            f"settings; nothing was written. {remedy}, or lower --recall-floor"
        )
