"""Print findings and tables of measured records."""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.seeds.findings import Estimate, Finding, estimate_of, findings, holm, learns, verdict
from benchmarks.seeds.store import Record, Store, by_every_seed
from benchmarks.seeds.study import POPULARITY, SEEDS, Study
from longtail.bundle.arrays import Float64

_ERROR = 0.05
_TITLES = {
    "profiles": "### Labelling bias under long-tail profiles [R21 §5.1]",
    "r21": "### Sampler × weight by bucket [R21 §5.2]",
    "re19": "### Mining the hardest negatives [Re19 Table 2]",
    "a2": "### Full softmax and uniform negatives [BM20 A.2]",
}
_SHORT = {
    "pair_recall@": "Full R@", "recall@": "R@", "balanced_error@": "bal. error@", "precision@": "P@", "psp@": "PSP@",
    "log_likelihood": "log-likelihood", "optimizer.embedding_learning_rate": "rate", "model.temperature": "T",
    "optimizer.l2": "L2", "loss.regularizer": "reg.",
}  # fmt: skip


def write(studies: list[Study], store: Store) -> None:
    """Print findings and tables of the measured studies."""
    measured = {study.name: list(store.records(study).values()) for study in studies}
    by_name = {study.name: study for study in studies}
    parts = [_findings(measured, by_name)]
    for paper, title in _TITLES.items():
        sections = [
            _section(study, measured[study.name])
            for study in studies
            if study.paper == paper and any(record.test for record in measured[study.name])
        ]
        parts += [title, *sections] if sections else []
    spent = sum(record.seconds for records in measured.values() for record in records)
    runs = sum(len(records) for records in measured.values())
    parts.append(
        f"{runs} runs of {len(by_name)} studies, {spent / 60:.0f} minutes of one core in their training steps."
    )
    print("\n\n".join(parts))


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


def _findings(measured: dict[str, list[Record]], studies: dict[str, Study]) -> str:
    """Return a table of the measured findings by claimant."""
    judged = [(finding, estimate_of(finding, measured.get(finding.study, []))) for finding in findings()]
    parts = []
    for claimed_by, (title, words) in _TABLES.items():
        mine: list[_Judged] = [
            (finding, estimate)
            for finding, estimate in judged
            if finding.claimed_by == claimed_by and estimate is not None
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
    return verdict(estimate)


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
            p_value, scale = adjusted[finding][1], 1 if finding.metric == "log_likelihood" else 100
            lead = f"{scale * estimate.lead:+.2f} [{scale * estimate.low:+.2f}, {scale * estimate.high:+.2f}]"
            p = "< .001" if p_value < 0.001 else f"{p_value:.3f}".lstrip("0")
        source = ["–", "–"] if finding.reason else [finding.study.partition(".")[2], _name(finding.metric)]
        verdict = _verdict(finding, estimate, measured, studies)
        lines.append([finding.source, finding.claim, *source, lead, p, verdict])
    return table(["source", "claim", "data", "metric", "lead [95 %]", "p (Holm)", "verdict"], lines)


_CAVEATS = """\
The lead is of the method that the paper has ahead, positive where the paper is right, in points (hundredths;
nats for likelihoods). Intervals are Student's, of test queries and of three seeds, whose variance has two
degrees of freedom. *Reproduced*: the interval is above 0. The p-values are corrected for all contrasts of their
table.

Read them with care. A rule was made after figures had been seen: a study whose full loss is not ahead of
popularity tests nothing. The first of the three seeds is also the one that rates, temperatures and λ were
chosen by. EXP and STEP are chosen on a balanced validation set, as their test sets are. Embeddings are 32 to
128 wide where the papers have 512."""


def _section(study: Study, records: list[Record]) -> str:
    """Format a study's table."""
    tested = {method.name: by_every_seed(method.name, records) for method in study.methods}
    tested = {name: mine for name, mine in tested.items() if mine}
    columns = [
        name for name in study.show if all(name in next(iter(mine[0].test.values())) for mine in tested.values())
    ]
    chosen_columns = [columns[0]] if len(study.grid) > 1 else []
    rows = []
    for name, mine in tested.items():
        figures = np.array([[it.test[f"{study.grid[0]:g}"][column] for column in columns] for it in mine])
        cells = [_cell(column, figures[:, i]) for i, column in enumerate(columns)]
        for column in chosen_columns:
            chosen = np.array([it.test[f"{it.bias_removal:g}"][column] for it in mine])
            cells.append(f"{_cell(column, chosen)} (λ = {mine[0].bias_removal:g})" if name != POPULARITY else "–")
        if "all" in tested:
            plain = tested.get(f"all{name[name.find(',') :]}" if "," in name else "all", tested["all"])
            cells.append(_ratio(columns[0], mine, plain))
        choice = ", ".join(f"{_name(key)} {value:g}" for key, value in mine[0].choice.items())
        rows.append([name, *cells, choice or "–"])
    head = ["method", *map(_name, columns), *(f"{_name(column)} at the chosen λ" for column in chosen_columns)]
    head += [f"{_name(columns[0])} ÷ all"] if "all" in tested else []
    missing = [method.name for method in study.methods if method.name not in tested]
    lines = [f"#### {study.name.partition('.')[2]}\n{_note(study, records)}", table([*head, "chosen"], rows)]
    if missing:
        lines.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(lines)


def _note(study: Study, records: list[Record]) -> str:
    return (
        f"{study.note[0].upper()}{study.note[1:]}. {records[0].pairs:,} training pairs, {records[0].labels:,} labels. "
        f"Means of {len(SEEDS)} seeds, as trained (λ = 0); chosen by {_name(study.choose_by)} on validation."
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
