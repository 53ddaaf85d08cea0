"""Which λ, μ and weights of priors a request may ask of a release, and what it gets if it names none [METHODS §6]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from longtail.bundle import Manifest, Priors
from longtail.bundle.arrays import Float32
from longtail.bundle.errors import describe
from longtail.serving.errors import InvalidRequestError

_BELOW_ZERO = (
    "; below 0 the best labels are those that this release's tree p_n(y|x) all but rules out, which no search finds: "
    "popularity below 0 favours rare labels"
)
NO_WEIGHTS = np.empty(0, np.float32)


class Asked(Protocol):
    """What a client said of the dials."""

    @property
    def bias_removal(self) -> float | None:
        """λ, if it did."""

    @property
    def popularity(self) -> float | None:
        """μ, if it did."""

    @property
    def priors(self) -> Mapping[str, float]:
        """Weights of priors by name, as far as it did."""


@dataclass(frozen=True, slots=True)
class _Range:
    default: float
    minimum: float
    maximum: float

    def refusal(self, name: str, received: str, field: str, why: str = "") -> InvalidRequestError:
        return InvalidRequestError(
            f"expected {self.minimum} <= {name} <= {self.maximum}, received {received}{why}", field=field
        )


@dataclass(frozen=True, slots=True)
class Dials:
    """The dials of one kind of request: λ, μ and the weights of priors.

    Where ν is π one coordinate of the index holds both, so λ + μ must stay within the limits of λ, which the recall of
    the index was measured over. With a tree p_n(y|x) that coordinate is left to μ, but for similar labels: a label has
    no features for a tree to look at.
    """

    bias_removal: _Range
    popularity: _Range
    total: _Range | None
    """Of λ + μ; None where each has a coordinate of its own."""
    tree: bool
    priors: Mapping[str, _Range]

    @classmethod
    def of_queries(cls, manifest: Manifest, priors: Priors | None, *, tree: bool) -> Self:
        """For queries with features: all defaults are the release's."""
        dial, prior = _ranges(manifest)
        total = dial if manifest.kappa_popularity is None and not tree else None
        return cls(dial, prior, total, tree, _ranges_of(priors))

    @classmethod
    def of_labels(cls, manifest: Manifest, priors: Priors | None, *, tree: bool) -> Self:
        """For similar labels: nearness, not popularity, so all defaults are 0, or the limit next to it."""
        dial, prior = map(_around_zero, _ranges(manifest))
        if tree:
            dial = _Range(dial.default, min(dial.minimum, prior.minimum), max(dial.maximum, prior.maximum))
        weights = {name: _around_zero(limits) for name, limits in _ranges_of(priors).items()}
        return cls(dial, prior, dial if manifest.kappa_popularity is None else None, False, weights)

    def read(self, asked: Asked, prefix: str = "") -> tuple[float, float]:
        """λ and μ of a request.

        Args:
            asked: what the client sent.
            prefix: leads the fields of errors, such as `queries.0.`.

        Raises:
            InvalidRequestError: λ, μ or their sum is outside what the release answers.
        """
        noise = self.bias_removal.default if asked.bias_removal is None else asked.bias_removal
        prior = self.popularity.default if asked.popularity is None else asked.popularity
        if not self.bias_removal.minimum <= noise <= self.bias_removal.maximum:
            why = _BELOW_ZERO if self.tree and noise < 0 else ""
            raise self.bias_removal.refusal("bias_removal", describe(noise), f"{prefix}bias_removal", why)
        if not self.popularity.minimum <= prior <= self.popularity.maximum:
            raise self.popularity.refusal("popularity", describe(prior), f"{prefix}popularity")
        if self.total is not None and not self.total.minimum <= noise + prior <= self.total.maximum:
            raise self.total.refusal(
                "bias_removal + popularity",
                f"{describe(noise)} + {describe(prior)}",
                f"{prefix}{'bias_removal' if asked.popularity is None else 'popularity'}",
                "; this release has one log p_n for both, the label frequency",
            )
        return noise, prior

    def read_priors(self, asked: Asked, prefix: str = "") -> Float32:
        """Weight of every prior of the release in a request, float32 [P].

        Args:
            asked: what the client sent.
            prefix: leads the fields of errors, such as `queries.0.`.

        Raises:
            InvalidRequestError: a prior that the release has not, or a weight outside its limits.
        """
        for name, weight in asked.priors.items():
            limits = self.priors.get(name)
            if limits is None:
                raise InvalidRequestError(
                    f"expected priors of this release, {list(self.priors)}, received {describe(name)}",
                    field=f"{prefix}priors",
                )
            if not limits.minimum <= weight <= limits.maximum:
                raise limits.refusal(f"priors.{name}", describe(weight), f"{prefix}priors.{name}")
        return np.array([asked.priors.get(name, limits.default) for name, limits in self.priors.items()], np.float32)


def _ranges_of(priors: Priors | None) -> dict[str, _Range]:
    settings = () if priors is None else priors.settings
    return {prior.name: _Range(prior.default, prior.minimum, prior.maximum) for prior in settings}


def _ranges(manifest: Manifest) -> tuple[_Range, _Range]:
    dial, prior = manifest.bias_removal, manifest.popularity
    return (
        _Range(dial.default, dial.minimum, dial.maximum),
        _Range(prior.default, prior.minimum, prior.maximum),
    )


def _around_zero(limits: _Range) -> _Range:
    return _Range(min(max(0.0, limits.minimum), limits.maximum), limits.minimum, limits.maximum)
