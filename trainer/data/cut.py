"""Changes of a table of pairs: cut splits, keep one label per query, remove repeats.

A table of pairs has the columns `row_id`, `split` (0: train, 1: valid, 2: test), `query` and `label` (row numbers).
`time`, `weight` and `objective` are optional. `tie` orders pairs of the same query and time.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from longtail.tables.database import Database
from longtail.tables.values import double
from longtail.trainer.config import SplitConfig
from longtail.trainer.errors import DataError

_BUCKETS = 1 << 20
"""Number of time ranges that are counted to find the time of the first held-out pair."""
_HELD_OUT = ("test", "valid")
_LEAST_REPORTED = 0.05
"""Share by which the size of a split may differ without a remark."""
_OF_EACH = ("random_per_query", "temporal_per_query", "leave_last_out")


def cut(database: Database, pairs: str, split: SplitConfig, *, separate: set[str], seed: int) -> tuple[str, list[str]]:
    """Cut the training pairs of a table into `train`, `valid` and `test`; return the new table, and remarks.

    Args:
        separate: splits with files of their own, which take no training pairs.
    """
    shares = [0.0 if name in separate else share for name, share in (("test", split.test), ("valid", split.valid))]
    train = f"SELECT *, row_id AS tie FROM {pairs} WHERE split = 0"
    if split.strategy.startswith("random"):
        train = _shuffled(database, pairs, seed)
    remarks: list[str] = []
    if split.strategy == "temporal":
        number, remarks = _latest(database, pairs, shares)
    elif split.strategy == "random":
        (count,) = database.row(f"SELECT count(*) FROM {pairs} WHERE split = 0")
        tests, valids = (int(count * share) for share in shares)
        number = f"CASE WHEN tie < {tests} THEN 2 WHEN tie < {tests + valids} THEN 1 ELSE 0 END"
    else:
        number = _last_of_each(database, pairs, split.strategy, shares, separate)
    table = database.name("cut")
    held_out_files = f"SELECT *, row_id AS tie FROM {pairs} WHERE split > 0"
    stored = split.strategy != "temporal"
    kind = "TABLE" if stored else "VIEW"
    database.run(
        f"CREATE {kind} {table} AS SELECT * REPLACE (({number})::INTEGER AS split) "
        f"FROM ({train}) UNION ALL BY NAME {held_out_files}"
    )
    (held_out,) = database.row(f"SELECT count(*) FILTER (split > 0) FROM {table}")
    if any(shares) and not held_out and split.strategy in _OF_EACH:
        why = "no query has three pairs" if split.strategy == "leave_last_out" else "queries have too few pairs"
        raise DataError(f"data.split: expected pairs to hold out by strategy {split.strategy!r}, found none: {why}")
    if split.strategy in ("temporal_per_query", "leave_last_out") and "time" in column_names(database, pairs):
        same_time = f"SELECT split > min(split) OVER (PARTITION BY query, time) AS parted FROM {table}"
        (parted,) = database.row(f"SELECT count(*) FILTER (parted) FROM ({same_time})")
        if parted:
            remarks.append(
                f"data.split: {parted:,} of {held_out:,} held-out pairs have the time of an earlier pair of their "
                "query: the order in the file decides"
            )
    if stored:  # the view of a cut by time reads the pairs
        database.drop(pairs)
    return table, remarks


def column_names(database: Database, table: str) -> list[str]:
    """Return the names of the columns of a DuckDB table."""
    return [row[0] for row in database.rows(f"DESCRIBE {table}")]


def _shuffled(database: Database, pairs: str, seed: int) -> str:
    """Return an SQL query of the training pairs with `tie`, a random permutation."""
    (count,) = database.row(f"SELECT count(*) FROM {pairs} WHERE split = 0")

    # Arrays of the length of the pairs lie in files, because the pairs may not fit in memory.
    order, tie = (
        np.memmap(database.folder / database.name(name), np.int64, "w+", shape=(max(count, 1),))[:count].view(
            np.ndarray
        )
        for name in ("order", "tie")
    )
    order[:] = np.arange(count)
    np.random.default_rng(seed).shuffle(order)
    tie[order] = np.arange(count)
    ties = database.register(pa.table({"tie": tie, "position": np.arange(count)}))
    numbered = f"SELECT *, row_number() OVER (ORDER BY row_id) - 1 AS position FROM {pairs} WHERE split = 0"
    return f"SELECT * EXCLUDE (position) FROM ({numbered}) JOIN {ties} USING (position)"


def _latest(database: Database, pairs: str, shares: list[float]) -> tuple[str, list[str]]:
    """Return an SQL expression of the split by time, and remarks: the latest pairs are test, the next valid.

    Pairs of one time are not parted: the cut moves to the nearest time that leaves pairs on both sides.
    """
    if "time" not in column_names(database, pairs):
        raise DataError("data.split: expected data.timestamp for strategy 'temporal', received none")
    (total,) = database.row(f"SELECT count(*) FROM {pairs} WHERE split = 0")
    split_time, cases, remarks = float("inf"), [], []
    sizes = [(number, name, int(total * share)) for number, name, share in zip((2, 1), _HELD_OUT, shares, strict=True)]
    sizes = [(number, name, size) for number, name, size in sizes if size]
    for i, (number, name, size) in enumerate(sizes):
        rows = f"FROM {pairs} WHERE split = 0 AND time < {double(split_time)}"
        split_time = _boundary(database, rows, size, splits_before=len(sizes) - i)
        (held_out,) = database.row(f"SELECT count(*) {rows} AND time >= {double(split_time)}")
        cases.append(f"WHEN time >= {double(split_time)} THEN {number}")
        if abs(held_out - size) > _LEAST_REPORTED * size:
            remarks.append(
                f"data.split: {name} has {held_out:,} pairs ({held_out / total:.1%}) instead of {size:,}: "
                "pairs of one time stay together"
            )
    return (f"CASE {' '.join(cases)} ELSE 0 END" if cases else "0"), remarks


def _boundary(database: Database, rows: str, size: int, *, splits_before: int) -> float:
    """Find the time from which on there are about `size` rows. Every other split keeps an earlier time.

    Args:
        rows: SQL from `FROM` on.
        splits_before: number of splits that are cut from the rows before.
    """
    start_time, end_time, count = database.row(f"SELECT min(time), max(time), count(*) {rows}")
    earliest, size = start_time, min(size, count)
    for _ in range(splits_before):
        (earliest,) = database.row(f"SELECT min(time) {rows} AND time > {double(earliest)}")
        if earliest is None:
            raise DataError(
                "data.split: expected a time of its own for each split by strategy 'temporal', found fewer times: "
                "use 'random', or data.test as a file"
            )
    bucket = f"floor((time - {double(start_time)}) / {double((end_time - start_time) / _BUCKETS)})"
    # Counts by time range avoid a sort of all pairs: only the times of one range are sorted.
    by_bucket = f"SELECT {bucket} AS bucket, count(*) AS here {rows} GROUP BY 1"
    upto = f"SELECT bucket, here, sum(here) OVER (ORDER BY bucket DESC) AS upto FROM ({by_bucket})"
    split_bucket, later = database.row(
        f"SELECT bucket, upto - here FROM ({upto}) WHERE upto >= {size} ORDER BY bucket DESC LIMIT 1"
    )
    by_time = f"SELECT time, count(*) AS here {rows} AND {bucket} = {double(split_bucket)} GROUP BY 1"
    upto = f"SELECT time, here, {later} + sum(here) OVER (ORDER BY time DESC) AS upto FROM ({by_time})"
    time, here, held_out = database.row(f"SELECT * FROM ({upto}) WHERE upto >= {size} ORDER BY time DESC LIMIT 1")
    if held_out > here and held_out - size > size - (held_out - here):
        (time,) = database.row(f"SELECT min(time) {rows} AND time > {double(time)}")
    return float(max(time, earliest))


def _last_of_each(database: Database, pairs: str, strategy: str, shares: list[float], separate: set[str]) -> str:
    """Return an SQL expression of the split per query: the last pairs are test, the ones before valid."""
    if strategy == "leave_last_out":
        counts = [f"(count(*) OVER q >= 3)::INTEGER * {int(name not in separate)}" for name in ("test", "valid")]
    else:
        counts = [f"round_even(count(*) OVER q::DOUBLE * {double(share)}, 0)" for share in shares]
    timed = strategy != "random_per_query" and "time" in column_names(database, pairs)
    order = "time DESC, tie DESC" if timed else "tie DESC"
    from_end = f"row_number() OVER (PARTITION BY query ORDER BY {order})"
    # `OVER q` above stands for this window.
    counts = [count.replace("OVER q", "OVER (PARTITION BY query)") for count in counts]
    return f"({from_end} <= {counts[0]})::INTEGER + ({from_end} <= {counts[0]} + {counts[1]})::INTEGER"


def keep_smallest_label(database: Database, pairs: str, labels: pa.Table) -> tuple[str, pa.Table]:
    """Keep the smallest label of every query in every file [BM20 A.2]; return the catalogue.

    Args:
        labels: the catalogue: `id`, strings, which are ordered as numbers if all are integers, and `listed`. A label
            with `listed` stays in the catalogue even if it is no query's smallest.
    """
    ids = labels["id"].to_pylist()
    numeric = all(re.fullmatch(r"-?[0-9]+", id_) for id_ in ids)
    order = sorted(range(len(ids)), key=(lambda row: int(ids[row])) if numeric else ids.__getitem__)
    rank_L = np.empty(len(ids), np.int64)
    rank_L[order] = np.arange(len(ids))
    ranks = database.register(pa.table({"label": np.arange(len(ids), dtype=np.int32), "rank": rank_L}))
    smallest_pairs, stays = database.name("smallest"), np.array(labels["listed"].is_valid())
    smallest = "row_number() OVER (PARTITION BY split, query ORDER BY rank, row_id) = 1"
    database.run(
        f"CREATE TABLE {smallest_pairs} AS SELECT * EXCLUDE (rank) FROM {pairs} JOIN {ranks} USING (label) "
        f"QUALIFY {smallest}"
    )
    stays[database.arrow(f"SELECT DISTINCT label FROM {smallest_pairs}")["label"].to_numpy()] = True
    rows = np.cumsum(stays, dtype=np.int32) - np.int32(1)
    row_map = database.register(pa.table({"label": np.arange(len(ids), dtype=np.int32), "row": rows}))
    final = database.name("smallest")
    database.run(
        f"CREATE TABLE {final} AS SELECT pairs.* EXCLUDE (row) REPLACE (row AS label) "
        f"FROM (SELECT * FROM {smallest_pairs} JOIN {row_map} USING (label)) AS pairs"
    )
    for table in (pairs, smallest_pairs):
        database.drop(table)
    return final, labels.filter(pa.array(stays))


def without_repeats(database: Database, pairs: str) -> tuple[str, int]:
    """Keep every pair once per split and objective: the latest, with the largest weight; count the others."""
    table, columns = database.name("once"), column_names(database, pairs)
    key = ", ".join(["split", "query", "label", *(["objective"] if "objective" in columns else [])])
    time = "time DESC, " if "time" in columns else ""
    weight = f"REPLACE (max(weight) OVER (PARTITION BY {key}) AS weight)" if "weight" in columns else ""
    database.run(
        f"CREATE TABLE {table} AS SELECT * {weight} FROM {pairs} "
        f"QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY {time}tie DESC) = 1"
    )
    all_pairs, distinct_pairs = (database.row(f"SELECT count(*) FROM {name}")[0] for name in (pairs, table))
    database.drop(pairs)
    return table, all_pairs - distinct_pairs
