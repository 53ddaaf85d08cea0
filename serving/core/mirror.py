"""Asks a staged release a share of what the service is asked, unseen, and counts how its answers differ.

One thread of its own, of low priority, with a short queue: what does not fit is left out and counted, so no client ever
waits for it. Counts are written every few seconds for `longtail-index staged` and `publish`
(`longtail.index.StagedCounts`); a killed process loses those of the last ones.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.index import EngineUnavailableError, StagedCounts
from longtail.index.release.staged import STAGED_COUNTS
from longtail.serving.core.feedback import Event, queries_of
from longtail.serving.core.queries import Query
from longtail.serving.core.retriever import Retrieval, Retriever
from longtail.serving.errors import ServingError

logger = logging.getLogger(__name__)

_WAITING = 64
"""Batches, and requests of organic choices, that wait at most."""
_WRITE_SECONDS = 2.0
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class _Served:
    """One query and what it was answered."""

    query: Query
    fingerprints_K: Array
    buckets_K: Array
    scores_K: Array


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Organic choices of one request."""

    events: Sequence[Event]
    k: int


class Mirror:
    """The staged release of one process.

    Args:
        state: the service's state directory.
        worker: this process' number.
        chance: draws which queries are mirrored.
    """

    def __init__(self, state: Path, worker: int, chance: random.Random | None = None) -> None:
        self._state = state
        self._worker = worker
        self._chance = chance or random.Random()
        self.staged: Retriever | None = None
        self._current: Retriever | None = None
        self._counts: StagedCounts | None = None
        self._skipped = 0
        self._unwritten = False
        self._trouble: str | None = None
        self._work: queue.Queue[Sequence[_Served] | _Chosen | None] = queue.Queue(_WAITING)
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    def use(self, staged: Retriever | None, current: Retriever | None) -> None:
        """Ask this release beside that from now on; None: none. Counts of the same two go on."""
        with self._changing:
            if staged is None or current is None or staged.name == current.name:
                self.staged, self._counts = None, None
                return
            before = self._counts
            self.staged, self._current = staged, current
            if before is None or (before.staged, before.current) != (staged.name, current.name):
                kept = StagedCounts.read(self._state / STAGED_COUNTS / f"{self._worker}.json")
                fits = kept is not None and (kept.staged, kept.current) == (staged.name, current.name)
                self._counts = kept if fits else StagedCounts(staged=staged.name, current=current.name)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=copy_context().run, args=(self._run,), name="mirror", daemon=True
                )
                self._thread.start()

    def offer(self, retriever: Retriever, queries: Sequence[Query], retrieval: Retrieval, share: float) -> None:
        """Mirror some of the queries of a batch; returns at once.

        Args:
            retriever: the release that answered; nothing is mirrored of another than the current one.
            queries: the batch's.
            retrieval: the answers.
            share: of the queries, drawn at random. Queries that explore are left out, for chance had a say in their
                answer, and vectors, which mean nothing to another release.
        """
        if self.staged is None or self._current is None or retriever.name != self._current.name:
            return
        drawn = [
            place
            for place, query in enumerate(queries)
            if self._chance.random() < share and not query.explore and query.vector is None
        ]
        if not drawn:
            return
        catalogue, starts_B = retriever.catalogue, [0, *retrieval.ends_B[:-1]]
        served = []
        for place in drawn:
            rows_K = retrieval.rows_N[starts_B[place] : retrieval.ends_B[place]]
            scores_K = retrieval.scores_N[starts_B[place] : retrieval.ends_B[place]]
            served.append(_Served(queries[place], catalogue.fingerprints(rows_K), catalogue.buckets(rows_K), scores_K))
        self._put(served, len(served))

    def offer_choices(self, events: Sequence[Event], k: int) -> None:
        """Ask both releases what they would have answered before organic choices; returns at once.

        Args:
            events: events of one request that were recorded.
            k: labels retrieved.
        """
        organic = [event for event in events if event.features is not None]
        if self.staged is not None and organic:
            self._put(_Chosen(organic, k), 0)

    def counts(self, staged: str, current: str) -> StagedCounts:
        """Get the counts of one release against another, of all processes of this replica."""
        return StagedCounts.read_all(self._state, staged, current)

    def close(self) -> None:
        """Finish what is under way, and write the counts."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._work.put(None, timeout=1)
            self._thread.join(timeout=5)

    def _put(self, work: Sequence[_Served] | _Chosen, queries: int) -> None:
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._skipped += queries

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # of a system that has no priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        written_at = monotonic()
        while True:
            try:
                work = self._work.get(timeout=_WRITE_SECONDS)
            except queue.Empty:
                self._write()
                continue
            if work is None:
                self._write()
                return
            with self._changing:
                staged, current, counts = self.staged, self._current, self._counts
            if staged is not None and current is not None and counts is not None:
                try:
                    self._count(work, staged, current, counts)
                except Exception:
                    logger.exception("a mirrored query could not be counted")
            if monotonic() - written_at >= _WRITE_SECONDS:
                self._write()
                written_at = monotonic()

    def _count(
        self, work: Sequence[_Served] | _Chosen, staged: Retriever, current: Retriever, counts: StagedCounts
    ) -> None:
        if isinstance(work, _Chosen):
            self._count_choices(work, staged, current, counts)
        else:
            for served in work:
                _count_query(served, staged, counts)
        counts.skipped, self._skipped = counts.skipped + self._skipped, 0
        self._unwritten = True

    def _count_choices(self, work: _Chosen, staged: Retriever, current: Retriever, counts: StagedCounts) -> None:
        """Which organic choices each of the two would have answered; of a release that refuses the query none."""
        for event in work.events:
            found = [_fingerprints(release, queries_of([event], work.k, release)) for release in (staged, current)]
            ids = [str(id_) for id_ in event.labels]
            rows_R = current.catalogue.rows(ids)[0]
            for fingerprint, bucket in zip(
                current.catalogue.fingerprints(rows_R), current.catalogue.buckets(rows_R), strict=True
            ):
                by_staged, by_current = (fingerprint in answered for answered in found)
                counts.positives[bucket] += 1
                counts.hits_of_both[bucket] += by_staged and by_current
                counts.hits[bucket] += by_staged and not by_current
                counts.hits_of_current[bucket] += by_current and not by_staged

    def _write(self) -> None:
        with self._changing:
            counts, unwritten = self._counts, self._unwritten
            self._unwritten = False
        if counts is None or not unwritten:
            return
        try:
            counts.write(self._state, self._worker)
        except OSError as error:
            if str(error) != self._trouble:
                logger.error("counts of the staged release cannot be written: %s", error)
            self._trouble, self._unwritten = str(error), True
        else:
            self._trouble = None


def _count_query(served: _Served, staged: Retriever, counts: StagedCounts) -> None:
    try:
        retrieval = staged.retrieve([served.query])
    except EngineUnavailableError:  # which is no word about the release
        counts.skipped += 1
        return
    except ServingError as error:
        counts.queries += 1
        counts.refused += 1
        counts.reason = counts.reason or str(error)[:300]
        return
    counts.queries += 1
    catalogue = staged.catalogue
    found = catalogue.fingerprints(retrieval.rows_N)
    overlap = float(np.isin(served.fingerprints_K, found).mean()) if len(served.fingerprints_K) else 1.0
    counts.overlap += overlap
    counts.overlap_squares += overlap**2
    if len(served.scores_K) and len(retrieval.scores_N):
        counts.shift += float(retrieval.scores_N.mean() - served.scores_K.mean())
    counts.seconds += retrieval.seconds["encode"] + retrieval.seconds["search"]
    for sums, buckets in (
        (counts.exposures, catalogue.buckets(retrieval.rows_N)),
        (counts.exposures_of_current, served.buckets_K),
    ):
        for bucket, shown in enumerate(np.bincount(buckets, minlength=len(BUCKET_NAMES)).tolist()):
            sums[bucket] += shown


def _fingerprints(release: Retriever, queries: Sequence[Query]) -> set[int]:
    try:
        retrieval = release.retrieve(queries)
    except (ServingError, EngineUnavailableError):
        return set()
    return set(release.catalogue.fingerprints(retrieval.rows_N).tolist())
