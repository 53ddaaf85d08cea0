"""Write an audit: terminal tables, report.html and metrics.json."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Console
from rich.markup import escape

from longtail.bundle import BUCKET_NAMES, Interval
from longtail.bundle.page import INK, page, plot
from longtail.bundle.promise import PromiseVerdict
from longtail.bundle.report_table import ReportTable, metric_cell, metric_cells
from longtail.bundle.store import atomic_directory
from longtail.trainer.audit.measure import Audit
from longtail.trainer.evaluation.groups import list_records
from longtail.trainer.evaluation.report import baselines_html, groups_html
from longtail.trainer.evaluation.tables import baseline_table, group_table, terminal_columns
from longtail.trainer.metric_registry import parse_k

_COLOURS = (INK, "#94a3b8", "#cbd5e1", "#64748b", "#e2e8f0", "#7c8798", "#b6c2d1")
"""The recommender, then greys for baselines: other colours are of buckets."""


def show(audit: Audit, verdicts: Sequence[PromiseVerdict], console: Console) -> None:
    """Print the figures of an audit."""
    metrics, k = audit.metrics, parse_k(audit.metric)
    overall = ", ".join(f"{name} {_bounds(metrics[name])}" for name in (audit.metric, f"ndcg@{k}", f"gini@{k}"))
    console.print(
        f"{audit.name}: {audit.queries:,} queries, {audit.pairs:,} pairs to find among {audit.labels:,} labels\n"
        f"{overall}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    columns = terminal_columns(audit.metric)
    console.print(_bucket_table(audit).rich())
    console.print(group_table(audit.groups, audit.metric, columns).rich())
    if audit.compared is not None:
        console.print(baseline_table(audit.compared, columns).rich())
        console.print(audit.compared.sentence, highlight=False, markup=False, soft_wrap=True)
    leaks = [str(finding) for finding in audit.findings if finding.count]
    absent = ", ".join(finding.name for finding in audit.findings if not finding.count)
    lines = [*(audit.compared.notes if audit.compared else []), *audit.notes, *leaks]
    for line in [*lines, *([f"none: {absent}"] if absent else [])]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for verdict in verdicts:
        style = "bold green" if verdict.is_kept else "bold red"
        console.print(f"[{style}]{escape(str(verdict))}[/]", highlight=False, soft_wrap=True)


def write(audit: Audit, verdicts: Sequence[PromiseVerdict], out: Path) -> None:
    """Write report.html and metrics.json to a new folder; raises BundleExistsError where it is there."""
    record = {
        "lists": audit.name, "metric": audit.metric, "queries": audit.queries, "pairs": audit.pairs,
        "labels": audit.labels, "metrics": {name: figure.model_dump() for name, figure in audit.metrics.items()},
        "buckets": {bucket.name: asdict(bucket) for bucket in audit.buckets}, "groups": list_records(audit.groups),
        "findings": {it.name: asdict(it) | {"in_words": str(it)} for it in audit.findings},
        "notes": audit.notes, "promise": [verdict.record() for verdict in verdicts],
    }  # fmt: skip
    record |= {} if audit.compared is None else audit.compared.record()
    with atomic_directory(out) as folder:
        (folder / "metrics.json").write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        (folder / "report.html").write_bytes(_html(audit, verdicts))


def _bounds(figure: Interval) -> str:
    cell = metric_cell(figure)
    return f"{cell} [{cell.note}]" if cell.note else str(cell)


def _bucket_table(audit: Audit) -> ReportTable:
    k, names = parse_k(audit.metric), ("recall", "exposure", "coverage")
    rows = [
        [
            bucket.name, f"{bucket.labels:,}", f"{bucket.train:,}", f"{bucket.pairs:,}",
            *metric_cells(audit.metrics, [f"{name}@{k}/{bucket.name}" for name in names]),
        ]
        for bucket in audit.buckets
    ]  # fmt: skip
    headings = ["", "labels", "train pairs", "to find", *names]
    return ReportTable(headings, rows, title=f"By bucket of labels, top {k}")


def _html(audit: Audit, verdicts: Sequence[PromiseVerdict]) -> bytes:
    k = parse_k(audit.metric)
    models = {"the recommender": audit.metrics} | ({} if audit.compared is None else audit.compared.baselines)
    cards = {
        "Queries": f"{audit.queries:,}", "Pairs to find": f"{audit.pairs:,}", "Labels": f"{audit.labels:,}",
        **{name: _bounds(audit.metrics[name]) for name in (audit.metric, f"ndcg@{k}", f"coverage@{k}", f"gini@{k}")},
    }  # fmt: skip
    if verdicts:
        cards["Promise"] = f"{sum(verdict.is_kept for verdict in verdicts)} of {len(verdicts)} kept"
    plots = [
        plot(lambda axes: _bars(axes, models, "recall", k), f"Recall@{k} by bucket of labels"),
        plot(lambda axes: _bars(axes, models, "exposure", k), f"Share of the top {k} given to each bucket of labels"),
    ]
    leaks = [f"{finding.description} ({finding.name})" for finding in audit.findings if finding.count]
    absent = ", ".join(finding.name for finding in audit.findings if not finding.count)
    folded = f"<details><summary>Looked for and not found</summary><p>{absent}</p></details>" if absent else ""
    body = (
        f"{_lines('Promise', [*map(str, verdicts)])}"
        f"{_lines('Leaks and gaps', [*leaks, *audit.notes])}{folded}"
        f"<h2>By bucket of labels</h2>{_bucket_table(audit).html()}"
        f"{groups_html(audit.groups, audit.metric)}{baselines_html(audit.compared)}"
    )
    verdict = "" if audit.compared is None else audit.compared.sentence
    intro = (
        f"Lists of labels against what {audit.queries:,} queries chose next. Head, torso and tail: thirds of the "
        "labels by their training pairs, most first; new: none."
    )
    return page(f"Audit of {audit.name}", intro, cards, plots, body, verdict=verdict)


def _lines(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if lines else ""


def _bars(axes: Axes, models: Mapping[str, Mapping[str, Interval]], metric: str, k: str) -> None:
    width = 0.8 / len(models)
    for i, (name, metrics) in enumerate(models.items()):
        x = [bucket + (i - (len(models) - 1) / 2) * width for bucket in range(len(BUCKET_NAMES))]
        values = [metrics[f"{metric}@{k}/{bucket}"].value for bucket in BUCKET_NAMES]
        axes.bar(x, values, width, label=name, color=_COLOURS[i % len(_COLOURS)])
    axes.set(title=f"{metric.capitalize()}@{k}", ylim=(0, None))
    axes.set_xticks(range(len(BUCKET_NAMES)), BUCKET_NAMES)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08), columnspacing=1, handlelength=1.2)
