"""What each label adds to the full loss: what [R21 Prop. 5] draws negatives by.

Legend: `B` rows, `L` labels.
"""

from __future__ import annotations

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.objective import Objective
from longtail.trainer.losses.weights import MASKED, WEIGHTS, LogProbabilities

_OF_THE_BRACKET = ("softmax", "bilateral_softmax", "augment_and_reduce")


def log_terms(
    objective: Objective, log_pi_L: Tensor, positive_B: Tensor, logits_BL: Tensor, *, never_L: Tensor | None = None
) -> Tensor:
    """log(ρ_yy' φ(−f_y')) of every label as a negative, float32 [B, L], nats; `MASKED` or less where it is 0.

    Of the softmax families the terms are those inside the logarithm, ρ e^f_y' or ρ σ(d)^c; pairwise they are
    ρ φ(f_y − f_y').

    Args:
        objective: family, weight and offset; the weight is a margin [R21 Prop. 4].
        log_pi_L: log label frequencies, float32 [L].
        positive_B: label rows of the positives, int32.
        logits_BL: logits of all labels, float32.
        never_L: labels that are no negatives of any row, bool [L]; None if there are none.
    """
    rows, labels = logits_BL.shape
    zero_B, zero_L = ops.zeros((rows,)), ops.zeros((labels,))
    # With q = 1 and m = 1, w = ρ (1 − q_y) / (m q_y') is ρ where a miss is certain.
    log = LogProbabilities(ops.take(log_pi_L, positive_B), log_pi_L, zero_B, zero_L, miss=zero_B, m=zero_B)
    log_rho_BL = WEIGHTS[objective.weight](log, **objective.weight_arguments).matrix()
    if never_L is not None:
        log_rho_BL = ops.where(never_L, MASKED, log_rho_BL)
    logits_BL = logits_BL + objective.offset
    if objective.family in _OF_THE_BRACKET:
        return log_rho_BL + logits_BL
    loss = LOSSES[objective.family].loss
    own_B = ops.take_along_axis(logits_BL, positive_B[:, None], axis=1)
    own_N = ops.reshape(ops.broadcast_to(own_B, (rows, labels)), (-1,))
    negative_N1, weight_N1 = ops.reshape(logits_BL, (-1, 1)), ops.zeros((rows * labels, 1))
    if objective.family == "pairwise_softmax":  # of one negative, the log of its term
        return log_rho_BL + ops.reshape(
            loss(own_N, negative_N1, weight_N1, **objective.family_arguments), (rows, labels)
        )
    alone_N = loss(own_N, negative_N1, weight_N1 + MASKED, **objective.family_arguments)
    phi_N = loss(own_N, negative_N1, weight_N1, **objective.family_arguments) - alone_N
    log_phi_N = ops.where(phi_N > 0, ops.log(ops.maximum(phi_N, 1e-30)), MASKED)
    return log_rho_BL + ops.reshape(log_phi_N, (rows, labels))
