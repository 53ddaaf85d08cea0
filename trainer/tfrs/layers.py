"""Compute Keras preprocessing layers from encoded features, in ONNX's operations.

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
TEXTS = (_layers.TextVectorization,)
INSIDE = (_layers.Discretization,)
"""Layers of numbers, which stay in the graph with other operations."""

_LONGEST = 2**20
"""Number of words read from a text if a layer reads all words."""
_STANDARDS: dict[str | None, TextStandard] = {
    None: "none",
    "lower": "lower",
    "strip_punctuation": "strip_punctuation",
    "lower_and_strip_punctuation": "lower_and_strip_punctuation",
}


def check_layer(layer: Any) -> None:
    """Refuse options of a layer that the encoder of a bundle lacks."""
    allowed: dict[str, tuple[Any, ...]] = {"output_mode": ("int",)}
    if isinstance(layer, LOOKUPS):
        allowed |= {"num_oov_indices": (1,), "invert": (False,)}
    elif isinstance(layer, TEXTS):
        allowed |= {"standardize": tuple(_STANDARDS), "split": ("whitespace",), "ngrams": (None,), "ragged": (False,)}
    config = layer.get_config()
    for option, expected in allowed.items():
        if config[option] not in expected:
            advice = ""
            if option == "output_mode":
                advice = ": embed the indices (Embedding) and sum or average them"
            elif isinstance(layer, TEXTS):
                advice = ": split the text in the data and look its words up (StringLookup of [batch, n] words, padded)"
            raise ExportError(
                f"{layer.name}: expected {option} of {', '.join(map(repr, expected))}, found {config[option]!r}{advice}"
            )


def standardize(layer: Any) -> TextStandard:
    """Return the standardisation of a TextVectorization before splitting, as named in `bundle.Feature`."""
    return _STANDARDS[layer.get_config()["standardize"]]


def longest(layer: Any) -> int:
    """Return the number of words that a TextVectorization reads from a text."""
    return int(layer.get_config()["output_sequence_length"] or _LONGEST)


def tokens(layer: Any) -> list[str]:
    """Return the ids of a lookup or words of a TextVectorization."""
    if isinstance(layer, TEXTS):
        return [token for token in tokens(layer._lookup_layer) if token]
    return [str(token) for index, token in enumerate(layer.get_vocabulary()) if index != _unknown(layer)]


def find_row_indices(layer: Any, ids: Sequence[str]) -> Int64:
    """Compute a lookup's index for every row of a vocabulary, int64 [V]: row 0, which is no id, then every id."""
    with tf.init_scope():  # a lookup can list its words only in eager mode
        unknown = _unknown(layer)
        index = {str(token): i for i, token in enumerate(layer.get_vocabulary()) if i != unknown}
    return np.array([unknown, *(index.get(id_, unknown) for id_ in ids)], np.int64)


def pad_index(index_BP: tf.Tensor, weights_BP: tf.Tensor, width: int | None) -> tf.Tensor:
    """Set entries of weight 0 to a lookup's mask, index 0; cut and pad to a width, if given; [B, P]."""
    index_BP = tf.where(weights_BP > 0, index_BP, tf.constant(0, tf.int64))
    if not width:
        return index_BP
    index_BP = index_BP[:, :width]
    index_BP = tf.pad(index_BP, [[0, 0], [0, width - tf.shape(index_BP)[1]]])
    return tf.ensure_shape(index_BP, [None, width])


def vectorize(layer: Any, words: list[str], rows_BP: tf.Tensor, weights_BP: tf.Tensor) -> tf.Tensor:
    """Compute a TextVectorization's output from vocabulary rows, int32 [B, P].

    Args:
        words: the vocabulary's words, of row 1 on.
        weights_BP: float32, 1 for a word, 0 for padding.
    """
    inner = layer._lookup_layer
    index_BP = tf.gather(tf.constant(find_row_indices(inner, words)), rows_BP)
    index_BP = pad_index(index_BP, weights_BP, layer.get_config()["output_sequence_length"])
    return tf.cast(index_BP, inner.compute_dtype)


def discretize(layer: Any, inputs: Any) -> tf.Tensor:
    """Compute a Discretization of numbers in the graph."""
    boundaries = tf.constant(layer.bin_boundaries, tf.float32)  # as Bucketize compares, float32
    passed = tf.cast(tf.cast(tf.convert_to_tensor(inputs), tf.float32)[..., None] >= boundaries, tf.int32)
    return tf.cast(tf.reduce_sum(passed, axis=-1), layer.compute_dtype)


def _unknown(layer: Any) -> int:
    """Return a lookup's index of unknown values."""
    return int(layer.mask_token is not None)
