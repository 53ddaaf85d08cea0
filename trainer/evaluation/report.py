"""Write a self-contained report.html, and plot the dial."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from longtail.bundle import BUCKET_NAMES, Bundle, CurvePoint
from longtail.bundle.arrays import Float64
from longtail.bundle.forecast import NatsAt
from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, page, plot, style
from longtail.bundle.report_table import Cell, ReportTable, metric_cells
from longtail.trainer.config import Recipe
from longtail.trainer.evaluation import tables
from longtail.trainer.evaluation.comparison import Comparison
from longtail.trainer.evaluation.dial import Dial, Setting, select_line
from longtail.trainer.evaluation.examples import Example
from longtail.trainer.evaluation.frontier import Frontier
from longtail.trainer.evaluation.groups import Group
from longtail.trainer.history import TrainingHistory
from longtail.trainer.metric_registry import parse_k

_COLOURS = {"overall": INK, "head": BLUE, "torso": AMBER, "tail": GREEN, "new": "#9333ea"}


class DefaultFigures(NamedTuple):
    """Hold figures at the default setting; `notes` gives the reason if no baseline ran."""

    groups: Sequence[Group] = ()
    examples: Sequence[Example] = ()
    frontier: Frontier = MappingProxyType({})
    compared: Comparison | None = None
    notes: Sequence[str] = ()


_NO_FIGURES = DefaultFigures()


def html_report(
    recipe: Recipe, dial: Dial, history: TrainingHistory, facts: Mapping[str, str],
    figures: DefaultFigures = _NO_FIGURES, *, buckets: str = "", by_time: Sequence[NatsAt] = (),
) -> bytes:  # fmt: skip
    """Write report.html: verdict, plots, examples, tables and facts.

    Args:
        buckets: sentence that describes the buckets.
        by_time: likelihood by weekday and hour.
    """
    metric = recipe.evaluation.metric
    k, frontier = parse_k(metric), figures.frontier
    prior, term = (select_line(dial.curve, name, dial.default) for name in ("popularity", "cooccurrence"))
    lambda_ends = "  (0: taste, 1: taste and popularity)" if tables.adds_popularity(dial) else ""
    plots = _line_plots("λ", f"bias removal λ{lambda_ends}", _lambdas(dial), dial.default, k)
    plots += _line_plots("μ", "popularity μ  (left: tail, right: head)", prior, dial.default, k)
    plots += _line_plots("ω", "co-occurrence ω", term, dial.default, k)
    words = f"Recall@{k} against recall@{k} of the tail, by {', '.join(frontier)}"
    plots += [plot(lambda axes: _frontier(axes, frontier, k), words)] if frontier else []
    plots += [plot(lambda axes: _losses(axes, history, metric), "Training loss and validation metric by epoch")]
    split, chosen_by = html.escape(dial.bias_removal.curve_split), html.escape(dial.bias_removal.chosen_by)
    default = f"Default λ = {dial.default.bias_removal:g}"
    if "μ" in tables.list_dials(dial):
        default += f" ({html.escape(tables.describe_noise(dial))}), μ = {dial.default.popularity:g}"
    if "ω" in tables.list_dials(dial):
        default += f", ω = {dial.default.cooccurrence:g}"
    default += "".join(f", β {bucket} = {value:g}" for bucket, value in dial.default.bonus.items())
    intro = f"Two-tower retrieval, evaluated over the full catalogue on {split}. {default}, chosen by {chosen_by}."
    words = "Each request may set λ."
    if lambda_ends:
        words = (
            "Each request may set λ, which says how much popularity counts: 0 ranks by taste, 1 by taste and "
            "popularity."
        )
    body = (
        f"{_examples_html(figures.examples)}{baselines_html(figures.compared)}{groups_html(figures.groups, metric)}"
        f"{price_html(dial, k)}{by_time_html(by_time)}\n"
        f"<h2>Every {' and '.join(tables.list_dials(dial))}</h2>"
        f"{tables.curve_table(dial, tables.report_columns(metric)).html()}"
    )
    verdict = "" if figures.compared is None else figures.compared.sentence
    return page(recipe.name, f"{intro}<br>{words} {html.escape(buckets)}", facts, plots, body, verdict=verdict)


def _examples_html(examples: Sequence[Example]) -> str:
    """Write the examples with their labels at two λ."""
    if not examples:
        return ""

    def titles(names: Sequence[str]) -> Cell:
        return Cell(", ".join(names), markup="<br>".join(map(html.escape, names)) or "–")

    def answer(labels: Sequence[tuple[str, str]]) -> Cell:
        lines = [
            f"<span style='color:{_COLOURS[bucket]}'>●</span> {html.escape(title)} <i>{bucket}</i>"
            for title, bucket in labels
        ]
        return Cell(", ".join(title for title, _ in labels), markup="<br>".join(lines))

    answers = [f"First at λ = {bias_removal:g}" for bias_removal in examples[0].answers]
    rows = [
        [example.query_id, titles(example.history), titles(example.chosen), *map(answer, example.answers.values())]
        for example in examples
    ]
    table = ReportTable(["Query", "Chose before, newest first", "Chose next", *answers], rows)
    return f"<h2>Example answers</h2><p>Held-out queries drawn by chance.</p><div class=text>{table.html()}</div>"


def baselines_html(compared: Comparison | None) -> str:
    """Write the model, its baselines, and the differences."""
    if compared is None:
        return ""
    words, subject = " ".join([compared.sentence, *compared.notes]), html.escape(compared.subject.capitalize())
    metrics = list(compared.differences[compared.best])
    rows = [[name, *metric_cells(of, metrics, signed=True)] for name, of in compared.differences.items()]
    differences = ReportTable(["", *metrics], rows, marked=[[*compared.differences].index(compared.best)])
    return (
        f"<h2>{subject} and its baselines</h2><p>{html.escape(words)}</p>"
        f"{tables.baseline_table(compared, tables.report_columns(compared.metric)).html()}"
        f"<h2>{subject} less each baseline</h2>"
        f"<p>Paired by query, with 95 % intervals; the best baseline is marked.</p>{differences.html()}"
    )


def groups_html(groups: Sequence[Group], metric: str) -> str:
    """Write the figures of every group of queries, with intervals."""
    if not groups:
        return ""
    return f"<h2>By group of queries</h2>{tables.group_table(groups, metric, tables.report_columns(metric)).html()}"


def by_time_html(by_time: Sequence[NatsAt]) -> str:
    """Write the likelihood by weekday and hour."""
    if not by_time:
        return ""
    rows = [
        [period.time, f"{period.pairs:,.0f}", f"{period.nats:.3f}", f"{period.gain:+.3f}"]
        for period in by_time
        if period.pairs
    ]
    words = "Decayed counts, in nats a pair of the last period, UTC, and what the calendar of the forecast adds."
    table = ReportTable(["", "pairs", "nats", "calendar"], rows, name_columns=2)
    return f"<h2>Popularity by weekday and hour</h2><p>{words}</p>{table.html()}"


def price_html(dial: Dial, k: str) -> str:
    """Write recall and exposure at each λ, with changes."""
    points = _lambdas(dial)
    if len(points) < 2:
        return ""
    recall, tail = f"recall@{k}", f"recall@{k}/tail"
    names = [recall, *(f"{name}@{k}/{bucket}" for name in ("recall", "exposure") for bucket in BUCKET_NAMES)]
    changes = [["", "", ""]]
    for lower, higher in pairwise(points):
        gain, tail_gain = (higher.metrics[name].value - lower.metrics[name].value for name in (recall, tail))
        changes.append([f"{gain:+.4f}", f"{tail_gain:+.4f}", f"{gain / tail_gain:.2f}" if tail_gain else "–"])
    rows = [
        [f"{point.bias_removal:g}", *(f"{point.metrics[name].value:.4f}" for name in names), *change]
        for point, change in zip(points, changes, strict=True)
    ]
    words = (
        "The changes are from the λ above. A rate of −2: two points of recall for every point that the tail loses. "
        "evaluation.floor holds the default to a least recall of a bucket, or to a share of what it is at another λ, "
        "by λ or by a bonus."
    )
    table = ReportTable(
        ["λ", *names, "Δ recall", "Δ tail", "Δ recall / Δ tail"], rows,
        marked=[i for i, point in enumerate(points) if point.bias_removal == dial.default.bias_removal],
    )  # fmt: skip
    return f"<h2>What recall costs the tail</h2><p>{words}</p>{table.html()}"


def _lambdas(dial: Dial) -> list[CurvePoint]:
    """Select the points of λ's line."""
    return select_line(dial.curve, "bias_removal", dial.default)


def _line_plots(symbol: str, words: str, points: list[CurvePoint], default: Setting, k: str) -> list[str]:
    """Plot recall and exposure over one dial; nothing of a line of one point."""
    if len(points) < 2:
        return []
    dial_index = tables.SYMBOLS.index(symbol)
    grid = [Setting.read_point(point)[dial_index] for point in points]
    return [
        plot(
            lambda axes: _recall(axes, grid, points, default[dial_index], words, k),
            f"Recall@{k} over all pairs' queries and per bucket, against the dial {symbol}",
        ),
        plot(
            lambda axes: _exposure(axes, grid, points, default[dial_index], words.partition("  (")[0], k),
            f"Share of the top {k} given to head, torso, tail and new, against {symbol}",
        ),
    ]


def plot_dial(bundle: Bundle, k: int = 20) -> Figure:
    """Plot recall, exposure and coverage over a bundle's λ.

    Raises:
        ValueError: the curve has no figures for k results, or fewer than two points.
    """
    dial = Dial.read_manifest(bundle.manifest)
    points, coverage = _lambdas(dial), f"coverage@{k}"
    if len(points) < 2 or coverage not in points[0].metrics:
        metric_names = sorted(points[0].metrics) if points else "nothing"
        raise ValueError(
            f"k = {k} is not allowed because a curve needs two points with {coverage}; found {metric_names}"
        )
    grid, default = [point.bias_removal for point in points], dial.default.bias_removal
    with style():
        figure = Figure(figsize=(11, 3.8), dpi=90, layout="constrained")
        recall, exposure, coverage_axes = figure.subplots(1, 3)
        _recall(recall, grid, points, default, "λ", str(k))
        _exposure(exposure, grid, points, default, "λ", str(k))
        coverage_axes.plot(grid, [point.metrics[coverage].value for point in points], color=INK, linewidth=2.5)
        coverage_axes.axvline(default, color=SOFT, linestyle="--", linewidth=1)
        coverage_axes.set(title="Coverage of the catalogue", xlabel="λ", ylim=(0, 1))
        # One legend for all: those of the panels are wider than a panel here.
        figure.legend(*recall.get_legend_handles_labels(), ncols=5, loc="outside lower center")
        for axes in (recall, exposure, coverage_axes):
            axes.margins(x=0)
            if (legend := axes.get_legend()) is not None:
                legend.remove()
    return figure


def _recall(axes: Axes, grid: list[float], points: list[CurvePoint], default: float, words: str, k: str) -> None:
    recalls = {bucket: [point.metrics[f"recall@{k}/{bucket}"].value for point in points] for bucket in BUCKET_NAMES}
    for series in ("overall", *(bucket for bucket in BUCKET_NAMES if bucket != "new" or any(recalls[bucket]))):
        name, colour = f"recall@{k}" if series == "overall" else f"recall@{k}/{series}", _COLOURS[series]
        figures = [point.metrics[name] for point in points]
        axes.plot(grid, [figure.value for figure in figures], color=colour, marker="o", markersize=3.5, label=series)
        low = [figure.value if figure.low is None else figure.low for figure in figures]
        high = [figure.value if figure.high is None else figure.high for figure in figures]
        if any(figure.value for figure in figures):  # the interval of a few pairs that are never found hides the rest
            axes.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axvline(default, color=SOFT, linestyle="--", linewidth=1)
    axes.set(title=f"Recall@{k} by bucket", xlabel=words, ylim=(0, None))
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18), columnspacing=1, handlelength=1.2)


def _exposure(axes: Axes, grid: list[float], points: list[CurvePoint], default: float, words: str, k: str) -> None:
    shares = [[point.metrics[f"exposure@{k}/{bucket}"].value for point in points] for bucket in BUCKET_NAMES]
    axes.stackplot(grid, shares, labels=BUCKET_NAMES, colors=[_COLOURS[bucket] for bucket in BUCKET_NAMES], alpha=0.85)
    axes.axvline(default, color="white", linestyle="--", linewidth=1)
    axes.set(title=f"Exposure in the top {k}", xlabel=words, ylim=(0, 1))
    axes.margins(x=0)
    _name_areas(axes, np.asarray(grid), np.asarray(shares))


def _name_areas(axes: Axes, grid_P: Float64, share_BP: Float64) -> None:
    """Name each area at its highest inner point."""
    first, last = grid_P[0] + 0.1 * np.ptp(grid_P), grid_P[-1] - 0.1 * np.ptp(grid_P)
    at_Q = np.linspace(first, last, 50)
    share_BQ = np.stack([np.interp(at_Q, grid_P, share_P) for share_P in share_BP])
    top_BQ = np.cumsum(share_BQ, axis=0)
    for bucket, share_Q, top_Q in zip(BUCKET_NAMES, share_BQ, top_BQ, strict=True):
        i = int(share_Q.argmax())
        if share_Q[i] > 0.06:
            middle = top_Q[i] - share_Q[i] / 2
            axes.text(at_Q[i], middle, bucket, color="white", weight="bold", ha="center", va="center")


def _frontier(axes: Axes, ways: Frontier, k: str) -> None:
    for (name, points), colour in zip(ways.items(), (INK, GREEN, AMBER), strict=False):
        axes.plot(
            [point.tail for point in points], [point.recall for point in points], "o-", markersize=3.5, color=colour,
            label=name,
        )  # fmt: skip
    axes.set(title="What the tail costs", xlabel=f"recall@{k} of the tail", ylabel=f"recall@{k}")
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _losses(axes: Axes, history: TrainingHistory, metric: str) -> None:
    epochs = range(1, len(history.losses) + 1)
    axes.plot(epochs, history.losses, color=_COLOURS["overall"], label="training loss")
    axes.set(title="Training", xlabel="epoch", ylabel="training loss, nats")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = axes.get_lines()
    if history.metrics:
        right = axes.twinx()
        label = f"valid {metric}"
        epochs_measured, figures = list(history.metrics), list(history.metrics.values())
        right.plot(epochs_measured, figures, "o-", color=_COLOURS["tail"], markersize=3.5, label=label)
        right.grid(visible=False)
        right.set_ylim(0, None)
        right.set_ylabel(label, color=_COLOURS["tail"])
        right.spines["right"].set_visible(True)
        lines = [*lines, *right.get_lines()]
    axes.legend(handles=lines, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
