"""What a staged release answered to a share of live queries, beside the one that served: counts, figures and floors.

A service writes the counts, `STATE/staged/WORKER.json` for each of its processes; `publish` and people read them here.

Legend: bucket lists are of head, torso, tail and new, in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.bundle import BUCKET_NAMES, replace_file

STAGED_COUNTS = "staged"
"""Directory of the counts in a service's state."""
_Z = 1.96
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_ByBucket = Annotated[list[int], Field(min_length=len(BUCKET_NAMES), max_length=len(BUCKET_NAMES))]


class StagedCounts(BaseModel):
    """Sums over mirrored queries, which add up over processes."""

    model_config = ConfigDict(extra="forbid")

    staged: str
    """The release that was asked unseen."""
    current: str
    """The one that served."""
    queries: int = 0
    refused: int = 0
    """Of them, those that the staged release could not answer."""
    reason: str | None = None
    """Why it could not answer the first."""
    skipped: int = 0
    """Queries that were to be mirrored while the mirror was too busy."""
    overlap: float = 0.0
    """Σ of the share of the labels served that the staged release answers, too."""
    exposures: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Labels that it answered, by its own buckets."""
    exposures_of_current: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    positives: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Labels of organic choices, by the served release's buckets."""
    hits_of_both: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    hits: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Of them, those that the staged release alone answers."""
    hits_of_current: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Those that the served one alone answers."""

    def plus(self, other: StagedCounts) -> Self:
        """The sum of two processes' counts."""
        sums = {
            name: [a + b for a, b in zip(mine, theirs, strict=True)] if isinstance(mine, list) else mine + theirs
            for name in type(self).model_fields
            if name not in ("staged", "current", "reason")
            for mine, theirs in [(getattr(self, name), getattr(other, name))]
        }
        return self.model_copy(update=sums | {"reason": self.reason or other.reason})

    def write(self, state: Path, worker: int) -> None:
        """Replace the counts of one process; raises OSError."""
        (state / STAGED_COUNTS).mkdir(parents=True, exist_ok=True)
        replace_file(state / STAGED_COUNTS / f"{worker}.json", self.model_dump_json().encode())

    @classmethod
    def read(cls, path: Path) -> StagedCounts | None:
        """The counts of one process; None if there are none that can be read."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    @classmethod
    def read_all(cls, state: Path, staged: str, current: str) -> StagedCounts:
        """Get the counts of one release against another, of all processes of a service."""
        total = cls(staged=staged, current=current)
        for path in sorted((state / STAGED_COUNTS).glob("*.json")):
            found = cls.read(path)
            if found is not None and (found.staged, found.current) == (staged, current):
                total = total.plus(found)
        return total

    def figures(self) -> dict[str, object]:
        """What GET /v1/release/staged says, but for the request's id; None where nothing can be told yet."""
        answered = self.queries - self.refused
        return {
            "staged": self.staged,
            "current": self.current,
            "queries": self.queries,
            "refused": {"queries": self.refused, "reason": self.reason},
            "skipped": self.skipped,
            "overlap": None if not answered else self.overlap / answered,
            "exposure": {
                bucket: {"staged": _share(self.exposures, place), "current": _share(self.exposures_of_current, place)}
                for place, bucket in enumerate(BUCKET_NAMES)
            },
            "organic_recall": {bucket: self._recall(places) for bucket, places in _PLACES.items()},
        }

    def lines(self) -> list[str]:
        """Write the figures for people."""
        answered = self.queries - self.refused
        lines = [f"{self.staged} beside {self.current}: {self.queries:,} queries mirrored, {self.refused:,} refused"]
        if self.skipped:
            lines.append(f"{self.skipped:,} more were left out: the mirror was busy")
        if self.reason:
            lines.append(f"first refusal: {self.reason}")
        if answered:
            lines.append(f"overlap: {self.overlap / answered:.3f}")
            shares = [
                f"{bucket} {_percent(self.exposures_of_current, place)} → {_percent(self.exposures, place)}"
                for place, bucket in enumerate(BUCKET_NAMES)
            ]
            lines.append(f"exposure: {', '.join(shares)}")
        for bucket, places in _PLACES.items():
            if (change := self.recall_change(places)) is not None:
                positives = sum(self.positives[place] for place in places)
                difference = f"{change[0]:.4f} {change[1]:+.4f} ± {change[2]:.4f}"
                lines.append(f"organic recall, {bucket}: {difference} ({positives:,} choices)")
        return lines

    def recall_change(self, places: Iterable[int]) -> tuple[float, float, float] | None:
        """Organic recall of some buckets: the served release's, the staged one's less it, and 1.96 standard errors of
        the difference, which is paired; None without choices.
        """
        places = list(places)
        positives = sum(self.positives[place] for place in places)
        if not positives:
            return None
        gained, lost, both = (
            sum(counts[place] for place in places) for counts in (self.hits, self.hits_of_current, self.hits_of_both)
        )
        difference = (gained - lost) / positives
        variance = max(0.0, (gained + lost) / positives - difference**2)
        return (both + lost) / positives, difference, _Z * math.sqrt(variance / positives)

    def _recall(self, places: list[int]) -> dict[str, object]:
        found = self.recall_change(places)
        if found is None:
            return {"positives": 0, "staged": None, "current": None, "difference": None, "interval": None}
        current, difference, margin = found
        return {
            "positives": sum(self.positives[place] for place in places),
            "staged": current + difference,
            "current": current,
            "difference": difference,
            "interval": [difference - margin, difference + margin],
        }


_PLACES = {"all": [*range(len(BUCKET_NAMES))]} | {bucket: [place] for place, bucket in enumerate(BUCKET_NAMES)}


class StagedFloors(BaseModel):
    """`[staged]` of promise.toml: what a release must have shown on mirrored queries before it is published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_queries: int = Field(default=1, ge=1)
    """Mirrored queries beside the release that serves."""
    max_refused: _Share = 0.0
    """Share of them that it may refuse."""
    min_overlap: _Share | None = None
    """Mean share of the served labels that it must answer, too."""
    max_exposure_drop: _Share | None = None
    """Share of its exposure that a bucket may lose: at 0.2, 10 % may become 8 %."""
    max_recall_drop: _Share | None = None
    """Organic recall that all labels, and each bucket, may surely lose: the interval's upper end must reach it."""

    def unmet(self, counts: StagedCounts) -> list[str]:
        """What the counts fall short of, expected and found, one sentence each."""
        answered = counts.queries - counts.refused
        if counts.queries < self.min_queries or not answered:
            return [
                f"expected at least {self.min_queries:,} queries mirrored beside {counts.current}, found "
                f"{counts.queries:,} ({answered:,} answered)"
            ]
        found = []
        if counts.refused > self.max_refused * counts.queries:
            found.append(
                f"expected at most {self.max_refused:.2%} of mirrored queries refused, found "
                f"{counts.refused / counts.queries:.2%}: {counts.reason}"
            )
        if self.min_overlap is not None and counts.overlap / answered < self.min_overlap:
            found.append(f"expected an overlap of at least {self.min_overlap:g}, found {counts.overlap / answered:.3f}")
        for place, bucket in enumerate(BUCKET_NAMES):
            was, now = (_share(shares, place) for shares in (counts.exposures_of_current, counts.exposures))
            if self.max_exposure_drop is not None and was and (now or 0.0) < was * (1 - self.max_exposure_drop):
                found.append(
                    f"{bucket}: expected at least {was * (1 - self.max_exposure_drop):.2%} of the exposure, "
                    f"{self.max_exposure_drop:.0%} below {was:.2%}, found {now or 0.0:.2%}"
                )
        for bucket, places in _PLACES.items():
            change = None if self.max_recall_drop is None else counts.recall_change(places)
            if change is not None and self.max_recall_drop is not None and sum(change[1:]) < -self.max_recall_drop:
                found.append(
                    f"{bucket}: expected organic recall at most {self.max_recall_drop:g} below {change[0]:.4f}, found "
                    f"{change[1]:+.4f} ± {change[2]:.4f}"
                )
        return found


def _share(counts: list[int], place: int) -> float | None:
    return counts[place] / sum(counts) if sum(counts) else None


def _percent(counts: list[int], place: int) -> str:
    share = _share(counts, place)
    return "–" if share is None else f"{share:.1%}"
