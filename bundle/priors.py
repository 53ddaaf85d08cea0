"""Named numbers per label beside log p_n, each with a weight that a request may choose [METHODS §6, priors].

`s = u·v/T + b + λ·log ν + μ·log π + Σ_j w_j·r_j`: r_j may be the log frequency of the last week, a margin, a target
popularity of another market. They belong to a release, not to the model: an index is built with them, and they change
without training.

Legend: `L` labels, `M` added ones, `P` priors, `B` queries.
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

MAX_PRIORS = 8
"""Every prior costs each label four bytes and a coordinate of every search, and recall is measured at its limits."""
_TERMS = 2 * MAX_PRIORS
"""Of a score: as many terms of the largest size do not overflow."""


class Prior(Record):
    """One prior: its weights' limits, and how its coordinate is scaled."""

    name: str = Field(min_length=1, max_length=64)
    minimum: float = Field(allow_inf_nan=False)
    """Least weight that a request may give."""
    default: float = Field(allow_inf_nan=False)
    """Weight of a request that names none."""
    maximum: float = Field(allow_inf_nan=False)
    """Largest weight that a request may give."""
    missing: float = Field(allow_inf_nan=False)
    """Value of a label that the table lacks, and of one that is added while serving without one of its own."""
    kappa: float = Field(gt=0, allow_inf_nan=False)
    """Scale of its coordinate."""

    @property
    def largest(self) -> float:
        """The largest value, below 0 or above, with which float32 holds its coordinate and any score that it is in."""
        return float(np.finfo(np.float32).max) / (_TERMS * max(1.0, self.kappa, abs(self.minimum), abs(self.maximum)))


@dataclass(frozen=True)
class Priors:
    """The priors of one release: settings in the order of the coordinates, and every label's values, float32 [L, P]."""

    settings: tuple[Prior, ...]
    values_LP: Float32

    @property
    def names(self) -> list[str]:
        """The priors' names, in order."""
        return [prior.name for prior in self.settings]

    @property
    def kappas(self) -> tuple[float, ...]:
        """Scale of every prior's coordinate."""
        return tuple(prior.kappa for prior in self.settings)

    @cached_property
    def defaults(self) -> Float32:
        """Every prior's default weight, float32 [P]."""
        return np.array([prior.default for prior in self.settings], np.float32)

    @cached_property
    def missing(self) -> Float32:
        """Every prior's value for a label that has none, float32 [P]."""
        return np.array([prior.missing for prior in self.settings], np.float32)

    def weights(self, asked: Mapping[str, float]) -> Float32:
        """Weights by name as an array, float32 [P]; those not named are the defaults."""
        return np.array([asked.get(prior.name, prior.default) for prior in self.settings], np.float32)

    def check(self, given: Mapping[str, float]) -> None:
        """Refuse values that a label cannot have; names of no prior are passed over."""
        largest = {prior.name: prior.largest for prior in self.settings}
        for name, value in given.items():
            if name in largest and not abs(value) <= largest[name]:
                raise FeatureError(
                    f"expected a number from {-largest[name]:.3g} to {largest[name]:.3g}, received {describe(value)}",
                    row=0,
                    field=f"priors.{name}",
                )

    def of_added(self, rows_M: Int64, given_M: Sequence[Mapping[str, float]]) -> Float32:
        """Values of labels that were added or embedded anew, float32 [M, P]."""
        known_M = rows_M >= 0
        values_MP: Float32 = np.where(known_M[:, None], self.values_LP[np.where(known_M, rows_M, 0)], self.missing)
        for place, name in enumerate(self.names):
            for row, given in enumerate(given_M):
                if name in given:
                    values_MP[row, place] = given[name]
        return values_MP


def unknown_prior(names: Sequence[str], received: str, row: int = 0) -> FeatureError:
    """What to say of a value of no prior of the release."""
    return FeatureError(
        f"expected priors of this release, {list(names)}, received {describe(received)}", row=row, field="priors"
    )
