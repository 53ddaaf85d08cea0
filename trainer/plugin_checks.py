"""What is asked of a sampler, weight or family of one's own before it trains: that its noise ν can be known.

ν is read off log q of the sampler and off the two terms of the weight [METHODS §9], so these must be what they say;
that draws follow log q, and that a loss converges where its `link` says, no check of a few numbers can tell.

Legend: `L` labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from longtail.trainer import register
from longtail.trainer.backend import ops
from longtail.trainer.errors import RecipeError
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.implied_noise import power_of_q
from longtail.trainer.losses.objective import Objective
from longtail.trainer.losses.weights import MASKED, WEIGHTS, LogProbabilities, LogWeight
from longtail.trainer.sampling import Sampler

_SUMS_TO_1 = 1e-3
"""Nats by which the sum of a sampler's probabilities may miss 1."""


def check_sampler(name: str, sampler: object, objective: Objective, *, labels: int) -> None:
    """Refuse a sampler of one's own whose noise cannot be known."""
    if register.is_ours("sampler", name):
        return
    where = f"loss.sampler {name!r}"
    if not isinstance(sampler, Sampler):
        raise RecipeError(f"{where}: expected a Sampler, received {type(sampler).__name__}")
    if sampler.draw is None and not sampler.in_batch:
        raise RecipeError(f"{where}: expected draw, in_batch = True or both, received neither: it has no negatives")
    log_q_L = sampler.log_q_L
    if log_q_L is None:
        if sampler.log_q is None:
            raise RecipeError(
                f"{where}: expected log_q_L, the log-probabilities of its draws, or log_q where these depend on the "
                "query, received neither: what the dial has to remove is unknown"
            )
        if power_of_q(objective):
            raise RecipeError(
                f"{where}: expected log_q_L, or a weight that cancels q (importance), beside log_q, which depends on "
                f"the query and leaves no noise per label for the dial to remove, received {objective.weight!r}"
            )
        return
    if log_q_L.shape != (labels,) or not np.isfinite(log_q_L).all():
        raise RecipeError(f"{where}: expected finite log_q_L of shape {(labels,)}, received {log_q_L.shape}: {log_q_L}")
    total = float(np.logaddexp.reduce(log_q_L.astype(np.float64)))
    if abs(total) > _SUMS_TO_1:
        raise RecipeError(
            f"{where}: expected probabilities that sum to 1, received log_q_L that sum to {np.exp(total):.6g}"
        )


def check_weight(objective: Objective) -> None:
    """Refuse a weight of one's own that is not separable, of which ν could not be computed."""
    name = objective.weight
    if register.is_ours("weight", name):
        return
    where = f"loss.weight {name!r}"
    made = [_weigh(where, objective, *moved) for moved in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3))]
    (row, col), (_, col_of_other_positives), (row_of_other_negatives, _) = made
    if np.abs(col - col_of_other_positives).max() > 1e-5 or np.abs(row - row_of_other_negatives).max() > 1e-5:
        raise RecipeError(
            f"{where}: expected row of the positive alone and col of the negative alone, received terms that mix them: "
            "what its training divides p(y|x) by is no number per label, and the dial could not remove it"
        )


def check_family(objective: Objective) -> None:
    """Refuse a family of one's own that does not give a loss per row, or that a masked negative changes."""
    name = objective.family
    if register.is_ours("family", name):
        return
    where, loss = f"loss.family {name!r}", LOSSES[name].loss
    positive_B, log_weight_BM = (
        np.array([0.5, -0.2], np.float32),
        np.array([[0, -0.5, MASKED], [0, 0, MASKED]], np.float32),
    )
    losses = []
    for masked in (0.1, 0.7):
        negative_BM = np.array([[0.2, -0.4, masked], [0.3, 0.1, masked]], np.float32)
        made = loss(positive_B, negative_BM, log_weight_BM, **objective.family_arguments)
        losses.append(np.asarray(ops.convert_to_numpy(made)))
    if losses[0].shape != (2,) or not np.isfinite(losses).all():
        raise RecipeError(f"{where}: expected a finite loss of every row, shape (2,), received {losses[0]}")
    if np.abs(losses[0] - losses[1]).max() > 1e-6:
        raise RecipeError(f"{where}: expected no effect of negatives whose log-weight is MASKED, received one")


def _weigh(where: str, objective: Objective, positive: float, negative: float) -> tuple[Any, Any]:
    """Return both terms for two positives and three negatives, their log-probabilities moved by some nats."""
    positive_B, negative_M = np.log(np.array([0.2, 0.1])), np.log(np.array([0.3, 0.1, 0.05]))
    log = LogProbabilities(
        *(ops.convert_to_tensor((column + moved).astype(np.float32)) for column, moved in (
            (positive_B, positive), (negative_M, negative), (positive_B - 0.1, positive), (negative_M + 0.1, negative),
            (np.zeros(2), 0.0), (np.full(2, np.log(3)), 0.0),
        ))
    )  # fmt: skip
    made = WEIGHTS[objective.weight](log, **objective.weight_arguments)
    if not isinstance(made, LogWeight):
        raise RecipeError(f"{where}: expected a LogWeight, received {type(made).__name__}")
    row, col = (np.asarray(ops.convert_to_numpy(part)) for part in made)
    if row.shape != (2,) or col.shape != (3,):
        raise RecipeError(
            f"{where}: expected row of shape (2,), the positives', and col of shape (3,), the negatives', "
            f"received {row.shape} and {col.shape}"
        )
    if not (np.isfinite(row).all() and np.isfinite(col).all()):
        raise RecipeError(f"{where}: expected finite logs (MASKED for weight 0), received {row} and {col}")
    return row, col
