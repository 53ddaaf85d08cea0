"""From feature tables to tower inputs: vocabularies, encoded columns, padded batches.

Tower inputs are named as `bundle.Feature` says: `name` int32 [B] or [B, P], `name__weight` float32
[B, P] for histories, bags and texts, `name` float32 [B] for numbers.

Legend: `R` rows of a feature table, `B` batch, `P` positions of a padded bag, `L` labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Feature, Vocabulary, hash_token, tokenize
from longtail.bundle.arrays import Array, Float32, Int32, Int64
from longtail.trainer.config import FeatureConfig, Recipe
from longtail.trainer.data.dataset import Dataset, Pairs
from longtail.trainer.errors import DataError

Inputs = dict[str, Array]

_STRETCH = 1 << 23
"""Ids of a bag column that are encoded at a time."""
_UNKNOWN_RATE = 0.01
"""Of query features, unless the recipe says otherwise."""


@dataclass(frozen=True)
class Bags:
    """Variable-length weighted ids: row r holds entries `offsets[r]:offsets[r + 1]`."""

    offsets: Int64
    ids: Int32
    weights: Float32

    def pad(self, starts_B: Int64, ends_B: Int64, limit: int) -> tuple[Int32, Float32]:
        """Entries `starts:ends`, at most `limit` each, as ids [B, P] and weights [B, P]; padding is (0, 0).

        P is the longest length, rounded up to a power of two so that few shapes occur.
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


@dataclass(frozen=True)
class Numbers:
    """A number per row, NaN already replaced by the mean; `mean` and `std` standardise it."""

    values: Float32
    mean: float
    std: float


Encoded = Int32 | Bags | Numbers


class QueryFeatures:
    """Encodes queries: static features by query row, histories by place in the training pairs.

    Args:
        features: the query tower's.
        encoded: one entry per feature other than `history`.
        history_ids: vocabulary rows of every label, int32 [L], by feature name.
        known: pairs that histories are read from.
        queries: number of query rows.
        ordered: a history is what came before; otherwise all other pairs of the query.
    """

    def __init__(
        self,
        features: list[FeatureConfig],
        encoded: dict[str, Encoded],
        history_ids: dict[str, Int32],
        known: Pairs,
        *,
        queries: int,
        ordered: bool,
    ) -> None:
        self._features, self._encoded, self._history_ids = features, encoded, history_ids
        self._known, self._ordered = known, ordered
        self._offsets = known.offsets(queries)
        ones = np.ones(len(known), np.float32)
        self._histories = {name: Bags(self._offsets, ids_L[known.labels], ones) for name, ids_L in history_ids.items()}

    def knowing(self, known: Pairs) -> QueryFeatures:
        """The same features with histories read from other pairs."""
        return QueryFeatures(
            self._features,
            self._encoded,
            self._history_ids,
            known,
            queries=len(self._offsets) - 1,
            ordered=self._ordered,
        )

    def of_pairs(self, pairs_B: Int64, rng: np.random.Generator) -> Inputs:
        """Inputs of training pairs, by their rows in `known`; the positive is in no history.

        Some values become unknown, each feature at its `unknown_rate`.
        """
        queries_B = self._known.queries[pairs_B]
        inputs = take_rows(self._features, self._encoded, queries_B)
        for feature in self._features:
            if feature.kind == "history":
                starts_B, ends_B = self._offsets[queries_B], self._offsets[queries_B + 1]
                if self._ordered:
                    ends_B = pairs_B
                    starts_B = np.maximum(starts_B, ends_B - feature.max_length)
                else:
                    spare_B = np.maximum(ends_B - starts_B - feature.max_length, 0)
                    starts_B = starts_B + rng.integers(0, spare_B + 1)
                inputs |= self._history(feature, starts_B, ends_B, self._histories[feature.name].ids[pairs_B])
            rate = _UNKNOWN_RATE if feature.unknown_rate is None else feature.unknown_rate
            if feature.kind != "number" and rate:
                unknown = rng.random(inputs[feature.name].shape) < rate
                inputs[feature.name] = np.where(unknown, np.int32(0), inputs[feature.name])
        return inputs

    def of_queries(self, queries_B: Int32) -> Inputs:
        """Inputs of queries as they stand after all known pairs: what a service would be asked."""
        inputs = take_rows(self._features, self._encoded, queries_B)
        for feature in self._features:
            if feature.kind == "history":
                ends_B = self._offsets[queries_B + 1]
                starts_B = np.maximum(self._offsets[queries_B], ends_B - feature.max_length)
                inputs |= self._history(feature, starts_B, ends_B, None)
        return inputs

    def _history(
        self,
        feature: FeatureConfig,
        starts_B: Int64,
        ends_B: Int64,
        positives_B: Int32 | None,
    ) -> Inputs:
        ids_BP, weights_BP = self._histories[feature.name].pad(starts_B, ends_B, feature.max_length)
        if positives_B is not None:
            leaks_BP = ids_BP == positives_B[:, None]
            ids_BP, weights_BP = np.where(leaks_BP, np.int32(0), ids_BP), np.where(leaks_BP, np.float32(0), weights_BP)
        return {feature.name: ids_BP, f"{feature.name}__weight": weights_BP}


@dataclass(frozen=True)
class Encoding:
    """Everything a model needs to know about its inputs, fitted on the training pairs.

    Attributes:
        vocabularies: by table name.
        query: encodes queries.
        label_inputs: inputs of the whole catalogue, first axis L.
        query_features, label_features: what the bundle says of them.
        numbers: mean and standard deviation of every `number`, by feature name.
    """

    vocabularies: dict[str, Vocabulary]
    query: QueryFeatures
    label_inputs: Inputs
    query_features: list[Feature]
    label_features: list[Feature]
    numbers: dict[str, tuple[float, float]]

    @property
    def vocabulary_rows(self) -> dict[str, int]:
        """Rows of every table of ids."""
        return {name: vocabulary.rows for name, vocabulary in self.vocabularies.items()}

    @classmethod
    def fit(cls, recipe: Recipe, dataset: Dataset, vocabularies: dict[str, Vocabulary] | None = None) -> Encoding:
        """Build vocabularies from what occurs in training and encode both feature tables.

        Args:
            recipe: names the features.
            dataset: holds their columns.
            vocabularies: of an exported model, to encode as it does; by default they are built.

        Raises:
            DataError: a feature's column is missing or has a type its kind does not read.
        """
        seen_queries = np.unique(dataset.train.queries)
        query = _Source(dataset.query_ids, dataset.query_table, recipe.data.query_id, recipe.data.queries)
        label = _Source(dataset.label_ids, dataset.label_table, recipe.data.label_id, recipe.data.labels)
        vocabularies = vocabularies or _vocabularies(recipe, dataset, query, label, seen_queries)
        static = [feature for feature in recipe.query.features if feature.kind != "history"]
        encoded_queries = {feature.name: _encode(feature, query, vocabularies, seen_queries) for feature in static}
        every_label = np.arange(len(dataset.label_ids))
        encoded_labels = {f.name: _encode(f, label, vocabularies, every_label) for f in recipe.label.features}
        numbers = {
            name: (column.mean, column.std)
            for name, column in (encoded_queries | encoded_labels).items()
            if isinstance(column, Numbers)
        }
        return cls(
            vocabularies=vocabularies,
            query=QueryFeatures(
                recipe.query.features,
                encoded_queries,
                {
                    feature.name: vocabularies[feature.table_name].encode(dataset.label_ids)
                    for feature in recipe.query.features
                    if feature.kind == "history"
                },
                dataset.train,
                queries=len(dataset.query_ids),
                ordered=dataset.ordered,
            ),
            label_inputs=take_rows(recipe.label.features, encoded_labels, every_label),
            query_features=[_described(feature, numbers) for feature in recipe.query.features],
            label_features=[_described(feature, numbers) for feature in recipe.label.features],
            numbers=numbers,
        )


def take_rows(features: list[FeatureConfig], encoded: dict[str, Encoded], rows_B: npt.NDArray[np.integer]) -> Inputs:
    """Tower inputs of some rows of the encoded columns."""
    inputs: Inputs = {}
    for feature in features:
        column = encoded.get(feature.name)
        if isinstance(column, Bags):
            ends_B = column.offsets[rows_B + 1]
            starts_B = np.maximum(column.offsets[rows_B], ends_B - feature.max_length)
            ids, weights = column.pad(starts_B, ends_B, feature.max_length)
            inputs[feature.name], inputs[f"{feature.name}__weight"] = ids, weights
        elif isinstance(column, Numbers):
            inputs[feature.name] = column.values[rows_B]
        elif column is not None:
            inputs[feature.name] = column[rows_B]
    return inputs


@dataclass(frozen=True)
class _Source:
    """Ids and feature table of one side."""

    ids: pa.Array
    table: pa.Table | None
    id_name: str
    path: Path | None

    def column(self, feature: FeatureConfig) -> pa.Array:
        """The raw column of a feature, one value per id."""
        if feature.name == self.id_name:
            return self.ids
        name = feature.source
        found = [] if self.table is None else self.table.column_names
        if self.table is None or name not in found:
            where = self.path or "the recipe (no feature table)"
            raise DataError(
                f"{where}: feature {feature.name!r}: expected a column {name!r}, found {', '.join(found) or 'none'}"
            )
        return self.table[name].combine_chunks()

    def wrong(self, feature: FeatureConfig, expected: str, found: object) -> DataError:
        """An error about one feature's column."""
        where = f"{self.path or 'interactions'}: feature {feature.name!r} ({feature.kind})"
        return DataError(f"{where}: expected {expected}, found {found}")


def _strings(feature: FeatureConfig, source: _Source) -> pa.Array:
    column = source.column(feature)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return column.cast(pa.string())
    raise source.wrong(feature, "strings or integers", column.type)


def _raw_bags(feature: FeatureConfig, source: _Source) -> tuple[Int64, pa.Array, Float32]:
    """Offsets, ids (strings or integers) and weights of a bag or text column."""
    column = source.column(feature)
    if feature.kind == "text":
        words = [tokenize(text) if text else [] for text in _strings(feature, source).to_pylist()]
        column = pa.array(words, pa.list_(pa.string()))
    elif feature.separator is not None:
        texts = _strings(feature, source)
        column = pc.split_pattern(pc.if_else(pc.equal(texts, ""), None, texts), feature.separator)
    if isinstance(column, pa.MapArray):
        lengths = np.diff(column.offsets.to_numpy())
        keys, weights = column.keys, column.items.cast(pa.float32())
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
        keys, weights = pc.list_flatten(column), None
    else:
        raise source.wrong(feature, "lists, maps id → weight, or strings with a separator", column.type)
    if not (pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type) or pa.types.is_integer(keys.type)):
        raise source.wrong(feature, "ids as strings or integers", keys.type)
    values = np.ones(len(keys), np.float32) if weights is None else weights.to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        raise source.wrong(feature, "finite weights", f"{values[~np.isfinite(values)][0]}")
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), keys, values


def _bag_rows(vocabulary: Vocabulary, keys: pa.Array) -> Int32:
    """Vocabulary rows of a bag's ids; only distinct ids of a stretch are ever text."""
    rows = np.empty(len(keys), np.int32)
    for start in range(0, len(keys), _STRETCH):
        part = keys.slice(start, _STRETCH).dictionary_encode()
        found = np.append(vocabulary.encode(part.dictionary.cast(pa.string())), np.int32(0))
        rows[start : start + _STRETCH] = found[pc.fill_null(part.indices, len(part.dictionary)).to_numpy()]
    return rows


def _occurrences(values: pa.Array) -> tuple[pa.Array, Int64]:
    """Distinct non-null ids as strings, in order of first occurrence, and how often each stands."""
    counted = pc.value_counts(values)
    ids = counted.field("values").cast(pa.string())
    known = ids.is_valid()
    return ids.filter(known), counted.field("counts").filter(known).to_numpy()


def _vocabularies(
    recipe: Recipe, dataset: Dataset, query: _Source, label: _Source, seen_queries: Int32
) -> dict[str, Vocabulary]:
    """One vocabulary per table. A table that holds the label's own id, or a history, holds the whole catalogue."""
    counted: dict[str, list[tuple[pa.Array, Int64, int]]] = {}
    vocabularies: dict[str, Vocabulary] = {}
    pairs_per_query = np.bincount(dataset.train.queries, minlength=len(dataset.query_ids))
    for source, features in ((query, recipe.query.features), (label, recipe.label.features)):
        for feature in features:
            if feature.kind in ("number", "text"):
                continue
            if feature.kind == "history" or feature.name == recipe.data.label_id:
                vocabularies[feature.table_name] = Vocabulary(dataset.label_ids)
            elif feature.name == recipe.data.query_id:
                kept = source.ids.filter(pa.array(pairs_per_query >= feature.min_count))
                counted.setdefault(feature.table_name, []).append((*_occurrences(kept), 1))
            else:
                rows = pa.array(seen_queries) if source is query else pa.array(np.arange(len(source.ids)))
                if feature.kind == "id":
                    values = _strings(feature, source).take(rows)
                else:
                    offsets, keys, _ = _raw_bags(feature, source)
                    seen = np.zeros(len(source.ids), bool)
                    seen[rows.to_numpy()] = True
                    values = keys if seen.all() else keys.filter(pa.array(np.repeat(seen, np.diff(offsets))))
                counted.setdefault(feature.table_name, []).append((*_occurrences(values), feature.min_count))
    for name, parts in counted.items():
        if name not in vocabularies:
            ids = pa.concat_arrays([ids for ids, _, _ in parts]).dictionary_encode()
            counts = np.bincount(ids.indices.to_numpy(), np.concatenate([counts for _, counts, _ in parts]))
            enough = counts >= min(count for _, _, count in parts)
            vocabularies[name] = Vocabulary(ids.dictionary.filter(pa.array(enough)))
    return vocabularies


def _encode(
    feature: FeatureConfig, source: _Source, vocabularies: dict[str, Vocabulary], training_rows: npt.NDArray[np.integer]
) -> Encoded:
    if feature.kind == "id":
        return vocabularies[feature.table_name].encode(_strings(feature, source))
    if feature.kind == "number":
        return _numbers(feature, source, training_rows)
    offsets, keys, weights = _raw_bags(feature, source)
    if feature.kind == "bag":
        return Bags(offsets, _bag_rows(vocabularies[feature.table_name], keys), weights)
    tokens = keys.cast(pa.string()).dictionary_encode()
    hashed = np.array([hash_token(token, feature.hash_rows) for token in tokens.dictionary.to_pylist()], np.int32)
    return Bags(offsets, hashed[tokens.indices.to_numpy()] if len(hashed) else np.zeros(0, np.int32), weights)


def _numbers(feature: FeatureConfig, source: _Source, training_rows: npt.NDArray[np.integer]) -> Numbers:
    column = source.column(feature)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise source.wrong(feature, "numbers", column.type)
    values = column.cast(pa.float32()).to_numpy(zero_copy_only=False).copy()
    if np.isinf(values).any():
        raise source.wrong(feature, "finite numbers or nulls", f"{values[np.isinf(values)][0]}")
    known = values[training_rows]
    known = known[~np.isnan(known)].astype(np.float64)
    mean, std = (float(known.mean()), float(known.std())) if len(known) else (0.0, 0.0)
    values[np.isnan(values)] = mean
    return Numbers(values, mean, std or 1.0)


def _described(feature: FeatureConfig, numbers: dict[str, tuple[float, float]]) -> Feature:
    bagged = feature.kind in ("history", "bag", "text")
    return Feature(
        name=feature.name,
        kind=feature.kind,
        vocabulary=feature.table_name if feature.kind in ("id", "history", "bag") else None,
        max_length=feature.max_length if bagged else None,
        hash_rows=feature.hash_rows if feature.kind == "text" else None,
        missing=numbers[feature.name][0] if feature.kind == "number" else 0.0,
    )
