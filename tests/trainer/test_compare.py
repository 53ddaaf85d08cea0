"""Two bundles side by side."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from longtail.bundle import Interval
from longtail.trainer import DataError, cli
from longtail.trainer.evaluation.compare import Figure, compare, shown
from tests.trainer.conftest import Finished


def test_a_difference_has_the_interval_of_two_independent_ones() -> None:
    """Down by the root of .03² + .04², up by that of .05² + .12²."""
    a, b = Interval(value=0.5, low=0.38, high=0.54), Interval(value=0.6, low=0.57, high=0.65)
    change = Figure.of(a, b).difference

    assert (change.value, change.low, change.high) == pytest.approx((0.1, 0.05, 0.23))
    assert Figure.of(a, Interval(value=0.4)).difference.low is None


@pytest.fixture
def other(finished: Finished, tmp_path: Path) -> Path:
    """The finished bundle with another recipe beside it."""
    copy = shutil.copytree(finished.out, tmp_path / "other")
    recipe = json.loads((copy / "recipe.json").read_text())
    recipe["model"]["dim"] = 8
    recipe["loss"]["weight"]["tau"] = 0.5
    (copy / "recipe.json").write_text(json.dumps(recipe))
    return copy


def test_what_differs_is_what_is_shown(finished: Finished, other: Path) -> None:
    comparison, screen = compare(finished.out, other), io.StringIO()
    comparison.show(Console(file=screen, width=160), shown(comparison, "recall@5"))

    assert shown(comparison) == shown(comparison, "recall@5"), "the longest lists there are"
    with pytest.raises(DataError, match=r"--metric: expected one of .*recall@5.*, received 'recall@20'"):
        shown(comparison, "recall@20")
    assert comparison.recipe == {"model.dim": ("4", "8"), "loss.weight.tau": (None, "0.5")}
    assert comparison.same_data
    assert comparison.metrics["recall@5"].difference.value == 0
    assert [at for at, _ in comparison.curve] == [0.0, 0.5, 1.0]
    for text in ("recall@5", "+0.0000", "model.dim", "λ"):
        assert text in screen.getvalue()


def test_the_command_prints_json(finished: Finished, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["longtail-train", "compare", str(finished.out), str(other), "--json"])
        with pytest.raises(SystemExit):
            cli.main()

    content = json.loads(capsys.readouterr().out)
    assert content["recipe"]["model.dim"] == ["4", "8"]
    assert content["curve"][0]["metrics"]["recall@5"][0] == content["curve"][0]["metrics"]["recall@5"][1]
    assert set(content["metrics"]["recall@5"]) == {"a", "b", "difference"}
