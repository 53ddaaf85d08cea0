"""The bucket promise: what head, torso and tail must be given, offline, by a release that is published.

RELEASES/promise.toml, every key optional:

    metric = "recall@20"      # of the release's curve, at its default λ
    max_drop = 0.1            # no bucket may fall more than a tenth below CURRENT's

    [floors]                  # nor below these
    tail = 0.02
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.manifest import BiasRemoval
from longtail.index.errors import PromiseBrokenError, PromiseError

PROMISE = "promise.toml"

BucketName = Literal["head", "torso", "tail"]
_ROUNDING = 1e-12
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Promise(BaseModel):
    """What a release is held to; nothing unless something is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(default="recall@20", pattern=r"^[a-z_]+@[1-9][0-9]*$")
    """Metric of the offline curve, without the bucket; higher must be better."""
    max_drop: _Share | None = None
    """Share of CURRENT's value that a bucket may lose: at 0.1, 0.020 may become 0.018."""
    floors: dict[BucketName, _Share] = {}
    """Least value of a bucket, whatever CURRENT's is."""

    @classmethod
    def of(cls, root: Path, *, floors: Sequence[str] = (), max_drop: str | None = None) -> Promise:
        """The promise of a directory of releases, and what a command line changes about it.

        Args:
            root: where `promise.toml` may be.
            floors: `BUCKET=VALUE` each; other buckets keep the file's.
            max_drop: `10%` or `0.1`.

        Raises:
            PromiseError: a key or value that no promise has; names the file or the option.
        """
        file = root / PROMISE
        try:
            promise = _checked(tomllib.loads(file.read_text(encoding="utf-8")), str(file))
        except (FileNotFoundError, NotADirectoryError):
            promise = cls()
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PromiseError(f"{file}: expected TOML, {error}") from error
        for floor in floors:
            bucket, _, value = floor.partition("=")
            option = f"--floor {floor}"
            asked = _checked({"floors": {bucket: _number(value, option)}}, option)
            promise = promise.model_copy(update={"floors": promise.floors | asked.floors})
        if max_drop is not None:
            option = f"--max-drop {max_drop}"
            asked = _checked({"max_drop": _number(max_drop, option)}, option)
            promise = promise.model_copy(update={"max_drop": asked.max_drop})
        return promise

    @property
    def empty(self) -> bool:
        """Whether it promises nothing."""
        return self.max_drop is None and not self.floors

    def __str__(self) -> str:
        if self.empty:
            return "none configured"
        parts = [f"{bucket} at least {self.floors[bucket]:g}" for bucket in BUCKET_NAMES if bucket in self.floors]
        if self.max_drop is not None:
            parts.append(f"no bucket more than {_percent(self.max_drop)} below CURRENT's")
        return f"{self.metric}: {', '.join(parts)}"

    def judge(self, after: Measured, before: Measured | None) -> Verdict:
        """Compare a release with the promise.

        Args:
            after: the release.
            before: CURRENT's; None if nothing is published or CURRENT cannot be read.
        """
        broken = []
        for bucket in BUCKET_NAMES if self.max_drop is not None else self.floors:
            bounds = [(self.floors[bucket], "the floor")] if bucket in self.floors else []
            if self.max_drop is not None and before is not None and bucket in before.buckets:
                was = before.buckets[bucket]
                bounds.append((was * (1 - self.max_drop), f"{_percent(self.max_drop)} below {before.name}'s {was:.4g}"))
            found = after.buckets.get(bucket)
            if found is None:
                broken.append(
                    f"expected {self.metric}/{bucket} in the release's curve, found {', '.join(after.known) or 'none'}"
                )
            elif bounds and found < max(bounds)[0] - _ROUNDING:
                least, why = max(bounds)
                broken.append(f"{bucket} expected at least {least:.4g} ({why}), found {found:.4g}")
        return Verdict(self, after, before, broken)


@dataclass(frozen=True)
class Measured:
    """One metric of a release at its default λ.

    Attributes:
        name: of the release.
        bias_removal: λ of the curve's nearest point; None without a curve.
        buckets: the metric by bucket; empty where the curve does not have it.
        known: the metrics by bucket that the curve has instead, such as `recall@10`.
    """

    name: str
    bias_removal: float | None
    buckets: dict[str, float]
    known: list[str]

    @classmethod
    def of(cls, name: str, dial: BiasRemoval, metric: str) -> Measured:
        """Read a release's offline curve."""
        if not dial.curve:
            return cls(name, None, {}, [])
        point = min(dial.curve, key=lambda point: abs(point.bias_removal - dial.default))
        buckets = {
            bucket: point.metrics[f"{metric}/{bucket}"].value
            for bucket in BUCKET_NAMES
            if f"{metric}/{bucket}" in point.metrics
        }
        return cls(
            name, point.bias_removal, buckets, sorted({key.partition("/")[0] for key in point.metrics if "/" in key})
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a release keeps the promise.

    Attributes:
        promise: what was asked.
        after: the release's figures.
        before: CURRENT's, if there are any.
        broken: what is not kept, expected and found, one sentence for each bucket.
    """

    promise: Promise
    after: Measured
    before: Measured | None
    broken: list[str]

    def check(self) -> None:
        """Refuse the release.

        Raises:
            PromiseBrokenError: names every bucket that gets less than was promised.
        """
        if self.broken:
            at = "" if self.after.bias_removal is None else f" at λ = {self.after.bias_removal:g}"
            raise PromiseBrokenError(
                f"{self.after.name} breaks the bucket promise, {self.promise.metric}{at}: {'; '.join(self.broken)}; "
                "CURRENT stays as it was, and --force publishes all the same",
                broken=self.broken,
            )

    def lines(self) -> list[str]:
        """The promise and every bucket's figure, old → new, for people."""
        lines = [f"promise: {self.promise}"]
        old = {} if self.before is None else self.before.buckets
        figures = [
            f"{bucket} {f'{old[bucket]:.4f} → ' if bucket in old else ''}{value:.4f}"
            for bucket, value in self.after.buckets.items()
        ]
        if figures:
            lines.append(f"{self.promise.metric} at λ = {self.after.bias_removal:g}: {', '.join(figures)}")
        if self.promise.max_drop is not None and not old:
            lines.append(f"no drop can be told: nothing is published that has {self.promise.metric} by bucket")
        return lines


def _checked(content: dict[str, Any], where: str) -> Promise:
    try:
        return Promise.model_validate(content)
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False):
            key = ".".join(str(part) for part in fault["loc"] if part != "[key]")
            shown = "" if isinstance(fault["input"], dict) else f", received {fault['input']!r}"
            message = "is no key of a promise" if fault["type"] == "extra_forbidden" else fault["msg"]
            faults.append(f"{key}: {message}{shown}")
        raise PromiseError(
            f"{where}: expected metric, max_drop and floors of head, torso and tail; {'; '.join(faults)}"
        ) from error


def _number(text: str, option: str) -> float:
    """`10%` or `0.1` as 0.1."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise PromiseError(f"{option}: expected a number or a percentage, received {text!r}") from None


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
