"""The interface of an optional part of a loss, and the order of its hooks.

    epoch      begin_epoch
    batch      columns            on the host, one step ahead
    step       context            around all that follows
               extra_negatives    more labels to embed, next to positives and draws
               candidate_tensors  constants of the candidates
               row_tensors        constants of the rows; may read `exclude_mask` of all terms
      loss     row_state          from logits, without gradient; later hooks find it in `rows`
               weight             log-weights of sampled negatives
               negatives          arguments of the family
                 (family)
               target             losses of the rows
               extra_losses       terms of the mean loss
      update   update_state       writes `row_state` to variables

`build_loss_terms` lists the terms of a job. Each hook is called for all terms in this order before the next hook.

Legend: `B` rows of a batch, `M` candidates, `S` labels that a term adds to a row, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from longtail.trainer.backend import Tensor, Tensors
from longtail.trainer.losses.batch import BatchCandidates, Embedded, FamilyInputs, SampledLogits, StepInputs

if TYPE_CHECKING:
    import keras
    import numpy as np

    from longtail.bundle import Inputs
    from longtail.bundle.arrays import Float32, Int32, Int64
    from longtail.trainer.losses.weights import LogWeight


class LossTerm:
    """Define an optional part of a loss. The default of every hook changes nothing.

    Attributes:
        name: name of the tensors of `extra_negatives`.
        stream: number of the random stream of `columns`.
        adds_negatives: the term has `extra_negatives`. The other hooks read their logits from the tensor `NAME logits`.
        reads_multiplicity: hooks read `multiplicity`, the number of labels that a candidate represents, float32 [B, M].
        joins_rows: rows depend on each other, so the loss of a batch is not computed in blocks.
        variables, constants: variables that steps change, and variables that steps only read.
    """

    name: str = ""
    stream: ClassVar[int] = 1
    adds_negatives: ClassVar[bool] = False
    reads_multiplicity: ClassVar[bool] = False
    joins_rows: ClassVar[bool] = False
    variables: Sequence[keras.Variable] = ()
    constants: Sequence[keras.Variable] = ()

    def begin_epoch(
        self, epoch: int, checkpoints: Any, embed_queries: Callable[[Int32], Float32], label_side: Callable[[], Any],
        *, within: bool,
    ) -> None:  # fmt: skip
        """Prepare an epoch.

        Args:
            epoch: number of the epoch, from 0.
            checkpoints: the run's `Checkpoints`.
            embed_queries: rows of requests → embeddings, by the current weights.
            label_side: builds the `LabelSide` of all labels, by the current weights.
            within: the run resumes in the middle of the epoch, so the weights differ from those of its beginning.
        """

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build the columns of a batch from rows of the training pairs, int64 [B]."""
        return {}

    def context(self, tower: keras.Model, batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Change the query tower inside the block."""
        return nullcontext()

    def extra_negatives(self, batch: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Return the labels that the term adds to rows, int32 [B, S]."""
        raise TypeError(f"{type(self).__name__} sets `adds_negatives`: expected a method `extra_negatives`, found none")

    def exclude_mask(self, labels: Tensor, batch: Mapping[str, Tensor]) -> Tensor | None:  # noqa: ARG002
        """Mask labels, [M] or [B, M], that are no negatives of a row.

        Returns:
            bool [B, M]; None: no such label.
        """
        return None

    def row_tensors(self, step: StepInputs) -> Tensors:  # noqa: ARG002
        """Compute constants of the rows, first axis B."""
        return {}

    def candidate_tensors(self, candidates: Tensor) -> Tensors:  # noqa: ARG002
        """Compute constants of the candidates, of their shape, [M] or [B, M]."""
        return {}

    def row_state(self, logits: SampledLogits, *, draws: int) -> Tensors:  # noqa: ARG002
        """Compute tensors of some rows for later hooks and `update_state`, first axis B, without gradient.

        `draws` is the number of draws of a row.
        """
        return {}

    def weight(self, weight: LogWeight, rows: Tensors) -> LogWeight:  # noqa: ARG002
        """Change the weights of the sampled negatives."""
        return weight

    def negatives(self, inputs: FamilyInputs, rows: Tensors, *, offset: float) -> FamilyInputs:  # noqa: ARG002
        """Change the arguments of the family; all logits include `offset`."""
        return inputs

    def target(self, losses_B: Tensor, logits: SampledLogits) -> Tensor:  # noqa: ARG002
        """Change the losses of the rows, float32 [B]."""
        return losses_B

    def extra_losses(
        self,
        embedded: Embedded,  # noqa: ARG002
        neighbours: Mapping[str, Tensor],  # noqa: ARG002
        candidates: BatchCandidates,  # noqa: ARG002
        batch: Mapping[str, Tensor],  # noqa: ARG002
    ) -> list[Tensor]:
        """Compute further terms of the mean loss, float32 scalars; `neighbours` are embeddings [B, D] by side."""
        return []

    def update_state(self, batch: Mapping[str, Tensor], row_state: Tensors) -> None:
        """Write the tensors that `row_state` has computed in a step."""
