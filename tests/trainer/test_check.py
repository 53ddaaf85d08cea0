"""What `longtail-train check` says: counts that are worked by hand here, and what it warns of."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from longtail.trainer import cli
from longtail.trainer.check import CheckReport, check, show
from longtail.trainer.errors import DataError
from longtail.trainer.job import fit
from tests.trainer import tiny
from tests.trainer.logs import write_table


@pytest.fixture
def small(tmp_path: Path) -> Path:
    day = 1_700_006_400
    times = [day + 86_400 * at for at in range(11)]
    write_table(tmp_path / "train.parquet", user=list("aaabbbc"), item=[1, 1, 2, 1, 2, 3, 1], when=times[:7])
    write_table(tmp_path / "test.parquet", user=list("aaad"), item=[1, 3, 9, 1], when=times[7:])
    items = {"item": [1, 2, 3, 4], "brand": ["x", "x", "y", None], "price": [1.0, None, 3.0, 4.0]}
    write_table(tmp_path / "items.parquet", **items)
    return tiny.write_recipe(
        tmp_path,
        data={
            "train": tmp_path / "train.parquet", "test": tmp_path / "test.parquet", "query_id": "user",
            "label_id": "item", "timestamp": "when", "labels": tmp_path / "items.parquet",
        },
        query={"features": [
            {"name": "user", "kind": "id", "dim": 4, "min_count": 2},
            {"name": "seen", "kind": "history", "table": "item", "dim": 2},
        ]},
        label={"features": [
            {"name": "item", "kind": "id", "dim": 2}, {"name": "brand", "kind": "id", "dim": 3, "min_count": 2},
            {"name": "price", "kind": "number"},
        ]},
        loss={"sampler": {"name": "mixed", "negatives": 3}}, training={"epochs": 5, "batch_size": 4},
    )  # fmt: skip


def print_report(report: CheckReport, width: int = 80) -> str:
    screen = io.StringIO()
    show(report, Console(file=screen, width=width))
    return screen.getvalue()


def test_splits_are_counted(small: Path) -> None:
    report = check(small)

    assert (report.ok, report.queries, report.labels) == (True, 4, 5)
    assert report.rows == ["Without a row in data.labels: 1 of the 4 labels in interactions"]
    train, test = report.splits["train"], report.splits["test"]
    assert train == {
        "pairs": 7, "distinct": 6, "queries": 3, "labels": 3, "first": "2023-11-15 00:00", "last": "2023-11-21 00:00",
    }  # fmt: skip
    assert test == {
        "pairs": 4, "distinct": 4, "queries": 2, "labels": 3, "first": "2023-11-22 00:00", "last": "2023-11-25 00:00",
        "new queries": 1, "new labels": 1, "on new labels": 1, "short": 0, "seen": 1, "to find": 3,
    }  # fmt: skip
    assert "test: 1 pairs (25.0%) are of labels without a training pair" in report.warnings
    assert check(small, overrides=["evaluation.exclude_seen=false"]).splits["test"]["to find"] == 4


def test_features_are_measured(small: Path) -> None:
    """Items 9 and 4 have no brand, and 9 no price: of the brands that there are, x is known and y is not."""
    figures = {row.pop("feature"): tuple(row.values()) for row in check(small).features}

    assert figures["query user"] == ("id", "user", 3, pytest.approx(1 / 3), None)
    assert figures["query seen"] == ("history", "item", 4, 0, 0)
    assert figures["label brand"] == ("id", "brand", 2, pytest.approx(1 / 3), pytest.approx(2 / 5))
    assert figures["label price"] == ("number", None, None, None, pytest.approx(2 / 5))


def test_negatives_are_counted_per_accumulated_part(small: Path) -> None:
    report, accumulated = check(small), check(small, overrides=["training.accumulate=2"])
    assert report.steps == {"batch_size": 4, "negatives": 4 + 3, "steps_per_epoch": 1, "steps": 5}
    assert (accumulated.steps["batch_size"], accumulated.steps["negatives"]) == (4, 2 + 3)


BAD: dict[str, tuple[list[str], list[str]]] = {
    "a column": (["data.query_id=who"], ["expected a column 'who', found user, item, when", "expected a column 'who'"]),
    "a misspelt column": (["data.query_id=usr"], ["found user, item, when: did you mean 'user'?"]),
    "a key": (["model.size=3"], ["model.size: expected one of dim, similarity"]),
    "too many negatives": (
        ["loss.sampler.negatives=9"],
        ["expected at most 5, the labels there are to draw, received 9"],
    ),
    "a threshold above all": (
        ['loss.weight={name="equalised", threshold=0.9}', "loss.sampler=in_batch"],
        ["loss.weight.threshold: expected at most"],
    ),
    "a prior without valid": (
        ["evaluation.target_prior=uniform"],
        ["evaluation.target_prior: expected valid pairs to choose λ on"],
    ),
    "a feature": (
        ["label.features.1.column=gone"],
        ["feature 'brand': expected a column 'gone', found item, brand, price"],
    ),
}


@pytest.mark.parametrize(("overrides", "problems"), BAD.values(), ids=BAD)
def test_problems_of_fit_are_listed(small: Path, overrides: list[str], problems: list[str]) -> None:
    report = check(small, overrides=overrides)

    assert not report.ok
    text = "\n".join(report.problems)
    for problem in problems:
        assert problem in text
    assert "fit would refuse this" in print_report(report)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["longtail-train", "check", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


def test_the_command_answers_in_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, small)
    assert (code, output["ok"], output["splits"]["test"]["to find"]) == (0, True, 3)

    code, output = run(capsys, small, "--set", "data.since=2023-11-18")
    assert (code, output["splits"]["train"]["pairs"]) == (0, 4)
    assert output["rows"][0] == "Left out, of 11 rows read: 3 by data.since"

    code, output = run(capsys, small, "--set", "data.train=gone.parquet")
    assert (code, output["ok"]) == (1, False)
    assert output["problems"][0].endswith("gone.parquet: expected a parquet file, found none")
    code, output = run(capsys, small, "--set", "data.train=tran.parquet")
    assert output["problems"][0].endswith("expected a parquet file, found none: did you mean 'train.parquet'?")


def test_a_column_that_no_service_could_display_is_refused_before_training(small: Path) -> None:
    column, items = pa.array([b"text"] * 3 + [b"\xff"], pa.binary()), pq.read_table(small.parent / "items.parquet")
    pq.write_table(items.append_column("odd", column), small.parent / "items.parquet")
    overrides = ['data.display=["brand", "price", "odd"]']

    (problem,) = check(small, overrides=overrides).problems
    assert problem.startswith("data.display: column 'odd': expected text in UTF-8, numbers, booleans, dates")
    with pytest.raises(DataError, match="column 'odd': expected text in UTF-8"):
        fit(small, small.parent / "bundle", overrides=overrides)
    assert not (small.parent / "bundle").exists()


@pytest.mark.parametrize(
    "strategy", ["random", "random_per_query", "temporal_per_query", "leave_last_out", "temporal", "files"]
)
def test_held_out_pairs_older_than_training_are_warned_of(tmp_path: Path, strategy: str) -> None:
    shares = "" if strategy == "leave_last_out" else ", valid = 0.1, test = 0.1"
    split = 'test = "test.parquet"' if strategy == "files" else f'split = {{ strategy = "{strategy}"{shares} }}'
    text = tiny.RECIPE.replace('split = { strategy = "leave_last_out" }', split) + "exclude_seen = false\n"
    recipe = tiny.write_job(tmp_path, recipe=text)
    pq.write_table(pq.read_table(tmp_path / "interactions.parquet"), tmp_path / "test.parquet")
    report = check(recipe)
    assert report.ok, report.problems
    warnings = [warning for warning in report.warnings if "older than the newest training pair" in warning]
    assert len(warnings) == (strategy != "temporal")
    assert not any("e+" in warning for warning in warnings), "100 %, not 1e+02 %"
