"""Make the priors of a release: numbers per label, limits of their weights, and scales of their coordinates.

They come from a table, from each label's bucket and display columns, and from the answers of a service.

Legend: `L` labels, `P` priors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from longtail.bundle import BONUS_BUCKETS, BUCKET_NAMES, MAX_PRIORS, Bonus, Bundle, Popularity, Prior, Priors
from longtail.bundle.arrays import Float32, Float64, Int64
from longtail.bundle.augment import fitted_scale
from longtail.bundle.conditions import NumberColumn
from longtail.bundle.dates import nats_per_day, span_seconds
from longtail.bundle.errors import ConditionError
from longtail.bundle.filterable import FilterKind, filter_kind
from longtail.bundle.ids import find_rows, repeated_ids
from longtail.bundle.one_line import one_line
from longtail.bundle.priors import EXPOSED, ExposureState
from longtail.index.errors import PriorsError
from longtail.tables import DataError, as_source, find_files, is_query
from longtail.tables.database import OpenedFile, open_database
from longtail.tables.queries import rename_files
from longtail.tables.table import Table, id_expression, read_table
from longtail.tables.values import double, is_nothing, is_text, to_number, type_name

LABEL_COLUMN = "label_id"
_LIMIT_IN_NATS = 3.0
"""At the default limit of its weight, one standard deviation of a prior adds this many nats to a score."""
_SPREAD_OF_DATES = 3.0
"""Factor on κ of dates, so that lists hold labels of like age. With 100,000 labels of two years and 6 lists a query,
recall@100 at a half-life of 36 days is .956 (.880 without the factor), without decay .998 (1.000)."""
_LARGEST = float(np.finfo(np.float32).max)
_MOST_EXAMPLES = 5
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Limits:
    """Weights that requests may give a prior; a request that names no weight gets `default`."""

    minimum: float
    maximum: float
    default: float = 0.0

    __pydantic_config__ = _STRICT

    def __post_init__(self) -> None:
        if not (np.isfinite([self.minimum, self.maximum]).all() and self.minimum <= self.default <= self.maximum):
            raise PriorsError(
                "prior: expected finite weights MINIMUM <= DEFAULT <= MAXIMUM, received "
                f"{self.minimum:g}, {self.default:g}, {self.maximum:g}"
            )


@dataclass(frozen=True)
class Exposure:
    """Configure the prior of shares of answers: half-life (`7d`) and limits of its weight."""

    half_life: str
    limits: Limits = Limits(-1.0, 1.0)

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class PriorTable:
    """A table of priors, with limits of their weights and a rule for missing values.

    Args:
        path: file, directory, glob or URL of a table: a column `label_id` and a column of numbers for each prior.
        limits: limits of the weights, by name of the prior. Priors without limits get ±3 / σ, with σ the standard
            deviation of the prior, and the default 0. If limits are given, columns without limits are left out.
        missing: value of labels that the table lacks or has null for: a number, or the column's `min` or `median`.
            None: every label must have a value. Labels added while serving get the same value, the median if None.
    """

    path: Path | str
    limits: Mapping[str, Limits] = field(default_factory=dict)
    missing: float | Literal["min", "median"] | None = None

    __pydantic_config__ = _STRICT
    __repr__ = one_line

    def read(self, bundle: Bundle, *, like: Priors | None = None, progress: Callable[[str], None]) -> Priors:
        """Read the priors of a bundle's labels; raises PriorsError.

        Where no limits are given, those of `like`, the priors of an earlier release, stay.
        """
        try:
            with open_database() as duck:
                table = read_table(duck, find_files(self.path), _columns, str(self.path))
                table.refuse_rejected()
                columns = [name for name in table.kinds if name != LABEL_COLUMN]
                table.find_types(columns)
                names = self._names(columns, like)
                values = {name: self._values(table, name) for name in names}
                ids = table.arrow([LABEL_COLUMN])[LABEL_COLUMN].combine_chunks()
                if (empty_files := duck.empty_in_words()) is not None:
                    progress(f"priors: {empty_files[0].lower()}{empty_files[1:]}")
        except DataError as error:
            raise PriorsError(str(error)) from error
        # `_values` appends a NaN row, which labels that the table lacks point at.
        rows_L = _find_table_rows(self.path, ids, bundle, progress)
        values_LP = np.stack([values[name][rows_L] for name in names], axis=1)
        missing_P = self._fill(values_LP, names, bundle)
        filled_LP: Float32 = np.where(np.isnan(values_LP), missing_P, values_LP).astype(np.float32)
        before = {} if like is None else {prior.name: prior for prior in like.from_table}
        settings = tuple(
            self._setting(name, filled_LP[:, i], float(missing_P[i]), bundle, before.get(name))
            for i, name in enumerate(names)
        )
        return Priors(settings, filled_LP)

    def _names(self, columns: Sequence[str], like: Priors | None) -> list[str]:
        """Return the names of the priors, in the order of their coordinates."""
        if like is not None:
            required: Collection[str] = [prior.name for prior in like.from_table]
            if unknown := self.limits.keys() - set(required):
                raise PriorsError(
                    f"prior: expected one of the release's, {required}, received {min(unknown)!r}; a further prior "
                    "takes a further coordinate: longtail-index build"
                )
        else:
            required = [*self.limits] or columns
        names = [name for name in columns if name in required]
        if EXPOSED in names:
            raise PriorsError(
                f"{self.path}: a prior named {EXPOSED!r} is not allowed, because this name is for shares of "
                f"answers; use another name, or set {EXPOSED} in a TOML file of priors"
            )
        if absent := [name for name in required if name not in columns]:
            raise PriorsError(
                f"{self.path}: expected a column for each prior {list(required)}, found none for {absent}"
            )
        if not 1 <= len(names) <= MAX_PRIORS:
            raise PriorsError(f"{self.path}: expected 1 to {MAX_PRIORS} priors, found {names}")
        # A refresh keeps the order, because the lists of the index hold these coordinates.
        return names if like is None else [*required]

    def _values(self, table: Table, name: str) -> Float64:
        """Return a column, float64, with a NaN row appended; nulls are NaN."""
        cell, kind = table.column(name), table.kinds[name]
        number = f"{cell}::DOUBLE" if kind == "BOOLEAN" else to_number(cell, kind)
        if number is None:
            raise PriorsError(f"{self.path}, column {name!r}: expected numbers, found {type_name(kind)}")
        number = f"CASE WHEN NOT isnan({number}) THEN {number} END"
        wrong = f"abs({number}) > {double(_LARGEST)}"
        if is_text(kind):
            wrong += f" OR ({number} IS NULL AND NOT {is_nothing(cell)})"
        query = f"SELECT rowid, {cell} FROM {table.name} WHERE {wrong} ORDER BY rowid LIMIT 1"
        for row, value in table.database.rows(query):
            file, file_row = table.locate(row)
            raise PriorsError(
                f"{file}, column {name!r}, row {file_row}: expected a number that float32 holds, found {value!r}"
            )
        numbers = table.database.arrow(f"SELECT {number} AS value FROM {table.name} ORDER BY rowid")["value"]
        values: Float64 = np.append(numbers.to_numpy(), np.nan)
        return values

    def _fill(self, values_LP: Float64, names: list[str], bundle: Bundle) -> Float64:
        """Return the value of labels without one, float64 [P], for each prior."""
        absent_LP = np.isnan(values_LP)
        if self.missing is None and absent_LP.any():
            row, i = map(int, np.argwhere(absent_LP)[0])
            first = bundle.labels.ids[row].as_py()
            raise PriorsError(
                f"{self.path}, column {names[i]!r}: expected a number for every label, found none for "
                f"{int(absent_LP[:, i].sum()):,} of {len(values_LP):,}, the first {first!r}; "
                'missing = "min", "median" or a number in a TOML file of priors says what they get'
            )
        if isinstance(self.missing, float | int):
            if not abs(self.missing) <= _LARGEST:
                raise PriorsError(f"missing: expected a number that float32 holds, received {self.missing:g}")
            return np.full(len(names), float(self.missing))
        if absent_LP.all(axis=0).any():
            raise PriorsError(
                f"{self.path}, column {names[int(absent_LP.all(axis=0).argmax())]!r}: expected a number for some label "
                "of the bundle, found none"
            )
        fill: Float64 = np.nanmin(values_LP, axis=0) if self.missing == "min" else np.nanmedian(values_LP, axis=0)
        return fill

    def _setting(self, name: str, values_L: Float32, missing: float, bundle: Bundle, before: Prior | None) -> Prior:
        if before is None:
            limits, kappa = _choose_limits(values_L), fitted_scale(bundle.embeddings, values_L)
        else:
            limits, kappa = Limits(before.minimum, before.maximum, before.default), before.kappa
        return _prior(name, "table", self.limits.get(name, limits), missing=missing, kappa=kappa)


@dataclass(frozen=True)
class PriorSpec:
    """Priors from a table, from buckets and display columns, and from a service's answers.

    Args:
        table: a `PriorTable` or its path; None: no table.
        bonuses: filters by the name of their bonus (`{"promoted": {"brand": "brand3"}}`); buckets have bonuses
            without a filter.
        decay: columns of dates, with the shortest half-life that a request may give at weight 1 (`1d`).
        slopes: columns of numbers, with limits of the weight in nats per unit; `"auto"`: ±3 / σ.
        exposed: half-life of the prior `exposed` (`7d`), or an `Exposure`, which also limits its weight.
    """

    table: PriorTable | Path | str | None = None
    bonuses: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict)
    decay: Mapping[str, str] = field(default_factory=dict)
    slopes: Mapping[str, Limits | Literal["auto"]] = field(default_factory=dict)
    exposed: Exposure | str | None = None

    __pydantic_config__ = _STRICT

    @classmethod
    def load(cls, source: str) -> Self:
        """Read a TOML file with these fields as keys, or take a table alone.

        The path of a table, also one in a query, is relative to the file. Raises PriorsError.
        """
        if not source.endswith(".toml"):
            return cls(as_source(source))
        path = Path(source)
        try:
            spec = TypeAdapter(cls).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
            raise PriorsError(f"{path}: {'; '.join(problems)}") from None
        except ValueError as error:  # not TOML, or not UTF-8
            raise PriorsError(f"{path}: expected a TOML file of priors: {error}") from None
        if spec.table is None:
            return spec
        table = spec.table if isinstance(spec.table, PriorTable) else PriorTable(spec.table)
        file = as_source(table.path)
        if is_query(file):
            file = rename_files(str(file), lambda inner: path.parent / inner)
        return replace(spec, table=replace(table, path=path.parent / file if isinstance(file, Path) else file))

    def read(self, bundle: Bundle, progress: Callable[[str], None] = lambda _: None) -> Priors:
        """Read the table, and append the bonuses of buckets and the derived priors; raises PriorsError."""
        table = Priors()
        if self.table is not None:
            source = self.table if isinstance(self.table, PriorTable) else PriorTable(as_source(self.table))
            table = source.read(bundle, progress=progress)
        declared = [
            _prior(f"bonus.{name}", "filter", Bonus(), filter=filter_) for name, filter_ in self.bonuses.items()
        ]
        for name, limits in self.slopes.items():
            numbers = _numbers(f"slope.{name}", "number", bundle)
            limits = _choose_limits(numbers) if limits == "auto" else limits
            declared.append(_prior(f"slope.{name}", "number", limits, origin=float(np.median(numbers))))
        for name, half_life in self.decay.items():
            days = _numbers(f"decay.{name}", "date", bundle)
            limits = Limits(0.0, _parse_span(f"decay.{name}", half_life, nats_per_day))
            # Days from the newest date keep seconds apart in float32 where they matter: 1 s within 100 days.
            newest, oldest = float(days.max()), float(days.min() - days.max())
            declared.append(_prior(f"decay.{name}", "date", limits, origin=newest, missing=oldest))
        if self.exposed is not None:
            exposure = Exposure(self.exposed) if isinstance(self.exposed, str) else self.exposed
            state = ExposureState(half_life=_parse_span(EXPOSED, exposure.half_life, span_seconds))
            declared.append(_prior(EXPOSED, "answers", exposure.limits, exposure=state))
        names = [prior.name for prior in (*table.settings, *declared)]
        if len(names) > MAX_PRIORS:
            raise PriorsError(f"expected at most {MAX_PRIORS} priors, bonuses, slopes and decays, received {names}")
        if bucket_names := [name for name in self.bonuses if name in BUCKET_NAMES]:
            raise PriorsError(f"bonus: expected another name than a bucket's, received {bucket_names[0]!r}")
        if empty := [name for name, filter_ in self.bonuses.items() if not filter_]:
            raise PriorsError(f"bonus.{empty[0]}: expected a filter with a condition, received none")
        buckets = [_prior(f"bonus.{name}", "bucket", bundle.manifest.bonus[name]) for name in BONUS_BUCKETS]
        settings, columns = [*table.settings], [*table.values_LP.T]
        for prior in (*buckets, *declared):
            # Values of answers follow later, with about the spread of log π.
            answered = prior.source == "answers"
            columns.append(np.zeros(len(bundle.embeddings), np.float32) if answered else _compute_values(prior, bundle))
            spread = _SPREAD_OF_DATES if prior.source == "date" else 1.0
            kappa = fitted_scale(bundle.embeddings, bundle.labels.log_pi if answered else columns[-1])
            settings.append(prior.model_copy(update={"kappa": spread * kappa}))
        return Priors(tuple(settings), np.stack(columns, axis=1))


def _prior(name: str, source: str, limits: Limits | Popularity, **others: Any) -> Prior:
    """Create a prior; without `kappa`, its κ is to be fitted."""
    fields = {"name": name, "source": source, "missing": 0.0, "kappa": 1.0, **others}
    fields |= {"minimum": limits.minimum, "default": limits.default, "maximum": limits.maximum}
    return Prior.model_validate(fields)


def _parse_span(name: str, half_life: str, parse: Callable[[str], float]) -> float:
    """Parse a half-life; raises PriorsError."""
    try:
        return parse(half_life)
    except ValueError as error:
        raise PriorsError(f"{name}: {error}") from error


def _compute_values(prior: Prior, bundle: Bundle) -> Float32:
    """Compute the values of a bundle's labels, float32 [L]; raises PriorsError."""
    display = bundle.labels.display
    if unknown := [name for name in prior.filter if name not in display.column_names]:
        raise PriorsError(f"{prior.name}: expected display columns, {display.column_names}, received {unknown[0]!r}")
    try:
        values_L = prior.values(bundle.labels.buckets, display.column)
    except ConditionError as error:
        raise PriorsError(str(error)) from error
    if not np.abs(values_L).max() <= prior.largest:
        raise PriorsError(f"{prior.name}: expected numbers of at most {prior.largest:.3g}, found a larger one")
    return values_L.astype(np.float32)


def _numbers(name: str, kind: FilterKind, bundle: Bundle) -> Float64:
    """Get the known values of a display column, float64; raises PriorsError."""
    display, column = bundle.labels.display, name.partition(".")[2]
    columns = [field.name for field in display.schema if filter_kind(field.type) == kind]
    numbers_L = NumberColumn(display.column(column)).numbers if column in columns else np.empty(0)
    if not np.isfinite(numbers_L).any():
        raise PriorsError(f"{name}: expected a display column of kind {kind} with values, one of {columns}")
    return numbers_L[np.isfinite(numbers_L)]


def _choose_limits(values_L: Float32 | Float64) -> Limits:
    """Choose limits at which one standard deviation adds 3 nats."""
    deviation = float(np.std(values_L, dtype=np.float64))
    reach = float(f"{_LIMIT_IN_NATS / deviation:.1g}") if deviation > 0 else 1.0
    return Limits(-reach, reach)


def _columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
    expressions = {name: opened.column(name) for name in (LABEL_COLUMN, *opened.names)}
    return expressions | {LABEL_COLUMN: id_expression(opened, LABEL_COLUMN, *expressions[LABEL_COLUMN])}


def _find_table_rows(path: Path | str, ids: pa.Array, bundle: Bundle, progress: Callable[[str], None]) -> Int64:
    """Find the table's row of every label, int64 [L]; labels that the table lacks get its length.

    An id that is not a label's is read as the boolean or whole number that it spells.
    """
    if ids.null_count:
        raise PriorsError(f"{path}, column {LABEL_COLUMN!r}: expected an id in every row, found {ids.null_count} nulls")
    rows = find_rows(ids, bundle.labels.ids)
    if repeated := repeated_ids(pc.coalesce(bundle.labels.ids.take(rows), ids.cast(bundle.labels.ids.type))):
        examples = repeated[:_MOST_EXAMPLES]
        raise PriorsError(f"{path}, column {LABEL_COLUMN!r}: expected every id once, found {examples} more often")
    matched = len(rows) - rows.null_count
    rows_L: Int64 = np.full(len(bundle.labels.ids), len(ids), np.int64)
    rows_L[rows.drop_null().to_numpy()] = np.flatnonzero(rows.is_valid())
    progress(f"priors: {matched:,} of {len(rows_L):,} labels found, {len(ids) - matched:,} rows of no label")
    return rows_L
