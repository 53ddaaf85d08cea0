"""Named numbers per label beside log p_n, each with a weight that a request may choose [METHODS §6, priors].

`s = u·v/T + b + λ·log ν + μ·log π + Σ_j w_j·r_j`: r_j may be the log frequency of the last week, a margin, a target
popularity of another market. They belong to a release, not to the model: an index is built with them, and they change
without training.

Legend: `L` labels, `M` added ones, `P` priors, `B` queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from pydantic import Field

from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.manifest import Record

MAX_PRIORS = 8
"""Every prior costs each label four bytes and a coordinate of every search, and recall is measured at its limits."""


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
    """Value of a label that the table lacks, and of every label that is added while serving."""
    kappa: float = Field(gt=0, allow_inf_nan=False)
    """Scale of its coordinate."""


@dataclass(frozen=True)
class Priors:
    """The priors of one release.

    Attributes:
        settings: one for each prior, in the order of the coordinates.
        values_LP: float32 [L, P], every label's numbers as they were given.
    """

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

    def of_added(self, rows_M: Int64) -> Float32:
        """Values of labels that were added or embedded anew, float32 [M, P].

        Args:
            rows_M: row of a label that the release has, which keeps its values; below 0 of another.
        """
        known_M = rows_M >= 0
        return np.where(known_M[:, None], self.values_LP[np.where(known_M, rows_M, 0)], self.missing)
