"""Create tables of a job's figures for the terminal, Markdown and the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from longtail.bundle import BUCKET_NAMES, Buckets
from longtail.bundle.arrays import Int64
from longtail.bundle.report_table import Cell, ReportTable, metric_cells
from longtail.trainer.evaluation.baselines import format_settings
from longtail.trainer.evaluation.bundle import RollingFigures
from longtail.trainer.evaluation.comparison import Comparison
from longtail.trainer.evaluation.dial import Dial, Setting, removes_nothing
from longtail.trainer.evaluation.groups import Group
from longtail.trainer.evaluation.target import HitsByLabel
from longtail.trainer.metric_registry import parse_k

SYMBOLS = ("λ", "μ", "ω", "β torso", "β tail")
"""Names of the dials in their order in a setting; β of new labels is the tail's, or 0."""
_POWER_OF_PI = re.compile(r"π(\^\d[\d.e-]*)?(, of all objectives' pairs)?")


def terminal_columns(metric: str) -> dict[str, str]:
    """Return the metrics of a terminal table by heading."""
    k = parse_k(metric)
    return {"recall": f"recall@{k}", "nDCG": f"ndcg@{k}", **{bucket: f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES}}


def report_columns(metric: str) -> dict[str, str]:
    """Return the metrics of a report's table by heading."""
    k = parse_k(metric)
    names = [
        f"recall@{k}", f"ndcg@{k}", f"hit_rate@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES),
        f"balanced_error@{k}", f"coverage@{k}", f"gini@{k}", *(f"exposure@{k}/{bucket}" for bucket in BUCKET_NAMES),
    ]  # fmt: skip
    return {name: name for name in names}


def evaluation_table(title: str, dial: Dial, metric: str) -> ReportTable:
    """Create a terminal table with a row per setting of the curve, the default marked."""
    k, chosen_by = parse_k(metric), dial.bias_removal.chosen_by
    recall_words = "recall: mean over queries; head, torso, tail, new: share of the pairs of these labels, – if none"
    caption = f"▶ default λ, by {chosen_by}; {recall_words}"
    if len(list_dials(dial)) > 1:
        effects = {"μ": ", μ adds π as a prior", "ω": ", ω adds co-occurrence", "β tail": ", β is a bucket's bonus"}
        words = "".join(effects.get(symbol, "") for symbol in list_dials(dial))
        caption = f"λ {describe_noise(dial)}{words}; ▶ default, by {chosen_by}; {recall_words}"
    columns = terminal_columns(metric) | {"coverage": f"coverage@{k}"}
    return replace(curve_table(dial, columns), title=f"{title}, top {k}", caption=caption)


def evaluation_markdown(dial: Dial, metric: str) -> str:
    """Return the curve as Markdown, with all measured metrics."""
    k = parse_k(metric)
    metric_names = {name for point in dial.curve for name in point.metrics}
    extras = [name for name in (f"psp@{k}", f"psndcg@{k}", "log_likelihood") if name in metric_names]
    return curve_table(dial, report_columns(metric) | {name: name for name in extras}).markdown()


def curve_table(dial: Dial, columns: Mapping[str, str]) -> ReportTable:
    """Create a table with a row per setting of the curve."""
    dials = list_dials(dial)
    rows = [
        [*(f"{Setting.read_point(point)[i]:g}" for i in dials.values()), *metric_cells(point.metrics, columns.values())]
        for point in dial.curve
    ]
    defaults = [i for i, point in enumerate(dial.curve) if Setting.read_point(point) == dial.default]
    return ReportTable([*dials, *columns], rows, name_columns=len(dials), marked=defaults)


def target_table(hits: HitsByLabel, prior: str) -> ReportTable:
    """Create a table of recall under another prior; the best is marked."""
    recalls, covered = hits.recall(prior)
    recalls = sorted(recalls)
    theory = f"theory: {hits.theory[prior]}; " if prior in hits.theory else ""
    moving = [len({setting[i] for setting, _ in recalls}) > 1 for i in range(1, len(SYMBOLS))]
    dials = {symbol: i for i, symbol in enumerate(SYMBOLS) if i == 0 or moving[i - 1]}
    rows = [
        [
            *(f"{setting[i]:g}" for i in dials.values()),
            f"{recall.value:.4f}", f"{recall.low:.4f} – {recall.high:.4f}",
        ]
        for setting, recall in recalls
    ]  # fmt: skip
    return ReportTable(
        [*dials, f"recall@{hits.k}", "95 %"], rows, name_columns=len(dials),
        marked=[int(np.argmax([recall.value for _, recall in recalls]))],
        title=f"valid, labels drawn as {prior}, top {hits.k}",
        caption=f"▶ best; {theory}{covered:.0%} of the prior is on labels with valid pairs, which stand for the rest",
    )  # fmt: skip


def rolling_table(figures: Sequence[RollingFigures], name: str, metric: str) -> ReportTable:
    """Create a table of a model with several priors over periods of test."""
    columns = {heading: key for heading, key in terminal_columns(metric).items() if heading != "nDCG"}
    rows = [
        [
            f"{datetime.fromtimestamp(period.begin, UTC):%m-%d %H:%M}", f"{period.pairs:,}", period.prior,
            *metric_cells(period.metrics, columns.values()),
        ]
        for period in figures
    ]  # fmt: skip
    return ReportTable(
        ["from", "pairs", "prior", *columns], rows, title=f"{name}, top {parse_k(metric)}",
        marked=[i for i, period in enumerate(figures) if period.prior == "refreshed"],
        caption="counts: of training; forecast: as released; refreshed: by the pairs before the period, with labels "
        "dated in it",
    )  # fmt: skip


def baseline_table(compared: Comparison, columns: Mapping[str, str]) -> ReportTable:
    """Create a table of the model at its default and every baseline."""
    models = {compared.subject: compared.model, **compared.baselines}
    rows = [
        [Cell(name, format_settings(compared.settings.get(name, {}))), *metric_cells(metrics, columns.values())]
        for name, metrics in models.items()
    ]
    took = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in compared.seconds.items())
    return ReportTable(
        ["", *columns], rows, marked=[0], caption=f"to learn and answer: {took}",
        title=f"{compared.subject.capitalize()} and its baselines, top {parse_k(compared.metric)}",
    )  # fmt: skip


def group_table(groups: Sequence[Group], metric: str, columns: Mapping[str, str]) -> ReportTable:
    """Create a table of every group of queries."""
    rows = [
        [Cell(group.name, group.about), f"{group.queries:,}", *metric_cells(group.metrics, columns.values())]
        for group in groups
    ]
    return ReportTable(
        ["group", "queries", *columns], rows, name_columns=2, title=f"By group of queries, top {parse_k(metric)}",
        caption="; ".join(f"{group.value}: {group.about}" for group in groups if group.about),
    )  # fmt: skip


def describe_buckets(buckets: Buckets, counts_L: Int64) -> str:
    """Describe the buckets with their numbers of labels."""
    labels = np.bincount(buckets.assign(counts_L), minlength=len(BUCKET_NAMES))
    bounds = (
        f"over {buckets.head_above:,g} training pairs", f"over {buckets.tail_upto:,g}", "fewer", "none"
    )  # fmt: skip
    parts = [
        f"{name} {bound} ({count:,} labels)" for name, bound, count in zip(BUCKET_NAMES, bounds, labels, strict=True)
    ]
    return f"Labels by their training pairs: {', '.join(parts)}."


def list_dials(dial: Dial) -> dict[str, int]:
    """Return the dials of a curve with their index in a setting."""
    return {
        symbol: i
        for i, symbol in enumerate(SYMBOLS)
        if i == 0 or any(Setting.read_point(point)[i] for point in dial.curve)
    }


def describe_noise(dial: Dial) -> str:
    """Describe what λ adds to the scores."""
    noise = dial.bias_removal.noise
    if noise.startswith("p_n(y|x)^0"):
        return "adds log p_n(y|x), of which training took nothing away"
    if removes_nothing(noise):
        return "has nothing to add back"
    return f"adds popularity back as log {noise}" if adds_popularity(dial) else f"adds log ν back, ν = {noise}"


def adds_popularity(dial: Dial) -> bool:
    """Return whether λ adds popularity alone, by the name of ν."""
    return _POWER_OF_PI.fullmatch(dial.bias_removal.noise) is not None
