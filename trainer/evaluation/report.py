"""What a job reports: the evaluation table, and report.html with plots, readable without a network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from longtail.bundle import BUCKET_NAMES, Bundle, CurvePoint, Interval
from longtail.bundle.arrays import Float64, Int64
from longtail.bundle.forecast import NatsAt
from longtail.bundle.frequency import Buckets
from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, page, plot, scrolled, style
from longtail.trainer.config import Recipe
from longtail.trainer.evaluation.baselines import in_words
from longtail.trainer.evaluation.bundle import RollingFigures
from longtail.trainer.evaluation.comparison import Comparison
from longtail.trainer.evaluation.dial import Dial, Setting, line_of, removes_nothing
from longtail.trainer.evaluation.examples import Example
from longtail.trainer.evaluation.frontier import Frontier
from longtail.trainer.evaluation.groups import Group
from longtail.trainer.evaluation.target import FoundByLabel
from longtail.trainer.history import TrainingHistory
from longtail.trainer.metric_registry import k_of

_COLOURS = {"overall": INK, "head": BLUE, "torso": AMBER, "tail": GREEN, "new": "#9333ea"}
_SYMBOLS = ("λ", "μ", "ω", "β torso", "β tail")
"""Names of the dials in their order in a setting; β of new labels is the tail's, or 0."""
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
    k, chosen_by = k_of(metric), dial.bias_removal.chosen_by
    recall_of = "recall: mean over queries; head, torso, tail, new: share of the pairs of these labels"
    caption = f"▶ default λ, by {chosen_by}; {recall_of}"
    if len(_dials(dial)) > 1:
        adds = {"μ": ", μ adds π as a prior", "ω": ", ω adds co-occurrence", "β tail": ", β is a bucket's bonus"}
        words = "".join(adds.get(symbol, "") for symbol in _dials(dial))
        caption = f"λ {_removes(dial)}{words}; ▶ default, by {chosen_by}; {recall_of}"
    names = [f"recall@{k}", f"ndcg@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES), f"coverage@{k}"]
    rows = ((_at(dial, point), _values(point.metrics, names), _is_default(dial, point)) for point in dial.curve)
    headings = [*_dials(dial), "recall", "nDCG", *BUCKET_NAMES, "coverage"]
    return _terminal_table(f"{title}, top {k}", caption, headings, rows)


def target_table(found: FoundByLabel, prior: str) -> Table:
    """Create a terminal table of recall under another prior of labels at every λ and μ; the best is marked."""
    recalls, covered = found.recall(prior)
    best = max(recalls, key=lambda measured: measured.recall.value)
    says = f"theory: {found.theory[prior]}; " if prior in found.theory else ""
    caption = f"▶ best; {says}{covered:.0%} of the prior is on labels with valid pairs, which stand for the rest"
    moving = [len({setting[at] for setting, _ in recalls}) > 1 for at in range(1, len(_SYMBOLS))]
    dials = {symbol: at for at, symbol in enumerate(_SYMBOLS) if at == 0 or moving[at - 1]}
    rows = (
        (
            [f"{measured.setting[at]:g}" for at in dials.values()],
            [f"{measured.recall.value:.4f}", f"{measured.recall.low:.4f} – {measured.recall.high:.4f}"],
            measured is best,
        )
        for measured in sorted(recalls)
    )
    title = f"valid, labels drawn as {prior}, top {found.k}"
    return _terminal_table(title, caption, [*dials, f"recall@{found.k}", "95 %"], rows)


def rolling_table(figures: Sequence[RollingFigures], name: str, metric: str) -> Table:
    """Create a terminal table of a model with several priors over periods of test."""
    k, shown = k_of(metric), "%m-%d %H:%M"
    names = [f"recall@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES)]
    rows = (
        (
            [datetime.fromtimestamp(each.begin, UTC).strftime(shown), f"{each.pairs:,}", each.prior],
            _values(each.metrics, names),
            each.prior == "refreshed",
        )
        for each in figures
    )
    caption = (
        "counts: of training; forecast: as released; refreshed: by the pairs before the period, with labels dated in it"
    )
    return _terminal_table(f"{name}, top {k}", caption, ["from", "pairs", "prior", "recall", *BUCKET_NAMES], rows)


def baseline_table(compared: Comparison) -> Table:
    """Create a terminal table of the model at its default and every baseline, at the k of the recipe's metric."""
    k = k_of(compared.metric)
    took = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in compared.seconds.items())
    names = [f"recall@{k}", f"ndcg@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES)]
    models = {compared.subject: compared.model, **compared.baselines}
    rows = (([name], _values(metrics, names), metrics is compared.model) for name, metrics in models.items())
    title = f"{compared.subject.capitalize()} and its baselines, top {k}"
    return _terminal_table(title, f"to learn and answer: {took}", ["", "recall", "nDCG", *BUCKET_NAMES], rows)


def group_table(groups: Sequence[Group], metric: str) -> Table:
    """Create a terminal table of every group of queries, at the k of the recipe's metric."""
    k = k_of(metric)
    names = [f"recall@{k}", f"ndcg@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES)]
    rows = (([group.name, f"{group.queries:,}"], _values(group.metrics, names), False) for group in groups)
    about = "; ".join(f"{group.value}: {group.about}" for group in groups if group.about)
    return _terminal_table(
        f"By group of queries, top {k}", about, ["group", "queries", "recall", "nDCG", *BUCKET_NAMES], rows
    )


def _terminal_table(
    title: str, caption: str, headings: Sequence[str], rows: Iterable[tuple[list[str], list[str], bool]]
) -> Table:
    """Create a table of rows: what they are of, figures, and whether the row is marked."""
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", pad_edge=False
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for (first, *more), figures, marked in rows:
        mark = "▶ " if marked else ""
        table.add_row(f"{mark}{first}", *more, *figures, style="bold" if marked else None)
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
        mark = "**" if _is_default(dial, point) else ""
        at = [f"{mark}{number}{mark}" for number in _at(dial, point)]
        cells = [*at, f"{first.value:.4f}{spread}", *_values(point.metrics, names[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def html_report(
    recipe: Recipe, dial: Dial, history: TrainingHistory, facts: dict[str, str], compared: Comparison | None = None,
    groups: Sequence[Group] = (), examples: Sequence[Example] = (), buckets: str = "",
    ways: Frontier = MappingProxyType({}), by_time: Sequence[NatsAt] = (),
) -> bytes:  # fmt: skip
    """Write report.html: the verdict, plots over each dial and of the training, examples, tables and facts."""
    metric = recipe.evaluation.metric
    k, names = k_of(metric), shown_metrics(metric)
    prior, term = (line_of(dial.curve, name, dial.default) for name in ("popularity", "cooccurrence"))
    ends = "  (left: tail, right: head)"
    ends_of_lambda = ends if _POWER_OF_PI.fullmatch(dial.bias_removal.noise) else ""
    plots = _line_plots("λ", f"bias removal λ{ends_of_lambda}", _lambdas(dial), dial.default, k)
    plots += _line_plots("μ", f"popularity μ{ends}", prior, dial.default, k)
    plots += _line_plots("ω", "co-occurrence ω", term, dial.default, k)
    words = f"Recall@{k} against recall@{k} of the tail, by {', '.join(ways)}"
    plots += [plot(lambda axes: _frontier(axes, ways, k), words)] if ways else []
    plots += [plot(lambda axes: _losses(axes, history, metric), "Training loss and validation metric by epoch")]
    rows = [(_at(dial, point), _cells(point.metrics, names), _is_default(dial, point)) for point in dial.curve]
    split, chosen_by = html.escape(dial.bias_removal.curve_split), html.escape(dial.bias_removal.chosen_by)
    default = f"Default λ = {dial.default.bias_removal:g}"
    if "μ" in _dials(dial):
        default += f" ({html.escape(_removes(dial))}), μ = {dial.default.popularity:g}"
    if "ω" in _dials(dial):
        default += f", ω = {dial.default.cooccurrence:g}"
    default += "".join(f", β {bucket} = {value:g}" for bucket, value in dial.default.bonus.items())
    intro = f"Two-tower retrieval, evaluated over the full catalogue on {split}. {default}, chosen by {chosen_by}."
    words = (
        "Each request may set λ, which says how much popularity counts: 0 ranks by taste, 1 by taste and popularity."
        if ends_of_lambda
        else "Each request may set λ."
    )
    body = (
        f"{_examples_html(examples)}{baselines_html(compared, names)}{groups_html(groups, names)}"
        f"{price_html(dial, k)}{by_time_html(by_time)}\n"
        f"<h2>Every {' and '.join(_dials(dial))}</h2>{_html_table([*_dials(dial), *names], rows)}"
    )
    verdict = "" if compared is None else compared.sentence
    return page(recipe.name, f"{intro}<br>{words} {html.escape(buckets)}", facts, plots, body, verdict=verdict)


def in_words_of_buckets(buckets: Buckets, counts_L: Int64) -> str:
    """Say what head, torso, tail and new are, with the number of labels of each."""
    labels = np.bincount(buckets.assign(counts_L), minlength=len(BUCKET_NAMES))
    bounds = (
        f"over {buckets.head_above:,g} training pairs", f"over {buckets.tail_upto:,g}", "fewer", "none"
    )  # fmt: skip
    parts = [
        f"{name} {bound} ({count:,} labels)" for name, bound, count in zip(BUCKET_NAMES, bounds, labels, strict=True)
    ]
    return f"Labels by their training pairs: {', '.join(parts)}."


def _examples_html(examples: Sequence[Example]) -> str:
    """Write the queries of the examples with their first labels at two λ."""
    if not examples:
        return ""

    def titles(names: Sequence[str]) -> str:
        return "<br>".join(map(html.escape, names)) or "–"

    def answer(labels: Sequence[tuple[str, str]]) -> str:
        lines = [
            f"<span style='color:{_COLOURS[bucket]}'>●</span> {html.escape(title)} <i>{bucket}</i>"
            for title, bucket in labels
        ]
        return "<br>".join(lines)

    heads = [
        "Query",
        "Chose before, newest first",
        "Chose next",
        *(f"First at λ = {at:g}" for at in examples[0].answers),
    ]
    rows = "".join(
        f"<tr><th>{html.escape(example.query_id)}</th><td>{titles(example.history)}</td><td>{titles(example.chosen)}</td>"
        f"{''.join(f'<td>{answer(labels)}</td>' for labels in example.answers.values())}</tr>"
        for example in examples
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return (
        f"<h2>Example answers</h2><p>Held-out queries drawn by chance.</p><div class=text>{scrolled(head, rows)}</div>"
    )


def baselines_html(compared: Comparison | None, names: list[str]) -> str:
    """Write the model and its baselines with metrics and intervals, the verdict in words, and what was left out."""
    if compared is None:
        return ""
    rows = []
    for name, metrics in {compared.subject: compared.model, **compared.baselines}.items():
        of = f"{html.escape(name)}<small>{html.escape(in_words(compared.settings.get(name, {})))}</small>"
        rows.append(([of], _cells(metrics, names), metrics is compared.model))
    words, subject = " ".join([compared.sentence, *compared.notes]), html.escape(compared.subject.capitalize())
    apart = list(compared.differences[compared.best])
    differences = [
        ([html.escape(name)], _cells(metrics, apart, signed=True), name == compared.best)
        for name, metrics in compared.differences.items()
    ]
    return (
        f"<h2>{subject} and its baselines</h2><p>{html.escape(words)}</p>{_html_table(['', *names], rows)}"
        f"<h2>{subject} less each baseline</h2>"
        "<p>Paired by query, with 95 % intervals; the best baseline is marked.</p>"
        f"{_html_table(['', *apart], differences)}"
    )


def groups_html(groups: Sequence[Group], names: list[str]) -> str:
    """Write the figures of every group of queries, with intervals."""
    if not groups:
        return ""
    rows = []
    for group in groups:
        of = f"{html.escape(group.name)}<small>{html.escape(group.about)}</small>"
        rows.append(([of, f"{group.queries:,}"], _cells(group.metrics, names), False))
    return f"<h2>By group of queries</h2>{_html_table(['', 'queries', *names], rows)}"


def by_time_html(by_time: Sequence[NatsAt]) -> str:
    """Write the likelihood of the last period's pairs by weekday and by hours, with the gain of the calendar."""
    if not by_time:
        return ""
    rows = [
        ([each.time, f"{each.pairs:,.0f}"], f"<td>{each.nats:.3f}</td><td>{each.gain:+.3f}</td>", False)
        for each in by_time
        if each.pairs
    ]
    says = "Decayed counts, in nats a pair of the last period, UTC, and what the calendar of the forecast adds."
    heads = ["", "pairs", "nats", "calendar"]
    return f"<h2>Popularity by weekday and hour</h2><p>{says}</p>{_html_table(heads, rows)}"


def price_html(dial: Dial, k: str) -> str:
    """Write what each step of λ gives and takes: recall and exposure of every bucket, and the exchange rate."""
    points = _lambdas(dial)
    if len(points) < 2:
        return ""
    recall, tail = f"recall@{k}", f"recall@{k}/tail"
    names = [recall, *(f"{name}@{k}/{bucket}" for name in ("recall", "exposure") for bucket in BUCKET_NAMES)]
    changes = [["", "", ""]]
    for before, after in pairwise(points):
        gained, of_tail = (after.metrics[name].value - before.metrics[name].value for name in (recall, tail))
        changes.append([f"{gained:+.4f}", f"{of_tail:+.4f}", f"{gained / of_tail:.2f}" if of_tail else "–"])
    rows = [
        (
            [f"{point.bias_removal:g}"],
            "".join(f"<td>{cell}</td>" for cell in [*_values(point.metrics, names), *change]),
            point.bias_removal == dial.default.bias_removal,
        )
        for point, change in zip(points, changes, strict=True)
    ]
    words = (
        "The changes are from the λ above. A rate of −2: two points of recall for every point that the tail loses. "
        "evaluation.floor holds the default to a least recall of a bucket, or to a share of what it is at another λ, "
        "by λ or by a bonus."
    )
    heads = ["λ", *names, "Δ recall", "Δ tail", "Δ recall / Δ tail"]
    return f"<h2>What recall costs the tail</h2><p>{words}</p>{_html_table(heads, rows)}"


def _html_table(headings: Sequence[str], rows: Iterable[tuple[list[str], str, bool]]) -> str:
    """Write a table of rows: what they are of, cells, and whether the row is marked; all but headings as HTML."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "".join(
        f"<tr{' class=chosen' if marked else ''}>{''.join(f'<th>{it}</th>' for it in of)}{cells}</tr>"
        for of, cells, marked in rows
    )
    return scrolled(head, body)


def _values(metrics: Mapping[str, Interval], names: Iterable[str]) -> list[str]:
    return [f"{metrics[name].value:.4f}" if name in metrics else "" for name in names]


def _cells(metrics: Mapping[str, Interval], names: Iterable[str], *, signed: bool = False) -> str:
    """Write figures as cells, each with its interval if it has one."""
    form = "+.4f" if signed else ".4f"

    def cell(figure: Interval | None) -> str:
        if figure is None:
            return "<td></td>"
        bounded = figure.low is not None and figure.high is not None
        between = " to " if signed else "–"
        interval = f"<small>{figure.low:{form}}{between}{figure.high:{form}}</small>" if bounded else ""
        return f"<td>{figure.value:{form}}{interval}</td>"

    return "".join(cell(metrics.get(name)) for name in names)


def _dials(dial: Dial) -> dict[str, int]:
    """Return the dials of a table with their places in a setting: λ, and others where the curve has them."""
    return {
        symbol: at
        for at, symbol in enumerate(_SYMBOLS)
        if at == 0 or any(Setting.of(point)[at] for point in dial.curve)
    }


def _at(dial: Dial, point: CurvePoint) -> list[str]:
    return [f"{Setting.of(point)[at]:g}" for at in _dials(dial).values()]


def _is_default(dial: Dial, point: CurvePoint) -> bool:
    return Setting.of(point) == dial.default


def _lambdas(dial: Dial) -> list[CurvePoint]:
    """Get the points at μ = 0 and the served ω, by rising λ."""
    return line_of(dial.curve, "bias_removal", dial.default)


def _line_plots(symbol: str, words: str, points: list[CurvePoint], default: Setting, k: str) -> list[str]:
    """Plot recall and exposure over one dial; nothing of a line of one point."""
    if len(points) < 2:
        return []
    at = _SYMBOLS.index(symbol)
    grid = [Setting.of(point)[at] for point in points]
    return [
        plot(
            lambda axes: _recall(axes, grid, points, default[at], words, k),
            f"Recall@{k} over all pairs' queries and per bucket, against the dial {symbol}",
        ),
        plot(
            lambda axes: _exposure(axes, grid, points, default[at], words.partition("  (")[0], k),
            f"Share of the top {k} given to head, torso, tail and new, against {symbol}",
        ),
    ]


def plot_dial(bundle: Bundle, k: int = 20) -> Figure:
    """Plot recall and exposure by bucket, and coverage, over the λ of a bundle's curve.

    Raises:
        ValueError: the curve has no figures for k results, or fewer than two points.
    """
    dial = Dial.of_manifest(bundle.manifest)
    points, coverage = _lambdas(dial), f"coverage@{k}"
    if len(points) < 2 or coverage not in points[0].metrics:
        measured = sorted(points[0].metrics) if points else "nothing"
        raise ValueError(f"k = {k} is not allowed because a curve needs two points with {coverage}; found {measured}")
    grid, default = [point.bias_removal for point in points], dial.default.bias_removal
    with style():
        figure = Figure(figsize=(11, 3.8), dpi=90, layout="constrained")
        recall, exposure, shown = figure.subplots(1, 3)
        _recall(recall, grid, points, default, "λ", str(k))
        _exposure(exposure, grid, points, default, "λ", str(k))
        shown.plot(grid, [point.metrics[coverage].value for point in points], color=INK, linewidth=2.5)
        shown.axvline(default, color=SOFT, linestyle="--", linewidth=1)
        shown.set(title="Coverage of the catalogue", xlabel="λ", ylim=(0, 1))
        # One legend for all: those of the panels are wider than a panel here.
        figure.legend(*recall.get_legend_handles_labels(), ncols=5, loc="outside lower center")
        for axes in (recall, exposure, shown):
            axes.margins(x=0)
            if (own := axes.get_legend()) is not None:
                own.remove()
    return figure


def _removes(dial: Dial) -> str:
    noise = dial.bias_removal.noise
    if noise.startswith("p_n(y|x)^0"):
        return "adds p_n(y|x), of which training left nothing to remove"
    return "has nothing to remove" if removes_nothing(noise) else f"removes {noise}"


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
    """Write each bucket's name where its area is high, but not at an edge, which would cut the name."""
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
