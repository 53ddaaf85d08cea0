"""Encoding of feature tables as tower inputs, fitted on the training pairs.

Legend: `L` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Feature, Inputs, Vocabulary
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.sets import distinct
from longtail.trainer.config import FeatureConfig, Recipe
from longtail.trainer.data.audience import Audience
from longtail.trainer.data.batches import QueryInputs, take_rows
from longtail.trainer.data.columns import Encoded, EncodedColumn, FeatureTable, encode_column, read_bags, read_strings
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import occurrences


@dataclass(frozen=True)
class Encoding:
    """Hold vocabularies, encoded columns and their descriptions, fitted on the training pairs.

    Attributes:
        label_inputs: inputs of the whole catalogue, without audiences, first axis L.
        numbers: mean and standard deviation of every standardised `number`, by feature name.
        entry_ids: rows of the embedding table that are added to label embeddings in histories, by name of the table of
            label embeddings, int32 [L] each.
        audience: the queries that chose every label; None without an audience feature.
        pairs: number of training pairs of every row of a table, averaged over ids that share the row, by tower and
            feature with symmetric weights, float32 [rows] each.
    """

    vocabularies: dict[str, Vocabulary]
    query: QueryInputs
    label_inputs: Inputs
    query_features: list[Feature]
    label_features: list[Feature]
    numbers: dict[str, tuple[float, float]]
    entry_ids: dict[str, Int32]
    audience: Audience | None = None
    pairs: dict[tuple[str, str], Float32] = field(default_factory=dict)

    @property
    def vocabulary_rows(self) -> dict[str, int]:
        """Return the number of rows of every table of ids."""
        return {name: vocabulary.rows for name, vocabulary in self.vocabularies.items()}

    def first_labels(self, limit: int) -> tuple[Int32, Inputs]:
        """Return the first label rows, at most `limit`, and their tower inputs."""
        if self.audience is not None:
            rows = self.audience.first_rows(limit)
        else:
            rows = np.arange(min(limit, len(next(iter(self.label_inputs.values())))), dtype=np.int32)
        inputs = {name: column[rows] for name, column in self.label_inputs.items()}
        return rows, inputs if self.audience is None else inputs | self.audience.inputs(rows)

    @classmethod
    def fit(
        cls,
        recipe: Recipe,
        dataset: Dataset,
        vocabularies: dict[str, Vocabulary] | None = None,
        exported: Sequence[Feature] = (),
    ) -> Encoding:
        """Build vocabularies from the training pairs, and encode both feature tables.

        Args:
            vocabularies: vocabularies of an exported model, if the encoding must equal that of the model; by default
                they are built.
            exported: query features of this model, with means, ranges and dates; by default they are fitted.
        """
        data, train, requests = recipe.data, dataset.train, dataset.requests
        of_model = {feature.name: feature for feature in exported}
        every_label = np.arange(len(dataset.label_ids))
        versions_N = (
            None if requests is None or requests.attributes is None else requests.attributes[train.request_rows]
        )
        contexts_N = None if requests is None or requests.contexts is None else requests.contexts[train.request_rows]
        query = FeatureTable(
            dataset.query_ids, dataset.query_table, data.query_id, data.queries,
            distinct(train.queries if versions_N is None else versions_N), by_id=versions_N is None,
        )  # fmt: skip
        context = FeatureTable(
            dataset.query_ids, dataset.contexts, "", data.train,
            every_label[:0] if contexts_N is None else contexts_N, by_id=False,
        )  # fmt: skip
        label = FeatureTable(dataset.label_ids, dataset.label_table, data.label_id, data.labels, every_label)
        vocabularies = vocabularies or build_vocabularies(recipe, dataset, query, context, label)
        encoded_labels = {
            f.name: encode_column(f, label, vocabularies) for f in recipe.label.features if f.kind != "audience"
        }
        encoded_queries: dict[str, Encoded] = {}
        for feature in recipe.query.features:
            if feature.kind != "history":
                source = context if feature.origin == "row" else query
                encoded_queries[feature.name] = encode_column(feature, source, vocabularies, of_model.get(feature.name))
        numbers = {
            name: column.scale
            for name, column in (encoded_queries | encoded_labels).items()
            if isinstance(column, EncodedColumn) and column.scale is not None
        }
        histories = {
            feature.name: vocabularies[feature.table_name].encode(dataset.label_ids)
            for feature in recipe.query.features
            if feature.kind == "history"
        }
        audiences = {
            feature.name: vocabularies[feature.table_name].encode(dataset.query_ids)
            for feature in recipe.label.features
            if feature.kind == "audience"
        }
        types = list(data.events.by_type) if data.events else []
        queries = QueryInputs(
            recipe.query.features,
            encoded_queries,
            histories,
            dataset.fixed_past(train),
            ordered=dataset.ordered,
            requests=requests,
            query_id=data.query_id,
            events={
                feature.name: [types.index(name) for name in feature.events]
                for feature in recipe.query.features
                if feature.events
            },
            packs=any(feature.encoder is not None for feature in recipe.query.features),
        )
        pairs = {
            ("query", feature.name): _average_pairs(
                histories[feature.name], queries.history_labels(feature.name), vocabularies[feature.table_name]
            )
            for feature in recipe.query.features
            if feature.weights == "symmetric"
        } | {
            ("label", feature.name): _average_pairs(
                audiences[feature.name], train.queries, vocabularies[feature.table_name]
            )
            for feature in recipe.label.features
            if feature.weights == "symmetric"
        }
        return cls(
            vocabularies=vocabularies,
            query=queries,
            audience=Audience.build(train, audiences, labels=len(dataset.label_ids)) if audiences else None,
            pairs=pairs,
            label_inputs=take_rows(recipe.label.features, encoded_labels, every_label),
            query_features=[
                _describe_feature(feature, encoded_queries.get(feature.name)) for feature in recipe.query.features
            ],
            label_features=[
                _describe_feature(feature, encoded_labels.get(feature.name)) for feature in recipe.label.features
            ],
            numbers=numbers,
            entry_ids={
                feature.table_name: vocabularies[table].encode(dataset.label_ids)
                for feature in recipe.query.features
                if (table := feature.entry_table) is not None
            },
        )


def _average_pairs(rows: Int32, of_pairs_N: Int32, vocabulary: Vocabulary) -> Float32:
    """Average the pairs of the ids of every vocabulary row, at least 1, float32 [rows]."""
    pairs = np.bincount(of_pairs_N, minlength=len(rows))
    ids, total = (np.bincount(rows, weights, minlength=vocabulary.rows) for weights in (None, pairs))
    # At least 1, because weights divide by the root of this number.
    return np.maximum(total / np.maximum(ids, 1), 1).astype(np.float32)


def _describe_feature(feature: FeatureConfig, column: Encoded | None) -> Feature:
    return Feature(
        name=feature.name,
        kind=feature.kind,
        vocabulary=feature.table_name if feature.kind in ("id", "history", "audience", "bag") else None,
        max_length=feature.max_length if feature.kind in ("history", "bag", "text") else None,
        separator=feature.separator,
        hash_rows=feature.hash_rows if feature.kind == "text" else None,
        **(column.description if isinstance(column, EncodedColumn) else {}),
    )


def build_vocabularies(
    recipe: Recipe, dataset: Dataset, query: FeatureTable, context: FeatureTable, label: FeatureTable
) -> dict[str, Vocabulary]:
    """Build one vocabulary per embedding table of ids, by the table's name.

    The table of the label id or of a history holds the labels with at least `min_count` training pairs; the `min_count`
    of the label id takes precedence. The table of label embeddings in histories holds all labels. The table of an
    `audience` or of the query id holds the queries with at least `min_count` training pairs, and the `min_count` of the
    query id takes precedence. Any other table holds the ids that occur in at least `min_count` training queries,
    training pairs (for contexts) or labels.

    Args:
        query, context, label: sources of the features.
    """
    counted: dict[str, list[tuple[pa.Array, Int64, int]]] = {}
    of_labels: dict[str, int] = {}
    of_queries: set[str] = set()
    pairs_per_query = occurrences(dataset.train.queries, len(dataset.query_ids))
    for side, features in ((query, recipe.query.features), (label, recipe.label.features)):
        for feature in features:
            source = context if feature.origin == "row" else side
            if feature.kind not in ("id", "history", "audience", "bag"):
                continue
            if feature.kind == "audience":
                if feature.table_name not in of_queries:
                    frequent = query.ids.filter(pa.array(pairs_per_query >= feature.min_count))
                    counted.setdefault(feature.table_name, []).append((*_occurrences(frequent), 1))
                continue
            if feature.kind == "history" or feature.name == recipe.data.label_id:
                least, name = feature.min_count, feature.table_name
                if feature.entries != "table":
                    of_labels[name] = 0
                    if feature.entry_table is None:
                        continue
                    name = feature.entry_table
                # Query features come first, so the label id's own `min_count` is set last and wins.
                if source is query:
                    least = min(of_labels.get(name, least), least)
                of_labels[name] = least
            elif feature.name == recipe.data.query_id:
                of_queries.add(feature.table_name)
                frequent = source.ids.filter(pa.array(pairs_per_query >= feature.min_count))
                counted.setdefault(feature.table_name, []).append((*_occurrences(frequent), 1))
            else:
                rows = source.training_rows
                if feature.kind == "id":
                    values = read_strings(feature, source).take(pa.array(rows))
                else:
                    offsets, keys, _ = read_bags(feature, source)
                    times = np.repeat(np.bincount(rows, minlength=len(offsets) - 1), np.diff(offsets))
                    values = keys if (times == 1).all() else keys.take(pa.array(np.repeat(np.arange(len(keys)), times)))
                counted.setdefault(feature.table_name, []).append((*_occurrences(values), feature.min_count))
    counts_L = dataset.label_counts()
    vocabularies = {
        name: Vocabulary(dataset.label_ids.filter(pa.array(counts_L >= least))) for name, least in of_labels.items()
    }
    for name, parts in counted.items():
        if name not in vocabularies:
            # Text beyond 2 GiB in one feature makes the ids of the whole table large.
            kind = max((ids.type for ids, _, _ in parts), key=pa.types.is_large_string)
            # Features that share a table add up their counts, and the smallest `min_count` applies.
            ids = pa.concat_arrays([ids.cast(kind) for ids, _, _ in parts]).dictionary_encode()
            counts = np.bincount(ids.indices.to_numpy(), np.concatenate([counts for _, counts, _ in parts]))
            enough = counts >= min(count for _, _, count in parts)
            vocabularies[name] = Vocabulary(ids.dictionary.filter(pa.array(enough)))
    return vocabularies


def _occurrences(values: pa.Array) -> tuple[pa.Array, Int64]:
    """Count distinct non-null ids, in order of first occurrence."""
    counted = pc.value_counts(values)
    ids = counted.field("values")
    # Bags may hold integers, while vocabularies hold strings.
    if not pa.types.is_large_string(ids.type):
        ids = ids.cast(pa.string())
    valid = ids.is_valid()
    return ids.filter(valid), counted.field("counts").filter(valid).to_numpy()
