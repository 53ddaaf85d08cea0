"""A catalogue of twelve labels, and batches answered from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtail.serving.monitoring import (
    AnswerBaseline,
    AnsweredBatch,
    ArmAnswer,
    ChosenLabels,
    IdCounts,
    Monitoring,
    Promises,
)
from longtail.serving.monitoring.records import IdKind, Restriction, Source
from longtail.serving.monitoring.workers import Workers, WorkerSlot
from tests.clock import Clock

# Rows 0–3 head with 100 training pairs, 4–7 torso with 10, 8–11 tail with 1.
BUCKETS = np.repeat(np.arange(3, dtype=np.int8), 4)
COUNTS = np.repeat(np.array([100, 10, 1]), 4)
BASELINE = AnswerBaseline(
    bias_removal=0.0,
    k=4,
    shares=(0.5, 0.25, 0.25, 0.0),
    popularity=52.75,
    score_edges=np.arange(1.0, 10.0),
    score_shares=(0.1,) * 10,
    popularity_weight=0.0,
    queries=1000,
    coverage=(1.0, 1.0, 1.0, 0.0),
    by_k=np.arange(5)[:, None] * np.array([0.5, 0.25, 0.25, 0.0, *[0.1] * 10]),
)
NOON = 1_700_006_400.0 - 1_700_006_400.0 % 86_400 + 12 * 3600


def answered(
    lists: Sequence[Sequence[int]],
    *,
    release: str = "r1",
    bias_removal: float = 0.5,
    popularity: float = 0.0,
    score: float = 0.5,
    restrictions: Sequence[Restriction] = (),
    cooccurrence: float = 0.0,
    judged_at: float = 0.0,
    ids: Mapping[IdKind, IdCounts] | None = None,
    floored: tuple[int, int] = (0, 0),
) -> AnsweredBatch:
    """One query per list of rows; rows 12 and above are labels added since, which are new."""
    rows = np.array([row for listed in lists for row in listed], np.int64)
    is_known = rows < 12
    return AnsweredBatch(
        release=release,
        bias_removal_B=np.full(len(lists), bias_removal, np.float32),
        popularity_B=np.full(len(lists), popularity, np.float32),
        cooccurrence_B=np.full(len(lists), cooccurrence, np.float32),
        judged_at_B=np.full(len(lists), np.nan if restrictions else judged_at, np.float32),
        rows_N=rows,
        scores_N=np.full(len(rows), score, np.float32),
        ends_B=np.cumsum([len(listed) for listed in lists]).tolist(),
        buckets_N=np.where(is_known, BUCKETS[rows % 12], 3).astype(np.int8),
        counts_N=np.where(is_known, COUNTS[rows % 12], 0),
        restrictions_B=[restrictions] * len(lists),
        ids=ids or {},
        floored=floored,
    )


def chosen(
    rows: Sequence[int],
    answer: Sequence[int] = (),
    *,
    source: Source = "feedback",
    release: str = "r1",
    bias_removal: float = 0.5,
    arm: ArmAnswer | None = None,
) -> ChosenLabels:
    """Labels by row, from an answer of rows; −1 is a label that nobody knows."""
    return ChosenLabels(
        source=source,
        release=release,
        buckets=[-1 if row < 0 else 3 if row >= 12 else int(BUCKETS[row]) for row in rows],
        positions=[list(answer).index(row) if row in answer else None for row in rows],
        bias_removal=bias_removal,
        judged_at=bias_removal,
        k=20,
        arm=arm,
    )


def open_monitoring(state: Path, clock: Clock, *, worker: int = 0, begin: bool = True, **more: Any) -> Monitoring:
    monitoring = Monitoring(state, WorkerSlot(Workers(worker + 1), worker), clock=clock, **more)
    if begin:
        monitoring.begin_release("r1", BUCKETS, Promises(BASELINE))
    return monitoring


def count_batch(monitoring: Monitoring, batch: AnsweredBatch) -> None:
    monitoring.count_answers(batch)
    monitoring.flush()


def count_request(monitoring: Monitoring, status: int, seconds: float) -> None:
    monitoring.count_request("/v1/retrieve", status, seconds)
    monitoring.flush()


def scrape(monitoring: Monitoring) -> dict[str, float]:
    """Read the value of every series."""
    lines = monitoring.scrape().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
