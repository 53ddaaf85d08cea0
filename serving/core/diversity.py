"""Diversify answers: few labels per value of a column (`max_per`), and maximal marginal relevance (MMR).

Both choose from a pool, the best eligible labels by score, in descending order.

**`max_per`** takes a label unless a value of its column already has the maximum number of labels. Labels without a
value are always taken; a label with several values counts for each. The choice does not depend on the size of the pool
if k labels can be taken. If the pool is too small, the search is repeated with a pool of twice the size, until the pool
holds every eligible label or the most allowed.

**MMR** takes the label of largest `(1 − w)·r − w·c`. r is the score, scaled from 0 for the pool's last label to 1 for
its first; c is the largest cosine of the label's embedding with the labels taken so far. The first label is the best by
score, and so is the first of several equal ones. As r depends on the pool, another pool may give another answer.

Carbonell, Goldstein, "The use of MMR, diversity-based reranking for reordering documents and producing summaries",
SIGIR 1998.

Legend: `P` labels of a pool, `K` labels of an answer, `D` embedding dimensions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set

import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.ranking import Batch, Ranker
from longtail.serving.core.resolved import Diversity, ResolvedQuery


def diversify_each(
    ranker: Ranker,
    batch: Batch,
    queries: Sequence[ResolvedQuery],
    best: tuple[list[Int64], list[Float32]],
    catalogue: Catalogue,
) -> dict[int, int]:
    """Choose the labels of queries that want diverse answers.

    Args:
        best: rows, int64 [P], and scores, float32 [P], of every query. For diverse queries these are the pools, and are
            replaced by the chosen labels.

    Returns:
        Size of the pool of each diverse query, by the query's position.
    """
    pools: dict[int, int] = {}
    depths = {i: query.diversity.pool for i, query in enumerate(queries) if query.diversity is not None}
    pools_of = {i: (best[0][i], best[1][i]) for i in depths}
    # `max_per` may rule out most of a pool, which then doubles until k labels fit.
    while depths:
        deeper: dict[int, int] = {}
        for i, depth in depths.items():
            (rows_P, scores_P), query = pools_of[i], queries[i]
            assert query.diversity is not None
            chosen = choose(rows_P, scores_P, query.k, query.diversity, catalogue)
            if len(chosen) < query.k and len(rows_P) >= depth and depth < query.diversity.most:
                deeper[i] = min(2 * depth, query.diversity.most)
                continue
            pools[i] = len(rows_P)
            best[0][i], best[1][i] = rows_P[chosen], scores_P[chosen]
        if deeper:
            part = batch.subset(np.array(list(deeper)))
            pools_of = dict(zip(deeper, zip(*ranker.rank_each(part, list(deeper.values())), strict=True), strict=True))
        depths = deeper
    return pools


def choose(
    rows_P: Int64, scores_P: Float32, k: int, diversity: Diversity, catalogue: Catalogue, pool: int | None = None,
    reserved: Sequence[int] = (),
) -> Int64:  # fmt: skip
    """Choose at most k positions, int64, in the answer's order: by score, or as MMR takes the labels.

    Args:
        pool: number of labels, the first ones, that may be taken without being reserved; None: all.
        reserved: positions to take in any case, which `max_per` has room for.
    """
    crowds, reserved_set = Crowds(rows_P, diversity.max_per, catalogue), frozenset(reserved)
    for position in reserved:
        crowds.take(position)
    pool = len(rows_P) if pool is None else pool
    if diversity.weight > 0:
        return _marginal(rows_P, scores_P, k, diversity.weight, crowds, catalogue, pool, reserved_set)
    chosen = [*reserved]
    for i in range(pool):
        if len(chosen) == k:
            break
        if i not in reserved_set and crowds.has_room(i):
            crowds.take(i)
            chosen.append(i)
    chosen_P = np.array(chosen, np.int64)
    return chosen_P[np.argsort(-scores_P[chosen_P], kind="stable")] if reserved else chosen_P


def _marginal(
    rows_P: Int64, scores_P: Float32, k: int, weight: float, crowds: Crowds, catalogue: Catalogue, pool: int,
    reserved: Set[int],
) -> Int64:  # fmt: skip
    vectors_PD = catalogue.embeddings(rows_P.tolist())
    norms_P = np.linalg.norm(vectors_PD, axis=1, keepdims=True)
    # A vector of zeros stays zero instead of NaN.
    vectors_PD = vectors_PD / np.maximum(norms_P, np.finfo(np.float32).tiny)
    # Scores are scaled to [0, 1] over the pool; if all are equal, `spread` is 0, and only the cosines decide.
    spread = float(scores_P[0] - scores_P[pool - 1]) if pool else 0.0
    worth_P = (1 - weight) * (scores_P - scores_P[pool - 1 : pool]).astype(np.float64) / (spread or 1.0)
    worth_P[[i for i in range(pool, len(rows_P)) if i not in reserved]] = -np.inf
    nearest_P = np.zeros(len(rows_P), np.float32)
    chosen: list[int] = []
    spare = k - len(reserved)
    while len(chosen) < min(k, len(rows_P)):
        i = int(np.argmax(worth_P - weight * nearest_P))
        if worth_P[i] == -np.inf:
            break
        worth_P[i] = -np.inf  # taken or ruled out: never looked at again
        if i not in reserved:
            if not spare or not crowds.has_room(i):
                continue
            crowds.take(i)
            spare -= 1
        cosines_P = vectors_PD @ vectors_PD[i]
        nearest_P = np.maximum(nearest_P, cosines_P) if chosen else cosines_P
        chosen.append(i)
    return np.array(chosen, np.int64)


class Crowds:
    """Count the taken labels by the values of the columns."""

    def __init__(self, rows_P: Int64, max_per: Mapping[str, int], catalogue: Catalogue) -> None:
        self._columns = [(most, catalogue.values(name, rows_P)) for name, most in max_per.items()]
        self._counts: dict[int, Counter[Hashable]] = defaultdict(Counter)

    def has_room(self, i: int) -> bool:
        """Return whether every value of this label may have another label."""
        return all(
            self._counts[column][value] < most
            for column, (most, values_P) in enumerate(self._columns)
            for value in values_P[i]
        )

    def take(self, i: int) -> None:
        """Count a label as taken."""
        for column, (_, values_P) in enumerate(self._columns):
            self._counts[column].update(values_P[i])
