"""Vectors of a query that are given by the id of a label, looked up among the release's labels and the overlay's.

Legend: `B` queries in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    ids = [
        (row, feature, value)
        for feature in features
        for row, given in enumerate(features_B)
        if isinstance(value := given.get(feature.name), str | int) and not isinstance(value, bool)
    ]
    if not ids:
        return read(features_B)
    others_B = [dict(given) for given in features_B]
    for row, feature, _ in ids:
        del others_B[row][feature.name]
    inputs = read(others_B)
    for row, feature, id_ in ids:
        vector = catalogue.vector(str(feature.of_label), id_)
        if vector is not None:
            inputs[feature.name][row] = vector
            inputs[f"{feature.name}__missing"][row] = 0
    return inputs
