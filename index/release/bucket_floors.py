"""Bucket floors: the least offline recall of head, torso, tail and new with which a release may be published.

RELEASES/promise.toml, every key optional:

    metric = "recall@20"      # of the release's curve, at its default λ and μ
    max_drop = 0.1            # no bucket may fall more than a tenth below CURRENT's

    [floors]                  # nor below these
    tail = 0.02

    [staged]                  # and only after so many live queries were mirrored to it
    min_queries = 1000
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.manifest import Manifest, dial_words
from longtail.index.errors import FloorsError, FloorsNotMetError
from longtail.index.release.staged import StagedFloors

FLOORS_FILE = "promise.toml"

BucketName = Literal["head", "torso", "tail", "new"]
_COMPARED = tuple(bucket for bucket in BUCKET_NAMES if bucket != "new")
"""Buckets that a largest drop holds for: which labels are new, and whether any is, differs from release to release."""
_ROUNDING = 1e-12
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class BucketFloors(BaseModel):
    """What every bucket must be given by a release that is published; anything will do unless something is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(default="recall@20", pattern=r"^[a-z_]+@[1-9][0-9]*$")
    """Metric of the offline curve, without the bucket; higher must be better."""
    max_drop: _Share | None = None
    """Share of CURRENT's value that head, torso and tail may lose: at 0.1, 0.020 may become 0.018."""
    floors: dict[BucketName, _Share] = {}
    """Least value of a bucket, whatever CURRENT's is."""
    staged: StagedFloors | None = None
    """What a release must have shown on mirrored queries; None: it need not be staged."""

    @classmethod
    def read(cls, root: Path, *, floors: Sequence[str] = (), max_drop: str | None = None) -> BucketFloors:
        """The floors of a directory of releases, and what a command line changes about them.

        Args:
            root: where `promise.toml` may be.
            floors: `BUCKET=VALUE` each; other buckets keep the file's.
            max_drop: `10%` or `0.1`.

        Raises:
            FloorsError: a key or value that there is not; names the file or the option.
        """
        file = root / FLOORS_FILE
        try:
            asked = _checked(tomllib.loads(file.read_text(encoding="utf-8")), str(file))
        except (FileNotFoundError, NotADirectoryError):
            asked = cls()
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FloorsError(f"{file}: expected TOML, {error}") from error
        for floor in floors:
            bucket, _, value = floor.partition("=")
            option = f"--floor {floor}"
            option_floors = _checked({"floors": {bucket: _number(value, option)}}, option)
            asked = asked.model_copy(update={"floors": asked.floors | option_floors.floors})
        if max_drop is not None:
            option = f"--max-drop {max_drop}"
            option_floors = _checked({"max_drop": _number(max_drop, option)}, option)
            asked = asked.model_copy(update={"max_drop": option_floors.max_drop})
        return asked

    @property
    def empty(self) -> bool:
        """Whether no floor and no largest drop of offline recall is set."""
        return self.max_drop is None and not self.floors

    def __str__(self) -> str:
        if self.empty:
            return "none configured"
        parts = [f"{bucket} at least {self.floors[bucket]:g}" for bucket in BUCKET_NAMES if bucket in self.floors]
        if self.max_drop is not None:
            parts.append(f"none of {', '.join(_COMPARED)} more than {_percent(self.max_drop)} below CURRENT's")
        return f"{self.metric}: {', '.join(parts)}"

    def compare(self, after: BucketMetrics, before: BucketMetrics | None) -> FloorsReport:
        """Compare a release with its floors.

        Args:
            after: the release.
            before: CURRENT's; None if nothing is published or CURRENT cannot be read.
        """
        unmet = []
        compared = _COMPARED if self.max_drop is not None else ()
        for bucket in (bucket for bucket in BUCKET_NAMES if bucket in compared or bucket in self.floors):
            bounds = [(self.floors[bucket], "the floor")] if bucket in self.floors else []
            if bucket in compared and self.max_drop is not None and before is not None and bucket in before.buckets:
                was = before.buckets[bucket]
                bounds.append((was * (1 - self.max_drop), f"{_percent(self.max_drop)} below {before.name}'s {was:.4g}"))
            found = after.buckets.get(bucket)
            if found is None:
                unmet.append(
                    f"expected {self.metric}/{bucket} in the release's curve, found {', '.join(after.known) or 'none'}"
                )
            elif bounds and found < max(bounds)[0] - _ROUNDING:
                least, why = max(bounds)
                unmet.append(f"{bucket} expected at least {least:.4g} ({why}), found {found:.4g}")
        return FloorsReport(self, after, before, unmet)


@dataclass(frozen=True)
class BucketMetrics:
    """One metric of a release, by bucket, at its default λ and μ.

    Attributes:
        name: the release's name.
        where: λ of the curve's nearest point, and its μ unless it is 0, in words; None without a curve.
        buckets: the metric by bucket; empty where the curve does not have it.
        known: the metrics by bucket that the curve has instead, such as `recall@10`.
    """

    name: str
    where: str | None
    buckets: dict[str, float]
    known: list[str]

    @classmethod
    def at_default(cls, name: str, bundle: Manifest, metric: str) -> BucketMetrics:
        """Read a release's offline curve at the point nearest its default λ and μ."""
        dial, prior = bundle.bias_removal, bundle.popularity
        if not dial.curve:
            return cls(name, None, {}, [])
        point = min(
            dial.curve,
            key=lambda point: abs(point.bias_removal - dial.default) + abs(point.popularity - prior.default),
        )
        buckets = {
            bucket: point.metrics[f"{metric}/{bucket}"].value
            for bucket in BUCKET_NAMES
            if f"{metric}/{bucket}" in point.metrics
        }
        where = dial_words(point.bias_removal, point.popularity)
        return cls(name, where, buckets, sorted({key.partition("/")[0] for key in point.metrics if "/" in key}))


@dataclass(frozen=True)
class FloorsReport:
    """How a release stands to its floors.

    Attributes:
        floors: what was asked.
        after: the release's figures.
        before: CURRENT's, if there are any.
        unmet: what is below its floor, expected and found, one sentence for each bucket; empty if nothing is.
    """

    floors: BucketFloors
    after: BucketMetrics
    before: BucketMetrics | None
    unmet: list[str]

    def check(self) -> None:
        """Refuse a release that is below a floor.

        Raises:
            FloorsNotMetError: names every bucket that gets less than its floor.
        """
        if self.unmet:
            at = "" if self.after.where is None else f" at {self.after.where}"
            raise FloorsNotMetError(
                f"{self.after.name} is below its bucket floors, {self.floors.metric}{at}: {'; '.join(self.unmet)}; "
                "CURRENT stays as it was, and --force publishes all the same",
                unmet=self.unmet,
            )

    def lines(self) -> list[str]:
        """The floors and every bucket's figure, old → new, for people."""
        lines = [f"bucket floors: {self.floors}"]
        old = {} if self.before is None else self.before.buckets
        figures = [
            f"{bucket} {f'{old[bucket]:.4f} → ' if bucket in old else ''}{value:.4f}"
            for bucket, value in self.after.buckets.items()
        ]
        if figures:
            lines.append(f"{self.floors.metric} at {self.after.where}: {', '.join(figures)}")
        if self.floors.max_drop is not None and not old:
            lines.append(f"no drop can be told: nothing is published that has {self.floors.metric} by bucket")
        return lines


def _checked(content: dict[str, Any], where: str) -> BucketFloors:
    try:
        return BucketFloors.model_validate(content)
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False):
            key = ".".join(str(part) for part in fault["loc"] if part != "[key]")
            shown = "" if isinstance(fault["input"], dict) else f", received {fault['input']!r}"
            message = "is no key of promise.toml" if fault["type"] == "extra_forbidden" else fault["msg"]
            faults.append(f"{key}: {message}{shown}")
        raise FloorsError(
            f"{where}: expected metric, max_drop, staged and floors of {', '.join(BUCKET_NAMES)}; {'; '.join(faults)}"
        ) from error


def _number(text: str, option: str) -> float:
    """`10%` or `0.1` as 0.1."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise FloorsError(f"{option}: expected a number or a percentage, received {text!r}") from None


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
