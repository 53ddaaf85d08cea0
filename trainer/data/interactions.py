"""Interactions of all splits as one table in DuckDB: read, checked and weighted.

Legend: `N` rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import numpy as np

from longtail.bundle.dates import span_seconds
from longtail.bundle.validation import did_you_mean
from longtail.tables import DataError, DataFile
from longtail.tables.database import Database, OpenedFile
from longtail.tables.table import FileRows, Table, id_expression, read_table
from longtail.tables.times import UNITS, Clock, format_time, is_plausible, read_file_times, time_expressions
from longtail.tables.values import (
    as_type,
    double,
    is_integer,
    is_list_of_ids,
    is_text,
    literal,
    to_number,
    to_text,
    type_name,
)
from longtail.trainer.config import DataConfig
from longtail.trainer.data.ids import IdTexts, check_ids
from longtail.trainer.data.problems import RowCheck, RowReport, find_problems

WEIGHT, IMPRESSIONS, TIME, EVENT = "debiased_weight", "impressions", "time", "event"
ROLE_COLUMNS = (
    "answer", "idempotency_key", EVENT, "weight", "propensity", WEIGHT, "position", "bias_removal", "popularity",
    "release", "source", TIME, "arm", "run", "unit", IMPRESSIONS,
)  # fmt: skip
"""Columns of exported feedback that are no features. A query feature of such a name has the column `feature_NAME`."""
FEEDBACK_COLUMNS = {"answer", "propensity", "source", WEIGHT, EVENT, TIME, IMPRESSIONS}
"""Columns of every export of feedback, by which a log is known as one."""
CONTEXT = "context:"
"""Prefix of columns with values of query features."""
_LACKING = {
    WEIGHT: (("1.0::DOUBLE", "DOUBLE"), "each weighs 1"),
    IMPRESSIONS: (("NULL::VARCHAR[]", "VARCHAR[]"), "what was shown with them is unknown"),
}
"""Columns of exported feedback that a log may lack: the replacement value, its type, and a note for the report."""
_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass
class InteractionLog:
    """Hold the rows of all files, in their order.

    Attributes:
        table: table of `file`, `query` and `label` as texts, and, if the recipe has them, `number` and `micros` of the
            time, `weight`, `event`, `shown`, and contexts under `context:NAME`.
        splits: split of each file, by the file's number.
        files: files that could be read, by number.
        time: SQL expression of the time, a DOUBLE.
        clock: unit and newest of the times; None without times.
        alive: SQL condition of the rows that `data.since` keeps.
    """

    database: Database
    table: Table
    splits: list[str]
    files: dict[int, FileRows]
    time: str | None = None
    clock: Clock | None = None
    alive: str = "true"


def read_log(
    database: Database, files: dict[str, list[DataFile]], data: DataConfig, report: RowReport, errors: list[str], *,
    now: datetime, context: Sequence[str] = (),
) -> InteractionLog:  # fmt: skip
    """Read the files of all splits; determine the unit of times and the rows that count.

    Args:
        errors: list to which errors about whole files are added.
        context: columns with values of query features.
    """
    every = [data_file for split_files in files.values() for data_file in split_files]
    splits = [split for split, split_files in files.items() for _ in split_files]
    notes: dict[int, list[str]] = {}
    columns = partial(_list_columns, data=data, splits=splits, context=context, notes=notes)
    table = read_table(database, every, columns, f"data.{' and data.'.join(files)}", errors)
    log = InteractionLog(database, table, splits, {file.number: file for file in table.parts})
    for file in table.parts:
        report.read += file.rows + len(file.rejected)
        if file.rejected:
            report.reject(file.rejected)
        for note in notes[file.number]:
            report.notes[note] = report.notes.get(note, 0) + file.rows
    if data.timestamp is not None and table.rows:
        try:
            _set_clock(log, data, report, now)
        except DataError as error:
            errors.append(str(error))
    return log


def map_columns(data: DataConfig, features: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """Map a recipe's columns to differing columns of exported feedback.

    Args:
        features: the recipe's columns of the query's id and features.
        names: the export's columns.
    """
    roles = {
        data.label_id: "label_id",
        data.timestamp: TIME,
        data.weight: WEIGHT,
        data.impressions: IMPRESSIONS,
        data.events.column if data.events else None: EVENT,
    }
    renamed_columns = {name: column for name, column in roles.items() if name is not None and name not in names}
    return renamed_columns | {
        name: f"feature_{name}" for name in features if name in ROLE_COLUMNS and name not in roles
    }


def _list_columns(
    opened: OpenedFile, number: int, *, data: DataConfig, splits: Sequence[str], context: Sequence[str],
    notes: dict[int, list[str]],
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Return SQL expressions and types of a file's columns; add its notes for the report."""
    file, names = opened.file, opened.names
    feedback = {*names} >= FEEDBACK_COLUMNS
    sources = map_columns(data, [data.query_id, *context], names) if feedback else {}
    impressions = data.impressions if splits[number] != "test" else None
    events = data.events.column if data.events else None
    lacking = [name for name in _LACKING if name in (data.weight, impressions) and name not in names]
    needed = [data.query_id, data.label_id, data.timestamp, data.weight, events]
    cells = {name: _LACKING[name][0] for name in lacking}
    for name in filter(None, [*needed, *context, impressions]):
        if name in lacking:
            continue
        if sources.get(name, name) not in names:
            hint = did_you_mean(name, names)
            raise DataError(f"{file.name}: expected a column {name!r}, found {', '.join(names)}{hint}")
        cells[name] = opened.column(sources.get(name, name))
    columns = {
        "file": (f"{number}::INTEGER", "INTEGER"),
        "query": id_expression(opened, data.query_id, *cells[data.query_id]),
        "label": id_expression(opened, data.label_id, *cells[data.label_id]),
    }
    if data.timestamp is not None:
        columns |= time_expressions(file, data.timestamp, *cells[data.timestamp])
    if data.weight is not None:
        value, kind = cells[data.weight]
        if (weight := to_number(value, kind)) is None:
            raise file.wrong(data.weight, "numbers", type_name(kind))
        columns["weight"] = weight, "DOUBLE"
    if events is not None:
        value, kind = cells[events]
        if not (is_text(kind) or is_integer(kind)):
            raise file.wrong(events, "event types as strings or integers", type_name(kind))
        columns["event"] = to_text(value, kind), "VARCHAR"
    if impressions is not None:
        value, kind = cells[impressions]
        if not is_list_of_ids(kind):
            raise file.wrong(impressions, "lists of ids, strings or integers", type_name(kind))
        columns["shown"] = as_type(value, kind, "VARCHAR[]"), "VARCHAR[]"
    columns |= {CONTEXT + name: cells[name] for name in context}
    notes[number] = [f"lack a column {name!r}: {_LACKING[name][1]}" for name in lacking]
    if feedback and sources.get(data.weight or "", data.weight) != WEIGHT:
        notes[number].append(
            f"are feedback of a service without its propensities, which data.weight = {WEIGHT!r} takes"
        )
    return columns


def _set_clock(log: InteractionLog, data: DataConfig, report: RowReport, now: datetime) -> None:
    """Convert times to one unit, and apply `data.since`."""
    number, micros, file = (log.table.column(name) for name in ("number", "micros", "file"))
    times = read_file_times(log.database, log.table.name, file, number, micros, condition=log.alive, now=now)
    for file_number in times.without:
        opened = log.files[file_number].opened
        name = data.timestamp if data.timestamp in opened.names else None
        if name is not None and is_text(opened.column(name)[1]):
            raise opened.file.wrong(name, "numbers or timestamps", "text")
    order = [number for number in times.numbered if number not in times.without]
    if times.dated and order and times.unit is None:
        raise DataError(
            f"data.timestamp: expected seconds, milliseconds, microseconds or nanoseconds since 1970 in "
            f"{log.files[order[0]].opened.file.name}, as there are dates in "
            f"{log.files[times.dated[0]].opened.file.name}, found other numbers"
        )
    log.time, report.dates = times.time, bool(times.dated) and not times.numbered
    log.clock = Clock.measure(log.database, log.time, log.table.name, log.alive, now)
    report.unit = log.clock.unit
    if data.since is None:
        return
    if log.clock.unit is None or log.clock.newest is None:
        raise DataError(
            "data.since: expected data.timestamp as dates, or as seconds, milliseconds, microseconds or nanoseconds "
            f"since 1970, found other numbers in {log.files[min(times.dated + times.numbered)].opened.file.name}"
        )
    scale = UNITS[log.clock.unit]
    first_time = log.clock.newest - span_seconds(data.since) * scale if isinstance(data.since, str) else (
        data.since.timestamp() * scale
    )  # fmt: skip
    early = f"coalesce({log.time} < {double(first_time)}, false)"
    (report.early,) = log.database.row(f"SELECT count(*) FROM {log.table.name} WHERE {early}")
    log.alive = f"NOT {early}"


def check_log(
    log: InteractionLog, data: DataConfig, report: RowReport, errors: list[str], queries: IdTexts, labels: IdTexts
) -> str:
    """Number ids, weigh rows, and remove bad rows, which are noted for `refuse_problems`.

    Returns:
        A table of `row_id`, `file`, codes `query` and `label`, and, if the log has them, `time`, `weight`, `event`,
        `shown` and contexts.
    """
    database, table = log.database, log.database.name("checked")
    weights = data.events.by_type if data.events else {}
    cells = {"row_id": "log.rowid", "file": log.table.column("file"), "query": "queries.code", "label": "labels.code"}
    if log.time is not None:
        cells["time"] = log.time
    if "weight" in log.table.kinds:  # messages name the weight of the file, not its product with the event's
        cells["given"] = log.table.column("weight")
    if weights:
        types = f"[{', '.join(map(literal, weights))}]"
        # DuckDB counts positions from 1.
        cells["event"] = f"list_position({types}, {log.table.column('event')})::INTEGER - 1"
    if "shown" in log.table.kinds:
        cells["shown"] = log.table.column("shown")
    contexts = [name for name in log.table.kinds if name.startswith(CONTEXT)]
    cells |= {f"context_{i}": log.table.column(name) for i, name in enumerate(contexts)}
    if "given" in cells or weights:
        cells["weight"] = _multiply_weights(log, weights)
    database.run(
        f"CREATE TABLE {table} AS SELECT {', '.join(f'{cell} AS {name}' for name, cell in cells.items())} "
        f"FROM {log.table.name} AS log "
        f"LEFT JOIN {queries.table} AS queries ON log.{log.table.column('query')} = queries.text "
        f"LEFT JOIN {labels.table} AS labels ON log.{log.table.column('label')} = labels.text WHERE {log.alive}"
    )
    checks = [*check_ids(data.query_id, "query", queries.odd, data.placeholders),
              *check_ids(data.label_id, "label", labels.odd, data.placeholders), *_time_checks(log, data)]  # fmt: skip
    if "weight" in cells:
        checks += _weight_checks(log, data, weights)
    bad = find_problems(database, table, checks, log.files.values(), report)
    # Weight 0 removes rows only after the checks, which also report bad rows among these.
    unused = "false"
    if weights:
        unweighted_types = [i for i, factor in enumerate(weights.values()) if factor == 0]
        unused = f"coalesce(event IN ({', '.join(map(str, unweighted_types)) or 'NULL'}), false)"
    dropped, unweighted = database.row(
        f"SELECT count(*) FILTER ({bad}), count(*) FILTER (NOT ({bad}) AND {unused}) FROM {table}"
    )
    report.dropped += dropped
    report.unweighted += unweighted
    if dropped or unweighted:
        database.run(f"DELETE FROM {table} WHERE ({bad}) OR {unused}")
    if "weight" in cells:
        zeros = database.rows(f"SELECT file FROM {table} GROUP BY file HAVING NOT bool_or(weight > 0) ORDER BY file")
        # A file whose weights are all 0 would add pairs without any loss: most likely a wrong column.
        errors.extend(
            f"{log.files[number].opened.file.name}: column {data.weight or 'weight'!r}: expected some weight > 0, "
            "found only zeros"
            for (number,) in zeros
        )
    if "given" in cells:
        database.run(f"ALTER TABLE {table} DROP given")
    return table


def _multiply_weights(log: InteractionLog, weights: dict[str, float]) -> str:
    """Return the SQL expression of a row's weight, by column and event type."""
    factors = []
    if "weight" in log.table.kinds:
        column = log.table.column("weight")
        # Larger weights become infinite here, and a check refuses them with their value in the file.
        factors.append(f"CASE WHEN {column} > {double(_FLOAT32)} THEN 'inf'::DOUBLE ELSE {column} END")
    if weights:
        type_weights, types = ", ".join(map(double, weights.values())), ", ".join(map(literal, weights))
        factors.append(f"list_extract([{type_weights}], list_position([{types}], {log.table.column('event')}))")
    return f"({' * '.join(f'({factor})' for factor in factors)})::DOUBLE"


def _time_checks(log: InteractionLog, data: DataConfig) -> Iterator[RowCheck]:
    """Yield checks of times; impossible ones would decide splits, forecasts and ages."""
    name, clock = data.timestamp, log.clock
    if name is None or clock is None:
        return
    yield RowCheck(
        name, "NOT isfinite(time) OR time IS NULL", "finite numbers", raw=name, of_text="numbers or timestamps"
    )
    if clock.unit is None:
        return
    odd = f"isfinite(time) AND NOT {is_plausible('time', clock.unit, clock.now)}"
    for other_unit in UNITS:
        if other_unit == clock.unit:
            continue

        def mixed(first_time: float, other_unit: str = other_unit) -> str:
            return f"{other_unit} ({first_time:.0f}, {format_time(first_time, other_unit)})"

        is_other = is_plausible("time", other_unit, clock.now)
        yield RowCheck(name, f"{odd} AND {is_other}", f"{clock.unit} as in most rows", value="time", format_value=mixed)
        odd += f" AND NOT {is_other}"
    expected = "times since 1990 and not in the future"
    yield RowCheck(
        name, odd, expected, value="time", format_value=lambda first_time: format_time(first_time, clock.unit)
    )


def _weight_checks(log: InteractionLog, data: DataConfig, weights: dict[str, float]) -> Iterator[RowCheck]:
    if name := data.weight:
        yield RowCheck(name, "NOT isfinite(given) OR given IS NULL", "finite numbers", raw=name, of_text="numbers")
        yield RowCheck(name, "given < 0", "weights >= 0", value="given")
        yield RowCheck(
            name, f"isfinite(given) AND given > {_FLOAT32!r}", "weights that float32 can hold", value="given"
        )
    if weights:
        event = (data.events.column if data.events else None) or ""
        expected = f"one of {', '.join(weights)} (weight 0 leaves a type out)"
        yield RowCheck(event, "event IS NULL", expected, counted=lambda file: _unlisted(log, weights, file))


def _unlisted(log: InteractionLog, weights: Iterable[str], file: int) -> str:
    """Describe a file's event types without a weight."""
    event, listed = log.table.column("event"), ", ".join(map(literal, weights))
    types = log.database.rows(
        f"SELECT {event}, count(*) FROM {log.table.name} WHERE {log.alive} AND {log.table.column('file')} = {file} AND "
        f"({event} IS NULL OR {event} NOT IN ({listed})) GROUP BY 1 ORDER BY min(rowid)"
    )
    type_counts = [f"{name!r} ({count:,})" for name, count in types if name is not None]
    return ", ".join([*type_counts[:5], *(["null"] if any(name is None for name, _ in types) else [])])
