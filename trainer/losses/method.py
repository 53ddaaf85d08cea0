"""What an optional part of a loss is: its columns of a batch, its constants of a step, its change of the loss.

A part that needs columns of its own is a `Method`, listed in `methods_of`; nothing else of the trainer knows of it.

Legend: `B` rows of a batch, `M` candidates, `S` labels that a row brings along, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from longtail.trainer.backend.tensors import Tensor, Tensors

if TYPE_CHECKING:
    import keras
    import numpy as np

    from longtail.bundle import Inputs
    from longtail.bundle.arrays import Float32, Int32, Int64
    from longtail.trainer.losses.batch_loss import Candidates, Embedded
    from longtail.trainer.losses.objective import SampledLogits
    from longtail.trainer.losses.weights import LogWeight

Weighted = tuple[Tensor, Tensor, Tensor]
"""Positives' logits [B], negatives' logits [B, M] and their log-weights [B, M], as a family takes them."""


class Visit(NamedTuple):
    """What a step knows of its rows before it computes their loss.

    Attributes:
        positive_B, candidates: label rows, int32; of candidates [M] shared by all rows, or [B, M].
        excluded: from label rows [B, S] to those that are no negatives of their rows, bool; None if all may be.
    """

    batch: Mapping[str, Tensor]
    positive_B: Tensor
    candidates: Tensor
    excluded: Callable[[Tensor], Tensor | None]
    seed: keras.random.SeedGenerator
    steps_done: Tensor


class Method:
    """One optional part of a loss. Every hook has a default that changes nothing.

    Attributes:
        name: in errors.
        needs: columns that a batch must have.
        stream: number of the random stream of `columns`.
        brings_labels: rows bring labels of their own, `brought`, which are embedded and scored: its hooks find the
            logits under `NAME logits`.
        weighs_draws: its hooks read `stands`, the labels that every candidate stands for, float32 [B, M].
        joins_rows: rows depend on each other, so that a batch is not computed in blocks.
        variables, constants: what steps change, and what they read.
    """

    name: str = ""
    needs: tuple[str, ...] = ()
    stream: ClassVar[int] = 1
    brings_labels: ClassVar[bool] = False
    weighs_draws: ClassVar[bool] = False
    joins_rows: ClassVar[bool] = False
    variables: Sequence[keras.Variable] = ()
    constants: Sequence[keras.Variable] = ()

    def begin_epoch(
        self, epoch: int, checkpoints: Any, embed_queries: Callable[[Int32], Float32], label_side: Callable[[], Any],
        *, within: bool,
    ) -> None:  # fmt: skip
        """Prepare an epoch.

        Args:
            epoch: from 0.
            checkpoints: of the run, a `Checkpoints`.
            embed_queries: rows of requests → embeddings, by the current weights.
            label_side: makes the `LabelSide` of all labels, by the current weights.
            within: the run goes on within the epoch, so that the weights are no longer those of its beginning.
        """

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Make the columns of a batch from rows of the training pairs, int64 [B]."""
        return {}

    def context(self, tower: keras.Model, batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Make the query tower compute as the method asks, inside the block."""
        return nullcontext()

    def brought(self, batch: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Get the labels that rows bring along, int32 [B, S]."""
        raise TypeError(f"{type(self).__name__} sets `brings_labels` without a `brought`: define it")

    def among(self, labels: Tensor, batch: Mapping[str, Tensor]) -> Tensor | None:  # noqa: ARG002
        """Find labels [M] or [B, M] that are no negatives of a row, bool [B, M]; None if all may be."""
        return None

    def of_rows(self, visit: Visit) -> Tensors:  # noqa: ARG002
        """Compute constants of the rows, first axis B."""
        return {}

    def of_candidates(self, candidates: Tensor) -> Tensors:  # noqa: ARG002
        """Compute constants of the candidates, of their shape, [M] or [B, M]."""
        return {}

    def visited(self, logits: SampledLogits, *, draws: int) -> Tensors:  # noqa: ARG002
        """Compute what later hooks and `keep` read of some rows, first axis B, without gradient; of `draws` each."""
        return {}

    def weight(self, weight: LogWeight, rows: Tensors) -> LogWeight:  # noqa: ARG002
        """Change the weights of the sampled negatives."""
        return weight

    def negatives(self, weighted: Weighted, rows: Tensors, *, offset: float) -> Weighted:  # noqa: ARG002
        """Change what the family sees; `offset` is in all logits."""
        return weighted

    def target(self, losses_B: Tensor, logits: SampledLogits) -> Tensor:  # noqa: ARG002
        """Change the losses of the rows, float32 [B]."""
        return losses_B

    def added(
        self,
        embedded: Embedded,  # noqa: ARG002
        neighbours: Mapping[str, Tensor],  # noqa: ARG002
        candidates: Candidates,  # noqa: ARG002
        batch: Mapping[str, Tensor],  # noqa: ARG002
    ) -> list[Tensor]:
        """Compute further terms of the mean loss, float32 scalars; `neighbours` are embeddings [B, D] by side."""
        return []

    def keep(self, batch: Mapping[str, Tensor], visited: Tensors) -> None:
        """Write what a step has made of its rows."""


def check_columns(methods: Sequence[Method], batch: Mapping[str, Tensor]) -> None:
    """Refuse a batch that lacks the columns of a method."""
    for method in methods:
        if missing := [name for name in method.needs if name not in batch]:
            raise ValueError(f"a step with {method.name}: expected {' and '.join(missing)} in its batch, received none")
