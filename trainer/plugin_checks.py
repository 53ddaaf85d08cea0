"""Checks of custom samplers, weights and families before training: their noise ν must be computable.

ν is computed from log q of the sampler and from the two terms of the weight [METHODS §9], so these must be correct. No
check of a few numbers can verify that draws follow log q, nor that a loss converges to what its `link` says.

Legend: `L` labels.
"""

from typing import Any

import numpy as np

from longtail.trainer import register
from longtail.trainer.backend import ops
from longtail.trainer.errors import RecipeError
from longtail.trainer.losses import LOSSES, MASKED, WEIGHTS, LogProbabilities, LogWeight, Objective
from longtail.trainer.losses.implied_noise import compute_q_exponent
from longtail.trainer.sampling import Sampler

_SUMS_TO_1 = 1e-3
"""Largest |log Σ q| of a sampler's probabilities, nats."""


def check_custom_rows(sampler_name: str, sampler: object, objective: Objective, *, labels: int) -> None:
    """Refuse a custom sampler, weight or family whose noise cannot be computed."""
    if sampler_name not in register.BUILT_IN["sampler"]:
        _check_sampler(sampler_name, sampler, objective, labels=labels)
    if objective.weight not in register.BUILT_IN["weight"]:
        _check_weight(objective)
    if objective.family not in register.BUILT_IN["family"]:
        _check_family(objective)


def _check_sampler(name: str, sampler: object, objective: Objective, *, labels: int) -> None:
    """Refuse a custom sampler whose noise cannot be computed."""
    key = f"loss.sampler {name!r}"
    if not isinstance(sampler, Sampler):
        raise RecipeError(f"{key}: expected a Sampler, received {type(sampler).__name__}")
    if sampler.draw is None and not sampler.in_batch:
        raise RecipeError(f"{key}: expected draw, in_batch = True or both, received neither: it has no negatives")
    log_q_L = sampler.log_q_L
    if log_q_L is None:
        if sampler.log_q is None:
            raise RecipeError(
                f"{key}: expected log_q_L, the log-probabilities of its draws, or log_q where these depend on the "
                "query, received neither: what the dial has to remove is unknown"
            )
        if compute_q_exponent(objective):
            raise RecipeError(
                f"{key}: weight {objective.weight!r} is not allowed with log_q alone because q depends on the query "
                "and leaves no noise per label for the dial to remove; use log_q_L, or a weight that cancels q "
                "(importance)"
            )
        return
    if log_q_L.shape != (labels,) or not np.isfinite(log_q_L).all():
        raise RecipeError(f"{key}: expected finite log_q_L of shape {(labels,)}, received {log_q_L.shape}: {log_q_L}")
    total = float(np.logaddexp.reduce(log_q_L.astype(np.float64)))
    if abs(total) > _SUMS_TO_1:
        raise RecipeError(
            f"{key}: expected probabilities that sum to 1, received log_q_L that sum to {np.exp(total):.6g}"
        )


def _check_weight(objective: Objective) -> None:
    """Refuse a custom weight that is not separable, because its ν could not be computed."""
    key = f"loss.weight {objective.weight!r}"
    terms = [_weigh(key, objective, *moved) for moved in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3))]
    (row, col), (_, col_of_other_positives), (row_of_other_negatives, _) = terms
    if np.abs(col - col_of_other_positives).max() > 1e-5 or np.abs(row - row_of_other_negatives).max() > 1e-5:
        raise RecipeError(
            f"{key}: expected row of the positive alone and col of the negative alone, received terms that mix them: "
            "their noise is no number per label, so the dial could not remove it"
        )


def _check_family(objective: Objective) -> None:
    """Refuse a custom family without row losses, or whose loss masked negatives change."""
    key, loss = f"loss.family {objective.family!r}", LOSSES[objective.family].loss
    positive_B, log_weight_BM = (
        np.array([0.5, -0.2], np.float32),
        np.array([[0, -0.5, MASKED], [0, 0, MASKED]], np.float32),
    )
    losses = []
    for masked in (0.1, 0.7):
        negative_BM = np.array([[0.2, -0.4, masked], [0.3, 0.1, masked]], np.float32)
        loss_B = loss(positive_B, negative_BM, log_weight_BM, **objective.family_arguments)
        losses.append(np.asarray(ops.convert_to_numpy(loss_B)))
    if losses[0].shape != (2,) or not np.isfinite(losses).all():
        raise RecipeError(f"{key}: expected a finite loss of every row, shape (2,), received {losses[0]}")
    if np.abs(losses[0] - losses[1]).max() > 1e-6:
        raise RecipeError(f"{key}: expected no effect of negatives whose log-weight is MASKED, received one")


def _weigh(key: str, objective: Objective, positive: float, negative: float) -> tuple[Any, Any]:
    """Compute both terms for two positives and three negatives, with shifted log-probabilities."""
    positive_B, negative_M = np.log(np.array([0.2, 0.1])), np.log(np.array([0.3, 0.1, 0.05]))
    log = LogProbabilities(
        *(ops.convert_to_tensor((column + moved).astype(np.float32)) for column, moved in (
            (positive_B, positive), (negative_M, negative), (positive_B - 0.1, positive), (negative_M + 0.1, negative),
            (np.zeros(2), 0.0), (np.full(2, np.log(3)), 0.0),
        ))
    )  # fmt: skip
    log_weight = WEIGHTS[objective.weight](log, **objective.weight_arguments)
    if not isinstance(log_weight, LogWeight):
        raise RecipeError(f"{key}: expected a LogWeight, received {type(log_weight).__name__}")
    row, col = (np.asarray(ops.convert_to_numpy(part)) for part in log_weight)
    if row.shape != (2,) or col.shape != (3,):
        raise RecipeError(
            f"{key}: expected row of shape (2,), the positives', and col of shape (3,), the negatives', "
            f"received {row.shape} and {col.shape}"
        )
    if not (np.isfinite(row).all() and np.isfinite(col).all()):
        raise RecipeError(f"{key}: expected finite logs (MASKED for weight 0), received {row} and {col}")
    return row, col
