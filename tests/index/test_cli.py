"""The command line: what it prints, and how it fails; tests/test_docs.py compares its surface with docs/cli.md."""

from __future__ import annotations

import shlex
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from longtail.bundle import Hide
from longtail.index.cli import main
from longtail.state import LabelStore


def run(*arguments: object) -> int:
    """The exit code of `longtail-index ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_from_build_to_prune(bundle_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", bundle_path, "--releases", tmp_path, "--name", "first", "--publish") == 0
    output, next_step = capsys.readouterr()
    assert "first: flat over 600 labels" in output
    values = (-1, -0.5, 0, 0.25, 0.5, 0.75, 1, 1.5, 2)
    assert "recall@100 at λ: " + ", ".join(f"{value}: 1.000" for value in values) in output
    assert f"written: {tmp_path / 'first'}" in output
    assert output.endswith("published: first\n")
    assert run("build", bundle_path, "--releases", tmp_path, "--name", "second", "--spec", "ivf_flat") == 0
    assert f"next: longtail-serve run {tmp_path}\n" in next_step
    assert "GET /v1/release" in next_step
    output, next_step = capsys.readouterr()
    assert f"written: {tmp_path / 'second'}" in output
    _, _, command = next_step.rstrip().rpartition("next: ")
    assert command == f"longtail-index publish {tmp_path}/second"

    assert run(*shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == "published: second\n"
    assert run("rollback", tmp_path) == 0
    assert capsys.readouterr().out == "published: first\n"
    assert run("verify", f"{tmp_path}/second/") == 0
    assert capsys.readouterr().out.startswith("intact: second, ")

    (tmp_path / "broken").mkdir()
    assert run("list", tmp_path) == 0
    listed = capsys.readouterr().out
    line = {name: next(line for line in listed.splitlines() if f" {name} " in line) for name in ("first", "second")}
    assert "*" in line["first"]
    assert "auto (flat)" in line["first"]
    assert "*" not in line["second"]
    assert "600" in line["second"]
    assert "MB" in line["second"]
    assert "broken" in listed
    assert "unreadable" in listed

    assert run("prune", tmp_path, "--keep", 1) == 0
    assert capsys.readouterr().out.splitlines() == ["deleted: broken"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "MISSING", "--releases", "R"], "expected a bundle"),
        (["build", "BUNDLE", "--releases", "R", "--device", "tpu"], "--device: expected cpu or gpu, received 'tpu'"),
        (["build", "BUNDLE", "--releases", "R", "--name", "../x"], "release name: expected"),
        (["build", "BUNDLE", "--releases", "R", "--spec", "nonsense"], "expected auto, flat"),
        (["build", "BUNDLE", "--releases", "R", "--recall-floor", "2"], "recall floor: expected 0 <= floor <= 1"),
        (["build", "BUNDLE", "--releases", "/dev/null/x"], "Not a directory"),
        (["publish", "R/x"], "expected a directory of releases"),
        (["rollback", "R"], "expected a directory of releases"),
        (["verify", "R/x"], "expected one of its releases [], received 'x'"),
        (["prune", "R", "--keep", "0"], "--keep: expected at least 1"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, bundle_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"BUNDLE": bundle_path, "MISSING": tmp_path / "missing", "R": tmp_path / "releases"}
    assert run(*(paths.get(argument, argument.replace("R/x", f"{paths['R']}/x")) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("longtail-index: ")
    assert message in last
    assert "Traceback" not in captured.err
    assert not (tmp_path / "releases").exists()


def test_merge_writes_a_bundle_and_says_what_changed(
    bundle_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path
    with closing(LabelStore(log)) as store:
        store.append([Hide(id="item-3", at=datetime.now(UTC))])
    assert run("merge", bundle_path, log, "--out", tmp_path / "merged") == 0
    assert capsys.readouterr().out == (f"599 labels: 0 added, 0 changed, 1 removed\nwritten: {tmp_path / 'merged'}\n")
    assert run("merge", bundle_path, log, "--out", tmp_path / "merged") == 2
    assert "already exists" in capsys.readouterr().err
