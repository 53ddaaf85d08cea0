"""The two-tower model that is trained, evaluated and served; `step.py` trains it.

Legend: `B` queries, `C` some labels, `P` entries drawn of a label's audience, `D` dimensions, `L` labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np

from longtail.bundle import Inputs, Proposal
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.trainer import backend
from longtail.trainer.arrays import assign, read_values, untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config import Recipe
from longtail.trainer.data.audience import Audience
from longtail.trainer.data.encode import Encoding
from longtail.trainer.model.embedding import EmbeddingTable
from longtail.trainer.model.towers import build_towers, in_float32

LABEL_BIAS = "label bias"
"""Key of the bias table; its space is in no name of a feature's table."""
_BLOCK = 4096
"""Number of labels embedded at a time."""
_SEQUENCES = 512
"""Number of histories encoded as sequences at a time."""


class DrawnAudience:
    """Sample the audiences of labels, on the device.

    An audience of n entries is cut into P parts of n // P or n // P + 1 entries. One entry is drawn from each part,
    with the size of the part as its weight, so each entry has expected weight 1, and an audience of at most P entries
    is read whole. Every step draws again: with one draw per epoch, a popular label would see few queries.
    """

    def __init__(self, audience: Audience, limits: Mapping[str, int]) -> None:
        self._widths = {name: min(limit, audience.longest) for name, limit in limits.items()}
        self._offsets = untrained_variable(audience.offsets.astype(np.int32), "audience")
        self._ids = {name: untrained_variable(audience.ids[name], name) for name in limits}
        self.variables = [self._offsets, *self._ids.values()]

    def draw(
        self, labels_C: Tensor, seed: keras.random.SeedGenerator, own_B2: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Draw the label tower's inputs: `name` int32 [C, P] and `name__weight` float32 [C, P] per feature.

        `own_B2`, int32, names entries to exclude for the first B labels: the first entry and their number.
        """
        start_C1 = backend.gather(self._offsets, labels_C)[:, None]
        size_C1 = backend.gather(self._offsets, labels_C + 1)[:, None] - start_C1
        first_C1 = own_C1 = ops.zeros_like(size_C1)
        if own_B2 is not None:
            own_C2 = ops.pad(own_B2, [[0, labels_C.shape[0] - own_B2.shape[0]], [0, 0]])
            first_C1, own_C1 = own_C2[:, :1], own_C2[:, 1:]
        drawn: dict[str, Tensor] = {}
        for name, width in self._widths.items():
            part_1P = ops.arange(width, dtype="int32")[None]
            # Stratified draws: the first `more` parts have one entry more than the others, so the parts cover all.
            part_size_C1 = (size_C1 - own_C1) // width
            more_C1 = size_C1 - own_C1 - part_size_C1 * width
            part_CP = part_size_C1 + ops.cast(part_1P < more_C1, "int32")
            random_CP = keras.random.uniform((ops.shape(labels_C)[0], width), seed=seed)
            # Guard against rounding up to `part`, which would be the next part's first entry.
            within_CP = ops.minimum(ops.cast(random_CP * ops.cast(part_CP, "float32"), "int32"), part_CP - 1)
            entry_CP = part_1P * part_size_C1 + ops.minimum(part_1P, more_C1) + within_CP
            # Entries are counted without the own ones, so entries from the first own one on skip these.
            entry_CP = start_C1 + entry_CP + ops.where(entry_CP >= first_C1, own_C1, 0)
            is_entry_CP = part_CP > 0
            ids_CP = backend.gather(self._ids[name], ops.where(is_entry_CP, entry_CP, 0))
            drawn[name] = ops.where(is_entry_CP, ids_CP, 0)
            drawn[f"{name}__weight"] = ops.cast(part_CP, "float32")
        return drawn


class TwoTower:
    """Hold towers, embedding tables, temperature and label biases of one job.

    The recipe's seed draws the initial weights.

    Attributes:
        tables: every embedding table by name, the label biases under `LABEL_BIAS`.
        label_inputs: inputs of the label tower for the whole catalogue, without audiences, first axis L.
        drawn_audience: sampler of audiences in training steps; None without an audience feature.
        entry_ids: rows of the embedding table that are added to label embeddings in histories, by name of the table of
            label embeddings, int32 [L] each.
    """

    def __init__(self, recipe: Recipe, encoding: Encoding, labels: int, proposal: Proposal | None = None) -> None:
        self.recipe, self.labels, self.proposal = recipe, labels, proposal
        self.towers = build_towers(recipe, encoding.vocabulary_rows, encoding.numbers)
        self.tables = dict(self.towers.tables)
        if recipe.model.label_bias:
            # Row 0 is the out-of-vocabulary row of every table, so label y has row y + 1.
            self.tables[LABEL_BIAS] = EmbeddingTable(labels + 1, 1, scale=0.0, seed=0, name="label_bias")
        self.entry_ids = {
            name: untrained_variable(ids_L, f"entries_{name}") for name, ids_L in encoding.entry_ids.items()
        }
        for key, pairs in encoding.pairs.items():
            assign(self.towers.pairs[key].table, pairs[:, None])
        limits = {feature.name: feature.max_length for feature in recipe.label.features if feature.kind == "audience"}
        self._audience = encoding.audience
        self.drawn_audience = None if encoding.audience is None else DrawnAudience(encoding.audience, limits)
        self._label_rows_filled = not self.towers.label_rows
        self._encoded = [feature.name for feature in recipe.query.features if feature.encoder is not None]
        self._query, self._label = (backend.compile_tower(tower) for tower in (self.towers.query, self.towers.label))
        self.label_inputs = {name: untrained_variable(column, name) for name, column in encoding.label_inputs.items()}
        # Gradient steps on log T keep T positive.
        self.log_temperature = keras.Variable(
            float(np.log(recipe.model.number)), dtype="float32", name="log_temperature",
            trainable=recipe.model.learn_temperature,
        )  # fmt: skip
        self.dense_variables: list[keras.Variable] = [
            *self.towers.query.trainable_variables,
            *self.towers.label.trainable_variables,
            *([self.log_temperature] if recipe.model.learn_temperature else []),
        ]
        """Trained variables outside of embedding tables."""

    @property
    def temperature(self) -> float:
        """Return the present temperature T."""
        return float(np.exp(ops.convert_to_numpy(self.log_temperature)))

    def gather_label_inputs(
        self, rows_C: Tensor, seed: keras.random.SeedGenerator | None = None, own_B2: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return inputs of the label tower for label rows, int32 [C]; audiences only with a `seed` to draw them.

        `own_B2` are entries to exclude from audiences of the first B labels (see `DrawnAudience.draw`).
        """
        inputs = {name: backend.gather(column, rows_C) for name, column in self.label_inputs.items()}
        if seed is not None and self.drawn_audience is not None:
            inputs |= self.drawn_audience.draw(rows_C, seed, own_B2)
        return inputs

    def _blocks(self) -> Iterator[tuple[Int32, dict[str, Tensor]]]:
        """Yield all label rows in blocks, with inputs that hold whole audiences."""
        if self._audience is not None:
            for rows_C in self._audience.blocks():
                audiences = {name: ops.convert_to_tensor(x) for name, x in self._audience.inputs(rows_C).items()}
                yield rows_C, self.gather_label_inputs(rows_C) | audiences
            return
        for start in range(0, self.labels, _BLOCK):
            rows_C = np.arange(start, min(start + _BLOCK, self.labels), dtype=np.int32)
            yield rows_C, self.gather_label_inputs(rows_C)

    def embed_queries(self, inputs: Inputs) -> Float32:
        """Return query tower outputs, float32 [B, D]; histories read label embeddings of the last `embed_labels`."""
        # Histories read label embeddings, which must have been computed once.
        if not self._label_rows_filled:
            self.embed_labels()
        with in_float32(self.towers.query):
            if not self._encoded:
                return ops.convert_to_numpy(self._query(inputs))
            embedded_BD = np.empty((len(next(iter(inputs.values()))), self.recipe.model.dim), np.float32)
            for rows_b, part in _by_length(inputs, self._encoded):
                embedded_BD[rows_b] = ops.convert_to_numpy(self._query(part))
        return embedded_BD

    def embed_labels(self) -> Float32:
        """Return label tower outputs of the whole catalogue, with whole audiences, float32 [L, D].

        Outside of training steps, histories read these label embeddings until the next call.
        """
        embeddings_LD = np.empty((self.labels, self.recipe.model.dim), np.float32)
        with in_float32(self.towers.label):
            for rows_C, inputs in self._blocks():
                embeddings_LD[rows_C] = ops.convert_to_numpy(self._label(inputs))
        for name, label_rows in self.towers.label_rows.items():
            rows_LD = embeddings_LD
            if name in self.entry_ids:
                added = self.tables[self.towers.readers["entry", name]](self.entry_ids[name].value)
                rows_LD = rows_LD + ops.convert_to_numpy(added)
            # Row 0, for padding, is 0; label y has row y + 1.
            assign(label_rows.table, np.concatenate([np.zeros_like(rows_LD[:1]), rows_LD]))
        self._label_rows_filled = True
        return embeddings_LD

    def label_biases(self) -> Float32 | None:
        """Return b_y in logits, float32 [L]; None for a model without label bias."""
        if LABEL_BIAS not in self.tables:
            return None
        return read_values(self.tables[LABEL_BIAS].table)[1:, 0]


def _by_length(inputs: Inputs, encoded: Sequence[str]) -> Iterator[tuple[Int64, Inputs]]:
    """Cut inputs into blocks of similar lengths of encoded histories, without their common padding.

    An encoder's cost grows with the width, and most histories are much shorter than the longest. Widths are powers of
    two, because JAX compiles a tower again for every new shape.
    """
    # The number of positions up to each row's last entry.
    filled = [inputs[f"{name}__weight"] != 0 for name in encoded]
    ends_BF = np.stack([(it_BP * np.arange(1, it_BP.shape[1] + 1)).max(axis=1, initial=0) for it_BP in filled], axis=1)
    # Stable, so that equal queries are always embedded in the same blocks.
    order_B = np.argsort(ends_BF.max(axis=1), kind="stable")
    for start in range(0, len(order_B), _SEQUENCES):
        rows_b = order_B[start : start + _SEQUENCES]
        part = {name: column[rows_b] for name, column in inputs.items()}
        for name, longest in zip(encoded, ends_BF[rows_b].max(axis=0).tolist(), strict=True):
            width = 1 << (max(longest, 1) - 1).bit_length()
            for key in (name, f"{name}__weight"):
                part[key] = part[key][:, :width]
        yield rows_b, part
