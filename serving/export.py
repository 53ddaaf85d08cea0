"""A service's feedback as training data: a Parquet file with a row for every label chosen.

Columns: the query's features under their own names, the label id, then what the service knows: `answer_id`,
`request_id`, `query`, `event`, `weight`, `propensity`, `debiased_weight` (weight / propensity), `position` (from 0;
null: not in the answer), `bias_removal` (λ), `popularity` (μ), `release`, `source` (`answer` or `organic`), `time`
(UTC), and of an experiment whose arms are compared by the answer `arm`, `experiment_run` and `unit` (a hash), else
null. A feature named as one of these stands as `feature_NAME`. A feature is a column of numbers if all its values are,
of id → weight maps or lists of ids if they are objects or lists, else of strings.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.errors import describe
from longtail.serving.errors import ServingError
from longtail.serving.monitoring import FeedbackRow, feedback_of
from longtail.state import Place, StoreError

_OWN = {
    "answer_id": pa.string(),
    "request_id": pa.string(),
    "query": pa.int32(),
    "event": pa.string(),
    "weight": pa.float64(),
    "propensity": pa.float64(),
    "debiased_weight": pa.float64(),
    "position": pa.int32(),
    "bias_removal": pa.float64(),
    "popularity": pa.float64(),
    "release": pa.string(),
    "source": pa.string(),
    "time": pa.timestamp("us", "UTC"),
    "arm": pa.string(),
    "experiment_run": pa.string(),
    "unit": pa.int64(),
}
_SECONDS = {"d": 86_400, "h": 3600, "m": 60}
_ROWS = 10_000
"""Rows that are held and written at once."""
_LARGEST_INT = 2**63 - 1
_Found = tuple[FeedbackRow, dict[str, Any]]
"""A label chosen and the features of its query."""
_Kind = type | tuple[type, type]
"""Of a value; of what is in a list, after `list`."""
_Columns = dict[str | None, tuple[str, pa.DataType]]
"""Name and type of a column by the feature it holds; None for the label id."""


class ExportError(ServingError):
    """Feedback that cannot be exported: no such state, an unreadable one, or a time that is none."""


def read_window(since: str | None, until: str | None, now: float) -> tuple[float, float]:
    """From and up to when, in seconds since 1970.

    Args:
        since, until: ISO 8601, UTC unless it says otherwise, or an age such as `7d`; None: since ever, until now.
        now: seconds since 1970.

    Raises:
        ExportError: neither form.
    """
    begin, end = (
        default if text is None else _seconds(option, text, now)
        for option, text, default in (("--since", since, 0.0), ("--until", until, now))
    )
    if begin >= end:
        raise ExportError(f"--since: expected a time before --until, received {since!r} and {until or 'now'!r}")
    return begin, end


def export(
    state: Place, out: Path, *, window: tuple[float, float], label_id: str = "label_id", everything: bool = False
) -> list[str]:
    """Write feedback as a Parquet file, which is there whole or not at all.

    Args:
        state: directory or database of a service that runs or ran.
        out: the file; one that is there is replaced.
        window: of the events' times, in seconds since 1970: the first is in, the second out.
        label_id: column of the label ids.
        everything: also events without features.

    Returns:
        What was written, in lines for people.

    Raises:
        ExportError: there is no feedback of this version, or a column has two meanings.
        OSError: the disk.
    """
    left_out: Counter[str] = Counter()
    working, rows = out.with_name(f".{out.name}.{os.getpid()}.tmp"), 0
    try:
        with feedback_of(state) as feedback:
            columns = _columns(_rows(feedback.rows(*window), Counter(), everything=everything), label_id)
            found = _rows(feedback.rows(*window), left_out, everything=everything)
            schema = pa.schema([*columns.values(), *_OWN.items()])
            with pq.ParquetWriter(working, schema) as writer:
                while part := list(islice(found, _ROWS)):
                    writer.write_table(pa.Table.from_pylist([_record(*of, columns) for of in part], schema))
                    rows += len(part)
        working.replace(out)
    except StoreError as error:
        raise ExportError(f"{state}: expected feedback that can be read, found {error}") from error
    finally:
        working.unlink(missing_ok=True)
    why_not = [f"left out: {count:,} labels {why}" for why, count in left_out.items()]
    return [f"{rows:,} labels chosen", *why_not, f"written: {out}"]


def _rows(feedback: Iterator[FeedbackRow], left_out: Counter[str], *, everything: bool) -> Iterator[_Found]:
    """Feedback with the features of its query; counts what is left out, by why."""
    for row in feedback:
        if row.pending:
            left_out["of the last minute, whose answers are still looked for"] += 1
        elif row.features is not None or everything:
            yield row, json.loads(row.features or b"{}")
        elif row.release is None:
            left_out["on answers that are not known any more (--all takes them)"] += 1
        else:
            left_out["whose query has no features, or none recorded (--all takes them)"] += 1


def _kinds(value: Any) -> set[_Kind]:
    """The type of a value, and of what is in a list."""
    value = _without_times(value)
    if value is None:
        return set()
    if isinstance(value, list):
        kinds: set[_Kind] = {list}
        return kinds | {(list, type(each)) for each in value}
    return {str} if isinstance(value, int) and abs(value) > _LARGEST_INT else {type(value)}


def _column_type(types: set[_Kind]) -> pa.DataType:
    """Of lists with a fraction in one of them, which no id is, a vector's."""
    if dict in types:
        return pa.map_(pa.string(), pa.float64())
    if (list, float) in types and not {str, (list, str)} & types:
        return pa.list_(pa.float64())
    if list in types:
        return pa.list_(pa.string())
    if str in types or not types:
        return pa.string()
    return pa.float64() if float in types else pa.int64()


def _columns(rows: Iterator[_Found], label_id: str) -> _Columns:
    """Name and type of every feature's column, which holds all its values, by feature; None is the label id."""
    kinds: dict[str, set[_Kind]] = {}
    for _, features in rows:
        for name, value in features.items():
            kinds.setdefault(name, set()).update(_kinds(value))
    taken = {*_OWN, label_id}
    columns: _Columns = {
        name: (f"feature_{name}" if name in taken else name, _column_type(kinds[name])) for name in sorted(kinds)
    }
    columns[None] = (label_id, pa.string())
    names = [name for name, _ in columns.values()]
    if len(set(names)) < len(names) or label_id in _OWN:
        raise ExportError(f"--label-id: expected a column that is none of {', '.join(_OWN)}, received {label_id!r}")
    return columns


def _record(row: FeedbackRow, features: Mapping[str, Any], columns: _Columns) -> dict[str, Any]:
    """One row of the table, by column."""
    propensity = 1.0 if row.propensity is None else row.propensity
    values = {
        column: row.label if name is None else _value(features.get(name), kind)
        for name, (column, kind) in columns.items()
    }
    return values | {
        **{name: getattr(row, name, None) for name in _OWN},
        "request_id": row.answer_id if row.request_id is None else row.request_id,
        "propensity": propensity,
        "debiased_weight": row.weight / propensity,
        "time": datetime.fromtimestamp(row.at, UTC),
        "experiment_run": row.run,
    }


def _value(value: Any, kind: pa.DataType) -> Any:
    """A feature's value as its column holds it; ids are strings."""
    value = _without_times(value)
    if value is None:
        return None
    if pa.types.is_map(kind) and isinstance(value, dict):
        return list(value.items())
    if pa.types.is_list(kind) and pa.types.is_floating(kind.value_type):
        return value if isinstance(value, list) else [value]
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        ids = [str(id_) for id_ in (value if isinstance(value, list) else [value])]
        return [(id_, 1.0) for id_ in ids] if pa.types.is_map(kind) else ids
    return str(value) if pa.types.is_string(kind) else value


def _without_times(value: Any) -> Any:
    """The ids alone of a history that came with times, which no bag has under such a name: its weights are numbers."""
    return value["ids"] if isinstance(value, dict) and isinstance(value.get("ids"), list) else value


def _seconds(option: str, text: str, now: float) -> float:
    if age := re.fullmatch(r"(\d+)([dhm])", text):
        return now - int(age[1]) * _SECONDS[age[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ExportError(
            f"{option}: expected ISO 8601, or an age such as 7d, 12h or 30m, received {describe(text)}"
        ) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
