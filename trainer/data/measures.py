"""Columns with measured values: numbers, ranges of numbers, vectors and dates.

Legend: `R` rows of a feature table, `L` labels, `B` batch, `D` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import MISSING_DATE, DatePart, Feature, Inputs, bucket_rows, date_rows, seconds_of
from longtail.bundle.arrays import Bools, Float32, Float64, Int32, Int64
from longtail.bundle.values import number_of
from longtail.trainer.config import FeatureConfig

if TYPE_CHECKING:
    from longtail.trainer.data.columns import FeatureTable

_MICRO = 1_000_000
_LARGEST_FLOAT32, _LEAST_STD = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_MOST_STD = 1 / _LEAST_STD
_LARGEST_SQUARED = _LARGEST_FLOAT32**0.5
_YEAR_1, _YEAR_10_000 = -62_135_596_800, 253_402_300_800
"""Limits of dates, seconds since 1970, as in requests."""


@dataclass(frozen=True)
class Numbers:
    """Hold a number per row, standardised by `mean` and `std`, which are of logarithms with `transform = "log"`.

    Attributes:
        values: numbers, [R]; a missing number is `fill`.
        fill: the replacement of a missing number: the training mean, or 0 with a flag.
        missing: 1 for a missing number, else 0, [R]; None if the tower has no flag.
    """

    values: Float32
    mean: float
    std: float
    fill: float
    missing: Float32 | None = None

    def inputs(self, name: str, rows_B: npt.NDArray[np.integer]) -> Inputs:
        """Return the tower's inputs for some rows, [B]."""
        flag = {} if self.missing is None else {f"{name}__missing": self.missing[rows_B]}
        return {name: self.values[rows_B]} | flag

    def described(self) -> dict[str, Any]:
        """Return the description of the numbers for a manifest."""
        return {"missing": self.fill if self.missing is None else None}


@dataclass(frozen=True)
class Ranges:
    """Hold numbers by their range: rows of a table, [R], and the boundaries between ranges."""

    rows: Int32
    boundaries: list[float]

    def inputs(self, name: str, rows_B: npt.NDArray[np.integer]) -> Inputs:
        """Return the tower's input for some rows, [B]."""
        return {name: self.rows[rows_B]}

    def described(self) -> dict[str, Any]:
        """Return the description of the ranges for a manifest."""
        return {"boundaries": self.boundaries}


@dataclass(frozen=True)
class Vectors:
    """Hold a vector per row, [R, D]; a missing vector is 0, with `missing` 1, [R]."""

    values: Float32
    missing: Float32

    def inputs(self, name: str, rows_B: npt.NDArray[np.integer]) -> Inputs:
        """Return the tower's inputs for some rows, [B, D] and [B]."""
        return {name: self.values[rows_B], f"{name}__missing": self.missing[rows_B]}

    def described(self) -> dict[str, Any]:
        """Return the description of the vectors for a manifest."""
        return {"missing": None, "dims": self.values.shape[1]}


@dataclass(frozen=True)
class Dates:
    """Hold dates by their parts: rows of a table, [R, parts]; `age` counts from the reference."""

    rows: Int32
    parts: list[DatePart]
    reference: datetime

    def inputs(self, name: str, rows_B: npt.NDArray[np.integer]) -> Inputs:
        """Return the tower's input for some rows, [B, parts]."""
        return {name: self.rows[rows_B]}

    def described(self) -> dict[str, Any]:
        """Return the description of the dates for a manifest."""
        return {"parts": self.parts, "reference": self.reference}


Measured = Numbers | Ranges | Vectors | Dates


def encode_measured(feature: FeatureConfig, source: FeatureTable, exported: Feature | None) -> Measured:
    """Encode a number, vector or date of every row of a table.

    Means, ranges and the latest date come from the table's training rows, or from `exported` if it is given.
    """
    if feature.kind == "vector":
        return _vectors(feature, source)
    if feature.kind == "date":
        return _dates(feature, source, exported)
    values = numbers_in(feature, source)
    known = values[source.training_rows]
    known = known[~np.isnan(known)].astype(np.float64)
    if feature.in_buckets:
        found = boundaries_of(known, feature.buckets) if exported is None else exported.boundaries or []
        return Ranges(bucket_rows(values, found), found)
    logarithmic = feature.transform == "log"
    measured = np.sign(known) * np.log1p(np.abs(known)) if logarithmic else known
    mean, std = (float(measured.mean()), float(measured.std())) if len(known) else (0.0, 0.0)
    if len(known) and known.min() == known.max():
        std = 0.0  # rounding can leave equal numbers a tiny deviation
    if exported is None and std and not _standardisable(measured, mean, std):
        raise source.wrong(
            feature,
            f"numbers that float32 can standardise, of standard deviations from {_LEAST_STD:.2g} to {_MOST_STD:.2g} "
            '(use other units, or transform = "quantile")',
            f"numbers of {known.min():.4g} to {known.max():.4g}, standard deviation {std:.4g}",
        )
    # With `log`, the fill is the number whose logarithm is the mean, so that it is standardised to 0.
    fill = float(np.sign(mean) * np.expm1(abs(mean))) if logarithmic else mean
    if feature.has_flag:
        fill = 0.0
    elif exported is not None and exported.missing is not None:
        fill = exported.missing
    absent = np.isnan(values)
    values[absent] = fill
    return Numbers(values, mean, std or 1.0, fill, absent.astype(np.float32) if feature.has_flag else None)


def _standardisable(values: Float64, mean: float, std: float) -> bool:
    """Return whether standardised values [n] and the factors of the tower fit in float32."""
    return _LEAST_STD <= std <= _MOST_STD and max(abs(mean), float(np.abs(values).max())) / std <= _LARGEST_FLOAT32


def boundaries_of(known: Float64, buckets: int) -> list[float]:
    """Return ascending boundaries of ranges with equal numbers of known values [n], at most `buckets` − 1."""
    if len(known) == 0:
        return []
    shares = np.arange(1, buckets) / buckets
    return [float(at) for at in np.unique(np.quantile(known, shares).astype(np.float32))]


def numbers_in(feature: FeatureConfig, source: FeatureTable) -> Float32:
    """Return a column of numbers, booleans or text of numbers, [R]; NaN for a missing number."""
    column = source.column(feature)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _distinct_values(feature, source, number_of, pa.float64(), "numbers")
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise source.wrong(feature, "numbers", kind)
    values: Float32 = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False).copy()
    if np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        raise source.wrong(feature, "finite numbers or nulls", values[row], row)
    return values


def _distinct_values(
    feature: FeatureConfig, source: FeatureTable, read: Callable[[str], Any], kind: pa.DataType, expected: str
) -> pa.Array:
    """Apply `read` to each distinct text of a column; DataError names the first text that `read` refuses."""
    column = source.column(feature)
    texts = column.dictionary_encode()
    found = []
    for text in texts.dictionary.to_pylist():
        try:
            found.append(read(text) if text else None)
        except (ValueError, OverflowError):
            row = pc.index(column, text).as_py()
            raise source.wrong(feature, expected, f"{column.type}, such as {text!r}", row) from None
    return pa.array(found, kind).take(texts.indices)


def _vectors(feature: FeatureConfig, source: FeatureTable) -> Vectors:
    column, dims = source.column(feature), feature.dims or 0
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        raise source.wrong(feature, f"lists of {dims} numbers", kind)
    given: Bools = np.asarray(column.is_valid())
    rows = np.flatnonzero(given)
    lengths = np.asarray(pc.list_value_length(column.filter(pa.array(given))))
    if (lengths != dims).any():
        worst = int((lengths != dims).argmax())
        raise source.wrong(feature, f"lists of {dims} numbers", f"one of {lengths[worst]}", int(rows[worst]))
    flat = pc.list_flatten(column.filter(pa.array(given))).cast(pa.float32(), safe=False)
    vectors = flat.to_numpy(zero_copy_only=False).reshape(-1, dims)
    # Norms are computed in float32, and NaN fails this comparison too.
    usual = np.abs(vectors) <= _LARGEST_SQUARED
    if not usual.all():
        worst = int(usual.all(axis=1).argmin())
        expected = f"finite numbers up to {_LARGEST_SQUARED:.2g}, whose squares float32 holds"
        raise source.wrong(feature, expected, vectors[worst][~usual[worst]][0], int(rows[worst]))
    values = np.zeros((len(column), dims), np.float32)
    values[given] = vectors
    return Vectors(values, 1 - given.astype(np.float32))


def _dates(feature: FeatureConfig, source: FeatureTable, exported: Feature | None) -> Dates:
    seconds = seconds_in(feature, source)
    known = seconds[source.training_rows]
    latest = int(known.max(initial=MISSING_DATE))
    reference = datetime.fromtimestamp(0 if latest == MISSING_DATE else latest, UTC)
    if exported is not None and exported.reference is not None:
        reference = exported.reference
    return Dates(date_rows(seconds, feature.parts, reference), feature.parts, reference)


def seconds_in(feature: FeatureConfig, source: FeatureTable) -> Int64:
    """Return a column of times as seconds since 1970, [R]; `MISSING_DATE` for a missing time."""
    column = source.column(feature)
    expected = "timestamps, dates, or strings in ISO 8601"
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        found = _distinct_values(feature, source, seconds_of, pa.int64(), expected)
        seconds: Int64 = pc.fill_null(found, MISSING_DATE).to_numpy()
        return seconds
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        raise source.wrong(feature, expected, column.type)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("us"))
    ticks = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    given = np.asarray(ticks.is_valid())
    since_1970 = pc.fill_null(ticks, 0).to_numpy() // _MICRO
    outside = (since_1970 < _YEAR_1) | (since_1970 >= _YEAR_10_000)
    if outside.any():
        row = int(outside.argmax())
        raise source.wrong(feature, "times of the years 1 to 9999", f"{since_1970[row]} seconds since 1970", row)
    return np.where(given, since_1970, MISSING_DATE)
