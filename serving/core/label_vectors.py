"""Vectors of a query that are given by the id of a label, looked up among the release's labels and the overlay's.

Legend: `B` queries in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from longtail.bundle import Feature, Features, Inputs
from longtail.serving.core.catalogue import Catalogue


def read_by_label(
    features: Sequence[Feature],
    features_B: Sequence[Features],
    catalogue: Catalogue,
    read: Callable[[Sequence[Features]], Inputs],
) -> Inputs:
    """The query tower's inputs, with the label's vector where a query gives a label's id.

    An id that no answered label has, and a label without a vector, read as a vector that is missing.

    Args:
        features: those with `of_label`.
        features_B: each query's, by name.
        catalogue: the labels.
        read: makes the inputs of everything else; raises InvalidRequestError.
    """
    named = {feature.name: [features.get(feature.name) for features in features_B] for feature in features}
    ids = {
        name: {
            row: value
            for row, value in enumerate(values)
            if isinstance(value, str | int) and value is not True and value is not False
        }
        for name, values in named.items()
    }
    if not any(ids.values()):
        return read(features_B)
    inputs = read([_without(of, [name for name in ids if row in ids[name]]) for row, of in enumerate(features_B)])
    for feature in features:
        for row, id_ in ids[feature.name].items():
            vector = catalogue.vector(str(feature.of_label), id_)
            if vector is not None:
                inputs[feature.name][row] = vector
                inputs[f"{feature.name}__missing"][row] = 0
    return inputs


def _without(features: Mapping[str, JsonValue], names: Sequence[str]) -> Features:
    return {name: value for name, value in features.items() if name not in names}
