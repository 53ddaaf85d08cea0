"""Check bucket floors: the least offline recall of head, torso, tail and new that a published release must have.

RELEASES/promise.toml, every key optional:

    metric = "recall@20"      # of the release's curve, at its default λ and μ
    max_drop = 0.1            # no bucket may fall more than a tenth below CURRENT's

    [floors]                  # nor below these
    tail = 0.02
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.manifest import Manifest, dial_words
from longtail.bundle.one_line import one_line
from longtail.bundle.validation import refused
from longtail.index.errors import LongtailIndexError

FLOORS_FILE = "promise.toml"

BucketName = Literal["head", "torso", "tail", "new"]
_COMPARED = tuple(bucket for bucket in BUCKET_NAMES if bucket != "new")
"""Buckets that `max_drop` applies to; the labels of `new` differ from release to release, or there are none."""
_ROUNDING = 1e-12
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class BucketFloors(BaseModel):
    """Least metric of every bucket that a published release must reach; without settings every release passes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(default="recall@20", pattern=r"^[a-z_]+@[1-9][0-9]*$")
    """Metric of the offline curve, without the bucket; higher must be better."""
    max_drop: _Share | None = None
    """Share of CURRENT's value that head, torso and tail may lose: at 0.1, 0.020 may become 0.018."""
    floors: dict[BucketName, _Share] = {}
    """Least value of a bucket, independent of CURRENT's value."""

    @classmethod
    def read(cls, file: Path) -> BucketFloors:
        """Read a `promise.toml`; without the file every release passes. Raises LongtailIndexError."""
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise LongtailIndexError(f"{file}: expected TOML, {error}") from error
        except ValidationError as error:
            faults = refused(error.errors(include_url=False), cls)
            raise LongtailIndexError(f"{file}: {'; '.join(map(str, faults))}") from error

    def __str__(self) -> str:
        if self.max_drop is None and not self.floors:
            return "none configured"
        parts = [f"{bucket} at least {self.floors[bucket]:g}" for bucket in BUCKET_NAMES if bucket in self.floors]
        if self.max_drop is not None:
            parts.append(f"none of {', '.join(_COMPARED)} more than {_percent(self.max_drop)} below CURRENT's")
        return f"{self.metric}: {', '.join(parts)}"

    def compare(self, after: Manifest, before: Manifest | None) -> Report:
        """Compare a release's bundle with the floors, and with CURRENT's bundle unless that is None."""
        where, found, known = _at_default(after, self.metric)
        old = {} if before is None else _at_default(before, self.metric)[1]
        unmet = []
        for bucket in BUCKET_NAMES:
            bounds = [(self.floors[bucket], "the floor")] if bucket in self.floors else []
            compared = self.max_drop is not None and bucket in _COMPARED
            if compared and self.max_drop is not None and bucket in old:
                least = old[bucket] * (1 - self.max_drop)
                bounds.append((least, f"{_percent(self.max_drop)} below CURRENT's {old[bucket]:.4g}"))
            if (bounds or compared) and bucket not in found:
                unmet.append(f"expected {self.metric}/{bucket} in the curve, found {', '.join(known) or 'none'}")
            elif bounds and found[bucket] < max(bounds)[0] - _ROUNDING:
                least, why = max(bounds)
                unmet.append(
                    f"{bucket}: expected {self.metric} of at least {least:.4g} ({why}), found {found[bucket]:.4g} at "
                    f"{where}"
                )
        lines = [f"bucket floors: {self}"]
        if found:
            figures = [
                f"{bucket} {f'{old[bucket]:.4f} → ' if bucket in old else ''}{value:.4f}"
                for bucket, value in found.items()
            ]
            lines.append(f"{self.metric} at {where}: {', '.join(figures)}")
        if self.max_drop is not None and not old:
            lines.append(f"no drop can be told: nothing is published that has {self.metric} by bucket")
        return Report(lines, unmet)


@dataclass(frozen=True)
class Report:
    """Result of a check: figures for people, and a sentence for each requirement that is not met."""

    lines: list[str]
    unmet: list[str]

    __repr__ = one_line


def _at_default(bundle: Manifest, metric: str) -> tuple[str, dict[str, float], list[str]]:
    """Read the point of the offline curve nearest to the default λ, μ, ω and β.

    Returns the point in words, the metric there by bucket, and the names of all metrics that the curve has by bucket.
    """
    dial, prior = bundle.bias_removal, bundle.popularity
    together = 0.0 if bundle.cooccurrence is None else bundle.cooccurrence.default
    if not dial.curve:
        return "", {}, []
    point = min(
        dial.curve,
        key=lambda point: (
            abs(point.bias_removal - dial.default)
            + abs(point.popularity - prior.default)
            + abs(point.cooccurrence - together)
            + sum(abs(point.bonus.get(bucket, 0.0) - beta.default) for bucket, beta in bundle.bonus.items())
        ),
    )
    found = {
        bucket: point.metrics[f"{metric}/{bucket}"].value
        for bucket in BUCKET_NAMES
        if f"{metric}/{bucket}" in point.metrics
    }
    known = sorted({key.partition("/")[0] for key in point.metrics if "/" in key})
    return dial_words(point.bias_removal, point.popularity, point.cooccurrence, point.bonus), found, known


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
