"""JSON features to the arrays that a query tower takes, by the rules of `bundle.Feature`.

Legend: `B` queries in the batch, `P` entries of the longest list in it.

A list's entries weigh 1 each and go in as they are; whether a bag is summed or averaged is the tower's
affair. Padding is row 0 with weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from bundle import OUT_OF_VOCABULARY, Feature, Vocabulary, hash_token, tokenize
from serving.errors import InvalidRequestError
from serving.wording import received

Features = Mapping[str, JsonValue]
Inputs = dict[str, npt.NDArray[np.generic]]
_Bag = tuple[list[int], list[float]]

EXPECTS = {
    "id": "an id (a string or an integer)",
    "history": "a list of ids (strings or integers), oldest first",
    "bag": "a list of ids (strings or integers), or an object of id to weight",
    "text": "a string",
    "number": "a finite number",
}
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class FeatureReader:
    """Reads batches of features for one query tower.

    Args:
        features: the tower's features, in order.
        vocabularies: by name.
    """

    def __init__(self, features: Sequence[Feature], vocabularies: Mapping[str, Vocabulary]) -> None:
        self.features = features
        self._names = [feature.name for feature in features]
        self._vocabularies = vocabularies

    def read(self, features_B: Sequence[Features], pad_to: Mapping[str, int]) -> Inputs:
        """The tower's inputs for a batch.

        Args:
            features_B: each query's features by name; null or absent means missing.
            pad_to: P of the inputs that have a fixed one; others are as wide as the batch needs.

        Returns:
            int32 rows and float32 weights or numbers, [B] or [B, P], by input name.

        Raises:
            InvalidRequestError: an unknown feature or a value of another type; names query and feature.
        """
        for query, features in enumerate(features_B):
            for name in features:
                if name not in self._names:
                    raise InvalidRequestError(
                        f"expected one of the features {self._names}, received {received(name)}",
                        field=f"queries.{query}.features.{name[:100]}",
                    )
        inputs: Inputs = {}
        for feature in self.features:
            values_B = [features.get(feature.name) for features in features_B]
            if feature.kind == "id":
                rows = [self._id_row(feature, value, query) for query, value in enumerate(values_B)]
                inputs[feature.name] = np.array(rows, np.int32)
            elif feature.kind == "number":
                numbers = [
                    feature.missing if value is None else _number(value, _field(feature, query))
                    for query, value in enumerate(values_B)
                ]
                inputs[feature.name] = np.array(numbers, np.float32)
            else:
                bags = [self._bag(feature, value, query) for query, value in enumerate(values_B)]
                width = pad_to.get(feature.name) or max(1, max(len(rows) for rows, _ in bags))
                inputs[feature.name], inputs[f"{feature.name}__weight"] = _padded(bags, width)
        return inputs

    def example(self) -> dict[str, JsonValue]:
        """Features of a valid query that touch every vocabulary."""
        return {feature.name: self._example(feature) for feature in self.features}

    def _example(self, feature: Feature) -> JsonValue:
        if feature.kind == "number":
            return feature.missing
        if feature.kind == "text":
            return "some words"
        ids = self._vocabulary(feature).ids
        first: list[JsonValue] = [id_.as_py() for id_ in ids[:1]]
        return (first[0] if first else None) if feature.kind == "id" else first

    def _vocabulary(self, feature: Feature) -> Vocabulary:
        return self._vocabularies[str(feature.vocabulary)]

    def _id_row(self, feature: Feature, value: JsonValue, query: int) -> int:
        if value is None:
            return OUT_OF_VOCABULARY
        return self._vocabulary(feature).lookup(_id(value, _field(feature, query)))

    def _bag(self, feature: Feature, value: JsonValue, query: int) -> _Bag:
        """Rows and weights of the last `max_length` entries."""
        if value is None:
            return [], []
        field = _field(feature, query)
        kept = slice(-(feature.max_length or 1), None)
        if feature.kind == "text" and isinstance(value, str):
            rows = [hash_token(token, feature.hash_rows or 2) for token in tokenize(value)[kept]]
            return rows, [1.0] * len(rows)
        if feature.kind in ("history", "bag") and isinstance(value, list):
            ids = [_id(entry, f"{field}.{position}") for position, entry in enumerate(value)]
            rows = self._vocabulary(feature).lookup_all(ids[kept])
            return rows, [1.0] * len(rows)
        if feature.kind == "bag" and isinstance(value, dict):
            weights = [_number(weight, f"{field}.{id_[:100]}") for id_, weight in value.items()]
            return self._vocabulary(feature).lookup_all(list(value)[kept]), weights[kept]
        raise InvalidRequestError(f"expected {EXPECTS[feature.kind]}, received {received(value)}", field=field)


def _field(feature: Feature, query: int) -> str:
    return f"queries.{query}.features.{feature.name}"


def _id(value: JsonValue, field: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise InvalidRequestError(f"expected {EXPECTS['id']}, received {received(value)}", field=field)


def _number(value: JsonValue, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequestError(f"expected {EXPECTS['number']}, received {received(value)}", field=field)
    if not abs(value) <= _LARGEST_FLOAT32:
        raise InvalidRequestError(
            f"expected {EXPECTS['number']} that float32 can hold, received {received(value)}", field=field
        )
    return float(value)


def _padded(bags: Sequence[_Bag], width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    rows_BP = np.full((len(bags), width), OUT_OF_VOCABULARY, np.int32)
    weights_BP = np.zeros((len(bags), width), np.float32)
    for query, (rows, weights) in enumerate(bags):
        rows_BP[query, : len(rows)] = rows
        weights_BP[query, : len(weights)] = weights
    return rows_BP, weights_BP
