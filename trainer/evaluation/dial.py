"""Where a curve is measured on the two dials λ and μ, and which of its points is served by default [METHODS §6, §9].

The score is `f + λ·log ν + μ·log π`. A curve is a line over λ at μ = 0, and where log ν is not log π a second line
over μ at the λ that is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from longtail.bundle import BiasRemoval, Bundle, CurvePoint, Popularity
from longtail.bundle.manifest import dial_words
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.history import best_of


class Setting(NamedTuple):
    """One λ (`bias_removal`) and one μ (`popularity`)."""

    bias_removal: float
    popularity: float = 0.0

    @classmethod
    def of(cls, point: CurvePoint) -> Setting:
        """Where a point of a curve was measured."""
        return cls(point.bias_removal, point.popularity)

    def __str__(self) -> str:
        return dial_words(*self)


class Dial(NamedTuple):
    """What a manifest says of the two dials: λ with the curve of both, and μ."""

    bias_removal: BiasRemoval
    popularity: Popularity = Popularity()

    @property
    def default(self) -> Setting:
        """What a request gets that names neither."""
        return Setting(self.bias_removal.default, self.popularity.default)

    @property
    def curve(self) -> list[CurvePoint]:
        """Both lines, λ's first."""
        return self.bias_removal.curve

    def measured(self, split: str, curve: list[CurvePoint]) -> Dial:
        """The same defaults with the curve of another split."""
        return self._replace(
            bias_removal=self.bias_removal.model_copy(update={"curve_split": split, "curve": curve})
        )  # fmt: skip


class Noise(NamedTuple):
    """What a curve must know of the noise that λ removes.

    Attributes:
        name: in words, for the manifest.
        constant: the same for every label, so that λ changes nothing.
        apart: not the label frequency, so that μ is a dial of its own.
    """

    name: str
    constant: bool
    apart: bool

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> Noise:
        """What λ removes from a bundle's scores."""
        apart, tree = bundle.labels.log_popularity is not None, bundle.proposal is not None
        constant = apart and bool(np.ptp(bundle.labels.log_pn) == 0)
        return cls(bundle.manifest.bias_removal.noise, constant=constant, apart=apart or tree)

    def first_line(self, grid: Sequence[float]) -> list[Setting]:
        """λ over the grid at μ = 0; λ = 0 alone if ν is the same for every label."""
        return [Setting(0.0)] if self.constant else [Setting(bias_removal) for bias_removal in grid]

    def second_line(self, grid: Sequence[float], bias_removal: float) -> list[Setting]:
        """μ over the grid but for 0 at one λ; nothing if log ν is log π."""
        return [Setting(bias_removal, popularity) for popularity in grid if popularity] if self.apart else []

    def quick(self) -> list[Setting]:
        """What training validates epochs at: 0, ½ and 1 of the dial that moves."""
        return [Setting(0.0, popularity) if self.constant else Setting(popularity) for popularity in (0.0, 0.5, 1.0)]


def lines(config: EvaluationConfig, noise: Noise, bias_removal: float) -> list[Setting]:
    """Both lines of a curve, the second at a given λ."""
    return noise.first_line(config.bias_removal) + noise.second_line(_prior_grid(config), bias_removal)


def with_default(settings: Sequence[Setting], default: Setting) -> list[Setting]:
    """The settings of a curve, and the μ that is served where the recipe's grid lacks it, as it does of μ < 0."""
    return [*settings, *([default] if default.popularity and default not in settings else [])]


def best_dial(
    measure: Callable[[list[Setting]], list[CurvePoint]], config: EvaluationConfig, noise: Noise
) -> tuple[Setting, list[CurvePoint]]:
    """The λ of the best metric at μ = 0, then the μ of the best metric there; and both lines as measured.

    Where the recipe has a floor, the best of the points that reach it; where none does, of those nearest to it.

    Args:
        measure: the curve at some settings, on validation pairs.
        config: its metric, its floor, and the grids of λ and μ.
        noise: what λ removes.
    """
    curve = measure(noise.first_line(config.bias_removal))
    bias_removal = best_of(nearest_to_floor(curve, config), config.metric).bias_removal
    if second := noise.second_line(_prior_grid(config), bias_removal):
        curve = curve + measure(second)
    return Setting.of(best_of(nearest_to_floor(curve, config), config.metric)), curve


def nearest_to_floor(curve: list[CurvePoint], config: EvaluationConfig) -> list[CurvePoint]:
    """The points of a curve that miss the recipe's floor by least, in total: by nothing if any reaches it."""
    missing = [missed(point, config) for point in curve]
    return [point for point, total in zip(curve, missing, strict=True) if total <= min(missing) + 1e-12]


def missed(point: CurvePoint, config: EvaluationConfig) -> float:
    """By how much recall of all buckets together a point misses the floor; 0 where it reaches it."""
    return sum(max(0.0, least - found) for _, found, least in against_floor(point, config))


def against_floor(point: CurvePoint, config: EvaluationConfig) -> list[tuple[str, float, float]]:
    """Bucket, its recall at the k of the metric, and the floor, of every bucket that has one."""
    k = config.metric.partition("@")[2]
    return [(bucket, point.metrics[f"recall@{k}/{bucket}"].value, least) for bucket, least in config.floor.items()]


def _prior_grid(config: EvaluationConfig) -> list[float]:
    return config.bias_removal if config.popularity is None else config.popularity
