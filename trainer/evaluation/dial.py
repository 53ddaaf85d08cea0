"""Choose a curve's dial points and the service's default [METHODS §6, §9, §11, §12].

The score is `f + λ·log ν + μ·log π + ω·c + β_bucket`. A curve has lines through the served setting: over λ, but at
μ = 0; over μ, if log ν differs from log π; over ω, with a term of co-occurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from longtail.bundle import (
    BONUS_BUCKETS,
    BiasRemoval,
    Bonus,
    BonusBucket,
    Bundle,
    CurvePoint,
    Interval,
    Manifest,
    Popularity,
)
from longtail.bundle.manifest import CooccurrenceSettings, dial_words
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.config.sections import RelativeFloor
from longtail.trainer.history import select_best

BONUSES = (0.5, 1.0, 1.5, 2.0, 2.5)
"""Grid of β of the tail, besides 0."""
_OF_TORSO = (0.0, 0.5, 1.0, 1.5)
_OF_NEW = tuple(0.25 * step for step in range(9))
"""Grid of β of new labels where no bucket has a floor."""
_FINER = (0.25, 0.125)
"""Steps around the best β of the grid, which has steps of ½."""


class Setting(NamedTuple):
    """Hold λ, μ, ω, and β of torso, tail and new."""

    bias_removal: float
    popularity: float = 0.0
    cooccurrence: float = 0.0
    torso: float = 0.0
    tail: float = 0.0
    new: float = 0.0

    @classmethod
    def read_point(cls, point: CurvePoint) -> Setting:
        """Return the setting of a curve's point."""
        return cls(point.bias_removal, point.popularity, point.cooccurrence, **point.bonus)

    @property
    def of_towers(self) -> Setting:
        """Return the same setting at ω = 0."""
        return self._replace(cooccurrence=0.0)

    @property
    def bonus(self) -> dict[str, float]:
        """Return β by bucket, without zeros."""
        return {bucket: value for bucket in BONUS_BUCKETS if (value := getattr(self, bucket))}

    @property
    def bonus_dials(self) -> dict[BonusBucket, Bonus]:
        """Return the manifest's entry for β: this setting's values as defaults."""
        return {bucket: Bonus(default=getattr(self, bucket)) for bucket in BONUS_BUCKETS}

    def with_bonus(self, torso: float = 0.0, tail: float = 0.0, *, new: bool = False) -> Setting:
        """Return the same λ, μ and ω with other β; `new` labels may share the tail's."""
        return self._replace(torso=torso, tail=tail, new=tail if new else 0.0)

    def point(self, metrics: dict[str, Interval]) -> CurvePoint:
        """Return a curve's point with the metrics of this setting."""
        return CurvePoint(
            bias_removal=self.bias_removal, popularity=self.popularity, cooccurrence=self.cooccurrence,
            bonus=self.bonus, metrics=metrics,
        )  # fmt: skip

    def __str__(self) -> str:
        return dial_words(*self[:3], self.bonus)


_NO_BONUS: Mapping[BonusBucket, Bonus] = MappingProxyType(Setting(0.0).bonus_dials)


class Dial(NamedTuple):
    """A manifest's entries for the dials: λ with the curve of all, μ, ω if there is a term, and β by bucket."""

    bias_removal: BiasRemoval
    popularity: Popularity = Popularity()
    cooccurrence: CooccurrenceSettings | None = None
    bonus: Mapping[BonusBucket, Bonus] = _NO_BONUS

    @classmethod
    def read_manifest(cls, manifest: Manifest) -> Dial:
        """Return the dials of a bundle."""
        return cls(manifest.bias_removal, manifest.popularity, manifest.cooccurrence, manifest.bonus)

    @property
    def default(self) -> Setting:
        """Return the setting of requests without λ, μ, ω and β."""
        weight = 0.0 if self.cooccurrence is None else self.cooccurrence.default
        bonus = {bucket: dial.default for bucket, dial in self.bonus.items()}
        return Setting(self.bias_removal.default, self.popularity.default, weight, **bonus)

    @property
    def curve(self) -> list[CurvePoint]:
        """Return all lines, λ's first."""
        return self.bias_removal.curve

    def measured(self, split: str, curve: list[CurvePoint]) -> Dial:
        """Return the same defaults with the curve of another split."""
        return self._replace(
            bias_removal=self.bias_removal.model_copy(update={"curve_split": split, "curve": curve})
        )  # fmt: skip


def removes_nothing(noise: str) -> bool:
    """Return whether λ leaves the order unchanged, by the name of ν."""
    return noise.startswith(("uniform", "exp(")) and " · " not in noise  # exp(f): the order is that of p


class Noise(NamedTuple):
    """Describe the noise ν that λ adds back.

    If ν is `constant`, the same for every label, λ changes nothing. With a `separate_prior`, ν is not the label
    frequency, and μ is another dial than λ. If π is `ahead`, a forecast of a later period, it replaces ν, and in theory
    λ = 0.
    """

    name: str
    constant: bool
    separate_prior: bool
    ahead: bool = False

    @classmethod
    def read_bundle(cls, bundle: Bundle) -> Noise:
        """Return the noise that λ adds back to a bundle's scores."""
        separate, tree = bundle.labels.log_popularity is not None, bundle.proposal is not None
        constant = separate and bool(np.ptp(bundle.labels.log_pn) == 0)
        ahead = bundle.forecast is not None
        return cls(bundle.manifest.bias_removal.noise, constant=constant, separate_prior=separate or tree, ahead=ahead)

    def first_line(self, grid: Sequence[float]) -> list[Setting]:
        """List settings with λ over the grid at μ = 0; only λ = 0 if ν is the same for every label."""
        return [Setting(0.0)] if self.constant else [Setting(bias_removal) for bias_removal in grid]

    def second_line(self, grid: Sequence[float], bias_removal: float) -> list[Setting]:
        """List settings with μ over the grid, without 0, at one λ; none if log ν equals log π."""
        return [Setting(bias_removal, popularity) for popularity in grid if popularity] if self.separate_prior else []

    def quick(self) -> list[Setting]:
        """Return the settings for validation of epochs: 0, ½ and 1 of the dial with an effect."""
        of_prior = self.constant or self.ahead
        return [Setting(0.0, at) if of_prior else Setting(at) for at in (0.0, 0.5, 1.0)]


def lines(config: EvaluationConfig, noise: Noise, default: Setting, weights: Sequence[float] = ()) -> list[Setting]:
    """Return the lines of a curve through the served setting; over λ and μ at β = 0 as well, if that is not served.

    Args:
        weights: the grid of ω; empty without the term.
    """
    first = noise.first_line(config.bias_removal)
    second = noise.second_line(prior_grid(config), default.bias_removal)
    without = default.with_bonus()
    settings = [
        served._replace(bias_removal=setting.bias_removal, popularity=setting.popularity)
        for served in dict.fromkeys([default, without])
        for setting in first + second
    ]
    if default.popularity or default.bonus:  # the grid may lack the served μ, such as μ < 0, and β
        settings.append(default)
    settings += [default._replace(cooccurrence=weight) for weight in weights]
    return list(dict.fromkeys(settings))


def select_line(curve: Sequence[CurvePoint], dial: str, default: Setting) -> list[CurvePoint]:
    """Select the points that differ from the served setting in one dial, sorted.

    The line over λ is at μ = 0.
    """
    at = Setting._fields.index(dial)
    fixed = default._replace(popularity=0.0) if dial == "bias_removal" else default
    points = [point for point in curve if Setting.read_point(point)._replace(**{dial: fixed[at]}) == fixed]
    return sorted(points, key=lambda point: Setting.read_point(point)[at])


Measure = Callable[[list[Setting]], list[CurvePoint]]
"""Measures the curve at some settings, on validation pairs."""


def best_dial(
    measure: Measure, config: EvaluationConfig, noise: Noise, *, seasonal: bool = False
) -> tuple[Setting, list[CurvePoint]]:
    """Choose the best λ by the metric at μ = 0, then the best μ; also return both measured lines.

    If π is ahead, μ is chosen first, at λ = 0, then λ at that μ. With a floor, only points that reach the floor count;
    if no point does, only the points nearest to it.

    Args:
        seasonal: π has a calendar; then μ is not 0, because seasons even out over all of valid.
    """
    curve = measure(noise.first_line(config.bias_removal))
    floors = compute_floors(curve, config)
    bias_removal = 0.0 if noise.ahead else best_point(curve, config, floors).bias_removal
    if second := noise.second_line(prior_grid(config), bias_removal):
        curve = curve + measure(second)
    first = best_point(select_with_prior(curve) if seasonal else curve, config, floors)
    if noise.ahead and not noise.constant and first.popularity:
        curve = curve + measure([Setting(at, first.popularity) for at in config.bias_removal if at])
    best = Setting.read_point(best_point(select_with_prior(curve) if seasonal else curve, config, floors))
    return best, [point for point in curve if not point.popularity or point.bias_removal == best.bias_removal]


def select_with_prior(curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Select the points where μ is not 0."""
    return [point for point in curve if point.popularity]


def best_with_bonus(
    measure: Measure, curve: Sequence[CurvePoint], best: Setting, config: EvaluationConfig, noise: Noise
) -> Setting:
    """Choose the best setting under the floors, with β [METHODS §12].

    β of torso and tail is measured only if torso, tail or new has a floor. New labels share the tail's β if new has a
    floor, because they would otherwise replace the tail. Without floors, new labels with held-out pairs get the β of
    the best metric, because towers score labels without training pairs too low.

    Args:
        best: the choice without β.
    """
    floors, points = compute_floors(curve, config), [*curve]
    if not floors:
        measured = f"recall@{config.k}/new" in curve[0].metrics
        line = measure([best._replace(new=value) for value in _OF_NEW]) if measured else []
        return Setting.read_point(select_best(line, config.metric)) if line else best
    if any(name.endswith(BONUS_BUCKETS) for name in floors):
        alike = [point for point in curve if point.cooccurrence == best.cooccurrence]
        at = Setting.read_point(select_best(alike, config.metric))
        dial, grid = "bias_removal", config.bias_removal
        if noise.constant or noise.ahead:
            dial, grid = "popularity", prior_grid(config)
        steps, new = [*product(_OF_TORSO, (0.0, *BONUSES))], any(name.endswith("/new") for name in floors)
        for finer in (1.0, *_FINER):
            pairs = [(at.torso + finer * torso, at.tail + finer * tail) for torso, tail in steps]
            points += measure([at.with_bonus(*pair, new=new) for pair in pairs if min(pair) >= 0])
            at = Setting.read_point(best_point(points, config, floors))
            if not at.bonus:
                break
            points += measure([at._replace(**{dial: value}) for value in grid])
            at = Setting.read_point(best_point(points, config, floors))
            steps = [*product((-1.0, 0.0, 1.0), (-1.0, 0.0, 1.0))]
    return Setting.read_point(best_point(points, config, floors))


def compute_floors(curve: Sequence[CurvePoint], config: EvaluationConfig) -> dict[str, float]:
    """Compute the floor of every metric that has one; a relative floor depends on λ's line at μ = 0."""
    line = [point for point in curve if not point.popularity and not point.bonus]

    def least(metric: str, floor: float | RelativeFloor) -> float:
        if not isinstance(floor, RelativeFloor):
            return floor
        # A grid without that λ has only its best point to compare with.
        points = [point for point in line if point.bias_removal == floor.bias_removal] or line
        return floor.times * max(point.metrics[metric].value for point in points)

    return {metric: least(metric, floor) for metric, floor in config.floors.items()}


def missed(point: CurvePoint, floors: Mapping[str, float]) -> float:
    """Sum the amounts by which metrics miss their floors."""
    return sum(max(0.0, least - point.metrics[metric].value) for metric, least in floors.items())


def describe_choice(config: EvaluationConfig) -> str:
    """Describe the choice of λ and μ, ending with the metric."""
    floor = ", ".join(f"{name} >= {least}" for name, least in config.floor.items())
    return f"{f'the floor {floor} and ' if floor else ''}valid {config.metric}"


def best_point(curve: Sequence[CurvePoint], config: EvaluationConfig, floors: Mapping[str, float]) -> CurvePoint:
    """Return the best point with the least shortfall from the floors."""
    missing = [missed(point, floors) for point in curve]
    # Equal sums of float64 numbers may differ in their last digits.
    nearest = [point for point, total in zip(curve, missing, strict=True) if total <= min(missing) + 1e-12]
    return select_best(nearest, config.metric)


def prior_grid(config: EvaluationConfig) -> list[float]:
    """Return the grid of μ."""
    return config.bias_removal if config.popularity is None else config.popularity
