"""The term of co-occurrence: choice on valid, and W from the log [METHODS §11].

The towers' lists of validation queries are computed once. Then every W, reading of histories, λ, μ and ω is judged by
these lists and the labels of c alone, without training anything.

Legend: `N` validation queries, `K` list length, `L` labels, `S` settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.ndimage import uniform_filter  # type: ignore[import-untyped]

from longtail.bundle import Vocabulary
from longtail.bundle.arrays import Int32
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.histories import LogPairs, Remembered, remember, to_refusals
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.neighbours import cooccurrences
from longtail.bundle.sets import distinct
from longtail.tables.pairs import read_pairs
from longtail.tables.times import UNITS
from longtail.trainer.config import CooccurrenceConfig, Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm, TowerLists
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.task import Task
from longtail.trainer.metric_registry import METRICS
from longtail.trainer.threads import map_in_threads

_QUERIES = 2_000
"""Most validation queries by which kind, power and reading are chosen."""
_BEST_CELLS = 3
"""Cells of the grid whose mean judges a W and a reading; a single cell would reward luck."""
_MARGIN = 0.01
"""Share by which another kind must be better than `mixed`, which has both memories and is less a matter of chance."""
_SCALE = 0.5
"""Standard deviation of c over labels, in the mean over queries."""
_STRUCTURES = 2
"""Kinds and powers with which every reading is tried."""
_POWERS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Powers β of a neighbour's degree that valid chooses from; larger ones favour rare labels."""
_LENGTHS, _DECAYS = (3, 5, 10, 20, 50), (0.5, 0.7, 0.8, 0.9, 1.0)
"""Numbers R of last entries of a history, and factors γ of every older entry, that valid chooses from."""
_REMEMBERED = 50

Value = Callable[[Task, Int32], float]
"""Returns the value of lists of a task, int32 [N, K]."""
Error = Callable[[Int32, Int32], float]
"""Returns the standard error of the difference of the metric between two lists, int32 [N, K] each."""


class TermChoice(NamedTuple):
    """The term that is best on valid, and the setting at which it is; ω = 0 where its gain is within chance."""

    cooccurrence: Cooccurrence
    best: Setting


def choose_term(
    recipe: Recipe, dataset: Dataset, task: Task, lists: TowerLists, entries: HistoryEntries, *,
    metric: Value, error: Error, k: int,
) -> TermChoice | None:  # fmt: skip
    """Choose W, the reading of histories, λ or μ, and ω.

    First kinds and powers are compared by two readings each. Then every reading is tried with the best two of them,
    ordered by the worse of their readings. Both steps measure a coarse grid of the dials by the recipe's metric and by
    the gain over the longest lists, both relative to the towers'. Then the whole grid is measured for the best, by the
    mean of `metric` over a cell and its neighbours. Where pairs have an order in time and popularity is that of the
    past, the cell of the best ω with the least λ and μ within one standard error is taken [Breiman et al. 1984]:
    popularity fades until the service answers, and less of it finds more of the tail.

    Args:
        lists: the towers' lists of the task at every setting of λ or μ to consider.
        metric: the recipe's metric.
        k: length of the lists that it needs.

    Returns:
        The choice; None without a W or an ω above 0.
    """
    config = recipe.cooccurrence or CooccurrenceConfig()
    few_N = np.zeros(len(task.rows_N), np.bool_)
    few_N[np.random.default_rng(recipe.seed).permutation(len(few_N))[:_QUERIES]] = True
    few, few_lists = task.select_rows(few_N), lists.select_rows(few_N)
    alone = [metric(task, top_NK) for top_NK in lists.top_GNK[:, :, :k]]
    weights = [weight for weight in config.weights if weight]
    coarse = _coarse(lists.settings, alone, weights)
    # Only custom metrics see more of a list than the ranks of what is to be found.
    by_rank = recipe.evaluation.metric.partition("@")[0] not in METRICS

    def values(top_NK: Int32) -> tuple[float, float]:
        # 1 / log2(rank + 1) of the positives found varies less by chance than hits of short lists.
        discounts_K = np.log2(np.arange(top_NK.shape[1]) + 2)
        return metric(few, top_NK[:, :k]), float((few.positives.hits(top_NK) / discounts_K).sum())

    # Relative to the towers' best, so that neither of the two measures outweighs the other.
    highest = [max(column) or 1.0 for column in zip(*map(values, few_lists.top_GNK), strict=True)]

    def worth(matrix: Cooccurrence) -> tuple[float, Cooccurrence]:
        scaled = _scale(matrix, entries, few.rows_N)
        top_SNK = few_lists.with_term(
            HistoryTerm(scaled, entries), coarse, positives=few.positives if by_rank else None
        )
        cells = sorted((np.divide(values(top_NK), highest).sum() for top_NK in top_SNK), reverse=True)
        return float(np.mean(cells[:_BEST_CELLS])) * (1 if matrix.settings.kind == "mixed" else 1 - _MARGIN), scaled

    def try_readings(
        matrices: Sequence[Cooccurrence], readings: Sequence[dict[str, Any]]
    ) -> list[tuple[float, Cooccurrence]]:
        return map_in_threads(worth, [_read(matrix, reading) for matrix in matrices for reading in readings])

    if not weights:
        return None
    readings, first = _readings(ordered=dataset.ordered)
    tried = try_readings(_structures(recipe, dataset), first)
    if not tried:
        return None
    tried.sort(key=lambda pair: -pair[0])
    structures = list({(w.settings.kind, w.settings.power): w for _, w in reversed(tried)}.values())[::-1]
    tried += try_readings(structures[:_STRUCTURES], readings)
    _, chosen = max(tried, key=itemgetter(0))
    mean = worth(_read(chosen, {"mean": not chosen.settings.mean}))
    _, chosen = max([*tried, mean], key=itemgetter(0))
    settings = [towers._replace(cooccurrence=weight) for towers, weight in product(lists.settings, weights)]
    top_SNK = lists.with_term(HistoryTerm(chosen, entries), settings, k, positives=task.positives if by_rank else None)
    judged_GW = np.array([metric(task, top_NK) for top_NK in top_SNK]).reshape(-1, len(weights))
    # Means of neighbours reward no single lucky cell; at an end of the grid its last cell counts twice.
    means_GW = uniform_filter(judged_GW, 3, mode="nearest")
    best = int(means_GW.argmax())
    towers = int(np.argmax(alone))
    if judged_GW.ravel()[best] - alone[towers] <= error(top_SNK[best], lists.top_GNK[towers, :, :k]):
        return TermChoice(chosen, lists.settings[towers])
    within = [best]
    if dataset.ordered and recipe.prior.kind == "count":
        within += [
            cell
            for cell in range(best % len(weights), len(settings), len(weights))
            if means_GW.max() - means_GW.ravel()[cell] <= error(top_SNK[cell], top_SNK[best])
        ]
    return TermChoice(chosen, min((settings[cell] for cell in within), key=_popularity))


def _popularity(setting: Setting) -> float:
    return abs(setting.bias_removal) + abs(setting.popularity)


def _coarse(settings: Sequence[Setting], values: Sequence[float], weights: Sequence[float]) -> list[Setting]:
    """Return cells for comparisons: the towers' best, and settings nearer to 0, with some ω.

    The term brings popularity of its own, so less of λ or μ is needed with it.
    """
    best = int(np.argmax(values))
    size = [_popularity(setting) for setting in settings]
    heights = [size[best] * share for share in (1, 2 / 3, 1 / 3)]
    towers = {settings[best]} | {settings[int(np.argmin(np.abs(np.array(size) - height)))] for height in heights}
    tried_weights = sorted({*weights[1::2], weights[-1]} if len(weights) > 4 else weights)
    return [setting._replace(cooccurrence=weight) for setting, weight in product(sorted(towers), tried_weights)]


def _readings(*, ordered: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all readings of a history, and two by which kinds and powers are compared."""
    if not ordered:
        unordered = [{"last": _LENGTHS[-1], "decay": 1.0, "mean": mean} for mean in (False, True)]
        return unordered, unordered
    readings = [{"last": last, "decay": decay, "mean": False} for last, decay in product(_LENGTHS, _DECAYS)]
    short = {"last": _LENGTHS[len(_LENGTHS) // 2], "decay": _DECAYS[len(_DECAYS) // 2], "mean": False}
    return readings, [short, readings[-1]]


def _read(cooccurrence: Cooccurrence, reading: dict[str, Any]) -> Cooccurrence:
    return replace(cooccurrence, settings=cooccurrence.settings.model_copy(update=reading))


def _structures(recipe: Recipe, dataset: Dataset) -> list[Cooccurrence]:
    """Make W of every kind and power from the training pairs."""
    config, matrices = recipe.cooccurrence or CooccurrenceConfig(), list[Cooccurrence]()
    for kind in config.kinds:
        # Both kinds count which label came after which.
        if kind in ("next", "mixed") and not dataset.ordered:
            continue
        powers = [0.0] if kind == "cosine" else _POWERS
        settings = [_settings(recipe, dataset, kind, power) for power in powers]
        matrices += cooccurrences(_log_pairs(dataset.train), len(dataset.label_ids), settings)
    return matrices


def _settings(recipe: Recipe, dataset: Dataset, kind: str, power: float) -> CooccurrenceSettings:
    """Return the settings of one W, before a reading is chosen."""
    config = recipe.cooccurrence or CooccurrenceConfig()
    unit, times = dataset.report.unit, dataset.train.times
    return CooccurrenceSettings.model_validate(
        {
            "default": 0.0,
            "maximum": 2 * max(1.0, *config.weights),
            "kind": kind,
            "power": power,
            "last": _LENGTHS[-1],
            "decay": 1.0,
            "until": None if unit is None or times is None or not len(times) else float(np.nanmax(times)) / UNITS[unit],
            "log": recipe.log_columns(unit),
        }
    )


def _scale(cooccurrence: Cooccurrence, entries: HistoryEntries, rows_N: Int32) -> Cooccurrence:
    """Scale W to the mean standard deviation `_SCALE` of c over labels."""
    c_NL = HistoryTerm(cooccurrence, entries)(rows_N)
    labels = c_NL.shape[1]
    mean_N, square_N = (np.asarray(power.sum(axis=1)).ravel() / labels for power in (c_NL, c_NL.power(2)))
    deviation = float(np.sqrt(np.maximum(square_N - mean_N**2, 0)).mean())
    return cooccurrence.scaled(_SCALE / deviation) if deviation > 0 else cooccurrence


def _log_pairs(pairs: Pairs) -> LogPairs:
    return LogPairs(pairs.queries, pairs.labels, pairs.weights)


def measure_term_alone(recipe: Recipe, dataset: Dataset, k: int) -> tuple[float, float]:
    """Measure recall@k of unseen validation pairs by c alone, and by popularity alone; ties are misses.

    c is `mixed`, or `walk` without an order in time, with β = .4, over the last 10 entries with γ = .8.
    """
    kind = "mixed" if dataset.ordered else "walk"
    settings = _settings(recipe, dataset, kind, 0.4).model_copy(update={"last": 10, "decay": 0.8})
    (matrix,) = cooccurrences(_log_pairs(dataset.train), len(dataset.label_ids), [settings])
    held_out, past = dataset.with_past(dataset.valid, dataset.train)
    config = recipe.evaluation.model_copy(update={"ks": [1], "metric": "recall@1"})
    task = Task.create(held_out, past, config, labels=len(dataset.label_ids), seed=recipe.seed, max_queries=_QUERIES)
    c_NL = HistoryTerm(matrix, HistoryEntries(past, recipe.history_events))(task.rows_N)
    counts_L, seen_n2 = dataset.label_counts(), np.unique(past.seen_labels(task.rows_N), axis=0)
    seen_labels = np.split(seen_n2[:, 1], np.searchsorted(seen_n2[:, 0], np.arange(1, len(task.rows_N))))
    hits = np.zeros(2)
    for row, label in zip(task.positives.query_rows.tolist(), task.positives.label_rows.tolist(), strict=True):
        others = seen_labels[row]
        c_n, label_n = (part[c_NL.indptr[row] : c_NL.indptr[row + 1]] for part in (c_NL.data, c_NL.indices))
        term = c_n[label_n == label]
        if len(term):
            hits[0] += np.count_nonzero((c_n >= term[0]) & ~np.isin(label_n, others)) <= k
        hits[1] += (
            np.count_nonzero(counts_L >= counts_L[label]) - np.count_nonzero(counts_L[others] >= counts_L[label]) <= k
        )
    by_term, by_popularity = hits / max(len(task.positives.keys), 1)
    return float(by_term), float(by_popularity)


def rebuild_term(cooccurrence: Cooccurrence, recipe: Recipe, dataset: Dataset) -> Cooccurrence:
    """Build W of the same settings from the training pairs of another data set."""
    previous = cooccurrence.settings
    until = _settings(recipe, dataset, previous.kind, previous.power).until
    settings = previous.model_copy(update={"until": until})
    (matrix,) = cooccurrences(_log_pairs(dataset.train), len(cooccurrence.rows_LN), [settings])
    return matrix.scaled(previous.scale)


def remember_queries(recipe: Recipe, dataset: Dataset, known_pairs: Pairs) -> Remembered | None:
    """Remember the last labels of every query, if the recipe says so."""
    config = recipe.cooccurrence or CooccurrenceConfig()
    reads_history = any(feature.kind == "history" for feature in recipe.query.features)
    entries = config.remember if config.remember is not None else 0 if reads_history else _REMEMBERED
    if not entries:
        return None
    pairs, ids = _with_refusals(recipe, dataset, known_pairs)
    queries = distinct(pairs.queries)
    rows_Q = np.zeros(len(ids), np.int32)
    rows_Q[queries] = np.arange(1, len(queries) + 1)
    return remember(pairs, Vocabulary(ids.take(pa.array(queries))), rows_Q, entries)


def _with_refusals(recipe: Recipe, dataset: Dataset, known_pairs: Pairs) -> tuple[LogPairs, pa.Array]:
    """Add the events of negative types to known pairs; returns them, sorted by query and time, and the queries' ids."""
    data, unit, ids = recipe.data, dataset.report.unit, dataset.query_ids
    if data.events is None or not data.events.negative:
        return LogPairs(known_pairs.queries, known_pairs.labels), ids
    sources = [source for source in (data.train, data.valid, data.test) if source is not None]
    files = [file for source in sources for file in (source if isinstance(source, list) else [source])]
    rows = read_pairs(files, recipe.log_columns(unit), lambda _: None, timed=data.timestamp is not None)
    rows = rows.filter(pc.is_in(rows["event"], value_set=pa.array(data.events.negative)))
    labels_n = pc.index_in(rows["label"], value_set=dataset.label_ids)
    rows, labels_n = rows.filter(labels_n.is_valid()), labels_n.drop_null().to_numpy()
    others = pc.unique(rows["id"].filter(pc.invert(pc.is_in(rows["id"], value_set=ids))))
    ids = pa.concat_arrays([ids, others.cast(ids.type)])
    queries_n = pc.index_in(rows["id"].cast(ids.type), value_set=ids).to_numpy()
    if known_pairs.times is None or unit is None:  # without times, a refusal is the last word
        times_N = np.repeat([0.0, 1.0], [len(known_pairs), len(rows)])
    else:
        times_N = np.concatenate([known_pairs.times / UNITS[unit], rows["time"].to_numpy()])
    queries_N = np.concatenate([known_pairs.queries, queries_n])
    order_N = np.lexsort((times_N, queries_N))
    labels_N = np.concatenate([known_pairs.labels, to_refusals(labels_n)])
    return LogPairs(queries_N[order_N], labels_N[order_N]), ids


def describe_term(settings: CooccurrenceSettings) -> str:
    """Describe a term: kind, how a history is read, and the default ω."""
    power = "" if settings.kind == "cosine" else f", β = {settings.power:g}"
    mean = ", mean" if settings.mean else ""
    read = f"last {settings.last} entries, γ = {settings.decay:g}{mean}"
    return f"{settings.kind}{power}, {settings.neighbours} neighbours, {read}, ω = {settings.default:g}"
