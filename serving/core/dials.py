"""Read the weights of a request within a release's limits.

Legend: `P` priors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from longtail.bundle import Manifest, Popularity, Prior, Priors
from longtail.bundle.arrays import Float32
from longtail.bundle.dates import DAY_SECONDS
from longtail.bundle.errors import describe
from longtail.bundle.validation import did_you_mean
from longtail.serving.core import lifetimes
from longtail.serving.core.queries import SearchOptions
from longtail.serving.errors import InvalidRequestError

_BELOW_ZERO = (
    "; below 0 the best labels are those that this release's tree p_n(y|x) all but rules out, which no search finds: "
    "popularity below 0 favours rare labels"
)
_FIELD_OF_NAME = {"decay": "decay.column"}
"""Field of a request with the name of a prior, where the group's key is not."""
_SAME = 1e-6
"""Largest difference of two weights that are the same but for rounding to float32."""


class Weights(NamedTuple):
    """The weights of one query's score.

    Attributes:
        bias_removal, popularity, cooccurrence: λ, μ and ω.
        priors_P: float32, the weight of every prior.
        shift: what `decay` adds to the scores of all labels.
        weighed: whether a weight of `priors_P` is other than 0.
        signed: weights of priors that an answer id holds: the table's, and the others unless all are default.
        judged_at: λ whose promise holds at these weights; NaN if the release makes none.
    """

    bias_removal: float
    popularity: float
    cooccurrence: float
    priors_P: Float32
    shift: float
    weighed: bool
    signed: tuple[float, ...]
    judged_at: float


@dataclass(frozen=True)
class Dials:
    """Limits and defaults of all weights for one kind of request.

    Where ν is π, one coordinate of the index holds λ + μ, so the sum must stay within the limits of λ, for which recall
    of the index was measured. With a tree p_n(y|x) the coordinate holds μ alone, except in requests for similar labels,
    which have no features that the tree could use.
    """

    bias_removal: Popularity
    popularity: Popularity
    total: Popularity | None
    """Limits of λ + μ; None where λ and μ have separate coordinates."""
    tree: bool
    priors: Priors
    defaults_P: Float32
    """Default weight of every prior."""
    cooccurrence: Popularity | None
    """Limits of ω; None without such a term."""

    @classmethod
    def create_for_queries(cls, manifest: Manifest, priors: Priors, *, tree: bool) -> Self:
        """Create the dials of queries; all defaults are the release's."""
        dial = manifest.bias_removal
        total = dial if manifest.kappa_popularity is None and not tree else None
        return cls(dial, manifest.popularity, total, tree, priors, priors.defaults, manifest.cooccurrence)

    @classmethod
    def create_for_labels(cls, manifest: Manifest, priors: Priors, *, tree: bool) -> Self:
        """Create the dials of requests for similar labels.

        These seek similarity, not popularity, so all defaults are 0, or the limit nearest to 0.
        """
        settings: list[Popularity] = [manifest.bias_removal, manifest.popularity]
        settings += [] if manifest.cooccurrence is None else [manifest.cooccurrence]
        dial, prior, *weight = (
            limits.model_copy(update={"default": float(np.clip(0, limits.minimum, limits.maximum))})
            for limits in settings
        )
        if tree:
            limits = {"minimum": min(dial.minimum, prior.minimum), "maximum": max(dial.maximum, prior.maximum)}
            dial = dial.model_copy(update=limits)
        defaults_P = np.array([np.clip(0, limits.minimum, limits.maximum) for limits in priors.settings], np.float32)
        total = dial if manifest.kappa_popularity is None else None
        return cls(dial, prior, total, False, priors, defaults_P, weight[0] if weight else None)

    @cached_property
    def defaults(self) -> Weights:
        """Get the weights of a query that sets none."""
        omega = 0.0 if self.cooccurrence is None else self.cooccurrence.default
        return self._weights(self.bias_removal.default, self.popularity.default, omega, self.defaults_P, 0.0)

    def read(self, options: SearchOptions, prefix: str = "", at: float | None = None) -> Weights:
        """Return the weights of a request; raises InvalidRequestError if they exceed the release's limits.

        Decay is of the time `at`, seconds since 1970; None: now.
        """
        sets_priors = bool(options.priors or options.bonus or options.slope or options.decay)
        if (
            not sets_priors
            and options.bias_removal is None
            and options.popularity is None
            and options.cooccurrence is None
        ):
            return self.defaults
        noise = self.bias_removal.default if options.bias_removal is None else options.bias_removal
        prior = self.popularity.default if options.popularity is None else options.popularity
        if not self.bias_removal.minimum <= noise <= self.bias_removal.maximum:
            why = _BELOW_ZERO if self.tree and noise < 0 else ""
            raise _outside(self.bias_removal, "bias_removal", describe(noise), f"{prefix}bias_removal", why)
        if not self.popularity.minimum <= prior <= self.popularity.maximum:
            raise _outside(self.popularity, "popularity", describe(prior), f"{prefix}popularity")
        if self.total is not None and not self.total.minimum <= noise + prior <= self.total.maximum:
            raise _outside(
                self.total,
                "bias_removal + popularity",
                f"{describe(noise)} + {describe(prior)}",
                f"{prefix}{'bias_removal' if options.popularity is None else 'popularity'}",
                "; this release has one log p_n for both, the label frequency",
            )
        omega = self._read_cooccurrence(options, prefix)
        priors_P, shift = self._read_priors(options, prefix, at) if sets_priors else (self.defaults_P, 0.0)
        return self._weights(noise, prior, omega, priors_P, shift)

    def _weights(self, noise: float, prior: float, omega: float, priors_P: Float32, shift: float) -> Weights:
        # Answer ids stay short: most releases have many bonuses, which few requests set.
        table = len(self.priors.from_table)
        others_are_default = np.array_equal(priors_P[table:], self.priors.defaults[table:])
        signed = tuple(priors_P[: table if others_are_default else None].tolist())
        judged_at = self.find_judged_dial(noise, prior, omega, signed)
        return Weights(noise, prior, omega, priors_P, shift, bool(priors_P.any()), signed, judged_at)

    def _read_cooccurrence(self, options: SearchOptions, prefix: str) -> float:
        """Return ω of a request; raises InvalidRequestError if the release has no such term, or other limits."""
        limits, weight = self.cooccurrence, options.cooccurrence
        if limits is None:
            if weight:
                raise InvalidRequestError(
                    f"expected cooccurrence 0 or none, as this release knows nothing of what was chosen together, "
                    f"received {describe(weight)}",
                    field=f"{prefix}cooccurrence",
                )
            return 0.0
        if weight is None:
            return limits.default
        if not limits.minimum <= weight <= limits.maximum:
            raise _outside(limits, "cooccurrence", describe(weight), f"{prefix}cooccurrence")
        return weight

    def reach(self, popularity: float) -> tuple[float, float]:
        """Get the smallest and largest λ allowed with μ."""
        low, high = self.bias_removal.minimum, self.bias_removal.maximum
        if self.total is not None:
            low, high = max(low, self.total.minimum - popularity), min(high, self.total.maximum - popularity)
        return low, high

    def find_judged_dial(
        self, bias_removal: float, popularity: float, cooccurrence: float, priors: Sequence[float]
    ) -> float:
        """Get the λ whose promise holds at these weights; else NaN.

        Args:
            priors: weights of all priors, or of the first ones if the others have their defaults.
        """
        defaults = [0.0 if self.cooccurrence is None else self.cooccurrence.default]
        if priors:
            defaults += self.defaults_P.tolist()
        weights = [cooccurrence, *priors]
        if len(priors) not in (len(self.priors.from_table), len(self.defaults_P)) or any(
            abs(weight - default) > _SAME for weight, default in zip(weights, defaults, strict=False)
        ):
            return math.nan
        beyond = popularity - self.popularity.default
        if abs(beyond) <= _SAME:
            return bias_removal
        # One coordinate holds λ + μ: the answers are those at λ and the default μ that have the same sum.
        return math.nan if self.total is None else bias_removal + beyond

    def _read_priors(self, options: SearchOptions, prefix: str, at: float | None) -> tuple[Float32, float]:
        """Read the weights of priors, float32 [P], and decay's shift of all scores.

        Raises InvalidRequestError for a name or a weight that the release does not have.
        """
        weights_P, shift = self.defaults_P.copy(), 0.0
        groups = {"priors": options.priors, "bonus": options.bonus, "slope": options.slope}
        if options.decay is not None:
            groups["decay"] = {options.decay.column: options.decay.per_day(f"{prefix}decay.half_life")}
        for group, weights in groups.items():
            index_of = {prior.key: i for i, prior in enumerate(self.priors.settings) if prior.group == group}
            for name, weight in weights.items():
                if name not in index_of:
                    raise _unknown_prior(group, name, list(index_of), f"{prefix}{_FIELD_OF_NAME.get(group, group)}")
                prior = self.priors.settings[index_of[name]]
                # The shortest half-life gives the largest weight only up to rounding.
                fits = prior.minimum <= weight <= prior.maximum + _SAME * abs(prior.maximum)
                if group == "decay" and options.decay is not None:
                    if not fits:
                        least = 24 * options.decay.weight * math.log(2) / prior.maximum
                        raise InvalidRequestError(
                            f"expected a half_life of at least {least:.3g}h at weight {options.decay.weight:g}, "
                            f"received {describe(options.decay.half_life)}",
                            field=f"{prefix}decay.half_life",
                        )
                    # The coordinate counts days from the newest label of the build, and the score counts from now.
                    shift = weight * (prior.origin - (lifetimes.now() if at is None else at) / DAY_SECONDS)
                if not fits:
                    raise _outside(prior, f"{group}.{name}", describe(weight), f"{prefix}{group}.{name}")
                weights_P[index_of[name]] = weight
        return weights_P, shift


def _unknown_prior(group: str, name: str, names: list[str], field: str) -> InvalidRequestError:
    """Create the error of an unknown prior."""
    hint = did_you_mean(name, names) or "; longtail-index build --priors declares others"
    if (group, name) == ("bonus", "head"):
        hint = ": the others are measured against it, so give each of them a bonus below 0"
    noun = {"priors": "priors", "bonus": "bonuses"}.get(group, "columns")
    return InvalidRequestError(
        f"expected {noun} of this release, {names}, received {describe(name)}{hint}", field=field
    )


def _outside(limits: Popularity | Prior, name: str, received: str, field: str, why: str = "") -> InvalidRequestError:
    """Create the error of a weight outside its limits."""
    return InvalidRequestError(
        f"expected {limits.minimum} <= {name} <= {limits.maximum}, received {received}{why}", field=field
    )
