"""What is counted of the arms of experiments, in the tables `arms`, `arm_units` and `arm_clusters`.

What is written is within the caller's transaction, the one that keeps the answers or joins the feedback: a kill leaves
an answer kept and counted, or neither.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import Connection, delete, func, select, text, update

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float64
from longtail.serving.monitoring.records import ArmAnswer
from longtail.serving.monitoring.sequential import CLUSTERS, Rate
from longtail.serving.monitoring.tables import arm_clusters, arm_units, arms
from longtail.state.engines import add_up, insert_new

_COUNTED = ("answers", "units", "own_settings", "named", "unavailable", *BUCKET_NAMES)
_KEPT_RUNS = 16
_BUCKETS = len(BUCKET_NAMES)
_PAIRS = tuple(f"{kind}{bucket}" for kind in "ph" for bucket in range(_BUCKETS))

_SOME_UNITS = text(
    "DELETE FROM arm_units WHERE arm = :arm AND unit IN (SELECT unit FROM arm_units WHERE arm = :arm LIMIT :most)"
)

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
    connection: Connection,
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
    # In one order, here and below: two replicas that each had a row the other wants would wait for good.
    for row, counted in sorted(counts.items()):
        sums = {name: arms.c[name] + counted[name] for name in _COUNTED}
        connection.execute(update(arms).where(arms.c.id == row).values(sums))
    rows_of_clusters = [
        {"arm": arm, "cluster": cluster, "answers": count} for (arm, cluster), count in sorted(clusters.items())
    ]
    add_up(connection, arm_clusters, rows_of_clusters, "answers")
    return places


def add_positives(connection: Connection, found: Iterable[tuple[int, int, int, bool]]) -> None:
    """Count labels chosen of answers of arms.

    Args:
        connection: in a transaction.
        found: the arm's row, the cluster, the label's bucket, and whether the answer had the label.
    """
    columns: Counter[tuple[int, int, str]] = Counter()
    for arm, cluster, bucket, hit in found:
        columns[arm, cluster, f"p{bucket}"] += 1
        columns[arm, cluster, f"h{bucket}"] += hit
    for (arm, cluster, column), count in sorted(columns.items()):
        one = update(arm_clusters).where(arm_clusters.c.arm == arm, arm_clusters.c.cluster == cluster)
        connection.execute(one.values({column: arm_clusters.c[column] + count}))


def forget_runs(connection: Connection, most: int) -> int:
    """Delete what is kept of all but the runs begun last; within a transaction.

    Args:
        connection: in a transaction.
        most: units that are deleted; an arm goes when it has none left.

    Returns:
        How many units were.
    """
    begun = select(arms.c.run).group_by(arms.c.run).order_by(func.max(arms.c.id).desc())
    old = connection.scalars(begun).all()[_KEPT_RUNS:]
    deleted = 0
    for arm in connection.scalars(select(arms.c.id).where(arms.c.run.in_(old))).all():
        deleted += connection.execute(_SOME_UNITS, {"arm": arm, "most": most - deleted}).rowcount
        if deleted == most:
            break
        connection.execute(delete(arm_clusters).where(arm_clusters.c.arm == arm))
        connection.execute(delete(arms).where(arms.c.id == arm))
    return deleted


def read_arms(connection: Connection, run: str) -> dict[str, ArmCounts]:
    """What is known of a run, by arm; none of an arm that nobody was in yet."""
    found = {}
    known = select(arms.c.id, arms.c.arm, arms.c.since, *(arms.c[name] for name in _COUNTED)).where(arms.c.run == run)
    for id_, arm, since, *counts in connection.execute(known).all():
        of_arm = ArmCounts(since, dict(zip(_COUNTED, counts, strict=True)))
        columns = (arm_clusters.c[name] for name in ("cluster", "answers", *_PAIRS))
        rows = connection.execute(select(*columns).where(arm_clusters.c.arm == id_)).all()
        if rows:
            table = np.array([tuple(row) for row in rows], np.float64)
            clusters = table[:, 0].astype(np.int64)
            of_arm.answers_C[clusters] = table[:, 1]
            of_arm.positives_BC[:, clusters] = table[:, 2 : 2 + _BUCKETS].T
            of_arm.hits_BC[:, clusters] = table[:, 2 + _BUCKETS :].T
        found[arm] = of_arm
    return found


def _row_of(connection: Connection, run: str, arm: str, now: float) -> int:
    insert_new(connection, arms, [{"run": run, "arm": arm, "since": now}])
    return int(connection.scalars(select(arms.c.id).where(arms.c.run == run, arms.c.arm == arm)).one())


def _add_units(connection: Connection, row: int, units: set[int], most: int) -> int:
    """How many of these the arm has not had before."""
    if connection.scalars(select(arms.c.units).where(arms.c.id == row)).one() >= most:
        return 0
    return insert_new(connection, arm_units, [{"arm": row, "unit": _signed(unit)} for unit in units])


def _signed(unit: int) -> int:
    """64 bits as a database's integer."""
    return unit - (1 << 64) if unit >= 1 << 63 else unit
