"""Findings of the papers as contrasts, and the rule that decides whether they are reproduced.

The estimate is the mean difference of two methods over seeds, with a 95 % interval by Student's t over test queries and
seeds. `verdict` uses nothing else.

Legend: `S` seeds, `N` test queries.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

from benchmarks.seeds.store import Record, by_every_seed, unpack_values
from benchmarks.seeds.study import FULL, LOGIT_ADJUSTED, POPULARITY, Study
from longtail.bundle.arrays import Float64


@dataclass(frozen=True)
class Finding:
    """Describe one claim of a paper, and the contrast that tests it.

    Attributes:
        source: place of the claim in the paper.
        claim: the claim in a sentence.
        study: name of the study with both methods.
        better, worse: the methods, as the paper ranks them.
        metric: lower is better for errors, higher for all other metrics.
        reason: reason why the claim cannot be tested here; "" if a study tests it.
        claimed_by: the source of the claim: a paper, an extension of a paper's formula, or Longtail alone.
    """

    source: str
    claim: str
    study: str = ""
    better: str = ""
    worse: str = ""
    metric: str = ""
    reason: str = ""
    claimed_by: Literal["paper", "extension", "us"] = "paper"


@dataclass(frozen=True)
class Estimate:
    """Hold the better method's lead, its 95 % interval and p.

    The lead is positive if the paper is right.
    """

    lead: float
    low: float
    high: float
    p: float = 1.0


def verdict(estimate: Estimate | None) -> str:
    """Return `reproduced` for an interval above 0, `opposite` for one below 0, else `not reproduced`."""
    if estimate is None:
        return "not measured yet"
    if estimate.low > 0:
        return "**reproduced**"
    return "not reproduced, opposite" if estimate.high < 0 else "not reproduced"


def estimate_of(finding: Finding, records: Sequence[Record]) -> Estimate | None:
    """Estimate the contrast on test; None before both methods are measured."""
    better, worse = (by_every_seed(method, records) for method in (finding.better, finding.worse))
    if not better or not worse:
        return None
    values = _values(finding, better), _values(finding, worse)
    if values[0] is None or values[1] is None:
        return None
    sign = -1.0 if "error" in finding.metric else 1.0
    return paired(sign * values[0], sign * values[1])


def learns(study: Study, records: Sequence[Record]) -> bool:
    """Return whether the full loss beats popularity; otherwise a study cannot distinguish methods."""
    estimate = estimate_of(_ahead(study), records)
    return estimate is not None and estimate.low > 0


def _ahead(study: Study) -> Finding:
    return Finding("", "", study.name, FULL, POPULARITY, study.compare[0])


def values_read(study: Study, records: Sequence[Record]) -> dict[str, set[str]]:
    """Return the values of a study's records that findings read, by record key."""
    read = defaultdict[str, set[str]](set)
    for finding in [_ahead(study), *(it for it in findings() if it.study == study.name)]:
        better, worse = (by_every_seed(method, records) for method in (finding.better, finding.worse))
        for record in [*better, *worse]:
            read[record.key].add(f"{finding.metric}@0")
    return read


def _values(finding: Finding, records: Sequence[Record]) -> Float64 | None:
    """Return contributions of every query under every seed, float64 [S, N]; None if any is missing."""
    packed = [record.values.get(f"{finding.metric}@0") for record in records]
    return None if None in packed else np.stack([unpack_values(text) for text in packed if text])


def paired(a_SN: Float64, b_SN: Float64) -> Estimate:
    """Estimate the mean of a − b over seeds and queries, both taken as samples.

    The variance is that of the seeds' means, with S − 1 degrees of freedom, plus that of the queries' means; their sum
    has Satterthwaite's degrees of freedom.

    Args:
        a_SN, b_SN: values of the same queries under seeds; a method without randomness has one seed.
    """
    if len(a_SN) != len(b_SN):
        seeds = max(len(a_SN), len(b_SN))
        a_SN, b_SN = np.resize(a_SN, (seeds, a_SN.shape[1])), np.resize(b_SN, (seeds, b_SN.shape[1]))
    d_SN = a_SN - b_SN
    seeds, queries = d_SN.shape
    lead = float(d_SN.mean())
    of_seeds = float(d_SN.mean(axis=1).var(ddof=1)) / seeds if seeds > 1 else 0.0
    of_queries = float(d_SN.mean(axis=0).var(ddof=1)) / queries
    variance = of_seeds + of_queries
    if variance == 0:
        return Estimate(lead, lead, lead, float(lead == 0))
    degrees = variance**2 / (of_seeds**2 / max(seeds - 1, 1) + of_queries**2 / (queries - 1))
    error = math.sqrt(variance)
    reach = float(stdtrit(degrees, 0.975)) * error
    return Estimate(lead, lead - reach, lead + reach, 2 * float(stdtr(degrees, -abs(lead) / error)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that all conclusions at 5 % hold jointly [Holm 1979]."""
    rising = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values)[rising] * np.arange(len(rising), 0, -1)
    adjusted = np.empty(len(rising))
    adjusted[rising] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(value) for value in adjusted]


def findings() -> list[Finding]:
    """List all experimental findings of the three papers, in their order."""
    return [*_labelling_bias(), *_softmax(), *_mining()]


_R21 = ("r21.delicious-dot", "r21.delicious-cosine", "r21.movielens-1m")
_NOT_AT_HAND = "not run here, the files are not at hand"
_PROFILES = ("profiles.exp-100", "profiles.step-100")
_IN_BATCH_ALONE = ("r21.delicious-cosine", "r21.movielens-1m", "profiles.step-100")


def _labelling_bias() -> list[Finding]:
    tail, head = "recall@10/tail", "recall@10/head"
    constant, relative = "in_batch constant", "in_batch relative"
    claims = []
    for study in _PROFILES:
        error, source = "balanced_error@1", "[R21 §5.1, Fig. 1]"
        rare, frequent = f"{error}/tail", f"{error}/head"
        claims += [
            Finding(source, "within-batch constant beats the full loss on Tail", study, constant, FULL, rare),
            Finding(source, "within-batch constant is the best of the standard schemes on Tail: importance", study,
                    constant, "in_batch importance", rare),
            Finding(source, "… uniform constant", study, constant, "uniform constant", rare),
            Finding(source, "within-batch relative beats constant on Head", study, relative, constant, frequent),
            Finding(source, "within-batch relative beats the full loss on Head", study, relative, FULL, frequent,
                    claimed_by="extension"),
            Finding(source, "within-batch tail weights beat constant on Tail", study, "in_batch tail", constant,
                    rare),
            Finding(source, "uniform tail weights beat importance on Tail", study, "uniform tail", "uniform importance",
                    rare),
            Finding(source, "full logit adjustment beats the full loss on Tail", study, LOGIT_ADJUSTED, FULL,
                    rare),
            Finding("[R21 §5.1, limits]", "full logit adjustment beats its within-batch approximation on Tail", study,
                    LOGIT_ADJUSTED, "in_batch tail", rare),
            Finding("[R21 F.2, Fig. 4]", "within-batch constant beats the full loss in balanced error", study, constant,
                    FULL, error),
        ]  # fmt: skip
    exp, error = _PROFILES[0], "balanced_error@1"
    claims += [
        *(Finding("[R21 F.1, Fig. 3]", f"contrastive loss: the full softmax beats {words} {weight} on Tail", exp,
                  FULL, f"{sampler} {weight}, contrastive", f"{error}/tail")
          for sampler, words in (("in_batch", "within-batch"), ("uniform", "uniform"))
          for weight in ("constant", "importance", "relative")),
        Finding("[R21 F.2, Fig. 5]", "within-batch constant: softmax beats the contrastive loss in balanced error", exp,
                constant, f"{constant}, contrastive", error),
        Finding("[R21 §5.1]", "within-batch constant beats the full loss on Tail, by SGD with momentum", exp,
                f"{constant}, SGD", f"{FULL}, SGD", f"{error}/tail"),
    ]  # fmt: skip
    for study in _R21:
        source = "[R21 §5.2, Fig. 2, 8]"
        rows = [
            Finding(source, "within-batch constant beats the full loss on Tail", study, constant, FULL, tail),
            Finding(source, "within-batch importance beats the full loss on Tail", study, "in_batch importance", FULL,
                    tail),
            Finding(source, "within-batch relative beats the full loss on Tail", study, relative, FULL, tail),
            Finding(source, "within-batch constant beats uniform constant on Tail", study, constant, "uniform constant",
                    tail),
            Finding(source, "uniform constant beats within-batch constant on Head", study, "uniform constant", constant,
                    head),
            Finding("[R21 §4.1]", "within-batch relative beats the full loss on Head", study, relative, FULL, head,
                    claimed_by="extension"),
            Finding("[R21 F.2]", "within-batch constant beats the full loss in balanced error", study, constant, FULL,
                    "balanced_error@10"),
            Finding("[R21 eq. 16]", "within-batch tail weights beat constant on Tail", study, "in_batch tail", constant,
                    tail, claimed_by="extension"),
            Finding("[R21 eq. 16]", "uniform tail weights beat importance on Tail", study, "uniform tail",
                    "uniform importance", tail, claimed_by="extension"),
        ]  # fmt: skip
        claims += rows
    claims = [it for it in claims if it.study not in _IN_BATCH_ALONE or "uniform" not in it.better + it.worse]
    source = "[R21 F.3, Fig. 6]"
    for weight, metric in (("importance", "pair_recall@10"), ("tail", tail)):
        claims.append(Finding(source, f"more negatives are better: uniform {weight}, 256 before 16", "r21.delicious-m",
                             f"uniform {weight}, m = 256", f"uniform {weight}, m = 16", metric))  # fmt: skip
    cause = "Longtail's reading of [R21 Table 2]"
    for name in ("cosine", "dot"):
        claims.append(Finding(cause, f"within-batch constant beats importance on Tail, {name}", "r21.amazon-beauty",
                             f"in_batch constant, {name}", f"in_batch importance, {name}", tail,
                             claimed_by="us"))  # fmt: skip
    claims += [
        Finding("[R21 §5.1, Fig. 1]", "CIFAR-100-LT, ImageNet-LT and iNaturalist by ResNets",
                reason="no images and no convolutional tower"),
        Finding("[R21 §5.2, Fig. 2]", "within-batch constant beats the full loss on Tail, AmazonCat-13K",
                reason=_NOT_AT_HAND),
        Finding("[R21 §5.2, Fig. 2, 8]", "within-batch constant beats uniform constant on Tail, WikiLSHTC-325K",
                reason=_NOT_AT_HAND),
    ]  # fmt: skip
    return claims


def _softmax() -> list[Finding]:
    return [
        Finding("[BM20 A.2]", "full softmax beats uniform negative sampling, tuned and with L2", "a2.delicious", FULL,
                "uniform negative sampling", "precision@1"),
        Finding("[BM20 A.2]", "EURLex-4K: 33.6 % against 26.4 %", reason=_NOT_AT_HAND),
    ]  # fmt: skip


def _mining() -> list[Finding]:
    claims = []
    masked = ", known positives masked"
    for study, keeps, suffixes in (
        ("re19.delicious", (1, 16), ("", masked)),
        ("re19.amazon-beauty", (1, 16, 64), ("",)),
        ("re19.mixture-10k", (1, 16, 64), ("",)),
    ):
        for suffix in suffixes:
            for keep in keeps:
                claims.append(Finding("[Re19 §5, Table 2]", f"top {keep} beats all negatives{suffix}", study,
                                     f"top {keep}{suffix}", f"all{suffix}", "recall@1"))  # fmt: skip
            claims.append(Finding("[Re19 §5, Table 2]", f"top 1 beats top 16{suffix}", study, f"top 1{suffix}",
                                 f"top 16{suffix}", "recall@1"))  # fmt: skip
    for keep in (1, 16):
        claims.append(Finding("[Re19 §5]", f"top {keep} beats all negatives, POWL", "re19.delicious",
                             f"top {keep}, POWL", "all, POWL", "recall@1"))  # fmt: skip
    claims.append(Finding("[Re19 §5, Table 2]", "top 1 beats all negatives, by SGD as published", "re19.mixture-10k",
                         "top 1, SGD", "all, SGD", "recall@1"))  # fmt: skip
    for row in ("all", "top 16", "top 1"):
        claims.append(Finding("Longtail, `loss.hits`", f"masking other known positives helps {row}", "re19.delicious",
                             f"{row}{masked}", row, "recall@1", claimed_by="us"))  # fmt: skip
    for name in ("AmazonCat-13K", "WikiLSHTC-325K", "Amazon-670K"):
        claims.append(Finding("[Re19 §5, Table 2]", f"top 1 beats all negatives, {name}", reason=_NOT_AT_HAND))
    claims.append(Finding("[Re19 §5, Table 2]", "Amazon-3M", reason="no loader, and not at hand"))
    return claims
