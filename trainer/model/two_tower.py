"""The two-tower model and its training step.

Any sampler × weight × family takes the same path: draw candidates, embed what is touched, weigh each
negative, mask accidental hits, update the touched rows.

Legend: `B` batch, `M` negatives, `C` labels embedded in a step, `U` distinct rows of a table,
`D` dimensions, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from longtail.bundle import Proposal
from longtail.bundle.arrays import Array, Float32, Float64
from longtail.trainer import backend
from longtail.trainer.config import Recipe
from longtail.trainer.data.encode import Encoding, Inputs
from longtail.trainer.errors import DataError
from longtail.trainer.losses.contrast import Contrast
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.model.embedding import Table, dropping, reading
from longtail.trainer.model.optimizers import ROW_OPTIMIZERS, RowOptimizer
from longtail.trainer.model.towers import InputKey, build_towers, dropouts, in_float32
from longtail.trainer.sampling.base import Catalogue, Context
from longtail.trainer.sampling.simple import SAMPLERS
from longtail.trainer.sampling.streaming import StreamingFrequencies

Tensor = Any
"""A backend tensor; shapes are in the names."""

_BIAS = "label bias"
"""Key of the bias table; no table of a feature can be called so."""
_BLOCK = 4096


class TwoTower:
    """Towers, optimisers and sampler of one training job.

    Args:
        recipe: the job.
        encoding: vocabularies and inputs.
        log_pi_L: float64 [L], log label frequencies.
        batch_size: B of every step.
        total_steps: where a falling learning rate ends.
        pairs: training pairs; pair rows of batches are below it.
        proposal: the fitted tree of sampler `adversarial`.

    Raises:
        DataError: more negatives than there are labels to draw or to mine from.
    """

    def __init__(
        self,
        recipe: Recipe,
        encoding: Encoding,
        log_pi_L: Float64,
        *,
        batch_size: int,
        total_steps: int,
        pairs: int,
        proposal: Proposal | None = None,
    ) -> None:
        self.recipe = recipe
        self.towers = build_towers(recipe, encoding.vocabulary_rows, encoding.numbers)
        self.tables = dict(self.towers.tables)
        if recipe.model.label_bias:
            self.tables[_BIAS] = Table(len(log_pi_L) + 1, 1, scale=0.0, seed=0, name="label_bias")
        self.log_temperature = keras.Variable(
            float(np.log(recipe.model.temperature)), dtype="float32", name="log_temperature",
            trainable=recipe.model.learn_temperature,
        )  # fmt: skip
        self._label_inputs = {name: _constant(column, name) for name, column in encoding.label_inputs.items()}
        check_negatives(recipe, labels=len(log_pi_L), batch_size=batch_size)
        self.proposal = proposal
        self.sampler = SAMPLERS[recipe.loss.sampler.name](
            Catalogue(log_pi_L, batch_size, recipe.model.dim, proposal), **recipe.loss.sampler.arguments
        )
        self._log_pi_L = _constant(log_pi_L.astype(np.float32), "log_pi")
        self._log_q_L = None if self.sampler.log_q_L is None else _constant(self.sampler.log_q_L, "log_q")
        self._stream = (
            StreamingFrequencies(len(log_pi_L), hashes=1, initial_gap=2.0 * pairs)
            if recipe.loss.frequencies == "streaming"
            else None
        )
        self._contrast = backend.fuse(
            Contrast(
                objective=recipe.loss.objective(),
                in_batch=self.sampler.in_batch,
                half=recipe.training.precision == "mixed_bfloat16",
            )
        )
        self._steps_per_visit = max(pairs // batch_size, 1)
        self._log_eta_N = (
            keras.Variable(np.full(pairs, np.log(len(log_pi_L)), np.float32), trainable=False, name="log_eta")
            if LOSSES[recipe.loss.family.name].stateful
            else None
        )
        self._seed = keras.random.SeedGenerator(recipe.seed)
        self._step_count = keras.Variable(0, dtype="int32", trainable=False, name="step_count")
        optimizer = recipe.optimizer
        self._row_rate = _schedule(optimizer.embedding_learning_rate, optimizer.schedule, total_steps)
        self._row_optimizers: dict[str, RowOptimizer] = {
            name: ROW_OPTIMIZERS[optimizer.embeddings](table) for name, table in self.tables.items()
        }
        self._dense = [
            *self.towers.query.trainable_variables,
            *self.towers.label.trainable_variables,
            *([self.log_temperature] if recipe.model.learn_temperature else []),
        ]
        self._dense_optimizer = keras.optimizers.Adam(
            _schedule(optimizer.dense_learning_rate, optimizer.schedule, total_steps)
        )
        if self._dense:
            self._dense_optimizer.build(self._dense)
        self.train_step = backend.compile_step(self._train_step, [*self.variables, *self._constants])

    @property
    def variables(self) -> list[keras.Variable]:
        """All that training changes, in a fixed order: what a checkpoint holds."""
        return [
            self._step_count,
            self._seed.state,
            *(table.table for table in self.tables.values()),
            *(slot for optimizer in self._row_optimizers.values() for slot in optimizer.variables),
            *self._dense,
            *(self._dense_optimizer.variables if self._dense else []),
            *([] if self._stream is None else self._stream.variables),
            *([] if self._log_eta_N is None else [self._log_eta_N]),
            *(self.sampler.variables if self.sampler.refresh is not None else []),
        ]

    @property
    def temperature(self) -> float:
        """T, as trained."""
        return float(np.exp(ops.convert_to_numpy(self.log_temperature)))

    def begin_epoch(self) -> None:
        """Show the sampler the label embeddings, if it draws by them."""
        if self.sampler.refresh is not None:
            self.sampler.refresh(self.embed_labels())

    def embed_queries(self, inputs: Inputs) -> Float32:
        """Query tower outputs, float32 [B, D]."""
        with in_float32(self.towers.query) as tower:
            embedded: Float32 = ops.convert_to_numpy(tower(inputs))
        return embedded

    def embed_labels(self) -> Float32:
        """Label tower outputs of the whole catalogue, float32 [L, D]."""
        labels = self._log_pi_L.shape[0]
        parts = []
        with in_float32(self.towers.label) as tower:
            for start in range(0, labels, _BLOCK):
                ids = np.arange(start, min(start + _BLOCK, labels), dtype=np.int32)
                parts.append(ops.convert_to_numpy(tower(self._inputs_of_labels(ids))))
        return np.concatenate(parts)

    def label_biases(self) -> Float32 | None:
        """b_y in logits, float32 [L]; None for a model without."""
        if _BIAS not in self.tables:
            return None
        biases: Float32 = ops.convert_to_numpy(self.tables[_BIAS].table)[1:, 0]
        return biases

    @property
    def _constants(self) -> list[keras.Variable]:
        learned = self.recipe.model.learn_temperature
        return [
            *self._label_inputs.values(),
            self._log_pi_L,
            *([] if self._log_q_L is None else [self._log_q_L]),
            *([] if learned else [self.log_temperature]),
            *(self.sampler.variables if self.sampler.refresh is None else []),
        ]

    def _inputs_of_labels(self, ids_C: Tensor) -> dict[str, Tensor]:
        return {name: backend.gather(column, ids_C) for name, column in self._label_inputs.items()}

    def _forgetting(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of labels with some values unknown, each feature at its `unknown_rate`."""
        for feature in self.recipe.label.features:
            if feature.kind != "number" and feature.unknown_rate:
                ids = inputs[feature.name]
                unknown = keras.random.uniform(ops.shape(ids), seed=self._seed) < feature.unknown_rate
                inputs[feature.name] = ops.where(unknown, ops.zeros_like(ids), ids)
        return inputs

    def _train_step(self, batch: dict[str, Tensor]) -> Tensor:
        """One update; returns the mean loss.

        Args:
            batch: query inputs by name; `_positive` int32 [B], label rows; `_weight` float32 [B]; `_pair`
                int32 [B], rows of the training pairs.
        """
        positive_B = ops.convert_to_tensor(batch["_positive"])
        context = self._context(batch, positive_B)
        drawn = None if self.sampler.draw is None else self.sampler.draw(self._seed, context)
        if self._stream is not None:
            self._stream.update(positive_B)
        labels_C = positive_B if drawn is None else ops.concatenate([positive_B, ops.reshape(drawn, (-1,))])
        inputs: dict[InputKey, Tensor] = {
            **{("query", name): column for name, column in batch.items() if not name.startswith("_")},
            **{("label", name): column for name, column in self._forgetting(self._inputs_of_labels(labels_C)).items()},
        }
        readers = dict(self.towers.readers)
        if _BIAS in self.tables:
            inputs["label", _BIAS], readers["label", _BIAS] = labels_C + 1, _BIAS
        inputs, touched = self._compact(inputs, readers)
        weighing = self._weighing(context, drawn, batch)

        masks = {
            layer: layer.draw(ops.shape(ids)[0], self._seed)
            for tower, ids in ((self.towers.query, positive_B), (self.towers.label, labels_C))
            for layer in dropouts(tower)
        }

        def loss(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
            with reading(list(self.tables.values()), rows), dropping(masks):
                queries_BD = self.towers.query(_side(inputs, "query"))
                label_side = _side(inputs, "label")
                bias_ids = label_side.pop(_BIAS, None)
                labels_CD = self.towers.label(label_side)
                bias_C = ops.zeros_like(labels_CD[:, 0]) if bias_ids is None else self.tables[_BIAS](bias_ids)[:, 0]
            scale = ops.exp(-self.log_temperature.value)
            made: tuple[Tensor, Tensor] = self._contrast(queries_BD, labels_CD, bias_C, scale, *weighing)
            return made

        rows = [rows_UD for _, rows_UD in touched]
        (value, log_eta_B), row_gradients, gradients = backend.value_and_gradients(loss, rows, self._dense)
        if self.recipe.optimizer.clip_norm is not None:
            scale = _clip_scale([*row_gradients, *gradients], self.recipe.optimizer.clip_norm)
            row_gradients = [gradient * scale for gradient in row_gradients]
            gradients = [gradient * scale for gradient in gradients]
        rate = self._row_rate(self._step_count.value)
        self._step_count.assign(self._step_count.value + 1)
        step = ops.cast(self._step_count.value, "float32")
        for name, (ids_U, rows_UD), gradients_UD in zip(self.tables, touched, row_gradients, strict=True):
            self._row_optimizers[name].apply(ids_U, rows_UD, gradients_UD, rate=rate, step=step)
        if self._dense:
            self._dense_optimizer.apply(gradients, self._dense)
        if self._log_eta_N is not None:
            backend.scatter(self._log_eta_N, batch["_pair"], log_eta_B)
        return value

    def _context(self, batch: dict[str, Tensor], positive_B: Tensor) -> Context:
        """What the sampler may look at."""
        inputs = {name: column for name, column in batch.items() if not name.startswith("_")}
        seen = ops.stop_gradient(self.towers.query(inputs)) if self.sampler.sees_embeddings else None
        return Context(positive_B, inputs, seen)

    def _compact(
        self, inputs: dict[InputKey, Tensor], readers: dict[InputKey, str]
    ) -> tuple[dict[InputKey, Tensor], list[tuple[Tensor, Tensor]]]:
        """Inputs whose ids are positions among their table's distinct ones; per table, those ids and their rows.

        Args:
            inputs: of both towers.
            readers: which of them hold ids, of which table.
        """
        compact, touched = dict(inputs), []
        for name, table in self.tables.items():
            keys = [key for key, table_name in readers.items() if table_name == name]
            flat_N = ops.concatenate([ops.reshape(inputs[key], (-1,)) for key in keys])
            ids_U, positions_N = backend.unique(flat_N, table.rows)
            start = 0
            for key in keys:
                shape = ops.shape(inputs[key])
                size = int(np.prod(shape)) if all(isinstance(n, int) for n in shape) else ops.size(inputs[key])
                compact[key] = ops.reshape(positions_N[start : start + size], shape)
                start = start + size
            touched.append((ids_U, backend.gather(table.table, ids_U)))
        return compact, touched

    def _weighing(self, context: Context, drawn: Tensor | None, batch: dict[str, Tensor]) -> tuple[Any, ...]:
        """What a `Contrast` takes beside what is trained; the first B of the embedded labels are the positives."""
        positive_B = context.positive_B
        if drawn is None:
            candidates = positive_B
        else:
            candidates = ops.concatenate([positive_B, drawn]) if self.sampler.in_batch else drawn
        log_pi = (self._log_pi(positive_B), self._log_pi(candidates))
        log_q = (
            self._log_q(context, positive_B, log_pi[0]),
            self._log_q(context, candidates, log_pi[1]),
        )
        state = None
        if self._log_eta_N is not None:
            visits = self._step_count.value // self._steps_per_visit
            rate = ops.minimum(ops.power(1.0 + ops.cast(visits, "float32"), -0.9), 1 - 1e-6)
            state = (backend.gather(self._log_eta_N, batch["_pair"]), rate)
        return positive_B, candidates, log_pi, log_q, ops.convert_to_tensor(batch["_weight"]), state

    def _log_pi(self, labels: Tensor) -> Tensor:
        """Log label frequencies, counted or streamed."""
        return backend.gather(self._log_pi_L, labels) if self._stream is None else self._stream.log_frequencies(labels)

    def _log_q(self, context: Context, labels: Tensor, log_pi: Tensor) -> Tensor:
        """Log-probabilities that the sampler draws these labels for their rows."""
        if self.sampler.log_q is not None:
            return self.sampler.log_q(context, labels)
        if self._stream is not None and self.sampler.q_of_pi is not None:
            return self.sampler.q_of_pi(log_pi)
        return backend.gather(self._log_q_L, labels)


def check_negatives(recipe: Recipe, *, labels: int, batch_size: int) -> None:
    """Refuse more negatives than there are labels to draw, and mining more than a row has.

    Raises:
        DataError: says how many there are.
    """
    sampler, mining = recipe.loss.sampler, recipe.loss.mining
    others = labels - bool(sampler.exclude_positive)
    if (sampler.negatives or 0) > others:
        raise DataError(
            f"loss.sampler.negatives: expected at most {others}, the labels there are to draw, "
            f"received {sampler.negatives}"
        )
    own = batch_size if sampler.name in ("in_batch", "mixed") else labels if sampler.name == "full" else 0
    if mining is not None and (mining.keep or 0) > own + (sampler.negatives or 0):
        raise DataError(
            f"loss.mining.keep: expected at most {own + (sampler.negatives or 0)}, the negatives of a row, "
            f"received {mining.keep}"
        )


def _constant(column: Array, name: str) -> keras.Variable:
    return keras.Variable(column, dtype=str(column.dtype), trainable=False, name=name)


def _schedule(rate: float, schedule: str, total_steps: int) -> Callable[[Tensor], Tensor]:
    end = rate if schedule == "constant" else 0.0
    decay: Callable[[Tensor], Tensor] = keras.optimizers.schedules.PolynomialDecay(rate, total_steps, end)
    return decay


def _clip_scale(gradients: list[Tensor], limit: float) -> Tensor:
    """Factor that brings the norm of all gradients together down to `limit`."""
    norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
    return ops.minimum(1.0, limit / ops.maximum(norm, 1e-12))


def _side(inputs: dict[InputKey, Tensor], side: str) -> dict[str, Tensor]:
    return {name: column for (of, name), column in inputs.items() if of == side}
