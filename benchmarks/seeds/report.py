"""Tables, findings and plots of measured records, written between the markers of benchmarks/RESULTS.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.seeds.findings import Estimate, Finding, counted_once, estimate_of, findings, holm, learns, verdict
from benchmarks.seeds.store import Record, Store, by_every_seed
from benchmarks.seeds.study import FULL, POPULARITY, SEEDS, Study
from longtail.bundle.arrays import Float64

_ERROR = 0.05
_BEGIN, _END = "<!-- seeds: begin -->", "<!-- seeds: end -->"
_TITLES = {
    "profiles": "### Labelling bias under long-tail profiles [R21 §5.1]",
    "r21": "### Sampler × weight by bucket [R21 §5.2]",
    "re19": "### Mining the hardest negatives [Re19 Table 2]",
    "a2": "### Full softmax and uniform negatives [BM20 A.2]",
    "bm20": "### Approximations of softmax over time [BM20 Fig. 1]",
}
_SHORT = {
    "pair_recall@": "Full R@", "recall@": "R@", "balanced_error@": "bal. error@", "precision@": "P@", "psp@": "PSP@",
    "log_likelihood": "log-likelihood", "optimizer.embedding_learning_rate": "rate", "model.temperature": "T",
    "optimizer.l2": "L2", "loss.regularizer": "reg.",
}  # fmt: skip


def write(studies: list[Study], store: Store, benchmarks: Path, *, printed: bool = False) -> None:
    """Write tables, findings and plots to RESULTS.md, or only print the figures if `printed`."""
    measured = {study.name: list(store.records(study).values()) for study in studies}
    by_name = {study.name: study for study in studies}
    parts = [_findings(measured, by_name, with_missing=not printed)]
    for paper, title in _TITLES.items():
        sections = [
            _section(study, measured[study.name], None if printed else benchmarks / "plots")
            for study in studies
            if study.paper == paper and any(it.test for it in measured[study.name])
        ]
        if paper == "bm20" and sections and (by_noise := store.overlaps()):
            sections.insert(1, _overlaps(by_noise))
        parts += [title, *sections] if sections else []
    spent = sum(it.seconds for records in measured.values() for it in records)
    runs = sum(len(records) for records in measured.values())
    parts.append(
        f"{runs} runs of {len(by_name)} studies, {spent / 60:.0f} minutes of one core in their training steps."
    )
    text = "\n\n".join(parts)
    if printed:
        print(text)
        return
    results = benchmarks / "RESULTS.md"
    before, _, rest = results.read_text(encoding="utf-8").partition(_BEGIN)
    results.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


_Judged = tuple[Finding, Estimate | None]
_TABLES = {
    "paper": ("What reproduces", "Claims of the papers."),
    "extension": (
        "Beyond what the papers claim",
        "[R21] says that relative weights beat constant ones on Head, not that they beat the full loss there, and has "
        "no tail weights [R21 eq. 16] on retrieval data.",
    ),
    "us": ("Our own hypotheses", "What we expected from reading the papers, and of an option of ours."),
}


def _findings(measured: dict[str, list[Record]], studies: dict[str, Study], *, with_missing: bool) -> str:
    """Return a table of findings by claimant; `with_missing` keeps findings without an estimate."""
    judged = counted_once([(finding, estimate_of(finding, measured.get(finding.study, []))) for finding in findings()])
    parts = []
    for claimed_by, (title, words) in _TABLES.items():
        mine = [
            (finding, estimate)
            for finding, estimate in judged
            if finding.claimed_by == claimed_by and (with_missing or estimate is not None)
        ]
        if mine:
            parts += [f"### {title}\n{words} {_summary(mine, measured, studies)}", _table(mine, measured, studies)]
        if claimed_by == "paper":
            parts.insert(1, _CAVEATS)
    return "\n\n".join(parts)


def _verdict(
    finding: Finding, estimate: Estimate | None, measured: dict[str, list[Record]], studies: dict[str, Study]
) -> str:
    if finding.reason:
        return f"cannot be tested: {finding.reason}"
    if estimate is not None and not learns(studies[finding.study], measured[finding.study]):
        return "cannot be tested: the full loss is not ahead of popularity here"
    if estimate is None and finding.in_time and {finding.better, finding.worse} <= _measured(finding, measured):
        return "cannot be tested: the other method ends long before, the tree's time included"
    return verdict(estimate)


def _measured(finding: Finding, measured: dict[str, list[Record]]) -> set[str]:
    """Return the methods of a finding's study that are measured with every seed."""
    records = measured.get(finding.study, [])
    return {it.method for it in records if by_every_seed(it.method, records)}


def _summary(rows: list[_Judged], measured: dict[str, list[Record]], studies: dict[str, Study]) -> str:
    """Describe the numbers of findings by verdict, individually and jointly."""
    counts = Counter(_verdict(*row, measured, studies).partition(":")[0].strip("*") for row in rows)
    sure = [estimate for estimate, p in _adjusted(rows).values() if p < _ERROR]
    return (
        f"In all: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}. Held together at 5 % (Holm), "
        f"{sum(it.lead > 0 for it in sure)} are reproduced and {sum(it.lead < 0 for it in sure)} opposite."
    )


def _adjusted(rows: list[_Judged]) -> dict[Finding, tuple[Estimate, float]]:
    """Return estimates with jointly adjusted p-values."""
    tested = [(finding, estimate) for finding, estimate in rows if estimate is not None]
    p_values = holm([estimate.p for _, estimate in tested])
    return {finding: (estimate, p) for (finding, estimate), p in zip(tested, p_values, strict=True)}


def _table(rows: list[_Judged], measured: dict[str, list[Record]], studies: dict[str, Study]) -> str:
    adjusted, lines = _adjusted(rows), []
    for finding, estimate in rows:
        lead, p = "–", "–"
        if estimate is not None:
            lead, p = _lead(finding, estimate.lead, estimate.low, estimate.high), _p(adjusted[finding][1])
        place = ["–", "–"] if finding.reason else [finding.study.partition(".")[2], _name(finding.metric)]
        verdict = _verdict(finding, estimate, measured, studies)
        lines.append([finding.source, finding.claim, *place, lead, p, verdict])
    return table(["source", "claim", "data", "metric", "lead [95 %]", "p (Holm)", "verdict"], lines)


def _p(value: float) -> str:
    return "< .001" if value < 0.001 else f"{value:.3f}".lstrip("0")


_CAVEATS = """\
The lead is of the method that the paper has ahead, positive where the paper is right, in points (hundredths;
nats for likelihoods). Intervals are Student's, of test queries and of three seeds, whose variance has two
degrees of freedom. *Reproduced*: the interval is above 0. The p-values are corrected for all contrasts of their
table.

Read them with care. Two rules were made after figures had been seen: a study whose full loss is not ahead of
popularity tests nothing, and a rival that ended before 90 % of the other's time proves nothing "in the same CPU
time" unless it is ahead. The first of the three seeds is also the one that rates, temperatures and λ were
chosen by. EXP and STEP are chosen on a balanced validation set, as their test sets are. Embeddings are 32 to
128 wide where the papers have 512. The contrast with NCE is read at λ = 0, where its scores are log-
probabilities; its table is at the λ that validation chose. That another method has the higher likelihood is a
remark of [BM20] on Amazon-670K, and the opposite holds on its Wikipedia-500K; on gowalla-history it is true
because the tree is worse than popularity."""


def _overlaps(by_noise: dict[str, float]) -> str:
    """Describe the overlap of each noise with the distribution of the generated data."""
    overlaps = ", ".join(f"{name} {value:.3f}" for name, value in by_noise.items())
    return (
        "Overlap 2 Σ_y p_D p_n / (p_D + p_n) of the noise with the law that made mixture-10k, mean over test rows, 1 "
        f"where they are the same: {overlaps}. It is what decides the signal-to-noise ratio of the gradient "
        "[BM20 eq. 12, Theorem 2]."
    )


def _lead(finding: Finding, *values: float) -> str:
    scale = 1 if finding.metric == "log_likelihood" else 100
    lead, low, high = (f"{scale * value:+.2f}" for value in values)
    return f"{lead} [{low}, {high}]"


def _section(study: Study, records: list[Record], plots: Path | None) -> str:
    """Format a study's table and plot."""
    tested = {method.name: by_every_seed(method.name, records) for method in study.methods}
    tested = {name: mine for name, mine in tested.items() if mine}
    columns = [
        name for name in study.show if all(name in next(iter(mine[0].test.values())) for mine in tested.values())
    ]
    chosen_columns = [columns[0]] if study.shown_at == "trained" and len(study.grid) > 1 else []
    rows = []
    for name, mine in tested.items():
        figures = np.array([[it.test[_lambda(study, it, column)][column] for column in columns] for it in mine])
        cells = [_cell(column, figures[:, place]) for place, column in enumerate(columns)]
        for column in chosen_columns:
            chosen = np.array([it.test[f"{it.bias_removal:g}"][column] for it in mine])
            cells.append(f"{_cell(column, chosen)} (λ = {mine[0].bias_removal:g})" if name != POPULARITY else "–")
        if "all" in tested:
            plain = tested.get(f"all{name[name.find(',') :]}" if "," in name else "all", tested["all"])
            cells.append(_ratio(columns[0], mine, plain))
        if study.timed:
            cells.append("–" if name == POPULARITY else f"{np.mean([it.seconds for it in mine]):.0f}")
        choice = ", ".join(f"{_name(key)} {value:g}" for key, value in mine[0].choice.items())
        rows.append([name, *cells, choice or "–"])
    head = ["method", *map(_name, columns), *(f"{_name(column)} at the chosen λ" for column in chosen_columns)]
    head += [f"{_name(columns[0])} ÷ all"] if "all" in tested else []
    head += ["CPU s"] if study.timed else []
    missing = [method.name for method in study.methods if method.name not in tested]
    lines = [f"#### {study.name.partition('.')[2]}\n{_note(study, records)}", table([*head, "chosen"], rows)]
    if missing:
        lines.append(f"Not measured yet: {', '.join(missing)}.")
    if plots is not None and (picture := _plot(study, tested, plots)):
        lines.append(f"![{study.name}](plots/{picture})")
    return "\n\n".join(lines)


def _lambda(study: Study, record: Record, column: str) -> str:
    """Return the λ at which the table shows a column."""
    if column == "log_likelihood" and f"{record.likely_at:g}" in record.test:
        return f"{record.likely_at:g}"
    return f"{record.bias_removal if study.shown_at == 'chosen' else study.grid[0]:g}"


def _note(study: Study, records: list[Record]) -> str:
    chosen = (
        "as trained (λ = 0)"
        if study.shown_at == "trained"
        else "at the λ that validation chose, likelihoods with the noise removed"
    )
    return (
        f"{study.note[0].upper()}{study.note[1:]}. {records[0].pairs:,} training pairs, {records[0].labels:,} labels. "
        f"Means of {len(SEEDS)} seeds, {chosen}; chosen by {_name(study.choose_by)} on validation."
    )


def _ratio(column: str, mine: list[Record], plain: list[Record]) -> str:
    """Format means as multiples, as in [Re19 Table 2]."""
    ours, theirs = (np.mean([it.test["0"][column] for it in records]) for records in (mine, plain))
    return f"{ours / theirs:.2f}"


def _cell(column: str, values: Float64) -> str:
    """Format the mean over seeds ± the standard deviation."""
    spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{spread}" if column != "log_likelihood" else f"{values.mean():.2f}"


def _name(key: str) -> str:
    for long, short in _SHORT.items():
        if key.startswith(long):
            name, _, bucket = (short + key.removeprefix(long)).partition("/")
            return f"{bucket.capitalize()} {name}" if bucket else name
    return key


def _plot(study: Study, tested: dict[str, list[Record]], plots: Path) -> str | None:
    """Plot bars by bucket, or curves over time; return the file's name."""
    if study.timed:
        return _curves(study, tested, plots)
    shown = [name for name in study.compare if "/" in name]
    if not shown:
        return None
    figure, axes = plt.subplots(
        1, len(shown), figsize=(4.2 * len(shown), 0.6 + 0.3 * len(tested)), layout="constrained"
    )
    for axis, column in zip(axes, shown, strict=True):
        values = [[it.test[f"{study.grid[0]:g}"].get(column, 0.0) for it in mine] for mine in tested.values()]
        colors = [
            "#c9ccd1" if name == POPULARITY else "#6b7078" if name.startswith("full") else
            "#3b6fd4" if name.startswith("in_batch") else "#e08a3c"
            for name in tested
        ]  # fmt: skip
        spread = [np.std(per_seed, ddof=1) if len(per_seed) > 1 else 0.0 for per_seed in values]
        axis.barh(list(tested), [np.mean(per_seed) for per_seed in values], xerr=spread, color=colors)
        axis.set_title(_name(column))
        axis.invert_yaxis()
        axis.label_outer()
    figure.suptitle(f"{study.name.partition('.')[2]}: scores as trained (λ = 0), mean and deviation of three seeds")
    return _save(figure, plots / f"{study.name.replace('.', '-')}.png")


def _curves(study: Study, tested: dict[str, list[Record]], plots: Path) -> str:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, metric, title in zip(
        axes, ("log_likelihood", "precision@1"), ("Predictive log-likelihood, nats a pair", "Predictive accuracy"),
        strict=True,
    ):  # fmt: skip
        for name, mine in tested.items():
            curves = [it.curve for it in mine if it.curve]
            if curves:
                x, y = (np.mean([[at[key] for at in curve] for curve in curves], axis=0) for key in ("seconds", metric))
                axis.plot(x, y, marker="o", markersize=3, label=name, color="#6b7078" if name == FULL else None)
        axis.set(title=title, xlabel="CPU seconds of training, tree included")
    axes[1].legend(fontsize="small")
    figure.suptitle(f"{study.name.partition('.')[2]}: mean of three seeds on test")
    return _save(figure, plots / f"{study.name.replace('.', '-')}.png")


def _save(figure: plt.Figure, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path.name
