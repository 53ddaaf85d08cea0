"""report.html of a study: history, front, importance and every range, and the table of all trials."""

from __future__ import annotations

import html
import warnings
from collections import Counter
from functools import partial
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, page, plot, scrolled
from longtail.trainer.config.tune import maximised, objectives_of
from longtail.trainer.tuning.ranges import Ranges
from longtail.trainer.tuning.result import Trial, TuneResult, figures_in_words, value_in_words
from longtail.trainer.tuning.study import Study, optuna_module

_FEW = 10
"""Complete trials below which an importance would say nothing."""


def tune_report(result: TuneResult, study: Study, ranges: Ranges) -> bytes:
    """One file that needs no network."""
    objectives = objectives_of(ranges.tune, ranges.recipe.evaluation)
    important = importances(study, result)
    plots = [
        plot(partial(_history, result=result, metric=name), f"{name} of every trial, in order") for name in objectives
    ]
    for other in result.axes[1:]:
        words = f"{result.axes[0]} against {other}: all trials and the Pareto front"
        plots.append(plot(partial(_front, result=result, ranges=ranges, other=other), words))
    if important:
        words = "Share of each range in what sets the best trials apart"
        plots.append(plot(partial(_importance, important=important), words))
    for key in important or ranges.keys:
        words = f"{objectives[0]} of every trial against {key}"
        plots.append(plot(partial(_slice, result=result, ranges=ranges, key=key, metric=objectives[0]), words))
    return page(
        f"{ranges.recipe.name}: tune", _intro(result, ranges), _facts(result, ranges), plots, _table(result, ranges)
    )


def importances(study: Study, result: TuneResult) -> dict[str, float]:
    """Share of every key by PED-ANOVA [Watanabe et al. 2023], highest first: of the objective, or with several of being
    on the front; none of few trials or where they tell nothing.
    """
    if sum(trial.found is not None for trial in result.trials) < _FEW:
        return {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found: dict[str, float] = optuna_module().importance.get_param_importances(study.optuna)
    return {} if said else found


def _intro(result: TuneResult, ranges: Ranges) -> str:
    words = (
        "Trials are measured on valid, at the λ that each chose there; test was left alone. Trial "
        f"{result.best.number} is the recipe in best.toml: {figures_in_words(result.best.found, ranges)}."
    )
    if result.best.missed:
        words += f" No trial meets the constraints; it misses them by least, {result.best.missed:.4f}."
    return html.escape(words)


def _facts(result: TuneResult, ranges: Ranges) -> dict[str, str]:
    evaluation, counts = ranges.recipe.evaluation, Counter(trial.state for trial in result.trials)
    facts = {
        "Trials": ", ".join(f"{number} {state}" for state, number in counts.items()),
        "Objectives": ", ".join(
            f"{name}, {'highest' if maximised(name) else 'lowest'}" for name in objectives_of(ranges.tune, evaluation)
        ),
        "Constraints": ", ".join(f"{name} {bound}" for name, bound in ranges.tune.constraints.items()),
        "Sampler": f"{ranges.tune.sampler}, seed {ranges.tune.seed}",
        "Front": ", ".join(f"trial {trial.number}" for trial in result.front),
        "Training": f"{sum(trial.found.seconds for trial in result.trials if trial.found) / 60:.1f} minutes",
    }
    facts |= {key: value_in_words(value) for key, value in result.best.values.items()}
    return {name: value for name, value in facts.items() if value}


def _within(result: TuneResult) -> tuple[list[Trial], list[Trial]]:
    complete = [trial for trial in result.trials if trial.found is not None]
    return [trial for trial in complete if not trial.missed], [trial for trial in complete if trial.missed]


def _dots(axes: Axes, result: TuneResult, x: dict[int, float], metric: str) -> None:
    """Complete trials by their x, those outside the constraints hollow, the best ringed."""
    within, outside = _within(result)
    for trials, face, label in ((within, BLUE, "complete"), (outside, "none", "outside the constraints")):
        if trials:
            at = [x[trial.number] for trial in trials], [trial.figures[metric] for trial in trials]
            axes.scatter(*at, facecolors=face, edgecolors=BLUE, s=26, label=label, zorder=3)
    best = x[result.best.number], result.best.figures[metric]
    axes.scatter(*best, facecolors="none", edgecolors=AMBER, s=110, linewidths=2, label="best.toml", zorder=4)


def _legend(axes: Axes) -> None:
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _history(axes: Axes, result: TuneResult, metric: str) -> None:
    _dots(axes, result, {trial.number: trial.number for trial in result.trials}, metric)
    within, _ = _within(result)
    if within:
        so_far = accumulate((trial.figures[metric] for trial in within), max if maximised(metric) else min)
        axes.step(
            [trial.number for trial in within], list(so_far), where="post", color=INK, linewidth=1, label="so far"
        )
    if pruned := [trial for trial in result.trials if trial.state == "pruned"]:
        at = [trial.number for trial in pruned], [max(trial.validated) for trial in pruned]
        axes.scatter(*at, marker="x", color=SOFT, s=22, label="pruned, its best epoch")
    axes.set(title=metric, xlabel="trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)


def _front(axes: Axes, result: TuneResult, ranges: Ranges, other: str) -> None:
    first = result.axes[0]
    _dots(axes, result, {trial.number: trial.figures[other] for trial in result.trials if trial.found}, first)
    line = sorted((trial.figures[other], trial.figures[first]) for trial in result.front)
    axes.plot(*zip(*line, strict=True), "-", color=GREEN, marker=".", linewidth=1.5, label="Pareto front", zorder=2)
    for name, draw in ((other, axes.axvline), (first, axes.axhline)):
        bound = ranges.tune.constraints.get(name)
        for limit in () if bound is None else (bound.at_least, bound.at_most):
            if limit is not None:
                draw(limit, color=SOFT, linestyle="--", linewidth=1)
    axes.set(title="What one costs the other", xlabel=other, ylabel=first)
    _legend(axes)


def _importance(axes: Axes, important: dict[str, float]) -> None:
    keys = list(reversed(important))
    bars = axes.barh(keys, [important[key] for key in keys], color=BLUE, height=0.55)
    axes.bar_label(bars, fmt="%.2f", padding=3, color=INK)
    axes.set(title="Importance (PED-ANOVA)", xlim=(0, 1.1))
    axes.grid(visible=False, axis="y")


def _slice(axes: Axes, result: TuneResult, ranges: Ranges, key: str, metric: str) -> None:
    values, complete = ranges.tune.ranges[key], [trial for trial in result.trials if trial.found is not None]
    if values.choices is None:
        x = {trial.number: float(trial.values[key]) for trial in complete}
        if values.log:
            axes.set_xscale("log")
            axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
            axes.xaxis.set_minor_formatter("")
    else:
        x = {trial.number: float(values.choices.index(trial.values[key])) for trial in complete}
        names = [value_in_words(value) for value in values.choices]
        axes.set_xticks(range(len(names)), [name if len(name) < 24 else f"{name[:22]}…" for name in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
    _dots(axes, result, x, metric)
    axes.set(title=key, ylabel=metric)
    _legend(axes)


def _table(result: TuneResult, ranges: Ranges) -> str:
    evaluation = ranges.recipe.evaluation
    metrics = list(
        dict.fromkeys(
            [*result.axes, *objectives_of(ranges.tune, evaluation), *ranges.tune.constraints, evaluation.metric]
        )
    )
    heads = ["trial", "", *metrics, "λ", "μ", "epochs", "seconds", *ranges.keys]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    rows = "".join(_row(trial, result, ranges, metrics) for trial in result.trials)
    return f"<h2>Every trial</h2>{scrolled(head, rows)}"


def _row(trial: Trial, result: TuneResult, ranges: Ranges, metrics: list[str]) -> str:
    found, words = trial.found, str(trial.state)
    cells = [""] * (len(metrics) + 4)
    if found is not None:
        words = "outside the constraints" if trial.missed else "on the front" if trial in result.front else ""
        cells = [
            *(f"{found.metrics[name]:.4f}" for name in metrics),
            f"{found.bias_removal:g}",
            f"{found.popularity:g}",
        ]
        cells += [f"{found.epochs:g}", f"{found.seconds:.0f}"]
    elif trial.validated:
        cells[metrics.index(ranges.recipe.evaluation.metric)] = f"{max(trial.validated):.4f}"
    cells += [value_in_words(trial.values[key]) if key in trial.values else "" for key in ranges.keys]
    reason = f"<small>{html.escape(trial.reason)}</small>" if trial.reason else ""
    made = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    mark = " class=chosen" if trial is result.best else ""
    return f"<tr{mark}><th>{trial.number}</th><td>{html.escape(words)}{reason}</td>{made}</tr>"
