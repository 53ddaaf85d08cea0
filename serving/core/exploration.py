"""Explore: draw some slots of an answer at random from one bucket's best labels, with known propensities.

If a query requests m slots for a bucket, its answer has at least m labels of the bucket, provided that m are eligible.
Without chance the answer would hold the m best labels of the bucket and the best of all others, together n >= m labels
of the bucket. Of these n slots, n − m go to the bucket's best labels; the other m are drawn from its next best labels,
the candidates. So the bucket gets the same number of slots as with a floor of m, and chance decides only which labels
stand in m of them.

**Propensities.** Each candidate's inclusion probability π is proportional to a mixture of 90 % of a softmax of scores
and 10 % of the uniform distribution, so that no π is below a tenth of a uniform draw's. π is at most 1; an excess is
distributed over the other candidates. `draw` is systematic sampling in random order [Madow 1949, "On the theory of
systematic sampling, II"; Hartley, Rao 1962, "Sampling with unequal probabilities and without replacement"]: it takes m
labels with exactly these π. Gumbel top-m of the same softmax has inclusion probabilities too, but only as sums over
subsets. Given the query and the release, a label's propensity P(shown) is π for candidates, 1 for labels that are
always shown, and 0 for all others. Clicks weighted by 1/π are an unbiased estimate of the clicks that always showing a
candidate would bring.

**Floors.** If the query has floors, the places without chance are filled as if they were all of the answer, and each
bucket's candidates are its best labels beyond these. What fills them depends on the query and the release alone, so the
propensities stay exact: these labels have 1.

**Positions.** Drawn labels get positions drawn uniformly from the whole answer; the other labels fill the remaining
positions in order of score. So a drawn label's position is independent of the label, and clicks on drawn labels can be
compared without a model of attention: position is not a confounder.

Legend: `C` candidates of one bucket, `P` ranked labels of the bucket, `K` labels of an answer.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float32, Float64, Int8, Int64
from longtail.index import Filter
from longtail.serving.core.floors import Candidates
from longtail.serving.core.ranking import Batch, Ranker
from longtail.serving.core.resolved import ResolvedQuery

EVEN_SHARE = 0.1
"""Weight of the uniform distribution in the draw: inverse propensities are at most 10·C/m."""
_NEARLY_CERTAIN = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Lottery:
    """Settings for drawing slots."""

    candidates: int = 100
    """Number of candidates of a bucket, or the number of slots if that is larger."""
    temperature: float = 1.0
    """Temperature of the softmax over scores, in logits: near 0 the best label wins, large is uniform."""
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    """Seed of the draws, together with the name of the query."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Random draws for a batch of queries: the lottery, and names of the queries; by default their positions."""

    lottery: Lottery = field(default_factory=Lottery)
    names: Sequence[str] = ()

    def create_generator(self, i: int) -> np.random.Generator:
        """Create the generator of a query; it depends only on the seed and the query's name."""
        name = self.names[i] if self.names else str(i)
        # Hashed, so that similar names give unrelated draws.
        digest = blake2b(f"{self.lottery.seed}:{name}".encode("utf-8", "replace"), digest_size=16).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


@dataclass(frozen=True, slots=True)
class Explored:
    """An answer with some drawn slots."""

    rows_K: Int64
    """Label rows in the order shown."""
    scores_K: Float32
    """Scores of these labels in logits, in the order shown, so not descending."""
    propensities_K: Float32
    """P(shown) of each label given the query: 1 where the label was not drawn."""
    slots: dict[int, int]
    """Slots drawn for each bucket; fewer than requested if the bucket has fewer eligible labels."""
    candidates: dict[int, int]
    """Number of candidates that each bucket's slots were drawn from."""

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
    floored: Mapping[int, Candidates],
) -> dict[int, Explored]:
    """Draw the slots of queries that explore.

    Args:
        floored: candidates of the places that chance does not touch, of queries with floors.
        best: rows and scores of every query's best labels; for queries that explore, replaced by the answer shown.

    Returns:
        The explored answers, by the position of the query.
    """
    exploring = [i for i, query in enumerate(queries) if query.explore]
    ranked: dict[int, dict[int, tuple[Int64, Float32]]] = {i: {} for i in exploring}
    for bucket in sorted({bucket for i in exploring for bucket in queries[i].explore}):
        positions = [i for i in exploring if bucket in queries[i].explore]
        filters: list[Filter | None] = [
            replace(queries[i].filter or Filter(), buckets=frozenset([bucket])) for i in positions
        ]
        part = batch.subset(np.array(positions))._replace(filters=filters)
        # k of the bucket's labels may be shown without chance; the candidates come after them.
        pools = [queries[i].k + max(draws.lottery.candidates, queries[i].explore[bucket]) for i in positions]
        for i, rows_P, scores_P in zip(positions, *ranker.rank_each(part, pools), strict=True):
            ranked[i][bucket] = rows_P, scores_P
    explored = {}
    for i in exploring:
        answer = (best[0][i], best[1][i], buckets_of(best[0][i]))
        others = (floored[i], queries[i].k) if i in floored else None
        explored[i] = explore(answer, ranked[i], queries[i].explore, draws.lottery, draws.create_generator(i), others)
        best[0][i], best[1][i] = explored[i].rows_K, explored[i].scores_K
    return explored


def add_up_slots(explored: Iterable[Explored]) -> dict[int, int]:
    """Add up the slots drawn for each bucket over several answers."""
    slots: Counter[int] = Counter()
    for answer in explored:
        slots.update(answer.slots)
    return dict(slots)


def explore(
    best: tuple[Int64, Float32, Int8],
    ranked: Mapping[int, tuple[Int64, Float32]],
    floors: Mapping[int, int],
    lottery: Lottery,
    chance: np.random.Generator,
    floored: tuple[Candidates, int] | None = None,
) -> Explored:
    """Draw slots of an answer at random.

    Args:
        best: rows, scores and buckets of the best eligible labels, best first, [K] each.
        ranked: rows and scores of each bucket's best eligible labels, best first, [P] each: K + `lottery.candidates`
            of them, or all.
        floors: requested slots of each bucket, together at most k.
        chance: generator of the draws.
        floored: candidates of the other places, if the query has floors, and k.
    """
    of_bucket = {bucket: _merge(best, ranked[bucket], bucket) for bucket in floors}
    slots = {bucket: min(floor, len(of_bucket[bucket][0])) for bucket, floor in floors.items()}
    if floored is None:
        certain_labels = _choose_certain(best, of_bucket, slots)
    else:
        free: dict[int, int] = {}
        while slots != free:  # until each bucket has as many labels as slots, without the certain ones
            slots = free or slots
            certain_labels = floored[0].best(floored[1] - sum(slots.values()))
            free = {
                bucket: min(count, int((~np.isin(of_bucket[bucket][0], certain_labels[0])).sum()))
                for bucket, count in slots.items()
            }
    drawn: list[tuple[Int64, Float32, Float64]] = []
    candidates = {}
    for bucket, (rows_P, scores_P) in of_bucket.items():
        left_C = np.flatnonzero(~np.isin(rows_P, certain_labels[0]))[: max(lottery.candidates, slots[bucket])]
        rows_C, scores_C = rows_P[left_C], scores_P[left_C]
        propensities_C = inclusion_probabilities(scores_C, slots[bucket], lottery.temperature)
        chosen = draw(propensities_C, chance)
        drawn.append((rows_C[chosen], scores_C[chosen], propensities_C[chosen]))
        candidates[bucket] = len(rows_C)
    return _arrange(certain_labels, drawn, slots, candidates, chance)


def _choose_certain(
    best: tuple[Int64, Float32, Int8], of_bucket: Mapping[int, tuple[Int64, Float32]], slots: Mapping[int, int]
) -> tuple[Int64, Float32]:
    """Return the labels that chance does not touch: of each explored bucket the best, of the others all."""
    rows_K, scores_K, buckets_K = best
    reserved = [of_bucket[bucket][0][:count] for bucket, count in slots.items()]
    free = max(0, len(rows_K) - sum(slots.values()))
    others = np.flatnonzero(~np.isin(rows_K, np.concatenate(reserved)))[:free]
    explored_others = np.isin(buckets_K[others], list(slots))
    certain_labels = [(rows_K[others[~explored_others]], scores_K[others[~explored_others]])]
    for bucket, (rows_P, scores_P) in of_bucket.items():
        certain = int(np.count_nonzero(buckets_K[others] == bucket))
        certain_labels.append((rows_P[:certain], scores_P[:certain]))
    rows, scores = (np.concatenate(parts) for parts in zip(*certain_labels, strict=True))
    return rows, scores


def _merge(best: tuple[Int64, Float32, Int8], ranked: tuple[Int64, Float32], bucket: int) -> tuple[Int64, Float32]:
    """Merge a bucket's labels with those of the best list.

    An approximate search of the bucket may have missed some of the latter.
    """
    mine_K = best[2] == bucket
    missed_K = mine_K & ~np.isin(best[0], ranked[0])
    rows_P, scores_P = np.append(ranked[0], best[0][missed_K]), np.append(ranked[1], best[1][missed_K])
    order = np.argsort(-scores_P, kind="stable")
    return rows_P[order], scores_P[order]


def _arrange(
    certain_labels: tuple[Int64, Float32],
    drawn: Sequence[tuple[Int64, Float32, Float64]],
    slots: dict[int, int],
    candidates: dict[int, int],
    chance: np.random.Generator,
) -> Explored:
    """Arrange the answer: drawn labels at uniformly random positions, the others by score."""
    rows, scores = certain_labels
    order = np.argsort(-scores, kind="stable")
    drawn_rows, drawn_scores, propensities = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    positions = chance.choice(len(rows) + len(drawn_rows), len(drawn_rows), replace=False)
    free = np.setdiff1d(np.arange(len(rows) + len(drawn_rows)), positions)
    answer = Explored(
        rows_K=np.empty(len(rows) + len(drawn_rows), np.int64),
        scores_K=np.empty(len(rows) + len(drawn_rows), np.float32),
        propensities_K=np.ones(len(rows) + len(drawn_rows), np.float32),
        slots=slots,
        candidates=candidates,
    )
    answer.rows_K[free], answer.scores_K[free] = rows[order], scores[order]
    answer.rows_K[positions], answer.scores_K[positions], answer.propensities_K[positions] = (
        drawn_rows,
        drawn_scores,
        propensities,
    )
    return answer


def inclusion_probabilities(scores_C: Float32, slots: int, temperature: float) -> Float64:
    """Compute P(drawn) of every candidate, float64 [C], in (0, 1]; the sum is `slots`, 0 <= slots <= C.

    Example:
        >>> import numpy as np
        >>> inclusion_probabilities(np.log([8, 1, 1]).astype(np.float32), 1, temperature=1.0).round(4)
        array([0.7533, 0.1233, 0.1233])
        >>> inclusion_probabilities(np.log([8, 1, 1]).astype(np.float32), 2, temperature=1.0).round(4)
        array([1. , 0.5, 0.5])

        The first number is ``.9 · .8 + .1 / 3``. With two slots the first candidate is certain to get one, and the
        other two share one.
    """
    if slots == 0 or slots >= len(scores_C):
        return np.full(len(scores_C), float(slots > 0))
    logits_C = scores_C.astype(np.float64) / temperature
    shares_C = np.exp(logits_C - logits_C.max())
    shares_C = (1 - EVEN_SHARE) * shares_C / shares_C.sum() + EVEN_SHARE / len(scores_C)
    certain_C = np.zeros(len(scores_C), np.bool_)
    # Probabilities above 1 become 1 and the rest is scaled up, which may push further ones above 1; so repeat.
    while True:
        free = slots - np.count_nonzero(certain_C)
        probabilities_C: Float64 = np.where(certain_C, 1.0, free * shares_C / shares_C[~certain_C].sum())
        more_C = ~certain_C & (probabilities_C > _NEARLY_CERTAIN)
        if not more_C.any():
            return probabilities_C
        certain_C |= more_C


def draw(probabilities_C: Float64, chance: np.random.Generator) -> Int64:
    """Draw positions of candidates, int64, in random order; the sum of the probabilities is their number.

    The probabilities, laid end to end in random order, form a line; the candidates under the points u, u + 1, … are
    drawn, with u uniform in [0, 1). No piece is longer than 1, so none is drawn twice, and each candidate is drawn with
    its own probability.
    """
    count = round(float(probabilities_C.sum()))
    certain = np.flatnonzero(probabilities_C >= _NEARLY_CERTAIN)
    order = chance.permutation(np.flatnonzero(probabilities_C < _NEARLY_CERTAIN))
    points = chance.random() + np.arange(count - len(certain))
    if points.size:
        ends = np.cumsum(probabilities_C[order])
        ends[-1] = len(points)  # exactly: rounding could leave the last point beyond the end
        certain = np.concatenate([certain, order[np.searchsorted(ends, points, side="right")]])
    drawn: Int64 = chance.permutation(certain).astype(np.int64, copy=False)
    return drawn
