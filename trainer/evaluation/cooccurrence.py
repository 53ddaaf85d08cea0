"""Rank exactly with co-occurrence for any λ, μ, ω and β [METHODS §11].

W ≥ 0, so the best labels with the term are either the best without it or labels with c > 0. Only these are scored.

Legend: `N` rows of a task, `B` a block of them, `L` labels, `D` dimensions, `K` list length, `G` settings without ω,
`S` settings, `n` candidates of a block, `C` most candidates of a row, `w` labels to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Bools, Float32, Int8, Int32, Int64
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.sets import is_in
from longtail.trainer.data.past import Past, Rows
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.grid_ranker import best, padded
from longtail.trainer.evaluation.label_side import LabelSide, LogProposal
from longtail.trainer.evaluation.metrics import Positives

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

_QUERIES = 256
"""Rows whose candidates are scored at a time."""
_SLACK = np.float32(1e-4)
"""Share by which the towers' scores may differ from those of their lists, which are rounded otherwise."""


class HistoryEntries:
    """The entries of every row's history that the term reads.

    Args:
        past: histories of the rows; labels −1 are left out.
        events: types of the entries that count; None for all.
    """

    def __init__(self, past: Past, events: Sequence[int] | None = None) -> None:
        self._past, pairs = past, past.pairs
        counted = pairs.labels >= 0
        if events is not None and pairs.events is not None:
            counted &= np.isin(pairs.events, list(events))
        self._labels, self._counted = pairs.labels[counted], np.append(0, np.cumsum(counted))

    def last(self, rows_B: Rows, most: int) -> tuple[Int32, Int64]:
        """Return last entries, oldest first, int32 [n], and rows' begins, int64 [B + 1]."""
        starts_B, ends_B = (self._counted[ends_B] for ends_B in self._past.slices(rows_B))
        starts_B = np.maximum(starts_B, ends_B - most)
        begins = np.append(0, np.cumsum(ends_B - starts_B))
        i_n = np.arange(begins[-1]) + np.repeat(starts_B - begins[:-1], ends_B - starts_B)
        return self._labels[i_n], begins

    def padded(self, rows_B: Rows, most: int) -> Int32:
        """Return the entries as int32 [B, most], −1 first."""
        labels_n, begins = self.last(rows_B, most)
        counts_B = np.diff(begins)
        rows_BR = np.full((len(rows_B), most), -1, np.int32)
        rows_BR[np.arange(most) >= most - counts_B[:, None]] = labels_n
        return rows_BR


class HistoryTerm:
    """Compute c of evaluated rows from W and their histories."""

    def __init__(self, cooccurrence: Cooccurrence, entries: HistoryEntries) -> None:
        self.settings, self._entries, self._factors = cooccurrence.settings, entries, cooccurrence.factors
        self._weights_LL, self._labels = cooccurrence.matrix(), len(cooccurrence.rows_LN)

    def __call__(self, rows_B: Rows) -> csr_matrix:
        """Return c of every row, float32 [B, L]."""
        from scipy.sparse import csr_matrix  # a recipe is checked without it

        labels_n, begins = self._entries.last(rows_B, self.settings.last)
        factors = [self._factors(count) for count in range(self.settings.last + 1)]
        factors_n = np.concatenate([*(factors[count] for count in np.diff(begins).tolist()), np.empty(0, np.float32)])
        read_BL = csr_matrix((factors_n, labels_n, begins), (len(rows_B), self._labels))
        return (read_BL @ self._weights_LL).tocsr()


class ScoredLabels(NamedTuple):
    """Hold labels with the terms of their scores, [n]; rows and labels ascend."""

    row_n: Int64
    label_n: Int64
    taste_n: Float32
    """u·v/T + b."""
    noise_n: Float32
    """log ν, or log p_n(y|x) of a tree."""
    prior_n: Float32
    """log π."""
    bucket_n: Int8

    def scores(self, setting: Setting) -> Float32:
        """Compute the scores without the term, float32 [n]."""
        scores_n: Float32 = self.taste_n + np.float32(setting.bias_removal) * self.noise_n
        scores_n += np.float32(setting.popularity) * self.prior_n
        if setting.bonus:
            scores_n += np.array([setting.bonus.get(it, 0.0) for it in BUCKET_NAMES], np.float32)[self.bucket_n]
        return scores_n

    def by_row(self, rows: int) -> ScoredLabels:
        """Return the same columns by row, [B, C] each; padding scores −inf."""
        fills = {"taste_n": -np.inf}
        columns = self._asdict().items()
        return ScoredLabels(**{name: padded(self.row_n, column, rows, fills.get(name, 0)) for name, column in columns})

    def find_positives(self, positives: Positives) -> tuple[Int64, Int64]:
        """Find rows and columns of positives, int64 [w] each."""
        keys_n = self.row_n * positives.labels + self.label_n
        i_w = np.flatnonzero(is_in(keys_n, positives.keys))
        return self.row_n[i_w], i_w - np.searchsorted(self.row_n, self.row_n[i_w])


@dataclass(frozen=True)
class TowerLists:
    """Hold the towers' exact lists, to which terms can be added.

    Attributes:
        vectors_ND: u of every row, float32.
        excluded: histories whose labels are not ranked; None excludes nothing.
        settings: of the lists, at ω = 0.
        top_GNK: label rows, best first, int32; −1 where a list ends early.
        unknown_N: rows without known features, whose score is log π + ω·c; None for no rows.
    """

    rows_N: Rows
    vectors_ND: Float32
    label_side: LabelSide
    excluded: Past | None
    settings: Sequence[Setting]
    top_GNK: Int32
    log_proposal: LogProposal | None = None
    unknown_N: Bools | None = None

    def select_rows(self, mask_N: Bools) -> TowerLists:
        """Return the lists of some rows, bool [N]."""
        return replace(
            self, rows_N=self.rows_N[mask_N], vectors_ND=self.vectors_ND[mask_N], top_GNK=self.top_GNK[:, mask_N],
            unknown_N=None if self.unknown_N is None else self.unknown_N[mask_N],
        )  # fmt: skip

    def select_lists(self, settings: Sequence[Setting], term: HistoryTerm | None) -> Int32:
        """Return the exact lists at settings with any ω, int32 [S, N, K]."""
        if term is not None and any(setting.cooccurrence for setting in settings):
            return self.with_term(term, settings)
        return self.top_GNK[[self.settings.index(setting.of_towers) for setting in settings]]

    def with_term(
        self,
        term: HistoryTerm,
        settings: Sequence[Setting],
        k: int | None = None,
        *,
        positives: Positives | None = None,
    ) -> Int32:
        """Compute the exact lists at settings with any ω ≥ 0, int32 [S, N, k].

        Args:
            positives: of the rows; lists with ω > 0 then hold only these at their ranks, and −1 elsewhere.
        """
        length = self.top_GNK.shape[2] if k is None else k
        top_SNK = np.empty((len(settings), len(self.rows_N), length), np.int32)
        indices: dict[Setting, list[int]] = {}
        for i, setting in enumerate(settings):
            indices.setdefault(setting.of_towers, []).append(i)
        tops = {towers: self.top_GNK[self.settings.index(towers), :, :length] for towers in indices}
        largest = max(setting.cooccurrence for setting in settings)
        for start in range(0, len(self.rows_N), _QUERIES):
            block = slice(start, min(start + _QUERIES, len(self.rows_N)))
            top_of = {towers: top_NK[block] for towers, top_NK in tops.items()}
            candidates, c_n = self._candidates_with(block, term, top_of, largest)
            by_row, c_BC = candidates.by_row(rows := len(self.rows_N[block])), padded(candidates.row_n, c_n, rows, 0)
            sought = None
            if positives is not None:
                sought = candidates.find_positives(positives.between(block.start, block.stop))
            for towers, same in indices.items():
                score_BC = by_row.scores(towers)
                for i in same:
                    weight = settings[i].cooccurrence
                    if not weight:
                        top_SNK[i, block] = top_of[towers]
                        continue
                    scores_BC = score_BC + self._weights(block, term, weight)[:, None] * c_BC
                    if sought is None:
                        top_SNK[i, block] = best(scores_BC, by_row.label_n, length)
                    else:
                        top_SNK[i, block] = _ranked(scores_BC, by_row.label_n, *sought, length)
        return top_SNK

    def _weights(self, block: slice, term: HistoryTerm, weight: float) -> Float32:
        """Return ω of every row of a block, float32 [B]."""
        unknown_B = np.False_ if self.unknown_N is None else self.unknown_N[block]
        weights_B = np.where(unknown_B, term.settings.without_towers(weight), weight)
        return np.broadcast_to(weights_B.astype(np.float32), len(self.rows_N[block]))

    def _candidates_with(
        self, block: slice, term: HistoryTerm, tops: Mapping[Setting, Int32], largest: float
    ) -> tuple[ScoredLabels, Float32]:
        """Find all labels that ω up to `largest` can list, and c, float32 [n].

        Every label scores at least its score without the term, so the last score of the towers' list is a lower bound.
        """
        c_BL, rows_B = term(self.rows_N[block]), self.rows_N[block]
        labels, rows = c_BL.shape[1], np.arange(len(rows_B))
        row_m, label_m, ranked_m = np.repeat(rows, np.diff(c_BL.indptr)), c_BL.indices, c_BL.data > 0
        if self.excluded is not None:
            seen_n2 = self.excluded.seen_labels(rows_B)
            ranked_m &= ~is_in(row_m * labels + label_m, np.sort(seen_n2[:, 0] * labels + seen_n2[:, 1]))
        row_m, label_m, c_m = row_m[ranked_m], label_m[ranked_m], c_BL.data[ranked_m]
        # Sorted row by row, because many short sorts of int32 take a sixth of the time of one long sort of int64.
        label_BM = np.concatenate([*tops.values(), padded(row_m, label_m, len(rows), -1)], axis=1)
        label_BM.sort(axis=1)
        first_BM = label_BM >= 0
        first_BM[:, 1:] &= label_BM[:, 1:] != label_BM[:, :-1]
        row_n, label_n = np.repeat(rows, first_BM.sum(axis=1)), label_BM[first_BM].astype(np.int64)
        key_n, c_n = row_n * labels + label_n, np.zeros(len(row_n), np.float32)
        c_n[np.searchsorted(key_n, row_m * labels + label_m)] = c_m
        candidates = self._candidates(block, row_n, label_n)
        counts_B = np.bincount(candidates.row_n, minlength=len(rows_B))
        added_n = np.repeat(self._weights(block, term, largest), counts_B) * c_n
        possible_n = np.zeros(len(row_n), np.bool_)
        for towers, top_BK in tops.items():
            scores_n, last_B = candidates.scores(towers), top_BK[:, -1]
            least_B = np.full(len(rows), np.float32(-np.inf))
            full_b = np.flatnonzero(last_B >= 0)
            least_b = scores_n[np.searchsorted(key_n, full_b * labels + last_B[full_b])]
            least_B[full_b] = least_b - _SLACK * (1 + np.abs(least_b))
            possible_n |= scores_n + added_n >= np.repeat(least_B, counts_B)
        possible = {name: column[possible_n] for name, column in candidates._asdict().items()}
        return ScoredLabels(**possible), c_n[possible_n]

    def _candidates(self, block: slice, row_n: Int64, label_n: Int64) -> ScoredLabels:
        side, vectors_BD = self.label_side, self.vectors_ND[block]
        starts = np.searchsorted(row_n, np.arange(len(vectors_BD) + 1))
        parts = zip(vectors_BD, pairwise(starts.tolist()), strict=True)
        taste_n = np.concatenate([side.embeddings[label_n[start:end]] @ of_row for of_row, (start, end) in parts])
        taste_n /= np.float32(side.augmentation.temperature)
        if side.bias is not None:
            taste_n += side.bias[label_n]
        noise_n = side.log_pn[label_n]
        if self.log_proposal is not None:
            noise_n = self.log_proposal(self.rows_N[block])[row_n, label_n]  # type: ignore[arg-type]  # int32 rows
        prior_n = side.log_pi[label_n]
        if self.unknown_N is not None:
            unknown_n = self.unknown_N[block][row_n]
            taste_n = np.where(unknown_n, prior_n, taste_n)
            noise_n, prior_n = (np.where(unknown_n, np.float32(0), part_n) for part_n in (noise_n, prior_n))
        return ScoredLabels(row_n, label_n, taste_n, noise_n, prior_n, side.buckets[label_n])


def _ranked(scores_BC: Float32, label_BC: Int64, row_w: Int64, column_w: Int64, k: int) -> Int32:
    """Return lists of some candidates at their ranks, int32 [B, k]; −1 elsewhere."""
    scores_wC, score_w1 = scores_BC[row_w], scores_BC[row_w, column_w][:, None]
    earlier_wC = np.arange(scores_BC.shape[1]) < column_w[:, None]
    # Candidates ascend by label, so an earlier one wins a tie, as in `best`.
    rank_w = np.count_nonzero((scores_wC > score_w1) | ((scores_wC == score_w1) & earlier_wC), axis=1)
    listed_w = rank_w < k
    top_Bk = np.full((len(scores_BC), k), -1, np.int32)
    top_Bk[row_w[listed_w], rank_w[listed_w]] = label_BC[row_w, column_w][listed_w]
    return top_Bk
