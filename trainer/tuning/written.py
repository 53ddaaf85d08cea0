"""What a study leaves in its directory: recipes, a table of all trials, a report; and the table it prints."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from longtail.trainer.config.tune import objectives_of
from longtail.trainer.evaluation.report import shown_metrics
from longtail.trainer.tuning.ranges import Ranges
from longtail.trainer.tuning.report import tune_report
from longtail.trainer.tuning.result import Trial, TuneResult, better_is_more, figures_in_words, value_in_words
from longtail.trainer.tuning.study import Study
from longtail.trainer.tuning.toml import recipe_toml

_ROWS = 15
"""Of the table on the terminal; `trials.csv` and the report have all."""


def write_result(result: TuneResult, study: Study, ranges: Ranges, out: Path) -> None:
    """Write `best.toml`, `trials.csv`, `report.html`, and `front/` where there is a front."""
    (out / "best.toml").write_text(_recipe_file(result.best, result, ranges, out), encoding="utf-8")
    shutil.rmtree(out / "front", ignore_errors=True)
    for trial in result.front:
        (out / "front").mkdir(exist_ok=True)
        text = _recipe_file(trial, result, ranges, out / "front")
        (out / "front" / f"trial-{trial.number:04d}.toml").write_text(text, encoding="utf-8")
    _write_table(result, ranges, out / "trials.csv")
    (out / "report.html").write_bytes(tune_report(result, study, ranges))


def tune_table(result: TuneResult, ranges: Ranges) -> Table:
    """A terminal table of the best trials, those within the constraints first; the best marked."""
    complete = [trial for trial in result.trials if trial.found is not None]
    ended = {state: sum(trial.state == state for trial in result.trials) for state in ("pruned", "refused")}
    others = "".join(f", {number} {state}" for state, number in ended.items() if number)
    more = f"; the best {_ROWS} are shown" if len(complete) > _ROWS else ""
    table = Table(
        title=f"{ranges.recipe.name}: {len(complete)} complete trials{others}", title_justify="left",
        caption=f"on valid; ▶ best.toml{', ◆ on the Pareto front' if result.front else ''}{more}",
        caption_justify="left", pad_edge=False,
    )  # fmt: skip
    metrics = shown(ranges)
    for heading in ("trial", *metrics, "λ", "epochs"):
        table.add_column(heading, justify="right")
    for key in ranges.keys:
        table.add_column(key.rpartition(".")[2], overflow="fold")
    for trial in best_first(complete, ranges)[:_ROWS]:
        mark = "▶ " if trial is result.best else "◆ " if trial in result.front else ""
        figures = [f"{trial.figures[name]:.4f}" for name in metrics]
        at = [] if trial.found is None else [f"{trial.found.bias_removal:g}", f"{trial.found.epochs:g}"]
        values = [escape(value_in_words(trial.values[key])) for key in ranges.keys]
        table.add_row(f"{mark}{trial.number}", *figures, *at, *values, style="bold" if trial is result.best else None)
    return table


def shown(ranges: Ranges) -> list[str]:
    """The metrics of tables: the objectives, those that are constrained, and the recipe's own."""
    evaluation = ranges.recipe.evaluation
    return list(dict.fromkeys([*objectives_of(ranges.tune, evaluation), *ranges.tune.constraints, evaluation.metric]))


def best_first(complete: list[Trial], ranges: Ranges) -> list[Trial]:
    """Complete trials, those within the constraints first, then by the objectives."""
    objectives = objectives_of(ranges.tune, ranges.recipe.evaluation)
    return sorted(complete, key=lambda trial: (-trial.missed, *better_is_more(trial, objectives)), reverse=True)


def _recipe_file(trial: Trial, result: TuneResult, ranges: Ranges, folder: Path) -> str:
    named = "The best" if trial is result.best else "One on the Pareto front"
    changed = ", ".join(f"{key} = {value_in_words(value)}" for key, value in trial.values.items())
    head = [
        f"{named} of {len(result.trials)} trials: number {trial.number}.",
        f"On valid: {figures_in_words(trial.found, ranges)}.",
        f"Tried: {changed}.",
    ]
    if trial.missed:
        head.append(f"It misses tune.constraints by {trial.missed:.4f}: no trial meets them.")
    return "".join(f"# {line}\n" for line in head) + "\n" + recipe_toml(ranges.recipe_of(trial.values), folder)


def _write_table(result: TuneResult, ranges: Ranges, path: Path) -> None:
    """All trials, a row each: what became of it, its figures at the λ and μ it chose, and its values by key."""
    metrics = list(dict.fromkeys([*shown(ranges), *shown_metrics(ranges.recipe.evaluation.metric)]))
    columns = ["trial", "state", "best", "front", "missed", "epochs", "seconds", "bias_removal", "popularity"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *metrics, *ranges.keys, "reason"])
        writer.writeheader()
        for trial in result.trials:
            row: dict[str, Any] = {"trial": trial.number, "state": trial.state, "reason": trial.reason}
            if trial.found is not None:
                row |= {"best": trial is result.best, "front": trial in result.front, "missed": trial.missed}
                row |= {name: getattr(trial.found, name) for name in columns[5:]}
                row |= {name: trial.figures.get(name) for name in metrics}
            writer.writerow(row | {key: _cell(trial.values.get(key)) for key in ranges.keys})


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else value
