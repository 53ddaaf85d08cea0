"""Drawing slots among candidates with unequal, known probabilities, and without replacement.

Each candidate's inclusion probability π is proportional to its share of a softmax of scores, a tenth of that share
spread evenly over all candidates so that none is smaller than a tenth of an even draw's; at most 1, where the rest is
shared out again. `draw` is systematic sampling in random order (Madow 1949; Hartley, Rao 1962): it takes m labels with
exactly these π, which Gumbel's top m of the same softmax has only as a sum over subsets. Given the query and the
release, a label's propensity P(shown) is π for candidates, 1 for a label that is shown whatever chance says, 0 for the
rest; clicks weighted by 1/π estimate, without bias, what showing the label would bring, as long as it is a candidate.

Madow, "On the theory of systematic sampling, II", Annals of Mathematical Statistics 20, 1949. Hartley and Rao,
"Sampling with unequal probabilities and without replacement", the same, 33, 1962.

Legend: `C` candidates of one bucket.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from longtail.bundle.arrays import Float32, Float64, Int64

EVEN_SHARE = 0.1
"""Share of the draw that is even over the candidates: inverse propensities are at most 10·C/m."""
_NEARLY_CERTAIN = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Lottery:
    """How slots are drawn.

    Attributes:
        candidates: labels of a bucket that its slots are drawn from, at most; all that are asked for if those are more.
        temperature: of the softmax over their scores, in logits: near 0 the best label wins, large draws are even.
        seed: with the name of a query it decides its draws.
    """

    candidates: int = 100
    temperature: float = 1.0
    seed: int = field(default_factory=lambda: secrets.randbits(64))

    def generator(self, name: str) -> np.random.Generator:
        """The chance of one query: the same for the same seed and name, whatever else is answered with it."""
        digest = blake2b(f"{self.seed}:{name}".encode("utf-8", "replace"), digest_size=16).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of a batch of queries.

    Attributes:
        lottery: how slots are drawn.
        names: of the queries, one each, for `Lottery.generator`; if there are none, their places.
    """

    lottery: Lottery = field(default_factory=Lottery)
    names: Sequence[str] = ()

    def of(self, place: int) -> np.random.Generator:
        """The chance of the query at a place of the batch."""
        return self.lottery.generator(self.names[place] if self.names else str(place))


def inclusion_probabilities(scores_C: Float32, slots: int, temperature: float) -> Float64:
    """P(drawn) of every candidate, float64 [C], in (0, 1]; they add up to `slots`, 0 <= slots <= C.

    Example:
        >>> import numpy as np
        >>> inclusion_probabilities(np.log([8, 1, 1]).astype(np.float32), 1, temperature=1.0).round(4)
        array([0.7533, 0.1233, 0.1233])
        >>> inclusion_probabilities(np.log([8, 1, 1]).astype(np.float32), 2, temperature=1.0).round(4)
        array([1. , 0.5, 0.5])

        The first is ``.9 · .8 + .1 / 3``; of two slots one is certain to be its own, so the others share one.
    """
    if slots == 0 or slots >= len(scores_C):
        return np.full(len(scores_C), float(slots > 0))
    logits_C = scores_C.astype(np.float64) / temperature
    shares_C = np.exp(logits_C - logits_C.max())
    shares_C = (1 - EVEN_SHARE) * shares_C / shares_C.sum() + EVEN_SHARE / len(scores_C)
    certain_C = np.zeros(len(scores_C), np.bool_)
    while True:
        left = slots - np.count_nonzero(certain_C)
        probabilities_C: Float64 = np.where(certain_C, 1.0, left * shares_C / shares_C[~certain_C].sum())
        more_C = ~certain_C & (probabilities_C > _NEARLY_CERTAIN)
        if not more_C.any():
            return probabilities_C
        certain_C |= more_C


def draw(probabilities_C: Float64, chance: np.random.Generator) -> Int64:
    """Places of the candidates drawn, int64, in random order: as many as the probabilities add up to, a whole number.

    Laid end to end in random order, the probabilities make a line; what lies under the points u, u + 1, …, u even in
    [0, 1), is drawn. None is longer than 1, so none is drawn twice, and each is drawn with its own probability.
    """
    count = round(float(probabilities_C.sum()))
    certain = np.flatnonzero(probabilities_C >= _NEARLY_CERTAIN)
    order = chance.permutation(np.flatnonzero(probabilities_C < _NEARLY_CERTAIN))
    points = chance.random() + np.arange(count - len(certain))
    if points.size:
        ends = np.cumsum(probabilities_C[order])
        ends[-1] = len(points)
        certain = np.concatenate([certain, order[np.searchsorted(ends, points, side="right")]])
    drawn: Int64 = chance.permutation(certain).astype(np.int64, copy=False)
    return drawn
