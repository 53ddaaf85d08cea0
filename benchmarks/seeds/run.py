"""Trains one job and keeps what it measured; a job that was measured is not run again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.seeds.studies import Job
from longtail.bundle import CurvePoint, replace_file
from longtail.trainer.config import load_recipe
from longtail.trainer.data.dataset import load_dataset
from longtail.trainer.job import choose_dial, curve_of
from longtail.trainer.progress import EpochProgress, Reporter
from longtail.trainer.train import train


@dataclass
class Measured:
    """What a job left behind, one JSON file.

    Attributes:
        job: as it was run.
        curve: metrics on test at every λ, by λ and metric name.
        chosen: λ chosen on valid, None without valid.
        epochs: mean loss, seconds of training so far and metrics of every validated epoch (`timed` jobs).
        seconds: of the whole job.
    """

    job: dict[str, Any]
    curve: dict[str, dict[str, float]]
    chosen: float | None
    epochs: list[dict[str, Any]]
    seconds: float


class _Clock(EpochProgress):
    """Counts seconds from before the model was made (a tree is fitted then), and leaves validation out."""

    def __init__(self, progress: Progress, name: str, epochs: int, examples: int, *, started: float) -> None:
        super().__init__(progress, name, epochs, examples)
        self.epochs: list[dict[str, Any]] = []
        self._since = time.perf_counter()
        self.seconds = self._since - started

    def epoch(self, epoch: int, *, done: int) -> None:
        """Start the clock."""
        self._since = time.perf_counter()
        super().epoch(epoch, done=done)

    def advance(self, examples: int, *, loss: float) -> None:
        """Read the clock."""
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now
        super().advance(examples, loss=loss)

    def validated(self, epoch: int, loss: float, metric: str, curve: list[CurvePoint]) -> None:
        """Keep the epoch's figures."""
        self.epochs.append({"epoch": epoch + 1, "loss": loss, "seconds": self.seconds, "curve": _plain(curve)})
        super().validated(epoch, loss, metric, curve)


class _Timed(Reporter):
    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.clock: _Clock | None = None
        self._started = time.perf_counter()

    @contextmanager
    def training(self, name: str, epochs: int, examples: int) -> Iterator[EpochProgress]:
        """A clock instead of a bar."""
        with Progress(console=self.console, disable=True) as progress:
            self.clock = _Clock(progress, name, epochs, examples, started=self._started)
            yield self.clock


def path_of(job: Job, out: Path) -> Path:
    """Where a job's figures are kept."""
    return out / job.study / job.data / f"{job.name.replace(' ', '-').replace('&', 'and')}.json"


def run(job: Job, data: Path, out: Path, console: Console) -> None:
    """Train and measure a job unless its figures are there; a killed one that is not timed goes on where it was."""
    if load(job, out) is not None:
        return
    path = path_of(job, out)
    console.print(f"{job.study} · {job.data} · {job.name}", highlight=False)
    settings = dict(job.settings)
    folder = data / job.data
    if job.timed:
        settings["data.valid"] = settings.get("data.valid", '"test.parquet"')
    recipe = load_recipe(folder / "recipe.toml", [f"{key}={value}" for key, value in settings.items()])
    started = time.perf_counter()
    dataset = load_dataset(recipe.data, seed=recipe.seed, strings=recipe.string_columns)
    work, reporter = path.with_suffix(".work"), _Timed(console)
    if job.timed:  # a clock cannot go on where another process stopped
        shutil.rmtree(work, ignore_errors=True)
    trained = train(recipe, dataset, epochs=recipe.training.epochs, work=work, logs=work / "logs", reporter=reporter)
    epochs = reporter.clock.epochs if job.timed and reporter.clock else []
    chosen, curve = None, []
    if not job.timed:
        known = dataset.train.followed_by(dataset.valid) if len(dataset.valid) else dataset.train
        if len(dataset.valid):
            chosen = choose_dial(trained, dataset).default.bias_removal
        if recipe.training.refit and len(dataset.valid):
            best = trained.history.best_epoch
            trained = train(
                recipe, dataset.refit(), epochs=best, work=work / "refit", logs=work / "logs", reporter=reporter
            )
        curve = curve_of(trained, dataset.test, known=known, config=recipe.evaluation)
    measured = Measured(asdict(job), _plain(curve), chosen, epochs, round(time.perf_counter() - started, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(measured), indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)


def load(job: Job, out: Path) -> Measured | None:
    """A job's figures; None before it was run as it is described now."""
    path = path_of(job, out)
    if not path.exists():
        return None
    measured = Measured(**json.loads(path.read_text(encoding="utf-8")))
    return measured if measured.job == asdict(job) else None


def _plain(curve: list[CurvePoint]) -> dict[str, dict[str, float]]:
    return {
        f"{point.bias_removal:g}": {name: round(interval.value, 6) for name, interval in point.metrics.items()}
        for point in curve
    }
