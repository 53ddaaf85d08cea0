"""The whole way of a large log by the commands, killed twice on it: time and memory of each stage.

    python -m benchmarks.large_walk                                    # 1, 10 and 100 million pairs
    python -m benchmarks.large_walk --pairs 10000000 --memory 1G --dir DIR

N pairs of N/5 queries and N/20 labels, as `large_logs` writes them; d = 32, row-wise Adagrad, batches of 4,096, 1,000
pairs each for validation and test. `fit` and `resume` are ended by kill -9 at the first checkpoint past 500 and 1,000
steps; `export` makes a bundle of the second; the index is flat; the service is the real process, to its first answer,
then asked by ids at λ from 0 to 1. Each is its own process: seconds of the clock, GB to itself at most (`RssAnon`, its
children's too) and, after the stroke, with the mapped files' pages that are resident, which the kernel may take back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np

from benchmarks.large_logs import size_of, write_log, write_recipe
from tests.serving.process import children, server, until

BATCH, HELD_OUT, DIM = 4_096, 1_000, 32
GOALS = (500, 1_000)
_TRAINING = f"""
[optimizer]
embeddings = "adagrad"
[training]
batch_size = {BATCH}
epochs = 20
checkpoint_steps = 500
"""


class Watched:
    """The most memory that a process and its children have held, looked at five times a second while it lives."""

    def __init__(self, process: int) -> None:
        self.own = self.mapped = 0.0
        self._process, self._ended = process, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            own = resident = 0
            with suppress(FileNotFoundError, ProcessLookupError, KeyError):
                for process in (self._process, *children(self._process)):
                    figures = dict(
                        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
                    )
                    own += int(figures["RssAnon"].split()[0])
                    resident += int(figures["VmRSS"].split()[0])
            self.own, self.mapped = max(self.own, own * 1024 / 1e9), max(self.mapped, resident * 1024 / 1e9)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def _command(folder: Path, stage: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of Longtail's in the folder, its output in `STAGE.log`; killed at the end if it lives."""
    with (folder / f"{stage}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _figure(seconds: float, watched: Watched) -> str:
    return f"{seconds:,.0f} s, {watched.own:.2f} / {watched.mapped:.2f}"


def _run(folder: Path, stage: str, *command: str) -> str:
    started = time.perf_counter()
    with _command(folder, stage, *command) as process, Watched(process.pid) as watched:
        if process.wait() != 0:
            raise SystemExit((folder / f"{stage}.log").read_text())
    return _figure(time.perf_counter() - started, watched)


def _trained_until(goal: int, folder: Path, stage: str, steps_per_epoch: int) -> str:
    """Fit until a checkpoint is of so many steps, and kill it."""

    def done() -> int:
        steps = [0]
        for path in (folder / "bundle.work" / "select").glob("latest-*"):
            with suppress(FileNotFoundError):  # a later one has taken its place
                state = json.loads((path / "state.json").read_text())["state"]
                steps.append(state["epoch"] * steps_per_epoch + state["step"])
        return max(steps)

    def reached() -> bool:
        if process.poll() is not None:
            raise SystemExit((folder / f"{stage}.log").read_text())
        return done() >= goal

    started = time.perf_counter()
    command = ("longtail.trainer", "fit", "recipe.toml", "--out", "bundle")
    with _command(folder, stage, *command) as process, Watched(process.pid) as watched:
        until(reached, f"{goal} steps", seconds=7200)
    return f"{_figure(time.perf_counter() - started, watched)} (step {done():,})"


def _served(folder: Path, pairs: int, queries: int) -> str:
    rng = np.random.default_rng(1)
    with server(folder / "releases", folder / "serve.log", poll_seconds=0.5, drain_seconds=0) as process:
        with Watched(process.process.pid) as watched, httpx.Client(base_url=process.url, timeout=60) as client:
            process.wait_until_ready(1800)
            seconds = []
            for number in range(queries + 1):
                query = {"features": {"user_id": f"user-{rng.integers(pairs // 5)}"}, "bias_removal": number % 11 / 10}
                began = time.perf_counter()
                said = client.post("/v1/retrieve", json={"queries": [query]}).raise_for_status().json()
                assert len(said["results"][0]["labels"]) == 10
                if number == 0:
                    answered = time.perf_counter() - process.started
                else:
                    seconds.append(time.perf_counter() - began)
        process.terminate()
    return f"{_figure(answered, watched)}, {1e3 * float(np.median(seconds)):,.1f} ms a query"


def walk(folder: Path, pairs: int, memory: str, queries: int) -> Iterator[str]:
    """What each stage took, one after another."""
    if not folder.exists():
        write_log(folder, pairs)
    for made in ("prepared", "bundle", "bundle.work", "exported", "releases"):
        shutil.rmtree(folder / made, ignore_errors=True)
    write_recipe(folder, dim=DIM, share=HELD_OUT / pairs, more=_TRAINING)
    yield f"{size_of(folder / 'log'):.2f}"
    yield _run(folder, "prepare", "longtail.trainer", "prepare", "recipe.toml", "--memory", memory)
    for goal, stage in zip(GOALS, ("fit", "resume"), strict=True):
        yield _trained_until(goal, folder, stage, (pairs - 2 * HELD_OUT) // BATCH)
    yield _run(
        folder, "export", "longtail.trainer", "export", "recipe.toml", "--from", "bundle.work", "--out", "exported"
    )
    yield _run(
        folder, "index", "longtail.index", "build", "exported", "--releases", "releases", "--spec", "flat", "--publish"
    )
    yield _served(folder, pairs, queries)


def main() -> None:
    """Print a row for each number of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--memory", default="4G", help="of prepare")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--dir", type=Path, help="where files are written, and kept; a temporary folder if left out")
    arguments = parser.parse_args()
    folder: Path = arguments.dir or Path(tempfile.mkdtemp())
    stages = ("log GB", "prepare", "fit", "resume", "export", "index", "serve")
    print("| pairs | " + " | ".join(stages) + " |\n|" + "---:|" * (1 + len(stages)), flush=True)
    try:
        for pairs in arguments.pairs:
            print(f"| {pairs:,} |", end="", flush=True)
            for figure in walk(folder / f"pairs-{pairs}", pairs, arguments.memory, arguments.queries):
                print(f" {figure} |", end="", flush=True)
            print(flush=True)
    finally:
        if arguments.dir is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
