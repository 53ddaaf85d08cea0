"""Judge an audit's figures by a promise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from longtail.bundle import BundleError, Interval
from longtail.bundle.promise import Bounds, PromiseVerdict, QualityPromise, missing_figure
from longtail.trainer.audit.measure import BEFORE_OWN_TRAIN, BEFORE_TRAIN_ENDS, Audit
from longtail.trainer.evaluation.metrics import interval_of_share


def read_promise(file: Path) -> QualityPromise:
    """Read the promise of an audit; raises BundleError."""
    return QualityPromise.read(file, {"max_drop": "an audit has no published release; use floors or over"})


def judge(promise: QualityPromise, audit: Audit) -> list[PromiseVerdict]:
    """Compare every bound with its figure; raises BundleError for a bound without a figure."""
    verdicts = _judge_bounds(promise, "", promise, audit.metrics, audit)
    groups = {group.name: group for group in audit.groups}
    for column, values in promise.groups.items():
        for value, bounds in values.items():
            name = f"{column} = {value}"
            _check_figure("groups", name, groups)
            verdicts += _judge_bounds(promise, name, bounds, groups[name].metrics, audit)
    differences, notes = {}, audit.notes
    if audit.compared is not None:
        differences, notes = audit.compared.differences, audit.compared.notes
    for baseline, least in promise.over.items():
        if reason := next((note for note in notes if note.startswith(f"{baseline} was left out")), None):
            raise BundleError(f"promise: over: {baseline!r} is not allowed because {reason}")
        _check_figure("over", baseline, differences)
        for metric, bound in least.items():
            _check_figure(f"over.{baseline}", metric, differences[baseline])
            _check_pairs(f"over.{baseline}", metric, audit.metrics)
            verdicts.append(PromiseVerdict(f"over {baseline}", metric, ">=", bound, differences[baseline][metric]))
    for n, shares in promise.in_each_list.items():
        for bucket, bound in shares.items():
            _check_figure(f"in_each_list.{n}", bucket, audit.listed)
            enough_Q = (audit.listed[bucket] >= n).astype(np.float64)
            share = interval_of_share(enough_Q, np.ones_like(enough_Q))
            verdicts.append(PromiseVerdict(f"in each list at least {n}", bucket, ">=", bound, share))
    counts = {finding.name: finding.count for finding in audit.findings}
    for name, most in promise.findings.items():
        if name in (BEFORE_TRAIN_ENDS, BEFORE_OWN_TRAIN) and name not in counts:
            raise BundleError(
                f"promise: findings: {name!r} is not allowed because this audit reads no times; use "
                "--set data.timestamp=COLUMN"
            )
        _check_figure("findings", name, counts)
        verdicts.append(PromiseVerdict("findings", name, "<=", most, Interval(value=counts[name])))
    return verdicts


def _judge_bounds(
    promise: QualityPromise, scope: str, bounds: Bounds, metrics: Mapping[str, Interval], audit: Audit
) -> list[PromiseVerdict]:
    """Compare floors and ceilings with metrics."""
    verdicts = []
    for key, name, sign, bound in promise.bounds(bounds, audit.metric):
        _check_figure(f"{scope}: {key}" if scope else key, name, metrics)
        _check_pairs(f"{scope}: {key}" if scope else key, name, metrics)
        verdicts.append(PromiseVerdict(scope, name, sign, bound, metrics[name]))
    return verdicts


def _check_figure(key: str, name: str, names: Iterable[str]) -> None:
    """Refuse a promise of a name without a figure; raises BundleError."""
    if name not in (names := [*names]):
        raise BundleError(missing_figure(key, name, names, "this audit"))


def _check_pairs(scope: str, name: str, metrics: Mapping[str, Interval]) -> None:
    """Refuse a promise of a bucket without test pairs; raises BundleError."""
    metric, _, rest = name.partition("@")
    if metric in ("recall", "balanced_error") and "/" in rest and metrics[f"recall@{rest}"].high == 0:
        raise BundleError(f"promise: {scope}: {name} is not allowed because no test pair is there to find")
