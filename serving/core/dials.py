"""Which λ and μ a request may ask of a release, and what it gets if it names none [METHODS §6]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from longtail.bundle import Manifest
from longtail.bundle.errors import describe
from longtail.serving.errors import InvalidRequestError

_BELOW_ZERO = (
    "; below 0 the best labels are those that this release's tree p_n(y|x) all but rules out, which no search finds: "
    "popularity below 0 favours rare labels"
)


class Asked(Protocol):
    """What a client said of the dials."""

    @property
    def bias_removal(self) -> float | None:
        """λ, if it did."""

    @property
    def popularity(self) -> float | None:
        """μ, if it did."""


@dataclass(frozen=True, slots=True)
class _Range:
    default: float
    minimum: float
    maximum: float

    def check(self, name: str, value: float, *, received: str, field: str, why: str = "") -> None:
        if not self.minimum <= value <= self.maximum:
            raise InvalidRequestError(
                f"expected {self.minimum} <= {name} <= {self.maximum}, received {received}{why}", field=field
            )


@dataclass(frozen=True, slots=True)
class Dials:
    """The two dials of one kind of request.

    Where ν is π one coordinate of the index holds both, so λ + μ must stay within the limits of λ, which the recall of
    the index was measured over. With a tree p_n(y|x) that coordinate is left to μ, but for similar labels: a label has
    no features for a tree to look at.
    """

    bias_removal: _Range
    popularity: _Range
    total: _Range | None
    """Of λ + μ; None where each has a coordinate of its own."""
    tree: bool

    @classmethod
    def of_queries(cls, manifest: Manifest, *, tree: bool) -> Self:
        """For queries with features: both defaults are the release's."""
        dial, prior = _ranges(manifest)
        return cls(dial, prior, dial if manifest.kappa_popularity is None and not tree else None, tree)

    @classmethod
    def of_labels(cls, manifest: Manifest, *, tree: bool) -> Self:
        """For similar labels: nearness, not popularity, so both defaults are 0, or the limit next to it."""
        dial, prior = map(_around_zero, _ranges(manifest))
        if tree:
            dial = _Range(dial.default, min(dial.minimum, prior.minimum), max(dial.maximum, prior.maximum))
        return cls(dial, prior, dial if manifest.kappa_popularity is None else None, tree=False)

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
        why = _BELOW_ZERO if self.tree and noise < 0 else ""
        self.bias_removal.check("bias_removal", noise, received=describe(noise), field=f"{prefix}bias_removal", why=why)
        self.popularity.check("popularity", prior, received=describe(prior), field=f"{prefix}popularity")
        if self.total is not None:
            self.total.check(
                "bias_removal + popularity", noise + prior,
                received=f"{describe(noise)} + {describe(prior)}",
                field=f"{prefix}{'bias_removal' if asked.popularity is None else 'popularity'}",
                why="; this release has one log p_n for both, the label frequency",
            )  # fmt: skip
        return noise, prior


def _ranges(manifest: Manifest) -> tuple[_Range, _Range]:
    dial, prior = manifest.bias_removal, manifest.popularity
    return (
        _Range(dial.default, dial.minimum, dial.maximum),
        _Range(prior.default, prior.minimum, prior.maximum),
    )


def _around_zero(limits: _Range) -> _Range:
    return _Range(min(max(0.0, limits.minimum), limits.maximum), limits.minimum, limits.maximum)
