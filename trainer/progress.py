"""Progress of a training job: a Rich progress bar, or plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from longtail.trainer.evaluation.dial import Setting


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Format examples per second."""
        return Text(f"{task.speed:,.0f} ex/s" if task.speed else "– ex/s", no_wrap=True)


class Reporter:
    """Print lines and progress bars of a training job."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def say(self, text: str) -> None:
        """Print one line (Rich markup)."""
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def training(self, name: str, epochs: int, examples: int) -> Iterator[EpochProgress]:
        """Open a progress bar for one run of `epochs` epochs with `examples` each."""
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("loss {task.fields[loss]:.4f}"), _Rate(),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            yield EpochProgress(progress, name, epochs, examples)


class EpochProgress:
    """Update the progress bar of one run."""

    def __init__(self, progress: Progress, name: str, epochs: int, examples: int) -> None:
        self._progress, self._epochs, self._examples = progress, epochs, examples
        self._task = progress.add_task(name, total=epochs * examples, loss=float("nan"))

    def epoch(self, epoch: int, *, done: int) -> None:
        """Begin an epoch (from 0) in which `done` examples are already trained."""
        self._progress.update(
            self._task,
            description=f"epoch {epoch + 1}/{self._epochs}",
            completed=epoch * self._examples + done,
        )

    def advance(self, examples: int, *, loss: float) -> None:
        """Count trained examples and show the epoch's mean loss so far."""
        self._progress.update(self._task, advance=examples, loss=loss)

    def print_validation(self, epoch: int, loss: float, measure: str, value: float, best: Setting) -> None:
        """Print one line about a validation after `epoch` epochs."""
        self._progress.console.print(
            f"  epoch {epoch:>3}  loss {loss:.4f}  valid {measure} {value:.4f} at {best}",
            highlight=False,
        )
