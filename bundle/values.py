"""Convert numbers, vectors and dates of requests to tower inputs; create errors about feature values.

Legend: `B` queries (or labels) in the batch, `D` numbers of a vector.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from longtail.bundle.arrays import Array, Float32, Int32
from longtail.bundle.dates import MISSING_DATE, date_rows, parse_seconds
from longtail.bundle.errors import FeatureError, describe
from longtail.bundle.manifest import FEATURE_VALUE_TYPES, Feature

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_NUMBERS = {int, float}
_DECIMAL = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*", re.ASCII)


def bucket_rows(values: npt.NDArray[np.floating], boundaries: Sequence[float]) -> Int32:
    """Look up numbers by their range, int32 of the same shape: 1 below the first boundary, 0 for NaN."""
    rows = 1 + np.searchsorted(np.array(boundaries, np.float32), values.astype(np.float32), side="right")
    return np.where(np.isnan(values), 0, rows).astype(np.int32)


def read_numbers(feature: Feature, values_B: Sequence[JsonValue]) -> dict[str, Array]:
    """Convert values of a `number` to tower inputs, [B]; values are numbers, booleans or numeric text."""
    missing = feature.missing if feature.boundaries is None else float("nan")
    values_B = [_number(feature, value, row) for row, value in enumerate(values_B)]
    numbers_B = np.array(
        [(missing or 0.0) if value is None else value for value in values_B],
        np.float32,
    )
    if feature.boundaries is not None:
        return {feature.name: bucket_rows(numbers_B, feature.boundaries)}
    return {feature.name: numbers_B} | (_flags(feature, values_B) if missing is None else {})


def read_vectors(feature: Feature, values_B: Sequence[JsonValue]) -> dict[str, Array]:
    """Convert values of a `vector` to tower inputs: float32 [B, D], and flags [B]; missing: zeros and 1."""
    vectors_BD = np.zeros((len(values_B), feature.dims or 0), np.float32)
    for row, value in enumerate(values_B):
        if value is not None:
            vectors_BD[row] = _vector(feature, value, row)
    return {feature.name: vectors_BD} | _flags(feature, values_B)


def read_dates(feature: Feature, values_B: Sequence[JsonValue]) -> Int32:
    """Convert values of a `date` to a tower input, int32 [B, parts]."""
    seconds_B = np.full(len(values_B), MISSING_DATE, np.int64)
    for row, value in enumerate(values_B):
        if value is None or value == "":
            continue
        try:
            seconds_B[row] = parse_seconds(value)  # type: ignore[arg-type]
        except (AttributeError, ValueError, OverflowError):
            raise refused(row, feature.name, "date", value) from None
    return date_rows(seconds_B, feature.parts or (), feature.reference or datetime.fromtimestamp(0, UTC))


def read_number(value: JsonValue, row: int, name: str) -> float:
    """Check that a value is a finite number in the range of float32; raises FeatureError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise refused(row, name, "number", value)
    if not abs(value) <= _LARGEST_FLOAT32:
        raise feature_error(
            row, name, f"expected {FEATURE_VALUE_TYPES['number']} that float32 can hold, received {describe(value)}"
        )
    return float(value)


def parse_number(text: str) -> float | None:
    """Parse a number from text, None for blanks; raises ValueError."""
    if not text.strip():
        return None
    if not _DECIMAL.fullmatch(text):
        raise ValueError(text)
    return float(text)


def _number(feature: Feature, value: JsonValue, row: int) -> float | None:
    """Read the value of a `number`; raises FeatureError."""
    if isinstance(value, str):
        try:
            value = parse_number(value)
        except ValueError:
            raise refused(row, feature.name, "number", value) from None
    if isinstance(value, bool):
        value = float(value)
    return None if value is None else read_number(value, row, feature.name)


def refused(row: int, name: str, kind: str, value: JsonValue) -> FeatureError:
    """Create the error about a value whose type does not fit the feature's kind."""
    return feature_error(row, name, f"expected {FEATURE_VALUE_TYPES[kind]}, received {describe(value)}")


def feature_error(row: int, name: str, message: str) -> FeatureError:
    """Create an error about one feature of one query."""
    return FeatureError(message, row=row, field=f"features.{name}")


def _vector(feature: Feature, value: JsonValue, row: int) -> Float32:
    """Convert one vector, float32 [D]; elements are checked one by one only to name a wrong one."""
    if not isinstance(value, list) or len(value) != feature.dims:
        raise feature_error(row, feature.name, f"expected {feature.expects}, received {describe(value)}")
    # One conversion of the whole list costs less than a check of each number.
    if set(map(type, value)) <= _NUMBERS:
        try:
            vector_D = np.array(value, np.float64)
        except OverflowError:
            vector_D = np.array([np.inf])
        if (np.abs(vector_D) <= _LARGEST_FLOAT32).all():
            return vector_D.astype(np.float32)
    return np.array([read_number(number, row, f"{feature.name}.{i}") for i, number in enumerate(value)], np.float32)


def _flags(feature: Feature, values_B: Sequence[JsonValue]) -> dict[str, Array]:
    return {f"{feature.name}__missing": np.array([value is None for value in values_B], np.float32)}
