"""Rank with the term of co-occurrence, exactly, for any λ, μ, ω and β [METHODS §11].

As W ≥ 0, the best labels with the term are among the best without it and the labels with c > 0. So the lists of the
towers and the labels of c are scored together.

Legend: `N` rows of a task, `B` a block of them, `L` labels, `D` dimensions, `K` list length, `G` settings without ω,
`S` settings, `n` candidates of a block, `C` most candidates of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Bools, Float32, Int8, Int32, Int64
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.sets import is_among
from longtail.trainer.data.past import Past, Rows
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.label_side import LabelSide, LogProposal
from longtail.trainer.evaluation.selection import best, padded

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

_QUERIES = 256
"""Rows whose candidates are scored at a time."""
_GATHERED = 1 << 17
"""Candidates whose embeddings are gathered at a time: 32 MiB with 64 dimensions."""
_WHOLE = 1 << 26
"""Scores of all labels that are kept for a search over many terms, at most: 256 MiB."""


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
        self._labels, self._before = pairs.labels[counted], np.append(0, np.cumsum(counted))

    def last(self, rows_B: Rows, most: int) -> tuple[Int32, Int64]:
        """Return the last entries of every row, oldest first, int32 [n], and where each row begins, int64 [B + 1]."""
        starts_B, ends_B = (self._before[ends_B] for ends_B in self._past.slices(rows_B))
        starts_B = np.maximum(starts_B, ends_B - most)
        begins = np.append(0, np.cumsum(ends_B - starts_B))
        at_n = np.arange(begins[-1]) + np.repeat(starts_B - begins[:-1], ends_B - starts_B)
        return self._labels[at_n], begins

    def padded(self, rows_B: Rows, most: int) -> Int32:
        """Return the same as int32 [B, most], at the end of each row; −1 before."""
        labels_n, begins = self.last(rows_B, most)
        counts_B = np.diff(begins)
        rows_BR = np.full((len(rows_B), most), -1, np.int32)
        rows_BR[np.arange(most) >= most - counts_B[:, None]] = labels_n
        return rows_BR


class TermOf:
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
        c_BL = (read_BL @ self._weights_LL).tocsr()
        c_BL.sort_indices()
        return c_BL


class Candidates(NamedTuple):
    """Labels of a block of rows with the parts of their scores, each [n]; row-major, rows and labels ascending."""

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


@dataclass(frozen=True)
class TowerLists:
    """The towers' exact lists at settings of λ, μ and β, to which any term can be added.

    Attributes:
        vectors_ND: u of every row, float32.
        seen: histories whose labels are left out; None leaves out nothing.
        settings: of the lists, at ω = 0.
        top_GNK: label rows, best first, int32; −1 where a list ends early.
        unknown_N: rows of which the towers know nothing, whose score is log π + ω·c; None: no row is one.
    """

    rows_N: Rows
    vectors_ND: Float32
    label_side: LabelSide
    seen: Past | None
    settings: Sequence[Setting]
    top_GNK: Int32
    log_proposal: LogProposal | None = None
    unknown_N: Bools | None = None

    def among(self, kept_N: Bools) -> TowerLists:
        """Return the lists of some rows, bool [N]."""
        return replace(
            self, rows_N=self.rows_N[kept_N], vectors_ND=self.vectors_ND[kept_N], top_GNK=self.top_GNK[:, kept_N],
            unknown_N=None if self.unknown_N is None else self.unknown_N[kept_N],
        )  # fmt: skip

    def at(self, settings: Sequence[Setting], term: TermOf | None) -> Int32:
        """Return the exact lists at any λ, μ and β of `settings` and any ω, int32 [S, N, K]."""
        if term is not None and any(setting.cooccurrence for setting in settings):
            return self.with_term(term, settings)
        return self.top_GNK[[self.settings.index(setting.of_towers) for setting in settings]]

    def with_term(self, term: TermOf, settings: Sequence[Setting], k: int | None = None) -> Int32:
        """Compute the exact lists of any λ, μ and β of `settings`, and any ω ≥ 0, int32 [S, N, k]."""
        length = self.top_GNK.shape[2] if k is None else k
        top_SNK = np.full((len(settings), len(self.rows_N), length), -1, np.int32)
        place_of = {setting: place for place, setting in enumerate(self.settings)}
        order = sorted(range(len(settings)), key=lambda at: settings[at].of_towers)
        for block in self._blocks():
            chosen = self._with_support(block, term)
            for towers, same in groupby(order, key=lambda at: settings[at].of_towers):
                top_BK = self.top_GNK[place_of[towers], block]
                add = self._adder(block, top_BK, chosen, towers, term.settings.without_towers)
                for at in same:
                    top_SNK[at, block] = add(settings[at].cooccurrence, length)
        return top_SNK

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, len(self.rows_N), _QUERIES):
            yield slice(start, min(start + _QUERIES, len(self.rows_N)))

    def _with_support(self, block: slice, term: TermOf) -> tuple[Candidates, Float32]:
        """Return the labels with c > 0 that may be ranked, and c, float32 [n]."""
        c_BL, rows_B = term(self.rows_N[block]), self.rows_N[block]
        row_n = np.repeat(np.arange(len(rows_B)), np.diff(c_BL.indptr))
        label_n, c_n = c_BL.indices.astype(np.int64), c_BL.data
        ranked_n = c_n > 0
        if self.seen is not None:
            seen_m2 = self.seen.seen(rows_B)
            labels = c_BL.shape[1]
            ranked_n &= ~is_among(row_n * labels + label_n, np.sort(seen_m2[:, 0] * labels + seen_m2[:, 1]))
        return self._candidates(block, row_n[ranked_n], label_n[ranked_n]), c_n[ranked_n]

    def _candidates(self, block: slice, row_n: Int64, label_n: Int64) -> Candidates:
        side, vectors_BD = self.label_side, self.vectors_ND[block]
        if self._products is not None:
            taste_n = self._products[block][row_n, label_n]
        else:
            taste_n = np.empty(len(row_n), np.float32)
            for start in range(0, len(row_n), _GATHERED):
                part = slice(start, start + _GATHERED)
                taste_n[part] = np.einsum("nd,nd->n", vectors_BD[row_n[part]], side.embeddings[label_n[part]])
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
        return Candidates(row_n, label_n, taste_n, noise_n, prior_n, side.buckets[label_n])

    @cached_property
    def _products(self) -> Float32 | None:
        """Compute u·v of all labels, float32 [N, L]; None if there are too many."""
        if len(self.rows_N) * len(self.label_side.counts) > _WHOLE:
            return None
        products_NL: Float32 = self.vectors_ND @ self.label_side.embeddings.T
        return products_NL

    def _adder(
        self, block: slice, top_BK: Int32, support: tuple[Candidates, Float32], towers: Setting,
        without_towers: Callable[[float], float],
    ) -> Callable[[float, int], Int32]:  # fmt: skip
        """Return a function from ω and a length to the lists of a block at one λ, μ and β, int32 [B, k]."""
        (chosen, c_n), labels, rows = support, len(self.label_side.counts), len(top_BK)
        key_m = (np.arange(rows)[:, None] * labels + top_BK)[top_BK >= 0]
        key_m = key_m[~is_among(key_m, chosen.row_n * labels + chosen.label_n)]
        others = self._candidates(block, key_m // labels, key_m % labels)
        row_n, order_n = _by_row(np.concatenate([chosen.row_n, others.row_n]))
        label_BC = padded(row_n, np.concatenate([chosen.label_n, others.label_n])[order_n], rows, 0)
        score_n = np.concatenate([chosen.scores(towers), others.scores(towers)])[order_n]
        score_BC = padded(row_n, score_n, rows, -np.inf)
        c_BC = padded(row_n, np.append(c_n, np.zeros(len(others.row_n), np.float32))[order_n], rows, 0.0)

        unknown_B1 = np.zeros((rows, 1), np.bool_) if self.unknown_N is None else self.unknown_N[block][:, None]

        def lists(weight: float, length: int) -> Int32:
            weight_B1 = np.where(unknown_B1, np.float32(without_towers(weight)), np.float32(weight))
            return best(score_BC + weight_B1 * c_BC, label_BC, length)

        return lists


def _by_row(row_n: Int64) -> tuple[Int64, Int64]:
    order_n = np.argsort(row_n, kind="stable")
    return row_n[order_n], order_n
