"""Where a run's figures go while it trains: TensorBoard always, MLflow and Weights & Biases where asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from longtail.trainer.config import Recipe
from longtail.trainer.errors import RecipeError

TRACKERS = ("mlflow", "wandb")
"""Experiment trackers by name, and the extras of `longtail` that install them."""


class Tracker(Protocol):
    """Takes the figures of one run."""

    def record(self, figures: Mapping[str, float], step: int) -> None:
        """Keep figures by name (`train/loss`, `valid/recall@20`) at a number of steps done."""

    def close(self, *, failed: bool) -> None:
        """End the run."""


class _TensorBoard:
    def __init__(self, logs: Path) -> None:
        from tensorboard.summary import Writer

        self._board = Writer(str(logs))

    def record(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        self._board.close()


class _MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say; part of one that is active."""

    def __init__(self, mlflow: Any, recipe: Recipe) -> None:
        self._mlflow = mlflow
        nested = mlflow.active_run() is not None
        mlflow.start_run(run_name=recipe.name, nested=nested)
        settings = flat_settings(recipe)
        mlflow.log_params({key: value[:500] for key, value in settings.items()})

    def record(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({_allowed(name): value for name, value in figures.items()}, step=step)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _Wandb:
    """A run of Weights & Biases, as WANDB_MODE, WANDB_PROJECT and WANDB_DIR say."""

    def __init__(self, wandb: Any, recipe: Recipe) -> None:
        self._run = wandb.init(name=recipe.name, config=flat_settings(recipe), reinit="create_new")

    def record(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of one run; those that are named, and TensorBoard.

    Args:
        logs: directory of TensorBoard's logs; None keeps nothing anywhere.
        names: some of `TRACKERS`.
    """

    def __init__(self, logs: Path | None, recipe: Recipe, names: Sequence[str] = ()) -> None:
        self._trackers: list[Tracker] = []
        if logs is None:
            return
        modules = {name: tracker_module(name) for name in dict.fromkeys(names)}
        with ExitStack() as undo:
            undo.callback(self.close, failed=True)
            self._trackers.append(_TensorBoard(logs))
            for name, module in modules.items():
                self._trackers.append(_MLflow(module, recipe) if name == "mlflow" else _Wandb(module, recipe))
            undo.pop_all()

    def record(self, figures: Mapping[str, float], step: int) -> None:
        """As `Tracker.record`, to all."""
        for tracker in self._trackers:
            tracker.record(figures, step)

    def close(self, *, failed: bool) -> None:
        """As `Tracker.close`, of all."""
        for tracker in reversed(self._trackers):
            tracker.close(failed=failed)
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def tracker_module(name: str) -> Any:
    """Return the package of a tracker."""
    if name not in TRACKERS:
        raise RecipeError(f"track: expected one of {', '.join(TRACKERS)}, received {name!r}")
    try:
        return import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"track: expected {name} to be installed: pip install 'longtail[{name}]' ({error})"
        ) from error


def flat_settings(recipe: Recipe) -> dict[str, str]:
    """Return the values of a recipe by dotted key (`training.epochs`), as JSON; not what `tune` would try."""
    return dict(flattened(recipe.model_dump(mode="json", exclude={"tune"})))


def flattened(tree: Any, key: str = "") -> list[tuple[str, str]]:
    """(dotted key, JSON) of every value in a tree of tables and lists; what is None is left out."""
    if isinstance(tree, dict):
        items = [(f"{key}.{name}" if key else str(name), value) for name, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        items = [(f"{key}.{place}", value) for place, value in enumerate(tree)]
    else:
        return [] if tree is None else [(key, json.dumps(tree, ensure_ascii=False))]
    return [pair for name, value in items for pair in flattened(value, name)]


def _allowed(name: str) -> str:
    """MLflow takes no @ in names: `valid/recall@20` is `valid/recall_at_20`."""
    return name.replace("@", "_at_")
