"""The tree p_n(y|x) that `adversarial` draws from, fitted to the training pairs once a run [BM20 §3; METHODS §5].

Queries are projected to K coordinates (projection.py), and the tree is fitted to those (tree_fit.py).

Legend: `N` pairs, `L` labels, `K` coordinates of z, `B` pairs encoded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from longtail.bundle import Inputs, Proposal
from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.proposal import project
from longtail.trainer.errors import DataError
from longtail.trainer.sampling.projection import QueryFeature, fit_projection
from longtail.trainer.sampling.tree_fit import fit_tree

_PROJECTED_PAIRS, _READ_TOGETHER = 200_000, 2**14
"""Pairs that the projection is fitted to, at most, and pairs encoded at once."""


def read_or_fit_proposal(path: Path, fit: Callable[[], Proposal]) -> Proposal:
    """The tree of a run: read from `path`, or fitted and written there.

    Args:
        path: of the file, an `.npz`; it appears once it is complete.
        fit: `fit_proposal` on the run's training pairs; called if there is no file.

    Raises:
        DataError: as `fit_proposal`.
    """
    if path.exists():
        return Proposal.read(path)
    proposal = fit()
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_suffix(".part")
    proposal.write(working)
    working.replace(path)
    return proposal


def fit_proposal(
    features: Sequence[QueryFeature],
    inputs_of: Callable[[Int64], Inputs],
    labels_N: Int32,
    *,
    vocabulary_rows: Mapping[str, int],
    labels: int,
    dims: int,
    penalty: float,
    query_id: str,
) -> Proposal:
    """Fit projection and tree to the training pairs; encodes every pair once, and a sample of them twice.

    Args:
        features: the query tower's. The query's own id is left out: it would need a direction for every query.
        inputs_of: encodes pairs by their rows in `labels_N`, int64 [B] → tower inputs.
        labels_N: label rows of the training pairs, int32.
        vocabulary_rows: rows of every table of ids, by table name.
        labels: L.
        dims: K, coordinates of z.
        penalty: λ_n > 0, nats.
        query_id: name of the feature that is the query's own id.

    Raises:
        DataError: no feature besides the query's own id, no pair, or a value that is not finite.
    """
    usable = [feature for feature in features if feature.name != query_id]
    if not usable:
        raise DataError(
            f"adversarial sampler: expected a query feature besides the query's own id {query_id!r} "
            f"(a history, bag, text, number or category), found {[feature.name for feature in features]}"
        )
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
    weights, biases, leaf_labels = fit_tree(z_NK, labels_N, labels=labels, penalty=penalty)
    return Proposal(projection, offset_K, weights, biases, leaf_labels)


def _cut(pairs: Int64) -> list[Int64]:
    return [pairs[start : start + _READ_TOGETHER] for start in range(0, len(pairs), _READ_TOGETHER)]
