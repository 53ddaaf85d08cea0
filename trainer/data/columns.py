"""Read and encode columns of feature tables: ids, bags, numbers, ranges, vectors and dates.

Legend: `R` rows of a feature table, `L` labels, `B` batch, `P` positions of a padded bag, `D` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Feature, Vocabulary
from longtail.bundle.arrays import Array, Bools, Float32, Float64, Int32, Int64
from longtail.bundle.dates import MISSING_DATE, date_rows, parse_seconds
from longtail.bundle.ids import is_text, split_ids, to_ids
from longtail.bundle.mapped_table import combine_chunks
from longtail.bundle.validation import did_you_mean
from longtail.bundle.values import bucket_rows, parse_number
from longtail.bundle.vocabulary import hash_token, tokenize
from longtail.trainer.config import FeatureConfig
from longtail.trainer.config.rows import Sources, name_sources
from longtail.trainer.errors import DataError

_MICRO = 1_000_000
_LARGEST_FLOAT32, _LEAST_STD = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_MOST_STD = 1 / _LEAST_STD
_LARGEST_SQUARED = _LARGEST_FLOAT32**0.5
_YEAR_1, _YEAR_10_000 = -62_135_596_800, 253_402_300_800
"""Limits of dates, seconds since 1970, as in requests."""
_IDS_AT_ONCE = 1 << 23
"""Number of ids of a bag column that are encoded at a time."""


@dataclass(frozen=True)
class Bags:
    """Hold variable-length weighted ids: row r has entries `offsets[r]:offsets[r + 1]`."""

    offsets: Int64
    ids: Int32
    weights: Float32

    def pad(self, starts_B: Int64, ends_B: Int64, limit: int) -> tuple[Int32, Float32]:
        """Pad the entries `starts:ends`, at most `limit` each: ids and weights [B, P]; padding is (0, 0).

        P is the longest length, rounded up to a power of two, because a step is compiled again for every new shape.
        """
        lengths_B = np.minimum(ends_B - starts_B, limit)
        width = min(limit, 1 << int(max(int(lengths_B.max(initial=1)), 1) - 1).bit_length())
        slots_P = np.arange(width)
        inside_BP, at_BP = slots_P < lengths_B[:, None], starts_B[:, None] + slots_P
        # `take` refuses an empty array, even where all places are masked.
        if len(self.ids) == 0:
            return np.zeros(at_BP.shape, np.int32), np.zeros(at_BP.shape, np.float32)
        # Clipped places read some entry; `inside_BP` sets it to 0.
        ids_BP, weights_BP = (column.take(at_BP, mode="clip") for column in (self.ids, self.weights))
        return ids_BP * inside_BP, weights_BP * inside_BP

    @cached_property
    def longest(self) -> int:
        """Return the number of entries of the longest row, at least 1."""
        return max(int(np.diff(self.offsets).max(initial=0)), 1)

    def filled(self, rows_B: Int32, filler_B: Int32) -> Int32:
        """Return all ids of some rows, int32 [B, P]; empty places hold the row's filler.

        P is the length of the longest of all rows, and so the same for every batch.
        """
        starts_B = self.offsets[rows_B]
        slots_P = np.arange(self.longest)
        inside_BP = slots_P < (self.offsets[rows_B + 1] - starts_B)[:, None]
        at_BP = np.where(inside_BP, starts_B[:, None] + slots_P, 0)
        ids_BP = self.ids[at_BP] if len(self.ids) else at_BP
        return np.where(inside_BP, ids_BP, filler_B[:, None]).astype(np.int32)


@dataclass(frozen=True)
class EncodedColumn:
    """Hold the inputs of a tower by row.

    Attributes:
        arrays: by the suffix of the input's name, `""` or `"__missing"`; the first axis is R.
        description: what a manifest says of the encoding.
        scale: mean and standard deviation by which the tower standardises numbers; None for other kinds.
    """

    arrays: dict[str, Array]
    description: dict[str, Any] = field(default_factory=dict)
    scale: tuple[float, float] | None = None


Encoded = EncodedColumn | Bags


@dataclass(frozen=True)
class FeatureTable:
    """Hold a source of features: a table of queries, of labels, or of contexts of interactions.

    Attributes:
        table: one row per id, in the order of `ids`, or one row per version or context; None without a file.
        id_name: name of the feature that is the id itself.
        files: the file or files, for errors; None without a file.
        training_rows: rows that training reads, int [n], repeated by their weight in frequencies and means.
        by_id: whether row r belongs to the r-th id, which is false for contexts and versions.
    """

    ids: pa.Array
    table: pa.Table | None
    id_name: str
    files: Sources | None
    training_rows: npt.NDArray[np.integer]
    by_id: bool = True

    def column(self, feature: FeatureConfig) -> pa.Array:
        """Return the raw column of a feature, one value per id."""
        if feature.name == self.id_name:
            return self.ids
        name = feature.source
        names = [] if self.table is None else self.table.column_names
        if self.table is None or name not in names:
            path = name_sources(self.files) if self.files else "the recipe (no feature table)"
            raise DataError(
                f"{path}: feature {feature.name!r}: expected a column {name!r}, found {', '.join(names) or 'none'}"
                f"{did_you_mean(name, names)}"
            )
        return combine_chunks(self.table[name])

    def wrong(self, feature: FeatureConfig, expected: str, content: object, row: int | None = None) -> DataError:
        """Return an error about one feature's column, or its value in one row."""
        if row is not None and self.by_id:
            content = f"{content} of {self.ids[row].as_py()!r}"
        path = name_sources(self.files) if self.files else "interactions"
        subject = f"{path}: feature {feature.name!r} ({feature.kind})"
        return DataError(f"{subject}: expected {expected}, found {content}")


def read_strings(feature: FeatureConfig, source: FeatureTable) -> pa.Array:
    """Return a column of ids as strings, one per row; DataError if it holds none."""
    column = source.column(feature)
    try:
        return column if feature.name == source.id_name else to_ids(column)
    except TypeError:
        raise source.wrong(feature, "strings, numbers or booleans", column.type) from None


def read_bags(feature: FeatureConfig, source: FeatureTable) -> tuple[Int64, pa.Array, Float32]:
    """Read a bag or text column: offsets int64 [R + 1], ids (strings or integers), weights float32."""
    column = source.column(feature)
    if feature.kind == "text":
        texts = column if is_text(column.type) else read_strings(feature, source)
        words = [tokenize(text) if text else [] for text in texts.to_pylist()]
        column = pa.array(words, pa.list_(pa.string()))
    elif is_text(column.type) or feature.separator is not None:
        column = _split(feature, source, column if is_text(column.type) else read_strings(feature, source))
    if isinstance(column, pa.MapArray):
        kind = column.type.item_type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise source.wrong(feature, "weights as numbers", kind)
        lengths = np.diff(column.offsets.to_numpy())
        keys, weights = column.keys, column.items.cast(pa.float32())
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        # A null list has no length, and counts as an empty one.
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
        keys, weights = pc.list_flatten(column), None
    else:
        raise source.wrong(feature, "lists, maps id → weight, lists as text, or strings with a separator", column.type)
    if not (is_text(keys.type) or pa.types.is_integer(keys.type)):
        try:
            keys = to_ids(keys)
        except TypeError:
            raise source.wrong(feature, "ids as strings, numbers or booleans", keys.type) from None
    values = np.ones(len(keys), np.float32) if weights is None else weights.to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        raise source.wrong(feature, "finite weights", f"{values[~np.isfinite(values)][0]}")
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), keys, values


def _split(feature: FeatureConfig, source: FeatureTable, texts: pa.Array) -> pa.Array:
    """Split every text into a list of ids; DataError for a text that is no list of ids."""
    # Columns repeat the same lists, so each distinct text is split once.
    distinct = texts.dictionary_encode()
    entry_lists = []
    for text in distinct.dictionary.to_pylist():
        entry_lists.append(split_ids(text, feature.separator) if text else [])
        if entry_lists[-1] is None:
            expected = "lists, maps id → weight, lists as text, or strings with a separator"
            raise source.wrong(feature, expected, f"{texts.type}, such as {text!r}", pc.index(texts, text).as_py())
    return pa.array(entry_lists, pa.list_(pa.string())).take(distinct.indices)


def encode_column(
    feature: FeatureConfig,
    source: FeatureTable,
    vocabularies: Mapping[str, Vocabulary],
    exported: Feature | None = None,
) -> Encoded:
    """Encode one feature for every row of a table.

    Args:
        feature: the feature, of any kind except `history` and `audience`.
        exported: the feature's description in a bundle, if the encoding must equal that of the bundle.
    """
    if feature.kind == "id":
        return EncodedColumn({"": vocabularies[feature.table_name].encode(read_strings(feature, source))})
    if feature.kind in ("number", "vector", "date"):
        return _encode_measured(feature, source, exported)
    offsets, keys, weights = read_bags(feature, source)
    rows = np.empty(len(keys), np.int32)
    # Encode distinct ids only, in blocks: a string per entry would need much more memory than a number per entry.
    for start in range(0, len(keys), _IDS_AT_ONCE):
        block = keys.slice(start, _IDS_AT_ONCE).dictionary_encode()
        ids = block.dictionary.cast(pa.string())
        if feature.kind == "bag":
            encoded = vocabularies[feature.table_name].encode(ids)
        else:
            encoded = np.array([hash_token(token, feature.hash_rows) for token in ids.to_pylist()], np.int32)
        # The appended 0, the out-of-vocabulary row, is where null entries point.
        encoded = np.append(encoded, np.int32(0))
        rows[start : start + _IDS_AT_ONCE] = encoded[pc.fill_null(block.indices, len(ids)).to_numpy()]
    return Bags(offsets, rows, weights)


def _encode_measured(feature: FeatureConfig, source: FeatureTable, exported: Feature | None) -> EncodedColumn:
    """Encode a number, vector or date of every row of a table.

    Means, ranges and the latest date come from the table's training rows, or from `exported` if it is given.
    """
    if feature.kind == "vector":
        return _vectors(feature, source)
    if feature.kind == "date":
        return _dates(feature, source, exported)
    values = read_numbers(feature, source)
    training_values = values[source.training_rows]
    # In float64: a sum of millions of float32 numbers loses the mean's digits.
    training_values = training_values[~np.isnan(training_values)].astype(np.float64)
    if feature.in_buckets:
        if exported is None:
            boundaries = find_boundaries(training_values, feature.buckets)
        else:
            boundaries = exported.boundaries or []
        return EncodedColumn({"": bucket_rows(values, boundaries)}, {"boundaries": boundaries})
    logarithmic = feature.transform == "log"
    measured = np.sign(training_values) * np.log1p(np.abs(training_values)) if logarithmic else training_values
    mean, std = (float(measured.mean()), float(measured.std())) if len(training_values) else (0.0, 0.0)
    if len(training_values) and training_values.min() == training_values.max():
        std = 0.0  # rounding can leave equal numbers a tiny deviation
    # Standardised values and factors must fit in float32.
    largest = max(abs(mean), float(np.abs(measured).max(initial=0))) / std if std else 0.0
    if exported is None and std and not (_LEAST_STD <= std <= _MOST_STD and largest <= _LARGEST_FLOAT32):
        raise source.wrong(
            feature,
            f"numbers that float32 can standardise, of standard deviations from {_LEAST_STD:.2g} to {_MOST_STD:.2g} "
            '(use other units, or transform = "quantile")',
            f"numbers of {training_values.min():.4g} to {training_values.max():.4g}, standard deviation {std:.4g}",
        )
    # With `log`, the fill is the number whose logarithm is the mean, so that it is standardised to 0.
    fill = float(np.sign(mean) * np.expm1(abs(mean))) if logarithmic else mean
    if feature.has_flag:
        fill = 0.0
    elif exported is not None and exported.missing is not None:
        fill = exported.missing
    absent = np.isnan(values)
    values[absent] = fill
    if feature.has_flag:
        arrays = {"": values, "__missing": absent.astype(np.float32)}
        return EncodedColumn(arrays, {"missing": None}, (mean, std or 1.0))
    return EncodedColumn({"": values}, {"missing": fill}, (mean, std or 1.0))


def find_boundaries(training_values: Float64, buckets: int) -> list[float]:
    """Find boundaries of ranges with equal numbers of values [n], at most `buckets` − 1."""
    if len(training_values) == 0:
        return []
    shares = np.arange(1, buckets) / buckets
    # Equal boundaries would leave ranges without a value.
    return [float(boundary) for boundary in np.unique(np.quantile(training_values, shares).astype(np.float32))]


def read_numbers(feature: FeatureConfig, source: FeatureTable) -> Float32:
    """Return a column of numbers, booleans or text of numbers, [R]; NaN for a missing number."""
    column = source.column(feature)
    if is_text(column.type):
        column = _distinct_values(feature, source, parse_number, pa.float64(), "numbers")
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise source.wrong(feature, "numbers", kind)
    # A copy: callers fill in missing values, and Arrow's memory is read-only.
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
    values = []
    for text in texts.dictionary.to_pylist():
        try:
            values.append(read(text) if text else None)
        except (ValueError, OverflowError):
            row = pc.index(column, text).as_py()
            raise source.wrong(feature, expected, f"{column.type}, such as {text!r}", row) from None
    return pa.array(values, kind).take(texts.indices)


def _vectors(feature: FeatureConfig, source: FeatureTable) -> EncodedColumn:
    column, dims = source.column(feature), feature.dims or 0
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        raise source.wrong(feature, f"lists of {dims} numbers", kind)
    is_present: Bools = np.asarray(column.is_valid())
    rows = np.flatnonzero(is_present)
    lengths = np.asarray(pc.list_value_length(column.filter(pa.array(is_present))))
    if (lengths != dims).any():
        worst = int((lengths != dims).argmax())
        raise source.wrong(feature, f"lists of {dims} numbers", f"one of {lengths[worst]}", int(rows[worst]))
    flat = pc.list_flatten(column.filter(pa.array(is_present))).cast(pa.float32(), safe=False)
    vectors = flat.to_numpy(zero_copy_only=False).reshape(-1, dims)
    # Norms are computed in float32, and NaN fails this comparison too.
    usual = np.abs(vectors) <= _LARGEST_SQUARED
    if not usual.all():
        worst = int(usual.all(axis=1).argmin())
        expected = f"finite numbers up to {_LARGEST_SQUARED:.2g}, whose squares float32 holds"
        raise source.wrong(feature, expected, vectors[worst][~usual[worst]][0], int(rows[worst]))
    values = np.zeros((len(column), dims), np.float32)
    values[is_present] = vectors
    arrays = {"": values, "__missing": 1 - is_present.astype(np.float32)}
    return EncodedColumn(arrays, {"missing": None, "dims": dims})


def _dates(feature: FeatureConfig, source: FeatureTable, exported: Feature | None) -> EncodedColumn:
    seconds = read_seconds(feature, source)
    training_values = seconds[source.training_rows]
    latest = int(training_values.max(initial=MISSING_DATE))
    reference = datetime.fromtimestamp(0 if latest == MISSING_DATE else latest, UTC)
    if exported is not None and exported.reference is not None:
        reference = exported.reference
    description = {"parts": feature.parts, "reference": reference}
    return EncodedColumn({"": date_rows(seconds, feature.parts, reference)}, description)


def read_seconds(feature: FeatureConfig, source: FeatureTable) -> Int64:
    """Return a column of times as seconds since 1970, [R]; `MISSING_DATE` for a missing time."""
    column = source.column(feature)
    expected = "timestamps, dates, or strings in ISO 8601"
    if is_text(column.type):
        values = _distinct_values(feature, source, parse_seconds, pa.int64(), expected)
        seconds: Int64 = pc.fill_null(values, MISSING_DATE).to_numpy()
        return seconds
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        raise source.wrong(feature, expected, column.type)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("us"))
    ticks = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    is_present = np.asarray(ticks.is_valid())
    since_1970 = pc.fill_null(ticks, 0).to_numpy() // _MICRO
    outside = (since_1970 < _YEAR_1) | (since_1970 >= _YEAR_10_000)
    if outside.any():
        row = int(outside.argmax())
        raise source.wrong(feature, "times of the years 1 to 9999", f"{since_1970[row]} seconds since 1970", row)
    return np.where(is_present, since_1970, MISSING_DATE)
