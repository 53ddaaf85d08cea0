"""The forward pass of a step: inputs of both towers, the distinct rows that they read, and the embeddings.

Legend: `B` batch, `C` labels embedded in a step (B positives, labels drawn, then labels that terms add), `E` these,
then one neighbour per positive if `loss.neighbours` has the side label, `R` distinct labels in the histories of a step,
`U` distinct rows of a table, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import keras

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses import Embedded
from longtail.trainer.model.embedding import Dropout, InputKey, compact_rows, dropout_masks, read_distinct
from longtail.trainer.model.towers import draw_masks
from longtail.trainer.model.two_tower import LABEL_BIAS, TwoTower

Read = Mapping[str, Tensor]
"""Distinct rows of label embeddings that histories of a batch read, by name of the table, int32 [R] each."""
OF_NEIGHBOUR = "_neighbour "
"""Prefix of the query tower's inputs for neighbours."""
Masks = list[dict[Dropout, Tensor]]
"""Dropout masks of the batch, and of the queries that are its neighbours."""


class Reading(NamedTuple):
    """Hold the inputs of the towers for a batch.

    Attributes:
        inputs: by tower and name, where tower `neighbour` is the query tower on neighbours; ids are positions among the
            distinct ids of their table.
        distinct: distinct ids of every table from `backend.distinct`, and their rows, float32 [U, D].
        pairs: number of training pairs of these ids and of the distinct label embeddings, float32 [U, 1].
    """

    inputs: dict[InputKey, Tensor]
    positive_B: Tensor
    labels: int
    read: Read
    distinct: list[tuple[Tensor, Tensor]]
    pairs: list[Tensor]


class Forward:
    """Read the inputs of a model's towers for a batch, and embed them.

    `seed` draws unknown ids, audiences and dropout.
    """

    def __init__(self, model: TwoTower, seed: keras.random.SeedGenerator) -> None:
        self._model, self._recipe, self._seed = model, model.recipe, seed
        neighbours = model.recipe.loss.neighbours
        self._sides = () if neighbours is None else neighbours.sides
        readers = model.towers.readers
        self._readers = readers | {
            ("neighbour", name): table
            for (side, name), table in readers.items()
            if side == "query" and "query" in self._sides
        }

    def read(self, batch: dict[str, Tensor], labels_C: Tensor) -> Reading:
        """Read the inputs of a batch, and the table rows to differentiate."""
        inputs, read = self._distinct_of_histories(batch)
        labels_E = labels_C
        if "label" in self._sides:
            labels_E = ops.concatenate([labels_C, ops.convert_to_tensor(batch["_neighbour"])])
        inputs, readers = self._inputs(inputs, labels_C, labels_E, read, batch)
        inputs, ids = read_distinct(self._model.tables, inputs, readers)
        distinct = [(ids[name], backend.gather(table.table, ids[name])) for name, table in self._model.tables.items()]
        positive_B = ops.convert_to_tensor(batch["_positive"])
        towers, ids = self._model.towers, ids | dict(read)
        pairs = [backend.gather(table.table, ids[towers.readers[key]]) for key, table in towers.pairs.items()]
        return Reading(inputs, positive_B, ops.shape(labels_C)[0], read, distinct, pairs)

    def draw_masks(self, reading: Reading) -> Masks:
        """Draw dropout masks."""
        towers, inputs, positive_B = self._model.towers, reading.inputs, reading.positive_B
        label_input = next(column for (side, name), column in inputs.items() if side == "label" and name != LABEL_BIAS)
        masks = draw_masks(towers.query, positive_B, _side(inputs, "query"), self._seed)
        masks |= draw_masks(towers.label, label_input, _side(inputs, "label"), self._seed)
        if "query" not in self._sides:
            return [masks, {}]
        return [masks, draw_masks(towers.query, positive_B, _side(inputs, "neighbour"), self._seed)]

    def embed(self, reading: Reading, rows: list[Tensor], masks: Masks) -> tuple[Embedded, dict[str, Tensor]]:
        """Embed a batch, and its neighbours, float32 [B, D] by side, from table rows, float32 [U, D]."""
        towers = self._model.towers
        with ExitStack() as histories:
            histories.enter_context(compact_rows([*self._model.tables.values()], rows))
            for (key, table), pairs in zip(towers.pairs.items(), reading.pairs, strict=True):
                shared = towers.readers[key] in reading.read
                histories.enter_context(compact_rows([table], [pairs], shared=shared))
            with dropout_masks(masks[0]):
                embedded, neighbours = self._embedded(reading, histories)
            if "query" in self._sides:
                with dropout_masks(masks[1]):
                    neighbours["query"] = towers.query(_side(reading.inputs, "neighbour"))
        return embedded, neighbours

    def _distinct_of_histories(self, batch: dict[str, Tensor]) -> tuple[dict[InputKey, Tensor], Read]:
        """Return the queries' inputs, and the distinct rows of label embeddings in their histories.

        Ids of label embeddings in the inputs are positions among these rows.
        """
        inputs = {("query", name): column for name, column in batch.items() if not name.startswith("_")}
        inputs |= {
            ("neighbour", name.removeprefix(OF_NEIGHBOUR)): column
            for name, column in batch.items()
            if name.startswith(OF_NEIGHBOUR) and "query" in self._sides
        }
        inputs, read = read_distinct(self._model.towers.label_rows, inputs, self._readers, shared=True)
        return inputs, read

    def _inputs(
        self,
        query_inputs: dict[InputKey, Tensor],
        labels_C: Tensor,
        labels_E: Tensor,
        read: Read,
        batch: dict[str, Tensor],
    ) -> tuple[dict[InputKey, Tensor], dict[InputKey, str]]:
        """Return inputs of both towers, and the table of each input that holds ids.

        The label tower has E rows, then R rows for every table of label embeddings.
        """
        label_inputs = self._model.inputs_of_labels(labels_E, self._seed, batch.get("_own"))
        for feature in self._recipe.label.features:
            rate = self._recipe.label_unknown_rate(feature)
            if feature.unknown is not None and rate:
                name, value = feature.unknown
                known = label_inputs[name]
                unknown = keras.random.uniform(ops.shape(known), seed=self._seed) < rate
                label_inputs[name] = ops.where(unknown, ops.full_like(known, value), known)
        entries: dict[InputKey, Tensor] = {}
        for key, rows_R in read.items():
            # Row 0 of label embeddings is padding, so label y has row y + 1.
            labels_R = ops.clip(rows_R - 1, 0, self._model.labels - 1)
            known_R = _are_labels(rows_R, self._model.labels)
            for name, column in self._model.inputs_of_labels(labels_R, self._seed).items():
                known = ops.reshape(known_R, (-1, *[1] * (len(column.shape) - 1)))
                label_inputs[name] = ops.concatenate([label_inputs[name], ops.where(known, column, 0)])
            if key in self._model.entry_ids:
                ids_R = backend.gather(self._model.entry_ids[key], labels_R)
                entries["entry", key] = ops.where(known_R, ids_R, 0)
        inputs: dict[InputKey, Tensor] = {
            **query_inputs,
            **entries,
            **{("label", name): column for name, column in label_inputs.items()},
        }
        readers = dict(self._readers)
        if LABEL_BIAS in self._model.tables:
            inputs["label", LABEL_BIAS], readers["label", LABEL_BIAS] = labels_C + 1, LABEL_BIAS
        return inputs, readers

    def _embedded(self, reading: Reading, histories: ExitStack) -> tuple[Embedded, dict[str, Tensor]]:
        """Embed the batch, and neighbours of its labels; histories then read outputs of the label tower."""
        towers, tables, label_side = self._model.towers, self._model.tables, _side(reading.inputs, "label")
        bias_ids = label_side.pop(LABEL_BIAS, None)
        embedded_D = towers.label(label_side)
        start, dim, rows = reading.labels, self._recipe.model.dim, reading.positive_B.shape[0]
        near = "label" in self._sides
        # The number of distinct labels in histories is not static, and the concatenation loses the static shape.
        labels_CD = ops.reshape(embedded_D[:start], (start, dim)) if reading.read or near else embedded_D
        neighbours = {"label": ops.reshape(embedded_D[start : start + rows], (rows, dim))} if near else {}
        start += rows if near else 0
        for name, rows_R in reading.read.items():
            end = start + ops.shape(rows_R)[0]
            read_RD, start = embedded_D[start:end], end
            if ("entry", name) in reading.inputs:
                read_RD = read_RD + tables[towers.readers["entry", name]](reading.inputs["entry", name])
            read_RD = ops.where(_are_labels(rows_R, self._model.labels)[:, None], read_RD, 0.0)
            histories.enter_context(compact_rows([towers.label_rows[name]], [read_RD], shared=True))
        queries_BD = towers.query(_side(reading.inputs, "query"))
        bias_C = ops.zeros_like(labels_CD[:, 0]) if bias_ids is None else tables[LABEL_BIAS](bias_ids)[:, 0]
        scale = ops.exp(-self._model.log_temperature.value)
        return Embedded(queries_BD, labels_CD, bias_C, scale), neighbours


def _are_labels(rows_R: Tensor, labels: int) -> Tensor:
    """Mask rows of label embeddings that are labels, not padding (row 0) nor past the end; bool [R]."""
    return ops.logical_and(ops.greater(rows_R, 0), ops.less_equal(rows_R, labels))


def _side(inputs: dict[InputKey, Tensor], side: str) -> dict[str, Tensor]:
    return {name: column for (of, name), column in inputs.items() if of == side}
