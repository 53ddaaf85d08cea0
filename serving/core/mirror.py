"""Send shadow traffic: a share of live queries goes to the staged release, and differing answers are counted.

One low-priority thread with a short queue does this. Queries that do not fit are counted as skipped, so no client
waits. Counts are written to `STATE/staged/WORKER.json` when the thread is idle and every two seconds; a killed process
loses the counts since.

Legend: bucket lists are of head, torso, tail and new, in that order.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.bundle.store import replace_file
from longtail.index import EngineUnavailableError
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.feedback import Event, create_queries
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import ServingError

logger = logging.getLogger(__name__)

_WAITING = 64
"""Most batches, or requests with organic choices, that wait."""
_WRITE_SECONDS = 2.0
_NICENESS = 10
_COUNTS = "staged"
_Z = 1.96
_ByBucket = Annotated[list[int], Field(min_length=len(BUCKET_NAMES), max_length=len(BUCKET_NAMES))]
_BUCKETS_OF = {"all": [*range(len(BUCKET_NAMES))]} | {bucket: [i] for i, bucket in enumerate(BUCKET_NAMES)}


class StagedCounts(BaseModel):
    """Sums over mirrored queries; the sums of several processes can be added."""

    model_config = ConfigDict(extra="forbid")

    staged: str
    current: str
    queries: int = 0
    refused: int = 0
    """Mirrored queries that the staged release could not answer."""
    reason: str | None = None
    """Reason of the first refusal."""
    skipped: int = 0
    """Queries that were not mirrored because the mirror was too busy."""
    overlap: float = 0.0
    """Sum over queries of the share of served labels that the staged release answers too."""
    exposures: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Labels answered by the staged release, by its own buckets."""
    exposures_of_current: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    positives: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Labels of organic choices, by the served release's buckets."""
    hits_of_both: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    hits: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Chosen labels that only the staged release would have answered."""
    hits_of_current: _ByBucket = Field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """Chosen labels that only the served release would have answered."""

    def plus(self, other: StagedCounts) -> Self:
        """Add the counts of another process."""
        sums = {
            name: [a + b for a, b in zip(mine, theirs, strict=True)] if isinstance(mine, list) else mine + theirs
            for name in type(self).model_fields
            if name not in ("staged", "current", "reason")
            for mine, theirs in [(getattr(self, name), getattr(other, name))]
        }
        return self.model_copy(update=sums | {"reason": self.reason or other.reason})

    def write(self, state: Path, worker: int) -> None:
        """Replace the counts of one process; raises OSError."""
        (state / _COUNTS).mkdir(parents=True, exist_ok=True)
        replace_file(state / _COUNTS / f"{worker}.json", self.model_dump_json().encode())

    @classmethod
    def read(cls, path: Path) -> StagedCounts | None:
        """Read the counts of one process; None if there is no readable file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    @classmethod
    def read_all(cls, state: Path, staged: str, current: str) -> StagedCounts:
        """Add up a pair's counts over all processes."""
        total = cls(staged=staged, current=current)
        for path in sorted((state / _COUNTS).glob("*.json")):
            counts_of_worker = cls.read(path)
            if counts_of_worker is not None and (counts_of_worker.staged, counts_of_worker.current) == (
                staged,
                current,
            ):
                total = total.plus(counts_of_worker)
        return total

    def figures(self) -> dict[str, object]:
        """Compute the figures of GET /v1/release/staged; None before the first answer or choice."""
        answered = self.queries - self.refused
        return {
            "staged": self.staged,
            "current": self.current,
            "queries": self.queries,
            "refused": {"queries": self.refused, "reason": self.reason},
            "skipped": self.skipped,
            "overlap": None if not answered else self.overlap / answered,
            "exposure": {
                bucket: {"staged": _share(self.exposures, i), "current": _share(self.exposures_of_current, i)}
                for i, bucket in enumerate(BUCKET_NAMES)
            },
            "organic_recall": {bucket: self._recall(buckets) for bucket, buckets in _BUCKETS_OF.items()},
        }

    def _recall(self, buckets: list[int]) -> dict[str, object]:
        """Compute organic recall and the paired difference's 95 % interval."""
        positives = sum(self.positives[i] for i in buckets)
        if not positives:
            return {"positives": 0, "staged": None, "current": None, "difference": None, "interval": None}
        gained, lost, both = (
            sum(counts[i] for i in buckets) for counts in (self.hits, self.hits_of_current, self.hits_of_both)
        )
        difference = (gained - lost) / positives
        # Each label contributes +1, −1 or 0 to the difference: E[d²] is the share of discordant labels.
        variance = max(0.0, (gained + lost) / positives - difference**2)
        current, margin = (both + lost) / positives, _Z * math.sqrt(variance / positives)
        return {
            "positives": positives,
            "staged": current + difference,
            "current": current,
            "difference": difference,
            "interval": [difference - margin, difference + margin],
        }


Count = Callable[[Retriever, Retriever, StagedCounts], None]
"""Function that evaluates queries on the staged and the current release, and adds to the counts."""


class Mirror:
    """The staged release of one process."""

    def __init__(self, state: Path, worker: int) -> None:
        self._state = state
        self._worker = worker
        self.staged: Retriever | None = None
        self._current: Retriever | None = None
        self._counts = StagedCounts(staged="", current="")
        self._waiting = self._skipped = 0
        self._written_at = 0.0
        self._trouble: str | None = None
        self._changing = threading.Lock()
        # One thread of low priority, so that the mirror never takes a second core from clients.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror", initializer=_lower_priority)

    def use(self, staged: Retriever | None, current: Retriever | None) -> None:
        """Set the releases to compare; earlier counts of the same pair are continued."""
        with self._changing:
            if staged is None or current is None or staged.name == current.name:
                self.staged = None
                return
            names = staged.name, current.name
            self.staged, self._current = staged, current
            if (self._counts.staged, self._counts.current) != names:
                # A restarted worker goes on with the counts of the process before.
                earlier = StagedCounts.read(self._state / _COUNTS / f"{self._worker}.json")
                fits = earlier is not None and (earlier.staged, earlier.current) == names
                self._counts = earlier if fits else StagedCounts(staged=names[0], current=names[1])  # type: ignore[assignment]

    def offer(self, retriever: Retriever, queries: Sequence[RetrieveQuery], retrieval: Retrieval, share: float) -> None:
        """Mirror a random share of the queries of a batch; returns at once.

        Args:
            retriever: the release that answered; only queries to the current release are mirrored.
            share: share of the queries to mirror. Queries that explore are left out, because chance shaped their
                answers, and so are vectors, which mean nothing to another release.
        """
        if self.staged is None or self._current is None or retriever.name != self._current.name:
            return
        catalogue, served = retriever.catalogue, list[tuple[RetrieveQuery, list[str], Array]]()
        for query, start, end in zip(queries, [0, *retrieval.ends_B[:-1]], retrieval.ends_B, strict=True):
            if random.random() < share and not query.explore and query.vector is None:
                # By id, because rows mean other labels in the staged release.
                labels = catalogue.get_ids(retrieval.rows_N[start:end]).to_pylist()
                served.append((query, labels, retrieval.buckets_N[start:end]))

        def count(staged: Retriever, _: Retriever, counts: StagedCounts) -> None:
            for answer in served:
                _count_query(*answer, staged, counts)

        if served:
            self._put(len(served), count)

    def offer_choices(self, events: Sequence[Event], k: int) -> None:
        """Count the organic choices that each release would answer; returns at once."""
        organic = [event for event in events if event.features is not None]

        def count(staged: Retriever, current: Retriever, counts: StagedCounts) -> None:
            for event in organic:
                _count_choice(event, k, staged, current, counts)

        if self.staged is not None and organic:
            self._put(0, count)

    def close(self) -> None:
        """Finish the waiting queries, and write the counts."""
        self._thread.shutdown(wait=True)

    def _put(self, queries: int, count: Count) -> None:
        with self._changing:
            # Dropped, because serving must not wait for the mirror.
            if self._waiting > _WAITING:
                self._skipped += queries
                return
            self._waiting += 1
        self._thread.submit(self._run, count)

    def _run(self, count: Count) -> None:
        # Copied under the lock: `use` may replace all three while this query runs.
        with self._changing:
            staged, current, counts = self.staged, self._current, self._counts
        try:
            if staged is not None and current is not None:
                count(staged, current, counts)
        except Exception:
            logger.exception("a mirrored query could not be counted")
        with self._changing:
            self._waiting -= 1
            counts.skipped, self._skipped = counts.skipped + self._skipped, 0
            due = not self._waiting or monotonic() - self._written_at >= _WRITE_SECONDS
        if staged is not None and due:
            self._write(counts)

    def _write(self, counts: StagedCounts) -> None:
        self._written_at = monotonic()
        try:
            counts.write(self._state, self._worker)
            self._trouble = None
        except OSError as error:
            if str(error) != self._trouble:
                logger.error("counts of the staged release cannot be written: %s", error)
            self._trouble = str(error)


def _share(counts: list[int], i: int) -> float | None:
    return counts[i] / sum(counts) if sum(counts) else None


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # some systems have no priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _count_query(
    query: RetrieveQuery, labels: list[str], buckets_K: Array, staged: Retriever, counts: StagedCounts
) -> None:
    try:
        # An explanation takes some 40 searches, and no client would see it.
        retrieval = staged.retrieve([query.model_copy(update={"explain": False})])
    except EngineUnavailableError:  # the server is at fault, not the release
        counts.skipped += 1
        return
    except ServingError as error:
        counts.queries += 1
        counts.refused += 1
        counts.reason = counts.reason or str(error)[:300]
        return
    counts.queries += 1
    staged_ids = set(staged.catalogue.get_ids(retrieval.rows_N).to_pylist())
    counts.overlap += len(staged_ids.intersection(labels)) / len(labels) if labels else 1.0
    for sums, buckets in ((counts.exposures, retrieval.buckets_N), (counts.exposures_of_current, buckets_K)):
        for bucket, exposures in enumerate(np.bincount(buckets, minlength=len(BUCKET_NAMES)).tolist()):
            sums[bucket] += exposures


def _count_choice(event: Event, k: int, staged: Retriever, current: Retriever, counts: StagedCounts) -> None:
    """Count the chosen labels that each release would have answered; none if it refuses the query."""
    by_staged, by_current = (_answered(release, create_queries([event], k, release)) for release in (staged, current))
    rows_R = current.catalogue.rows([str(id_) for id_ in event.labels])[0]
    ids = current.catalogue.get_ids(rows_R).to_pylist()
    for chosen, bucket in zip(ids, current.catalogue.buckets(rows_R), strict=True):
        counts.positives[bucket] += 1
        counts.hits_of_both[bucket] += chosen in by_staged and chosen in by_current
        counts.hits[bucket] += chosen in by_staged and chosen not in by_current
        counts.hits_of_current[bucket] += chosen in by_current and chosen not in by_staged


def _answered(release: Retriever, queries: Sequence[RetrieveQuery]) -> set[str]:
    try:
        retrieval = release.retrieve(queries)
    except (ServingError, EngineUnavailableError):
        return set()
    return set(release.catalogue.get_ids(retrieval.rows_N).to_pylist())
