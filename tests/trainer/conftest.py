"""The trainer's tests run on the TensorFlow backend in this process; test_backends.py starts others."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from longtail.trainer.trained import Trained

os.environ["KERAS_BACKEND"] = os.environ.get("LONGTAIL_TEST_BACKEND", "tensorflow")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

KERAS_VARIABLES_PREDATE_NUMPY_2 = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/trainer/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are not compiled: the same arithmetic without seconds of tracing; `test_compiled` compares the two."""
    from longtail.trainer import backend

    monkeypatch.setattr(backend, "compile_step", lambda step, _: step)
    monkeypatch.setattr(backend, "compile_loss", lambda function: function)


def turn_off_compiler_and_ink(patched: pytest.MonkeyPatch, *, compiler: bool = False, ink: bool = False) -> None:
    """Losses run in TensorFlow's graph, and plots are drawn but not rendered: half of what a tiny job takes."""
    backend = sys.modules.get("longtail.trainer.backend")
    if backend and os.environ["KERAS_BACKEND"] == "tensorflow" and not compiler:
        patched.setattr(backend, "compile_loss", lambda function: function)
    if "matplotlib.figure" in sys.modules and not ink:
        patched.setattr("matplotlib.figure.Figure.savefig", lambda _, file, **__: file.write(b"<svg/>"))


@pytest.fixture(autouse=True)
def _jobs_wait_for_no_compiler_and_no_ink(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is as users have it in tests that ask for `xla` or `ink`, in fixtures that tests share, and in processes."""
    fixtures = request.fixturenames
    turn_off_compiler_and_ink(monkeypatch, compiler="xla" in fixtures, ink="ink" in fixtures)


@pytest.fixture
def xla() -> None:
    """Losses are compiled as users have them."""


@pytest.fixture
def ink() -> None:
    """Plots of reports are rendered."""


@pytest.fixture
def tables() -> Iterator[None]:
    """The test leaves the tables of rows as it found them."""
    from tests.trainer.page import restore_tables

    with restore_tables():
        yield


@pytest.fixture
def page(tables: None) -> SimpleNamespace:  # noqa: ARG001
    """The names of docs/extending.md, its rows registered."""
    from tests.trainer.page import registered

    return registered()


@dataclass(frozen=True)
class Finished:
    """A job of `tiny.RECIPE` with all baselines, run once: recipe, bundle, output, and the model in memory."""

    recipe: Path
    out: Path
    output: str
    trained: Trained


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    from longtail.trainer import job, results
    from longtail.trainer.config import load_recipe
    from tests.trainer import tiny

    folder = tmp_path_factory.mktemp("job")
    recipe = tiny.write_job(folder, recipe=tiny.RECIPE.replace("baselines = []\n", ""))
    (reporter, screen), models = tiny.record_output(120), []
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        export = results.to_bundle
        patched.setattr(results, "to_bundle", lambda trained, *more: models.append(trained) or export(trained, *more))
        job.fit(load_recipe(recipe), folder / "bundle", reporter)
    return Finished(recipe, folder / "bundle", screen.getvalue(), models[0])
