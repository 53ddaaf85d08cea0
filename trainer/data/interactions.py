"""Interactions of all splits: read, filtered, checked and weighted, as tables of `query`, `label`, `time`, `weight`,
`shown` and the columns of contexts.

Legend: `N` rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Float64, Int64
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import Condition, seconds_of
from longtail.trainer.data.feedback import IMPRESSIONS, WEIGHT, is_feedback, sources_of
from longtail.trainer.data.files import DataFile, decoded, joined, names_in, pieces_of, read_columns
from longtail.trainer.data.ids import check_ids, encode_ids, in_use
from longtail.trainer.data.lists import read_lists
from longtail.trainer.data.problems import RowChecks, RowReport
from longtail.trainer.data.scratch import IN_MEMORY, Scratch
from longtail.trainer.data.times import UNITS, are_dates, as_numbers, as_times, implausible, in_words, unit_of
from longtail.trainer.errors import DataError

CONTEXT = "context:"
"""Before the name of a column that a query feature is read from."""
_NUMBER, _TIME = "longtail:number", "longtail:time"
"""Columns of a part: numbers of its rows, and its times as numbers."""
_LACKING = {
    WEIGHT: (pa.scalar(1.0), "each weighs 1"),
    IMPRESSIONS: (pa.scalar(None, pa.list_(pa.string())), "what was shown with them is unknown"),
}
"""Columns of an export of feedback that a log may lack: what stands there instead, and how that is said."""
TIMESTAMPS = b"timestamps"
"""Key of a table's metadata if its times are timestamps, in microseconds then."""


@dataclass(frozen=True)
class Interactions:
    """Interactions by split.

    Attributes:
        tables: `query` and `label`, dictionary-encoded strings, a dictionary for each chunk; `time` float64 and
            `weight` float32 where the recipe asks for them, `shown` lists of strings, and a context's columns under
            `context:NAME`.
    """

    tables: dict[str, pa.Table] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """Rows of a file that count so far, or of a piece of it: their raw columns, their numbers, their times.

    Attributes:
        dates: whether the times are dates, in microseconds since 1970.
    """

    split: str
    file: DataFile
    table: pa.Table
    dates: bool

    @property
    def numbers(self) -> Int64:
        """Return their numbers in the file, int64 [N]."""
        numbers: Int64 = self.table[_NUMBER].to_numpy()
        return numbers

    @property
    def times(self) -> Float64 | None:
        """float64 [N]; None without."""
        return self.table[_TIME].to_numpy() if _TIME in self.table.column_names else None

    def kept(self, kept_N: Bools) -> _Part:
        """Return some of the rows."""
        return self if kept_N.all() else replace(self, table=self.table.filter(pa.array(kept_N)))


def read_interactions(files: dict[str, list[DataFile]], data: DataConfig, report: RowReport, *,
                      now: datetime, context: Sequence[str] = (), strings: Sequence[str] = (),
                      scratch: Scratch = IN_MEMORY) -> Interactions:  # fmt: skip
    """Read every file of every split; bad rows are left out and noted, for `settle` to judge.

    Args:
        strings: those that text formats must not read as numbers or dates.
        scratch: where tables are put; what an earlier attempt has read is not read again.
    """
    made = Interactions()
    parts: deque[_Part] = deque()
    measured = [name for name in (data.timestamp, data.weight) if name is not None]
    for split, of_split in files.items():
        for number, file in enumerate(of_split):
            try:
                for piece in pieces_of(file, scratch.rows, measured) if scratch.bounded else [file]:
                    groups = "" if piece.groups is None else f"-{piece.groups.start}-{piece.groups.stop}"
                    name = f"{split}-{number:06}{groups}"
                    table, about = scratch.kept(name, partial(_read, piece, split, data, context, strings))
                    pa.default_memory_pool().release_unused()
                    report.read += about["read"]
                    report.filtered += about["filtered"]
                    for note in about["notes"]:
                        report.notes[note] = report.notes.get(note, 0) + about["read"]
                    parts.append(_Part(split, piece, table, about["dates"]))
            except DataError as error:
                made.errors.append(str(error))
    try:
        parts = _in_one_unit(parts, now)
    except DataError as error:
        made.errors.append(str(error))
    times = [part.times for part in parts if part.times is not None]
    report.unit = unit_of(times, now=now) if times else None
    newest = _newest(times, report.unit, now)
    del times
    by_split: dict[str, list[pa.Table]] = {split: [] for split in files}
    weighty: dict[str, bool] = {}
    while parts:
        part = parts.popleft()  # that it is held no longer than it takes
        try:
            if data.since is not None:
                part = _since(part, data.since, newest, report)
            table, weighs = _checked(part, data, report, newest, now, context)
            table = scratch.table(table)
        except DataError as error:
            made.errors.append(str(error))
        else:
            by_split[part.split].append(table)
            if weighs is not None:
                weighty[part.file.name] = weighty.get(part.file.name, False) or weighs
    made.errors.extend(
        f"{name}: column {data.weight or 'weight'!r}: expected some weight > 0, found only zeros"
        for name, some in weighty.items()
        if not some
    )
    made.errors[:] = dict.fromkeys(made.errors)  # of several pieces of a file, once
    for split, tables in by_split.items():
        if tables and sum(table.num_rows for table in tables):
            try:
                made.tables[split] = joined(tables, f"data.{split}")
            except DataError as error:
                made.errors.append(str(error))
        elif not made.errors and not any(problem.fatal for problem in report.problems):
            made.errors.append(nothing_in(files[split], report))
    return made


def nothing_in(files: list[DataFile], report: RowReport) -> str:
    """Return the error about files of which no row is left."""
    why = "; ".join(report.lines()[:1])
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].name}{more}: expected at least one interaction, found none{f' ({why})' if why else ''}"


def _read(file: DataFile, split: str, data: DataConfig, context: Sequence[str], strings: Sequence[str]
          ) -> tuple[pa.Table, dict[str, Any]]:  # fmt: skip
    """Return the rows of a file that meet the filter, with their numbers and times; and what a report says of them."""
    if file.kind == "lists":
        pairs = read_lists(file)
        numbers = pa.array(np.arange(pairs.num_rows))
        table = pairs.rename_columns([data.query_id, data.label_id]).append_column(_NUMBER, numbers)
        return table, {"read": len(numbers), "filtered": 0, "notes": [], "dates": False}
    events = data.events.column if data.events else None
    needed = [data.query_id, data.label_id, *filter(None, (data.timestamp, data.weight, events))]
    shown = [data.impressions] if data.impressions and split != "test" else []
    wanted = list(dict.fromkeys([*needed, *(column for column, _, _ in data.filter), *context, *shown]))
    names = names_in(file)
    feedback = is_feedback(names)
    sources = sources_of(data, [data.query_id, *context], names) if feedback else {}
    lacking = [name for name in _LACKING if name in (data.weight, *shown) and name not in names]
    wanted = [name for name in wanted if name not in lacking]
    stored = [sources.get(name, name) for name in wanted]
    if missing := next((name for name, own in zip(wanted, stored, strict=True) if own not in names), None):
        raise DataError(f"{file.name}: expected a column {missing!r}, found {', '.join(names)}")
    strings = [sources.get(name, name) for name in (*needed, *(each for each in context if each in strings))]
    table = read_columns(file, stored, strings=strings).select(stored).rename_columns(wanted)
    for name in lacking:
        table = table.append_column(name, pa.repeat(_LACKING[name][0], table.num_rows))
    notes = [f"lack a column {name!r}: {_LACKING[name][1]}" for name in lacking]
    if feedback and sources.get(data.weight or "", data.weight) != WEIGHT:
        notes.append(f"are feedback of a service without its propensities, which data.weight = {WEIGHT!r} takes")
    ids = (data.query_id, data.label_id)
    about = {"read": table.num_rows, "notes": notes, "dates": False}
    table = table.append_column(_NUMBER, pa.array(np.arange(file.first, file.first + table.num_rows)))
    if data.filter:
        meets_N = rows_that_meet(data.filter, table, file)
        table = table if meets_N.all() else table.filter(pa.array(meets_N))
    about["filtered"] = about["read"] - table.num_rows
    table = _encoded(table, ids, file)
    if data.timestamp is not None:
        times_N = as_times(table[data.timestamp])
        if times_N is None:
            raise file.wrong(data.timestamp, "numbers or timestamps", table[data.timestamp].type)
        table = table.append_column(_TIME, pa.array(times_N))
        about["dates"] = are_dates(table[data.timestamp])
    return table, about


def _in_one_unit(parts: deque[_Part], now: datetime) -> deque[_Part]:
    """Return parts whose times are all dates, or all numbers: beside numbers, dates are in the unit of these."""
    numbers = [part for part in parts if part.times is not None and len(part.numbers) and not part.dates]
    if not numbers or not any(part.dates for part in parts):
        return parts
    unit = unit_of([part.times for part in numbers if part.times is not None], now=now)
    if unit is None and (dated := next((part for part in parts if part.dates and len(part.numbers)), None)):
        raise DataError(
            f"data.timestamp: expected seconds, milliseconds, microseconds or nanoseconds since 1970 in "
            f"{numbers[0].file.name}, as there are dates in {dated.file.name}, found other numbers"
        )
    scale = UNITS[unit or "microseconds"] / UNITS["microseconds"]

    def as_number(part: _Part) -> _Part:
        at, times_N = part.table.column_names.index(_TIME), part.table[_TIME].to_numpy() * scale
        return replace(part, dates=False, table=part.table.set_column(at, _TIME, pa.array(times_N)))

    return deque(as_number(part) if part.dates else part for part in parts)


def _encoded(table: pa.Table, ids: Sequence[str], file: DataFile) -> pa.Table:
    """Return the table with its ids as numbers of distinct strings, which take a part of the memory."""
    for name in ids:
        encoded = encode_ids(table[name], name, file)
        table = table.set_column(table.column_names.index(name), name, encoded)
    return table


def _newest(times: list[Float64], unit: str | None, now: datetime) -> float | None:
    """Return the latest plausible time of all rows; None without a unit."""
    if unit is None:
        return None
    latest = [part[~implausible(part, unit, now=now)].max(initial=-np.inf) for part in times]
    return float(max(latest))


def _since(part: _Part, since: datetime | str, newest: float | None, report: RowReport) -> _Part:
    """Return rows from a time on; those without a time stay, for they are judged as bad rows."""
    if report.unit is None or newest is None or part.times is None:
        raise DataError(
            "data.since: expected data.timestamp as dates, or as seconds, milliseconds, microseconds or nanoseconds "
            f"since 1970, found other numbers in {part.file.name}"
        )
    per_second = UNITS[report.unit]
    first = newest - seconds_of(since) * per_second if isinstance(since, str) else since.timestamp() * per_second
    part_kept = part.kept(~(part.times < first))
    report.early += len(part.numbers) - len(part_kept.numbers)
    return part_kept


def _checked(part: _Part, data: DataConfig, report: RowReport, newest: float | None, now: datetime,
             context: Sequence[str]) -> tuple[pa.Table, bool | None]:  # fmt: skip
    """Return the good rows of a part as a table; and whether any weighs something, None where there are no weights or
    rows."""
    checks = RowChecks(part.file.name, part.numbers)
    ids = {"query": data.query_id, "label": data.label_id}
    columns: dict[str, pa.Array] = {key: encode_ids(part.table[name], name, part.file) for key, name in ids.items()}
    if data.since is not None:
        columns = {key: in_use(column) for key, column in columns.items()}
    for key, name in ids.items():
        check_ids(checks, name, columns[key], data.placeholders)
    if part.times is not None and data.timestamp is not None:
        _check_times(checks, part, data, report.unit, now)
        columns["time"] = pa.array(part.times)
    weights_N, unused_N = _weights(checks, part, data, report, newest)
    if weights_N is not None:
        columns["weight"] = pa.array(weights_N.astype(np.float32))
    if data.events and data.events.column:
        types = part.table[data.events.column].combine_chunks().cast(pa.string())
        columns["event"] = pc.index_in(types, value_set=pa.array(data.events.weights, pa.string()))
    if data.impressions and part.split != "test":
        columns["shown"] = _lists_of(part.table[data.impressions], data.impressions, part.file)
    of_contexts = decoded(part.table.select(list(context)))
    columns |= {CONTEXT + name: of_contexts[name] for name in context}
    report.note(checks.problems)
    report.dropped += int(checks.fatal.sum())
    report.unweighted += int((unused_N & ~checks.fatal).sum())
    kept_N = ~(checks.fatal | unused_N)
    if not kept_N.all():
        columns = {name: column.filter(pa.array(kept_N)) for name, column in columns.items()}
        columns |= {key: in_use(columns[key]) for key in ids}
    report.dates |= part.dates
    weighs = None if weights_N is None or not kept_N.any() else bool(weights_N[kept_N].any())
    return pa.table(columns).replace_schema_metadata({TIMESTAMPS: b"\xc2\xb5s"} if part.dates else None), weighs


def _lists_of(column: pa.ChunkedArray, name: str, file: DataFile) -> pa.ChunkedArray:
    """Lists of ids, as strings."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_string(kind.value_type) or pa.types.is_integer(kind.value_type)
    ):
        raise file.wrong(name, "lists of ids, strings or integers", kind)
    return column.cast(pa.list_(pa.string()))


def _check_times(checks: RowChecks, part: _Part, data: DataConfig, unit: str | None, now: datetime) -> None:
    """Count missing times as bad, implausible ones only where bad rows are dropped."""
    name, times_N = data.timestamp or "", part.times
    if times_N is None:
        return
    raw, finite_N = part.table[name], np.isfinite(times_N)
    text = pa.types.is_string(raw.type) or pa.types.is_large_string(raw.type)
    expected = "numbers or timestamps" if text else "finite numbers"
    checks.add(name, ~finite_N, expected=expected, found=None, values=raw)
    if unit is None:
        return
    odd_N = finite_N & implausible(times_N, unit, now=now)
    drop = data.on_bad_row == "drop"
    for other in UNITS:
        if other != unit and odd_N.any():
            mixed_N = odd_N & ~implausible(times_N, other, now=now)
            first = times_N[mixed_N][0] if mixed_N.any() else 0.0
            found = f"{other} ({first:.0f}, {in_words(first, other)})"
            checks.add(name, mixed_N, expected=f"{unit} as in most rows", found=found, fatal=drop)
            odd_N &= ~mixed_N
    if odd_N.any():
        found = in_words(float(times_N[odd_N][0]), unit)
        checks.add(name, odd_N, expected="times since 1990 and not in the future", found=found, fatal=drop)


def _weights(
    checks: RowChecks, part: _Part, data: DataConfig, report: RowReport, newest: float | None
) -> tuple[Float64 | None, Bools]:
    """Return weights by column, event type and age, float64 [N]; and rows whose event type weighs 0, bool [N]."""
    weights_N, unused_N = None, np.zeros(len(part.numbers), bool)
    if data.weight:
        raw = part.table[data.weight]
        weights_N = as_numbers(raw)
        if weights_N is None:
            raise part.file.wrong(data.weight, "numbers", raw.type)
        text = pa.types.is_string(raw.type) or pa.types.is_large_string(raw.type)
        expected = "numbers" if text else "finite numbers"
        checks.add(data.weight, ~np.isfinite(weights_N), expected=expected, found=None, values=raw)
        large_N = np.isfinite(weights_N) & (weights_N > np.finfo(np.float32).max)
        checks.add(data.weight, weights_N < 0, expected="weights >= 0", found=None, values=weights_N)
        checks.add(data.weight, large_N, expected="weights that float32 can hold", found=None, values=weights_N)
        weights_N = np.where(large_N, np.inf, weights_N)
    if data.events and data.events.column:
        by_event_N = _event_weights(checks, part, data.events.column, data.events.weights)
        unused_N = by_event_N == 0
        weights_N = by_event_N if weights_N is None else weights_N * by_event_N
    if data.events and data.events.half_life and part.times is not None:
        if report.unit is None or newest is None:
            raise DataError(
                "data.events.half_life: expected data.timestamp as dates, or as seconds, milliseconds, microseconds "
                f"or nanoseconds since 1970, found other numbers in {part.file.name}"
            )
        ages_N = np.maximum(newest - part.times, 0) / (seconds_of(data.events.half_life) * UNITS[report.unit])
        decay_N = np.exp2(-ages_N)
        weights_N = decay_N if weights_N is None else weights_N * decay_N
    return weights_N, unused_N


def _event_weights(checks: RowChecks, part: _Part, name: str, weights: dict[str, float]) -> Float64:
    """Return what every row's event type weighs, float64 [N], NaN of unlisted ones, which are bad rows."""
    column = part.table[name]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise part.file.wrong(name, "event types as strings or integers", column.type)
    encoded = encode_ids(column, name, part.file)
    types = encoded.dictionary.to_pylist()
    by_type = np.array([*(weights.get(each, np.nan) for each in types), np.nan])
    at_N = np.asarray(pc.fill_null(encoded.indices, len(types)))
    counts = np.bincount(at_N, minlength=len(types) + 1)
    others = [f"{each!r} ({counts[at]:,})" for at, each in enumerate(types) if each not in weights]
    missing = ["null"] if counts[-1] else []
    checks.add(
        name,
        np.isnan(by_type[at_N]),
        expected=f"one of {', '.join(weights)} (weight 0 leaves a type out)",
        found=", ".join([*others[:5], *missing]),
    )
    found_N: Float64 = by_type[at_N]
    return found_N


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "in": lambda column, values: pc.is_in(column, value_set=values),
    "not in": lambda column, values: pc.invert(pc.is_in(column, value_set=values)),
}


def rows_that_meet(conditions: Sequence[Condition], table: pa.Table, file: DataFile) -> Bools:
    """Return rows that meet every condition, bool [N]; a null meets none.

    Args:
        conditions: `(column, operator, value)`.
    """
    meets_N = np.ones(table.num_rows, bool)
    for name, operator, operand in conditions:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        many = isinstance(operand, list)
        try:
            column, values = _alike(column, operand if many else [operand])
            found = _OPERATORS[operator](column, values if many else values[0])
        except (pa.ArrowNotImplementedError, ValueError, TypeError) as error:
            raise file.wrong(name, f"what can be compared with {operand!r} (data.filter)", column.type) from error
        meets_N &= np.asarray(pc.fill_null(pc.and_kleene(found, pc.is_valid(column)), False))
    return meets_N


def _alike(column: pa.ChunkedArray, operands: list[Any]) -> tuple[pa.ChunkedArray, pa.Array]:
    """Return a column and values of one type: text is read as numbers or times where the recipe has such."""
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if isinstance(operands[0], date):
        wanted = pa.timestamp("us", kind.tz if pa.types.is_timestamp(kind) else None)
        if not (text or pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
            raise ValueError("a date beside no times")
        times = [each if isinstance(each, datetime) else datetime(each.year, each.month, each.day) for each in operands]
        return column.cast(wanted, safe=False), pa.array(times).cast(wanted)
    if pa.types.is_null(kind):
        return column, pa.nulls(len(operands))
    if text and not isinstance(operands[0], str):
        return column.cast(pa.float64()), pa.array(operands, pa.float64())
    if pa.types.is_integer(kind) and any(isinstance(each, float) for each in operands):
        return column.cast(pa.float64(), safe=False), pa.array(operands, pa.float64())
    return column, pa.array(operands).cast(kind)
