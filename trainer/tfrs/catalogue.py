"""The catalogue of an export: labels, their embeddings and training counts, and the tower that embeds new ones.

Legend: `L` labels, `D` dimensions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from longtail.bundle.arrays import Float32, Int64
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs.columns import Ids, RawColumns, strings
from longtail.trainer.tfrs.tower import ExportedTower, export_tower
from longtail.trainer.tfrs.tracing import trace

Candidates = Ids | tuple[Ids, Mapping[str, Any]]
"""Ids, or ids with columns of features."""

_BATCH = 1024
_EXAMPLES = 1000
"""Labels on which the label tower is checked."""
_TITLE = "label tower"


@dataclass(frozen=True)
class TfrsCatalogue:
    """Hold all labels: ids, strings [L], and embeddings, float32 [L, D].

    Attributes:
        examples: inputs of the candidate model for the first labels; None if they cannot be features by name.
        named: whether the candidate model takes features by name.
    """

    ids: pa.Array
    embeddings: Float32
    examples: RawColumns | None
    named: bool

    @classmethod
    def embed(cls, model: Callable[[Any], Any], candidates: Candidates | tf.data.Dataset, name: str) -> TfrsCatalogue:
        """Embed the candidates; `name` is the name for a single tensor that holds the ids themselves."""
        dataset = candidates
        if not isinstance(dataset, tf.data.Dataset):
            dataset = tf.data.Dataset.from_tensor_slices(candidates)
        pairs = isinstance(dataset.element_spec, tuple)
        if (dataset.element_spec[0] if pairs else dataset.element_spec).shape.rank == 0:
            dataset = dataset.batch(_BATCH)
        ids, blocks, examples, n_examples = [], [], [], 0
        for element in dataset:
            batch_ids, features = element if pairs else (element, element)
            ids.append(strings(batch_ids.numpy()))
            blocks.append(np.asarray(model(features), np.float32))
            by_name = features if isinstance(features, Mapping) else {name: features}
            if n_examples < _EXAMPLES and all(isinstance(tensor, tf.Tensor) for tensor in by_name.values()):
                examples.append(by_name)
                n_examples += len(batch_ids)
        if not blocks:
            raise ExportError("candidates: expected at least one, received none")
        columns = None
        if examples:
            tensors = {column: tf.concat([block[column] for block in examples], 0) for column in examples[0]}
            columns = RawColumns(tensors, not isinstance(features, Mapping))
            if columns.single and not columns.holds(name, pa.concat_arrays(ids)):
                columns = None
        return cls(pa.concat_arrays(ids), np.concatenate(blocks), columns, isinstance(features, Mapping))

    def tower(self, model: Callable[[Any], Any], required: bool | None) -> tuple[ExportedTower | None, str | None]:
        """Export the label tower, and find the feature that is the id.

        A model that takes only the id, or a tensor without a name, has no such tower.

        Args:
            required: True refuses a tower that cannot be exported, None warns of it; False does not try.
        """
        if required is False:
            return None, None
        try:
            if self.examples is None or not isinstance(model, tf.Module):
                raise ExportError(f"{_TITLE}: expected a Keras model of tensors by name, or of the ids alone")
            examples = self.examples.take(range(min(len(self.examples), _EXAMPLES)))
            features = trace(model, examples, _TITLE).features
            ids = [feature.name for feature in features if feature.kind == "id"]
            own_id = next((name for name in ids if examples.holds(name, self.ids)), None)
            if own_id is None or len(features) > 1:
                return export_tower(model, examples, _TITLE), own_id
            if required:
                raise ExportError(f"{_TITLE}: expected features beside the id, {own_id!r}, found none")
        except ExportError as error:
            if required:
                raise
            if (self.named or self.examples is not None) and isinstance(model, tf.Module):
                warnings.warn(f"no label tower, so labels cannot be added while serving: {error}", stacklevel=3)
        return None, None


def label_counts(ids: pa.Array, counts: Mapping[Any, int] | Int64) -> Int64:
    """Return the training pairs of every label, int64 [L]; `counts` is by id or in the order of labels."""
    if isinstance(counts, Mapping):
        by_id = dict(zip(strings(list(counts)).to_pylist(), counts.values(), strict=True))
        counts_L = np.array([by_id.get(id_, 0) for id_ in ids.to_pylist()], np.int64)
        if by_id and not counts_L.any():
            raise ExportError(
                f"counts: expected ids of candidates, such as {ids[0].as_py()!r}, "
                f"received none of them but {next(iter(by_id))!r}"
            )
        return counts_L
    counts_L = np.asarray(counts, np.int64)
    if counts_L.shape != (len(ids),):
        raise ExportError(f"counts: expected one for each of {len(ids)} candidates, received shape {counts_L.shape}")
    return counts_L
