"""Check figures against a promise: least and most values of metrics, differences and findings.

A promise is TOML, every key optional:

    metric = "recall@20"             # what a bucket's name stands for

    [floors]                         # at least
    tail = 0.02
    "ndcg@20" = 0.1

    [ceilings]                       # at most
    "gini@20" = 0.9

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
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from longtail.bundle import BUCKET_NAMES, Interval
from longtail.bundle.validation import nearest, refused
from longtail.trainer.audit.measure import BEFORE_OWN_TRAIN, BEFORE_TRAIN_ENDS, Audit
from longtail.trainer.config.base import Section
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.metrics import interval_of_share

_ROUNDING = 1e-12


class Bounds(Section):
    """Bound values of metrics, by full names or buckets."""

    floors: dict[str, float] = Field(default_factory=dict)
    ceilings: dict[str, float] = Field(default_factory=dict)


class Promise(Bounds):
    """Bound the figures of an audit."""

    metric: str | None = None
    """What a bucket's name stands for, such as `recall@20`; by default recall at the first k."""
    groups: dict[str, dict[str, Bounds]] = Field(default_factory=dict)
    """By column and value of groups of queries."""
    over: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Least difference to a baseline, by its name and the metric's."""
    in_each_list: dict[Annotated[int, Field(ge=1)], dict[str, float]] = Field(default_factory=dict)
    """Least share of lists with at least so many labels of a bucket, by the number and the bucket's name."""
    findings: dict[str, int] = Field(default_factory=dict)
    """Most of what a finding counts."""

    @classmethod
    def read(cls, file: Path) -> Promise:
        """Read a promise; raises DataError."""
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise DataError(f"{file}: expected a promise: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: expected TOML: {error}") from error
        except ValidationError as error:
            faults = refused(error.errors(include_url=False), cls, {"max_drop": "over"})
            raise DataError(f"{file}: {'; '.join(map(str, faults))}") from error

    def judge(self, audit: Audit) -> list[Judged]:
        """Compare every promise with its figure; raises DataError for one that has none."""
        judged = self._bounded("", self, audit.metrics, audit)
        groups = {group.name: group for group in audit.groups}
        for column, values in self.groups.items():
            for value, bounds in values.items():
                name = f"{column} = {value}"
                _known("groups", name, groups)
                judged += self._bounded(name, bounds, groups[name].metrics, audit)
        differences, notes = {}, audit.notes
        if audit.compared is not None:
            differences, notes = audit.compared.differences, audit.compared.notes
        for baseline, least in self.over.items():
            if why := next((note for note in notes if note.startswith(f"{baseline} was left out")), None):
                raise DataError(f"promise: over: {baseline!r} is not allowed because {why}")
            _known("over", baseline, differences)
            for metric, bound in least.items():
                _measured(f"over.{baseline}", metric, differences[baseline], audit.metrics)
                judged.append(Judged(f"over {baseline}", metric, ">=", bound, differences[baseline][metric]))
        for n, shares in self.in_each_list.items():
            for bucket, bound in shares.items():
                _known(f"in_each_list.{n}", bucket, audit.listed)
                kept_Q = (audit.listed[bucket] >= n).astype(np.float64)
                share = interval_of_share(kept_Q, np.ones_like(kept_Q))
                judged.append(Judged(f"in each list at least {n}", bucket, ">=", bound, share))
        findings = {finding.name: finding.count for finding in audit.findings}
        for name, most in self.findings.items():
            if name in (BEFORE_TRAIN_ENDS, BEFORE_OWN_TRAIN) and name not in findings:
                raise DataError(
                    f"promise: findings: {name!r} is not allowed because this audit reads no times; use --timestamp"
                )
            _known("findings", name, findings)
            judged.append(Judged("findings", name, "<=", most, Interval(value=findings[name])))
        return judged

    def _bounded(self, where: str, bounds: Bounds, metrics: Mapping[str, Interval], audit: Audit) -> list[Judged]:
        judged = []
        for key, sign, values in (("floors", ">=", bounds.floors), ("ceilings", "<=", bounds.ceilings)):
            for short, bound in values.items():
                name = f"{self.metric or audit.metric}/{short}" if short in BUCKET_NAMES else short
                place = f"{where}: {key}" if where else key
                _measured(place, name, metrics, metrics)
                judged.append(Judged(where, name, sign, bound, metrics[name]))
        return judged


@dataclass(frozen=True)
class Judged:
    """Compare a promise with its figure.

    Attributes:
        where: a group, `over BASELINE`, `in each list at least N`, `findings`, or empty for all queries.
    """

    where: str
    name: str
    sign: str
    bound: float
    figure: Interval

    @property
    def kept(self) -> bool:
        """Return whether the value keeps the promise; its interval does not matter."""
        value = self.figure.value
        return value >= self.bound - _ROUNDING if self.sign == ">=" else value <= self.bound + _ROUNDING

    @property
    def by_chance(self) -> bool:
        """Return whether the 95 % interval holds the bound, so that other queries could say otherwise."""
        low, high = self.figure.low, self.figure.high
        return low is not None and high is not None and low <= self.bound <= high

    def __str__(self) -> str:
        low, high = self.figure.low, self.figure.high
        between = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
        of = f"{self.where}: " if self.where else ""
        chance = ", within chance" if self.by_chance else ""
        verdict = "kept" if self.kept else "broken"
        value = f"{self.figure.value:,.0f}" if self.where == "findings" else f"{self.figure.value:.4f}"
        return f"{verdict}{chance}: {of}{self.name} {value}{between}, promised {self.sign} {self.bound:g}"

    def record(self) -> dict[str, Any]:
        """Return what `metrics.json` says of it."""
        figure = self.figure.model_dump()
        return asdict(self) | {"figure": figure, "kept": self.kept, "by_chance": self.by_chance}


def _measured(where: str, name: str, names: Iterable[str], metrics: Mapping[str, Interval]) -> None:
    """Raise DataError for a metric without a figure, or of a bucket without test pairs."""
    _known(where, name, names)
    metric, _, rest = name.partition("@")
    if metric in ("recall", "balanced_error") and "/" in rest and metrics[f"recall@{rest}"].high == 0:
        raise DataError(f"promise: {where}: {name} is not allowed because no test pair is there to find")


def _known(where: str, name: str, names: Iterable[str]) -> None:
    """Raise DataError for a name without a figure, with the nearest that has one."""
    names = [*names]
    if name not in names:
        near = nearest(name, names, alike=0)
        hint = "" if near is None else f"; use one that was measured, such as {near!r}"
        raise DataError(f"promise: {where}: {name!r} is not allowed because this audit has no such figure{hint}")
