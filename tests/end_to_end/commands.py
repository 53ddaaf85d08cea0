"""The road by its commands: a recipe to a bundle, a release and a service."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.end_to_end.killing import server
from tests.trainer.conftest import turn_off_compiler_and_ink


def longtail(room: str, *words: object, folder: Path | None = None) -> str:
    """Run a command of a room in this process, which has imported its modules; returns what it says."""
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        output = stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        patched.setattr(sys, "argv", [f"longtail-{room}", *map(str, words)])
        if folder is not None:
            patched.chdir(folder)
        main = import_module(f"longtail.{room}.cli").main
        if room == "trainer":
            import_module("longtail.trainer.backend")
            turn_off_compiler_and_ink(patched)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, f"{words}: {output.getvalue()[-2000:]}"
    return output.getvalue()


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
