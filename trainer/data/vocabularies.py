"""Vocabularies: which ids have an embedding of their own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Vocabulary
from longtail.bundle.arrays import Int64
from longtail.trainer.config import Recipe
from longtail.trainer.data.columns import FeatureTable, bags_of, strings_of
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import occurrences


def build_vocabularies(
    recipe: Recipe, dataset: Dataset, query: FeatureTable, context: FeatureTable, label: FeatureTable
) -> dict[str, Vocabulary]:
    """Return one vocabulary per embedding table of ids, by the table's name.

    A table that holds the label's own id, or a history, holds the labels with at least `min_count` training pairs, by
    the own id's `min_count` where it is among them; that of histories of label embeddings holds all labels; any other,
    the ids that at least `min_count` of the training queries, of the training pairs (a context's), or of the labels,
    have. An `audience` counts queries as their own id does, whose `min_count` holds where they share a table.

    Args:
        query, context, label: where their features are read, and by which rows.
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
                    kept = query.ids.filter(pa.array(pairs_per_query >= feature.min_count))
                    counted.setdefault(feature.table_name, []).append((*_occurrences(kept), 1))
                continue
            if feature.kind == "history" or feature.name == recipe.data.label_id:
                least, name = feature.min_count, feature.table_name
                if feature.reads_label_tower:
                    of_labels[name] = 0
                    if feature.entry_table is None:
                        continue
                    name = feature.entry_table
                if source is query:
                    least = min(of_labels.get(name, least), least)
                of_labels[name] = least
            elif feature.name == recipe.data.query_id:
                of_queries.add(feature.table_name)
                kept = source.ids.filter(pa.array(pairs_per_query >= feature.min_count))
                counted.setdefault(feature.table_name, []).append((*_occurrences(kept), 1))
            else:
                rows = source.training_rows
                if feature.kind == "id":
                    values = strings_of(feature, source).take(pa.array(rows))
                else:
                    offsets, keys, _ = bags_of(feature, source)
                    times = np.repeat(np.bincount(rows, minlength=len(offsets) - 1), np.diff(offsets))
                    values = keys if (times == 1).all() else keys.take(pa.array(np.repeat(np.arange(len(keys)), times)))
                counted.setdefault(feature.table_name, []).append((*_occurrences(values), feature.min_count))
    counts_L = dataset.label_counts()
    vocabularies = {
        name: Vocabulary(dataset.label_ids.filter(pa.array(counts_L >= least))) for name, least in of_labels.items()
    }
    for name, parts in counted.items():
        if name not in vocabularies:
            ids = pa.concat_arrays([ids for ids, _, _ in parts]).dictionary_encode()
            counts = np.bincount(ids.indices.to_numpy(), np.concatenate([counts for _, counts, _ in parts]))
            enough = counts >= min(count for _, _, count in parts)
            vocabularies[name] = Vocabulary(ids.dictionary.filter(pa.array(enough)))
    return vocabularies


def _occurrences(values: pa.Array) -> tuple[pa.Array, Int64]:
    """Return distinct non-null ids as strings, in order of first occurrence, and how often each stands."""
    counted = pc.value_counts(values)
    ids = counted.field("values").cast(pa.string())
    known = ids.is_valid()
    return ids.filter(known), counted.field("counts").filter(known).to_numpy()
