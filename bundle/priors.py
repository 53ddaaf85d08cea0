"""Define priors: named numbers per label, each with a weight that requests choose [METHODS §6, priors].

In `s = u·v/T + b + λ·log ν + μ·log π + Σ_j w_j·r_j`, r_j may be the log frequency of the last week, a margin, or the
popularity in another market. Priors belong to a release, not to the model: an index is built with them, and they change
without training.

The first priors come from a table; `priors` of a request weighs them. The others follow from a label's bucket and
columns: `bonus` weighs a 1 for labels of a bucket or filter, `slope` a number of a column, and `decay` a date.
`exposed`, also in `priors`, follows from the answers of a service.

Legend: `L` labels, `M` added labels, `P` priors, `B` queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, JsonValue

from longtail.bundle.arrays import Float32, Float64, Int8, Int64
from longtail.bundle.conditions import Attributes, NumberColumn, read_conditions
from longtail.bundle.errors import FeatureError, describe
from longtail.bundle.filterable import filter_kind
from longtail.bundle.frequency import BUCKET_NAMES
from longtail.bundle.manifest import Record
from longtail.bundle.one_line import one_line

EXPOSED = "exposed"
"""Name of the prior that follows from the answers of a service."""
MAX_PRIORS = 8
"""Most priors that a build declares. Each costs four bytes per label and a coordinate of every search, and multiplies
the dial points at which recall is measured."""
_TERMS = 4 * MAX_PRIORS
"""Terms assumed by the overflow check of a score; a real score has fewer."""


class ExposureState(Record):
    """State of the prior `exposed`: the half-life of places in answers, and how many a label has had."""

    half_life: float = Field(gt=0)
    """Seconds in which a place in an answer loses half its weight."""
    until: float | None = Field(default=None, allow_inf_nan=False)
    """Time of the last answers that count, in seconds since 1970; None: none so far."""
    mean: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decayed places of an average label."""

    def values(self, exposures_L: Float64) -> Float64:
        """Compute the log of each label's exposure over the average's, nats, float64 [L].

        One place is added to every label, so that few answers say little.
        """
        return np.log((exposures_L + 1) / (self.mean + 1))

    def decayed_exposures(self, values_L: Float32) -> Float64:
        """Compute decayed places from `values`, float64 [L]."""
        return np.maximum(np.exp(values_L.astype(np.float64)) * (self.mean + 1) - 1, 0)

    def counted(self, values_L: Float32, added_L: Float64, until: float) -> tuple[ExposureState, Float64]:
        """Decay earlier exposures to a later time, and add new ones.

        Returns the state and the decayed places of every label, float64 [L].
        """
        decay = 0.0 if self.until is None else 2.0 ** ((self.until - until) / self.half_life)
        exposures_L = decay * self.decayed_exposures(values_L) + added_L
        return self.model_copy(update={"until": until, "mean": float(exposures_L.mean())}), exposures_L


class Prior(Record):
    """One prior: limits of its weight, and the scale of its coordinate."""

    name: str = Field(min_length=1, max_length=80)
    """A column of the table of priors; for a derived prior, the keys of its weight in a request: `bonus.tail`."""
    source: Literal["table", "bucket", "filter", "number", "date", "answers"] = "table"
    """What the values come from: a table of priors, each label's bucket or display columns, or answers of a service."""
    filter: dict[str, JsonValue] = Field(default={})
    """Conditions of the source `filter`."""
    origin: float = Field(default=0.0, allow_inf_nan=False)
    """Number of the source `number`, or day since 1970 of `date`, at which the coordinate is 0."""
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
    exposure: ExposureState | None = None
    """State of the source `answers`."""

    @property
    def group(self) -> str:
        """Return the key of requests that weighs the prior: `priors`, `bonus`, `slope` or `decay`."""
        return "priors" if self.source in ("table", "answers") else self.name.partition(".")[0]

    @property
    def key(self) -> str:
        """Return the name of the prior in a request, below its group."""
        return self.name if self.source in ("table", "answers") else self.name.partition(".")[2]

    @property
    def indicates(self) -> bool:
        """Return whether a value is 1 or 0: whether a label gets the bonus."""
        return self.source in ("bucket", "filter")

    def values(self, buckets_L: Int8, column: Callable[[str], pa.ChunkedArray]) -> Float64:
        """Compute the values of labels, float64 [L], from their buckets or display columns.

        Raises ConditionError for a filter that does not fit the columns.
        """
        if self.source == "bucket":
            in_bucket_L: Float64 = (buckets_L == BUCKET_NAMES.index(self.key)).astype(np.float64)
            return in_bucket_L
        if self.source == "filter":
            kinds = {name: kind for name in self.filter if (kind := filter_kind(column(name).type)) is not None}
            conditions = read_conditions(kinds, self.filter, self.name)
            return Attributes(kinds, len(buckets_L), column).mask(conditions).astype(np.float64)
        numbers_L = NumberColumn(column(self.key)).numbers
        return np.where(np.isnan(numbers_L), self.missing, numbers_L - self.origin)

    @property
    def largest(self) -> float:
        """Return the largest absolute value for which coordinate and scores fit float32."""
        # The sum of this many terms of the largest weight must fit too.
        return float(np.finfo(np.float32).max) / (_TERMS * max(1.0, self.kappa, abs(self.minimum), abs(self.maximum)))


@dataclass(frozen=True)
class Priors:
    """The priors of one release: settings in the order of the coordinates, and every label's values, float32 [L, P].

    Those of a table come first. A bundle without a release has none.
    """

    settings: tuple[Prior, ...] = ()
    values_LP: Float32 = field(default_factory=lambda: np.empty((0, 0), np.float32))

    __repr__ = one_line

    @cached_property
    def names(self) -> list[str]:
        """Return the names of all priors, in order."""
        return [prior.name for prior in self.settings]

    @cached_property
    def from_table(self) -> tuple[Prior, ...]:
        """Return the priors of the table."""
        return tuple(prior for prior in self.settings if prior.source == "table")

    @cached_property
    def defaults(self) -> Float32:
        """Return every prior's default weight, float32 [P]."""
        return np.array([prior.default for prior in self.settings], np.float32)

    @property
    def exposed(self) -> tuple[int, ExposureState] | None:
        """Return position and state of the prior `exposed`, if there is one."""
        states = ((p, prior.exposure) for p, prior in enumerate(self.settings))
        return next(((p, state) for p, state in states if state is not None), None)

    def with_exposure(self, state: ExposureState, exposures_L: Float64) -> Priors:
        """Replace the prior `exposed` by decayed exposures, float64 [L]."""
        assert self.exposed is not None
        p, _ = self.exposed
        settings, values_LP = [*self.settings], self.values_LP.copy()
        update = {"exposure": state, "missing": float(state.values(np.zeros(1))[0])}
        settings[p], values_LP[:, p] = settings[p].model_copy(update=update), state.values(exposures_L)
        return Priors(tuple(settings), values_LP)

    def with_table(self, table: Priors) -> Priors:
        """Replace the priors of the table."""
        first = len(self.from_table)
        values_LP = np.concatenate([table.values_LP, self.values_LP[:, first:]], axis=1)
        return Priors((*table.settings, *self.settings[first:]), values_LP)

    def check(self, values: Mapping[str, float], display: Mapping[str, JsonValue]) -> None:
        """Refuse a label's values that overflow; unknown names are ignored."""
        for prior in self.settings:
            columns: Mapping[str, object] = {"table": values, "number": display}.get(prior.source, {})
            value = columns.get(prior.key)
            if value is not None and not abs(float(str(value)) - prior.origin) <= prior.largest:
                low, high = (prior.origin + sign * prior.largest for sign in (-1, 1))
                raise FeatureError(
                    f"expected a number from {low:.3g} to {high:.3g}, received {describe(value)}",
                    row=0,
                    field=f"{'priors' if prior.source == 'table' else 'display'}.{prior.key}",
                )

    def added_values(
        self,
        rows_M: Int64,
        values_M: Sequence[Mapping[str, float]],
        buckets_M: Int8,
        column: Callable[[str], pa.ChunkedArray],
    ) -> Float32:
        """Compute the values of added or changed labels, float32 [M, P].

        Args:
            column: returns a display column of these labels by its name.
        """
        values_MP = np.empty((len(rows_M), len(self.settings)), np.float32)
        for p, prior in enumerate(self.settings):
            if prior.source not in ("table", "answers"):
                values_MP[:, p] = prior.values(buckets_M, column)
                continue
            in_bundle_M = rows_M >= 0
            values_MP[:, p] = np.where(in_bundle_M, self.values_LP[np.where(in_bundle_M, rows_M, 0), p], prior.missing)
            for row, values in enumerate(values_M):
                if prior.source == "table" and prior.name in values:
                    values_MP[row, p] = values[prior.name]
        return values_MP


def unknown_prior(names: Sequence[str], received: str, row: int = 0) -> FeatureError:
    """Create the error about an unknown prior."""
    return FeatureError(
        f"expected priors of this release, {list(names)}, received {describe(received)}", row=row, field="priors"
    )
