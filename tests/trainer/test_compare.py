"""Two bundles side by side."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from longtail.bundle import Interval
from longtail.trainer import DataError, cli
from longtail.trainer.evaluation.compare import compare, difference
from tests.trainer.conftest import Finished


def test_a_difference_has_the_interval_of_two_independent_ones() -> None:
    """Down by the root of .03² + .04², up by that of .05² + .12²."""
    a, b = Interval(value=0.5, low=0.38, high=0.54), Interval(value=0.6, low=0.57, high=0.65)
    change = difference(a, b)

    assert (change.value, change.low, change.high) == pytest.approx((0.1, 0.05, 0.23))
    assert difference(a, Interval(value=0.4)).low is None


@pytest.fixture
def other(finished: Finished, tmp_path: Path) -> Path:
    """The finished bundle with another recipe beside it."""
    copy = shutil.copytree(finished.out, tmp_path / "other")
    recipe = json.loads((copy / "recipe.json").read_text())
    recipe["model"]["dim"] = 8
    recipe["loss"]["weight"]["tau"] = 0.5
    (copy / "recipe.json").write_text(json.dumps(recipe))
    return copy


def test_what_differs_is_what_is_shown(
    finished: Finished, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["longtail-train", "compare", str(finished.out), str(other)])
    with pytest.raises(SystemExit):
        cli.main()

    screen = capsys.readouterr().out
    rows = [line.strip("│ ").split("│") for line in screen.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["recall@5"][0] == cells["recall@5"][1], "the longest lists there are"
    assert cells["recall@5"][2] == "+0.0000"
    assert cells["model.dim"] == ["4", "8"]
    assert cells["loss.weight.tau"] == ["–", "0.5"]
    assert {"0", "0.5", "1"} <= set(cells), "λ of the curve"
    assert "Not the same data" not in screen
    with pytest.raises(DataError, match=r"--metric: expected one of .*recall@5.*, received 'recall@20'"):
        compare(finished.out, other, "recall@20")
