"""From feature tables to tower inputs, fitted on the training pairs.

Legend: `L` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longtail.bundle import Feature, Inputs, Vocabulary
from longtail.bundle.arrays import Float32, Int32
from longtail.bundle.elapsed import TimeUnit
from longtail.bundle.sets import distinct
from longtail.trainer.config import FeatureConfig, Recipe
from longtail.trainer.config.rows import Places, shown
from longtail.trainer.data.audience import Audience
from longtail.trainer.data.batches import QueryFeatures, take_rows
from longtail.trainer.data.columns import Bags, Encoded, FeatureTable, encode_column
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.label_vectors import encode_by_label
from longtail.trainer.data.measures import Numbers, Vectors
from longtail.trainer.data.moments import Moments
from longtail.trainer.data.vocabularies import build_vocabularies


@dataclass(frozen=True)
class Encoding:
    """Vocabularies, encoded columns and what a bundle says of them, fitted on the training pairs.

    Attributes:
        label_inputs: inputs of the whole catalogue but for audiences, first axis L.
        numbers: mean and standard deviation of every `number` that is standardised, by feature name.
        entry_ids: rows of the embedding table that are added to label embeddings in histories, by the name of these,
            int32 [L] each.
        audience: which queries chose every label; None where no label feature reads it.
        pairs: training pairs of what every row of a table stands for, on average where it is several ids, by tower and
            feature with symmetric weights, float32 [rows] each.
    """

    vocabularies: dict[str, Vocabulary]
    query: QueryFeatures
    label_inputs: Inputs
    query_features: list[Feature]
    label_features: list[Feature]
    numbers: dict[str, tuple[float, float]]
    entry_ids: dict[str, Int32]
    audience: Audience | None = None
    pairs: dict[tuple[str, str], Float32] = field(default_factory=dict)

    @property
    def vocabulary_rows(self) -> dict[str, int]:
        """Return rows of every table of ids."""
        return {name: vocabulary.rows for name, vocabulary in self.vocabularies.items()}

    def some_labels(self, limit: int) -> tuple[Int32, Inputs]:
        """Return rows of at most `limit` labels, from the first, and the label tower's inputs of them, audiences
        included."""
        if self.audience is not None:
            rows = self.audience.some(limit)
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
        """Build vocabularies from what occurs in training and encode both feature tables.

        Args:
            vocabularies: of an exported model, to encode as it does; by default they are built.
            exported: query features of that model, for means, ranges and dates; by default they are fitted.
        """
        data, train, asked = recipe.data, dataset.train, dataset.asked
        of_model = {feature.name: feature for feature in exported}
        every_label = np.arange(len(dataset.label_ids))
        versions_N = None if asked is None or asked.attributes is None else asked.attributes[train.askings]
        contexts_N = None if asked is None or asked.contexts is None else asked.contexts[train.askings]
        query = FeatureTable(
            dataset.query_ids, dataset.query_table, data.query_id, _path(data.queries),
            distinct(train.queries if versions_N is None else versions_N), by_id=versions_N is None,
        )  # fmt: skip
        context = FeatureTable(
            dataset.query_ids, dataset.contexts, "", _path(data.train),
            every_label[:0] if contexts_N is None else contexts_N, by_id=False,
        )  # fmt: skip
        label = FeatureTable(dataset.label_ids, dataset.label_table, data.label_id, _path(data.labels), every_label)
        vocabularies = vocabularies or build_vocabularies(recipe, dataset, query, context, label)
        encoded_labels = {
            f.name: encode_column(f, label, vocabularies, every_label)
            for f in recipe.label.features
            if f.kind != "audience"
        }
        encoded_queries: dict[str, Encoded] = {}
        for feature in recipe.query.features:
            if feature.kind != "history":
                source = context if feature.origin == "row" else query
                of_labels = encoded_labels.get(feature.of_label or "")
                by_label = (
                    encode_by_label(feature, source, dataset.label_ids, of_labels)
                    if isinstance(of_labels, Vectors)
                    else None
                )
                encoded_queries[feature.name] = by_label or encode_column(
                    feature, source, vocabularies, source.training_rows, of_model.get(feature.name)
                )
        numbers = {
            name: (column.mean, column.std)
            for name, column in (encoded_queries | encoded_labels).items()
            if isinstance(column, Numbers)
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
        queries = QueryFeatures(
            recipe.query.features,
            encoded_queries,
            histories,
            train,
            queries=len(dataset.query_ids),
            ordered=dataset.ordered,
            asked=asked,
            query_id=data.query_id,
            events=_event_codes(recipe),
            moments=(
                Moments.of(train, dataset.time_unit)
                if any(feature.reads_times for feature in recipe.query.features)
                else None
            ),
        )
        pairs = {
            ("query", feature.name): _by_row(
                histories[feature.name], queries.chosen(feature.name), vocabularies[feature.table_name]
            )
            for feature in recipe.query.features
            if feature.weights == "symmetric"
        } | {
            ("label", feature.name): _by_row(audiences[feature.name], train.queries, vocabularies[feature.table_name])
            for feature in recipe.label.features
            if feature.weights == "symmetric"
        }
        return cls(
            vocabularies=vocabularies,
            query=queries,
            audience=Audience.of(train, audiences, labels=len(dataset.label_ids)) if audiences else None,
            pairs=pairs,
            label_inputs=take_rows(recipe.label.features, encoded_labels, every_label),
            query_features=[
                _described(feature, encoded_queries.get(feature.name), dataset.time_unit)
                for feature in recipe.query.features
            ],
            label_features=[
                _described(feature, encoded_labels.get(feature.name), dataset.time_unit)
                for feature in recipe.label.features
            ],
            numbers=numbers,
            entry_ids={
                feature.table_name: vocabularies[feature.entry_table].encode(dataset.label_ids)
                for feature in recipe.query.features
                if feature.entry_table is not None
            },
        )


def _by_row(rows: Int32, of_pairs_N: Int32, vocabulary: Vocabulary) -> Float32:
    """Return pairs of what every row of a vocabulary stands for, at least 1 and on average over its ids, float32
    [rows]."""
    pairs = np.bincount(of_pairs_N, minlength=len(rows))
    ids, total = (np.bincount(rows, weights, minlength=vocabulary.rows) for weights in (None, pairs))
    return np.maximum(total / np.maximum(ids, 1), 1).astype(np.float32)


def _event_codes(recipe: Recipe) -> dict[str, list[int]]:
    """Codes of the event types of every history that is made of some."""
    types = list(recipe.data.events.weights) if recipe.data.events else []
    return {feature.name: [types.index(name) for name in feature.events] for feature in recipe.query.features
            if feature.events}  # fmt: skip


def _path(places: Places | None) -> str | None:
    return None if places is None else shown(places)


def _described(feature: FeatureConfig, column: Encoded | None, unit: TimeUnit) -> Feature:
    """Return what a bundle's manifest says of a feature."""
    measured = {} if column is None or isinstance(column, np.ndarray | Bags) else column.described()
    return Feature(
        name=feature.name,
        kind=feature.kind,
        vocabulary=feature.table_name if feature.kind in ("id", "history", "audience", "bag") else None,
        max_length=feature.max_length if feature.bagged and feature.kind != "audience" else None,
        hash_rows=feature.hash_rows if feature.kind == "text" else None,
        of_label=feature.of_label,
        times=unit if feature.reads_times else None,
        **measured,
    )
