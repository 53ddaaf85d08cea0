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
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.losses import (
    LOSSES,
    BatchCandidates,
    BatchLoss,
    Embedded,
    LossTerm,
    StepInputs,
    balance,
    pair_weights,
)
from longtail.trainer.losses.mining import SampledRanks
from longtail.trainer.losses.objective import Eta, log_terms
from longtail.trainer.model.forward import Forward
from longtail.trainer.model.sequences import PackedHistories
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.model.updates import Gradients, Updates, cut_batch, mean_gradients
from longtail.trainer.plugin_checks import check_custom_rows
from longtail.trainer.sampling import SAMPLERS, DrawContext, LabelTable, SamplerSetup
from longtail.trainer.sampling.frequencies import Frequencies, StreamingFrequencies


class TrainStep:
    """Update a model on a batch, by the sampler, loss and optimizers of one job.

    Args:
        expected_counts_L: expected positives of every label in an epoch, float64 [L], the frequencies in batches.
        weighted_counts_L: the same times the weights of the pairs, float64 [L], which give π; None if all weigh 1.
        pairs_per_query: average number of pairs that share one set of negatives.
        terms: optional parts of the loss with columns of their own, from `build_loss_terms`.
    """

    def __init__(
        self,
        model: TwoTower,
        expected_counts_L: Float64,
        *,
        batch_size: int,
        total_steps: int,
        pairs: int,
        terms: Sequence[LossTerm],
        pairs_per_query: float = 1.0,
        weighted_counts_L: Float64 | None = None,
    ) -> None:
        recipe, loss, labels = model.recipe, model.recipe.loss, len(expected_counts_L)
        steps_per_epoch = max(pairs // batch_size, 1)
        batch_size //= recipe.training.accumulate  # sampler and loss see one part of a batch at a time
        counts_L = expected_counts_L if weighted_counts_L is None else weighted_counts_L
        log_pi_L = log_frequencies(counts_L, smoothing=loss.smoothing)
        share_L = expected_counts_L / expected_counts_L.sum()
        with np.errstate(divide="ignore"):  # log 0 = −inf marks labels that no batch holds
            log_share_L = np.log(share_L)
        # Labels without pairs are never negatives if features describe them: they would only be pushed away.
        never_L = counts_L == 0 if recipe.describes_labels and (counts_L == 0).any() else None
        objective = loss.objective()
        # Samplers that draw in proportion to the terms of the loss need a margin weight, whose balance is Σ ρ of a row
        # for every q and m; hence log q = None and m = 1 here.
        balanced = replace(objective, offset=balance(objective, log_pi_L, None, m=1, pairs_per_query=pairs_per_query))
        terms_of_loss = partial(log_terms, balanced, log_pi_L.astype(np.float32), never_L=never_L)
        self.sampler = SAMPLERS[loss.sampler.name](
            SamplerSetup(log_pi_L, batch_size, recipe.model.dim, model.proposal, log_share_L, terms_of_loss),
            **loss.sampler.arguments,
        )
        if recipe.own_rows:
            check_custom_rows(loss.sampler.name, self.sampler, objective, labels=labels)
        self._model, self._accumulate = model, recipe.training.accumulate
        self._several_parts = self._accumulate > 1 or recipe.training.devices == "all"
        self._pair_weight_L = None
        if loss.reweight:
            weight_L = pair_weights(log_pi_L, share_L, reweight=loss.reweight)
            self._pair_weight_L = untrained_variable(weight_L, "pair_weight")
        self._never_L = None if never_L is None else untrained_variable(never_L, "never_chosen")
        self._frequencies = Frequencies(log_pi_L, self.sampler)
        if loss.frequencies == "streaming":
            # A label without an occurrence so far starts with a gap of two epochs.
            self._frequencies = StreamingFrequencies(log_pi_L, self.sampler, initial_gap=2.0 * pairs)
        # `full` draws every label once, and has no parameter `negatives`.
        draws = loss.sampler.argument("negatives") or (0 if self.sampler.draw is None else labels)
        m = draws + (batch_size - 1 if self.sampler.in_batch else 0)  # a row's own positive is no negative
        self.terms = list(terms)
        if LOSSES[objective.family].stateful:
            self.terms.append(Eta(pairs=pairs, labels=labels, steps_per_epoch=steps_per_epoch))
        if loss.mining is not None and loss.mining.draw is not None:
            self.terms.append(SampledRanks(loss.mining.mining()))
        if any(feature.encoder is not None for feature in recipe.query.features):
            self.terms.append(PackedHistories())
        offset = balance(objective, log_pi_L, self.sampler.log_q_L, m=m, pairs_per_query=pairs_per_query)
        self._batch_loss = backend.compile_loss(
            BatchLoss(
                objective=replace(objective, offset=offset, terms=tuple(self.terms)),
                in_batch=self.sampler.in_batch,
                bfloat16=recipe.training.precision == "mixed_bfloat16",
                hits=loss.resolved_hits,
                # Recalled labels have no gradient, so the batch's labels represent all m negatives [METHODS §2.1].
                repels=1.0 if self.sampler.recall is None else m / max(batch_size - 1, 1),
            )
        )
        self._seed = keras.random.SeedGenerator(recipe.seed)
        self._forward = Forward(model, self._seed)
        self.updates = Updates(model, recipe.optimizer, total_steps=total_steps)
        # A sampler that embeds queries reads histories outside of the loss, from label embeddings of the epoch's start.
        sampler_variables = [*self.sampler.variables, *(rows.table for rows in model.towers.label_rows.values())]
        changes = self.sampler.refresh is not None or self.sampler.remember is not None
        self.variables: list[keras.Variable] = [
            self._seed.state,
            *(table.table for table in model.tables.values()),
            *model.dense_variables,
            *self.updates.variables,
            *self._frequencies.variables,
            *(variable for term in self.terms for variable in term.variables),
            *(sampler_variables if changes else []),
        ]
        """The variables that training changes, in the fixed order of a checkpoint."""
        optional = (self._pair_weight_L, self._never_L)
        constants = [
            *model.label_inputs.values(),
            *model.entry_ids.values(),
            *(table.table for table in model.towers.pairs.values()),
            *([] if model.drawn_audience is None else model.drawn_audience.variables),
            *self._frequencies.constants,
            *(variable for variable in optional if variable is not None),
            *(constant for term in self.terms for constant in term.constants),
            *([] if recipe.model.learn_temperature else [model.log_temperature]),
            *([] if changes else sampler_variables),
        ]
        self._compiled = backend.compile_step(self._update, [*self.variables, *constants])

    def __call__(self, batch: Inputs) -> Tensor:
        """Take one step; return the mean loss, float32 scalar on the device, nats.

        Args:
            batch: query inputs by name; `_positive` int32 [B], label rows; `_weight` float32 [B]; `_pair` int32 [B],
                rows of the training pairs; and the columns of `terms`.
        """
        return self._compiled(batch)

    def begin_epoch(self) -> None:
        """Refresh a sampler that draws by label embeddings."""
        if self.sampler.refresh is not None:
            model = self._model
            self.sampler.refresh(LabelTable(model.embed_labels(), model.label_biases(), model.temperature))

    def _update(self, batch: dict[str, Tensor]) -> Tensor:
        """Take one step; `__call__` is this function, compiled."""
        parts = []
        for part in cut_batch(batch, self._accumulate) if self._several_parts else [batch]:
            with ExitStack() as stack:
                for term in self.terms:
                    stack.enter_context(term.context(self._model.towers.query, part))
                parts.append(self._gradients(part))
        mean = mean_gradients(self._model.tables, parts) if self._several_parts else parts[0]
        self.updates.apply(mean)
        return mean.value

    def _gradients(self, batch: dict[str, Tensor]) -> Gradients:
        """Compute the loss of a batch, or of a part of one, and its gradients."""
        sampler, positive_B = self.sampler, ops.convert_to_tensor(batch["_positive"])
        inputs = {name: column for name, column in batch.items() if not name.startswith("_")}
        queries_BD = ops.stop_gradient(self._model.towers.query(inputs)) if sampler.sees_embeddings else None
        context = DrawContext(positive_B, inputs, queries_BD)
        draws = None if sampler.draw is None else sampler.draw(self._seed, context)
        if isinstance(self._frequencies, StreamingFrequencies):
            self._frequencies.update(positive_B)
        recalled = None if sampler.recall is None else sampler.recall()
        # Labels are embedded in this order: positives, draws, labels of terms; `BatchLoss` cuts them apart again.
        labels = [positive_B]
        if draws is not None and recalled is None:
            labels.append(ops.reshape(draws, (-1,)))
        labels += [ops.reshape(term.extra_negatives(batch), (-1,)) for term in self.terms if term.adds_negatives]
        reading = self._forward.read(batch, ops.concatenate(labels) if len(labels) > 1 else positive_B)
        candidates = self._candidates(context, draws, batch)
        # Masks are drawn outside of `loss`: JAX keeps no generator state inside the differentiated function.
        masks = self._forward.draw_masks(reading) if self._forward.dropouts else []

        def loss(rows: list[Tensor]) -> tuple[Tensor, tuple[Tensors, Embedded]]:
            embedded, neighbours = self._forward.embed(reading, rows, masks)
            if recalled is not None:
                embedded = embedded.insert_recalled(*recalled, after=positive_B.shape[0])
            value, row_state = self._batch_loss(embedded, candidates)
            for term in self.terms:
                for extra in term.extra_losses(embedded, neighbours, candidates, batch):
                    value = value + extra
            return value, (row_state, embedded)

        rows = [rows_UD for _, rows_UD in reading.distinct]
        dense = self._model.dense_variables
        (value, (row_state, embedded)), row_gradients, gradients = backend.value_and_gradients(loss, rows, dense)
        for term in self.terms:
            term.update_state(batch, row_state)
        if sampler.remember is not None:
            start = positive_B.shape[0]
            sampler.remember(positive_B, embedded.labels_CD[:start], embedded.bias_C[:start])
        return Gradients(value, reading.distinct, row_gradients, gradients)

    def _candidates(self, context: DrawContext, draws: Tensor | None, batch: dict[str, Tensor]) -> BatchCandidates:
        """Collect the candidates of a batch, and the inputs of their weights."""
        positive_B = candidates = context.positive_B
        if draws is not None:
            candidates = ops.concatenate([positive_B, draws]) if self.sampler.in_batch else draws
        log_pi, log_q = self._frequencies.log_pi, self._frequencies.log_q
        log_pi_positive_B, log_pi_candidates = log_pi(positive_B), log_pi(candidates)
        log_q_positive_B = log_q(context, positive_B, log_pi_positive_B)
        weight_B = ops.convert_to_tensor(batch["_weight"])
        if self._pair_weight_L is not None:
            weight_B = weight_B * backend.gather(self._pair_weight_L, positive_B)
        candidate_tensors = {} if self._never_L is None else {"excluded": backend.gather(self._never_L, candidates)}
        rows: Tensors = {}
        exclude, steps_done = partial(self._exclude, batch), self.updates.steps_done.value
        inputs = StepInputs(batch, positive_B, candidates, exclude, self._seed, steps_done)
        for term in self.terms:
            candidate_tensors |= term.candidate_tensors(candidates)
            rows |= term.row_tensors(inputs)
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

    def _exclude(self, batch: Tensors, labels_BS: Tensor) -> Tensor | None:
        """Mask labels without a pair, and known positives of the row's query, bool [B, S]."""
        masks = [term.exclude_mask(labels_BS, batch) for term in self.terms]
        if self._never_L is not None:
            masks.append(backend.gather(self._never_L, labels_BS))
        masks = [mask for mask in masks if mask is not None]
        return reduce(ops.logical_or, masks) if masks else None
