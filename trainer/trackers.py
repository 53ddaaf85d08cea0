"""Trackers of a run's figures during training: TensorBoard always, MLflow and Weights & Biases by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from longtail.extras import pip_install
from longtail.trainer.config import Recipe
from longtail.trainer.errors import RecipeError

TRACKERS = ("mlflow", "wandb")
"""Experiment trackers by name; the extra `track` installs them."""

Record = Callable[[Mapping[str, float], int], None]
"""A function that records figures by name (`train/loss`, `valid/recall@20`) at a number of completed steps."""


class _Tracker(NamedTuple):
    """Record the figures of one run with this id; the argument of `close` is whether the run failed."""

    record: Record
    close: Callable[[bool], None]
    run: str = ""


@contextmanager
def trackers(logs: Path | None, recipe: Recipe, names: Sequence[str], runs: dict[str, str]) -> Iterator[Record]:
    """Open the trackers of a run: TensorBoard in `logs`, and the trackers `names`; none without `logs`.

    Args:
        runs: ids of the runs by tracker, to which new ids are added; MLflow resumes an existing run.
    """
    modules = {name: tracker_module(name) for name in dict.fromkeys(names)}
    opened: list[_Tracker] = []
    failed = True

    def record(figures: Mapping[str, float], step: int) -> None:
        for tracker in opened:
            tracker.record(figures, step)

    try:
        if logs is not None:
            opened.append(_tensorboard(logs))
            for name, module in modules.items():
                opened.append(_mlflow(module, recipe, runs.get(name)) if name == "mlflow" else _wandb(module, recipe))
                runs[name] = opened[-1].run
        yield record
        failed = False
    finally:
        for tracker in reversed(opened):
            tracker.close(failed)


def _tensorboard(logs: Path) -> _Tracker:
    from tensorboard.summary import Writer

    board = Writer(str(logs))

    def record(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            board.add_scalar(name, value, step)

    return _Tracker(record, lambda _: board.close())


def _mlflow(mlflow: Any, recipe: Recipe, run_id: str | None) -> _Tracker:
    """Start or resume an MLflow run, nested in an active run."""
    run = mlflow.start_run(run_id=run_id, run_name=recipe.name, nested=mlflow.active_run() is not None)
    # MLflow limits the length of a parameter, older servers to 500 characters.
    mlflow.log_params({key: value[:500] for key, value in flat_settings(recipe).items()})

    def record(figures: Mapping[str, float], step: int) -> None:  # MLflow takes no @ in names
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in figures.items()}, step=step)

    return _Tracker(record, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"), run.info.run_id)


def _wandb(wandb: Any, recipe: Recipe) -> _Tracker:
    """Start a run of Weights & Biases, by WANDB_MODE, WANDB_PROJECT and WANDB_DIR."""
    # `create_new`, because the caller or another trial may have a run open.
    run = wandb.init(name=recipe.name, config=flat_settings(recipe), reinit="create_new")
    return _Tracker(
        lambda figures, step: run.log(dict(figures), step=step),
        lambda failed: run.finish(exit_code=int(failed)),
        run.id,
    )


def tracker_module(name: str) -> Any:
    """Import the package of a tracker."""
    if name not in TRACKERS:
        raise RecipeError(f"track: expected one of {', '.join(TRACKERS)}, received {name!r}")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # otherwise MLflow reports every call to its vendor
    try:
        return import_module(name)
    except ImportError as error:
        raise RecipeError(f"track: expected {name} to be installed: {pip_install('track')} ({error})") from error


def flat_settings(recipe: Recipe) -> dict[str, str]:
    """Return a recipe's values by dotted key, as JSON, without `tune`."""
    return dict(flatten_settings(recipe.model_dump(mode="json", exclude={"tune"})))


def flatten_settings(tree: Any, key: str = "") -> list[tuple[str, str]]:
    """List (dotted key, JSON) of every value in a tree."""
    if isinstance(tree, dict):
        items = [(f"{key}.{name}" if key else str(name), value) for name, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        items = [(f"{key}.{i}", value) for i, value in enumerate(tree)]
    else:
        return [] if tree is None else [(key, json.dumps(tree, ensure_ascii=False))]
    return [pair for name, value in items for pair in flatten_settings(value, name)]
