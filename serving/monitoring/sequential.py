"""Whether arms of an experiment differ, said so that looking every day, and stopping at will, is allowed.

A 95 % interval of the usual kind is right once, at a size that was fixed before. Looked at again and again, it leaves
out the truth sooner or later. The intervals here are a **confidence sequence**: all of them together, at every look,
hold the truth with 95 %.

**What is estimated.** In one arm a unit (a user) has n answers with h hits. The rate is p̂ = Σh / Σn, and
p̂ − p = S / N with S = Σ (h − p·n), N = Σn. A unit's answers depend on each other, units do not: V = Σ (h − p̂·n)² over
units estimates the variance of S, whatever the answers of a unit have in common. Two arms: p̂₁ − p̂₀ − δ = M / H with
H = N₁N₀ / (N₁ + N₀), M = S₁·N₀/(N₁ + N₀) − S₀·N₁/(N₁ + N₀), and V = V₁·(N₀/(N₁ + N₀))² + V₀·(N₁/(N₁ + N₀))².

**The boundary.** M is a sum over many independent units, like a Brownian motion at time V [Waudby-Smith, Arbour, Sinha,
Kennedy, Ramdas 2021, "Time-uniform central limit theory and asymptotic confidence sequences"]. Such a one passes
√(2 (V + ρ) log(√((V + ρ)/ρ) / 2α + 1)) at any time with a probability of at most α: the one-sided normal mixture, in
closed form [Howard, Ramdas, McAuliffe, Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences"].
Both sides share the error. ρ says at which V the interval is at its narrowest compared with V; it costs little
elsewhere.

**Units come back**, so M is no random walk: what a unit adds later is like what it did before. This makes M cross
less, not more. For s < t, Cov(M_s, M_t) = V_s + Cov(M_s, M_t − M_s) ≥ V_s, which is what a Brownian motion at those
times has, and of two Gaussian processes with equal variances the one whose values have more in common passes a boundary
more rarely [Slepian 1962]. It needs units that stay alike, or forget; not ones that do the opposite of what they did.

Units are added up in `CLUSTERS` clusters by their hash, so that what is kept does not grow with them. Clusters are
independent, as units are, and V over them has the same mean; it is known to within 4 % (√(2 / CLUSTERS)).

Legend: `C` clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longtail.bundle.arrays import Float64

CLUSTERS = 1024
"""Of an arm's units."""
ALPHA = 0.05
_RHO = 64.0
"""In squared hits: the interval is at its best at some hundreds of hits in an arm."""
SRM_ALPHA = 0.001
"""Of the check of the sample ratio: rare enough that an alarm is worth an hour."""
_CONCENTRATION = 100.0
"""Of the Dirichlet prior around the shares: shares that are off by some points are what is looked for."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one arm's units did: hits among trials, by cluster.

    Attributes:
        hits_C: float64 [C].
        trials_C: answers, or labels chosen, float64 [C].
    """

    hits_C: Float64
    trials_C: Float64

    @property
    def hits(self) -> float:
        """Over all clusters."""
        return float(self.hits_C.sum())

    @property
    def trials(self) -> float:
        """Over all clusters."""
        return float(self.trials_C.sum())

    @property
    def value(self) -> float | None:
        """Hits per trial; None of no trials."""
        return self.hits / self.trials if self.trials else None

    @property
    def variance(self) -> float:
        """V, of the hits that are more or less than expected; in squared hits."""
        residuals_C = self.hits_C - (self.value or 0.0) * self.trials_C
        return float(residuals_C @ residuals_C)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the bounds that hold at every look."""

    value: float
    low: float
    high: float

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the difference is real."""
        return self.low > 0 or self.high < 0


def boundary(variance: float, alpha: float = ALPHA) -> float:
    """How far a sum of that variance is from its mean, at every look and on both sides, but for a chance of `alpha`.

    Args:
        variance: V, growing from look to look.
        alpha: of both sides together.
    """
    return math.sqrt(2 * (variance + _RHO) * math.log(math.sqrt((variance + _RHO) / _RHO) / alpha + 1))


def rate_interval(rate: Rate, *, alpha: float = ALPHA, highest: float = math.inf) -> Interval | None:
    """A rate and its bounds; None of no trials.

    Args:
        rate: of one arm.
        alpha: that it is ever left out.
        highest: that a rate can be; the lowest is 0.
    """
    value = rate.value
    if value is None:
        return None
    reach = boundary(rate.variance, alpha) / rate.trials
    return Interval(value, max(0.0, value - reach), min(highest, value + reach))


def difference_interval(arm: Rate, control: Rate, *, alpha: float = ALPHA) -> Interval | None:
    """By how much an arm's rate is above control's, and its bounds; None while one of them has no trials.

    Args:
        arm, control: of units that chance has divided.
        alpha: that it is ever left out; where several arms are compared with one control, their share of it.
    """
    if arm.value is None or control.value is None:
        return None
    trials = arm.trials + control.trials
    of_control, of_arm = control.trials / trials, arm.trials / trials
    variance = arm.variance * of_control**2 + control.variance * of_arm**2
    reach = boundary(variance, alpha) / (arm.trials * of_control)
    value = arm.value - control.value
    return Interval(value, value - reach, value + reach)


def sample_ratio_evidence(units: Sequence[int], shares: Sequence[float]) -> float:
    """Evidence that units were not divided by these shares: an e-value, which is 1/α or more at any look with a
    probability of at most α if they were.

    The Bayes factor of a multinomial with a Dirichlet prior around the shares against the shares themselves
    [Lindon, Malek 2022, "Anytime-valid inference for multinomial count data"].

    Args:
        units: of every arm.
        shares: expected, with the sum 1; an arm of share 0 with units is infinite evidence.
    """
    if any(count and not share for count, share in zip(units, shares, strict=True)):
        return math.inf
    pairs = [(count, share) for count, share in zip(units, shares, strict=True) if share]
    prior = _CONCENTRATION * len(pairs)
    log_factor = math.lgamma(prior) - math.lgamma(prior + sum(units))
    for count, share in pairs:
        log_factor += math.lgamma(prior * share + count) - math.lgamma(prior * share) - count * math.log(share)
    return math.exp(log_factor) if log_factor < 700 else math.inf
