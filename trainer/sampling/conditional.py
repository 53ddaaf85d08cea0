"""Negatives from the adversarial tree p_n(y'|x) [METHODS §2.1, §5].

Legend: `B` batch, `M` draws per row, `L` labels, `K` projected dimensions, `N` nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from longtail.bundle import Proposal
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, keras, ops
from longtail.trainer.sampling.base import Count, DrawContext, Sampler, SamplerSetup
from longtail.trainer.sampling.walk import log_path, sample_leaves

if TYPE_CHECKING:
    from keras.random import SeedGenerator

Penalty = Annotated[float, Field(gt=0)]
CROSS_VALIDATED = (0.01, 0.1, 1.0, 10.0)
"""Values of λ_n from which `penalty = "cv"` chooses."""


def adversarial(
    setup: SamplerSetup,
    *,
    negatives: Count,
    # The fit reads `dims` and `penalty` from the recipe, before this function is called.
    dims: Count = 16,  # noqa: ARG001
    penalty: Penalty | Annotated[tuple[Penalty, ...], Field(min_length=1)] | Literal["cv"] = 0.1,  # noqa: ARG001
) -> Sampler:
    """Draw adversarial negatives: q = p_n(y'|x), a tree fitted to the training pairs beforehand [BM20 §3].

    Each row draws by ancestral sampling, O(K log L) per draw. The bundle keeps the tree, and the dial λ of the service
    adds log p_n(y|x) back instead of log ν.

    Args:
        negatives: labels that each row draws.
        dims: K of the fit, the number of principal components of the query's features that the tree reads.
        penalty: λ_n of the fit, nats. Several values, or "cv" for `CROSS_VALIDATED`, select the value under which
            held-out training pairs are most likely.
    """
    proposal = setup.proposal
    if proposal is None:
        raise ValueError("adversarial: expected a catalogue with a fitted proposal, received none")
    weights_NK = untrained_variable(proposal.weights, "proposal_weights")
    biases_N = untrained_variable(proposal.biases, "proposal_biases")
    labels_of = untrained_variable(proposal.leaf_labels, "proposal_labels")
    leaves_L = untrained_variable(proposal.label_leaves, "label_leaves")
    project, tables = _projection(proposal)

    def right_log_odds(z_BK: Tensor, nodes_BM: Tensor) -> Tensor:
        return ops.einsum("bmk,bk->bm", backend.gather(weights_NK, nodes_BM), z_BK) + backend.gather(biases_N, nodes_BM)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        shape = (setup.batch_size, negatives)
        return backend.gather(
            labels_of, sample_leaves(right_log_odds, project(context.inputs), proposal.depth, shape, seed)
        )

    def log_q(context: DrawContext, labels: Tensor) -> Tensor:
        return log_path(right_log_odds, project(context.inputs), proposal.depth, backend.gather(leaves_L, labels))

    variables = (weights_NK, biases_N, labels_of, leaves_L, *tables)
    return Sampler(None, in_batch=False, draw=draw, log_q=log_q, variables=variables)


def _projection(proposal: Proposal) -> tuple[Callable[[dict[str, Tensor]], Tensor], list[keras.Variable]]:
    """Build `Proposal.project` for the device, and the tables that it reads."""
    tables = {name: untrained_variable(table, f"projection_{name}") for name, table in proposal.projection.items()}

    def project(inputs: dict[str, Tensor]) -> Tensor:
        z_BK = ops.convert_to_tensor(proposal.offset)[None, :]
        for name, table in tables.items():
            column = ops.convert_to_tensor(inputs[name])
            if len(column.shape) == 2:
                weights_BP = ops.convert_to_tensor(inputs[f"{name}__weight"])
                z_BK = z_BK + ops.einsum("bpk,bp->bk", backend.gather(table, column), weights_BP)
            elif "float" in keras.backend.standardize_dtype(column.dtype):
                z_BK = z_BK + column[:, None] * table.value
            else:
                z_BK = z_BK + backend.gather(table, column)
        return z_BK

    return project, list(tables.values())


def list_penalties(penalty: float | Sequence[float] | str) -> Sequence[float]:
    """List the values of λ_n that a recipe's `penalty` names."""
    if isinstance(penalty, str):
        return CROSS_VALIDATED
    return [penalty] if isinstance(penalty, float) else penalty
