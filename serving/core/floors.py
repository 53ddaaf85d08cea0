"""Keep floors: answers with at least so many labels of a bucket, or that pass a filter, at the least loss of scores.

Of all lists of k eligible labels that meet every floor, the answer is the one of the largest summed score. A label
counts for every floor that it meets. If fewer labels than a floor's n are eligible, all of these are answered. Floors
are together at most k, so that they can all be met.

**Candidates.** The list needs no other labels than the k best of all, and for each set of floors the best labels that
meet all of its floors, as many as the largest n of the set: a label below these could be exchanged for a better one of
the same floors. A search finds the best of each floor; another one the best of two floors, if both have more labels
than their n, and so on. If the k best labels meet every floor, nothing is searched.

**Choice.** Candidates of the same pattern, the set of floors that they meet, are taken best first. So a list is given
by how many of each pattern are reserved; the places left go to the best of the rest. A node of the search is such a
list: its sum bounds the sums of the lists with further reserved labels. The best node is taken [Hart, Nilsson, Raphael
1968, "A formal basis for the heuristic determination of minimum cost paths"]; if its list leaves a floor unmet, the
next label of each pattern with this floor is reserved in turn. The first list that meets every floor is the best.

**With `max_per` or `mmr`** the list without floors stays if it meets them. If not, labels are reserved down the scores:
each that meets a floor still unmet, and for which `max_per` leaves room. The places left are floored as without floors.

**With `explore`** the places that chance does not touch hold the best list with floors of as many labels, always the
same; slots are drawn from the best labels of their bucket that are not in it.

Legend: `F` floors, `C` candidates, `K` labels of an answer, `P` patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import combinations
from typing import Any

import numpy as np

from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index import Filter
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.diversity import choose, reserve
from longtail.serving.core.queries import Floor, ResolvedQuery
from longtail.serving.core.ranking import Batch, Ranker, rank_each

_Found = tuple[Int64, Float32]
"""Rows and scores of labels, best first."""


@dataclass(frozen=True, slots=True)
class Floored:
    """What floors cost a list.

    Attributes:
        cost: the summed score of the list without floors, minus that of the list with them.
        price_of: by row of each label that the list without floors lacks, the label's part of the cost.
    """

    cost: float = 0.0
    price_of: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, before: _Found, after: _Found) -> Floored:
        """Compare a list without floors with the list that keeps them."""
        gained, lost = ~np.isin(after[0], before[0]), np.sort(before[1][~np.isin(before[0], after[0])])[::-1]
        order = np.argsort(-after[1][gained], kind="stable")
        rows, scores = after[0][gained][order].tolist(), after[1][gained][order].astype(np.float64)
        parts = (lost[: len(rows)] - scores[: len(lost)]).tolist()
        cost = before[1].sum(dtype=np.float64) - after[1].sum(dtype=np.float64)
        return cls(float(cost), dict(zip(rows, parts, strict=False)))

    def prices(self, rows_K: Int64, meets_FK: Bools) -> list[dict[str, Any] | None]:
        """Return `floor` of the HTTP API's `Explanation` for each label; None: the label needs no floor."""
        return [
            {"floors": np.flatnonzero(meets_F).tolist(), "price": self.price_of[row]} if row in self.price_of else None
            for row, meets_F in zip(rows_K.tolist(), meets_FK.T, strict=True)
        ]


class Candidates:
    """The labels that the best list with floors of one query may need, best first."""

    def __init__(self, lists: Sequence[_Found], query: ResolvedQuery, catalogue: Catalogue) -> None:
        rows, scores = (np.concatenate(parts) for parts in zip(*lists, strict=True))
        _, first = np.unique(rows, return_index=True)
        order = first[np.argsort(-scores[first], kind="stable")]
        self.rows_C, self.scores_C = rows[order], scores[order]
        self._meets_FC = meets(query, self.rows_C, catalogue)
        needs_F = np.array([floor.n for floor in query.floors])
        self._needs_F = np.minimum(needs_F, self._meets_FC.sum(axis=1))
        codes_C = (1 << np.arange(len(needs_F))) @ self._meets_FC
        self._patterns_P, self._pattern_C = np.unique(codes_C, return_inverse=True)
        self._rank_C = np.zeros(len(order), np.int64)  # position within the pattern
        for pattern in range(len(self._patterns_P)):
            mine_C = self._pattern_C == pattern
            self._rank_C[mine_C] = np.arange(np.count_nonzero(mine_C))

    def best(self, k: int) -> tuple[_Found, _Found]:
        """Find the best list of k labels without floors, and the best one that keeps them."""
        k = max(k, int(self._needs_F.sum()))  # more only if k exceeds the catalogue
        sizes_P = np.bincount(self._pattern_C)
        seen, nodes = {(0,) * len(sizes_P)}, [(0.0, (0,) * len(sizes_P))]
        while True:
            _, reserved_P = heappop(nodes)
            listed_C = self._listed(reserved_P, k)
            short_F = self._needs_F - np.count_nonzero(self._meets_FC & listed_C, axis=1)
            if short_F.max() <= 0:
                return (self.rows_C[:k], self.scores_C[:k]), (self.rows_C[listed_C], self.scores_C[listed_C])
            listed_P = np.bincount(self._pattern_C[listed_C], minlength=len(sizes_P))
            for pattern in np.flatnonzero((self._patterns_P >> short_F.argmax() & 1) & (listed_P < sizes_P)).tolist():
                more_P = (*reserved_P[:pattern], int(listed_P[pattern]) + 1, *reserved_P[pattern + 1 :])
                if more_P not in seen and sum(more_P) <= k:
                    seen.add(more_P)
                    heappush(nodes, (-float(self.scores_C[self._listed(more_P, k)].sum(dtype=np.float64)), more_P))

    def _listed(self, reserved_P: tuple[int, ...], k: int) -> Bools:
        """Fill the places that reserved labels leave with the best others, bool [C]."""
        listed_C = self._rank_C < np.array(reserved_P)[self._pattern_C]
        listed_C[np.flatnonzero(~listed_C)[: k - np.count_nonzero(listed_C)]] = True
        return listed_C


def meets(query: ResolvedQuery, rows_N: Int64, catalogue: Catalogue) -> Bools:
    """Compute which floors of a query each label that may be answered meets, bool [F, N]."""
    filters = [_joint(query, [floor], catalogue) for floor in query.floors]
    return np.array([catalogue.passes(filter_, rows_N) for filter_ in filters if filter_ is not None])


def _joint(query: ResolvedQuery, floors: Sequence[Floor], catalogue: Catalogue) -> Filter | None:
    """Return the filter of the labels that meet some floors of a query; None if no label can."""
    eligible = query.filter or Filter()
    buckets = {floor.bucket for floor in floors if floor.bucket is not None}
    if len(buckets) > 1:
        return None
    conditions = () if eligible.selection is None else eligible.selection.conditions or ()
    conditions = tuple(dict.fromkeys([*conditions, *(one for floor in floors for one in floor.conditions)]))
    selection, beyond = catalogue.attributes.select_all(conditions) if conditions else (None, None)
    return replace(
        eligible, buckets=frozenset(buckets) if buckets else eligible.buckets, selection=selection, beyond=beyond
    )


def fill_each(
    ranker: Ranker,
    batch: Batch,
    queries: Sequence[ResolvedQuery],
    best: tuple[list[Int64], list[Float32]],
    pools: Mapping[int, int],
    catalogue: Catalogue,
) -> tuple[dict[int, Floored], dict[int, Candidates]]:
    """Keep the floors of queries that have any.

    Args:
        best: rows and scores of every query's list without floors; replaced by the lists that keep them.
        pools: size of the pool of each diverse query.

    Returns:
        What the floors cost, and for queries that explore the candidates, by the position of the query.
    """
    floored, wanted = dict[int, Floored](), list[int]()
    for position, query in enumerate(queries):
        if query.floors:
            floored[position] = Floored()
            met_F = np.count_nonzero(meets(query, best[0][position], catalogue), axis=1)
            if query.explore or any(met < floor.n for met, floor in zip(met_F, query.floors, strict=True)):
                wanted.append(position)
    plain = [position for position in wanted if position not in pools]
    exploring = dict[int, Candidates]()
    for position, lists in _candidates_each(ranker, batch, queries, plain, catalogue).items():
        query, found = queries[position], (best[0][position], best[1][position])
        candidates = Candidates([found, *lists], query, catalogue)
        if query.explore:
            exploring[position] = candidates
            continue
        before, after = candidates.best(query.k)
        floored[position], (best[0][position], best[1][position]) = Floored.of(before, after), after
    for position in wanted:
        if position in pools:
            before = best[0][position], best[1][position]
            after = _diverse(ranker, batch, queries[position], position, pools[position], catalogue)
            floored[position], (best[0][position], best[1][position]) = Floored.of(before, after), after
    return floored, exploring


def _candidates_each(
    ranker: Ranker, batch: Batch, queries: Sequence[ResolvedQuery], positions: Sequence[int], catalogue: Catalogue
) -> dict[int, list[_Found]]:
    """Search the best labels of each floor, then of two floors that labels may share, and so on."""
    lists: dict[int, list[_Found]] = {position: [] for position in positions}
    full = set[tuple[int, tuple[int, ...]]]()  # sets of floors that more labels may meet than were searched
    for size in range(1, max([len(queries[position].floors) for position in positions], default=0) + 1):
        searches = []
        for position in positions:
            query = queries[position]
            for group in combinations(range(len(query.floors)), size):
                floors = [query.floors[number] for number in group]
                if size > 1 and not all((position, part) in full for part in combinations(group, size - 1)):
                    continue
                if (filter_ := _joint(query, floors, catalogue)) is not None:
                    searches.append(((position, group), filter_, max(floor.n for floor in floors)))
        if not searches:
            break
        asked = [(position, filter_, n) for (position, _), filter_, n in searches]
        for ((position, group), _, n), found in zip(searches, _search(ranker, batch, asked), strict=True):
            lists[position].append(found)
            if len(found[0]) == n:
                full.add((position, group))
    return lists


def _search(ranker: Ranker, batch: Batch, searches: Sequence[tuple[int, Filter | None, int]]) -> list[_Found]:
    """Search several times for queries of a batch, by position, filter and number of labels, in one call."""
    positions, filters, depths = zip(*searches, strict=True)
    part = replace(batch.subset(np.array(positions)), filters=list(filters))
    return list(zip(*rank_each(ranker, part, depths), strict=True))


def _diverse(
    ranker: Ranker, batch: Batch, query: ResolvedQuery, position: int, pool: int, catalogue: Catalogue
) -> _Found:
    """Find the labels of a diverse list that keeps the floors as far as `max_per` lets it."""
    assert query.diversity is not None
    filters = [_joint(query, [floor], catalogue) for floor in query.floors]
    depth = pool
    while True:
        lists = _search(ranker, batch, [(position, query.filter, pool), *((position, of, depth) for of in filters)])
        rows_C, scores_C = (np.concatenate(parts) for parts in zip(*lists, strict=True))
        first = np.sort(np.unique(rows_C, return_index=True)[1])  # the pool stays in front
        rows_C, scores_C = rows_C[first], scores_C[first]
        needs_F = np.array([floor.n for floor in query.floors])
        reserved, unmet_F = reserve(
            rows_C, scores_C, meets(query, rows_C, catalogue), needs_F, query.diversity, catalogue
        )
        deeper = any(
            unmet > 0 and len(found[0]) == depth for unmet, found in zip(unmet_F.tolist(), lists[1:], strict=True)
        )
        if not deeper or depth >= query.diversity.most:
            chosen = choose(rows_C, scores_C, query.k, query.diversity, catalogue, len(lists[0][0]), reserved)
            return rows_C[chosen], scores_C[chosen]
        depth = min(2 * depth, query.diversity.most)
