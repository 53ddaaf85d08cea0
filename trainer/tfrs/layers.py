"""Keras' preprocessing layers, computed from what the encoder of a bundle gives and by operations that ONNX has.

Legend: `B` queries or labels, `P` list length or words of a text, `V` rows of a feature's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from longtail.bundle.arrays import Int64
from longtail.bundle.manifest import TextStandard
from longtail.trainer.errors import ExportError

_layers = tf.keras.layers
LOOKUPS = (_layers.StringLookup, _layers.IntegerLookup)
HASHES = (_layers.Hashing,)
TEXTS = (_layers.TextVectorization,)
INSIDE = (_layers.Discretization, _layers.CategoryEncoding)
"""Layers of numbers, which stay in the graph, by other operations."""

DROPPED = 2**30
"""Index of what a layer that counts or marks leaves out: beyond its width, for ONNX counts −1 from the end."""
_LONGEST = 2**20
"""Words that are read of a text where a layer reads all."""
_STANDARDS: dict[str | None, TextStandard] = {
    None: "none",
    "lower": "lower",
    "strip_punctuation": "strip_punctuation",
    "lower_and_strip_punctuation": "lower_and_strip_punctuation",
}


def check_layer(layer: Any) -> None:
    """Refuse options of a lookup or a TextVectorization that the encoder of a bundle does not have."""
    allowed: dict[str, tuple[Any, ...]] = {}
    if isinstance(layer, LOOKUPS):
        allowed = {"num_oov_indices": (1,), "invert": (False,), "sparse": (False,)}
    elif isinstance(layer, TEXTS):
        allowed = {
            "standardize": tuple(_STANDARDS), "split": ("whitespace",), "ngrams": (None,), "ragged": (False,),
            "sparse": (False,), "output_mode": ("int", "multi_hot", "count", "tf_idf"),
        }  # fmt: skip
    config = layer.get_config()
    for option, expected in allowed.items():
        if config[option] not in expected:
            advice = ": split the text in the data and look its words up (StringLookup of [batch, n] words, padded)"
            raise ExportError(
                f"{layer.name}: expected {option} of {', '.join(map(repr, expected))}, found {config[option]!r}"
                f"{advice if isinstance(layer, TEXTS) else ''}"
            )


def standardize(layer: Any) -> TextStandard:
    """Get what a TextVectorization does to a text before it splits it, as `bundle.Feature` names it."""
    return _STANDARDS[layer.get_config()["standardize"]]


def longest(layer: Any) -> int:
    """Get how many words of a text a TextVectorization reads."""
    return int(layer.get_config()["output_sequence_length"] or _LONGEST)


def tokens(layer: Any) -> list[str]:
    """Get the ids that a lookup knows, or the words of a TextVectorization, as the bundle writes them."""
    if isinstance(layer, TEXTS):
        return [token for token in tokens(layer._lookup_layer) if token]
    known = [str(token) for index, token in enumerate(layer.get_vocabulary()) if index != _unknown(layer)]
    return known if layer.mask_token is None or layer.output_mode == "int" else [str(layer.mask_token), *known]


def index_of_rows(layer: Any, ids: Sequence[str], *, integers: bool) -> Int64:
    """Compute a layer's index for every row of a vocabulary, int64 [V]: row 0, which is no id, then every id.

    Row 0 is a lookup's out-of-vocabulary index, and in a Hashing the bin of the empty string, or of 0.

    Args:
        layer: a lookup or a Hashing, of any output mode.
        integers: the layer sees integers.
    """
    with tf.init_scope():  # a lookup tells its words eagerly
        if isinstance(layer, HASHES):
            config = layer.get_config() | {"output_mode": "int", "sparse": False, "dtype": "int64"}
            known = tf.constant([0, *map(int, ids)], tf.int64) if integers else tf.constant(["", *ids])
            index_V: Int64 = type(layer).from_config(config)(known).numpy()
            return index_V
        unknown = _unknown(layer)
        index = {str(token): at for at, token in enumerate(layer.get_vocabulary()) if at != unknown}
    if layer.mask_token is not None:
        index[str(layer.mask_token)] = _padding_index(layer)
    return np.array([unknown, *(index.get(id_, unknown) for id_ in ids)], np.int64)


def padded_index(layer: Any, index_BP: tf.Tensor, weights_BP: tf.Tensor, width: int | None) -> tf.Tensor:
    """Put a lookup's mask where an entry has weight 0, and cut and pad to a width if there is one; [B, P]."""
    padding = _padding_index(layer)
    index_BP = tf.where(weights_BP > 0, index_BP, tf.constant(padding, tf.int64))
    if not width:
        return index_BP
    index_BP = index_BP[:, :width]
    index_BP = tf.pad(index_BP, [[0, 0], [0, width - tf.shape(index_BP)[1]]], constant_values=padding)
    return tf.ensure_shape(index_BP, [None, width])


def vectorized(layer: Any, known: list[str], rows_BP: tf.Tensor, weights_BP: tf.Tensor) -> tf.Tensor:
    """Compute a TextVectorization's output for rows of a vocabulary, int32 [B, P], 0 for an unknown word.

    Args:
        known: the vocabulary's words, of row 1 on.
        weights_BP: float32, 1 for a word, 0 for padding.
    """
    inner = layer._lookup_layer
    index_BP = tf.gather(tf.constant(index_of_rows(inner, known, integers=False)), rows_BP)
    return output(inner, padded_index(inner, index_BP, weights_BP, layer.get_config()["output_sequence_length"]))


def output(layer: Any, index: tf.Tensor) -> tf.Tensor:
    """Compute a layer's output for indices by its output mode; `DROPPED` is left out."""
    mode, dtype = layer.output_mode, layer.compute_dtype
    if mode == "int":
        return tf.cast(index, dtype)
    hot = tf.one_hot(index, _depth(layer), dtype=dtype)
    if mode == "one_hot":
        return tf.squeeze(hot, -2) if index.shape.rank > 1 and index.shape[-1] == 1 else hot
    if index.shape.rank != 2:
        raise ExportError(
            f"{layer.name}: expected an input [batch, n] for output_mode={mode!r}, which mixes the batch of another, "
            f"found shape {index.shape}"
        )
    if mode == "multi_hot":
        return tf.reduce_max(hot, axis=-2)
    counts = tf.reduce_sum(hot, axis=-2)
    return counts * tf.cast(layer.idf_weights_const, dtype) if mode == "tf_idf" else counts


def inside(layer: Any, inputs: Any, count_weights: Any = None) -> tf.Tensor:
    """Compute a Discretization or CategoryEncoding of numbers that the graph has."""
    if count_weights is not None or layer.sparse:
        raise ExportError(f"{layer.name}: expected neither count_weights nor sparse=True, found one of them")
    numbers = tf.convert_to_tensor(inputs)
    if isinstance(layer, _layers.CategoryEncoding):
        return output(layer, tf.cast(numbers, tf.int64))
    boundaries = tf.constant(layer.bin_boundaries, tf.float32)  # as Bucketize compares, float32
    passed = tf.cast(tf.cast(numbers, tf.float32)[..., None] >= boundaries, tf.int32)
    return output(layer, tf.reduce_sum(passed, axis=-1))


def _padding_index(layer: Any) -> int:
    """Get the index of a lookup's mask."""
    return 0 if layer.output_mode == "int" else DROPPED


def _unknown(layer: Any) -> int:
    """Get the index of what a lookup does not know."""
    return int(layer.mask_token is not None and layer.output_mode == "int")


def _depth(layer: Any) -> int:
    """Get the width of one-hot, multi-hot and counted outputs."""
    if isinstance(layer, HASHES):
        return int(layer.num_bins)
    if isinstance(layer, _layers.Discretization):
        return len(layer.bin_boundaries) + 1
    if isinstance(layer, _layers.CategoryEncoding):
        return int(layer.num_tokens)
    with tf.init_scope():
        return int(layer.max_tokens if layer.pad_to_max_tokens else layer.vocabulary_size())
