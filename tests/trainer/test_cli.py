import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.bundle import Bundle
from longtail.trainer import cli
from longtail.trainer.config import load_recipe
from longtail.trainer.evaluation.dial import Setting
from tests.trainer import tiny
from tests.trainer.conftest import Finished


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of `longtail-train`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["longtail-train", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tiny.write_job(tmp_path)


ERRORS = {
    "nothing to tune": ("tune RECIPE --out OUT", "expected a section [tune] with ranges in the recipe, found none"),
    "unknown range": (
        "tune RECIPE --out OUT --set tune.ranges={'model.dmi'={low=1,high=2}}", "model.dmi: expected one of dim,"
    ),
    "no recipe": ("fit nowhere.toml --out OUT", "nowhere.toml: expected a recipe: No such file or directory"),
    "unknown key": ("fit RECIPE --out OUT --set mdoel.dim=3", "mdoel: expected one of name, seed, data, query,"),
    "missing data": ("fit RECIPE --out OUT --set data.train=gone.csv", "gone.csv: expected a csv file, found none"),
    "unknown column": ("fit RECIPE --out OUT --set data.query_id=who", "expected a column 'who', found user_id"),
    "no feature": (
        "fit RECIPE --out OUT --set query.features.0.column=age --set query.features.0.name=age",
        "feature 'age': expected a column 'age', found none",
    ),
    "long metric": (
        'fit RECIPE --out OUT --set evaluation.ks=[99] --set evaluation.metric="recall@99"',
        "evaluation.metric: expected a k of at most 16, all labels, received recall@99",
    ),
    "out exists": ("fit nowhere.toml --out EXISTING", "nowhere.toml: expected a recipe"),
    "set without a recipe": (
        "evaluate OUT --set model.dim=4", "--set: expected a recipe with it (--recipe), received none",
    ),
    "no time": ("fit RECIPE --out OUT --set data.since=soon", "data.since: expected a span such as '30d'"),
    "no bundle": ("evaluate OUT", "expected a bundle (a directory with manifest.json), found none"),
    "unknown data set": ("data netflix --out OUT", "expected one of movielens-100k, movielens-1m, gowalla,"),
    "no local copy": ("data gowalla --out OUT --from nowhere", "expected a directory or a zip, found none"),
    "empty local copy": ("data gowalla --out OUT --from EXISTING", "train.txt: expected a text file, found none"),
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), ERRORS.values(), ids=ERRORS)
def test_user_error_is_one_line_and_exit_code_2(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    existing = tmp_path / "existing"
    existing.mkdir()
    replacements = {"RECIPE": job, "OUT": tmp_path / "out", "EXISTING": existing}

    code, _, errors = run(capsys, *(replacements.get(word, word.replace('"', "")) for word in command.split()))

    assert code == 2
    assert errors.startswith("longtail-train: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["fit RECIPE --out OUT", "data gowalla --out OUT"])
def test_an_existing_out_is_refused_before_any_work(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.trainer.job.read_dataset", lambda *_, **__: pytest.fail("reads data"))
    monkeypatch.setattr("longtail.trainer.data.sources.fetch", lambda *_, **__: pytest.fail("downloads"))
    out = tmp_path / "out"
    out.write_text("mine")
    replacements = {"RECIPE": job, "OUT": out, "WORK": tmp_path}

    code, _, errors = run(capsys, *(replacements.get(word, word) for word in command.split()))

    assert (code, out.read_text()) == (2, "mine")
    assert errors == (
        f"longtail-train: {out} already exists: expected a path that is free; nothing was changed; choose another, or "
        "delete it\n"
    )


@pytest.mark.slow
def test_fit_ends_with_a_bundle_and_says_where(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["training.epochs=1", "evaluation.popularity=[0.5]", "evaluation.bias_removal=[0, 1]"]
    settings = [word for override in overrides for word in ("--set", override)]
    code, out, errors = run(capsys, "fit", job, "--out", tmp_path / "out", *settings)

    assert (code, errors) == (0, f"next: longtail-index build {tmp_path / 'out'} --releases releases --publish\n")
    assert "evaluation.popularity is not measured: the noise ν of training equals π" in " ".join(out.split())
    assert "the best on valid, is an end of evaluation.bias_removal: try a wider grid" in " ".join(out.split())
    assert "40 queries × 16 labels; 240 training, 40 validation, 40 test pairs" in out
    held_out = json.loads((tmp_path / "out" / "metrics.json").read_text())["held_out"]
    for split, counts in held_out.items():
        assert counts["pairs"] == 40
        assert counts["repeated"] > 0
        words = f"{split.capitalize()}: 40 pairs → {counts['measured']} to find of {counts['queries']} queries"
        assert words in out
        assert words.partition(": ")[2] in (tmp_path / "out" / "report.html").read_text()
    assert f"Bundle {tmp_path / 'out'}" in out
    assert Bundle.load(tmp_path / "out").manifest.training_data["epochs"] == 1


def test_a_bundle_is_measured_with_propensity_scores(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as in memory: the bundle knows how many training queries its counts come from."""
    propensity = "evaluation.propensity=[1, 1]"
    code, out, errors = run(
        capsys, "evaluate", finished.out, "--recipe", finished.recipe, "--set", propensity, "--markdown"
    )

    assert (code, errors) == (0, "")
    names, _, *rows = [[cell.strip() for cell in line.split("|")] for line in out.strip().splitlines()]
    trained = finished.trained
    scored = replace(trained, recipe=load_recipe(finished.recipe, [propensity]))
    known_pairs = trained.dataset.train.merge_later(trained.dataset.valid)
    curve = scored.curve(
        *trained.dataset.with_past(trained.dataset.test, known_pairs),
        [Setting(bias_removal) for bias_removal in (0.0, 0.5, 1.0)],
    )
    for row, point in zip(rows, curve, strict=True):
        for name in ("psp@5", "psndcg@5"):
            assert row[names.index(name)].split()[0] == f"{point.metrics[name].value:.4f}"
            assert 0 < point.metrics[name].value <= 1
