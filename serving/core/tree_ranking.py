"""Remove bias with the conditional noise p_n(y|x) of a tree [BM20 eq. 5; METHODS §6].

No index row can hold log p_n(y|x), which differs for every query. So candidates come from two sources, the labels of
highest f + μ·log π from the index and the labels of highest p_n from a beam search of the tree, and their union is
scored exactly.

Legend: `B` queries in the batch, `b` some of them, `C` candidates of each, `E` augmented dimensions, `K` results, `L`
labels, `R` hidden labels, `Z` coordinates of z.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from longtail.bundle import Bundle, Proposal
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.bundle.proposal import PADDING
from longtail.index import ExactRows, Filter
from longtail.index.search.candidates import NO_ROW, no_results, top_k
from longtail.serving.core.ranking import NO_ROWS, Batch, LabelSearcher, Ranker
from longtail.serving.errors import InvalidRequestError

_REACH, _REACH_PER_RESULT = 1_000, 10
_TOGETHER = 2**18
"""Largest number of candidates from one source that are scored at once: about 50 MB."""
_WHOLE_UP_TO = 4_096
"""Longest `allow` whose labels are all scored, without a beam."""
_EXCLUDE_BY_OVERFETCH_UP_TO = 1_000
"""Longest list of excluded labels that a beam handles by finding more labels and dropping those; for longer lists the
leaves are emptied."""
_LARGEST_LOG_P = 1e30


class TreeRanker(Ranker):
    """Rank by `s = f + λ·log p_n(y|x) + μ·log π`, λ >= 0, f = u·v/T + b + Σ w·r; thread-safe.

    Every query has 2,000 + 20k candidates: one half are the best labels by f + μ·log π, the other half the best by p_n.
    Recall@20 at λ = ½ against exact scores of the whole catalogue, on the 20,000 synthetic labels of
    tests/serving/core/test_tree_ranking.py, is 1.00; with candidates by f alone .94, by p_n alone .84, with 100 from
    each source .70. It stays 1.00 from λ = 0 to 2 at every μ from −1 to 2. The number of candidates was chosen on an
    adversarial model of Gowalla's 40,981 labels, where recall is .99 from λ = ¼ to 2.

    λ = 0 is answered by the index alone. λ < 0 favours labels of tiny p_n, which neither source finds (recall .21 at
    λ = −½), so `Dials` refuses it.

    Args:
        proposal: the tree, one leaf for every label of the bundle.
        hidden: int64 [R], label rows that are never answered; the searcher must not find them either.
    """

    def __init__(
        self,
        searcher: LabelSearcher,
        bundle: Bundle,
        proposal: Proposal,
        hidden: Int64 = NO_ROWS,
    ) -> None:
        super().__init__(searcher, bundle.augmentation)
        self.proposal = f"p_n(y|x), a tree of depth {proposal.depth}"
        self._exact = ExactRows(bundle)
        self._buckets_L = bundle.labels.buckets
        self._tree = proposal
        self._hidden = hidden
        # Only without hidden labels does the whole tree serve queries without a filter.
        self._trees: dict[frozenset[int] | None, Proposal] = {} if hidden.size else {None: proposal}
        # Bounds |z| so that a sum of `depth` log-sigmoids of w·z stays far inside float32.
        self._largest_z = _LARGEST_LOG_P / max(1.0, proposal.largest_step)

    def rank(self, batch: Batch) -> tuple[Float32, Int64]:
        """Rank labels; see `Ranker.rank`.

        Raises:
            InvalidRequestError: the z of a query's features is so large that log p_n would overflow.
        """
        if not batch.bias_removal_B.any() or batch.boosts_B is not None:
            return super().rank(batch)
        z_BZ = self._project(batch)
        scores_BK, rows_BK = no_results(len(z_BZ), batch.k)
        reach = min(_REACH + _REACH_PER_RESULT * batch.k, self._searcher.labels)
        for queries in _group_alike(batch, max(1, _TOGETHER // reach)):
            part = batch.subset(queries)
            scores_BK[queries], rows_BK[queries] = (
                self._rank(part, z_BZ[queries], reach) if part.bias_removal_B.any() else super().rank(part)
            )
        return scores_BK, rows_BK

    def scores(self, batch: Batch, rows_B: Sequence[Int64]) -> list[Float32]:
        """Score label rows; see `Ranker.scores`."""
        scores_B = super().scores(batch._replace(bias_removal_B=np.zeros_like(batch.bias_removal_B)), rows_B)
        if not batch.bias_removal_B.any():
            return scores_B
        z_BZ = self._project(batch)
        return [
            scores_R + weight * self._tree.log_probabilities(z_BZ[query, None], rows_R[None])[0] if weight else scores_R
            for query, (scores_R, rows_R, weight) in enumerate(zip(scores_B, rows_B, batch.bias_removal_B, strict=True))
        ]

    def all_scores(self, batch: Batch) -> Float32 | None:
        """Score every label if λ is 0, else return None; see `Ranker.all_scores`."""
        return None if batch.bias_removal_B.any() else super().all_scores(batch)

    def _rank(self, part: Batch, z_bZ: Float32, reach: int) -> tuple[Float32, Int64]:
        """Rank queries of one group with λ ≠ 0."""
        queries_bE = self._augmentation.queries(part.queries_BD, 0.0, part.popularity_B, part.priors_BP)
        first = part.filters[0]
        if first is not None and first.allow is not None and len(first.allow) <= _WHOLE_UP_TO:
            rows_bC = np.flatnonzero(self._eligible(first))[None]
            products_bC = self._exact.rescore(queries_bE, rows_bC)
            log_p_bC = self._tree.log_probabilities(z_bZ, rows_bC)
        else:
            filters = part.filters if any(filter_ is not None for filter_ in part.filters) else None
            products_by_f, by_f = self._searcher.search(queries_bE, reach, filters)
            by_p_n, log_p_by_p_n = self._most_likely(z_bZ, reach, part.filters)
            rows_bC = np.concatenate([by_f, by_p_n], axis=1)
            # The index's own scores are reused: of a label found twice, the second place is dropped.
            rows_bC[_repeated(rows_bC)] = NO_ROW
            products_by_p_n = self._exact.rescore(queries_bE, rows_bC[:, reach:])
            products_bC = np.concatenate([products_by_f, products_by_p_n], axis=1)
            log_p_bC = np.concatenate([self._tree.log_probabilities(z_bZ, by_f), log_p_by_p_n], axis=1)
        scores_bC = products_bC / self._augmentation.temperature + part.bias_removal_B[:, None] * log_p_bC
        return top_k([scores_bC], [rows_bC], part.k)

    def _most_likely(self, z_bZ: Float32, reach: int, filters: Sequence[Filter | None]) -> tuple[Int64, Float32]:
        """Find the eligible labels of highest p_n(y|x) by a beam search.

        Returns rows int64 [b, C] and log p_n float32 [b, C], C >= reach; −1 and 0 where too few are eligible.
        """
        first = filters[0]
        if first is not None and _needs_own_tree(first):
            rows_bC, log_p_bC = self._prune_tree(self._eligible(first)).beam(z_bZ, reach)
        else:
            tree = self._find_tree(first)
            excludes = [None if filter_ is None else filter_.exclude for filter_ in filters]
            excluded = max(0 if exclude is None else len(exclude) for exclude in excludes)
            rows_bC, log_p_bC = tree.beam(z_bZ, min(reach + excluded, self._searcher.labels))
            for rows_C, exclude in zip(rows_bC, excludes, strict=True):
                if exclude is not None:
                    rows_C[np.isin(rows_C, exclude)] = NO_ROW
        log_p_bC[np.isneginf(log_p_bC)] = 0  # λ·(−inf) would be NaN; `top_k` drops these rows by their −inf product
        return rows_bC, log_p_bC

    def _find_tree(self, filter_: Filter | None) -> Proposal:
        """Get the tree of some buckets or a selection; trees of buckets are cached."""
        buckets = None if filter_ is None else filter_.buckets
        if filter_ is not None and filter_.selection is not None:
            return self._prune_tree(self._eligible(Filter(buckets=buckets, selection=filter_.selection)))
        tree = self._trees.get(buckets)
        if tree is None:
            tree = self._trees[buckets] = self._prune_tree(self._eligible(Filter(buckets=buckets)))
        return tree

    def _eligible(self, filter_: Filter) -> Bools:
        """Compute which visible labels pass a filter, bool [L]."""
        mask_L = filter_.mask(self._buckets_L)
        mask_L[self._hidden] = False
        return mask_L

    def _prune_tree(self, eligible_L: Bools) -> Proposal:
        """Empty the leaves of all other labels; p_n stays the same."""
        leaves = self._tree.leaf_labels
        return replace(self._tree, leaf_labels=np.where(eligible_L[leaves] & (leaves >= 0), leaves, np.int32(PADDING)))

    def _project(self, batch: Batch) -> Float32:
        """Project every query to z, float32 [B, Z]; z need not be finite where λ = 0."""
        with np.errstate(over="ignore", invalid="ignore"):
            z_BZ = self._tree.project(batch.inputs)
            fits_B = (batch.bias_removal_B == 0) | (np.abs(z_BZ) <= self._largest_z).all(axis=1)
        if not fits_B.all():
            raise InvalidRequestError(
                "expected features that the tree p_n(y|x) can place, received numbers or weights that overflow in it",
                field=f"queries.{int(fits_B.argmin())}.features",
            )
        return z_BZ


def _group_alike(batch: Batch, largest: int) -> list[Int64]:
    """Group queries that one beam can serve, int64.

    A group has the same buckets and selection, and about the same number of excluded labels; queries with λ = 0 form
    their own groups.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for query, (bias_removal, filter_) in enumerate(zip(batch.bias_removal_B, batch.filters, strict=True)):
        key: Hashable = "λ = 0"
        if bias_removal != 0:
            key = None
            if filter_ is not None:
                excluded = _count_excluded(filter_).bit_length()
                key = query if _needs_own_tree(filter_) else (filter_.buckets, filter_.selection, excluded)
        groups[key].append(query)
    return [
        np.array(queries[start : start + largest])
        for queries in groups.values()
        for start in range(0, len(queries), largest)
    ]


def _needs_own_tree(filter_: Filter) -> bool:
    """Return whether a filter needs a tree of its own: with `allow`, or many excluded labels."""
    return filter_.allow is not None or _count_excluded(filter_) > _EXCLUDE_BY_OVERFETCH_UP_TO


def _count_excluded(filter_: Filter) -> int:
    return 0 if filter_.exclude is None else len(filter_.exclude)


def _repeated(rows_bC: Int64) -> Bools:
    """Find repeated rows among each query's candidates, bool [b, C]."""
    order_bC = np.argsort(rows_bC, axis=1, kind="stable")
    sorted_bC = np.take_along_axis(rows_bC, order_bC, axis=1)
    repeated_bC: Bools = np.zeros(rows_bC.shape, np.bool_)
    np.put_along_axis(repeated_bC, order_bC[:, 1:], sorted_bC[:, 1:] == sorted_bC[:, :-1], axis=1)
    return repeated_bC
