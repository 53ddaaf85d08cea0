"""What the columns of a table hold, and which kind of feature reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.trainer.config import FeatureConfig
from longtail.trainer.data.files import decoded, find_files, read_columns
from longtail.trainer.errors import DataError

KINDS = {
    "category": "id", "boolean": "id", "words": "text", "joined": "bag", "bag": "bag", "number": "number",
    "vector": "vector", "date": "date",
}  # fmt: skip
"""Kind of feature that reads a column, by what it holds; what is not here no feature reads."""

_SAMPLE = 20_000
"""Values of a string column that are looked into."""
_FEW = 64
"""Most distinct integers that are taken for a category."""
_CODES = {"id", "code", "zip", "postcode", "postal", "type", "category", "group", "class"}
"""Words in the name of a column of integers that are categories, however many."""


@dataclass(frozen=True)
class Column:
    """A column, looked at.

    Attributes:
        name: of the column.
        holds: a key of `KINDS`, or why no feature reads it.
        distinct: different values, without null.
        nulls: rows without a value.
        separator: of values such as `Action|Comedy`.
        dims: numbers in each vector.
    """

    name: str
    holds: str
    distinct: int
    nulls: int
    separator: str | None = None
    dims: int | None = None

    @property
    def kind(self) -> str | None:
        """Kind of feature that reads it; None if none does."""
        known = get_args(FeatureConfig.model_fields["kind"].annotation)
        kind = KINDS.get(self.holds)
        return kind if kind in known else None


def read_table(place: Path) -> pa.Table:
    """All columns of a file, a directory or a glob of Parquet, CSV or TSV files, with the types that they have or seem
    to have; text in some files is text in all.

    Raises:
        DataError: missing, of another ending, empty or garbled, a column twice, or one of two types.
    """
    files = find_files(place, "table")
    tables = [decoded(read_columns(file, None, strings=())) for file in files]
    texts = {field.name for table in tables for field in table.schema if pa.types.is_string(field.type)}
    if any(table.schema.field(name).type != pa.string() for table in tables for name in texts & {*table.column_names}):
        tables = [decoded(read_columns(file, None, strings=texts)) for file in files]
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{place}: expected files whose columns are of one type each: {error}") from error
    if table.num_rows == 0:
        raise DataError(f"{place}: expected at least one row, found none")
    return table


def words_of(name: str) -> set[str]:
    """The words in a column's name, lower-case: of `productId`, `PRODUCT_ID` and `productid`, product and id."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return words | {part for word in words if word.endswith("id") and len(word) > 3 for part in (word[:-2], "id")}


def look_at(name: str, column: pa.ChunkedArray) -> Column:
    """What one column, [rows], holds."""
    kind, nulls = column.type, column.null_count
    if nulls == len(column):
        return Column(name, "nothing", 0, nulls)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _look_at_lists(name, column)
    if pa.types.is_map(kind):
        keys, weights = kind.key_type, kind.item_type
        ids = pa.types.is_string(keys) or pa.types.is_integer(keys)
        numbers = pa.types.is_integer(weights) or pa.types.is_floating(weights)
        return Column(name, "bag" if ids and numbers else f"a map of {keys} to {weights}", 0, nulls)
    if pa.types.is_nested(kind) or pa.types.is_decimal(kind) or pa.types.is_binary(kind):
        return Column(name, f"values of type {kind}, which no feature reads", 0, nulls)
    distinct = pc.count_distinct(column).as_py()
    if distinct == 1 and not nulls:
        return Column(name, "one value in every row", 1, 0)
    if pa.types.is_boolean(kind):
        return Column(name, "boolean", distinct, nulls)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return Column(name, "date", distinct, nulls)
    if pa.types.is_floating(kind):
        infinite = np.isinf(column.to_numpy()).any()
        return Column(name, "infinite numbers" if infinite else "number", distinct, nulls)
    if pa.types.is_integer(kind):
        return Column(name, "category" if distinct <= 2 or words_of(name) & _CODES else "number", distinct, nulls)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _look_at_strings(name, column, distinct)
    return Column(name, f"values of type {kind}, which no feature reads", distinct, nulls)


def _look_at_lists(name: str, column: pa.ChunkedArray) -> Column:
    inner, nulls = column.type.value_type, column.null_count
    if pa.types.is_floating(inner):
        lengths = pc.unique(pc.list_value_length(column).drop_null())
        if len(lengths) == 1 and lengths[0].as_py():
            numbers = pc.list_flatten(column).cast(pa.float64())
            if numbers.null_count or not np.isfinite(numbers.to_numpy()).all():
                return Column(name, "vectors with numbers that are missing or infinite", 0, nulls)
            return Column(name, "vector", 0, nulls, dims=lengths[0].as_py())
        return Column(name, "vectors of different lengths", 0, nulls)
    if not pa.types.is_fixed_size_list(column.type) and (pa.types.is_string(inner) or pa.types.is_integer(inner)):
        return Column(name, "bag", 0, nulls)
    return Column(name, f"lists of {inner}, which no feature reads", 0, nulls)


def _look_at_strings(name: str, column: pa.ChunkedArray, distinct: int) -> Column:
    """Categories repeat, text has words, joined values have parts that repeat, and the rest is of no use."""
    rows, nulls = len(column), column.null_count
    sample = column.drop_null().slice(0, _SAMPLE)
    if pc.mean(pc.starts_with(sample, "http").cast(pa.float64())).as_py() > 0.5:
        return Column(name, "addresses", distinct, nulls)
    some = pc.count_distinct(sample).as_py()
    for separator in ("|", ";", ","):
        parts = pc.split_pattern(sample, separator)
        flat = pc.utf8_trim_whitespace(pc.list_flatten(parts))
        joined = pc.mean(pc.greater(pc.list_value_length(parts), 1).cast(pa.float64())).as_py()
        different = pc.count_distinct(flat).as_py()
        fewer = separator == "|" or different < some
        if joined >= 0.05 and fewer and different <= 0.2 * len(sample) + 20 and _words(flat) <= 3:
            return Column(name, "joined", distinct, nulls, separator=separator)
    words = _words(sample)
    if words >= 3 or (words >= 1.5 and distinct > 0.5 * rows):
        return Column(name, "words", distinct, nulls)
    if distinct > max(_FEW, 0.5 * (rows - nulls)):
        return Column(name, "a value of its own in most rows", distinct, nulls)
    return Column(name, "category", distinct, nulls)


def _words(texts: pa.Array | pa.ChunkedArray) -> float:
    """Mean number of words."""
    return float(pc.mean(pc.list_value_length(pc.utf8_split_whitespace(texts))).as_py() or 0)
