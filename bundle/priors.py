"""Define priors: named numbers per label, each with a weight that requests choose [METHODS §6, priors].

In `s = u·v/T + b + λ·log ν + μ·log π + Σ_j w_j·r_j`, r_j may be the log frequency of the last week, a margin, or the
popularity in another market. Priors belong to a release, not to the model: an index is built with them, and they change
without training.

Legend: `L` labels, `M` added labels, `P` priors, `B` queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from pydantic import Field

from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.errors import FeatureError, describe
from longtail.bundle.manifest import Record
from longtail.bundle.one_line import one_line

MAX_PRIORS = 8
"""Most priors. Each costs four bytes per label and a coordinate of every search, and multiplies the places where
recall is measured."""
_TERMS = 2 * MAX_PRIORS
"""Terms assumed by the overflow check of a score; a real score has fewer."""


class Prior(Record):
    """One prior: limits of its weight, and the scale of its coordinate."""

    name: str = Field(min_length=1, max_length=64)
    minimum: float = Field(allow_inf_nan=False)
    """Least weight that a request may give."""
    default: float = Field(allow_inf_nan=False)
    """Weight for requests that set none."""
    maximum: float = Field(allow_inf_nan=False)
    """Largest weight that a request may give."""
    missing: float = Field(allow_inf_nan=False)
    """Value of labels that the table lacks, and of labels added while serving without a value."""
    kappa: float = Field(gt=0, allow_inf_nan=False)
    """Scale of the prior's coordinate."""
    alone: bool = False
    """Whether a request weighs no other prior at the same time."""

    @property
    def largest(self) -> float:
        """Return the largest absolute value for which coordinate and scores fit float32."""
        return float(np.finfo(np.float32).max) / (_TERMS * max(1.0, self.kappa, abs(self.minimum), abs(self.maximum)))


@dataclass(frozen=True)
class Priors:
    """The priors of one release: settings in the order of the coordinates, and every label's values, float32 [L, P]."""

    settings: tuple[Prior, ...]
    values_LP: Float32

    __repr__ = one_line

    @property
    def names(self) -> list[str]:
        """Return the priors' names, in order."""
        return [prior.name for prior in self.settings]

    @property
    def kappas(self) -> tuple[float, ...]:
        """Return the scale of every prior's coordinate."""
        return tuple(prior.kappa for prior in self.settings)

    @cached_property
    def defaults(self) -> Float32:
        """Return every prior's default weight, float32 [P]."""
        return np.array([prior.default for prior in self.settings], np.float32)

    @cached_property
    def missing(self) -> Float32:
        """Return every prior's value for labels without one, float32 [P]."""
        return np.array([prior.missing for prior in self.settings], np.float32)

    def weights(self, asked: Mapping[str, float]) -> Float32:
        """Convert weights by name to an array, float32 [P]; absent ones get the defaults."""
        return np.array([asked.get(prior.name, prior.default) for prior in self.settings], np.float32)

    def check(self, given: Mapping[str, float]) -> None:
        """Refuse invalid values of a label; unknown names are ignored."""
        largest = {prior.name: prior.largest for prior in self.settings}
        for name, value in given.items():
            if name in largest and not abs(value) <= largest[name]:
                raise FeatureError(
                    f"expected a number from {-largest[name]:.3g} to {largest[name]:.3g}, received {describe(value)}",
                    row=0,
                    field=f"priors.{name}",
                )

    def of_added(self, rows_M: Int64, given_M: Sequence[Mapping[str, float]]) -> Float32:
        """Compute the values of labels that were added or embedded again, float32 [M, P]."""
        known_M = rows_M >= 0
        values_MP: Float32 = np.where(known_M[:, None], self.values_LP[np.where(known_M, rows_M, 0)], self.missing)
        for place, name in enumerate(self.names):
            for row, given in enumerate(given_M):
                if name in given:
                    values_MP[row, place] = given[name]
        return values_MP


def unknown_prior(names: Sequence[str], received: str, row: int = 0) -> FeatureError:
    """Create the error about a name that is not a prior of the release."""
    return FeatureError(
        f"expected priors of this release, {list(names)}, received {describe(received)}", row=row, field="priors"
    )
