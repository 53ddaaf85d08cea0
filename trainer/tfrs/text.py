"""Keras' TextVectorization, computed from the words that the encoder of a bundle finds.

Legend: `B` queries or labels, `P` words of the longest text.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from longtail.bundle.manifest import TextStandard
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs.preprocessing import index_of_rows, output, padding_index, tokens

TEXTS = (tf.keras.layers.TextVectorization,)

LONGEST = 2**20
"""Words of a text that are read where a layer reads all of them."""
_STANDARDS: dict[str | None, TextStandard] = {
    None: "none",
    "lower": "lower",
    "strip_punctuation": "strip_punctuation",
    "lower_and_strip_punctuation": "lower_and_strip_punctuation",
}


def check_text(layer: Any) -> None:
    """Refuse a TextVectorization that finds other words than the encoder of a bundle could.

    Raises:
        ExportError: a function of one's own, n-grams, characters, ragged or sparse output.
    """
    config = layer.get_config()
    allowed = {
        "standardize": tuple(_STANDARDS), "split": ("whitespace",), "ngrams": (None,), "ragged": (False,),
        "sparse": (False,), "output_mode": ("int", "multi_hot", "count", "tf_idf"),
    }  # fmt: skip
    for option, expected in allowed.items():
        if config[option] not in expected:
            raise ExportError(
                f"{layer.name}: expected {option} of {', '.join(map(repr, expected))}, found {config[option]!r}: split "
                "the text in the data and look its words up (StringLookup of [batch, n] words, padded with its mask)"
            )


def standardize(layer: Any) -> TextStandard:
    """What a layer does to a text before it splits it, as `bundle.Feature` names it."""
    return _STANDARDS[layer.get_config()["standardize"]]


def words(layer: Any) -> list[str]:
    """The words that a layer knows."""
    return [token for token in tokens(layer._lookup_layer) if token]


def longest(layer: Any) -> int:
    """Words of a text that a layer reads."""
    return int(layer.get_config()["output_sequence_length"] or LONGEST)


def vectorized(layer: Any, known: list[str], rows_BP: tf.Tensor, weights_BP: tf.Tensor) -> tf.Tensor:
    """The layer's output for a vocabulary's rows: [B, P], or as wide as it cuts and pads to, or [B, its vocabulary].

    Args:
        layer: a TextVectorization.
        known: the vocabulary's words, of row 1 on.
        rows_BP: int32, row 0 for an unknown word.
        weights_BP: float32, 1 for a word, 0 for padding.
    """
    inner = layer._lookup_layer
    padding = padding_index(inner)
    table = tf.constant(index_of_rows(inner, known, integers=False))
    index = tf.where(weights_BP > 0, tf.gather(table, rows_BP), tf.constant(padding, tf.int64))
    if width := layer.get_config()["output_sequence_length"]:
        index = index[:, :width]
        index = tf.pad(index, [[0, 0], [0, width - tf.shape(index)[1]]], constant_values=padding)
        index = tf.ensure_shape(index, [None, width])
    return output(inner, index)
