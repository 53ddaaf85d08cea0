"""Draw the page of `longtail-serve off-policy`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, page, plot
from longtail.serving.off_policy import COVERED, settings_table

_COLOURS = {"all": INK, **dict(zip(BUCKET_NAMES, (BLUE, AMBER, GREEN, "#9333ea"), strict=True))}
_Setting = Mapping[str, Any]


def html_report(report: Mapping[str, Any]) -> bytes:
    """Draw a report of `off_policy` as one HTML file."""
    logged, *others = report["settings"]
    covered = [setting for setting in others if setting["covered"] >= COVERED]
    intro = (
        "What release <b>{}</b> would bring at other λ, estimated from its answers that explored. Bounds of a "
        "figure hold at every look and for all λ together, with {:.0%}. Grey: the log could show the labels of "
        "less than {:.0%} of the slots; each of the others brings nothing or one label chosen."
    ).format(html.escape(report["release"]), report["confidence"], COVERED)
    facts = {
        "from": report["since"] or "the beginning",
        "to": report["until"],
        **{name: f"{report[name]:,}" for name in ("answers", "units", "chosen")},
        "answers without the feature of --unit": f"{report['without_unit']:,}",
        **{f"left out: answers {what}": f"{count:,}" for what, count in report["left_out"].items()},
    }
    plots = [
        plot(lambda axes: _chosen(axes, logged, others), "Labels chosen per answer against λ, with bounds"),
        plot(lambda axes: _exposure(axes, others), "Share of the slots given to head, torso, tail and new, against λ"),
        plot(
            lambda axes: _recall(axes, covered), "Recall of every bucket against λ, with bounds, where the log can tell"
        ),
        plot(lambda axes: _covered(axes, others), "Share of the slots that the log could show, against λ"),
    ]
    body = f"<h2>Every λ</h2>{settings_table(report).html()}"
    return page("Which λ, from traffic", intro, facts, plots, body)


def _lambdas(settings: Sequence[_Setting]) -> list[float]:
    return [setting["bias_removal"] for setting in settings]


def _chosen(axes: Axes, logged: _Setting, others: Sequence[_Setting]) -> None:
    axes.axhline(logged["chosen_per_answer"]["value"], color=SOFT, linestyle="--", linewidth=1, label="own λ")
    for setting in others:
        figure, colour = setting["chosen_per_answer"], BLUE if setting["covered"] >= COVERED else SOFT
        bounds = [[figure["value"] - figure["low"]], [figure["high"] - figure["value"]]]
        axes.errorbar([setting["bias_removal"]], [figure["value"]], bounds, color=colour, marker="o", capsize=3)
    axes.set(title="Labels chosen per answer", xlabel="bias removal λ", ylim=(0, None))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _exposure(axes: Axes, others: Sequence[_Setting]) -> None:
    shares = [[setting["exposures"][bucket] for setting in others] for bucket in BUCKET_NAMES]
    colours = [_COLOURS[bucket] for bucket in BUCKET_NAMES]
    axes.stackplot(_lambdas(others), shares, labels=BUCKET_NAMES, colors=colours, alpha=0.85)
    axes.set(title="Exposure, counted", xlabel="bias removal λ", ylim=(0, 1))
    axes.margins(x=0)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _recall(axes: Axes, covered: Sequence[_Setting]) -> None:
    for name, colour in _COLOURS.items():
        measured = [setting for setting in covered if setting["recall"][name]]
        grid, figures = _lambdas(measured), [setting["recall"][name] for setting in measured]
        low, value, high = ([figure[bound] for figure in figures] for bound in ("low", "value", "high"))
        axes.plot(grid, value, color=colour, marker="o", markersize=3.5, label=name)
        axes.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(title="Recall, of what the log could show", xlabel="bias removal λ", ylim=(0, 1))
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _covered(axes: Axes, others: Sequence[_Setting]) -> None:
    grid, covered = _lambdas(others), [setting["covered"] for setting in others]
    axes.plot(grid, covered, color=INK, marker="o", markersize=3.5, label="covered")
    axes.axhline(COVERED, color=AMBER, linestyle="--", linewidth=1, label="needed")
    axes.set(title="Slots that the log could show", xlabel="bias removal λ", ylim=(0, 1.05))
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
