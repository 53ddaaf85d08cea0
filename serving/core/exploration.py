"""Exploration: some slots of an answer are drawn at random from one bucket's best labels, with known propensities.

A query that asks for m slots of a bucket is answered with at least m of its labels, if so many are eligible. Without
chance that would be the m best of the bucket and the best of all others, n >= m labels of the bucket together. Of these
n slots the first n − m go to its best labels, as ever; the last m are drawn from its next best, its candidates. So the
bucket gets what a floor gives it and no more, and what chance decides is which labels stand in m of its slots.
`lottery.py` says how they are drawn.

**Places.** Drawn labels stand at places drawn evenly from the whole answer, the others in order of score in the places
that are left. So who was drawn says nothing about where it stands, and clicks on drawn labels can be compared with
each other without a model of attention: position is no confounder among them.

Legend: `C` candidates of one bucket, `P` labels found of it, `K` labels of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float32, Float64, Int8, Int64
from longtail.index import Filter
from longtail.serving.core.lottery import Draws, Lottery, draw, inclusion_probabilities
from longtail.serving.core.queries import ResolvedQuery
from longtail.serving.core.ranking import Batch, Ranker, rank_each


@dataclass(frozen=True, slots=True)
class Explored:
    """An answer of which some slots were drawn.

    Attributes:
        rows_K: int64, label rows in the order shown.
        scores_K: float32, their scores in logits; not descending.
        propensities_K: float32, P(shown) of each given the query: 1 where chance had no say.
        slots: drawn for each bucket; fewer than asked for where it has fewer eligible labels.
        candidates: labels that each bucket's slots were drawn from.
    """

    rows_K: Int64
    scores_K: Float32
    propensities_K: Float32
    slots: dict[int, int]
    candidates: dict[int, int]

    def json(self, lottery: Lottery) -> dict[str, Any]:
        """Return `exploration` of the HTTP API's `RetrieveResult`."""
        slots, candidates = (
            {BUCKET_NAMES[bucket]: count for bucket, count in counts.items()}
            for counts in (self.slots, self.candidates)
        )
        return {"slots": slots, "candidates": candidates, "temperature": lottery.temperature}


def explore_each(
    ranker: Ranker,
    batch: Batch,
    queries: Sequence[ResolvedQuery],
    best: tuple[list[Int64], list[Float32]],
    buckets_of: Callable[[Int64], Int8],
    draws: Draws,
) -> dict[int, Explored]:
    """Draw the slots that queries explore.

    Args:
        ranker: found the best labels, and finds those of a bucket.
        batch: the queries, embedded.
        queries: what each asks for.
        best: rows and scores of every query's best labels; those of queries that explore become what is shown.
        buckets_of: buckets, int8 [K], of rows, int64 [K].
        draws: how they are drawn.

    Returns:
        What was drawn, by the place of the query; only of queries that explore.
    """
    exploring = [place for place, query in enumerate(queries) if query.explore]
    found: dict[int, dict[int, tuple[Int64, Float32]]] = {place: {} for place in exploring}
    for bucket in sorted({bucket for place in exploring for bucket in queries[place].explore}):
        places = [place for place in exploring if bucket in queries[place].explore]
        filters: list[Filter | None] = [
            replace(queries[place].filter or Filter(), buckets=frozenset([bucket])) for place in places
        ]
        part = replace(batch.subset(np.array(places)), filters=filters)
        pools = [queries[place].k + max(draws.lottery.candidates, queries[place].explore[bucket]) for place in places]
        for place, rows_P, scores_P in zip(places, *rank_each(ranker, part, pools), strict=True):
            found[place][bucket] = rows_P, scores_P
    explored = {}
    for place in exploring:
        shown = (best[0][place], best[1][place], buckets_of(best[0][place]))
        explored[place] = explore(shown, found[place], queries[place].explore, draws.lottery, draws.of(place))
        best[0][place], best[1][place] = explored[place].rows_K, explored[place].scores_K
    return explored


def slots_of(explored: Iterable[Explored]) -> dict[int, int]:
    """Slots drawn for each bucket, of several answers together."""
    slots: dict[int, int] = defaultdict(int)
    for answer in explored:
        for bucket, count in answer.slots.items():
            slots[bucket] += count
    return dict(slots)


def explore(
    best: tuple[Int64, Float32, Int8],
    found: Mapping[int, tuple[Int64, Float32]],
    floors: Mapping[int, int],
    lottery: Lottery,
    chance: np.random.Generator,
) -> Explored:
    """An answer with drawn slots in place of the best one.

    Args:
        best: rows, scores and buckets of the best eligible labels, best first, [K] each.
        found: rows and scores of each bucket's best eligible labels, best first, [P] each: K + `lottery.candidates` of
            them, or all.
        floors: slots wanted of each bucket, together at most k.
        lottery: how they are drawn.
        chance: decides.
    """
    rows_K, scores_K, buckets_K = best
    of_bucket = {bucket: _merged(best, found[bucket], bucket) for bucket in floors}
    slots = {bucket: min(floor, len(of_bucket[bucket][0])) for bucket, floor in floors.items()}
    reserved = [of_bucket[bucket][0][:count] for bucket, count in slots.items()]
    free = max(0, len(rows_K) - sum(slots.values()))
    others = np.flatnonzero(~np.isin(rows_K, np.concatenate(reserved)))[:free]
    explored_others = np.isin(buckets_K[others], list(floors))
    kept = [(rows_K[others[~explored_others]], scores_K[others[~explored_others]])]
    drawn: list[tuple[Int64, Float32, Float64]] = []
    candidates = {}
    for bucket, (rows_P, scores_P) in of_bucket.items():
        certain = int(np.count_nonzero(buckets_K[others] == bucket))
        upto = certain + max(lottery.candidates, slots[bucket])
        kept.append((rows_P[:certain], scores_P[:certain]))
        rows_C, scores_C = rows_P[certain:upto], scores_P[certain:upto]
        propensities_C = inclusion_probabilities(scores_C, slots[bucket], lottery.temperature)
        chosen = draw(propensities_C, chance)
        drawn.append((rows_C[chosen], scores_C[chosen], propensities_C[chosen]))
        candidates[bucket] = len(rows_C)
    return _placed(kept, drawn, slots, candidates, chance)


def _merged(best: tuple[Int64, Float32, Int8], found: tuple[Int64, Float32], bucket: int) -> tuple[Int64, Float32]:
    """A bucket's labels, those of the best among them, which an approximate search may not have found: best first."""
    mine_K = best[2] == bucket
    missed_K = mine_K & ~np.isin(best[0], found[0])
    rows_P, scores_P = np.append(found[0], best[0][missed_K]), np.append(found[1], best[1][missed_K])
    order = np.argsort(-scores_P, kind="stable")
    return rows_P[order], scores_P[order]


def _placed(
    kept: Sequence[tuple[Int64, Float32]],
    drawn: Sequence[tuple[Int64, Float32, Float64]],
    slots: dict[int, int],
    candidates: dict[int, int],
    chance: np.random.Generator,
) -> Explored:
    """The answer: what was drawn at even random places, the rest around it in order of score."""
    rows, scores = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    order = np.argsort(-scores, kind="stable")
    drawn_rows, drawn_scores, propensities = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    places = chance.choice(len(rows) + len(drawn_rows), len(drawn_rows), replace=False)
    left = np.setdiff1d(np.arange(len(rows) + len(drawn_rows)), places)
    shown = Explored(
        rows_K=np.empty(len(rows) + len(drawn_rows), np.int64),
        scores_K=np.empty(len(rows) + len(drawn_rows), np.float32),
        propensities_K=np.ones(len(rows) + len(drawn_rows), np.float32),
        slots=slots,
        candidates=candidates,
    )
    shown.rows_K[left], shown.scores_K[left] = rows[order], scores[order]
    shown.rows_K[places], shown.scores_K[places], shown.propensities_K[places] = drawn_rows, drawn_scores, propensities
    return shown
