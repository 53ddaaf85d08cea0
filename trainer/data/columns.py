"""Columns of feature tables, raw and encoded: ids, bags of ids, and the kinds of `measures.py`.

Legend: `R` rows of a feature table, `B` batch, `P` positions of a padded bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Feature, Vocabulary, hash_token, tokenize
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.ids import ids_of, parts_of
from longtail.bundle.validation import did_you_mean
from longtail.trainer.config import FeatureConfig
from longtail.trainer.data.measures import Measured, encode_measured
from longtail.trainer.errors import DataError

_IDS_AT_ONCE = 1 << 23
"""Number of ids of a bag column that are encoded at a time."""


@dataclass(frozen=True)
class Bags:
    """Hold variable-length weighted ids: row r has entries `offsets[r]:offsets[r + 1]`."""

    offsets: Int64
    ids: Int32
    weights: Float32

    def pad(self, starts_B: Int64, ends_B: Int64, limit: int) -> tuple[Int32, Float32]:
        """Return entries `starts:ends`, at most `limit` each, as ids [B, P] and weights [B, P]; padding is (0, 0).

        P is the longest length, rounded up to a power of two, because a step is compiled again for every new shape.
        """
        lengths_B = np.minimum(ends_B - starts_B, limit)
        width = min(limit, 1 << int(max(int(lengths_B.max(initial=1)), 1) - 1).bit_length())
        places_P = np.arange(width)
        inside_BP = places_P < lengths_B[:, None]
        at_BP = np.where(inside_BP, starts_B[:, None] + places_P, 0)
        if len(self.ids) == 0:
            return np.zeros(at_BP.shape, np.int32), np.zeros(at_BP.shape, np.float32)
        return (
            np.where(inside_BP, self.ids[at_BP], 0).astype(np.int32),
            np.where(inside_BP, self.weights[at_BP], 0).astype(np.float32),
        )

    @cached_property
    def longest(self) -> int:
        """Return the number of entries of the longest row, at least 1."""
        return max(int(np.diff(self.offsets).max(initial=0)), 1)

    def filled(self, rows_B: Int32, filler_B: Int32) -> Int32:
        """Return all ids of some rows, int32 [B, P]; empty places hold the row's filler.

        P is the length of the longest of all rows, and so the same for every batch.
        """
        starts_B = self.offsets[rows_B]
        places_P = np.arange(self.longest)
        inside_BP = places_P < (self.offsets[rows_B + 1] - starts_B)[:, None]
        at_BP = np.where(inside_BP, starts_B[:, None] + places_P, 0)
        ids_BP = self.ids[at_BP] if len(self.ids) else at_BP
        return np.where(inside_BP, ids_BP, filler_B[:, None]).astype(np.int32)


Encoded = Int32 | Bags | Measured


@dataclass(frozen=True)
class FeatureTable:
    """Hold a source of features: a table of queries, of labels, or of contexts of interactions.

    Attributes:
        table: one row per id, in the order of `ids`, or one row per version or context; None without a file.
        id_name: name of the feature that is the id itself.
        path: the file or files, for errors; None without a file.
        training_rows: rows that training reads, int [n], repeated by their weight in frequencies and means.
        by_id: whether row r belongs to the r-th id, which is false for contexts and versions.
    """

    ids: pa.Array
    table: pa.Table | None
    id_name: str
    path: str | None
    training_rows: npt.NDArray[np.integer]
    by_id: bool = True

    def column(self, feature: FeatureConfig) -> pa.Array:
        """Return the raw column of a feature, one value per id."""
        if feature.name == self.id_name:
            return self.ids
        name = feature.source
        found = [] if self.table is None else self.table.column_names
        if self.table is None or name not in found:
            where = self.path or "the recipe (no feature table)"
            raise DataError(
                f"{where}: feature {feature.name!r}: expected a column {name!r}, found {', '.join(found) or 'none'}"
                f"{did_you_mean(name, found)}"
            )
        return self.table[name].combine_chunks()

    def wrong(self, feature: FeatureConfig, expected: str, found: object, row: int | None = None) -> DataError:
        """Return an error about one feature's column, or its value in one row."""
        if row is not None and self.by_id:
            found = f"{found} of {self.ids[row].as_py()!r}"
        where = f"{self.path or 'interactions'}: feature {feature.name!r} ({feature.kind})"
        return DataError(f"{where}: expected {expected}, found {found}")


def strings_of(feature: FeatureConfig, source: FeatureTable) -> pa.Array:
    """Return a column of ids as strings, one per row; DataError if it holds none."""
    column = source.column(feature)
    try:
        return column if feature.name == source.id_name else ids_of(column)
    except TypeError:
        raise source.wrong(feature, "strings, numbers or booleans", column.type) from None


def bags_of(feature: FeatureConfig, source: FeatureTable) -> tuple[Int64, pa.Array, Float32]:
    """Read a bag or text column: offsets int64 [R + 1], ids (strings or integers), weights float32."""
    column = source.column(feature)
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if feature.kind == "text":
        texts = column if is_text else strings_of(feature, source)
        words = [tokenize(text) if text else [] for text in texts.to_pylist()]
        column = pa.array(words, pa.list_(pa.string()))
    elif is_text or feature.separator is not None:
        column = _split(feature, source, column if is_text else strings_of(feature, source))
    if isinstance(column, pa.MapArray):
        kind = column.type.item_type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise source.wrong(feature, "weights as numbers", kind)
        lengths = np.diff(column.offsets.to_numpy())
        keys, weights = column.keys, column.items.cast(pa.float32())
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
        keys, weights = pc.list_flatten(column), None
    else:
        raise source.wrong(feature, "lists, maps id → weight, lists as text, or strings with a separator", column.type)
    if not (pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type) or pa.types.is_integer(keys.type)):
        try:
            keys = ids_of(keys)
        except TypeError:
            raise source.wrong(feature, "ids as strings, numbers or booleans", keys.type) from None
    values = np.ones(len(keys), np.float32) if weights is None else weights.to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        raise source.wrong(feature, "finite weights", f"{values[~np.isfinite(values)][0]}")
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), keys, values


def _split(feature: FeatureConfig, source: FeatureTable, texts: pa.Array) -> pa.Array:
    """Split every text into a list of ids; DataError for a text that is no list of ids."""
    distinct = texts.dictionary_encode()
    parts = []
    for text in distinct.dictionary.to_pylist():
        parts.append(parts_of(text, feature.separator) if text else [])
        if parts[-1] is None:
            expected = "lists, maps id → weight, lists as text, or strings with a separator"
            raise source.wrong(feature, expected, f"{texts.type}, such as {text!r}", pc.index(texts, text).as_py())
    return pa.array(parts, pa.list_(pa.string())).take(distinct.indices)


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
        return vocabularies[feature.table_name].encode(strings_of(feature, source))
    if feature.kind in ("number", "vector", "date"):
        return encode_measured(feature, source, exported)
    offsets, keys, weights = bags_of(feature, source)
    if feature.kind == "bag":
        return Bags(offsets, _rows_of(vocabularies[feature.table_name], keys), weights)
    tokens = keys.cast(pa.string()).dictionary_encode()  # each distinct word is hashed once
    hashed = np.array([hash_token(token, feature.hash_rows) for token in tokens.dictionary.to_pylist()], np.int32)
    return Bags(offsets, hashed[tokens.indices.to_numpy()] if len(hashed) else np.zeros(0, np.int32), weights)


def _rows_of(vocabulary: Vocabulary, keys: pa.Array) -> Int32:
    """Return the vocabulary rows of a bag's ids."""
    rows = np.empty(len(keys), np.int32)
    # Encode distinct ids only, in blocks: a string per entry would need much more memory than a number per entry.
    for start in range(0, len(keys), _IDS_AT_ONCE):
        part = keys.slice(start, _IDS_AT_ONCE).dictionary_encode()
        # The appended 0, the out-of-vocabulary row, is where null entries point.
        found = np.append(vocabulary.encode(part.dictionary.cast(pa.string())), np.int32(0))
        rows[start : start + _IDS_AT_ONCE] = found[pc.fill_null(part.indices, len(part.dictionary)).to_numpy()]
    return rows
