"""Convert JSON features to the inputs of a tower.

Legend: `B` queries (or labels) in the batch, `P` entries of the longest list in it.

List entries have weight 1; the tower decides whether a bag is summed or averaged. Padding is row 0 with weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
from pydantic import JsonValue

from longtail.bundle.arrays import Array, Bools, Float32, Int32
from longtail.bundle.errors import LONGEST_NAME, describe
from longtail.bundle.ids import id_text, split_ids
from longtail.bundle.manifest import Feature
from longtail.bundle.validation import did_you_mean
from longtail.bundle.values import (
    feature_error,
    read_dates,
    read_number,
    read_numbers,
    read_vectors,
    refused,
)
from longtail.bundle.vocabulary import OUT_OF_VOCABULARY, Vocabulary, hash_token, split_words, tokenize

Features = Mapping[str, JsonValue]
Inputs = dict[str, Array]

_ONLY_STRINGS = {str}
_NO_WIDTHS: Mapping[str, int] = MappingProxyType({})


class FeatureReader:
    """Reads batches of features for one tower. Thread-safe."""

    def __init__(
        self,
        features: Sequence[Feature],
        vocabularies: Mapping[str, Vocabulary],
        pad_to: Mapping[str, int] = _NO_WIDTHS,
    ) -> None:
        self.features = features
        self.pad_to = pad_to
        self._names = frozenset(feature.name for feature in features)
        self._vocabularies = vocabularies

    def read(self, features_B: Sequence[Features]) -> Inputs:
        """Convert a batch to tower inputs by name, [B] or [B, P]; raises a FeatureError with row and feature."""
        for row, features in enumerate(features_B):
            if not features.keys() <= self._names:
                unknown = next(name for name in features if name not in self._names)
                names = [feature.name for feature in self.features]
                message = (
                    f"expected one of the features {names}, received {describe(unknown)}{did_you_mean(unknown, names)}"
                )
                raise feature_error(row, unknown[:LONGEST_NAME], message)
        inputs: Inputs = {}
        for feature in self.features:
            values_B = [features.get(feature.name) for features in features_B]
            if feature.kind == "id":
                present_B = [row for row, value in enumerate(values_B) if value is not None]
                present: list[JsonValue] = [values_B[row] for row in present_B]
                # Nearly all ids are strings: one look at their types costs less than a call for each.
                ids = cast("list[str]", present) if set(map(type, present)) <= _ONLY_STRINGS else _strings(present)
                if isinstance(ids, int):
                    raise refused(present_B[ids], feature.name, "id", present[ids])
                rows_B = np.array(self._vocabularies[str(feature.vocabulary)].find_all(ids), np.int32)
                if len(ids) < len(values_B):
                    rows_b, rows_B = rows_B, np.full(len(values_B), OUT_OF_VOCABULARY, np.int32)
                    rows_B[present_B] = rows_b
                inputs[feature.name] = rows_B
            elif feature.kind == "number":
                inputs |= read_numbers(feature, values_B)
            elif feature.kind == "vector":
                inputs |= read_vectors(feature, values_B)
            elif feature.kind == "date":
                inputs[feature.name] = read_dates(feature, values_B)
            else:
                rows_BP, weights_BP = self._bags(feature, values_B, self.pad_to.get(feature.name))
                inputs[feature.name], inputs[f"{feature.name}__weight"] = rows_BP, weights_BP
        return inputs

    def example(self) -> dict[str, JsonValue]:
        """Create features of a valid query that use every vocabulary."""
        values: dict[str, JsonValue] = {}
        for feature in self.features:
            values[feature.name] = None
            if feature.kind == "number":
                values[feature.name] = feature.missing or 0.0
            elif feature.kind == "date":
                values[feature.name] = str(feature.reference and feature.reference.isoformat())
            elif feature.kind == "text":
                values[feature.name] = "some words"
            elif feature.kind != "vector":
                first = [id_.as_py() for id_ in self._vocabularies[str(feature.vocabulary)].ids[:1]]
                values[feature.name] = next(iter(first), None) if feature.kind == "id" else first
        return values

    def _bags(self, feature: Feature, values_B: Sequence[JsonValue], width: int | None) -> tuple[Int32, Float32]:
        """Compute rows and weights of each value, [B, P]: the last `max_length` entries, or a text's first words."""
        last_entries = slice(None) if feature.max_length is None else slice(-feature.max_length, None)
        ids: list[str] = []
        lengths: list[int] = []
        weighted: list[tuple[int, list[float]]] = []
        for row, value in enumerate(values_B):
            start = len(ids)
            if feature.kind == "text" or feature.separator is not None:
                value = id_text(value) or value
            if feature.kind == "bag" and isinstance(value, str):
                parts = split_ids(value, feature.separator)
                value = value if parts is None else [*parts]
            if feature.standardize is not None and isinstance(value, str):
                ids += split_words(value, feature.standardize)[: feature.max_length]
            elif feature.kind == "text" and isinstance(value, str):
                ids += tokenize(value)[last_entries]
            elif feature.kind != "text" and isinstance(value, list):
                strings = cast("list[str]", value) if set(map(type, value)) <= _ONLY_STRINGS else _strings(value)
                if isinstance(strings, int):
                    raise refused(row, f"{feature.name}.{strings}", "id", value[strings])
                ids += strings[last_entries]
            elif feature.kind == "bag" and isinstance(value, dict):
                weights = [
                    read_number(weight, row, f"{feature.name}.{id_[:LONGEST_NAME]}") for id_, weight in value.items()
                ]
                ids += list(value)[last_entries]
                weighted.append((row, weights[last_entries]))
            elif value is not None:
                raise refused(row, feature.name, feature.kind, value)
            lengths.append(len(ids) - start)
        if feature.hash_rows is not None:
            rows = [hash_token(token, feature.hash_rows) for token in ids]
        else:
            # The ids of all values at once: one long lookup costs less than many short ones.
            rows = self._vocabularies[str(feature.vocabulary)].find_all(ids)
        shape = len(lengths), width or max([1, *lengths])
        # No value is shorter than the others, as in a single query: nothing needs padding.
        if len(rows) == shape[0] * shape[1]:
            rows_BP, weights_BP = np.array(rows, np.int32).reshape(shape), np.ones(shape, np.float32)
        else:
            inside_BP = np.arange(shape[1]) < np.array(lengths)[:, None]
            rows_BP = np.full(shape, OUT_OF_VOCABULARY, np.int32)
            rows_BP[inside_BP] = rows
            weights_BP = inside_BP.astype(np.float32)
        for row, weights in weighted:
            weights_BP[row, : len(weights)] = weights
        return rows_BP, weights_BP


def says_nothing(features: Sequence[Feature], inputs: Inputs) -> Bools:
    """Find rows without any feature that the tower knows, bool [B].

    Ids, lists and histories count by their known ids. A number that equals `missing` counts as missing.
    """
    nothing_B: Bools = np.ones(len(next(iter(inputs.values()), ())), np.bool_)
    for feature in features:
        values = inputs[feature.name]
        if (weights_BP := inputs.get(f"{feature.name}__weight")) is not None:
            is_known = np.logical_and(values, weights_BP)
        elif (missing_B := inputs.get(f"{feature.name}__missing")) is not None:
            is_known = missing_B == 0
        else:
            number = feature.kind == "number" and feature.boundaries is None
            is_known = values != np.float32(feature.missing or 0.0) if number else values != OUT_OF_VOCABULARY
        nothing_B &= ~(is_known if is_known.ndim == 1 else is_known.any(axis=1))
        if not nothing_B.any():
            break
    return nothing_B


def _strings(values: list[JsonValue]) -> list[str] | int:
    """Convert ids to strings; returns the position of the first value that is not an id instead."""
    ids = []
    for i, value in enumerate(values):
        if (id_ := id_text(value)) is None:
            return i
        ids.append(id_)
    return ids
