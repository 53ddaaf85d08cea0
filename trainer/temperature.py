"""Choice of a model's temperature on valid, by short runs before the full run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from longtail.bundle.store import replace_file
from longtail.trainer.checkpoint import hash_run
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.devices import WORLD, wait_for_all
from longtail.trainer.errors import DivergedError
from longtail.trainer.progress import Reporter
from longtail.trainer.train import train
from longtail.trainer.warm_start import WarmStart

TEMPERATURES = (
    0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 8.0
)  # fmt: skip
"""Temperatures to try, in ascending order, as far as the metric rises."""
_FIRST = 0.12
_SHARE = 5
"""A short run has the recipe's epochs divided by this number."""
_FILE = "temperatures.json"
_Tried = dict[float, tuple[float, float]]
"""`TrainingHistory.best_rank` by temperature."""


def choose_temperature(
    recipe: Recipe, dataset: Dataset, work: Path, reporter: Reporter, warm_start: WarmStart | None = None
) -> tuple[Recipe, dict[float, float]]:  # fmt: skip
    """Replace `auto` by a number; also return the validation metric by temperature.

    Each short run counts with its best epoch, because its last may be overfitted. Temperatures next to the best are
    tried until both are worse. An interrupted search resumes.
    """
    if recipe.model.temperature != "auto":
        return recipe, {}
    if warm_start is not None:
        reporter.say(f"Temperature {warm_start.temperature:g}, that of the bundle to begin from")
        return set_temperature(recipe, warm_start.temperature), {}
    file, identity = work / _FILE, hash_run(recipe, dataset)
    tried = _read(file, identity)
    epochs = max(1, round(recipe.training.epochs / _SHARE))
    while (temperature := _next(tried)) is not None:
        folder, name = work / "temperatures", f"{temperature:g}"
        short = set_temperature(recipe, temperature)
        logs = work / "logs" / f"temperature-{name}"
        try:
            trained = train(short, dataset, epochs=epochs, work=folder / name, logs=logs, reporter=reporter)
            tried[temperature] = trained.history.best_rank()
        except DivergedError as error:
            # Another temperature may converge. If none does, the full run ends with this error.
            reporter.say(str(error))
            tried[temperature] = (-math.inf, 0.0)
        reporter.say(f"Temperature {name}: valid {recipe.evaluation.measure} {tried[temperature][1]:.4f}")
        if WORLD.processes > 1:
            wait_for_all(f"temperature {name}")
        if not WORLD.process:
            replace_file(file, json.dumps({"identity": identity, "tried": list(tried.items())}).encode())
            # A short run's checkpoints are of no use after it, and take the space of the full run's.
            shutil.rmtree(folder, ignore_errors=True)
    best = max(tried, key=tried.__getitem__)
    reporter.say(f"Temperature {best:g}, the best after {epochs} of {recipe.training.epochs:g} epochs")
    if best in (TEMPERATURES[0], TEMPERATURES[-1]):
        reporter.say(
            f"Temperature {best:g} is an end of what `auto` tries: a better one may lie beyond; try numbers in "
            "model.temperature"
        )
    return set_temperature(recipe, best), {temperature: metric for temperature, (_, metric) in tried.items()}


def set_temperature(recipe: Recipe, temperature: float) -> Recipe:
    """Return the recipe with this temperature."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"temperature": temperature})})


def _next(tried: _Tried) -> float | None:
    """Return an untried temperature next to the best; None if both are worse."""
    if not tried:
        return _FIRST
    best = TEMPERATURES.index(max(tried, key=tried.__getitem__))
    nearest = [TEMPERATURES[i] for i in (best + 1, best - 1) if 0 <= i < len(TEMPERATURES)]
    return next((temperature for temperature in nearest if temperature not in tried), None)


def _read(file: Path, identity: str) -> _Tried:
    if not file.is_file():
        return {}
    content = json.loads(file.read_bytes())
    return {number: tuple(rank) for number, rank in content["tried"]} if content["identity"] == identity else {}
