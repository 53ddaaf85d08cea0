"""The forward pass of a step: inputs of both towers, the distinct rows that they read, and the embeddings.

Legend: `B` batch, `C` labels embedded in a step (B positives, labels drawn, then labels that terms add), `E` these,
then one neighbour per positive if `loss.neighbours` has the side label, `R` distinct labels in the histories of a step,
`U` distinct rows of a table, `D` dimensions.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import keras

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses import Embedded
from longtail.trainer.model.embedding import Dropout, InputKey, compact_rows, dropout_masks, list_layers, read_distinct
from longtail.trainer.model.two_tower import LABEL_BIAS, TwoTower

OF_NEIGHBOUR = "_neighbour "
"""Prefix of the query tower's inputs for neighbours."""
Masks = list[dict[Dropout, Tensor]]
"""Dropout masks of the batch, then of the queries that are its neighbours."""


class Reading(NamedTuple):
    """Hold the inputs of the towers for a batch.

    Attributes:
        inputs: by tower, then by name; tower `neighbour` is the query tower on neighbours, and `entry` has rows that
            are added to label embeddings. Ids are positions among the distinct ids of their table.
        history_labels: distinct rows of label embeddings that histories read, by table, int32 [R] each.
        distinct: distinct ids of every table from `backend.distinct`, and their rows, float32 [U, D].
        pairs: number of training pairs of these ids and of the distinct label embeddings, float32 [U, 1].
    """

    inputs: dict[str, dict[str, Tensor]]
    positive_B: Tensor
    labels: int
    history_labels: dict[str, Tensor]
    distinct: list[tuple[Tensor, Tensor]]
    pairs: list[Tensor]


class Forward:
    """Read the inputs of a model's towers for a batch, and embed them.

    `seed` draws unknown ids, audiences and dropout.
    """

    def __init__(self, model: TwoTower, seed: keras.random.SeedGenerator) -> None:
        self._model, self._seed, recipe = model, seed, model.recipe
        neighbours = recipe.loss.neighbours
        self._sides = () if neighbours is None else neighbours.sides
        self._readers = dict(model.towers.readers)
        if "query" in self._sides:
            queries = {name: table for (side, name), table in self._readers.items() if side == "query"}
            self._readers |= {("neighbour", name): table for name, table in queries.items()}
        if LABEL_BIAS in model.tables:
            self._readers["label", LABEL_BIAS] = LABEL_BIAS
        self._unknown = [
            (*feature.unknown, rate)
            for feature in recipe.label.features
            if feature.unknown is not None and (rate := recipe.label_unknown_rate(feature))
        ]
        towers = {"query": model.towers.query, "label": model.towers.label}
        if "query" in self._sides:
            towers["neighbour"] = model.towers.query
        dropouts = {
            side: [layer for layer in list_layers(tower) if isinstance(layer, Dropout)]
            for side, tower in towers.items()
        }
        self.dropouts = {side: layers for side, layers in dropouts.items() if layers}
        """Dropout layers by tower, for towers that have any."""

    def read(self, batch: dict[str, Tensor], labels_C: Tensor) -> Reading:
        """Read the inputs of a batch, and the table rows to differentiate."""
        model, towers = self._model, self._model.towers
        inputs: dict[InputKey, Tensor] = {
            ("query", name): column for name, column in batch.items() if not name.startswith("_")
        }
        labels_E = labels_C
        if "query" in self._sides:
            names = [name for name in batch if name.startswith(OF_NEIGHBOUR)]
            inputs |= {("neighbour", name.removeprefix(OF_NEIGHBOUR)): batch[name] for name in names}
        if "label" in self._sides:
            labels_E = ops.concatenate([labels_C, ops.convert_to_tensor(batch["_neighbour"])])
        history_labels: dict[str, Tensor] = {}
        if towers.label_rows:
            # Ids of label embeddings become positions among the distinct ones.
            inputs, history_labels = read_distinct(towers.label_rows, inputs, self._readers, shared=True)
        own_B2 = None if model.drawn_audience is None else batch["_own"]
        label_inputs = model.gather_label_inputs(labels_E, self._seed, own_B2)
        # Drawn on the device, where label inputs are; those of queries come with the batch.
        for name, value, rate in self._unknown:
            ids = label_inputs[name]
            unknown = keras.random.uniform(ops.shape(ids), seed=self._seed) < rate
            label_inputs[name] = ops.where(unknown, ops.full_like(ids, value), ids)
        for key, rows_R in history_labels.items():
            inputs |= self._add_history_labels(key, rows_R, label_inputs)
        inputs |= {("label", name): column for name, column in label_inputs.items()}
        if LABEL_BIAS in model.tables:
            inputs["label", LABEL_BIAS] = labels_C + 1
        inputs, distinct_ids = read_distinct(model.tables, inputs, self._readers)
        by_tower: dict[str, dict[str, Tensor]] = {}
        for (side, name), column in inputs.items():
            by_tower.setdefault(side, {})[name] = column
        distinct = [
            (distinct_ids[name], backend.gather(table.table, distinct_ids[name]))
            for name, table in model.tables.items()
        ]
        distinct_ids |= history_labels
        pairs = [backend.gather(table.table, distinct_ids[towers.readers[key]]) for key, table in towers.pairs.items()]
        positive_B = ops.convert_to_tensor(batch["_positive"])
        return Reading(by_tower, positive_B, ops.shape(labels_C)[0], history_labels, distinct, pairs)

    def _add_history_labels(self, key: str, rows_R: Tensor, label_inputs: dict[str, Tensor]) -> dict[InputKey, Tensor]:
        """Append labels of histories to the label tower's inputs; return rows to add to their embeddings."""
        # Row 0 of label embeddings is padding, so label y has row y + 1.
        labels_R = ops.clip(rows_R - 1, 0, self._model.labels - 1)
        is_label_R = _are_labels(rows_R, self._model.labels)
        for name, column in self._model.gather_label_inputs(labels_R, self._seed).items():
            is_label = ops.reshape(is_label_R, (-1, *[1] * (len(column.shape) - 1)))
            label_inputs[name] = ops.concatenate([label_inputs[name], ops.where(is_label, column, 0)])
        if key not in self._model.entry_ids:
            return {}
        ids_R = backend.gather(self._model.entry_ids[key], labels_R)
        return {("entry", key): ops.where(is_label_R, ids_R, 0)}

    def draw_masks(self, reading: Reading) -> Masks:
        """Draw dropout masks; they cover rows [B, …], or entries of a history [S, P]."""
        label_input = next(column for name, column in reading.inputs["label"].items() if name != LABEL_BIAS)
        masks: Masks = [{}, {}]
        for side, layers in self.dropouts.items():
            rows = ops.shape(label_input if side == "label" else reading.positive_B)[0]
            for layer in layers:
                size = rows if layer.entries_of is None else ops.size(reading.inputs[side][layer.entries_of])
                masks[side == "neighbour"][layer] = layer.draw(size, self._seed)
        return masks

    def embed(self, reading: Reading, rows: list[Tensor], masks: Masks) -> tuple[Embedded, dict[str, Tensor]]:
        """Embed a batch and its neighbours from table rows [U, D], float32 [B, D] by side."""
        towers, tables, label_inputs = self._model.towers, self._model.tables, dict(reading.inputs["label"])
        bias_ids = label_inputs.pop(LABEL_BIAS, None)
        start, dim, batch_rows = reading.labels, self._model.recipe.model.dim, reading.positive_B.shape[0]
        near, neighbours = "label" in self._sides, dict[str, Tensor]()
        with ExitStack() as stack:
            stack.enter_context(compact_rows([*tables.values()], rows))
            for (key, table), pairs in zip(towers.pairs.items(), reading.pairs, strict=True):
                shared = towers.readers[key] in reading.history_labels
                stack.enter_context(compact_rows([table], [pairs], shared=shared))
            with dropout_masks(masks[0]) if masks else nullcontext():
                embedded_D = towers.label(label_inputs)
                # The number of distinct labels in histories is not static: the concatenation loses the static shape.
                several = near or reading.history_labels
                labels_CD = ops.reshape(embedded_D[:start], (start, dim)) if several else embedded_D
                if near:
                    neighbours["label"] = ops.reshape(embedded_D[start : start + batch_rows], (batch_rows, dim))
                    start += batch_rows
                for name, rows_R in reading.history_labels.items():
                    end = start + ops.shape(rows_R)[0]
                    read_RD, start = embedded_D[start:end], end
                    if name in reading.inputs.get("entry", {}):
                        read_RD = read_RD + tables[towers.readers["entry", name]](reading.inputs["entry"][name])
                    read_RD = ops.where(_are_labels(rows_R, self._model.labels)[:, None], read_RD, 0.0)
                    stack.enter_context(compact_rows([towers.label_rows[name]], [read_RD], shared=True))
                queries_BD = towers.query(reading.inputs["query"])
            bias_C = ops.zeros_like(labels_CD[:, 0]) if bias_ids is None else tables[LABEL_BIAS](bias_ids)[:, 0]
            if "query" in self._sides:
                with dropout_masks(masks[1]) if masks else nullcontext():
                    neighbours["query"] = towers.query(reading.inputs["neighbour"])
        scale = ops.exp(-self._model.log_temperature.value)
        return Embedded(queries_BD, labels_CD, bias_C, scale), neighbours


def _are_labels(rows_R: Tensor, labels: int) -> Tensor:
    """Mask label rows: neither padding (row 0) nor past the end; bool [R]."""
    return ops.logical_and(ops.greater(rows_R, 0), ops.less_equal(rows_R, labels))
