"""The page of a release: what its build measured of recall, speed and memory, to choose a kind or a floor by."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, page, plot, scrolled
from longtail.index.manifests import RecallAt, ReleaseManifest, Trial

_COLOURS = (BLUE, AMBER, GREEN, INK)
_SELECTIONS = {"random": "of random labels", "near": "near one query", "rare": "of the least popular"}


def release_report(index: ReleaseManifest) -> bytes:
    """Create one file of HTML that needs no network."""
    points = index.curve
    plots, body = [], ""
    if points:
        plots.append(plot(partial(_speed, index=index), "Lowest recall against queries per second, of every kind"))
        body += _curve_table(index)
    if len([point for point in points if point.kind == index.kind]) > 1:
        plots.append(plot(partial(_dials, index=index), "Recall of every effort along the dials"))
    if index.filtered is not None:
        plots.append(plot(partial(_filters, index=index), "Lowest recall under filters, by the share of the labels"))
    if index.efforts:
        body += _efforts_table(index)
    return page(f"{index.name}: index", _intro(index), _facts(index), plots, body)


def _intro(index: ReleaseManifest) -> str:
    return html.escape(
        f"Recall@{index.recall_k} is of {index.recall_queries} calibration queries against exact search, at every "
        "place on the dials. Queries per second are of one core, one query at a time, all places alike."
    )


def _facts(index: ReleaseManifest) -> dict[str, str]:
    lowest = min(index.recall, key=lambda at: at.recall)
    served = next((point for point in index.curve if _is_served(point, index)), None)
    facts = {
        "Bundle": index.bundle,
        "Labels": f"{index.labels:,} × {index.dim} coordinates",
        "Index": index.kind if index.kind == index.spec else f"{index.kind}, of {index.spec}",
        "Exact head": f"{index.head:,} labels" if index.head else "",
        "Effort at the most": index.effort.words,
        f"Lowest recall@{index.recall_k}": f"{lowest.recall:.4f} at {lowest.where}",
        "Recall floor": f"{index.recall_floor:g}",
        "Queries per second at that effort": f"{served.queries_per_second:,.0f}"
        if served and served.queries_per_second
        else "",
        "Bytes per label": "" if index.bytes_per_label is None else f"{index.bytes_per_label:g}",
        "Built in": f"{index.build_seconds:,.0f} s on the {index.device.upper()}, FAISS {index.faiss}",
        "Lists trained by": index.partition.trained_by if index.partition else "",
    }
    return {name: value for name, value in facts.items() if value}


def _is_served(point: Trial, index: ReleaseManifest) -> bool:
    return (point.kind, point.effort) == (index.kind, index.effort)


def _speed(axes: Axes, index: ReleaseManifest) -> None:
    kinds = list(dict.fromkeys(point.kind for point in index.curve))
    for colour, kind in zip(_COLOURS, kinds, strict=False):
        points = [point for point in index.curve if point.kind == kind]
        axes.scatter(*_recall_and_speed(points), color=colour, s=22)
        best = _undominated(points)
        axes.plot(*_recall_and_speed(best), color=colour, label=f"{kind}, {points[0].bytes_per_label:g} bytes a label")
    served = [point for point in index.curve if _is_served(point, index)]
    axes.plot(*_recall_and_speed(served), "o", color=INK, markersize=13, fillstyle="none", label="served")
    axes.axvline(index.recall_floor, color=SOFT, linestyle="--", linewidth=1, label="floor")
    axes.set(title="What recall costs", xlabel=f"lowest recall@{index.recall_k}", ylabel="queries per second")
    axes.set_ylim(bottom=0)
    left, _ = axes.get_xlim()
    axes.set_xlim(left, 1 + (1 - left) / 20)
    axes.legend(fontsize=8)


def _recall_and_speed(points: Sequence[Trial]) -> tuple[list[float], list[float]]:
    return [point.lowest.recall for point in points], [point.queries_per_second or 0.0 for point in points]


def _undominated(points: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats in both recall and speed, by recall."""
    best: list[Trial] = []
    for point in sorted(points, key=lambda point: (point.lowest.recall, point.queries_per_second or 0.0), reverse=True):
        if not best or (point.queries_per_second or 0.0) > (best[-1].queries_per_second or 0.0):
            best.append(point)
    return best[::-1]


def _dials(axes: Axes, index: ReleaseManifest) -> None:
    points = [point for point in index.curve if point.kind == index.kind]
    names = [_place(at) for at in points[0].recall]
    for shade, point in enumerate(points, start=1):
        colour = INK if _is_served(point, index) else BLUE
        recalls = [at.recall for at in point.recall]
        axes.plot(names, recalls, "o-", color=colour, alpha=0.25 + 0.75 * shade / len(points), label=point.effort.words)
    axes.axhline(index.recall_floor, color=SOFT, linestyle="--", linewidth=1)
    axes.set(title=f"{index.kind} along the dials", ylabel=f"recall@{index.recall_k}")
    axes.tick_params(axis="x", labelrotation=30 if len(names) > 5 else 0)
    axes.legend(fontsize=8)


def _place(at: RecallAt) -> str:
    return at.where.replace(", ", "\n")


def _filters(axes: Axes, index: ReleaseManifest) -> None:
    measured = index.filtered.recall if index.filtered else []
    for colour, (selection, words) in zip(_COLOURS, _SELECTIONS.items(), strict=False):
        lowest: dict[float, float] = {}
        for at in measured:
            if at.selection == selection:
                lowest[at.selectivity] = min(at.lowest, lowest.get(at.selectivity, 1.0))
        axes.plot(list(lowest), list(lowest.values()), "o-", color=colour, label=words)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    axes.axhline(index.recall_floor, color=SOFT, linestyle="--", linewidth=1)
    axes.set(
        title="Under filters", xlabel="share of the labels that may be answered", ylabel="lowest recall, any bucket"
    )
    axes.legend(fontsize=8)


def _curve_table(index: ReleaseManifest) -> str:
    places = index.curve[0].recall
    head = "".join(
        f"<th>{html.escape(name)}</th>"
        for name in ("kind", "effort", "queries/s", "bytes a label", *(at.where for at in places))
    )
    rows = ""
    for point in index.curve:
        rate = "" if point.queries_per_second is None else f"{point.queries_per_second:,.0f}"
        cells = (point.kind, point.effort.words, rate, f"{point.bytes_per_label:g}")
        recalls = "".join(f"<td>{at.recall:.4f}</td>" for at in point.recall)
        chosen = " class=chosen" if _is_served(point, index) else ""
        rows += f"<tr{chosen}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}{recalls}</tr>"
    return f"<h2>Every setting, recall@{index.recall_k}</h2>{scrolled(head, rows)}"


def _efforts_table(index: ReleaseManifest) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("place on the dials", "the best", "effort", "recall"))
    rows = "".join(
        f"<tr><td>{html.escape(at.where)}</td><td>{at.k}</td><td>{at.effort.words}</td><td>{at.recall:.4f}</td></tr>"
        for at in index.efforts
    )
    return f"<h2>What a query pays, where nearly all labels may be answered</h2>{scrolled(head, rows)}"
