"""Rank the whole catalogue exactly with the service's rows and queries.

A query with several requests (another context, attributes of another time) is ranked once per request; its training
labels are excluded from all of them. With a growing past a query is ranked once per held-out pair, from earlier pairs.

Rows without known features are ranked by popularity and c, like in the service.

Legend: `N` rows of a task, `S` a process's share, `B` a block of them, `L` labels, `E` augmented dimensions, `K` list
length, `G` settings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from longtail.bundle import BONUS_BUCKETS, BUCKET_NAMES, Augmentation, Buckets, CurvePoint, Feature, Proposal
from longtail.bundle.arrays import Array, Bools, Float32, Float64, Int32, Int64
from longtail.bundle.features import says_nothing
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.batches import QueryInputs
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.devices import WORLD, stack_processes
from longtail.trainer.evaluation.cooccurrence import HistoryTerm, TowerLists
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.grid_ranker import GridRanker, Values, Write
from longtail.trainer.evaluation.label_side import LabelSide, LogProposal
from longtail.trainer.evaluation.metrics import Positives
from longtail.trainer.evaluation.task import Task

EmbedQueries = Callable[[Int32], Float32]
Unknown = Callable[[Int32], Bools]
"""Finds the rows without known features, bool [B]."""
Watch = Callable[[Setting, Int32, Positives], None]
"""Receives the lists of a setting, int32 [N, K], best first, and the positives to find."""

_BLOCK_BYTES = 64 << 20
_EMBED_BLOCK = 4096


def define_buckets(config: EvaluationConfig, counts: Int64) -> Buckets:
    """Define the recipe's buckets by training counts [L]."""
    return Buckets.by_quantile(counts) if config.buckets == "quantile" else Buckets.by_count()


def create_log_proposal(proposal: Proposal | None, features: QueryInputs) -> LogProposal | None:
    """Return the tree's log p_n(y|x) of query rows; None for a model without a tree."""
    if proposal is None:
        return None
    return lambda rows_B: proposal.all_log_probabilities(proposal.project(features.query_inputs(rows_B)))


@dataclass(frozen=True)
class RankedModel:
    """Hold what ranks labels: a query tower, the labels, and optional terms.

    Attributes:
        embed_queries: embeds rows of the past, int32 [B] → float32 [B, D].
        log_proposal: log p_n(y|x) of a model with a tree; None: λ multiplies the labels' log ν.
        term: computes c, for settings with ω > 0.
        unknown: finds rows without known features, which are ranked by popularity at every λ and μ; None for no rows.
        calibrated_at: the λ where scores are log-probabilities, and so have a likelihood.
        described: labels without training pairs were no negatives, so that the likelihood leaves them out.
    """

    embed_queries: EmbedQueries
    label_side: LabelSide
    log_proposal: LogProposal | None = None
    term: HistoryTerm | None = None
    unknown: Unknown | None = None
    calibrated_at: float = 1.0
    described: bool = False


class Likelihood(NamedTuple):
    """Select the pairs and settings whose log-likelihood is computed.

    Attributes:
        positives: pairs of all rows; `excluded_L` has none of their labels.
        settings: None for all.
        excluded_L: labels outside the softmax, bool [L]; None for none.
    """

    positives: Positives
    settings: Collection[Setting] | None = None
    excluded_L: Bools | None = None


def bias_removal_curve(
    held_out: Pairs, past: Past, model: RankedModel, config: EvaluationConfig, *, seed: int,
    max_queries: int | None = None, settings: Sequence[Setting] | None = None, watch: Watch | None = None,
) -> list[CurvePoint]:  # fmt: skip
    """Compute every metric at every setting of λ, μ, ω and β.

    Args:
        held_out: pairs to find; their `request_rows` are rows of the past.
        past: histories, whose labels are neither ranked nor positives with `exclude_seen`.
        seed: seed of the bootstrap and of the choice of at most `max_queries` rows.
        settings: by default the recipe's grid of λ, at μ = ω = 0.
    """
    label_side = model.label_side
    task = Task.create(held_out, past, config, labels=len(label_side.counts), seed=seed, max_queries=max_queries)
    settings = [*map(Setting, config.bias_removal)] if settings is None else settings
    likelihood = None
    if config.log_likelihood:
        excluded_L = label_side.counts == 0 if model.described else None
        positives = task.positives if excluded_L is None else task.positives.select_labels(~excluded_L)
        likelihood = Likelihood(positives, [Setting(model.calibrated_at)], excluded_L)
    towers = list(dict.fromkeys(setting.of_towers for setting in settings))
    lists, log_p = tower_lists(task, model, towers, likelihood)
    log_p_of, facts, curve = dict(zip(towers, log_p, strict=True)), label_side.facts(config), []
    for setting, top_NK in zip(settings, lists.select_lists(settings, model.term), strict=True):
        log_p_N = log_p_of.get(setting)
        if watch is not None:
            watch(setting, top_NK, task.positives)
        metrics = task.metrics(top_NK, facts)
        if log_p_N is not None and likelihood is not None:
            metrics["log_likelihood"] = task.bootstrap.interval(log_p_N, likelihood.positives.weight_per_query)
        curve.append(setting.point(metrics))
    return curve


def tower_lists(
    task: Task, model: RankedModel, settings: Sequence[Setting], likelihood: Likelihood | None = None
) -> tuple[TowerLists, list[Float64 | None]]:
    """Rank a task's rows at settings of λ, μ and β; `rank` describes the log-likelihoods."""
    blocks = [task.rows_N[start : start + _EMBED_BLOCK] for start in range(0, len(task.rows_N), _EMBED_BLOCK)]
    # Embedded once, for the ranking and for the term of co-occurrence alike.
    vectors_ND = np.concatenate([model.embed_queries(rows_B) for rows_B in blocks])
    embedded = replace(model, embed_queries=lambda rows_B: vectors_ND[np.searchsorted(task.rows_N, rows_B)])
    top_GNK, log_p = rank(task.rows_N, embedded, task.excluded, settings, k=task.k, likelihood=likelihood)
    lists = TowerLists(
        task.rows_N, vectors_ND, model.label_side, task.excluded, settings, top_GNK, model.log_proposal
    )  # fmt: skip
    if model.unknown is not None and (unknown_N := model.unknown(task.rows_N)).any():
        top_GNK[:, unknown_N] = _popular(task.rows_N[unknown_N], model.label_side, task.excluded, settings, task.k)
        lists = replace(lists, unknown_N=unknown_N)
    return lists, log_p


def create_unknown_finder(features: Sequence[Feature], read: QueryInputs) -> Unknown:
    """Create a function that finds the rows without known features; `read` has their histories."""

    def unknown(rows_N: Int32) -> Bools:
        blocks = [rows_N[start : start + _EMBED_BLOCK] for start in range(0, len(rows_N), _EMBED_BLOCK)]
        return np.concatenate([says_nothing(features, read.query_inputs(rows_B)) for rows_B in blocks])

    return unknown


def _popular(rows_N: Int32, label_side: LabelSide, excluded: Past | None, settings: Sequence[Setting], k: int) -> Int32:
    """Rank labels by log π and bonus, int32 [G, N, K]; −1 if fewer labels are left."""
    nothing_LD = np.zeros((len(label_side.log_pi), 1), np.float32)
    by_popularity = replace(
        label_side, embeddings=nothing_LD, log_pn=label_side.log_pi, log_popularity=None, bias=None,
        augmentation=Augmentation(temperature=1.0, kappa=1.0),
    )  # fmt: skip
    model = RankedModel(lambda rows_B: nothing_LD[:1].repeat(len(rows_B), axis=0), by_popularity)
    # These labels have log π in the place of log ν, so λ = 1 ranks by it.
    of_popularity = [setting._replace(bias_removal=1.0, popularity=0.0, cooccurrence=0.0) for setting in settings]
    distinct_settings = list(dict.fromkeys(of_popularity))
    top_GNK, _ = rank(rows_N, model, excluded, distinct_settings, k=k)
    return np.asarray(top_GNK[[distinct_settings.index(setting) for setting in of_popularity]], np.int32)


def rank(
    rows_N: Int32, model: RankedModel, excluded: Past | None, settings: Sequence[Setting], *, k: int,
    likelihood: Likelihood | None = None,
) -> tuple[Int32, list[Float64 | None]]:  # fmt: skip
    """Compute the exact top-k for every setting, without the term.

    If several processes call it with the same arguments, each ranks its share of the queries, and all return all.

    Args:
        excluded: histories whose labels are not ranked, with `rows_N` among its rows; None excludes nothing.

    Returns:
        Lists, int32 [G, N, K], −1 if fewer labels are left, and for every setting the log-likelihood of each query's
        pairs, `Σ w log softmax(s)_y` over the ranked labels, float64 [N], nats; None for a setting without.
    """
    label_side, log_proposal = model.label_side, model.log_proposal
    augmentation, rows_LE = label_side.augmentation, label_side.rows()
    # With a tree the labels' only column is log π, and λ multiplies the tree's log p_n(y|x) of each query.
    column_settings = settings
    if log_proposal is not None:
        column_settings = [setting._replace(bias_removal=0.0) for setting in settings]
    zeros_BD = np.zeros((1, label_side.embeddings.shape[1]), np.float32)
    weights_GE = np.concatenate(
        [augmentation.queries(zeros_BD, setting.bias_removal, setting.popularity) for setting in column_settings]
    )
    # Without what λ = μ = 0 adds, which the values of `queries_EB` have already.
    weights_GE = weights_GE.astype(np.float64) - augmentation.queries(zeros_BD, 0.0)
    in_bucket_LX = (label_side.buckets[:, None] == [*map(BUCKET_NAMES.index, BONUS_BUCKETS)]).astype(np.float64)
    bonus_GX = [[getattr(setting, bucket) for bucket in BONUS_BUCKETS] for setting in settings]
    weights_GE = np.concatenate([weights_GE, augmentation.temperature * np.array(bonus_GX)], axis=1)
    # Only columns that some setting weighs, but at least one to sort by.
    moved = np.flatnonzero(weights_GE.any(axis=0)) if weights_GE.any() else np.array([zeros_BD.shape[1]])
    moved_rows = moved[moved < rows_LE.shape[1]]
    columns_LX = np.concatenate(
        [rows_LE[:, moved_rows], in_bucket_LX[:, moved[len(moved_rows) :] - rows_LE.shape[1]]], axis=1, dtype=np.float64
    )
    ranker = GridRanker(columns_LX, weights_GE[:, moved], k)
    rows_PE, labels = rows_LE[ranker.order], len(rows_LE)
    del rows_LE  # of millions of labels a good part of a job's memory
    block = compute_block_size(labels, matrices=1 if log_proposal is None else 4)
    passes = [range(len(settings))]
    if log_proposal is not None:  # a pass for every λ
        ends = [g for g in range(1, len(settings)) if settings[g].bias_removal != settings[g - 1].bias_removal]
        passes = [range(*bounds) for bounds in pairwise([0, *ends, len(settings)])]
    share = max(1, -(-len(rows_N) // WORLD.processes))
    shares = [rows_N[first : first + share] for first in range(0, share * WORLD.processes, share)]
    top_GSK = np.zeros((len(settings), share, k), np.int32)
    log_p_GS: list[Float64 | None] = [
        np.zeros(share)
        if likelihood is not None and (likelihood.settings is None or setting in likelihood.settings)
        else None
        for setting in settings
    ]
    for start_B in range(0, min(share, len(rows_N)), block):
        blocks = [rows_S[start_B : start_B + block] for rows_S in shares]
        rows_B, earlier = blocks[WORLD.process], sum(map(len, blocks[: WORLD.process]))
        embedded = model.embed_queries(np.concatenate(blocks))[earlier : earlier + len(rows_B)]  # by all processes
        if not len(rows_B):
            continue
        in_share, start = slice(start_B, start_B + len(rows_B)), WORLD.process * share + start_B
        queries_EB = augmentation.queries(embedded, 0.0).T
        excluded_n2 = np.zeros((0, 2), np.int64) if excluded is None else excluded.seen_labels(rows_B)
        noise_PB: Float32 | None = None
        if log_proposal is not None:
            noise_PB = (np.float32(augmentation.temperature) * log_proposal(rows_B)).T[ranker.order]
        for settings_range in passes:
            write = _writer(rows_PE, queries_EB, noise_PB, settings[settings_range[0]].bias_removal)
            values = ranker.values(len(rows_B), write, excluded_n2)
            settings_slice = slice(settings_range.start, settings_range.stop)
            top_GSK[settings_slice, in_share] = ranker.lists(values, settings_slice)
            for g in settings_range:
                if likelihood is not None and (log_p_S := log_p_GS[g]) is not None:
                    positives = likelihood.positives.between(start, start + len(rows_B))
                    excluded_L, temperature = likelihood.excluded_L, augmentation.temperature
                    log_p_S[in_share] = _log_likelihood(ranker, values, g, positives, excluded_L, temperature)
    if WORLD.processes == 1:
        return top_GSK[:, : len(rows_N)], log_p_GS

    def join_shares(values: Array) -> Array:
        return stack_processes(values).reshape(-1, *values.shape[1:])[: len(rows_N)]

    top_GNK = np.stack([join_shares(top_SK) for top_SK in top_GSK])
    return top_GNK, [None if log_p_S is None else join_shares(log_p_S) for log_p_S in log_p_GS]


def compute_block_size(labels: int, *, matrices: int = 1) -> int:
    """Return the number of queries whose scores fit into 64 MiB."""
    return int(np.clip(_BLOCK_BYTES // (4 * labels * matrices), 1, _EMBED_BLOCK))


def _writer(rows_PE: Float32, queries_EB: Float32, noise_PB: Float32 | None, bias_removal: float) -> Write:
    """Create a function that writes T · f, plus λ log p_n of a tree."""

    def write(chunk: slice, values: Float32) -> None:
        np.matmul(rows_PE[chunk], queries_EB, out=values)
        if noise_PB is not None:
            values += np.float32(bias_removal) * noise_PB[chunk]

    return write


def _log_likelihood(
    ranker: GridRanker, values: Values, g: int, positives: Positives, excluded_L: Bools | None, temperature: float
) -> Float64:
    """Compute `Σ w log softmax(s)_y` of each query, float64 [B]."""
    gain_P = ranker.gain(g)
    if excluded_L is not None:
        gain_P[excluded_L[ranker.order]] = -np.inf
    positions, queries = ranker.positions(positives.label_rows), positives.query_rows
    log_z_B = ranker.log_sum_exp(values, gain_P, temperature)
    log_p = (values.labels_PB[positions, queries] + gain_P[positions]) / temperature - log_z_B[queries]
    return np.bincount(queries, weights=positives.weights * log_p, minlength=positives.queries).astype(np.float64)
