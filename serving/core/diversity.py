"""Answers of which not all is alike: few labels per value of a column (`max_per`), and maximal marginal relevance.

Both choose from a pool, the best eligible labels by score, from the best one down.

**Crowding.** A label is taken unless a value of its column has as many labels as it may have. Labels without a value
are taken, a label of several values counts for each. What is taken is the same for any pool that k labels are taken
from, so a pool that ends before is searched twice as deep, until it holds every eligible label or `MOST_POOL` of them.

**MMR** takes the label of largest `(1 − w)·r − w·c`: r is its score, from 0 of the pool's last label to 1 of its first,
c the largest cosine of its embedding with those taken so far; the first is the best by score. Of equals the better by
score is taken. r depends on the pool, so the same pool gives the same answer, another may not.

Carbonell, Goldstein, "The use of MMR, diversity-based reranking for reordering documents and producing summaries",
SIGIR 1998.

Legend: `P` labels of a pool, `K` labels of an answer, `D` embedding dimensions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.queries import MOST_POOL, Diversity, ResolvedQuery
from longtail.serving.core.ranking import Batch, Ranker, rank_each


def diversify_each(
    ranker: Ranker,
    batch: Batch,
    queries: Sequence[ResolvedQuery],
    best: tuple[list[Int64], list[Float32]],
    catalogue: Catalogue,
) -> dict[int, int]:
    """Choose the labels of the queries that want them apart.

    Args:
        best: rows, int64 [P], and scores, float32 [P], of every query, of these their pools; these become what is
            answered.

    Returns:
        The size of the pool that each of these was chosen from, by the place of the query.
    """
    pools: dict[int, int] = {}
    left = {place: query.diversity.pool for place, query in enumerate(queries) if query.diversity is not None}
    found = {place: (best[0][place], best[1][place]) for place in left}
    while left:
        deeper: dict[int, int] = {}
        for place, depth in left.items():
            (rows_P, scores_P), query = found[place], queries[place]
            assert query.diversity is not None
            chosen = choose(rows_P, scores_P, query.k, query.diversity, catalogue)
            most = max(MOST_POOL, query.k)
            if len(chosen) < query.k and len(rows_P) >= depth and depth < most:
                deeper[place] = min(2 * depth, most)
                continue
            pools[place] = len(rows_P)
            best[0][place], best[1][place] = rows_P[chosen], scores_P[chosen]
        if deeper:
            part = batch.subset(np.array(list(deeper)))
            found = dict(zip(deeper, zip(*rank_each(ranker, part, list(deeper.values())), strict=True), strict=True))
        left = deeper
    return pools


def choose(rows_P: Int64, scores_P: Float32, k: int, diversity: Diversity, catalogue: Catalogue) -> Int64:
    """Choose places in the pool, int64, in the order in which labels are taken: k, or fewer where no more may be."""
    crowds = _Crowds(rows_P, diversity.max_per, catalogue)
    if diversity.weight > 0:
        return _marginal(rows_P, scores_P, k, diversity.weight, crowds, catalogue)
    chosen: list[int] = []
    for place in range(len(rows_P)):
        if len(chosen) == k:
            break
        if crowds.has_room(place):
            crowds.take(place)
            chosen.append(place)
    return np.array(chosen, np.int64)


def _marginal(rows_P: Int64, scores_P: Float32, k: int, weight: float, crowds: _Crowds, catalogue: Catalogue) -> Int64:
    vectors_PD = catalogue.embeddings(rows_P.tolist())
    norms_P = np.linalg.norm(vectors_PD, axis=1, keepdims=True)
    vectors_PD = vectors_PD / np.maximum(norms_P, np.finfo(np.float32).tiny)
    spread = float(scores_P[0] - scores_P[-1]) if len(scores_P) else 0.0
    worth_P = (1 - weight) * (scores_P - scores_P[-1:]).astype(np.float64) / (spread or 1.0)
    nearest_P = np.zeros(len(rows_P), np.float32)
    chosen: list[int] = []
    while len(chosen) < min(k, len(rows_P)):
        place = int(np.argmax(worth_P - weight * nearest_P))
        if worth_P[place] == -np.inf:
            break
        worth_P[place] = -np.inf
        if not crowds.has_room(place):
            continue
        crowds.take(place)
        cosines_P = vectors_PD @ vectors_PD[place]
        nearest_P = np.maximum(nearest_P, cosines_P) if chosen else cosines_P
        chosen.append(place)
    return np.array(chosen, np.int64)


class _Crowds:
    """How many labels of each value of the columns are taken."""

    def __init__(self, rows_P: Int64, max_per: Mapping[str, int], catalogue: Catalogue) -> None:
        self._columns = [(most, catalogue.values(name, rows_P)) for name, most in max_per.items()]
        self._taken: dict[int, Counter[Hashable]] = defaultdict(Counter)

    def has_room(self, place: int) -> bool:
        """Whether no value of this label has as many as it may have."""
        return all(
            self._taken[column][value] < most
            for column, (most, values_P) in enumerate(self._columns)
            for value in values_P[place]
        )

    def take(self, place: int) -> None:
        """Count a label."""
        for column, (_, values_P) in enumerate(self._columns):
            self._taken[column].update(values_P[place])
