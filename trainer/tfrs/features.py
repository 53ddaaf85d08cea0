"""What a raw column becomes in a bundle: by its dtype and width, and by the preprocessing layers that read it.

Legend: `B` queries or labels, `P` list length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from longtail.bundle import Feature
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs import text
from longtail.trainer.tfrs.columns import strings
from longtail.trainer.tfrs.preprocessing import HASHES, index_of_rows, output, padding_index, tokens

WORDS = "_words"
"""What the words of a column are called whose whole value is looked up as well."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Use:
    """A layer that reads a column.

    Attributes:
        layer: a lookup, Hashing or TextVectorization.
        integers: what it sees are integers.
    """

    layer: Any
    integers: bool


@dataclass(frozen=True)
class Column:
    """A raw column and its features.

    Attributes:
        name: of the column.
        dtype: what the model takes.
        shape: [B], [B, 1] or [B, P], None for B.
        uses: of layers that look it up or split it into words; none of numbers.
        features: `id` or `history`, `text`, or both; `number`; `vector`.
        vocabularies: ids or words by the name of their feature.
        padding: what fills up a history.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int | None, ...]
    uses: Sequence[Use]
    features: Sequence[Feature]
    vocabularies: Mapping[str, list[str]]
    padding: str | None = None

    @classmethod
    def of(
        cls, name: str, examples: tf.Tensor, uses: Sequence[Use], ids: Any, read_by: Iterable[str], where: str
    ) -> Column:
        """Of a column that reaches the output.

        Args:
            name: of the column.
            examples: some of its values, [B], [B, 1] or [B, P].
            uses: by layers.
            ids: what a Hashing is to know of it, or None.
            read_by: types of all operations that read it, for errors.
            where: name of the tower, for errors.

        Raises:
            ExportError: what no feature of a bundle is.
        """
        found = f"{where}: feature {name!r}"
        shape = tuple(examples.shape.as_list())
        if not _NAME.fullmatch(name):
            raise ExportError(f"{found}: expected a name of letters, digits and _ that begins with a letter")
        if len(shape) > 2:
            raise ExportError(f"{found}: expected [batch] or [batch, n], found {len(shape)} dimensions")
        many, dtype = len(shape) == 2 and shape[1] != 1, examples.dtype
        texts = [use.layer for use in uses if isinstance(use.layer, text.TEXTS)]
        looked_up = [use for use in uses if not isinstance(use.layer, text.TEXTS)]
        if not uses and not (dtype.is_integer or dtype.is_floating or dtype.is_bool):
            raise ExportError(
                f"{found}: expected it to be read by a StringLookup, Hashing or TextVectorization layer of the model, "
                f"found {', '.join(sorted(read_by)) or dtype.name}: do that to the data, before the model, or give a "
                "QueryTower of encoded inputs"
            )
        if (uses and dtype.is_floating) or (texts and many):
            raise ExportError(
                f"{found}: expected strings or integers, a text to a row, found {dtype.name} of shape {shape}"
            )
        features, vocabularies, padding = [], {}, None
        if not uses:
            numbers = np.asarray(tf.cast(examples, tf.float32), np.float64)
            mean = round(float(numbers.mean()), 6)
            features = [
                Feature(name=name, kind="vector", dims=shape[1], missing=None)
                if many
                else Feature(name=name, kind="number", missing=mean)
            ]
        if looked_up:
            vocabularies[name] = _ids(looked_up, ids, found)
            padding = _padding(looked_up, found) if many else None
            kind = {"kind": "history", "max_length": shape[1]} if many else {"kind": "id"}
            features.append(Feature(name=name, vocabulary=name, **kind))
        if texts:
            called = name + WORDS if looked_up else name
            vocabularies[called] = list(dict.fromkeys(word for layer in texts for word in text.words(layer)))
            standards = {text.standardize(layer) for layer in texts}
            if len(standards) > 1:
                raise ExportError(f"{found}: expected one standardize of its layers, found {', '.join(standards)}")
            length = max(text.longest(layer) for layer in texts)
            features.append(
                Feature(name=called, kind="text", vocabulary=called, standardize=standards.pop(), max_length=length)
            )
        return cls(name, dtype, (None, *shape[1:]), uses, features, vocabularies, padding)

    @property
    def numeric(self) -> bool:
        """Whether its values go straight into the graph."""
        return not self.uses

    def stand_in(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """What the model is called with: the numbers themselves, or something of the same shape and dtype."""
        encoded = inputs[self.features[0].name]
        if self.numeric:
            numbers = tf.cast(encoded, self.dtype)
            return numbers[:, None] if len(self.shape) > len(numbers.shape) else numbers
        return blank(self.dtype, tf.shape(encoded)[0], self.shape)

    def output(
        self, layer: Any, inputs: Mapping[str, tf.Tensor], reshaped: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """A layer's output for encoded inputs.

        Args:
            layer: that reads this column.
            inputs: of the tower.
            reshaped: what the model does to the shape of the column before the layer sees it.
        """
        called = self.features[-1 if isinstance(layer, text.TEXTS) else 0].name
        known, rows = self.vocabularies[called], inputs[called]
        if isinstance(layer, text.TEXTS):
            return text.vectorized(layer, known, rows, inputs[f"{called}__weight"])
        integers = next(use.integers for use in self.uses if use.layer is layer)
        index = tf.gather(tf.constant(index_of_rows(layer, known, integers=integers)), rows)
        if self.features[0].kind == "history":
            padding, width = padding_index(layer), self.shape[1]
            index = tf.where(inputs[f"{called}__weight"] > 0, index, tf.constant(padding, tf.int64))
            index = tf.pad(index, [[0, 0], [0, width - tf.shape(index)[1]]], constant_values=padding)
            index = tf.ensure_shape(index, [None, width])
        elif len(self.shape) == 2:
            index = index[:, None]
        return output(layer, reshaped(index))


def blank(dtype: tf.DType, batch: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Something of a shape and dtype."""
    return tf.ensure_shape(tf.zeros(tf.concat([[batch], list(shape[1:])], 0) if shape[1:] else [batch], dtype), shape)


def _ids(uses: Sequence[Use], given: Any, found: str) -> list[str]:
    """The ids of a column: those its lookups know, and those given for its Hashing layers."""
    known = [] if given is None else strings(given).to_pylist()
    for use in uses:
        if not isinstance(use.layer, HASHES):
            known += tokens(use.layer)
        elif given is None:
            raise ExportError(
                f"{found}: expected vocabularies={{{found.split()[-1]}: ids}}, the ids that Hashing "
                f"{use.layer.name!r} is to know: a bundle looks ids up, and cannot hash one that it has not seen as "
                "Keras does"
            )
    return list(dict.fromkeys(known))


def _padding(uses: Sequence[Use], found: str) -> str:
    """What fills up the lists of a history."""
    masks = {None if isinstance(use.layer, HASHES) else use.layer.mask_token for use in uses}
    if len(masks) > 1 or None in masks:
        raise ExportError(
            f"{found}: expected lookups of lists to have one mask_token, which fills up shorter lists, found "
            f"{sorted(map(str, masks))}"
        )
    return str(masks.pop())
