"""What is counted of the arms of experiments, in the tables `arms`, `arm_units` and `arm_clusters`.

What is written is within the caller's transaction, the one that keeps the answers or joins the feedback: a kill leaves
an answer kept and counted, or neither.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float64
from longtail.serving.monitoring.records import ArmAnswer
from longtail.serving.monitoring.sequential import CLUSTERS, Rate

_COUNTED = ("answers", "units", "own_settings", "named", "unavailable", *BUCKET_NAMES)
_KEPT_RUNS = 16
_BUCKETS = len(BUCKET_NAMES)
_PAIRS = tuple(f"{kind}{bucket}" for kind in "ph" for bucket in range(_BUCKETS))

Place = tuple[int | None, int | None]
"""Row of an arm, and cluster of a unit; of an answer that counts for none, nothing."""


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """What is known of one arm of a run.

    Attributes:
        since: first answer, seconds since 1970.
        counts: by the names of the table's columns.
        answers_C: by cluster, float64 [C].
        positives_BC, hits_BC: labels chosen, and those of them that were answered, by bucket, float64 [B, C].
    """

    since: float | None = None
    counts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    answers_C: Float64 = field(default_factory=lambda: np.zeros(CLUSTERS))
    positives_BC: Float64 = field(default_factory=lambda: np.zeros((_BUCKETS, CLUSTERS)))
    hits_BC: Float64 = field(default_factory=lambda: np.zeros((_BUCKETS, CLUSTERS)))

    @property
    def hits_per_answer(self) -> Rate:
        """Labels found, per answer."""
        return Rate(self.hits_BC.sum(axis=0), self.answers_C)

    def recall(self, bucket: int | None = None) -> Rate:
        """Labels found, per label chosen; of one bucket or of all."""
        if bucket is None:
            return Rate(self.hits_BC.sum(axis=0), self.positives_BC.sum(axis=0))
        return Rate(self.hits_BC[bucket], self.positives_BC[bucket])


def count_answers(
    connection: sqlite3.Connection,
    answers: Sequence[tuple[ArmAnswer | None, bytes]],
    now: float,
    *,
    most_units: int,
) -> list[Place]:
    """Count answers for their arms.

    Args:
        connection: in a transaction.
        answers: the arm of each, and its labels' buckets, one byte each.
        now: seconds since 1970.
        most_units: of an arm, that are told apart.

    Returns:
        Where feedback on each is counted.
    """
    if all(arm is None for arm, _ in answers):
        return [(None, None)] * len(answers)
    rows: dict[tuple[str, str], int] = {}
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    clusters: Counter[tuple[int, int]] = Counter()
    units: dict[int, set[int]] = defaultdict(set)
    places: list[Place] = []
    for answered, buckets in answers:
        if answered is None:
            places.append((None, None))
            continue
        name = answered.run, answered.arm
        row = rows[name] if name in rows else rows.setdefault(name, _row_of(connection, *name, now))
        if answered.left_out is not None:
            counts[row][answered.left_out] += 1
            places.append((None, None))
            continue
        place = row, answered.unit % CLUSTERS
        places.append(place)
        clusters[place] += 1
        counts[row]["answers"] += 1
        for bucket, name_of in enumerate(BUCKET_NAMES):
            counts[row][name_of] += buckets.count(bucket)
        if answered.alone:
            counts[row]["units"] += 1
        else:
            units[row].add(answered.unit)
    for row, of_row in units.items():
        counts[row]["units"] += _add_units(connection, row, of_row, most_units)
    connection.executemany(
        f"UPDATE arms SET {', '.join(f'{name} = {name} + ?' for name in _COUNTED)} WHERE id = ?",
        [(*(of_row[name] for name in _COUNTED), row) for row, of_row in counts.items()],
    )
    connection.executemany(
        "INSERT INTO arm_clusters (arm, cluster, answers) VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET answers = answers + excluded.answers",
        [(*place, count) for place, count in clusters.items()],
    )
    return places


def add_positives(connection: sqlite3.Connection, found: Iterable[tuple[int, int, int, bool]]) -> None:
    """Count labels chosen of answers of arms.

    Args:
        connection: in a transaction.
        found: the arm's row, the cluster, the label's bucket, and whether the answer had the label.
    """
    columns: Counter[tuple[int, int, str]] = Counter()
    for arm, cluster, bucket, hit in found:
        columns[arm, cluster, f"p{bucket}"] += 1
        columns[arm, cluster, f"h{bucket}"] += hit
    for (arm, cluster, column), count in columns.items():
        connection.execute(
            f"UPDATE arm_clusters SET {column} = {column} + ? WHERE arm = ? AND cluster = ?", (count, arm, cluster)
        )


def forget_runs(connection: sqlite3.Connection, most: int) -> int:
    """Delete what is kept of all but the runs begun last; within a transaction.

    Args:
        connection: in a transaction.
        most: units that are deleted; an arm goes when it has none left.

    Returns:
        How many units were.
    """
    old = f"SELECT run FROM arms GROUP BY run ORDER BY max(id) DESC LIMIT -1 OFFSET {_KEPT_RUNS}"
    deleted = 0
    for (arm,) in connection.execute(f"SELECT id FROM arms WHERE run IN ({old})").fetchall():
        deleted += connection.execute(
            "DELETE FROM arm_units WHERE arm = ? AND unit IN (SELECT unit FROM arm_units WHERE arm = ? LIMIT ?)",
            (arm, arm, most - deleted),
        ).rowcount
        if deleted == most:
            break
        connection.execute("DELETE FROM arm_clusters WHERE arm = ?", (arm,))
        connection.execute("DELETE FROM arms WHERE id = ?", (arm,))
    return deleted


def read_arms(connection: sqlite3.Connection, run: str) -> dict[str, ArmCounts]:
    """What is known of a run, by arm; none of an arm that nobody was in yet."""
    found = {}
    for id_, arm, since, *counts in connection.execute(
        f"SELECT id, arm, since, {', '.join(_COUNTED)} FROM arms WHERE run = ?", (run,)
    ).fetchall():
        of_arm = ArmCounts(since, dict(zip(_COUNTED, counts, strict=True)))
        rows = connection.execute(
            f"SELECT cluster, answers, {', '.join(_PAIRS)} FROM arm_clusters WHERE arm = ?", (id_,)
        ).fetchall()
        if rows:
            table = np.array(rows, np.float64)
            clusters = table[:, 0].astype(np.int64)
            of_arm.answers_C[clusters] = table[:, 1]
            of_arm.positives_BC[:, clusters] = table[:, 2 : 2 + _BUCKETS].T
            of_arm.hits_BC[:, clusters] = table[:, 2 + _BUCKETS :].T
        found[arm] = of_arm
    return found


def _row_of(connection: sqlite3.Connection, run: str, arm: str, now: float) -> int:
    connection.execute("INSERT OR IGNORE INTO arms (run, arm, since) VALUES (?, ?, ?)", (run, arm, now))
    (row,) = connection.execute("SELECT id FROM arms WHERE run = ? AND arm = ?", (run, arm)).fetchone()
    return int(row)


def _add_units(connection: sqlite3.Connection, row: int, units: set[int], most: int) -> int:
    """How many of these the arm has not had before."""
    (known,) = connection.execute("SELECT units FROM arms WHERE id = ?", (row,)).fetchone()
    if known >= most:
        return 0
    before = connection.total_changes
    connection.executemany("INSERT OR IGNORE INTO arm_units VALUES (?, ?)", [(row, _signed(unit)) for unit in units])
    return connection.total_changes - before


def _signed(unit: int) -> int:
    """64 bits as SQLite's integer."""
    return unit - (1 << 64) if unit >= 1 << 63 else unit
