"""Vectors of queries that are given by the id of a label: the picture of the product that is looked at.

Legend: `R` rows of a feature table, `L` labels, `D` numbers of a vector.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Inputs
from longtail.bundle.arrays import Float32
from longtail.trainer.config import FeatureConfig
from longtail.trainer.data.columns import FeatureTable, strings_of
from longtail.trainer.data.measures import Vectors, VectorsOfLabels


def encode_by_label(
    feature: FeatureConfig, source: FeatureTable, label_ids: pa.Array, of_labels: Vectors
) -> VectorsOfLabels | None:
    """Return a column of label ids as their vectors; None for a column of something else, such as the vectors
    themselves.

    Args:
        feature: a `vector` with `of_label`.
        label_ids: string [L].
    """
    column = source.column(feature)
    if not (
        pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_integer(column.type)
    ):
        return None
    ids = strings_of(feature, source)
    labels_R = np.asarray(pc.fill_null(pc.index_in(ids, value_set=label_ids), -1), np.int64)
    given = np.asarray(ids.is_valid())
    if given.any() and (labels_R < 0).all():
        row = int(given.argmax())
        raise source.wrong(feature, "ids of labels", f"{ids[row].as_py()!r} and no id that is one", row)
    return VectorsOfLabels(labels_R, of_labels)


def kept_vectors(features: list[FeatureConfig], label_inputs: Inputs) -> dict[str, Float32]:
    """Return what a bundle keeps for query features that are given by label id: float32 [L, D] by label feature, NaN
    without."""
    names = dict.fromkeys(feature.of_label for feature in features if feature.of_label is not None)
    return {
        name: np.where(label_inputs[f"{name}__missing"][:, None] > 0, np.float32(np.nan), label_inputs[name])
        for name in names
    }
