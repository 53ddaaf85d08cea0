"""The tree p_n(y|x) of sampler `adversarial`, fitted once per run [BM20 §3; METHODS §5].

Queries are projected to K coordinates (projection.py), and the tree is fitted to the coordinates (tree_fit.py).

Legend: `N` pairs, `L` labels, `K` coordinates of z, `B` pairs encoded together.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longtail.bundle import Inputs, Proposal
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.proposal import project
from longtail.trainer.errors import DataError
from longtail.trainer.sampling.projection import QueryFeature, fit_projection
from longtail.trainer.sampling.tree_fit import fit_tree

_PROJECTED_PAIRS, _READ_TOGETHER = 200_000, 2**14
"""Largest number of pairs to fit the projection to, and number of pairs encoded together."""

FOLDS = 3
"""Number of folds in the cross-validation of λ_n."""


class FittedTree(NamedTuple):
    """Hold the tree, and mean log p_n(y|x) of held-out pairs by λ_n, nats; empty if one λ_n was given."""

    proposal: Proposal
    held_out: dict[float, float]


def read_or_fit_proposal(path: Path, fit: Callable[[], FittedTree]) -> FittedTree:
    """Read a run's tree from the `.npz` file `path`, or fit and write it.

    A `.json` file of the same name holds the results of the cross-validation.
    """
    penalties = path.with_suffix(".json")
    if path.exists():
        held_out = json.loads(penalties.read_text(encoding="utf-8")) if penalties.exists() else {}
        return FittedTree(Proposal.read(path), {float(penalty): log_p for penalty, log_p in held_out.items()})
    fitted = fit()
    path.parent.mkdir(parents=True, exist_ok=True)
    penalties.write_text(json.dumps(fitted.held_out), encoding="utf-8")
    working = path.with_suffix(".part")
    fitted.proposal.write(working)
    # Last and in one step: where the tree exists, its penalties do too.
    working.replace(path)
    return fitted


def fit_proposal(
    features: Sequence[QueryFeature],
    inputs_of: Callable[[Int64], Inputs],
    labels_N: Int32,
    *,
    vocabulary_rows: Mapping[str, int],
    labels: int,
    dims: int,
    penalties: Sequence[float],
    query_id: str,
) -> FittedTree:
    """Fit projection and tree to the training pairs.

    Args:
        features: features of the query tower. The query's own id is ignored, as it needs a direction per query.
        inputs_of: function that encodes pairs by their rows in `labels_N`, int64 [B] → tower inputs.
        labels_N: label rows of the training pairs, int32.
        penalties: λ_n > 0, nats; cross-validation (`held_out_likelihood`) selects one of several.
    """
    usable = [feature for feature in features if feature.name != query_id]
    rows = {
        feature.name: feature.hash_rows if feature.kind == "text" else vocabulary_rows[feature.table_name]
        for feature in usable
        if feature.kind != "number"
    }
    sample = np.arange(len(labels_N))
    if len(sample) > _PROJECTED_PAIRS:
        sample = np.sort(np.random.default_rng(0).choice(len(sample), _PROJECTED_PAIRS, replace=False))
    projection, offset_K = fit_projection(usable, map(inputs_of, _cut(sample)), rows, dims)
    z_NK = np.concatenate([project(inputs_of(some), projection, offset_K) for some in _cut(np.arange(len(labels_N)))])
    finite_N = np.isfinite(z_NK).all(axis=1)
    if not finite_N.all():
        raise DataError(
            "adversarial sampler: expected finite query features, "
            f"found others in {np.count_nonzero(~finite_N)} of {len(z_NK)} training pairs"
        )
    held_out = {}
    if len(penalties) > 1:
        held_out = {
            penalty: held_out_likelihood(z_NK[sample], labels_N[sample], labels, penalty=penalty)
            for penalty in penalties
        }
    best = max(penalties, key=lambda penalty: held_out.get(penalty, 0.0))
    weights, biases, leaf_labels = fit_tree(z_NK, labels_N, labels=labels, penalty=best)
    return FittedTree(Proposal(projection, offset_K, weights, biases, leaf_labels), held_out)


def held_out_likelihood(z_NK: Float32, labels_N: Int32, labels: int, *, penalty: float) -> float:
    """Compute pairs' mean log p_n(y|x) under trees fitted without their folds, nats [BM20 §3]."""
    fold_N = np.random.default_rng(0).permutation(len(labels_N)) % FOLDS
    total = 0.0
    for fold in range(FOLDS):
        inside, outside = fold_N != fold, fold_N == fold
        tree = fit_tree(z_NK[inside], labels_N[inside], labels=labels, penalty=penalty)
        offset_K = np.zeros(z_NK.shape[1], np.float32)
        log_p_N1 = Proposal({}, offset_K, *tree).log_probabilities(z_NK[outside], labels_N[outside, None])
        total += float(log_p_N1.sum(dtype=np.float64))
    return total / len(labels_N)


def _cut(pairs: Int64) -> list[Int64]:
    return [pairs[start : start + _READ_TOGETHER] for start in range(0, len(pairs), _READ_TOGETHER)]
