"""Explain an answer: the parts of each label's score, and the interval of λ in which the label stays.

Legend: `K` answered labels, `N` places on the dial.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from operator import itemgetter
from typing import Any

import numpy as np

from longtail.bundle import Priors
from longtail.bundle.arrays import Bools, Float32, Float64, Int64
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.ranking import Batch, Ranker

_CELLS = 32
"""Number of cells of the dial that are examined first; a label that leaves and returns within a cell is not noticed."""
_BECAUSE = 5
"""Most entries of a history that are named for a label."""
_DIGITS = 6
"""Digits of an interval's ends, as λ is a float32 in searches."""
_HALVINGS = 7
"""Bisections of a cell to find where a label leaves: on a dial from −1 to 2, to a thousandth."""


def parts_of_scores(
    catalogue: Catalogue,
    priors: Priors | None,
    query: Batch,
    temperature: float,
    rows_K: Int64,
    scores_K: Float32,
    *,
    tree: bool,
) -> list[dict[str, Any]]:
    """Return `Explanation` of the HTTP API for the labels of one query, without the interval.

    Args:
        tree: whether ν is p_n(y|x) of a tree; λ·log ν is then the score minus the other parts.
    """
    taste_K = catalogue.embeddings(rows_K.tolist()) @ query.queries_BD[0] / np.float32(temperature)
    boost_K = _boosts(query, rows_K)
    weighed_KP = np.zeros((len(rows_K), 0), np.float32)
    if priors is not None and query.priors_BP is not None:
        weighed_KP = catalogue.priors(rows_K, priors) * query.priors_BP[0]
    found = []
    for place, label in enumerate(catalogue.labels_json(rows_K.tolist())):
        bias, popularity = np.float32(label["bias"] or 0), query.popularity_B[0] * label["log_popularity"]
        noise = query.bias_removal_B[0] * label["log_pn"]
        if tree:
            noise = scores_K[place] - (taste_K[place] + bias + popularity + weighed_KP[place].sum() + boost_K[place])
        parts = {"taste": taste_K[place], "bias": bias, "noise": noise, "popularity": popularity}
        parts["cooccurrence"] = boost_K[place]
        part: dict[str, Any] = {name: value + np.float32(0) for name, value in parts.items()}  # −0 + 0 is 0
        if priors is not None:
            part["priors"] = dict(zip(priors.names, weighed_KP[place], strict=True))
        found.append(part)
    return found


def _boosts(query: Batch, rows_K: Int64) -> Float32:
    """Compute ω·c of some labels for one query, float32 [K]."""
    boost = None if query.boosts_B is None else query.boosts_B[0]
    if boost is None or not boost.rows_C.size:
        return np.zeros(len(rows_K), np.float32)
    places_K = np.minimum(np.searchsorted(boost.rows_C, rows_K), len(boost.rows_C) - 1)
    return np.where(boost.rows_C[places_K] == rows_K, boost.values_C[places_K], np.float32(0))


def because(entries_H: Sequence[str], parts_H: Float32) -> list[dict[str, Any]]:
    """List the entries of a history that add most to a label's c, at most 5, with their shares of c.

    An entry that is repeated stands once.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for id_, part in zip(entries_H, parts_H.tolist(), strict=True):
        if part > 0:
            sums[id_] += part
    total = sum(sums.values())
    largest = nlargest(_BECAUSE, sums.items(), key=itemgetter(1))
    return [{"id": id_, "share": part / total} for id_, part in largest]


def intervals(
    ranker: Ranker, query: Batch, rows_K: Int64, limits: tuple[float, float]
) -> list[tuple[float, float] | None]:
    """Find the interval of λ in which each label is among the k best, [K].

    Searches like the service at 33 values of λ between the limits, then bisects where a label leaves. None: the label
    is not among the best at the query's own λ, such as a label that was drawn.

    Args:
        query: a batch of one query.
    """
    grid_N = np.linspace(*limits, _CELLS + 1)
    own = float(query.bias_removal_B[0])
    grid_N = np.unique(np.append(grid_N, own))
    inside_NK, at = _among(ranker, query, rows_K, grid_N), int(np.searchsorted(grid_N, own))
    ends = [_last(ranker, query, rows_K, grid_N, inside_NK, at, step) for step in (-1, 1)]
    return [
        (round(float(low), _DIGITS), round(float(high), _DIGITS)) if inside else None
        for inside, low, high in zip(inside_NK[at], *ends, strict=True)
    ]


def _last(
    ranker: Ranker, query: Batch, rows_K: Int64, grid_N: Float64, inside_NK: Bools, at: int, step: int
) -> Float64:
    """Find the last λ in one direction at which each label is among the best, float64 [K]."""
    ahead_NK = inside_NK[at::step]
    left_K = ~ahead_NK.all(axis=0)
    places_K = np.where(left_K, ahead_NK.argmin(axis=0), len(ahead_NK) - 1)
    along_N = grid_N[at::step]
    inner_K, outer_K = along_N[np.maximum(places_K - left_K, 0)], along_N[places_K]
    # Bisection of all labels' last cells together: one search serves all distinct midpoints.
    for _ in range(_HALVINGS):
        middle_K = (inner_K + outer_K) / 2
        wanted = np.flatnonzero(left_K)
        if not len(wanted):
            break
        values_N, which = np.unique(middle_K[wanted], return_inverse=True)
        stays = _among(ranker, query, rows_K, values_N)[which, wanted]
        inner_K[wanted[stays]] = middle_K[wanted[stays]]
        outer_K[wanted[~stays]] = middle_K[wanted[~stays]]
    ends_K: Float64 = np.where(left_K, inner_K, along_N[-1])
    return ends_K


def _among(ranker: Ranker, query: Batch, rows_K: Int64, bias_removal_N: Float64) -> Bools:
    """Compute which labels are among the best at each λ, bool [N, K]."""
    count = len(bias_removal_N)
    asked = query.subset(np.zeros(count, np.int64))
    _, best_Nk = ranker.rank(replace(asked, bias_removal_B=bias_removal_N.astype(np.float32)))
    inside_NK: Bools = (best_Nk[:, :, None] == rows_K).any(axis=1)
    return inside_NK
