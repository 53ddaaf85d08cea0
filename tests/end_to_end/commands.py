"""The road by its commands: a recipe to a bundle, a release and a service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx

from tests.serving.process import server


def longtail(room: str, *words: object, folder: Path | None = None) -> str:
    """Run a command of a room; what it says. Its words fail the test where it fails."""
    command = [sys.executable, "-m", f"longtail.{room}", *map(str, words)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{words}: {run.stdout[-2000:]}{run.stderr[-2000:]}"
    return run.stdout


def fitted_and_published(folder: Path, *options: object) -> None:
    """`recipe.toml` of a folder becomes its `model`, and that the current one of its `releases`."""
    longtail("trainer", "fit", "recipe.toml", "--out", "model", *options, folder=folder)
    longtail("index", "build", "model", "--releases", "releases", "--publish", folder=folder)


@contextmanager
def served(folder: Path) -> Iterator[httpx.Client]:
    """A client of a service on a folder's `releases`."""
    with server(folder / "releases", folder / "server.log") as running:
        running.wait_until_ready()
        with httpx.Client(base_url=running.url, timeout=30) as http:
            yield http
