"""Promises of quality: floors, ceilings and the largest drop of metrics, read from `promise.toml`.

Every key is optional:

    metric = "recall@20"             # of a bucket's name, and of max_drop
    max_drop = 0.1                   # share that head, torso and tail may lose; needs a published release

    [floors]                         # at least
    tail = 0.02
    "ndcg@20" = 0.1

    [ceilings]                       # at most
    "gini@20" = 0.9

The other keys need an audit's figures:

    [groups.history.new.floors]      # of a group of queries; ceilings too
    "recall@20" = 0.05

    [over.popularity]                # least difference to a baseline
    "recall@20" = 0.0

    [in_each_list.2]                 # least share of lists with at least two labels of a bucket
    tail = 0.99

    [findings]                       # most entries, pairs or queries
    seen_listed = 0
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from longtail.bundle.errors import BundleError
from longtail.bundle.frequency import BUCKET_NAMES
from longtail.bundle.manifest import CurvePoint, Interval, Manifest, dial_words
from longtail.bundle.one_line import one_line
from longtail.bundle.validation import describe_problems, nearest

PROMISE_FILE = "promise.toml"
"""Name of the file in a directory of releases."""
_AUDIT_KEYS = ("groups", "over", "in_each_list", "findings")
_ROUNDING = 1e-12


class Bounds(BaseModel):
    """Bound values of metrics, by full names or buckets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    floors: dict[str, FiniteFloat] = {}
    """Least values."""
    ceilings: dict[str, FiniteFloat] = {}
    """Most values."""


class QualityPromise(Bounds):
    """Bound the figures of a release or of an audit; without keys everything passes."""

    metric: str | None = Field(default=None, pattern=r"^[a-z_]+@[1-9][0-9]*$")
    """Metric of a bucket's name; by default recall@20 of a release, recall at the first k of an audit."""
    max_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of CURRENT's value that head, torso and tail may lose: at 0.1, 0.020 may become 0.018."""
    groups: dict[str, dict[str, Bounds]] = {}
    """Bounds by column and value of groups of queries."""
    over: dict[str, dict[str, FiniteFloat]] = {}
    """Least differences to a baseline, by its name and the metric's."""
    in_each_list: dict[Annotated[int, Field(ge=1)], dict[str, FiniteFloat]] = {}
    """Least share of lists with at least N labels of a bucket, by N and the bucket's name."""
    findings: dict[str, int] = {}
    """Most of what a finding counts."""

    @classmethod
    def read(cls, file: Path, refused_keys: Mapping[str, str] = MappingProxyType({})) -> QualityPromise:
        """Read a promise; raises BundleError.

        Args:
            refused_keys: reasons against keys that the caller cannot judge, by key.
        """
        try:
            promise = cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise BundleError(f"{file}: expected a promise: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BundleError(f"{file}: expected TOML: {error}") from error
        except ValidationError as error:
            faults = describe_problems(error.errors(include_url=False), cls)
            raise BundleError(f"{file}: {'; '.join(map(str, faults))}") from error
        for key in refused_keys.keys() & promise.model_fields_set:
            raise BundleError(f"{file}: {key!r} is not allowed because {refused_keys[key]}")
        return promise

    @classmethod
    def of_releases(cls, file: Path) -> QualityPromise:
        """Read the promise of a directory of releases; an empty one without the file. Raises BundleError."""
        reason = "a release's curve has no such figures; use longtail-audit"
        return cls.read(file, dict.fromkeys(_AUDIT_KEYS, reason)) if file.exists() else cls()

    def bounds(self, bounds: Bounds, default: str) -> list[tuple[str, str, str, float]]:
        """List key, metric, sign and bound of floors and ceilings.

        Args:
            default: metric of a bucket's name, unless the promise has one.
        """
        return [
            (key, f"{self.metric or default}/{name}" if name in BUCKET_NAMES else name, sign, bound)
            for key, sign, values in (("floors", ">=", bounds.floors), ("ceilings", "<=", bounds.ceilings))
            for name, bound in values.items()
        ]

    def judge_release(self, release: Manifest, published: Manifest | None) -> tuple[list[str], list[str]]:
        """Compare a bundle's curve at its defaults with all bounds.

        Returns:
            Lines of figures for people, and a sentence for each bound that is not met.
        """
        metric, point = self.metric or "recall@20", _default_point(release)
        metrics, scope = ({}, "") if point is None else (point.metrics, _words(point))
        before = None if published is None else _default_point(published)
        old = {} if before is None else _by_bucket(before, metric)
        bounds = [(*bound, "") for bound in self.bounds(self, metric)]
        if self.max_drop is not None:
            # The labels of `new` differ from release to release, so that their recall may fall.
            for bucket in BUCKET_NAMES[:3]:
                least = old.get(bucket, 0.0) * (1 - self.max_drop)
                reason = f"{100 * self.max_drop:g} % below CURRENT's {old.get(bucket, 0.0):.4g}"
                bounds.append(("max_drop", f"{metric}/{bucket}", ">=", least, reason))
        verdicts, unmet = [], []
        for key, name, sign, bound, reason in bounds:
            if name not in metrics:
                unmet.append(missing_figure(key, name, metrics, "the release's curve"))
            elif key != "max_drop" or name.rpartition("/")[2] in old:
                verdicts.append(PromiseVerdict(scope, name, sign, bound, metrics[name], reason))
        lines = [*map(str, verdicts)]
        if point is not None and (new := _by_bucket(point, metric)):
            figures = (f"{name} {f'{old[name]:.4f} → ' if name in old else ''}{it:.4f}" for name, it in new.items())
            lines.insert(0, f"{metric} at {scope}: {', '.join(figures)}")
        if self.max_drop is not None and not old:
            lines.append(f"max_drop is not judged because no release with {metric} by bucket is published")
        return lines, [*unmet, *(str(verdict) for verdict in verdicts if not verdict.is_kept)]


@dataclass(frozen=True)
class PromiseVerdict:
    """Compare a bound with its figure.

    Attributes:
        scope: a group, `over BASELINE`, `in each list at least N`, `findings`, a setting, or empty for all queries.
        reason: origin of the bound, if the promise does not name the bound itself.
    """

    scope: str
    name: str
    sign: str
    bound: float
    figure: Interval
    reason: str = ""

    __repr__ = one_line

    @property
    def is_kept(self) -> bool:
        """Return whether the value keeps the promise; its interval does not matter."""
        value = self.figure.value
        # A figure of 0.1 that was computed another way must not break a promise of 0.1.
        return value >= self.bound - _ROUNDING if self.sign == ">=" else value <= self.bound + _ROUNDING

    @property
    def by_chance(self) -> bool:
        """Return whether the 95 % interval contains the bound."""
        low, high = self.figure.low, self.figure.high
        return low is not None and high is not None and low <= self.bound <= high

    def __str__(self) -> str:
        low, high = self.figure.low, self.figure.high
        bounds = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
        scope = f"{self.scope}: " if self.scope else ""
        verdict = f"{'kept' if self.is_kept else 'broken'}{', within chance' if self.by_chance else ''}"
        value = f"{self.figure.value:,.0f}" if self.scope == "findings" else f"{self.figure.value:.4f}"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{verdict}: {scope}{self.name} {value}{bounds}, promised {self.sign} {self.bound:.4g}{reason}"

    def record(self) -> dict[str, Any]:
        """Return the verdict's entry in `metrics.json`."""
        figure = self.figure.model_dump()
        return asdict(self) | {"figure": figure, "kept": self.is_kept, "by_chance": self.by_chance}


def missing_figure(key: str, name: str, names: Iterable[str], subject: str) -> str:
    """Explain a missing figure, with the nearest measured name."""
    near = nearest(name, names, alike=0)
    hint = "" if near is None else f"; use one that was measured, such as {near!r}"
    return f"promise: {key}: {name!r} is not allowed because {subject} has no such figure{hint}"


def _default_point(bundle: Manifest) -> CurvePoint | None:
    """Return the curve's point nearest to the defaults; None without a curve."""
    weight = 0.0 if bundle.cooccurrence is None else bundle.cooccurrence.default
    return min(
        bundle.bias_removal.curve,
        key=lambda point: (
            abs(point.bias_removal - bundle.bias_removal.default)
            + abs(point.popularity - bundle.popularity.default)
            + abs(point.cooccurrence - weight)
            + sum(abs(point.bonus.get(bucket, 0.0) - beta.default) for bucket, beta in bundle.bonus.items())
        ),
        default=None,
    )


def _words(point: CurvePoint) -> str:
    return dial_words(point.bias_removal, point.popularity, point.cooccurrence, point.bonus)


def _by_bucket(point: CurvePoint, metric: str) -> dict[str, float]:
    names = {bucket: f"{metric}/{bucket}" for bucket in BUCKET_NAMES}
    return {bucket: point.metrics[name].value for bucket, name in names.items() if name in point.metrics}
