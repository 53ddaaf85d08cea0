"""Weigh pairs by their types of events: alike in training, in co-occurrence, in the forecast and in every refresh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Float64


def weights_by_type(weights: Mapping[str, float], negative: Iterable[str]) -> dict[str, float]:
    """Return the weight of every type; types that say no, such as a return, weigh 0."""
    return {**weights, **dict.fromkeys(negative, 0.0)}


def event_weights(events: pa.Array, by_type: Mapping[str, float]) -> Float64:
    """Compute the weight of each pair by its type, float64 [N]; 0 for null and other types, 1 without any weights."""
    if not by_type:
        return np.ones(len(events))
    types = events.dictionary_encode()
    weights = np.array([*(by_type.get(type_, 0.0) for type_ in types.dictionary.to_pylist()), 0.0])
    weights_N: Float64 = weights[np.asarray(types.indices.fill_null(len(weights) - 1))]
    return weights_N
