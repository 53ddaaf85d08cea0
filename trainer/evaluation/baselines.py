"""Baselines of a model: popularity, shares of attributes, item-kNN, RP3beta, EASE, Turbo-CF, iALS by `implicit`.

Baselines learn from the model's own training pairs. They describe a query by the pairs that its history would hold: the
pairs known before the held-out ones, or before each of them (`evaluation.history`). Item-kNN, RP3beta, EASE and
Turbo-CF weigh these by age, as validation pairs choose. A request without history gets the most popular labels, like in
a service. Equal scores are ranked by popularity.

Legend: `Q` queries, `L` labels, `N` rows of a task, `B` a block of them, `K` list length, `F` factors, `H` entries of
histories, `V` values of a label column.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
from scipy.linalg import lapack  # type: ignore[import-untyped]
from scipy.sparse import csr_matrix, diags, issparse, vstack  # type: ignore[import-untyped]
from threadpoolctl import threadpool_limits

from longtail.bundle.arrays import Float32, Float64, Int32, Int64
from longtail.extras import pip_install
from longtail.trainer.config import Recipe
from longtail.trainer.data.columns import read_strings
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs, occurrences
from longtail.trainer.data.past import Past, Rows
from longtail.trainer.evaluation.grid_ranker import best
from longtail.trainer.evaluation.ranking import compute_block_size
from longtail.trainer.evaluation.task import Task

Settings = dict[str, Any]
"""Parameters of a baseline by name: numbers, and the name of a label column."""

_FACTORS, _ITERATIONS = 64, 15
_AT_ONCE, _ROWS = 4_000_000, 4096
"""Most label candidates, and most rows, that are compared with histories at a time."""
_FIRST_LOOK, _FURTHER = 4, 8
"""Candidates of a list in multiples of K: in the first round, then a factor per round for lists not yet full."""
_MOST_PRODUCTS = 5e9
"""Co-occurrences Σ n² over queries of n pairs beyond which item-kNN, RP3beta and Turbo-CF take minutes."""
_QUICK_LABELS, _MOST_LABELS = 20_000, 50_000
"""Labels beyond which EASE takes minutes, and beyond which its matrix of float32 is larger than 10 GB."""
_ONE_THREAD = 30_000
"""Labels beyond which EASE's matrix is inverted by one thread."""
_AT_A_TIME = 1000
"""Labels whose similarities are computed at a time."""
_MOST_UPDATES = 5e11
"""Multiplications of an iALS fit beyond which it takes minutes."""


@dataclass(frozen=True)
class Interactions:
    """Interactions from which a baseline learns.

    Attributes:
        past: histories that describe the rows of a task.
        ordered: whether the pairs of a query are in time order (`Dataset.ordered`).
        columns: `read_categories` the labels.
        prior_L: π* of the recipe's prior, float64; None with kind `count`.
    """

    train: Pairs
    past: Past
    queries: int
    labels: int
    seed: int
    ordered: bool
    columns: Mapping[str, Int64] = field(default_factory=dict)
    prior_L: Float64 | None = None

    @cached_property
    def popularity(self) -> Float64:
        """Sum the weights of every label's training pairs, float64 [L]."""
        return _count_pairs(self.train.labels, self.train.weights, self.labels)

    @cached_property
    def pairs_of_training(self) -> csr_matrix:
        """Return the weighted training pairs, float32 [Q, L]."""
        pairs = self.train
        weights = np.ones(len(pairs), np.float32) if pairs.weights is None else pairs.weights
        return csr_matrix((weights, (pairs.queries, pairs.labels)), shape=(self.queries, self.labels))

    def histories(self, rows_B: Rows, last: int = 0, decay: float = 1) -> csr_matrix:
        """Return the weighted pairs of some histories, float32 [B, L]; repeats of a label are summed.

        Args:
            last: number of a history's newest pairs to read; 0 reads all.
            decay: γ: the weight of a history's j-th newest pair is multiplied by γ^j, where j begins at 0.
        """
        pairs, (starts_B, ends_B) = self.past.pairs, self.past.slices(rows_B)
        lengths_B = np.minimum(ends_B - starts_B, last) if last else ends_B - starts_B
        starts_B = np.append(0, np.cumsum(lengths_B))
        ages_H = np.repeat(starts_B[1:], lengths_B) - 1 - np.arange(starts_B[-1])
        pairs_H = np.repeat(ends_B, lengths_B) - 1 - ages_H
        weights_H = decay**ages_H
        if pairs.weights is not None:
            weights_H = weights_H * pairs.weights[pairs_H]
        histories_BL = csr_matrix(
            (weights_H.astype(np.float32), pairs.labels[pairs_H], starts_B), shape=(len(rows_B), self.labels)
        )
        histories_BL.sum_duplicates()
        return histories_BL


Scores = Callable[[Int32], Float32]
"""Scores of every label for rows of a task, int32 [B]; float32 [B, L]."""


@dataclass(frozen=True)
class SameForAll:
    """Scores that are the same for every row, float32 [L]."""

    scores_L: Float32

    def __call__(self, rows_B: Int32) -> Float32:
        """Return the same scores for every row, float32 [B, L]."""
        return np.tile(self.scores_L, (len(rows_B), 1))


@dataclass(frozen=True)
class FromHistory:
    """Score by history times label weights, float32 [L, L], sparse or dense.

    `last` and `decay` are as in `Interactions.histories`.
    """

    data: Interactions
    weights_LL: csr_matrix | Float32
    last: int
    decay: float

    def read(self, reading: Settings) -> FromHistory:
        """Change `last` and `decay` without another fit."""
        return replace(self, last=int(reading["last"]), decay=reading["decay"])

    def __call__(self, rows_B: Int32) -> Float32:
        """Return the scores of query rows, float32 [B, L]."""
        product_BL = self.data.histories(rows_B, self.last, self.decay) @ self.weights_LL
        scores_BL: Float32 = product_BL.toarray() if issparse(product_BL) else product_BL
        return scores_BL


def popularity(data: Interactions, settings: Settings) -> Scores:  # noqa: ARG001
    """Score labels by their weighted training pairs."""
    return SameForAll(data.popularity.astype(np.float32))


def recent_popularity(data: Interactions, settings: Settings) -> SameForAll:
    """Score labels by popularity in the latest `share` of pairs."""
    times = data.train.times
    if times is None:
        raise ValueError("recent popularity: expected training pairs with times, received none")
    latest = max(1, round(settings["share"] * len(times)))
    oldest = np.partition(times, len(times) - latest)[len(times) - latest]
    latest_N = times > oldest
    # Many pairs may have the time `oldest`: the first ones fill the share exactly.
    latest_N[np.flatnonzero(times == oldest)[: latest - int(latest_N.sum())]] = True
    weights = data.train.weights
    counts = _count_pairs(data.train.labels[latest_N], None if weights is None else weights[latest_N], data.labels)
    return SameForAll(counts.astype(np.float32))


def attribute_share(data: Interactions, settings: Settings) -> Scores:
    """Score labels by the query's share of their value, times popularity within.

    (n_v + a·s_v) / (n + a) · π_y / Σ π of v: n_v of the query's n pairs, and the share s_v of all training pairs, have
    the value v of `column`; a is `smoothing`. π is popularity among the latest `share` of the pairs, or π* of the
    recipe's prior if `share` is 0.
    """
    value_L = data.columns[settings["column"] or next(iter(data.columns))]
    values, a = int(value_L.max()) + 1, settings["smoothing"]
    prior_L, share = data.prior_L, settings["share"]
    if prior_L is None or share == 1:
        prior_L = data.popularity
    elif share:
        prior_L = recent_popularity(data, {"share": share}).scores_L.astype(np.float64)
    within_L = prior_L / np.maximum(np.bincount(value_L, prior_L, values), 1e-300)[value_L]
    share_V = np.bincount(value_L, data.popularity, values) / data.popularity.sum()
    values_LV = csr_matrix((np.ones(data.labels, np.float32), (np.arange(data.labels), value_L)))

    def scores(rows_B: Int32) -> Float32:
        counts_BV = (data.histories(rows_B) @ values_LV).toarray()
        shares_BV = (counts_BV + a * share_V) / (counts_BV.sum(axis=1, keepdims=True) + a)
        scores_BL: Float32 = (shares_BV[:, value_L] * within_L).astype(np.float32)
        return scores_BL

    return scores


def _attribute_grid(data: Interactions) -> tuple[Settings, ...]:
    shares = [1.0, *((0.25, 0.0625) if data.train.times is not None else ()), *([] if data.prior_L is None else [0.0])]
    return tuple(
        {"column": column, "smoothing": smoothing, "share": share}
        for column in data.columns for smoothing in (1, 5, 25) for share in shares
    )  # fmt: skip


def read_categories(recipe: Recipe, dataset: Dataset) -> dict[str, Int64]:
    """Number the values of labels' id columns, int64 [L] by feature."""
    source = dataset.label_features(recipe.data.label_id)
    return {
        feature.name: read_strings(feature, source).dictionary_encode("encode").indices.to_numpy().astype(np.int64)
        for feature in recipe.label.features
        if feature.kind == "id" and feature.name != recipe.data.label_id
    }


def item_knn(data: Interactions, settings: Settings) -> FromHistory:
    """Sum the similarities of the nearest labels in the history.

    Similarity is x·y / (|x| |y| + `shrink`), a cosine if `shrink` is 0, after queries are scaled to unit length
    [Deshpande and Karypis 2004, §4; Ferrari Dacrema et al. 2019, §3.1].
    """
    length_Q = _norms(data.pairs_of_training, axis=1)
    scaled_QL = (diags(1 / np.maximum(length_Q, 1e-12)) @ data.pairs_of_training).tocsr()
    norm_L = _norms(scaled_QL, axis=0)
    return _by_nearest(
        data, scaled_QL, settings, lambda label_n, near_n: norm_L[label_n] * norm_L[near_n] + settings["shrink"]
    )


def _norms(matrix: csr_matrix, axis: int) -> Float64:
    lengths: Float64 = np.sqrt(np.asarray(matrix.power(2).sum(axis=axis), np.float64).ravel())
    return lengths


def rp3beta(data: Interactions, settings: Settings) -> FromHistory:
    """Walk from a known label over a query to a label [Paudel et al. 2016, §4].

    Each step's probability is taken to the power `alpha`, and the label's degree^`beta` divides it. Only a label's
    `neighbours` nearest count.
    """
    pairs_QL, alpha = data.pairs_of_training, settings["alpha"]
    degree_L, degree_Q = (np.asarray(pairs_QL.sum(axis=axis)).ravel() for axis in (0, 1))
    steps_QL = diags(np.maximum(degree_Q, 1e-12) ** (-alpha / 2)) @ pairs_QL.power(alpha)
    return _by_nearest(
        data, steps_QL.tocsr(), settings,
        lambda label_n, near_n: degree_L[near_n] ** alpha * degree_L[label_n] ** settings["beta"],
    )  # fmt: skip


def turbo_cf(data: Interactions, settings: Settings) -> FromHistory:
    """Filter a history by P^`power`, elementwise, where P = R̃ᵀR̃ [Park et al. 2024, linear filter].

    R̃ = D_Q^−`alpha` R D_L^(`alpha` − 1), with degrees D. Only a label's `neighbours` nearest count.
    """
    pairs_QL, alpha = data.pairs_of_training, settings["alpha"]
    degree_L, degree_Q = (np.asarray(pairs_QL.sum(axis=axis)).ravel() for axis in (0, 1))
    smoothed_QL = diags(np.maximum(degree_Q, 1e-12) ** -alpha) @ pairs_QL
    return _by_nearest(
        data, smoothed_QL.tocsr(), settings,
        lambda label_n, near_n: (degree_L[label_n] * degree_L[near_n]) ** (1 - alpha), power=settings["power"],
    )  # fmt: skip


def _by_nearest(
    data: Interactions, columns_QL: csr_matrix, settings: Settings, divisor: Callable[[Int32, Int32], Float64],
    power: float = 1,
) -> FromHistory:  # fmt: skip
    """Score labels by Σ (x·y / divisor)^power over their nearest labels in the history.

    `columns_QL` has x or y of every label; `divisor` takes n labels and their n neighbours, both int32 [n].
    """
    most, columns_LQ, nearest = int(settings["neighbours"]), columns_QL.T.tocsr(), []
    for start in range(0, data.labels, _AT_A_TIME):
        products = (columns_LQ[start : start + _AT_A_TIME] @ columns_QL).tocoo()
        label_n, near_n = products.row + np.int32(start), products.col
        # A label is no neighbour of itself: that would recommend what was chosen.
        values_n = np.where(label_n == near_n, 0, (products.data / divisor(label_n, near_n)) ** power)
        similar = csr_matrix((values_n, (products.row, near_n)), products.shape, dtype=np.float32)
        similar.eliminate_zeros()
        for row in np.flatnonzero(np.diff(similar.indptr) > most):
            values = similar.data[similar.indptr[row] : similar.indptr[row + 1]]
            values[np.argpartition(-values, most)[most:]] = 0
        similar.eliminate_zeros()
        nearest.append(similar)
    return FromHistory(data, vstack(nearest).T.tocsr(), int(settings["last"]), settings["decay"])


def ease(data: Interactions, settings: Settings) -> FromHistory:
    """Regress each label on the others: weights −P / diag P, P = (XᵀX + `l2`·I)⁻¹ [Steck 2019, eq. 8].

    Raises:
        ValueError: the catalogue is too large, or `l2` too small for float32.
    """
    labels, pairs_QL = data.labels, data.pairs_of_training
    if labels > _MOST_LABELS:
        raise ValueError(
            f"EASE is not allowed with {labels:,} labels, whose matrix it inverts; use at most {_MOST_LABELS:,}"
        )
    inverse_LL = np.empty((labels, labels), np.float32, order="F")
    for start in range(0, labels, _AT_A_TIME):
        part = slice(start, start + _AT_A_TIME)
        inverse_LL[:, part] = (pairs_QL.T @ pairs_QL[:, part]).toarray()
    inverse_LL[np.diag_indices(labels)] += settings["l2"]
    # Both work in place, on the lower triangle. OpenBLAS' threads end the process from some 33,000 rows on.
    with _single_thread() if labels > _ONE_THREAD else nullcontext():
        inverse_LL, failed = lapack.spotrf(inverse_LL, lower=1, clean=0, overwrite_a=1)
        if failed:
            raise ValueError(f"EASE: l2 = {settings['l2']:g} is too small for float32; use a larger one")
        inverse_LL, _ = lapack.spotri(inverse_LL, lower=1, overwrite_c=1)
    weights_LL = inverse_LL.T  # rows lie together, and the upper triangle is filled
    for start in range(0, labels, _AT_A_TIME):
        end = min(start + _AT_A_TIME, labels)
        square = weights_LL[start:end, start:end]
        square += np.triu(square, 1).T - np.tril(square, -1)
        weights_LL[end:, start:end] = weights_LL[start:end, end:].T
    # A copy, because the division changes the diagonal while it is read.
    weights_LL /= -weights_LL.diagonal().copy()
    np.fill_diagonal(weights_LL, 0)
    return FromHistory(data, weights_LL, int(settings["last"]), settings["decay"])


def ials(data: Interactions, settings: Settings) -> Scores:
    """Implicit ALS (Hu, Koren and Volinsky 2008): a pair weighs `confidence`, every other cell 1.

    Factors of every query, new or in training, are solved from its known pairs.
    """
    from implicit.als import AlternatingLeastSquares

    with _single_thread():
        model = AlternatingLeastSquares(
            factors=_FACTORS, iterations=_ITERATIONS, alpha=settings["confidence"],
            regularization=settings["regularization"], random_state=data.seed, use_gpu=False,
        )  # fmt: skip
        model.fit(data.pairs_of_training, show_progress=False)

    def scores(rows_B: Int32) -> Float32:
        with _single_thread():
            factors_BF = model.recalculate_user(rows_B, data.histories(rows_B))
        scores_BL: Float32 = factors_BF @ model.item_factors.T
        return scores_BL

    return scores


READINGS: tuple[Settings, ...] = tuple(
    {"last": last, "decay": decay}
    for last, decays in {
        0: (1,), 50: (1, 0.9), 20: (1, 0.9, 0.8), 10: (1, 0.9, 0.8, 0.6), 5: (1, 0.9, 0.8, 0.6)
    }.items()
    for decay in decays
)  # fmt: skip
"""Readings of histories to choose from; none reads further than to weights of some .02."""
FULL_READING = READINGS[0]
"""Reading that counts all pairs of a history alike."""


@dataclass(frozen=True)
class BaselineMethod:
    """Describe a baseline: its fit, settings, and grid for validation pairs.

    Attributes:
        grid_of: makes a grid that depends on the data, in place of `grid`.
        tuned: whether `fit` tries the grid on valid; `benchmarks.baselines` tries every grid.
    """

    fit: Callable[[Interactions, Settings], Scores]
    settings: Settings
    grid: tuple[Settings, ...] = ()
    tuned: bool = False
    grid_of: Callable[[Interactions], tuple[Settings, ...]] | None = None

    def settings_to_try(self, data: Interactions) -> tuple[Settings, ...]:
        """Return the grid for some data."""
        return self.grid if self.grid_of is None else self.grid_of(data)

    def reads(self, data: Interactions) -> bool:
        """Return whether the baseline weighs pairs by age."""
        return data.ordered and "last" in self.settings


BASELINES: dict[str, BaselineMethod] = {
    "popularity": BaselineMethod(popularity, {}),
    "recent popularity": BaselineMethod(
        recent_popularity, {"share": 0.1}, tuple({"share": 0.5**halvings} for halvings in range(1, 9)), True
    ),
    "attribute share": BaselineMethod(
        attribute_share, {"column": None, "smoothing": 5, "share": 1}, tuned=True, grid_of=_attribute_grid
    ),
    "item-kNN": BaselineMethod(
        item_knn,
        {"neighbours": 200, "shrink": 1} | FULL_READING,
        tuple({"neighbours": n, "shrink": shrink} for n in (50, 200, 500) for shrink in (0, 0.3, 1, 3, 10)),
    ),
    "RP3beta": BaselineMethod(
        rp3beta,
        {"neighbours": 200, "alpha": 0.7, "beta": 0.35} | FULL_READING,
        tuple(
            {"neighbours": 200, "alpha": a, "beta": b} for a in (0.4, 0.7, 1, 1.3) for b in (0.05, 0.2, 0.35, 0.5, 0.65)
        ),
    ),
    "EASE": BaselineMethod(ease, {"l2": 200} | FULL_READING, tuple({"l2": l2} for l2 in (20, 80, 200, 500, 1500))),
    "Turbo-CF": BaselineMethod(
        turbo_cf,
        {"neighbours": 2000, "alpha": 0.6, "power": 0.7} | FULL_READING,
        tuple({"alpha": alpha, "power": power} for alpha in (0.4, 0.5, 0.6, 0.7) for power in (0.5, 0.7, 1, 1.4)),
    ),
    "iALS": BaselineMethod(
        ials,
        {"confidence": 5, "regularization": 1},
        tuple({"confidence": c, "regularization": c * ratio} for c in (1, 5, 20, 60) for ratio in (0.2, 1, 5)),
    ),
}
"""Baselines by the names of `evaluation.baselines`."""


def format_settings(settings: Settings) -> str:
    """Format settings: `l2 200, last all, decay 1`."""
    words = {("last", 0): "all", ("share", 0): "of the prior", ("column", None): "the first"}
    return ", ".join(
        f"{key} {words.get((key, value)) or (value if isinstance(value, str) else f'{value:g}')}"
        for key, value in settings.items()
    )


def skip_reason(name: str, data: Interactions) -> str | None:
    """Return why a baseline is not run on these data; None if it runs."""
    if name == "recent popularity" and data.train.times is None:
        return "the pairs have no times"
    if name == "attribute share" and not data.columns:
        return "the labels have no column of kind id in the recipe"
    if name in ("item-kNN", "RP3beta", "Turbo-CF"):
        products = float((data.train.per_query().astype(np.float64) ** 2).sum())
        if products > _MOST_PRODUCTS:
            return (
                f"{products:.1e} pairs of labels that occur together would take many minutes "
                f"(at most {_MOST_PRODUCTS:.0e})"
            )
    if name == "EASE" and data.labels > _QUICK_LABELS:
        return f"to invert a matrix of {data.labels:,}² would take many minutes (at most {_QUICK_LABELS:,} labels)"
    if name == "iALS":
        if find_spec("implicit") is None:
            return f"`implicit` is not installed: {pip_install('train')}"
        cells = 16 * _FACTORS * len(data.train) + (data.queries + data.labels) * _FACTORS**2
        if _ITERATIONS * cells > _MOST_UPDATES:
            return f"{_ITERATIONS * cells:.1e} multiplications would take many minutes (at most {_MOST_UPDATES:.0e})"
    return None


def top_labels(task: Task, data: Interactions, scores: Scores) -> Int32:
    """Compute a baseline's lists, int32 [N, K]; −1 if no unseen label is left.

    A row without history gets the most popular labels.
    """
    popular_L = np.argsort(-data.popularity, kind="stable")
    newcomer_N = task.past.lengths(task.rows_N) == 0
    if isinstance(scores, SameForAll):
        # Stable, so that equal scores are in the order of popularity.
        ranked_L = popular_L[np.argsort(-scores.scores_L[popular_L], kind="stable")]
        top_NK = _select_unseen(task, ranked_L)
        if newcomer_N.any():
            top_NK[newcomer_N] = _select_unseen(task, popular_L)[newcomer_N]
        return top_NK
    top_NK, block = np.empty((len(task.rows_N), task.k), np.int32), compute_block_size(data.labels, matrices=2)
    rank_L, negative_L = np.argsort(popular_L), -np.arange(1, data.labels + 1, dtype=np.float32)
    for start in range(0, len(task.rows_N), block):
        rows_B = task.rows_N[start : start + block]
        scores_BL = np.take(scores(rows_B), popular_L, axis=1)
        scores_BL[newcomer_N[start : start + block]] = data.popularity[popular_L]
        if scores_BL.min() >= 0:
            # Most labels may score 0, and `best` takes ten times as long with so many ties.
            np.copyto(scores_BL, negative_L, where=scores_BL == 0)
        if task.excluded is not None:
            row_n, label_n = task.excluded.seen_labels(rows_B).T
            scores_BL[row_n, rank_L[label_n]] = -np.inf
        rank_BL = np.broadcast_to(np.arange(data.labels), scores_BL.shape)
        rank_BK = best(scores_BL, rank_BL, task.k)
        top_NK[start : start + block] = np.where(rank_BK < 0, -1, popular_L[rank_BK])
    return top_NK


def _select_unseen(task: Task, order_L: Int64) -> Int32:
    """Select each row's first K unseen labels, int32 [N, K]; −1 if none is left."""
    column_L = np.empty(len(order_L), np.int64)
    column_L[order_L] = np.arange(len(order_L))
    top_NK = np.full((len(task.rows_N), task.k), -1, np.int32)
    rows_M, width = np.arange(len(top_NK)), _FIRST_LOOK * task.k
    while len(rows_M):
        candidates_C, short = order_L[:width], []
        block = max(1, min(_AT_ONCE // len(candidates_C), _ROWS))
        for start in range(0, len(rows_M), block):
            rows_B = rows_M[start : start + block]
            unseen_BC = np.ones((len(rows_B), len(candidates_C)), np.bool_)
            if task.excluded is not None:
                row_n, label_n = task.excluded.seen_labels(task.rows_N[rows_B]).T
                near_n = column_L[label_n] < len(candidates_C)
                unseen_BC[row_n[near_n], column_L[label_n[near_n]]] = False
            rank_BC = np.cumsum(unseen_BC, axis=1) - 1
            row, column = np.nonzero(unseen_BC & (rank_BC < task.k))
            top_NK[rows_B[row], rank_BC[row, column]] = candidates_C[column]
            short.append(rows_B[rank_BC[:, -1] < task.k - 1])
        rows_M, width = np.concatenate(short) if width < len(order_L) else rows_M[:0], _FURTHER * width
    return top_NK


def _count_pairs(labels_N: Int32, weights_N: Float32 | None, labels: int) -> Float64:
    if weights_N is None:
        return occurrences(labels_N, labels).astype(np.float64)
    return np.bincount(labels_N, weights_N, minlength=labels).astype(np.float64)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Use one BLAS thread; `implicit` has its own threads."""
    with warnings.catch_warnings(), threadpool_limits(1, "blas"):
        warnings.simplefilter("ignore")
        yield
