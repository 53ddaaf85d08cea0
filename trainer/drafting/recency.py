"""The half-life of pairs' weights that `init` drafts, by how well counts predict later events of a log.

Legend: `N` rows by time, `L` labels, `H` half-lives.
"""

from __future__ import annotations

import numpy as np

from longtail.bundle.arrays import Float64, Int32

_LEARNT, _TESTED = 0.8, 0.9
"""Shares of the rows, by time: popularity is learnt from the first and predicts the next; the newest are test's."""
_HALVINGS = np.arange(0, 8, 0.5)
"""Half-lives are the span of what is learnt from, halved so often."""
_OF_ALL_TIMES = (0, 0.2, 0.5)
"""Parts of popularity without decay in the mixture, of which the best one counts."""
_LEAST_GAIN, _SHARE = 0.02, 0.5
"""Least gain, nats, above chance; and share of the best gain that is enough, as tastes are learnt from more pairs."""


def half_life_of(labels_N: Int32, days_N: Float64) -> tuple[float, float] | None:
    """Get the longest half-life, days, that gains .02 nats and half of what the best one does, and its gain.

    The gain is of the mean log-probability of events under the popularity of those before: Σ 2^(−age/h) of a label
    over that of all, with an event more of every label, mixed with a part of what it is without decay.

    Example:
        >>> labels_N, days_N = np.repeat([0, 1, 2], [2000, 1000, 1000]), np.arange(4000) / 40
        >>> half_life_of(labels_N, days_N)[0] < 25
        True
        >>> half_life_of(labels_N % 1, days_N) is None
        True
    """
    order_N = np.argsort(days_N, kind="stable")
    labels_N, days_N = labels_N[order_N], days_N[order_N]
    learnt, tested = (int(share * len(labels_N)) for share in (_LEARNT, _TESTED))
    span = float(days_N[learnt - 1] - days_N[0]) if 0 < learnt < tested else 0.0
    if span <= 0:
        return None
    labels, wanted = int(labels_N.max()) + 1, labels_N[learnt:tested]
    ages, past = days_N[learnt - 1] - days_N[:learnt], labels_N[:learnt]

    def popularity(life: float) -> Float64:
        weights = np.exp2(-ages / life)
        counts_L = np.bincount(past, weights * (learnt / weights.sum()), labels)
        return np.asarray((counts_L + 1) / (learnt + labels), np.float64)

    steady_L, lives_H = popularity(np.inf), span / 2.0**_HALVINGS
    ratios = [(popularity(life) / steady_L)[wanted] for life in lives_H]
    gains_H = np.array([max(np.log((1 - part) * ratio + part).mean() for part in _OF_ALL_TIMES) for ratio in ratios])
    enough_H = gains_H >= max(_LEAST_GAIN, _SHARE * float(gains_H.max()))
    chosen = int(enough_H.argmax())
    return (float(lives_H[chosen]), float(gains_H[chosen])) if enough_H.any() else None
