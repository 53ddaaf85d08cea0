"""Encoders of a history as a sequence: causal self-attention (SASRec) and pointwise attention (HSTU).

In a training step the histories of a batch lie one after another in blocks, so that what a query's pairs share of its
history is computed once, and nothing is padded: one pass serves as many positives as it has entries. A history is no
longer than a block, so an entry finds all before it in its own block and the one before. Elsewhere each row has its
own block. Both compute the same [METHODS §10.2].

Legend: `S` blocks, or rows, `P` places of a block, `W` places that a block sees, `H` heads, `C` dimensions of a head,
`D` dimensions, `B` batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config.towers import EncoderConfig
from longtail.trainer.data.histories import PLACES, POSITIONS, SEGMENTS
from longtail.trainer.model.embedding import Dropout, Table, layers_of


class Packed(NamedTuple):
    """Where the histories of a batch lie in its blocks.

    Attributes:
        segments_SP: int32, a number from 1 for each history; 0 where there is none.
        positions_SP: int32, from 0.
        places_B: int32, where the last entry of each row's history is among all S·P; −1 for an empty history.
    """

    segments_SP: Tensor
    positions_SP: Tensor
    places_B: Tensor


class SequenceEncoder(keras.layers.Layer):
    """What the layers of an encoder make of the last entry of every history, [B, D]."""

    def __init__(self, table: Table, config: EncoderConfig, *, max_length: int, feature: str, precision: str) -> None:
        super().__init__(name=f"{feature}_encoder", dtype="float32")
        self.table, self.feature = table, feature
        drawn = keras.initializers.RandomNormal(stddev=0.02)
        self.positions = self.add_weight(shape=(max_length, table.dim), initializer=drawn, name="positions")
        self.start = self.add_weight(shape=(table.dim,), initializer="zeros", name="start")
        self.drop = entry_dropout(config, table.dim, feature, f"{feature}_entries")
        block: Callable[..., keras.layers.Layer] = SelfAttention
        if config.name != "sasrec":
            block = partial(PointwiseAttention, max_length=max_length)
        self.blocks = [
            block(table.dim, config, feature=feature, precision=precision, name=f"{feature}_{at}")
            for at in range(config.layers)
        ]
        self.normalise = _normalisation(table.dim, precision)
        self.built = True
        self._packed: Packed | None = None

    def call(self, ids_SP: Tensor, weights_SP: Tensor) -> Tensor:
        """float32 [B, D], where B = S outside of `packed_histories`. Entries of weight 0 are none, others alike."""
        there_SP = ops.cast(ops.not_equal(weights_SP, 0), "int32")
        packed = self._packed
        if packed is None:
            counted_SP = ops.cumsum(there_SP, axis=1)
            seen = Seen.of(there_SP, ops.maximum(counted_SP - 1, 0) * there_SP, before=False)
        else:
            seen = Seen.of(packed.segments_SP * there_SP, packed.positions_SP, before=True)
        scale = float(self.table.dim) ** 0.5
        x_SPD = scale * self.table(ids_SP) + ops.take(self.positions, seen.positions_SP, axis=0)
        x_SPD = dropped(self.drop, x_SPD)
        for block in self.blocks:
            x_SPD = block(x_SPD, seen, before=packed is not None)
        x_SPD = ops.cast(self.normalise(x_SPD), "float32")
        start_D = ops.convert_to_tensor(self.start)
        if packed is not None:
            flat_TD = ops.reshape(x_SPD, (-1, self.table.dim))
            last_BD = ops.take(flat_TD, ops.maximum(packed.places_B, 0), axis=0)
            return ops.where(ops.expand_dims(packed.places_B < 0, 1), start_D, last_BD)
        last_SP = ops.cast(ops.equal(counted_SP, counted_SP[:, -1:]), "float32") * ops.cast(there_SP, "float32")
        empty_S1 = ops.cast(ops.equal(counted_SP[:, -1:], 0), "float32")
        embedded_BD: Tensor = ops.einsum("sp,spd->sd", last_SP, x_SPD) + empty_S1 * start_D
        return embedded_BD


class Seen(NamedTuple):
    """What an entry sees: itself, and the entries of its history before it.

    Attributes:
        positions_SP: int32, from 0.
        distances_SPW: int32, entries from a place that is seen to this one; below 0 where the mask is False.
    """

    positions_SP: Tensor
    mask_SPW: Tensor
    distances_SPW: Tensor

    @classmethod
    def of(cls, segments_SP: Tensor, positions_SP: Tensor, *, before: bool) -> Seen:
        """By the histories' numbers, 0 where there is no entry, and places in them, int32 [S, P] both."""
        keys_SW, at_SW = (windows(numbers, before=before) for numbers in (segments_SP, positions_SP))
        distances_SPW = ops.expand_dims(positions_SP, 2) - ops.expand_dims(at_SW, 1)
        same_SPW = ops.equal(ops.expand_dims(segments_SP, 2), ops.expand_dims(keys_SW, 1))
        is_entry_S1W = ops.expand_dims(keys_SW > 0, 1)
        mask_SPW = ops.logical_and(ops.logical_and(same_SPW, is_entry_S1W), distances_SPW >= 0)
        return cls(positions_SP, mask_SPW, distances_SPW)


def windows(blocks: Tensor, *, before: bool) -> Tensor:
    """Get what every block sees, [S, W, …]: itself, and with `before` the block before it; zeros before the first."""
    if not before:
        return blocks
    earlier = ops.concatenate([ops.zeros_like(blocks[:1]), blocks[:-1]])
    return ops.concatenate([earlier, blocks], axis=1)


class SelfAttention(keras.layers.Layer):
    """A block of SASRec: x + attention(norm x), then x + feed-forward(norm x) (Kang and McAuley 2018); [S, P, D]."""

    def __init__(self, dim: int, config: EncoderConfig, *, feature: str, precision: str, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        shape, hidden = (None, None, dim), config.hidden or 4 * dim
        self.before_attention, self.before_feed = (_normalisation(dim, precision) for _ in range(2))
        self.attention = keras.layers.MultiHeadAttention(config.heads, dim // config.heads, dtype=precision)
        self.attention.build(shape, shape)
        self.wide = keras.layers.Dense(hidden, activation="relu", dtype=precision)
        self.wide.build(shape)
        self.narrow = keras.layers.Dense(dim, dtype=precision)
        self.narrow.build((None, None, hidden))
        self.drop_attended, self.drop_fed = (
            entry_dropout(config, dim, feature, f"{name}_{what}") for what in ("attended", "fed")
        )
        self.built = True

    def call(self, x_SPD: Tensor, seen: Seen, *, before: bool) -> Tensor:
        """float32 [S, P, D]."""
        normal_SPD = self.before_attention(x_SPD)
        keys_SWD = windows(normal_SPD, before=before)
        attended_SPD = self.attention(normal_SPD, keys_SWD, attention_mask=seen.mask_SPW)
        x_SPD = x_SPD + dropped(self.drop_attended, attended_SPD)
        fed_SPD = self.narrow(self.wide(self.before_feed(x_SPD)))
        return x_SPD + dropped(self.drop_fed, fed_SPD)


class PointwiseAttention(keras.layers.Layer):
    """A block of HSTU: x + f(norm(Σ_w silu(q·k + bias)/max_length · v) ⊙ u), where u, v, q, k are silu of a linear map
    of norm x, and the bias is of the distance (Zhai et al. 2024, eq. 1–3); [S, P, D]. No
    softmax: how many entries matter counts."""

    def __init__(
        self, dim: int, config: EncoderConfig, *, max_length: int, feature: str, precision: str, name: str
    ) -> None:
        super().__init__(name=name, dtype="float32")
        heads, self.max_length = config.heads, max_length
        self.before, self.after = (_normalisation(dim, precision) for _ in range(2))
        self.maps = [
            keras.layers.EinsumDense("spd,dhc->sphc", (None, heads, dim // heads), activation="silu", dtype=precision)
            for _ in range(4)
        ]
        for linear in self.maps:
            linear.build((None, None, dim))
        self.out = keras.layers.Dense(dim, dtype=precision)
        self.out.build((None, None, dim))
        self.bias = self.add_weight(shape=(max_length,), initializer="zeros", name="distance_bias")
        self.drop = entry_dropout(config, dim, feature, f"{name}_attended")
        self.built = True

    def call(self, x_SPD: Tensor, seen: Seen, *, before: bool) -> Tensor:
        """float32 [S, P, D]."""
        gate, queries, keys, values = (linear(self.before(x_SPD)) for linear in self.maps)
        keys, values = (windows(each, before=before) for each in (keys, values))
        distances_SPW = ops.clip(seen.distances_SPW, 0, self.max_length - 1)
        bias_SPW = ops.take(self.bias, distances_SPW, axis=0)
        bias_SPW = ops.where(seen.mask_SPW, bias_SPW, 0.0)
        logits_SHPW = ops.cast(ops.einsum("sphc,swhc->shpw", queries, keys), "float32") + bias_SPW[:, None]
        mask_S1PW = ops.cast(seen.mask_SPW, "float32")[:, None]
        shares_SHPW = ops.cast(ops.silu(logits_SHPW) * mask_S1PW / self.max_length, values.dtype)
        attended = ops.reshape(ops.einsum("shpw,swhc->sphc", shares_SHPW, values), ops.shape(x_SPD))
        gated_SPD = self.after(attended) * ops.reshape(gate, ops.shape(x_SPD))
        return x_SPD + dropped(self.drop, self.out(gated_SPD))


def entry_dropout(config: EncoderConfig, dim: int, feature: str, name: str) -> Dropout | None:
    """Drops coordinates of a history's entries; None at a rate of 0."""
    return Dropout(config.dropout, dim, entries_of=feature, name=name) if config.dropout else None


def dropped(layer: Dropout | None, x_SPD: Tensor) -> Tensor:
    """In float32, some coordinates of entries 0 in training."""
    x_SPD = ops.cast(x_SPD, "float32")
    if layer is None:
        return x_SPD
    return ops.reshape(layer(ops.reshape(x_SPD, (-1, layer.width))), ops.shape(x_SPD))


@contextmanager
def packed_histories(tower: keras.Model, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Let encoders read histories inside the block as they lie in the batch, if its columns say where, as `Packed`."""
    encoders = [layer for layer in layers_of(tower) if isinstance(layer, SequenceEncoder)]
    try:
        for layer in encoders:
            names = [f"_{layer.feature}{what}" for what in (SEGMENTS, POSITIONS, PLACES)]
            if names[0] in batch:
                layer._packed = Packed(*(ops.convert_to_tensor(batch[name]) for name in names))
        yield
    finally:
        for layer in encoders:
            layer._packed = None


def _normalisation(dim: int, precision: str) -> keras.layers.Layer:
    layer = keras.layers.LayerNormalization(epsilon=1e-6, dtype=precision)
    layer.build((None, None, dim))
    return layer
