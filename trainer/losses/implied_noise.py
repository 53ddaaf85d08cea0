"""The implied noise ν of a training: its optimum divides p(y|x) by ν, and the dial λ puts ν back [METHODS §9].

Draws come from q and have weights `log w_yy' = row_y + col_y'`. If every logit is free, the expected loss is least at

    f*(x, y) = link · log(p(y|x) / ν_y) + const(x),    ν_y ∝ q_y · exp(col_y) · π_y^reweight

[BM20 Theorem 1; R21 Lemma 2]. A pairwise loss compares labels two at a time, so the weight of a row does not cancel,
and ν is divided by exp(row_y) too. METHODS §9 says for which families, weights and hits this is exact.

Legend: `L` labels.
"""

from __future__ import annotations

import numpy as np

from longtail.bundle.arrays import Float32, Float64
from longtail.trainer.backend import ops
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.losses.objective import Objective
from longtail.trainer.losses.weights import WEIGHTS, LogProbabilities, is_masked

SAME = 1e-4
"""Largest difference of two distributions that count as equal, nats; float32 weights are more exact than this."""


def implied_noise(
    objective: Objective,
    log_pi_L: Float64,
    log_q_L: Float32 | Float64 | None,
    log_miss_L: Float32 | Float64 | None = None,
    *,
    reweight: float = 0.0,
) -> Float64:
    """Compute log ν of every label, float64 [L], nats; logsumexp 0. If ν equals π, return `log_pi_L` itself.

    Labels that are never negatives (`equalised` below its threshold) have no optimum. They get the smallest ν of the
    others.

    Args:
        objective: family and weight; mining is ignored.
        log_pi_L: log label frequencies, smoothed, so that every ν is finite.
        log_q_L: log sampling probabilities, smoothed; None for a sampler whose q depends on the query, as one number
            per label cannot represent this part of the noise.
        log_miss_L: log(1 − q) for a sampler that never draws the positive; None if it may.
        reweight: exponent of 1/π in the weights of pairs.

    Example:
        >>> log_pi_L = np.log([0.5, 0.25, 0.25])
        >>> np.exp(implied_noise(Objective("softmax", "unit"), log_pi_L, log_pi_L)).round(3)
        array([0.5 , 0.25, 0.25])
        >>> np.exp(implied_noise(Objective("softmax", "importance"), log_pi_L, log_pi_L)).round(3)
        array([0.333, 0.333, 0.333])
    """
    labels = len(log_pi_L)
    q_L = np.full(labels, -np.log(labels)) if log_q_L is None else log_q_L
    log_nu_L = _unnormalised(objective, log_pi_L, q_L, log_miss_L) + reweight * log_pi_L
    log_nu_L = log_nu_L - np.logaddexp.reduce(log_nu_L)
    # Return exactly uniform or exactly π in these cases, so that callers can compare and names are exact.
    if np.ptp(log_nu_L) < SAME:
        return np.full(labels, -np.log(labels))
    return log_pi_L if np.abs(log_nu_L - log_pi_L).max() < SAME else log_nu_L


def compute_q_exponent(objective: Objective) -> float:
    """Return the exponent of q in ν.

    It is 1, 0 if the weight or the shift of NCE cancels q, and −1 for `relative` in pairwise losses.
    """
    # The finite difference of log ν in log q, exact because log ν is linear in log q.
    two_L = np.log([0.5, 0.5])
    return round(float(np.subtract(*(_unnormalised(objective, two_L, two_L - shift)[0] for shift in (0.0, 1.0)))), 3)


def compute_slope(objective: Objective, *, power_of_scores: float = 0.0) -> float:
    """Return the slope of scores in log p(y|x), where `f + λ·log ν` = λ·log p(y|x).

    It is 1 for most families, ½ for `exponential`, and 0 for a family without a link, which ranks by p/ν at λ = 0 and
    by p at no λ.

    Args:
        power_of_scores: exponent s of e^f in q, for sampler `model`. f is then on both sides of f = link·log(p/ν). If ν
            contains q, the slope in log p is link/(1 + link·s): ½ for `unit`.

    Example:
        >>> compute_slope(Objective("logistic", "unit"), power_of_scores=1.0)
        0.5
    """
    link = LOSSES[objective.family].link or 0.0
    against = 1 + link * power_of_scores * compute_q_exponent(objective) if power_of_scores else 1.0
    return link / against if against > 0 else 0.0


def name_noise(log_nu_L: Float64, log_pi_L: Float64, *, reweight: float = 0.0) -> str:
    """Name ν for a manifest: `uniform`, `π`, a power of π, or a mixture of π and 1/L.

    The name is derived from the numbers, so it cannot contradict them.

    Args:
        log_nu_L: log ν, from `implied_noise`.
        reweight: argument of `implied_noise`, named if ν is none of the above.

    Example:
        >>> pi_L = np.array([0.5, 0.25, 0.125, 0.125])
        >>> name_noise(np.log(pi_L), np.log(pi_L)), name_noise(np.log(pi_L / 2 + 1 / 8), np.log(pi_L))
        ('π', '0.5·π + 0.5/L')
    """
    if np.ptp(log_nu_L) < SAME:
        return "uniform"
    # Least-squares fits of log ν by a power of π, then of ν by a mixture; a fit counts only if it is exact.
    centred_L, pi_L = log_pi_L - log_pi_L.mean(), np.exp(log_pi_L) - 1 / len(log_pi_L)
    power = centred_L @ log_nu_L / (centred_L @ centred_L) if np.ptp(log_pi_L) else 0.0
    if np.ptp(log_nu_L - power * log_pi_L) < SAME:
        return "π" if abs(power - 1) < SAME else f"π^{power:.4g}"
    share = pi_L @ np.exp(log_nu_L) / (pi_L @ pi_L)
    mixture_L = share * pi_L + 1 / len(log_pi_L)
    if mixture_L.min() > 0 and np.abs(np.log(mixture_L) - log_nu_L).max() < SAME:
        return f"{share:.4g}·π + {1 - share:.4g}/L"
    return "q·w of the sampler and the weight" + (f" · π^{reweight:.4g}" if reweight else "")


def name_tree_noise(objective: Objective, log_pi_L: Float64, *, reweight: float = 0.0) -> str:
    """Name ν with a tree for a manifest: a power of p_n(y|x), times the noise per label.

    λ always multiplies log p_n(y|x) itself, even if its power is not 1; μ can remove the noise per label.

    Example:
        >>> log_pi_L = np.log([0.5, 0.25, 0.25])
        >>> [name_tree_noise(Objective("logistic", weight), log_pi_L) for weight in ("unit", "importance", "tail")]
        ['p_n(y|x)', 'p_n(y|x)^0', 'p_n(y|x)^0 · π']
    """
    power = compute_q_exponent(objective)
    tree = "p_n(y|x)" if power == 1 else f"p_n(y|x)^{power:g}"
    label = name_noise(implied_noise(objective, log_pi_L, None, reweight=reweight), log_pi_L, reweight=reweight)
    return tree if label == "uniform" else f"{tree} · {label}"


def _unnormalised(
    objective: Objective,
    log_pi_L: Float64,
    log_q_L: Float32 | Float64,
    log_miss_L: Float32 | Float64 | None = None,
) -> Float64:
    """Compute log ν up to a constant; a pairwise loss has every label as a row's positive, too."""
    miss = np.zeros_like(log_q_L) if log_miss_L is None else log_miss_L
    pi_L, q_L, miss_L = (ops.convert_to_tensor(column.astype(np.float32)) for column in (log_pi_L, log_q_L, miss))
    log = LogProbabilities(pi_L, pi_L, q_L, q_L, miss=miss_L, m=ops.zeros_like(q_L))
    weight = WEIGHTS[objective.weight](log, **objective.weight_arguments)
    kept_L = ops.convert_to_numpy(ops.logical_not(is_masked(weight.col)))
    row_L, col_L = (ops.convert_to_numpy(part).astype(np.float64) for part in weight)
    if LOSSES[objective.family].shifted:
        log_nu_L = col_L
    elif objective.family_arguments.get("pairwise"):
        # `miss` in row_y only undoes that draws exclude the positive, so it is no part of ρ.
        log_nu_L = log_q_L + col_L - (row_L - miss)
    else:
        log_nu_L = log_q_L + col_L
    return np.where(kept_L, log_nu_L, log_nu_L[kept_L].min())
