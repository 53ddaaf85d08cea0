"""What a study leaves: `trials.csv`, and `report.html` with Optuna's plots."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import optuna
from optuna.visualization import matplotlib as plots

from longtail.bundle.page import page, picture
from longtail.trainer.tuning.ranges import Ranges

_FEW = 10
"""Complete trials below which an importance says nothing."""


def write_trials(finished: list[optuna.trial.FrozenTrial], ranges: Ranges, path: Path) -> None:
    """Write a row a trial: what became of it, its figures at the λ and μ it chose, and its values by key."""
    rows: list[dict[str, Any]] = []
    for trial in finished:
        found = dict(trial.user_attrs.get("found", {}))
        state = "refused" if "refused" in trial.user_attrs else trial.state.name.lower()
        values = {key: json.dumps(value) for key, value in ranges.values(trial.params).items()}
        row = {"trial": trial.number, "state": state, "missed": sum(trial.constraints.values()), **values}
        rows.append(row | found.pop("metrics", {}) | found | {"reason": trial.user_attrs.get("refused")})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def study_page(study: optuna.Study, title: str, objectives: list[str], cards: dict[str, str]) -> bytes:
    """Create a page without network: the history and slices of every objective, importances, the Pareto front."""
    pictures = []

    def draw(plot: Callable[..., Any], words: str, **arguments: Any) -> None:
        plot(study, **arguments)
        pictures.append(picture(plt.gcf(), words))
        plt.close()

    complete = len(study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE]))
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these plots are marked experimental
        for place, name in enumerate(objectives):
            of = {"target": lambda trial, place=place: trial.values[place], "target_name": name}
            draw(plots.plot_optimization_history, f"{name} of every trial, in order", **of)
            draw(plots.plot_slice, f"{name} against each range", **of)
            if complete >= _FEW:
                draw(plots.plot_param_importances, f"importance of the ranges for {name}", **of)
        if 1 < len(objectives) < 4:
            draw(plots.plot_pareto_front, "Pareto front", target_names=objectives)
    return page(title, "Trials are measured on valid; test was left alone.", cards, pictures, "")
