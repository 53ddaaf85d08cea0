"""Findings of the papers as contrasts, and the rule that decides whether they are reproduced.

A finding claims that one method is better than another on one metric. The estimate is the mean difference over seeds,
with a 95 % interval by Student's t over test queries and seeds together. The rule, `verdict`, uses nothing else.

Legend: `S` seeds, `N` test queries.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from benchmarks.seeds.store import Record, by_every_seed, unpack_values
from benchmarks.seeds.study import FULL, LOGIT_ADJUSTED, POPULARITY, Study
from longtail.bundle.arrays import Float64

_NEARLY = 0.9


@dataclass(frozen=True)
class Finding:
    """Describe one claim of a paper, and the contrast that tests it.

    Attributes:
        source: place of the claim in the paper.
        claim: the claim in a sentence.
        study: name of the study with both methods.
        better, worse: the methods, as the paper ranks them.
        metric: lower is better for errors, higher for all other metrics.
        at: λ of both methods: as trained, as chosen on validation, or with the noise removed.
        in_time: measures the worse method at its last moment within the better method's CPU seconds, tree included,
            instead of at its end.
        reason: reason why the claim cannot be tested here; "" if a study tests it.
        claimed_by: the source of the claim: a paper, an extension of a paper's formula, or Longtail alone.
    """

    source: str
    claim: str
    study: str = ""
    better: str = ""
    worse: str = ""
    metric: str = ""
    at: Literal["trained", "chosen", "removed"] = "trained"
    in_time: bool = False
    reason: str = ""
    claimed_by: Literal["paper", "extension", "us"] = "paper"


@dataclass(frozen=True)
class Estimate:
    """Hold the better method's lead (positive if the paper is right), its 95 % interval, and p of no difference."""

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
    """Estimate the contrast on test; None before both methods are measured.

    With `in_time` it is also None if the other method ended long before, unless that method is ahead.
    """
    better, worse = (by_every_seed(method, records) for method in (finding.better, finding.worse))
    if not better or not worse:
        return None
    limit = float(np.mean([it.seconds for it in better])) if finding.in_time else None
    values = _values(finding, better), _values(finding, worse, limit)
    if values[0] is None or values[1] is None:
        return None
    sign = -1.0 if "error" in finding.metric else 1.0
    estimate = paired(sign * values[0], sign * values[1])
    too_short = limit is not None and np.mean([it.seconds for it in worse]) < _NEARLY * limit
    return None if too_short and estimate.high > 0 else estimate


def learns(study: Study, records: Sequence[Record]) -> bool:
    """Return whether the full loss beats popularity; otherwise a study cannot distinguish methods."""
    estimate = estimate_of(_ahead(study), records)
    return estimate is not None and estimate.low > 0


def _ahead(study: Study) -> Finding:
    return Finding("", "", study.name, FULL, POPULARITY, study.compare[0], study.shown_at)


def values_read(study: Study, records: Sequence[Record]) -> dict[str, set[str]]:
    """Return the values of a study's records that findings read, by record key."""
    read = defaultdict[str, set[str]](set)
    for finding in [_ahead(study), *(it for it in findings() if it.study == study.name)]:
        better, worse = (by_every_seed(method, records) for method in (finding.better, finding.worse))
        limit = float(np.mean([it.seconds for it in better])) if finding.in_time and better else None
        for record, key in [*_keys(finding, better), *_keys(finding, worse, limit)]:
            read[record.key].add(key)
    return read


def _keys(finding: Finding, records: Sequence[Record], seconds: float | None = None) -> Iterator[tuple[Record, str]]:
    """Yield each record with the key of the values a finding reads; at the last moment within `seconds`, if given."""
    for it in records:
        if seconds is None:
            at = {"trained": 0.0, "chosen": it.bias_removal, "removed": it.likely_at}[finding.at]
            yield it, f"{finding.metric}@{at:g}"
        else:
            inside = [moment for moment, at in enumerate(it.curve) if at["seconds"] <= seconds]
            yield it, f"{finding.metric}#{inside[-1] if inside else 0}"


def _values(finding: Finding, records: Sequence[Record], seconds: float | None = None) -> Float64 | None:
    """Return contributions of every query under every seed, float64 [S, N]; None if any is missing."""
    packed = [it.values.get(key) for it, key in _keys(finding, records, seconds)]
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
    """Adjust p-values so that all conclusions at 5 % hold jointly with 95 % probability [Holm 1979]."""
    rising = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values)[rising] * np.arange(len(rising), 0, -1)
    adjusted = np.empty(len(rising))
    adjusted[rising] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(value) for value in adjusted]


def counted_once(estimates: Sequence[tuple[Finding, Estimate | None]]) -> list[tuple[Finding, Estimate | None]]:
    """Merge contrasts in equal CPU time with contrasts at the end if both are the same."""
    kept: list[tuple[Finding, Estimate | None]] = []
    for finding, estimate in estimates:
        before, same = kept[-1] if kept else (None, None)
        if (
            before is not None and estimate is not None and estimate == same
            and before.in_time and replace(before, claim=finding.claim, in_time=False) == finding
        ):  # fmt: skip
            kept[-1] = (replace(before, claim=f"{before.claim} and at the end"), estimate)
        else:
            kept.append((finding, estimate))
    return kept


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
    found = []
    for study in _PROFILES:
        error, source = "balanced_error@1", "[R21 §5.1, Fig. 1]"
        rare, frequent = f"{error}/tail", f"{error}/head"
        found += [
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
    found += [
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
        found += rows
    found = [it for it in found if it.study not in _IN_BATCH_ALONE or "uniform" not in it.better + it.worse]
    source = "[R21 F.3, Fig. 6]"
    for weight, metric in (("importance", "pair_recall@10"), ("tail", tail)):
        found.append(Finding(source, f"more negatives are better: uniform {weight}, 256 before 16", "r21.delicious-m",
                             f"uniform {weight}, m = 256", f"uniform {weight}, m = 16", metric))  # fmt: skip
    cause = "Longtail's reading of [R21 Table 2]"
    for name in ("cosine", "dot"):
        found.append(Finding(cause, f"within-batch constant beats importance on Tail, {name}", "r21.amazon-beauty",
                             f"in_batch constant, {name}", f"in_batch importance, {name}", tail,
                             claimed_by="us"))  # fmt: skip
    found += [
        Finding("[R21 §5.1, Fig. 1]", "CIFAR-100-LT, ImageNet-LT and iNaturalist by ResNets",
                reason="no images and no convolutional tower"),
        Finding("[R21 §5.2, Fig. 2]", "within-batch constant beats the full loss on Tail, AmazonCat-13K",
                reason=_NOT_AT_HAND),
        Finding("[R21 §5.2, Fig. 2, 8]", "within-batch constant beats uniform constant on Tail, WikiLSHTC-325K",
                reason=_NOT_AT_HAND),
    ]  # fmt: skip
    return found


def _softmax() -> list[Finding]:
    found = [
        Finding("[BM20 A.2]", "full softmax beats uniform negative sampling, tuned and with L2", "a2.delicious", FULL,
                "uniform negative sampling", "precision@1"),
    ]  # fmt: skip
    rivals = ("uniform", "frequency", "NCE", "One-vs-Each", "Augment & Reduce")
    for study, others in (("bm20.mixture-10k", rivals), ("bm20.gowalla-history", rivals[:3])):
        for other in others:
            for in_time, moment in ((True, "in the same CPU time"), (False, "at the end")):
                if other != "NCE" or not in_time:  # it draws from the same tree, and takes the same time
                    found.append(Finding("[BM20 §5, Fig. 1]", f"adversarial is more accurate than {other}, {moment}",
                                         study, "adversarial", other, "precision@1",
                                         "removed" if other == "NCE" else "chosen", in_time))  # fmt: skip
        for other in ("uniform", "frequency"):
            found.append(Finding("[BM20 §5, Fig. 1]", f"{other} has the higher likelihood (Amazon-670K)", study, other,
                                 "adversarial", "log_likelihood", "removed"))  # fmt: skip
    found += [
        Finding("[BM20 A.2]", "EURLex-4K: 33.6 % against 26.4 %", reason=_NOT_AT_HAND),
        Finding("[BM20 §5, Fig. 1]", "Wikipedia-500K and Amazon-670K: an order of magnitude faster",
                reason="not run here: the data, with XML-CNN features, are not at hand"),
    ]  # fmt: skip
    return found


def _mining() -> list[Finding]:
    found = []
    known = ", known positives masked"
    for study, keeps, suffixes in (
        ("re19.delicious", (1, 16), ("", known)),
        ("re19.amazon-beauty", (1, 16, 64), ("",)),
        ("re19.mixture-10k", (1, 16, 64), ("",)),
    ):
        for suffix in suffixes:
            for keep in keeps:
                found.append(Finding("[Re19 §5, Table 2]", f"top {keep} beats all negatives{suffix}", study,
                                     f"top {keep}{suffix}", f"all{suffix}", "recall@1"))  # fmt: skip
            found.append(Finding("[Re19 §5, Table 2]", f"top 1 beats top 16{suffix}", study, f"top 1{suffix}",
                                 f"top 16{suffix}", "recall@1"))  # fmt: skip
    for keep in (1, 16):
        found.append(Finding("[Re19 §5]", f"top {keep} beats all negatives, POWL", "re19.delicious",
                             f"top {keep}, POWL", "all, POWL", "recall@1"))  # fmt: skip
    found.append(Finding("[Re19 §5, Table 2]", "top 1 beats all negatives, by SGD as published", "re19.mixture-10k",
                         "top 1, SGD", "all, SGD", "recall@1"))  # fmt: skip
    for row in ("all", "top 16", "top 1"):
        found.append(Finding("Longtail, `loss.hits`", f"masking other known positives helps {row}", "re19.delicious",
                             f"{row}{known}", row, "recall@1", claimed_by="us"))  # fmt: skip
    for name in ("AmazonCat-13K", "WikiLSHTC-325K", "Amazon-670K"):
        found.append(Finding("[Re19 §5, Table 2]", f"top 1 beats all negatives, {name}", reason=_NOT_AT_HAND))
    found.append(Finding("[Re19 §5, Table 2]", "Amazon-3M", reason="no loader, and not at hand"))
    return found
