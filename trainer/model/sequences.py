"""Encoders of a history as a sequence: causal self-attention (SASRec) and pointwise attention (HSTU).

A training step packs the histories of a batch into blocks, one history after another. All pairs of a query then share
one pass over its history, without padding between histories. A history is at most as long as a block, so all
earlier entries of an entry are in its own block or in the one before. Outside of training each row has its own block.
Both ways compute the same [METHODS §10.2].

Legend: `S` blocks, or rows, `P` positions of a block, `W` positions that a block sees, `H` heads, `C` dimensions of a
head, `D` dimensions, `B` batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config.towers import EncoderConfig
from longtail.trainer.data.histories import LAST_SLOTS, POSITIONS, SEGMENTS
from longtail.trainer.losses import LossTerm
from longtail.trainer.model.embedding import Dropout, EmbeddingTable, list_layers


class Packed(NamedTuple):
    """Locate the histories of a batch in its blocks.

    Attributes:
        segments_SP: int32, the number of the history, from 1; 0 for an empty position.
        positions_SP: int32, position in the history, from 0.
        last_B: int32, index of the last entry of each row's history among all S·P; −1 for an empty history.
    """

    segments_SP: Tensor
    positions_SP: Tensor
    last_B: Tensor


class SequenceEncoder(keras.layers.Layer):
    """Encode every history by the layers' output at its last entry, [B, D]."""

    def __init__(
        self, table: EmbeddingTable, config: EncoderConfig, *, max_length: int, feature: str, precision: str
    ) -> None:
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
            block(table.dim, config, feature=feature, precision=precision, name=f"{feature}_{i}")
            for i in range(config.layers)
        ]
        self.normalise = _normalisation(table.dim, precision)
        self.built = True
        self._packed: Packed | None = None

    def call(self, ids_SP: Tensor, weights_SP: Tensor) -> Tensor:
        """Return embeddings, float32 [B, D]; B is S outside of `PackedHistories.context`.

        Entries of weight 0 are padding; all other weights act alike.
        """
        is_entry_SP = ops.cast(ops.not_equal(weights_SP, 0), "int32")
        packed = self._packed
        if packed is None:
            counted_SP = ops.cumsum(is_entry_SP, axis=1)
            mask = AttentionMask.build(is_entry_SP, ops.maximum(counted_SP - 1, 0) * is_entry_SP, with_previous=False)
        else:
            mask = AttentionMask.build(packed.segments_SP * is_entry_SP, packed.positions_SP, with_previous=True)
        scale = float(self.table.dim) ** 0.5  # as the code of SASRec scales embeddings
        x_SPD = scale * self.table(ids_SP) + ops.take(self.positions, mask.positions_SP, axis=0)
        x_SPD = apply_dropout(self.drop, x_SPD)
        for block in self.blocks:
            x_SPD = block(x_SPD, mask, with_previous=packed is not None)
        x_SPD = ops.cast(self.normalise(x_SPD), "float32")
        start_D = ops.convert_to_tensor(self.start)
        if packed is not None:
            flat_TD = ops.reshape(x_SPD, (-1, self.table.dim))
            last_BD = ops.take(flat_TD, ops.maximum(packed.last_B, 0), axis=0)
            return ops.where(ops.expand_dims(packed.last_B < 0, 1), start_D, last_BD)
        # The last entry is where the running count reaches its final value; later positions are padding.
        last_SP = ops.cast(ops.equal(counted_SP, counted_SP[:, -1:]), "float32") * ops.cast(is_entry_SP, "float32")
        empty_S1 = ops.cast(ops.equal(counted_SP[:, -1:], 0), "float32")
        return ops.einsum("sp,spd->sd", last_SP, x_SPD) + empty_S1 * start_D


class AttentionMask(NamedTuple):
    """Hold the attention mask: an entry attends to itself and to earlier entries of its history.

    Attributes:
        positions_SP: int32, position in the history, from 0.
        distances_SPW: int32, number of entries from the entry attended to; it may be negative if not `allowed_SPW`.
    """

    positions_SP: Tensor
    allowed_SPW: Tensor
    distances_SPW: Tensor

    @classmethod
    def build(cls, segments_SP: Tensor, positions_SP: Tensor, *, with_previous: bool) -> AttentionMask:
        """Build the mask from segments and positions, int32 [S, P] both; segment 0 is an empty position."""
        keys_SW, at_SW = (windows(numbers, with_previous=with_previous) for numbers in (segments_SP, positions_SP))
        distances_SPW = ops.expand_dims(positions_SP, 2) - ops.expand_dims(at_SW, 1)
        same_SPW = ops.equal(ops.expand_dims(segments_SP, 2), ops.expand_dims(keys_SW, 1))
        is_entry_S1W = ops.expand_dims(keys_SW > 0, 1)
        allowed_SPW = ops.logical_and(ops.logical_and(same_SPW, is_entry_S1W), distances_SPW >= 0)
        return cls(positions_SP, allowed_SPW, distances_SPW)


def windows(blocks: Tensor, *, with_previous: bool) -> Tensor:
    """Return the positions that every block attends to, [S, W, …]: its own, and `with_previous` the block before.

    The first block has zeros before it.
    """
    if not with_previous:
        return blocks
    earlier = ops.concatenate([ops.zeros_like(blocks[:1]), blocks[:-1]])
    return ops.concatenate([earlier, blocks], axis=1)


class SelfAttention(keras.layers.Layer):
    """Apply a block of SASRec (Kang and McAuley 2018) to [S, P, D].

    It computes x + attention(norm x), then x + feed-forward(norm x). With `smoothing`, attention(norm x) +
    smoothing(norm x) replaces attention(norm x).
    """

    def __init__(self, dim: int, config: EncoderConfig, *, feature: str, precision: str, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        shape, hidden = (None, None, dim), 4 * dim
        self.before_attention, self.before_feed = (_normalisation(dim, precision) for _ in range(2))
        self.attention = keras.layers.MultiHeadAttention(config.heads, dim // config.heads, dtype=precision)
        self.attention.build(shape, shape)
        self.smoothing = Smoothing(dim, config.smoothing, name=f"{name}_smoothing") if config.smoothing else None
        self.wide = keras.layers.Dense(hidden, activation="relu", dtype=precision)
        self.wide.build(shape)
        self.narrow = keras.layers.Dense(dim, dtype=precision)
        self.narrow.build((None, None, hidden))
        self.drop_attended, self.drop_fed = (
            entry_dropout(config, dim, feature, f"{name}_{what}") for what in ("attended", "fed")
        )
        self.built = True

    def call(self, x_SPD: Tensor, mask: AttentionMask, *, with_previous: bool) -> Tensor:
        """Return entries after the block, float32 [S, P, D]."""
        normal_SPD = self.before_attention(x_SPD)
        keys_SWD = windows(normal_SPD, with_previous=with_previous)
        attended_SPD = self.attention(normal_SPD, keys_SWD, attention_mask=mask.allowed_SPW)
        if self.smoothing is not None:
            attended_SPD = ops.cast(attended_SPD, "float32") + self.smoothing(keys_SWD, mask)
        x_SPD = x_SPD + apply_dropout(self.drop_attended, attended_SPD)
        fed_SPD = self.narrow(self.wide(self.before_feed(x_SPD)))
        return x_SPD + apply_dropout(self.drop_fed, fed_SPD)


class Smoothing(keras.layers.Layer):
    """Sum exponential moving averages of a history, with learned weights: Σ_γ a_γ ⊙ Σ_w γ^age x_w / Σ_w γ^age.

    The age of an entry counts the later entries up to the present one. This low-pass filter is causal, unlike BSARec's
    (Shin et al. 2024), which filters a whole window; the residual connection passes what it removes.
    """

    def __init__(self, dim: int, factors: Sequence[float], *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.factors = factors
        initial = keras.initializers.Constant(0.3)
        self.gains = self.add_weight(shape=(len(factors), dim), initializer=initial, name="gains")
        self.built = True

    def call(self, x_SWD: Tensor, mask: AttentionMask) -> Tensor:
        """Return the sum for every position, float32 [S, P, D]."""
        x_SWD, mask_SPW = ops.cast(x_SWD, "float32"), ops.cast(mask.allowed_SPW, "float32")
        ages_SPW = ops.cast(ops.maximum(mask.distances_SPW, 0), "float32")
        parts = []
        for i, factor in enumerate(self.factors):
            weights_SPW = mask_SPW * ops.exp(math.log(factor) * ages_SPW)
            total_SP1 = ops.sum(weights_SPW, axis=2, keepdims=True)
            mean_SPD = ops.matmul(weights_SPW, x_SWD) / ops.maximum(total_SP1, 1.0)  # an entry weighs 1 for itself
            parts.append(self.gains[i] * mean_SPD)
        smoothed: Tensor = sum(parts[1:], parts[0])
        return smoothed


class PointwiseAttention(keras.layers.Layer):
    """Apply a block of HSTU (Zhai et al. 2024, eq. 1–3) to [S, P, D].

    It computes x + f(norm(Σ_w silu(q·k + bias)/max_length · v) ⊙ u), where u, v, q and k are silu of linear maps of
    norm x, and the bias depends on the distance. There is no softmax, so the number of relevant entries matters.
    """

    def __init__(
        self, dim: int, config: EncoderConfig, *, max_length: int, feature: str, precision: str, name: str
    ) -> None:
        super().__init__(name=name, dtype="float32")
        heads, self.max_length = config.heads, max_length
        self.normalise_input, self.normalise_output = (_normalisation(dim, precision) for _ in range(2))
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

    def call(self, x_SPD: Tensor, mask: AttentionMask, *, with_previous: bool) -> Tensor:
        """Return entries after the block, float32 [S, P, D]."""
        gate, queries, keys, values = (linear(self.normalise_input(x_SPD)) for linear in self.maps)
        keys, values = (windows(heads, with_previous=with_previous) for heads in (keys, values))
        distances_SPW = ops.clip(mask.distances_SPW, 0, self.max_length - 1)
        bias_SPW = ops.take(self.bias, distances_SPW, axis=0)
        bias_SPW = ops.where(mask.allowed_SPW, bias_SPW, 0.0)
        logits_SHPW = ops.cast(ops.einsum("sphc,swhc->shpw", queries, keys), "float32") + bias_SPW[:, None]
        mask_S1PW = ops.cast(mask.allowed_SPW, "float32")[:, None]
        shares_SHPW = ops.cast(ops.silu(logits_SHPW) * mask_S1PW / self.max_length, values.dtype)
        attended = ops.reshape(ops.einsum("shpw,swhc->sphc", shares_SHPW, values), ops.shape(x_SPD))
        gated_SPD = self.normalise_output(attended) * ops.reshape(gate, ops.shape(x_SPD))
        return x_SPD + apply_dropout(self.drop, self.out(gated_SPD))


def entry_dropout(config: EncoderConfig, dim: int, feature: str, name: str) -> Dropout | None:
    """Create a dropout layer for the entries of a history; None at a rate of 0."""
    return Dropout(config.dropout, dim, entries_of=feature, name=name) if config.dropout else None


def apply_dropout(layer: Dropout | None, x_SPD: Tensor) -> Tensor:
    """Cast entries to float32 and apply dropout, which acts in training only."""
    x_SPD = ops.cast(x_SPD, "float32")
    if layer is None:
        return x_SPD
    return ops.reshape(layer(ops.reshape(x_SPD, (-1, layer.width))), ops.shape(x_SPD))


class PackedHistories(LossTerm):
    """Make encoders read packed histories, if the batch has the columns of `Packed`."""

    @contextmanager
    def context(self, tower: keras.Model, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Give encoders the packed histories of the batch inside the block."""
        encoders = [layer for layer in list_layers(tower) if isinstance(layer, SequenceEncoder)]
        try:
            for layer in encoders:
                names = [f"_{layer.feature}{column}" for column in (SEGMENTS, POSITIONS, LAST_SLOTS)]
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
