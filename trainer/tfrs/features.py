"""Derive a bundle's features from raw columns and preprocessing layers.

Legend: `B` queries or labels, `P` list length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from longtail.bundle import Feature
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs import layers
from longtail.trainer.tfrs.layers import TEXTS

WORDS = "_words"
"""Suffix for the feature of words, if the whole value of a column is looked up as well."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class RawColumn:
    """Describe a raw column and its features.

    Attributes:
        looked_up: whether layers look the column up or split it into words, unlike numbers.
        features: `id` or `history`, `text`, or both; `number`; `vector`.
        vocabularies: ids or words by the name of their feature.
        padding: value that fills up a history.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int | None, ...]
    looked_up: bool
    features: Sequence[Feature]
    vocabularies: Mapping[str, list[str]]
    padding: str | None = None

    @classmethod
    def derive(
        cls, name: str, examples: tf.Tensor, uses: Collection[Any], read_by: Iterable[str], title: str
    ) -> RawColumn:  # fmt: skip
        """Derive the features of a column that reaches the output.

        Args:
            examples: some values of the column, [B], [B, 1] or [B, P].
            uses: layers that look the column up or split it into words; empty for numbers.
            read_by: types of all operations that read the column, for errors.
        """
        feature_title = f"{title}: feature {name!r}"
        shape = tuple(examples.shape.as_list())
        if not _NAME.fullmatch(name):
            raise ExportError(f"{feature_title}: expected a name of letters, digits and _ that begins with a letter")
        if len(shape) > 2:
            raise ExportError(f"{feature_title}: expected [batch] or [batch, n], found {len(shape)} dimensions")
        many, dtype = len(shape) == 2 and shape[1] != 1, examples.dtype
        texts = [layer for layer in uses if isinstance(layer, TEXTS)]
        looked_up = [layer for layer in uses if not isinstance(layer, TEXTS)]
        if not uses and not (dtype.is_integer or dtype.is_floating or dtype.is_bool):
            raise ExportError(
                f"{feature_title}: expected it to be read by a StringLookup or TextVectorization layer of the model, "
                f"found {', '.join(sorted(read_by)) or dtype.name}: do that to the data, before the model"
            )
        if (uses and dtype.is_floating) or (texts and many):
            raise ExportError(
                f"{feature_title}: expected strings or integers, a text to a row, found {dtype.name} of shape {shape}"
            )
        features, vocabularies, padding = [], {}, None
        if not uses and many:
            features = [Feature(name=name, kind="vector", dims=shape[1], missing=None)]
        elif not uses:
            mean = np.asarray(tf.cast(examples, tf.float32), np.float64).mean()
            features = [Feature(name=name, kind="number", missing=round(float(mean), 6))]
        if looked_up:
            vocabularies[name] = list(dict.fromkeys(word for layer in looked_up for word in layers.tokens(layer)))
            padding = _padding(looked_up, feature_title) if many else None
            kind = {"kind": "history", "max_length": shape[1]} if many else {"kind": "id"}
            features.append(Feature(name=name, vocabulary=name, **kind))
        if texts:
            called = name + WORDS if looked_up else name
            vocabularies[called] = list(dict.fromkeys(word for layer in texts for word in layers.tokens(layer)))
            standards = {layers.standardize(layer) for layer in texts}
            if len(standards) > 1:
                raise ExportError(
                    f"{feature_title}: expected one standardize of its layers, found {', '.join(standards)}"
                )
            length = max(layers.longest(layer) for layer in texts)
            features.append(
                Feature(name=called, kind="text", vocabulary=called, standardize=standards.pop(), max_length=length)
            )
        return cls(name, dtype, (None, *shape[1:]), bool(uses), features, vocabularies, padding)

    def stand_in(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return the model's input: the numbers themselves, or zeros of the same shape and dtype."""
        encoded = inputs[self.features[0].name]
        if self.looked_up:
            return blank(self.dtype, tf.shape(encoded)[0], self.shape)
        numbers = tf.cast(encoded, self.dtype)
        return numbers[:, None] if len(self.shape) > len(numbers.shape) else numbers

    def output(
        self, layer: Any, inputs: Mapping[str, tf.Tensor], reshaped: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Compute the output of a layer that reads this column.

        Args:
            reshaped: what the model does to the shape of the column before the layer sees it.
        """
        called = self.features[-1 if isinstance(layer, TEXTS) else 0].name
        words, rows = self.vocabularies[called], inputs[called]
        if isinstance(layer, TEXTS):
            return layers.vectorize(layer, words, rows, inputs[f"{called}__weight"])
        index = tf.gather(tf.constant(layers.find_row_indices(layer, words)), rows)
        if self.features[0].kind == "history":
            index = layers.pad_index(index, inputs[f"{called}__weight"], self.shape[1])
        elif len(self.shape) == 2:
            index = index[:, None]
        return tf.cast(reshaped(index), layer.compute_dtype)


def blank(dtype: tf.DType, batch: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Create zeros of a shape whose first axis is a batch."""
    return tf.ensure_shape(tf.zeros([batch, *shape[1:]], dtype), shape)


def _padding(uses: Iterable[Any], title: str) -> str:
    """Return the value that fills up the lists of a history."""
    masks = {layer.mask_token for layer in uses}
    if len(masks) > 1 or None in masks:
        raise ExportError(
            f"{title}: expected lookups of lists to have one mask_token, which fills up shorter lists, found "
            f"{sorted(map(str, masks))}"
        )
    return str(masks.pop())
