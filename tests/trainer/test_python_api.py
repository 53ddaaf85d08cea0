"""What `longtail.trainer` exports, and every example of a docstring, run as it stands."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import longtail.trainer
from longtail.trainer import EvaluationResult, RecipeError, cli, evaluate, fit, load_recipe
from tests.trainer import tiny
from tests.trainer.conftest import Finished


def modules() -> list[str]:
    """Every module of the trainer but those that need legacy Keras, another backend, or run when imported."""
    packages = pkgutil.walk_packages(longtail.trainer.__path__, "longtail.trainer.")
    return [m.name for m in packages if not m.name.startswith(("longtail.trainer.tfrs", "longtail.trainer.__main__"))]


def find_examples(module: ModuleType) -> list[doctest.DocTest]:
    """Docstrings with examples; the module's own, which may define names for the others, comes first.

    The docstrings of tables stand in the source below them, where doctest does not look.
    """
    tests = [test for test in doctest.DocTestFinder(recurse=True).find(module) if test.examples]
    return sorted(tests, key=lambda test: test.name != module.__name__)


def run(tests: list[doctest.DocTest]) -> None:
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    for test in tests:
        test.globs = {**test.globs, **names}
        report: list[str] = []
        runner.run(test, out=report.append, clear_globs=False)
        assert not runner.failures, "".join(report)
        names = names or {name: value for name, value in test.globs.items() if name in {"log", "np", "row", "setup"}}


@pytest.fixture(scope="module")
def folder(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where examples run: a tiny recipe, and the bundle that it gave, as `runs/tiny`."""
    folder = tmp_path_factory.mktemp("examples")
    tiny.write_job(folder)
    shutil.copytree(finished.out, folder / "runs" / "tiny")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name.endswith(".tuning.study") else ())
        for name in modules()
        if not name.endswith((".jax", ".job", ".torch"))
    ],
)
def test_examples_say_what_happens(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run(find_examples(importlib.import_module(name)))


def test_the_example_of_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains without a word."""
    tiny.write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()

    run(find_examples(importlib.import_module("longtail.trainer.job")))
    assert "epoch" not in capsys.readouterr().out


def test_names_are_loaded_on_use_and_listed() -> None:
    assert set(longtail.trainer.__all__) <= set(dir(longtail.trainer))
    assert callable(fit)
    with pytest.raises(AttributeError, match=r"module 'longtail\.trainer' has no attribute 'fitt'"):
        longtail.trainer.fitt  # noqa: B018


def test_a_recipe_may_be_a_path_or_a_recipe(finished: Finished) -> None:
    loaded = load_recipe(finished.recipe)
    by_path, by_recipe = evaluate(finished.out, str(finished.recipe)), evaluate(finished.out, loaded)

    assert isinstance(by_path, EvaluationResult)
    assert by_path == by_recipe
    assert by_path.value() == by_path.value("recall@5", bias_removal=by_path.bias_removal.default)
    with pytest.raises(RecipeError, match="expected valid or test, received 'train'"):
        evaluate(finished.out, loaded, split="train")
    with pytest.raises(KeyError, match=r"expected one of recall@3, .*received 'recall@99'"):
        by_path.value("recall@99")
    with pytest.raises(KeyError, match=r"expected one of λ = 0, λ = 0\.5, λ = 1, received λ = 0\.25"):
        by_path.value(bias_removal=0.25)


def test_pairs_with_labels_missing_from_the_bundle_are_reported(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = [f"u{i}" for i in range(10)]
    items, days = ["3"] * 4 + ["new", "newer"] * 3, [*range(10_000, 10_010)]
    pq.write_table(pa.table({"user_id": users, "item_id": items, "timestamp": days}), tmp_path / "test.parquet")
    changes = [f"data.test={tmp_path}/test.parquet", "evaluation.exclude_seen=false"]
    line = (
        "Left out of all figures: 6 of 10 test pairs, of 2 labels that the bundle lacks, and with them 6 of 10 "
        "queries. It finds none of these pairs: figures of all test pairs would be lower"
    )
    options = [argument for change in changes for argument in ("--set", change)]

    assert evaluate(finished.out, finished.recipe).left_out is None
    assert evaluate(finished.out, finished.recipe, overrides=changes).left_out == line
    cli.app(["evaluate", str(finished.out), "--recipe", str(finished.recipe), *options], standalone_mode=False)
    assert line in " ".join(capsys.readouterr().out.split())


def test_the_likelihood_of_a_bundle_is_measured_by_its_own_loss_alone(finished: Finished) -> None:
    """The recipe's scores are log-probabilities at λ = 0; the bundle's, of weight unit, at no λ."""
    overrides = ["loss.weight=importance", "evaluation.log_likelihood=true"]
    with pytest.warns(UserWarning, match="log_likelihood: left out, .* received one of softmax · .* whose ν is π"):
        result = evaluate(finished.out, finished.recipe, overrides=overrides)
    assert not any("log_likelihood" in point.metrics for point in result.curve)
