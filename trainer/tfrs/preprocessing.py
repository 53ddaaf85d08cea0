"""Keras' preprocessing layers, computed from what the encoder of a bundle gives and by operations that ONNX has.

Legend: `B` queries or labels, `P` list length, `V` rows of a feature's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from longtail.bundle.arrays import Int64
from longtail.trainer.errors import ExportError

_layers = tf.keras.layers
LOOKUPS = (_layers.StringLookup, _layers.IntegerLookup)
HASHES = (_layers.Hashing,)
INSIDE = (_layers.Discretization, _layers.CategoryEncoding)
"""Of numbers that the graph has: they stay in it, by other operations."""

DROPPED = 2**30
"""Index of what a layer that counts or marks leaves out: beyond its width, for ONNX counts −1 from the end."""


def check_lookup(layer: Any) -> None:
    """Refuse a lookup that tells unknown ids apart.

    Raises:
        ExportError: another number of out-of-vocabulary indices than one, an inverted or sparse lookup.
    """
    config = layer.get_config()
    for option, expected in (("num_oov_indices", 1), ("invert", False), ("sparse", False)):
        if config[option] != expected:
            raise ExportError(f"{layer.name}: expected {option}={expected}, found {config[option]}")


def tokens(layer: Any) -> list[str]:
    """The ids that a lookup knows, the mask among them, as the bundle writes them."""
    known = [str(token) for index, token in enumerate(layer.get_vocabulary()) if index != _unknown(layer)]
    return known if layer.mask_token is None or layer.output_mode == "int" else [str(layer.mask_token), *known]


def index_of_rows(layer: Any, ids: Sequence[str], *, integers: bool) -> Int64:
    """What a layer makes of the rows of a vocabulary, int64 [V]: of row 0 first, then of every id.

    Row 0 is a lookup's out-of-vocabulary index, and in a Hashing the bin of the empty string, or of 0.

    Args:
        layer: a lookup or a Hashing, whatever its output mode.
        ids: of the vocabulary.
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
        index[str(layer.mask_token)] = padding_index(layer)
    return np.array([unknown, *(index.get(id_, unknown) for id_ in ids)], np.int64)


def padding_index(layer: Any) -> int:
    """The index of a lookup's mask."""
    return 0 if layer.output_mode == "int" else DROPPED


def output(layer: Any, index: tf.Tensor) -> tf.Tensor:
    """A lookup's, Hashing's, Discretization's or CategoryEncoding's output for indices, by its output mode.

    Args:
        layer: whose mode, depth and dtype.
        index: integers, `DROPPED` for what is left out.

    Raises:
        ExportError: indices whose shape the mode mixes over the batch.
    """
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
    """A Discretization or CategoryEncoding of numbers that the graph has.

    Raises:
        ExportError: count weights, or a sparse output.
    """
    if count_weights is not None or layer.sparse:
        raise ExportError(f"{layer.name}: expected neither count_weights nor sparse=True, found one of them")
    numbers = tf.convert_to_tensor(inputs)
    if isinstance(layer, _layers.CategoryEncoding):
        return output(layer, tf.cast(numbers, tf.int64))
    boundaries = tf.constant(layer.bin_boundaries, tf.float32)  # as Bucketize compares, float32
    passed = tf.cast(tf.cast(numbers, tf.float32)[..., None] >= boundaries, tf.int32)
    return output(layer, tf.reduce_sum(passed, axis=-1))


def _unknown(layer: Any) -> int:
    """The index of what a lookup does not know."""
    return int(layer.mask_token is not None and layer.output_mode == "int")


def _depth(layer: Any) -> int:
    """The width of one-hot, multi-hot and counted outputs."""
    if isinstance(layer, HASHES):
        return int(layer.num_bins)
    if isinstance(layer, _layers.Discretization):
        return len(layer.bin_boundaries) + 1
    if isinstance(layer, _layers.CategoryEncoding):
        return int(layer.num_tokens)
    with tf.init_scope():
        return int(layer.max_tokens if layer.pad_to_max_tokens else layer.vocabulary_size())
