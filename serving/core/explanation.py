"""Explain an answer: the parts of each label's score, and the interval of λ in which the label stays.

Legend: `K` answered labels, `N` searched λ, `U` labels of all lists, `u` rivals of a cell, `G` labels with a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from longtail.bundle import Priors
from longtail.bundle.arrays import Bools, Float32, Float64, Int64
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.ranking import Batch, Ranker

_CELLS = 32
"""Number of cells of the dial that are searched first."""
_BECAUSE = 5
"""Most entries of a history that are named for a label."""
_DIGITS = 6
"""Digits of an interval's ends, as λ is a float32 in searches."""
_HALVINGS = 7
"""Bisections of a cell to find where a label leaves: on a dial from −1 to 2, to a thousandth."""


def parts_of_scores(
    catalogue: Catalogue,
    priors: Priors,
    query: Batch,
    temperature: float,
    rows_K: Int64,
    scores_K: Float32,
    *,
    shift: float,
    tree: bool,
) -> list[dict[str, Any]]:
    """Create `Explanation` of the HTTP API without the interval.

    Args:
        shift: what `decay` adds to the scores of all labels, which the scores here are without.
        tree: whether ν is p_n(y|x) of a tree; λ·log ν is then the score minus the other parts.
    """
    taste_K = catalogue.embeddings(rows_K.tolist()) @ query.queries_BD[0] / np.float32(temperature)
    boost_K = _boosts(query, rows_K)
    weights_P = np.zeros(len(priors.settings), np.float32) if query.priors_BP is None else query.priors_BP[0]
    weighed_KP = np.zeros((len(rows_K), len(weights_P)), np.float32)
    if weights_P.any():
        weighed_KP = catalogue.priors(rows_K, priors) * weights_P
    shown_priors = [(i, prior) for i, prior in enumerate(priors.settings) if prior.source == "table" or weights_P[i]]
    explanations = []
    for i, label in enumerate(catalogue.labels_json(rows_K.tolist())):
        bias, popularity = np.float32(label["bias"] or 0), query.popularity_B[0] * label["log_popularity"]
        bias *= np.float32(query.bias_B) if isinstance(query.bias_B, float) else query.bias_B[0]
        noise = query.bias_removal_B[0] * label["log_pn"]
        if tree:
            noise = scores_K[i] - (taste_K[i] + bias + popularity + weighed_KP[i].sum() + boost_K[i])
        parts = {"taste": taste_K[i], "bias": bias, "noise": noise, "popularity": popularity}
        parts["cooccurrence"] = boost_K[i]
        part: dict[str, Any] = {name: value + np.float32(0) for name, value in parts.items()}  # −0 + 0 is 0
        for column, prior in shown_priors:
            if prior.source == "date":
                part["decay"] = weighed_KP[i, column] + np.float32(shift)
            else:
                part.setdefault(prior.group, {})[prior.key] = weighed_KP[i, column]
        explanations.append(part)
    return explanations


def _boosts(query: Batch, rows_K: Int64) -> Float32:
    """Compute ω·c of some labels for one query, float32 [K]."""
    boost = None if query.boosts_B is None else query.boosts_B[0]
    return np.zeros(len(rows_K), np.float32) if boost is None else boost.get_values(rows_K)


def because(entries_H: Sequence[str], parts_H: Float32) -> list[dict[str, Any]]:
    """List at most 5 history entries that add most to c.

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
) -> Generator[None, None, list[tuple[float, float] | None]]:
    """Find the interval of λ in which each label is answered, [K].

    Searches like the service at 33 values of λ between the limits, then bisects where a label leaves. None: the label
    is not among the best at the query's own λ, such as a label that was drawn. Yields after every search, so that the
    caller can let others search in between.

    Args:
        query: a batch of one query.
    """
    query_dial, lists = float(query.bias_removal_B[0]), _Lists(ranker, query, rows_K, limits)
    lists.search(np.unique(np.append(np.linspace(*limits, _CELLS + 1), query_dial)))
    yield
    for step in (-1, 1):
        yield from _bisect(lists, query_dial, step)
    low_K = yield from _last(lists, query_dial, -1)
    high_K = yield from _last(lists, query_dial, 1)
    return [
        (round(float(low), _DIGITS), round(float(high), _DIGITS)) if inside else None
        for inside, low, high in zip(lists.inside_of[query_dial], low_K, high_K, strict=True)
    ]


class _Lists:
    """The best labels at each searched λ.

    Attributes:
        widest_cell: width of the cells of the dial.
        best_of: rows of the best labels by λ, int64 [k].
        inside_of: whether each label is among the best, by λ, bool [K].
    """

    def __init__(self, ranker: Ranker, query: Batch, rows_K: Int64, limits: tuple[float, float]) -> None:
        self._ranker, self._query, self._rows_K = ranker, query, rows_K
        self.widest_cell = (limits[1] - limits[0]) / _CELLS
        self.best_of: dict[float, Int64] = {}
        self.inside_of: dict[float, Bools] = {}

    def search(self, bias_removal_N: Float64) -> None:
        """Search at some λ."""
        batch = self._query.subset(np.zeros(len(bias_removal_N), np.int64))
        _, best_Nk = self._ranker.rank(batch._replace(bias_removal_B=bias_removal_N.astype(np.float32)))
        inside_NK: Bools = (best_Nk[:, :, None] == self._rows_K).any(axis=1)
        self.best_of |= zip(bias_removal_N.tolist(), best_Nk, strict=True)
        self.inside_of |= zip(bias_removal_N.tolist(), inside_NK, strict=True)

    def along(self, query_dial: float, step: int) -> Float64:
        """List the searched λ in one direction, float64 [N]."""
        searched_N = np.array(sorted(self.best_of, reverse=step < 0))
        return searched_N[(searched_N - query_dial) * step >= 0]

    def leaves(self, near: float, far: float, wanted_K: Bools) -> Float64:
        """Find where each label leaves between two searched λ; else `far`.

        Each wanted label is among the best at both. A score is linear in λ, so only labels that are above a label at
        one of the two can be above it between them.
        """
        rows_U, slope_U, score_U = self._scores
        rivals_u = np.union1d(self.best_of[near], self.best_of[far])
        rivals_u = np.searchsorted(rows_U, rivals_u[rivals_u >= 0])
        labels_K = np.searchsorted(rows_U, self._rows_K[wanted_K])

        def above(at: float) -> Float64:  # by how much rivals are above each label, [u, K]
            at_U = score_U + at * slope_U
            return at_U[rivals_u, None] - at_U[labels_K]

        near_uK, far_uK = above(near), above(far)
        rises_uK, falls_uK = (near_uK <= 0) & (far_uK > 0), (near_uK > 0) & (far_uK <= 0)
        leaves_K = np.full(len(labels_K), far)
        if not rises_uK.any():
            return leaves_K
        with np.errstate(divide="ignore", invalid="ignore"):
            share_uK = np.where(rises_uK | falls_uK, near_uK / (near_uK - far_uK), np.inf)
        order_uK = share_uK.argsort(axis=0, kind="stable")
        change_uK = np.take_along_axis(rises_uK.astype(int) - falls_uK, order_uK, axis=0)
        # Rounding must not put a label out of the list that was searched.
        first_K = np.minimum((near_uK > 0).sum(axis=0), self._query.k - 1)
        out_uK = first_K + change_uK.cumsum(axis=0) >= self._query.k
        gaps_G = np.flatnonzero(out_uK.any(axis=0))
        share_G = np.take_along_axis(share_uK, order_uK, axis=0)[out_uK.argmax(axis=0)[gaps_G], gaps_G]
        leaves_K[gaps_G] = near + share_G * (far - near)
        return leaves_K

    @cached_property
    def _scores(self) -> tuple[Int64, Float64, Float64]:
        """Score every label of a list, as a line in λ: rows, ascending, slopes and scores at λ = 0, [U] each."""
        ends = np.array([min(self.best_of), max(self.best_of)])
        rows_U = np.unique(np.concatenate([*self.best_of.values(), self._rows_K]))
        rows_U = rows_U[rows_U >= 0]
        boost = None if self._query.boosts_B is None else self._query.boosts_B[0]
        boost_U = _boosts(self._query, rows_U).astype(np.float64)
        if boost is not None and boost.alone:
            return rows_U, np.zeros(len(rows_U)), boost_U
        batch = self._query.subset(np.zeros(2, np.int64))._replace(bias_removal_B=ends.astype(np.float32))
        low_U, high_U = (scores.astype(np.float64) for scores in self._ranker.scores(batch, [rows_U, rows_U]))
        slope_U = (high_U - low_U) / max(ends[1] - ends[0], np.finfo(float).tiny)
        return rows_U, slope_U, low_U - ends[0] * slope_U + boost_U


def _bisect(lists: _Lists, query_dial: float, step: int) -> Iterator[None]:
    """Bisect where labels leave, to a thousandth of the dial."""
    # A little wider, so that rounding adds no bisection.
    widest = lists.widest_cell / 2**_HALVINGS * (1 + 1e-9)
    while True:
        along_N = lists.along(query_dial, step)
        ahead_NK = np.array([lists.inside_of[at] for at in along_N])
        first_outside_K = ahead_NK.argmin(axis=0)
        inner_K, outer_K = along_N[np.maximum(first_outside_K - 1, 0)], along_N[first_outside_K]
        wanted_K = ahead_NK[0] & ~ahead_NK.all(axis=0) & (np.abs(outer_K - inner_K) > widest)
        if not wanted_K.any():
            return
        # The middles of all labels' last cells together: one search serves all distinct ones.
        lists.search(np.unique((inner_K + outer_K)[wanted_K] / 2))
        yield


def _last(lists: _Lists, query_dial: float, step: int) -> Generator[None, None, Float64]:
    """Find the last λ at which each label stays, float64 [K]."""
    along_N = lists.along(query_dial, step)
    ends_K, stays_K = np.full(lists.inside_of[query_dial].shape, query_dial), lists.inside_of[query_dial]
    for near, far in pairwise(along_N.tolist()):
        stays_K = stays_K & lists.inside_of[far]
        if not stays_K.any():
            break
        yield
        ends_K[stays_K] = lists.leaves(near, far, stays_K)
        stays_K = stays_K & (ends_K == far)
    return ends_K
