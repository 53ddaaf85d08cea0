"""Tables and plots of the studies, written between the markers of benchmarks/RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.seeds.run import Measured, load
from benchmarks.seeds.studies import SNM_KEEPS, Job

_BEGIN, _END = "<!-- seeds: begin -->", "<!-- seeds: end -->"
_BUCKETS = ("", "/head", "/torso", "/tail")
_BUCKET_TITLES = ("Full", "Head", "Torso", "Tail")
Figures = dict[Job, Measured]


def write(jobs: list[Job], out: Path, benchmarks: Path, *, quick: bool) -> None:
    """Write every table that has figures; a quick run prints them instead of touching RESULTS.md."""
    measured = {job: figures for job in jobs if (figures := load(job, out)) is not None}
    parts = []
    for study, section in _SECTIONS.items():
        of_study = {job: figures for job, figures in measured.items() if job.study == study}
        if of_study:
            parts.append(_TITLES[study])
        for data in dict.fromkeys(job.data for job in of_study):
            parts.append(section(data, {job: it for job, it in of_study.items() if job.data == data}, benchmarks))
    text = "\n\n".join(parts)
    if quick:
        print(text)
        return
    results = benchmarks / "RESULTS.md"
    before, _, rest = results.read_text(encoding="utf-8").partition(_BEGIN)
    results.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _best(rows: list[list[float]]) -> list[list[str]]:
    """Cells of three decimals, the best of each column in bold."""
    tops = [max(column) for column in zip(*rows, strict=True)]
    return [[f"**{x:.3f}**" if x == top else f"{x:.3f}" for x, top in zip(row, tops, strict=True)] for row in rows]


def _labeling_bias(data: str, figures: Figures, benchmarks: Path) -> str:
    epochs = next(iter(figures)).settings["training.epochs"]
    columns = [f"recall@{k}{bucket}" for k in (1, 10, 50) for bucket in _BUCKETS]
    head = ["scheme", *(f"R@{k} {title}" for k in (1, 10, 50) for title in _BUCKET_TITLES)]
    head += ["balanced error@10", "R@10 Full at λ = ½, 1"]
    rows = [[it.curve["0"][name] for name in columns] for it in figures.values()]
    cells = [
        [
            job.name, *row, f"{it.curve['0']['balanced_error@10']:.3f}",
            ", ".join(f"{it.curve[at]['recall@10']:.3f}" for at in ("0.5", "1")),
        ]
        for (job, it), row in zip(figures.items(), _best(rows), strict=True)
    ]  # fmt: skip
    _bars(data, figures, benchmarks / "plots" / f"r21-{data}.png")
    minutes = sum(it.seconds for it in figures.values()) / 60
    return (
        f"#### {data}, {epochs} epochs each, λ = 0, {minutes:.0f} minutes in all\n{_table(head, cells)}\n\n"
        f"![Recall@10 by bucket](plots/r21-{data}.png)"
    )


def _bars(data: str, figures: Figures, path: Path) -> None:
    by_name = {job.name: it for job, it in figures.items()}
    drawn = [name for name in by_name if name.startswith("softmax")]
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), sharex=True, layout="constrained")
    for axis, bucket, title in zip(axes, _BUCKETS, _BUCKET_TITLES, strict=True):
        values = [by_name[name].curve["0"][f"recall@10{bucket}"] for name in drawn]
        colors = ["#9aa0a6" if "full" in name else "#3b6fd4" if "in_batch" in name else "#e08a3c" for name in drawn]
        axis.barh([name.removeprefix("softmax ") for name in drawn], values, color=colors)
        axis.set_title(f"{title}, recall@10")
        axis.invert_yaxis()
        axis.label_outer()
    figure.suptitle(f"{data}: softmax, scores as trained (λ = 0)")
    _save(figure, path)


def _mining(data: str, figures: Figures, benchmarks: Path) -> str:  # noqa: ARG001
    by_name = {job.name: it.curve["0"] for job, it in figures.items()}
    metrics = [f"{metric}@{k}" for metric in ("recall", "precision") for k in (1, 3, 5)]
    head = ["loss", "metric", "all negatives", *(f"top {keep}" for keep in SNM_KEEPS)]
    rows = []
    for family in [family for family in ("hinge", "softmax") if f"{family} all" in by_name]:
        for metric in metrics:
            plain = by_name[f"{family} all"][metric]
            mined = [by_name.get(f"{family} top {keep}", {}).get(metric, math.nan) for keep in SNM_KEEPS]
            ratios = [value / plain if plain else math.nan for value in mined]
            best = max([1.0, *(ratio for ratio in ratios if not math.isnan(ratio))])
            texts = ["–" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios]
            cells = [f"**{text}**" if ratio == best else text for text, ratio in zip(texts, ratios, strict=True)]
            rows.append([family, metric, f"{plain:.4f}", *cells])
    epochs = " and ".join(dict.fromkeys(job.settings["training.epochs"] for job in figures))
    return f"#### {data}, {epochs} epochs each, λ = 0; top-k as multiples of all negatives\n{_table(head, rows)}"


def _softmax_gap(data: str, figures: Figures, benchmarks: Path) -> str:  # noqa: ARG001
    rows = [
        [job.name, f"{it.curve['0']['precision@1']:.1%}", f"{it.curve['0']['log_likelihood']:.3f}"]
        for job, it in figures.items()
    ]
    return f"#### {data}, smallest label\n{_table(['method', 'accuracy', 'log-likelihood, nats'], rows)}"


_REMOVED = {"adversarial": "1", "frequency": "1"}
"""Methods whose scores are read with the bias removed; the others' λ is 0."""


def _approximations(data: str, figures: Figures, benchmarks: Path) -> str:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows = []
    for job, it in figures.items():
        chosen = _REMOVED.get(job.name, "0")
        seconds = [epoch["seconds"] for epoch in it.epochs]
        for axis, metric in zip(axes, ("log_likelihood", "precision@1"), strict=True):
            values = [epoch["curve"][chosen][metric] for epoch in it.epochs]
            axis.plot(seconds, values, marker="o", label=job.name)
        last = it.epochs[-1]["curve"]
        rows.append([
            job.name, chosen, f"{last[chosen]['precision@1']:.2%}", f"{last[chosen]['log_likelihood']:.3f}",
            f"{last['0']['precision@1']:.2%}", f"{last['0']['log_likelihood']:.3f}", f"{seconds[-1]:.0f}",
        ])  # fmt: skip
    axes[0].set(title="Predictive log-likelihood, nats a pair", xlabel="seconds of training, tree included")
    axes[1].set(title="Predictive accuracy", xlabel="seconds of training, tree included")
    axes[1].legend(fontsize="small")
    figure.suptitle(data)
    _save(figure, benchmarks / "plots" / f"bm20-{data}.png")
    head = ["method", "λ", "accuracy", "log-likelihood", "accuracy, λ = 0", "log-likelihood, λ = 0", "seconds"]
    return f"#### {data}\n{_table(head, rows)}\n\n![Learning curves](plots/bm20-{data}.png)"


_PUBLISHED = {
    "FastXML": (69.61, 64.12, 59.27, 32.35, 34.51, 35.43),
    "PfastreXML": (67.13, 62.33, 58.62, 34.57, 34.80, 35.86),
    "Parabel": (67.44, 61.83, 56.75, 32.69, 34.00, 34.53),
    "SLEEC": (67.59, 61.38, 56.56, 32.11, 33.21, 33.83),
}


def _propensities(data: str, figures: Figures, benchmarks: Path) -> str:  # noqa: ARG001
    ((_, it),) = figures.items()
    names = [f"{metric}@{k}" for metric in ("precision", "psp") for k in (1, 3, 5)]
    rows = [
        [f"Longtail, λ = {at}" + (", chosen on valid" if float(at) == it.chosen else "")]
        + [f"{100 * point[name]:.2f}" for name in names]
        for at, point in it.curve.items()
    ]
    rows += [[name, *(f"{value:.2f}" for value in values)] for name, values in _PUBLISHED.items()]
    head = ["model", *(f"{metric}@{k}" for metric in ("P", "PSP") for k in (1, 3, 5))]
    return f"#### {data}, recipe of the trainer, {it.seconds / 60:.0f} minutes\n{_table(head, rows)}"


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


_TITLES = {
    "r21": "### Sampler × weight × family, by bucket [R21 §5.2]",
    "re19": "### Mining the hardest negatives [Re19 Table 2]",
    "a2": "### Full softmax and uniform negatives [BM20 A.2]",
    "bm20": "### Approximations of softmax over time [BM20 Fig. 1]",
    "delicious": "### Precision and propensity-scored precision",
}
_SECTIONS: dict[str, Callable[[str, Figures, Path], str]] = {
    "r21": _labeling_bias,
    "re19": _mining,
    "a2": _softmax_gap,
    "bm20": _approximations,
    "delicious": _propensities,
}
