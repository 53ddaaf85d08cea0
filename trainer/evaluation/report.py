"""What a job reports: the evaluation table, and report.html with plots, readable without a network."""

from __future__ import annotations

import html
import re
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from longtail.bundle import BUCKET_NAMES, CurvePoint
from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, page, plot, scrolled
from longtail.trainer.config import Recipe
from longtail.trainer.evaluation.comparison import Comparison
from longtail.trainer.evaluation.dial import Dial, Setting, removes_nothing
from longtail.trainer.evaluation.target import FoundByLabel
from longtail.trainer.history import TrainingHistory
from longtail.trainer.metric_registry import k_of

_COLOURS = {"overall": INK, "head": BLUE, "torso": AMBER, "tail": GREEN, "new": "#9333ea"}
_POWER_OF_PI = re.compile(r"π(\^\d[\d.e-]*)?(, of all objectives' pairs)?")
"""Noises that frequent labels have more of: λ, as μ, goes from the tail to the head."""


def shown_metrics(metric: str) -> list[str]:
    """Return the columns of an evaluation table at the k of the recipe's metric."""
    k = k_of(metric)
    return [
        f"recall@{k}", f"ndcg@{k}", f"hit_rate@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES),
        f"balanced_error@{k}", f"coverage@{k}", f"gini@{k}", *(f"exposure@{k}/{bucket}" for bucket in BUCKET_NAMES),
    ]  # fmt: skip


def evaluation_table(title: str, dial: Dial, metric: str) -> Table:
    """Create a terminal table: one row per λ, and per μ where it is another dial; the default is marked."""
    k = k_of(metric)
    chosen_by = dial.bias_removal.chosen_by
    recall_of = "head, torso, tail, new: recall of pairs whose label is there"
    caption = f"▶ default λ, by {chosen_by}; {recall_of}"
    if _two_lines(dial):
        caption = f"λ {_removes(dial)}, μ adds π as a prior; ▶ default of both, by {chosen_by}; {recall_of}"
    table = Table(
        title=f"{title}, top {k}", title_justify="left", caption=caption, caption_justify="left", pad_edge=False
    )
    for heading in (*_dials(dial), "recall", "nDCG", *BUCKET_NAMES, "coverage"):
        table.add_column(heading, justify="right")
    names = [f"recall@{k}", f"ndcg@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES), f"coverage@{k}"]
    for point in dial.curve:
        chosen = Setting.of(point) == dial.default
        at = [f"{number:g}" for number in Setting.of(point)[: len(_dials(dial))]]
        cells = [f"{point.metrics[name].value:.4f}" if name in point.metrics else "" for name in names]
        table.add_row(f"{'▶ ' if chosen else ''}{at[0]}", *at[1:], *cells, style="bold" if chosen else None)
    return table


def target_table(found: FoundByLabel, prior: str) -> Table:
    """Create a terminal table of recall under another prior of labels at every λ and μ; the best is marked."""
    recalls, covered = found.recall(prior)
    best = max(recalls, key=lambda measured: measured.recall.value)
    theory = found.theory.get(prior)
    says = f"theory: {theory}; " if theory is not None else ""
    table = Table(
        title=f"valid, labels drawn as {prior}, top {found.k}", title_justify="left", caption_justify="left",
        caption=f"▶ best; {says}{covered:.0%} of the prior is on labels with valid pairs, which stand for the rest",
        pad_edge=False,
    )  # fmt: skip
    two = len({setting.popularity for setting, _ in recalls}) > 1
    for heading in ("λ", *(["μ"] if two else []), f"recall@{found.k}", "95 %"):
        table.add_column(heading, justify="right")
    for measured in sorted(recalls):
        setting, recall = measured
        at = [f"{number:g}" for number in (setting if two else setting[:1])]
        mark = "▶ " if measured is best else ""
        interval = f"{recall.low:.4f} – {recall.high:.4f}"
        table.add_row(f"{mark}{at[0]}", *at[1:], f"{recall.value:.4f}", interval, style="bold" if mark else None)
    return table


def evaluation_markdown(dial: Dial, metric: str) -> str:
    """Get the table as Markdown, with the metric's interval, and propensity scores and log-likelihood if measured."""
    k = k_of(metric)
    measured = {name for point in dial.curve for name in point.metrics}
    names = shown_metrics(metric) + [name for name in (f"psp@{k}", f"psndcg@{k}", "log_likelihood") if name in measured]
    heads = [*_dials(dial), *names]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for point in dial.curve:
        first = point.metrics[names[0]]
        spread = "" if first.low is None or first.high is None else f" [{first.low:.4f}, {first.high:.4f}]"
        others = [f"{point.metrics[name].value:.4f}" if name in point.metrics else "" for name in names[1:]]
        cells = [f"{first.value:.4f}{spread}", *others]
        mark = "**" if Setting.of(point) == dial.default else ""
        at = [f"{mark}{number:g}{mark}" for number in Setting.of(point)[: len(_dials(dial))]]
        lines.append(f"| {' | '.join([*at, *cells])} |")
    return "\n".join(lines) + "\n"


def html_report(
    recipe: Recipe, dial: Dial, history: TrainingHistory, facts: dict[str, str], compared: Comparison | None = None
) -> bytes:
    """Write report.html: facts, plots over each dial that moves and of the training, and the whole table."""
    metric = recipe.evaluation.metric
    k = k_of(metric)
    plots = [made for line in _lines(dial) for made in _line_plots(line, k)]
    plots += [plot(lambda axes: _losses(axes, history, metric), "Training loss and validation metric by epoch")]
    names = shown_metrics(metric)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in [*_dials(dial), *names])
    rows = "".join(_row(dial, point, names) for point in dial.curve)
    split, chosen_by = html.escape(dial.bias_removal.curve_split), html.escape(dial.bias_removal.chosen_by)
    intro = (
        f"Two-tower retrieval, evaluated over the full catalogue on {split}. {_default_in_words(dial)}, "
        f"chosen by {chosen_by}."
    )
    body = (
        f"{baselines_html(compared, names)}{price_html(dial, k)}\n"
        f"<h2>Every {' and '.join(_dials(dial))}</h2>{scrolled(head, rows)}"
    )
    return page(recipe.name, intro, facts, plots, body)


class _Line(NamedTuple):
    """One dial's part of a curve: its symbol, what it is, whom its ends favour, its numbers, the served one, points."""

    symbol: str
    words: str
    ends: str
    grid: list[float]
    default: float
    points: list[CurvePoint]


def _two_lines(dial: Dial) -> bool:
    return any(point.popularity for point in dial.curve)


def _dials(dial: Dial) -> tuple[str, ...]:
    """Return the dials of a table, `λ` or `λ` and `μ`."""
    return ("λ", "μ") if _two_lines(dial) else ("λ",)


def _lines(dial: Dial) -> list[_Line]:
    """Return the lines of a curve that have more than one point."""
    at_zero = _lambdas(dial)
    prior = sorted(
        (point for point in dial.curve if point.bias_removal == dial.default.bias_removal),
        key=lambda point: point.popularity,
    )
    ends = "  (left: tail, right: head)"
    lines = [
        _Line(
            "λ",
            "bias removal λ",
            ends if _POWER_OF_PI.fullmatch(dial.bias_removal.noise) else "",
            [point.bias_removal for point in at_zero],
            dial.default.bias_removal,
            at_zero,
        ),
        _Line("μ", "popularity μ", ends, [point.popularity for point in prior], dial.default.popularity, prior),
    ]
    return [line for line in lines if len(line.points) > 1]


def _line_plots(line: _Line, k: str) -> list[str]:
    return [
        plot(
            lambda axes: _recall(axes, line, k),
            f"Recall@{k} over all pairs' queries and per bucket, against the dial {line.symbol}",
        ),
        plot(
            lambda axes: _exposure(axes, line, k),
            f"Share of the top {k} given to head, torso, tail and new, against {line.symbol}",
        ),
    ]


def _default_in_words(dial: Dial) -> str:
    """Return the served λ, and what it removes and the served μ where they are two dials."""
    default = dial.default
    first = f"Default λ = {default.bias_removal:g}"
    return f"{first} ({html.escape(_removes(dial))}), μ = {default.popularity:g}" if _two_lines(dial) else first


def _removes(dial: Dial) -> str:
    noise = dial.bias_removal.noise
    if noise.startswith("p_n(y|x)^0"):
        return "adds p_n(y|x), of which training left nothing to remove"
    return "has nothing to remove" if removes_nothing(noise) else f"removes {noise}"


def _recall(axes: Axes, line: _Line, k: str) -> None:
    grid = line.grid
    for series in ("overall", *BUCKET_NAMES):
        name, colour = f"recall@{k}" if series == "overall" else f"recall@{k}/{series}", _COLOURS[series]
        figures = [point.metrics[name] for point in line.points]
        axes.plot(grid, [figure.value for figure in figures], color=colour, marker="o", markersize=3.5, label=series)
        low = [figure.value if figure.low is None else figure.low for figure in figures]
        high = [figure.value if figure.high is None else figure.high for figure in figures]
        if any(figure.value for figure in figures):  # the interval of a few pairs that are never found hides the rest
            axes.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axvline(line.default, color=SOFT, linestyle="--", linewidth=1)
    axes.set(title=f"Recall@{k} by bucket", xlabel=f"{line.words}{line.ends}", ylim=(0, None))
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _exposure(axes: Axes, line: _Line, k: str) -> None:
    grid = line.grid
    shares = [[point.metrics[f"exposure@{k}/{bucket}"].value for point in line.points] for bucket in BUCKET_NAMES]
    axes.stackplot(grid, shares, labels=BUCKET_NAMES, colors=[_COLOURS[bucket] for bucket in BUCKET_NAMES], alpha=0.85)
    axes.axvline(line.default, color="white", linestyle="--", linewidth=1)
    axes.set(title=f"Exposure in the top {k}", xlabel=line.words, ylim=(0, 1))
    axes.margins(x=0)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _losses(axes: Axes, history: TrainingHistory, metric: str) -> None:
    epochs = range(1, len(history.losses) + 1)
    axes.plot(epochs, history.losses, color=_COLOURS["overall"], label="training loss (left)")
    axes.set(title="Training", xlabel="epoch", ylabel="nats")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = axes.get_lines()
    if history.metrics:
        right = axes.twinx()
        label = f"valid {metric} (right)"
        right.plot(
            list(history.metrics),
            list(history.metrics.values()),
            "o-",
            color=_COLOURS["tail"],
            markersize=3.5,
            label=label,
        )
        right.grid(visible=False)
        right.set_ylim(0, None)
        lines = [*lines, *right.get_lines()]
    axes.legend(handles=lines, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _row(dial: Dial, point: CurvePoint, names: list[str]) -> str:
    figures = [point.metrics.get(name) for name in names]
    cells = [
        "<td></td>" if figure is None else figure_cell(figure.value, figure.low, figure.high) for figure in figures
    ]
    at = "".join(f"<th>{number:g}</th>" for number in Setting.of(point)[: len(_dials(dial))])
    return f"<tr{' class=chosen' if Setting.of(point) == dial.default else ''}>{at}{''.join(cells)}</tr>"


def baseline_table(compared: Comparison) -> Table:
    """Create a terminal table of the model at its default and every baseline, at the k of the recipe's metric."""
    k = k_of(compared.metric)
    took = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in compared.seconds.items())
    table = Table(
        title=f"The model and its baselines, top {k}", title_justify="left",
        caption=f"to learn and answer: {took}", caption_justify="left",
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for heading in ("recall", "nDCG", *BUCKET_NAMES):
        table.add_column(heading, justify="right")
    names = [f"recall@{k}", f"ndcg@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES)]
    for name, metrics in {"the model": compared.model, **compared.baselines}.items():
        style = "bold" if metrics is compared.model else None
        table.add_row(name, *(f"{metrics[metric].value:.4f}" for metric in names), style=style)
    return table


def baselines_html(compared: Comparison | None, names: list[str]) -> str:
    """Write the model and its baselines with metrics and intervals, the verdict in words, and what was left out."""
    if compared is None:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["", *names])
    rows = ""
    for name, metrics in {"the model": compared.model, **compared.baselines}.items():
        settings = ", ".join(f"{key} {value:g}" for key, value in compared.settings.get(name, {}).items())
        cells = "".join(
            figure_cell(metrics[metric].value, metrics[metric].low, metrics[metric].high) for metric in names
        )
        mark = " class=chosen" if metrics is compared.model else ""
        rows += f"<tr{mark}><th>{html.escape(name)}<small>{html.escape(settings)}</small></th>{cells}</tr>"
    words = " ".join([compared.sentence, *compared.notes])
    return f"<h2>The model and its baselines</h2><p>{html.escape(words)}</p>{scrolled(head, rows)}"


class Step(NamedTuple):
    """What changes from one λ of a curve to the next: recall, and recall of the tail."""

    recall: float
    tail: float

    @property
    def rate(self) -> float | None:
        """Get recall gained per recall lost in the tail, Δrecall / Δtail recall; None where the tail stays as it is."""
        return self.recall / self.tail if self.tail else None


def _lambdas(dial: Dial) -> list[CurvePoint]:
    """Get the points at μ = 0 by rising λ."""
    return sorted((point for point in dial.curve if not point.popularity), key=lambda point: point.bias_removal)


def steps(dial: Dial, k: str) -> list[Step]:
    """Compute what every step of λ at μ = 0 changes, by ascending λ."""
    names = f"recall@{k}", f"recall@{k}/tail"
    return [
        Step(*(end.metrics[name].value - start.metrics[name].value for name in names))
        for start, end in pairwise(_lambdas(dial))
    ]


def price_html(dial: Dial, k: str) -> str:
    """Write what each step of λ gives and takes: recall and exposure of every bucket after it, and the exchange
    rate."""
    made = steps(dial, k)
    if not made:
        return ""
    names = [f"recall@{k}", *(f"{name}@{k}/{bucket}" for name in ("recall", "exposure") for bucket in BUCKET_NAMES)]
    heads = ["λ", *names, "Δ recall", "Δ tail", "Δ recall / Δ tail"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    rows = ""
    for point, step in zip(_lambdas(dial), [None, *made], strict=True):
        cells = "".join(f"<td>{point.metrics[name].value:.4f}</td>" for name in names)
        if step is None:
            change = "<td></td>" * 3
        else:
            rate = "–" if step.rate is None else f"{step.rate:.2f}"
            change = f"<td>{step.recall:+.4f}</td><td>{step.tail:+.4f}</td><td>{rate}</td>"
        chosen = " class=chosen" if point.bias_removal == dial.default.bias_removal else ""
        rows += f"<tr{chosen}><th>{point.bias_removal:g}</th>{cells}{change}</tr>"
    words = (
        "The changes are from the λ above. A rate of −2: two points of recall for every point that the tail loses. "
        "evaluation.floor holds the default λ to a least recall of a bucket, or to a share of what it is at another λ."
    )
    return f"<h2>What recall costs the tail</h2><p>{words}</p>{scrolled(head, rows)}"


def figure_cell(value: float, low: float | None, high: float | None) -> str:
    """Return a figure, with its interval if it has one."""
    interval = "" if low is None or high is None else f"<small>{low:.4f}–{high:.4f}</small>"
    return f"<td>{value:.4f}{interval}</td>"
