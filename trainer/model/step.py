"""The training step: one batch in, one update of the model.

Any sampler × weight × family takes the same path: draw candidates, embed queries and labels, mask candidates that are
not negatives, weigh the others, update the touched rows.

Legend: `B` batch, `M` candidates, `C` labels embedded in a step (B positives, labels drawn, then labels that terms
add), `D` dimensions, `L` labels, `N` training pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, reduce

import keras
import numpy as np

from longtail.bundle import Inputs, log_frequencies
from longtail.bundle.arrays import Float64
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.backend.tensors import Tensors
from longtail.trainer.limits import check_negatives
from longtail.trainer.losses import BatchCandidates, BatchLoss, Embedded, balance, pair_weights
from longtail.trainer.losses.batch import StepInputs
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.loss_term import LossTerm, check_columns
from longtail.trainer.losses.objective import log_terms
from longtail.trainer.losses.row_methods import Eta, SampledRanks
from longtail.trainer.model.forward import Forward
from longtail.trainer.model.sequences import packed_histories
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.model.updates import Gradients, Updates, mean_gradients, parts_of
from longtail.trainer.plugin_checks import check_family, check_sampler, check_weight
from longtail.trainer.sampling import SAMPLERS, DrawContext, LabelTable, SamplerSetup
from longtail.trainer.sampling.frequencies import Frequencies, StreamingFrequencies


class TrainStep:
    """Update a model on a batch, by the sampler, loss and optimizers of one job.

    Args:
        visits_L: float64 [L], expected visits to every label in an epoch, which give the frequencies in batches.
        weighted_L: float64 [L], visits times the weights of the pairs, which give π; None if every pair weighs 1.
        pairs_per_query: average number of pairs that share one set of negatives.
        terms: optional parts of the loss with columns of their own, from `build_loss_terms`.
    """

    def __init__(
        self,
        model: TwoTower,
        visits_L: Float64,
        *,
        batch_size: int,
        total_steps: int,
        pairs: int,
        terms: Sequence[LossTerm],
        pairs_per_query: float = 1.0,
        weighted_L: Float64 | None = None,
    ) -> None:
        recipe, labels = model.recipe, len(visits_L)
        steps_per_epoch = max(pairs // batch_size, 1)
        batch_size //= recipe.training.accumulate  # sampler and loss see one part of a batch at a time
        check_negatives(recipe, labels=labels, batch_size=batch_size)
        objective = recipe.loss.objective()
        check_weight(objective)
        check_family(objective)
        self._model, self._recipe = model, recipe
        log_pi_L = log_frequencies(visits_L if weighted_L is None else weighted_L, smoothing=recipe.loss.smoothing)
        share_L = visits_L / visits_L.sum()
        with np.errstate(divide="ignore"):  # log 0 = −inf marks labels that no batch holds
            log_share_L = np.log(share_L)
        never_L = (visits_L if weighted_L is None else weighted_L) == 0
        # Labels without pairs are never negatives if features describe them: they would only be pushed away.
        never = recipe.describes_labels and bool(never_L.any())
        # Samplers that draw in proportion to the terms of the loss need a margin weight, whose balance is Σ ρ of a row
        # for every q and m; hence log q = None and m = 1 here.
        trained_by = replace(objective, offset=balance(objective, log_pi_L, None, m=1, pairs_per_query=pairs_per_query))
        log_terms_of = partial(log_terms, trained_by, log_pi_L.astype(np.float32), never_L=never_L if never else None)
        self.sampler = SAMPLERS[recipe.loss.sampler.name](
            SamplerSetup(log_pi_L, batch_size, recipe.model.dim, model.proposal, log_share_L, log_terms_of),
            **recipe.loss.sampler.arguments,
        )
        check_sampler(recipe.loss.sampler.name, self.sampler, objective, labels=labels)
        self._pair_weight_L = (
            untrained_variable(pair_weights(log_pi_L, share_L, reweight=recipe.loss.reweight), "pair_weight")
            if recipe.loss.reweight
            else None
        )
        self._never_L = untrained_variable(never_L, "never_chosen") if never else None
        streamed = recipe.loss.frequencies == "streaming"
        # A label without an occurrence so far starts with a gap of two epochs.
        streaming = StreamingFrequencies(labels, initial_gap=2.0 * pairs) if streamed else None
        self._frequencies = Frequencies(log_pi_L, self.sampler, streaming)
        drawn = recipe.loss.sampler.argument("negatives") or (0 if self.sampler.draw is None else labels)
        m = drawn + (batch_size - 1 if self.sampler.in_batch else 0)  # a row's own positive is no negative
        offset = balance(objective, log_pi_L, self.sampler.log_q_L, m=m, pairs_per_query=pairs_per_query)
        self.terms = list(terms)
        if LOSSES[objective.family].stateful:
            self.terms.append(Eta(pairs=pairs, labels=labels, steps_per_epoch=steps_per_epoch))
        if recipe.loss.mining is not None and recipe.loss.mining.draw is not None:
            self.terms.append(SampledRanks(recipe.loss.mining.mining()))
        self._batch_loss = backend.compile_loss(
            BatchLoss(
                objective=replace(objective, offset=offset, terms=tuple(self.terms)),
                in_batch=self.sampler.in_batch,
                bfloat16=recipe.training.precision == "mixed_bfloat16",
                hits=recipe.loss.resolved_hits,
                # Recalled labels have no gradient, so the batch's labels represent all m negatives [METHODS §2.1].
                repels=1.0 if self.sampler.recall is None else m / max(batch_size - 1, 1),
            )
        )
        self._seed = keras.random.SeedGenerator(recipe.seed)
        self._forward = Forward(model, self._seed)
        self.updates = Updates(model, recipe.optimizer, total_steps=total_steps)
        self._compiled = backend.compile_step(self._update, [*self.variables, *self._constants])

    def __call__(self, batch: Inputs) -> Tensor:
        """Take one step; return the mean loss, float32 scalar on the device, nats.

        Args:
            batch: query inputs by name; `_positive` int32 [B], label rows; `_weight` float32 [B]; `_pair` int32 [B],
                rows of the training pairs; and the columns of `terms`.
        """
        return self._compiled(batch)

    @property
    def variables(self) -> list[keras.Variable]:
        """List the variables that training changes, in the fixed order of a checkpoint."""
        return [
            self._seed.state,
            *(table.table for table in self._model.tables.values()),
            *self._model.dense_variables,
            *self.updates.variables,
            *self._frequencies.variables,
            *(variable for term in self.terms for variable in term.variables),
            *([*self.sampler.variables, *self._label_rows] if self.sampler.changes else []),
        ]

    @property
    def _constants(self) -> list[keras.Variable]:
        """List the variables that a step only reads."""
        learned = self._recipe.model.learn_temperature
        return [
            *self._model.label_inputs.values(),
            *self._model.entry_ids.values(),
            *(table.table for table in self._model.towers.pairs.values()),
            *([] if self._model.drawn_audience is None else self._model.drawn_audience.variables),
            *self._frequencies.constants,
            *([] if self._pair_weight_L is None else [self._pair_weight_L]),
            *([] if self._never_L is None else [self._never_L]),
            *(constant for term in self.terms for constant in term.constants),
            *([] if learned else [self._model.log_temperature]),
            *([] if self.sampler.changes else [*self.sampler.variables, *self._label_rows]),
        ]

    @property
    def _label_rows(self) -> list[keras.Variable]:
        """Return label embeddings for histories outside of the loss, where a sampler embeds queries."""
        return [rows.table for rows in self._model.towers.label_rows.values()]

    def begin_epoch(self) -> None:
        """Refresh a sampler that draws by label embeddings."""
        if self.sampler.refresh is not None:
            model = self._model
            self.sampler.refresh(LabelTable(model.embed_labels(), model.label_biases(), model.temperature))

    def _update(self, batch: dict[str, Tensor]) -> Tensor:
        """Take one step; `__call__` is this function, compiled."""
        parts, tower, made = self._recipe.training.accumulate, self._model.towers.query, []
        for part in parts_of(batch, parts):
            check_columns(self.terms, part)
            with ExitStack() as stack:
                for context in (packed_histories(tower, part), *(m.context(tower, part) for m in self.terms)):
                    stack.enter_context(context)
                made.append(self._gradients(part))
        mean = mean_gradients(self._model.tables, made)
        self.updates.apply(mean)
        return mean.value

    def _gradients(self, batch: dict[str, Tensor]) -> Gradients:
        """Compute the loss of a batch, or of a part of one, and its gradients."""
        positive_B = ops.convert_to_tensor(batch["_positive"])
        inputs = {name: column for name, column in batch.items() if not name.startswith("_")}
        sees = self.sampler.sees_embeddings
        queries_BD = ops.stop_gradient(self._model.towers.query(inputs)) if sees else None
        context = DrawContext(positive_B, inputs, queries_BD)
        drawn = None if self.sampler.draw is None else self.sampler.draw(self._seed, context)
        self._frequencies.update(positive_B)
        recalled = None if self.sampler.recall is None else self.sampler.recall()
        # Labels are embedded in this order: positives, draws, labels of terms; `BatchLoss` cuts them apart again.
        brought = [term.extra_negatives(batch) for term in self.terms if term.adds_negatives]
        if drawn is not None and recalled is None:
            brought.insert(0, drawn)
        more = [ops.reshape(labels, (-1,)) for labels in brought]
        reading = self._forward.read(batch, ops.concatenate([positive_B, *more]) if more else positive_B)
        candidates = self._candidates(context, drawn, batch)
        # Masks are drawn outside of `loss`: JAX keeps no generator state inside the differentiated function.
        masks = self._forward.draw_masks(reading)

        def loss(rows: list[Tensor]) -> tuple[Tensor, tuple[Tensors, Embedded]]:
            embedded, neighbours = self._forward.embed(reading, rows, masks)
            if recalled is not None:
                embedded = embedded.with_recalled(*recalled, after=positive_B.shape[0])
            value, visited = self._batch_loss(embedded, candidates)
            for term in self.terms:
                for extra in term.extra_losses(embedded, neighbours, candidates, batch):
                    value = value + extra
            return value, (visited, embedded)

        rows = [rows_UD for _, rows_UD in reading.distinct]
        dense = self._model.dense_variables
        (value, (visited, embedded)), row_gradients, gradients = backend.value_and_gradients(loss, rows, dense)
        for term in self.terms:
            term.update_state(batch, visited)
        if self.sampler.remember is not None:
            start = positive_B.shape[0]
            self.sampler.remember(positive_B, embedded.labels_CD[:start], embedded.bias_C[:start])
        return Gradients(value, reading.distinct, row_gradients, gradients)

    def _candidates(self, context: DrawContext, drawn: Tensor | None, batch: dict[str, Tensor]) -> BatchCandidates:
        """Collect the candidates of a batch, and the inputs of their weights."""
        positive_B = context.positive_B
        if drawn is None:
            candidates = positive_B
        else:
            candidates = ops.concatenate([positive_B, drawn]) if self.sampler.in_batch else drawn
        log_pi, log_q = self._frequencies.log_pi, self._frequencies.log_q
        log_pi_positive_B, log_pi_candidates = log_pi(positive_B), log_pi(candidates)
        log_q_positive_B = log_q(context, positive_B, log_pi_positive_B)
        weight_B = ops.convert_to_tensor(batch["_weight"])
        if self._pair_weight_L is not None:
            weight_B = weight_B * backend.gather(self._pair_weight_L, positive_B)
        candidate_tensors = {} if self._never_L is None else {"excluded": backend.gather(self._never_L, candidates)}
        rows: Tensors = {}
        step = StepInputs(
            batch, positive_B, candidates, partial(self._excluded, batch), self._seed, self.updates.steps_done.value
        )
        for term in self.terms:
            candidate_tensors |= term.candidate_tensors(candidates)
            rows |= term.row_tensors(step)
        return BatchCandidates(
            positive_B=positive_B,
            candidates=candidates,
            log_pi_positive_B=log_pi_positive_B,
            log_pi_candidates=log_pi_candidates,
            log_q_positive_B=log_q_positive_B,
            log_q_candidates=log_q(context, candidates, log_pi_candidates),
            weight_B=weight_B,
            log_miss_B=None if self.sampler.log_miss is None else self.sampler.log_miss(log_q_positive_B),
            candidate_tensors=candidate_tensors,
            rows=rows,
        )

    def _excluded(self, batch: Tensors, labels_BS: Tensor) -> Tensor | None:
        """Mask labels without a pair, and known positives of the row's query, bool [B, S]."""
        found = [term.exclude_mask(labels_BS, batch) for term in self.terms]
        never = [] if self._never_L is None else [backend.gather(self._never_L, labels_BS)]
        masks = [*never, *(mask for mask in found if mask is not None)]
        return reduce(ops.logical_or, masks) if masks else None
