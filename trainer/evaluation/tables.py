"""Two tables of a report: the model beside its baselines, and what recall costs the tail along λ."""

from __future__ import annotations

import html
from itertools import pairwise
from typing import NamedTuple

from rich.table import Table

from longtail.bundle import BUCKET_NAMES, CurvePoint
from longtail.bundle.page import scrolled
from longtail.trainer.evaluation.comparison import Comparison
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.metric_registry import k_of


def baseline_table(compared: Comparison) -> Table:
    """Return a terminal table, at the k of the recipe's metric: the model at its default, every baseline, their
    seconds."""
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
    """Return the same with these metrics and their intervals, the verdict in words, and what was left out."""
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
    return f"<h2>Beside baselines</h2><p>{html.escape(words)}</p>{scrolled(head, rows)}"


class Step(NamedTuple):
    """From one λ of a curve to the next."""

    start: CurvePoint
    end: CurvePoint
    recall: float
    tail: float

    @property
    def rate(self) -> float | None:
        """Get recall gained per recall lost in the tail, Δrecall / Δtail recall; None where the tail stays as it is."""
        return self.recall / self.tail if self.tail else None


def steps(dial: Dial, k: str) -> list[Step]:
    """Return what every step of λ at μ = 0 changes, by ascending λ."""
    line = sorted((point for point in dial.curve if not point.popularity), key=lambda point: point.bias_removal)
    made = []
    for start, end in pairwise(line):
        recall, tail = (
            end.metrics[name].value - start.metrics[name].value for name in (f"recall@{k}", f"recall@{k}/tail")
        )
        made.append(Step(start, end, recall, tail))
    return made


def price_html(dial: Dial, k: str) -> str:
    """Get what each step of λ gives and takes: recall of every bucket after it, its exposure, and the exchange rate."""
    made = steps(dial, k)
    if not made:
        return ""
    asked = [f"recall@{k}", *(f"{name}@{k}/{bucket}" for name in ("recall", "exposure") for bucket in BUCKET_NAMES)]
    names = [name for name in asked if name in made[0].start.metrics]  # of older curves not all
    heads = ["λ", *names, "Δ recall", "Δ tail", "Δ recall / Δ tail"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    rows = ""
    for point, step in zip([made[0].start, *(step.end for step in made)], [None, *made], strict=True):
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
