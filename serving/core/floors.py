"""Keep floors: least numbers of labels of a bucket, or that pass a filter, at little loss of scores.

Labels are reserved down the scores: each that meets a floor still unmet, and it counts for every floor that it meets.
Then, up the scores, a reserved label is released if the list meets as much without it. The other places go to the best
of the rest. A list that meets the floors anyway stays as it is.

If no label meets two floors, the list has the largest summed score of all lists that meet the floors: the n best of
each, and the rest by score. If floors overlap, that list would need a search for each set of floors and an integer
program. A search for each floor does here, of its n best labels: no label below them is reserved. As the floors of a
query are together at most k, each is met if as many labels are eligible.

**With `max_per`** a label is reserved only if its values have room. **With `mmr`** the reserved labels stand where MMR
takes them. Neither releases a label. **With `explore`** the places that chance does not touch are filled so.

Legend: `F` floors, `C` candidates, `K` labels of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index import Filter
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.diversity import Crowds, choose
from longtail.serving.core.ranking import Batch, Ranker
from longtail.serving.core.resolved import Diversity, Floor, ResolvedQuery

_Ranked = tuple[Int64, Float32]
"""Rows and scores of labels, best first."""
_Search = tuple[int, Filter | None, int]
"""Position of a query in a batch, a filter, and a number of labels."""


@dataclass(frozen=True, slots=True)
class Floored:
    """Hold what floors cost an answer.

    Attributes:
        cost: the summed score of the list without floors, minus that of the list with them.
        price_of: by row of each label that the list without floors lacks, the label's part of the cost.
    """

    cost: float
    price_of: Mapping[int, float]

    @classmethod
    def compare(cls, before: _Ranked, after: _Ranked) -> Floored:
        """Compare a list without floors with the list that keeps them."""
        gained = ~np.isin(after[0], before[0])
        order = np.argsort(-after[1][gained], kind="stable")
        lost = -np.sort(-before[1][~np.isin(before[0], after[0])])
        prices = lost[: len(order)] - after[1][gained][order][: len(lost)]
        cost = before[1].sum(dtype=np.float64) - after[1].sum(dtype=np.float64)
        return cls(float(cost), dict(zip(after[0][gained][order].tolist(), prices.tolist(), strict=False)))

    def json(self, query: ResolvedQuery, meets_FK: Bools) -> dict[str, Any]:
        """Return `floors` and `cost` of the HTTP API's results."""
        met = zip(query.floors, meets_FK.sum(axis=1).tolist(), strict=True)
        return {"floors": [{**floor.json, "met": count} for floor, count in met], "cost": self.cost}

    def prices(self, rows_K: Int64, meets_FK: Bools) -> list[dict[str, Any] | None]:
        """Return `floor` of the HTTP API's `Explanation` for each label; None: the label needs no floor."""
        return [
            {"floors": np.flatnonzero(meets_F).tolist(), "price": self.price_of[row]} if row in self.price_of else None
            for row, meets_F in zip(rows_K.tolist(), meets_FK.T, strict=True)
        ]


class Candidates:
    """Hold the labels that a list with floors may have: the pool, and the best of each floor."""

    def __init__(self, query: ResolvedQuery, pool: _Ranked, of_floors: Sequence[_Ranked], catalogue: Catalogue) -> None:
        rows, scores = (np.concatenate(parts) for parts in zip(pool, *of_floors, strict=True))
        first = np.sort(np.unique(rows, return_index=True)[1])  # the pool stays in front
        self._rows_C, self._scores_C, self._pool = rows[first], scores[first], len(pool[0])
        self._query, self._catalogue = query, catalogue
        self._diversity = query.diversity or Diversity({}, 0.0, query.k, query.k)
        self._meets_FC = meets(query, self._rows_C, catalogue)
        self._needs_F = np.minimum([floor.n for floor in query.floors], self._meets_FC.sum(axis=1))
        crowds, unmet_F = Crowds(self._rows_C, self._diversity.max_per, catalogue), self._needs_F
        self._reserved: list[int] = []
        for position in np.argsort(-self._scores_C, kind="stable").tolist():
            met_F = self._meets_FC[:, position]
            if unmet_F[met_F].max(initial=0) > 0 and crowds.has_room(position):
                crowds.take(position)
                unmet_F = unmet_F - met_F
                self._reserved.append(position)

    def pool(self, k: int) -> _Ranked:
        """Return the k best labels without floors."""
        return self._rows_C[: min(k, self._pool)], self._scores_C[: min(k, self._pool)]

    def best(self, k: int) -> _Ranked:
        """Return the list of k labels."""
        reserved, k = self._reserved, max(k, len(self._reserved))  # more only if k exceeds the catalogue
        if self._query.diversity is None:
            reserved = self._released(reserved, k)
        chosen = choose(self._rows_C, self._scores_C, k, self._diversity, self._catalogue, self._pool, reserved)
        return self._rows_C[chosen], self._scores_C[chosen]

    def _released(self, reserved: Sequence[int], k: int) -> list[int]:
        """Release, up the scores, reserved labels that no floor needs."""
        is_reserved_C = np.zeros(len(self._rows_C), np.bool_)
        is_reserved_C[reserved] = True
        free_slots = k - len(reserved)
        free = np.flatnonzero(~is_reserved_C[: self._pool])[:free_slots]
        # The list holds the reserved labels, and all of the pool before `end`.
        end = int(free[-1]) + 1 if 0 < free_slots == free.size else self._pool if free_slots else 0
        met_F = self._meets_FC[:, [*reserved, *free]].sum(axis=1)
        for position in reversed(reserved):
            while end < self._pool and is_reserved_C[end]:
                end += 1
            if position >= end:
                fewer_F = met_F - self._meets_FC[:, position]
                if end < self._pool:
                    fewer_F += self._meets_FC[:, end]
                if (fewer_F < self._needs_F).any():
                    continue
                met_F, end = fewer_F, min(end + 1, self._pool)
            is_reserved_C[position] = False
        return [position for position in reserved if is_reserved_C[position]]


def meets(query: ResolvedQuery, rows_N: Int64, catalogue: Catalogue) -> Bools:
    """Compute which floors each label meets, bool [F, N]."""
    return np.array([catalogue.passes(_filter(query, floor, catalogue), rows_N) for floor in query.floors])


def _filter(query: ResolvedQuery, floor: Floor, catalogue: Catalogue) -> Filter:
    """Create the filter of the labels that meet a floor."""
    eligible = query.filter or Filter()
    before = () if eligible.selection is None else eligible.selection.conditions
    assert before is not None  # a set without conditions could not be narrowed
    conditions = tuple(dict.fromkeys([*before, *floor.conditions]))
    selection, beyond = catalogue.attributes.select_all(conditions) if conditions else (None, None)
    buckets = eligible.buckets if floor.bucket is None else frozenset([floor.bucket])
    return replace(eligible, buckets=buckets, selection=selection, beyond=beyond)


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
        The costs, and for queries that explore the candidates, by the position of the query.
    """
    floored, exploring, searches = dict[int, Floored](), dict[int, Candidates](), list[_Search]()
    for position, query in enumerate(queries):
        if query.floors:
            floored[position] = Floored(0.0, {})
            met_F = meets(query, best[0][position], catalogue).sum(axis=1)
            if query.explore or (met_F < [floor.n for floor in query.floors]).any():
                # Values that are full may rule out any number of a floor's best labels.
                most = query.diversity.most if query.diversity is not None and query.diversity.max_per else 0
                searches += [(position, _filter(query, floor, catalogue), max(most, floor.n)) for floor in query.floors]
                searches += [(position, query.filter, max(1, pools[position]))] if position in pools else []
    if not searches:
        return floored, exploring
    positions, filters, depths = zip(*searches, strict=True)
    part = batch.subset(np.array(positions))._replace(filters=list(filters))
    ranked = zip(*ranker.rank_each(part, depths), strict=True)
    for position in dict.fromkeys(positions):
        query, before = queries[position], (best[0][position], best[1][position])
        of_floors = [next(ranked) for _ in query.floors]
        candidates = Candidates(query, next(ranked) if position in pools else before, of_floors, catalogue)
        if query.explore:
            exploring[position] = candidates
        else:
            best[0][position], best[1][position] = after = candidates.best(query.k)
            floored[position] = Floored.compare(before, after)
    return floored, exploring
