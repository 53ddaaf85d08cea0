"""Exact top-k over the whole catalogue for settings of λ, μ and β, through the rows and queries that serve.

A query with several requests (another context, attributes of another time) is ranked once for each, with the held-out
pairs of that way as its positives and the labels that the query had in training left out of all. With a growing past a
query is ranked once for each held-out pair, from the pairs before it.

Rows of which the towers know nothing get popularity's order, and c, as the service answers them.

Legend: `N` rows of a task, `S` a process's share, `B` a block of them, `L` labels, `E` augmented dimensions, `K` list
length, `G` settings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from longtail.bundle import BONUS_BUCKETS, BUCKET_NAMES, Augmentation, Buckets, CurvePoint, Feature, Proposal
from longtail.bundle.arrays import Array, Bools, Float32, Float64, Int32, Int64
from longtail.bundle.features import says_nothing
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.batches import QueryInputs
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.devices import WORLD, stack_processes
from longtail.trainer.evaluation.cooccurrence import TermOf, TowerLists
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.grid_ranker import GridRanker, Values, Write
from longtail.trainer.evaluation.label_side import LabelSide, LogProposal
from longtail.trainer.evaluation.metrics import Positives
from longtail.trainer.evaluation.task import Task

EmbedQueries = Callable[[Int32], Float32]
Unknown = Callable[[Int32], Bools]
"""Finds the rows of which the towers know nothing, bool [B]."""
Watch = Callable[[Setting, Int32, Positives], None]
"""Receives the lists of a setting, int32 [N, K], best first, and the positives to find."""

_BLOCK_BYTES = 64 << 20
_EMBED_BLOCK = 4096


def buckets_for(config: EvaluationConfig, counts: Int64) -> Buckets:
    """Assign labels to head, torso, tail and new by training counts [L], following the recipe."""
    return Buckets.by_quantile(counts) if config.buckets == "quantile" else Buckets.by_count()


def log_proposal_of(proposal: Proposal | None, features: QueryInputs) -> LogProposal | None:
    """Return the tree's log p_n(y|x) of query rows; None for a model without a tree."""
    if proposal is None:
        return None
    return lambda rows_B: proposal.all_log_probabilities(proposal.project(features.query_inputs(rows_B)))


def bias_removal_curve(
    held_out: Pairs, past: Past, embed_queries: EmbedQueries, label_side: LabelSide, config: EvaluationConfig, *,
    seed: int, max_queries: int | None = None, settings: Sequence[Setting] | None = None,
    log_proposal: LogProposal | None = None, calibrated_at: float = 1.0, described: bool = False,
    watch: Watch | None = None, term: TermOf | None = None, unknown: Unknown | None = None,
) -> list[CurvePoint]:  # fmt: skip
    """Compute every metric at every setting of λ, μ, ω and β.

    Args:
        held_out: pairs to find; their `request_rows` are rows of the past.
        past: histories; their labels are out of each row's ranking if `exclude_seen`, and then no positives.
        embed_queries: rows of the past, int32 [B] → float32 [B, D].
        seed: of the bootstrap and of the choice of rows, `max_queries` at most.
        settings: of λ, μ and ω; by default the recipe's grid of λ, at μ = ω = 0.
        log_proposal: of a model trained against a conditional p_n; by default λ multiplies the labels' log ν.
        calibrated_at: the λ where scores are log-probabilities, at which alone their likelihood is of anything.
        described: labels without training pairs were no negatives, so that their scores have no optimum: neither they
            nor held-out pairs of them are in the likelihood.
        term: computes c; needed for settings with ω > 0, which have no likelihood.
        unknown: finds rows whose lists are those of popularity at every λ and μ; their likelihood is the towers'. None:
            no row is one.
    """
    task = Task.of(held_out, past, config, labels=len(label_side.counts), seed=seed, max_queries=max_queries)
    settings = [*map(Setting, config.bias_removal)] if settings is None else settings
    never_L = label_side.counts == 0 if described else None
    likely = (task.positives if never_L is None else task.positives.among(~never_L)) if config.log_likelihood else None
    towers = list(dict.fromkeys(setting.of_towers for setting in settings))
    lists, log_p = tower_lists(
        task, embed_queries, label_side, towers, log_proposal=log_proposal, likely=likely,
        likely_at=[Setting(calibrated_at)], never_L=never_L, unknown=unknown,
    )  # fmt: skip
    log_p_of, facts, curve = dict(zip(towers, log_p, strict=True)), label_side.facts(config), []
    for setting, top_NK in zip(settings, lists.at(settings, term), strict=True):
        log_p_N = log_p_of.get(setting)
        if watch is not None:
            watch(setting, top_NK, task.positives)
        metrics = task.metrics(top_NK, facts)
        if log_p_N is not None and likely is not None:
            metrics["log_likelihood"] = task.bootstrap.interval(log_p_N, likely.weight_per_query)
        curve.append(setting.point(metrics))
    return curve


def tower_lists(
    task: Task, embed_queries: EmbedQueries, label_side: LabelSide, settings: Sequence[Setting], *,
    log_proposal: LogProposal | None = None, unknown: Unknown | None = None, **likelihood: Any,
) -> tuple[TowerLists, list[Float64 | None]]:  # fmt: skip
    """Rank a task's rows at settings of λ, μ and β; `rank` has the arguments and the log-likelihoods returned.

    Args:
        unknown: as in `bias_removal_curve`.
    """
    vectors_ND = np.concatenate(
        [embed_queries(task.rows_N[start : start + _EMBED_BLOCK]) for start in range(0, len(task.rows_N), _EMBED_BLOCK)]
    )
    top_GNK, log_p = rank(
        task.rows_N, lambda rows_B: vectors_ND[np.searchsorted(task.rows_N, rows_B)], label_side, task.seen, settings,
        k=task.k, log_proposal=log_proposal, **likelihood,
    )  # fmt: skip
    lists = TowerLists(task.rows_N, vectors_ND, label_side, task.seen, settings, top_GNK, log_proposal)
    if unknown is not None and (unknown_N := unknown(task.rows_N)).any():
        top_GNK[:, unknown_N] = _popular(task.rows_N[unknown_N], label_side, task.seen, settings, task.k)
        lists = replace(lists, unknown_N=unknown_N)
    return lists, log_p


def unknown_to(features: Sequence[Feature], read: QueryInputs) -> Unknown:
    """Return what finds the rows of which a tower of these features knows nothing; `read` has their histories."""

    def unknown(rows_N: Int32) -> Bools:
        blocks = [rows_N[start : start + _EMBED_BLOCK] for start in range(0, len(rows_N), _EMBED_BLOCK)]
        return np.concatenate([says_nothing(features, read.query_inputs(rows_B)) for rows_B in blocks])

    return unknown


def _popular(rows_N: Int32, label_side: LabelSide, seen: Past | None, settings: Sequence[Setting], k: int) -> Int32:
    """Rank labels by log π and each setting's bonus for some rows, int32 [G, N, K]; −1 if fewer labels are left."""
    nothing_LD = np.zeros((len(label_side.log_pi), 1), np.float32)
    alone = replace(
        label_side, embeddings=nothing_LD, log_pn=label_side.log_pi, log_popularity=None, bias=None,
        augmentation=Augmentation(temperature=1.0, kappa=1.0),
    )  # fmt: skip
    of_popularity = [setting._replace(bias_removal=1.0, popularity=0.0, cooccurrence=0.0) for setting in settings]
    distinct = list(dict.fromkeys(of_popularity))
    top_GNK, _ = rank(rows_N, lambda rows_B: nothing_LD[:1].repeat(len(rows_B), axis=0), alone, seen, distinct, k=k)
    return np.asarray(top_GNK[[distinct.index(setting) for setting in of_popularity]], np.int32)


def rank(
    rows_N: Int32, embed_queries: EmbedQueries, label_side: LabelSide, seen: Past | None, settings: Sequence[Setting],
    *, k: int, log_proposal: LogProposal | None = None, likely: Positives | None = None,
    likely_at: Collection[Setting] | None = None, never_L: Bools | None = None,
) -> tuple[Int32, list[Float64 | None]]:  # fmt: skip
    """Find the exact top-k label rows for every setting, int32 [G, N, K]; −1 if fewer labels are left.

    Where several processes call it, with the same arguments, each ranks its share of the queries, and all return all.

    And for every setting the log-likelihood of each query's pairs, `Σ w log softmax(s)_y` over the labels that may be
    ranked, float64 [N], nats; None without `likely`, and at settings that are not in `likely_at`.

    Args:
        seen: histories whose labels are left out, with `rows_N` among its rows; None leaves out nothing.
        likely, likely_at: positives of the N queries, and settings, for the log-likelihood; None for all settings.
        never_L: labels that the likelihood is not over, none of them in `likely`, bool [L]; None for none.
    """
    augmentation, rows_LE = label_side.augmentation, label_side.rows()
    # with a tree the labels' only column is log π, and λ multiplies the tree's log p_n(y|x) of each query
    of_labels = settings if log_proposal is None else [setting._replace(bias_removal=0.0) for setting in settings]
    nobody_BD = np.zeros((1, label_side.embeddings.shape[1]), np.float32)
    weights_GE = np.concatenate(
        [augmentation.queries(nobody_BD, setting.bias_removal, setting.popularity) for setting in of_labels]
    )
    weights_GE = weights_GE.astype(np.float64) - augmentation.queries(nobody_BD, 0.0)
    in_bucket_LX = (label_side.buckets[:, None] == [*map(BUCKET_NAMES.index, BONUS_BUCKETS)]).astype(np.float64)
    bonus_GX = [[getattr(setting, bucket) for bucket in BONUS_BUCKETS] for setting in settings]
    weights_GE = np.concatenate([weights_GE, augmentation.temperature * np.array(bonus_GX)], axis=1)
    moved = np.flatnonzero(weights_GE.any(axis=0)) if weights_GE.any() else np.array([nobody_BD.shape[1]])
    of_rows = moved[moved < rows_LE.shape[1]]
    columns_LX = np.concatenate(
        [rows_LE[:, of_rows], in_bucket_LX[:, moved[len(of_rows) :] - rows_LE.shape[1]]], axis=1, dtype=np.float64
    )
    ranker = GridRanker(columns_LX, weights_GE[:, moved], k)
    rows_PE, labels = rows_LE[ranker.order], len(rows_LE)
    del rows_LE  # of millions of labels a good part of what a job has
    block = block_of(labels, matrices=1 if log_proposal is None else 4)
    passes = [range(len(settings))]
    if log_proposal is not None:  # a pass for every λ
        ends = [at for at in range(1, len(settings)) if settings[at].bias_removal != settings[at - 1].bias_removal]
        passes = [range(*ends_of) for ends_of in pairwise([0, *ends, len(settings)])]
    share = max(1, -(-len(rows_N) // WORLD.processes))
    shares = [rows_N[first : first + share] for first in range(0, share * WORLD.processes, share)]
    top_GSK = np.zeros((len(settings), share, k), np.int32)
    log_p_GS: list[Float64 | None] = [
        np.zeros(share) if likely is not None and (likely_at is None or setting in likely_at) else None
        for setting in settings
    ]
    for at_B in range(0, min(share, len(rows_N)), block):
        blocks = [rows_S[at_B : at_B + block] for rows_S in shares]
        rows_B, before = blocks[WORLD.process], sum(map(len, blocks[: WORLD.process]))
        embedded = embed_queries(np.concatenate(blocks))[before : before + len(rows_B)]  # by all processes together
        if not len(rows_B):
            continue
        own, start = slice(at_B, at_B + len(rows_B)), WORLD.process * share + at_B
        end = start + len(rows_B)
        queries_EB = augmentation.queries(embedded, 0.0).T
        seen_n2 = np.zeros((0, 2), np.int64) if seen is None else seen.seen_labels(rows_B)
        noise_PB: Float32 | None = None
        if log_proposal is not None:
            noise_PB = (np.float32(augmentation.temperature) * log_proposal(rows_B)).T[ranker.order]
        for among in passes:
            write = _writer(rows_PE, queries_EB, noise_PB, settings[among[0]].bias_removal)
            values = ranker.values(len(rows_B), write, seen_n2)
            which = slice(among.start, among.stop)
            top_GSK[which, own] = ranker.lists(values, which)
            for at in among:
                if likely is not None and (log_p_S := log_p_GS[at]) is not None:
                    wanted = likely.between(start, end)
                    log_p_S[own] = _log_likelihood(ranker, values, at, wanted, never_L, augmentation.temperature)
    if WORLD.processes == 1:
        return top_GSK[:, : len(rows_N)], log_p_GS

    def of_every_share(values: Array) -> Array:
        return stack_processes(values).reshape(-1, *values.shape[1:])[: len(rows_N)]

    top_GNK = np.stack([of_every_share(top_SK) for top_SK in top_GSK])
    return top_GNK, [None if log_p_S is None else of_every_share(log_p_S) for log_p_S in log_p_GS]


def block_of(labels: int, *, matrices: int = 1) -> int:
    """Return the number of queries to rank at a time, so that all their score matrices fit into 64 MiB."""
    return int(np.clip(_BLOCK_BYTES // (4 * labels * matrices), 1, _EMBED_BLOCK))


def _writer(rows_PE: Float32, queries_EB: Float32, noise_PB: Float32 | None, bias_removal: float) -> Write:
    """Return a function that writes T · f, plus λ times the tree's log p_n if there is a tree, for some labels."""

    def write(chunk: slice, values: Float32) -> None:
        np.matmul(rows_PE[chunk], queries_EB, out=values)
        if noise_PB is not None:
            values += np.float32(bias_removal) * noise_PB[chunk]

    return write


def _log_likelihood(
    ranker: GridRanker, values: Values, at: int, positives: Positives, never_L: Bools | None, temperature: float
) -> Float64:
    """Compute `Σ w log softmax(s)_y` over each query's pairs at a setting, float64 [B]."""
    gain_P = ranker.gain(at)
    if never_L is not None:
        gain_P[never_L[ranker.order]] = -np.inf
    positions, queries = ranker.positions(positives.label_rows), positives.query_rows
    log_z_B = ranker.log_sum_exp(values, gain_P, temperature)
    log_p = (values.labels_PB[positions, queries] + gain_P[positions]) / temperature - log_z_B[queries]
    return np.bincount(queries, weights=positives.weights * log_p, minlength=positives.queries).astype(np.float64)
