"""Read priors from a table: one number per label and prior, their weights' limits, and the scale of their coordinates.

Legend: `L` labels, `P` priors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from longtail.bundle import MAX_PRIORS, Bundle, Prior, Priors
from longtail.bundle.arrays import Float32, Float64, Int64
from longtail.bundle.augment import fitted_scale
from longtail.index.errors import PriorsError

LABEL_COLUMN = "label_id"
_LIMIT_IN_NATS = 3.0
"""Weights go as far, unless told otherwise, as one standard deviation of the prior is worth so many nats of score."""
_SHOWN = 5


@dataclass(frozen=True)
class Limits:
    """Which weights requests may give a prior; `default` is of a request that names none."""

    minimum: float
    maximum: float
    default: float = 0.0

    def __post_init__(self) -> None:
        if not (np.isfinite([self.minimum, self.maximum]).all() and self.minimum <= self.default <= self.maximum):
            raise PriorsError(
                "prior: expected finite weights MINIMUM <= DEFAULT <= MAXIMUM, received "
                f"{self.minimum:g}, {self.default:g}, {self.maximum:g}"
            )

    @classmethod
    def parse(cls, text: str) -> tuple[str, Self]:
        """A prior's name and limits, from `NAME=MIN:MAX` or `NAME=MIN:MAX:DEFAULT`."""
        name, _, limits = text.rpartition("=")
        try:
            minimum, maximum, *default = map(float, limits.split(":"))
            if not name or len(default) > 1:
                raise ValueError(text)
        except ValueError:
            raise PriorsError(
                f"prior: expected NAME=MIN:MAX or NAME=MIN:MAX:DEFAULT, such as recent=0:2:0.5, received {text!r}"
            ) from None
        return name, cls(minimum, maximum, *default)


@dataclass(frozen=True)
class PriorTable:
    """A table of priors and what to make of it.

    Args:
        path: Parquet or CSV, a column `label_id` and a column of numbers for each prior.
        limits: of the weights, by name. Priors without any get ±3 / σ, σ the standard deviation of the prior, and the
            default 0. If given, columns that it does not name are left out.
        missing: value of labels that the table lacks, or has a null for: a number, or the column's `min` or `median`.
            None: every label must have one. Labels added while serving get the same, the median if None.
    """

    path: Path
    limits: Mapping[str, Limits] = field(default_factory=dict)
    missing: float | Literal["min", "median"] | None = None

    def read(self, bundle: Bundle, *, like: Priors | None = None, progress: Callable[[str], None]) -> Priors:
        """Read the priors of a bundle's labels, with the settings of `like` unless limits are given; raises
        PriorsError.
        """
        table = self._table()
        names = self._names(table, like)
        rows_L = _rows_of(self.path, table, bundle, progress)
        values_LP = np.stack([self._values(table, name)[rows_L] for name in names], axis=1)
        missing_P = self._fill(values_LP, names, bundle)
        filled_LP: Float32 = np.where(np.isnan(values_LP), missing_P, values_LP).astype(np.float32)
        before = {} if like is None else {prior.name: prior for prior in like.settings}
        settings = tuple(
            self._setting(name, filled_LP[:, place], float(missing_P[place]), bundle, before.get(name))
            for place, name in enumerate(names)
        )
        return Priors(settings, filled_LP)

    def _table(self) -> pa.Table:
        try:
            if self.path.suffix == ".csv":
                ids = pyarrow.csv.ConvertOptions(column_types={LABEL_COLUMN: pa.string()})
                table = pyarrow.csv.read_csv(self.path, convert_options=ids)
            else:
                table = pq.read_table(self.path)
        except (OSError, pa.ArrowException) as error:
            raise PriorsError(f"{self.path}: expected a table of priors, Parquet or CSV, found {error}") from error
        if LABEL_COLUMN not in table.column_names:
            raise PriorsError(f"{self.path}: expected a column {LABEL_COLUMN!r}, found {table.column_names}")
        return table

    def _names(self, table: pa.Table, like: Priors | None) -> list[str]:
        """The priors, in order of the coordinates."""
        columns = [name for name in table.column_names if name != LABEL_COLUMN]
        if like is not None:
            wanted: Collection[str] = like.names
            if unknown := self.limits.keys() - set(wanted):
                raise PriorsError(
                    f"prior: expected one of the release's, {like.names}, received {min(unknown)!r}; a further prior "
                    "takes a further coordinate: longtail-index build"
                )
        else:
            wanted = [*self.limits] or columns
        names = [name for name in columns if name in wanted]
        if absent := [name for name in wanted if name not in columns]:
            raise PriorsError(f"{self.path}: expected a column for each prior {list(wanted)}, found none for {absent}")
        if len(set(columns)) != len(columns) or not 1 <= len(names) <= MAX_PRIORS:
            raise PriorsError(f"{self.path}: expected 1 to {MAX_PRIORS} priors of different names, found {names}")
        return names if like is None else like.names

    def _values(self, table: pa.Table, name: str) -> Float64:
        """A column with one more row at the end, NaN; nulls are NaN."""
        column = table[name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            if not (pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type)):
                raise PriorsError(f"{self.path}, column {name!r}: expected numbers, found {column.type}")
            column = pc.cast(column, pa.float64())
        values: Float64 = np.append(pc.cast(column, pa.float64(), safe=False).to_numpy(), np.nan)
        with np.errstate(over="ignore"):
            infinite = np.isinf(values.astype(np.float32))
        if infinite.any():
            raise PriorsError(
                f"{self.path}, column {name!r}, row {int(infinite.argmax())}: expected a number that float32 holds, "
                f"found {values[infinite.argmax()]:g}"
            )
        return values

    def _fill(self, values_LP: Float64, names: list[str], bundle: Bundle) -> Float64:
        """What labels without a value get, float64 [P]."""
        absent_LP = np.isnan(values_LP)
        if self.missing is None and absent_LP.any():
            row, place = (int(at) for at in np.argwhere(absent_LP)[0])
            first = bundle.labels.ids[row].as_py()
            raise PriorsError(
                f"{self.path}, column {names[place]!r}: expected a number for every label, found none for "
                f"{int(absent_LP[:, place].sum()):,} of {len(values_LP):,}, the first {first!r}; "
                "--missing min, median or a number says what they get"
            )
        if isinstance(self.missing, float | int):
            if not abs(self.missing) <= np.finfo(np.float32).max:
                raise PriorsError(f"--missing: expected a number that float32 holds, received {self.missing:g}")
            return np.full(len(names), float(self.missing))
        if absent_LP.all(axis=0).any():
            raise PriorsError(
                f"{self.path}, column {names[int(absent_LP.all(axis=0).argmax())]!r}: expected a number for some label "
                "of the bundle, found none"
            )
        fill: Float64 = np.nanmin(values_LP, axis=0) if self.missing == "min" else np.nanmedian(values_LP, axis=0)
        return fill

    def _setting(self, name: str, values_L: Float32, missing: float, bundle: Bundle, before: Prior | None) -> Prior:
        limits = self.limits.get(name)
        if limits is None and before is None:
            deviation = float(np.std(values_L, dtype=np.float64))
            reach = float(f"{_LIMIT_IN_NATS / deviation:.1g}") if deviation > 0 else 1.0
            limits = Limits(-reach, reach)
        elif limits is None and before is not None:
            limits = Limits(before.minimum, before.maximum, before.default)
        assert limits is not None
        kappa = fitted_scale(bundle.embeddings, values_L) if before is None else before.kappa
        return Prior(
            name=name,
            minimum=limits.minimum,
            default=limits.default,
            maximum=limits.maximum,
            missing=missing,
            kappa=kappa,
        )


def _rows_of(path: Path, table: pa.Table, bundle: Bundle, progress: Callable[[str], None]) -> Int64:
    """The table's row of every label, int64 [L]; of a label that it lacks, the one after its last."""
    ids = pc.cast(table[LABEL_COLUMN], pa.string()).combine_chunks()
    if ids.null_count:
        raise PriorsError(f"{path}, column {LABEL_COLUMN!r}: expected an id in every row, found {ids.null_count} nulls")
    if len(twice := pc.value_counts(ids).filter(pc.greater(pc.value_counts(ids).field("counts"), 1))):
        shown = twice.field("values").to_pylist()[:_SHOWN]
        raise PriorsError(f"{path}, column {LABEL_COLUMN!r}: expected every id once, found {shown} more often")
    rows_L: Int64 = pc.fill_null(pc.index_in(bundle.labels.ids, ids), len(ids)).to_numpy().astype(np.int64)
    found = int(np.count_nonzero(rows_L < len(ids)))
    progress(f"priors: {found:,} of {len(rows_L):,} labels found, {len(ids) - found:,} rows of no label")
    return rows_L
