"""The wheel: only `longtail` at the top level, every file in it, commands of the rooms that are there, extras named."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail import commands
from longtail.index import Releases
from tests.bundles import make_bundle
from tests.trainer import tiny

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
ROOMS = ("bundle", "client", "commands", "index", "serving", "state", "tables", "trainer")
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / "source" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder / "source")
    pip("wheel", "--no-deps", "--wheel-dir", folder, folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing that it depends on."""
    environment = tmp_path_factory.mktemp("bare")
    venv.create(environment, with_pip=False)
    pip("--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return environment


def scripts(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        lines = archive.read(entry_points).decode().splitlines()
    return {line.split(" = ")[0] for line in lines if " = " in line}


def test_the_wheel_builds_and_answers_from_its_own_files(bare: Path, tmp_path: Path) -> None:
    """With the packages that are installed here, but none of the files of the repository."""
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib"), "KERAS_BACKEND": "tensorflow"}
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(30, 4)).astype(np.float32)
    columns = {"label_id": [f"p{row}" for row in range(30)], "count": range(1, 31), "vector": vectors.tolist()}
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), tmp_path / "items.parquet")
    for command, *words in (
        ["longtail-index", "from-vectors", "items.parquet", "--releases", "releases", "--name", "tiny", "--publish"],
        ["longtail-serve", "check", "releases/tiny"],
        ["longtail-train", "data", "--help"],
    ):
        program = [bare / "bin" / command, *words]
        found = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, ""), found.stderr
    where = "import longtail.bundle as room; print(room.__file__)"
    found = subprocess.run([bare / "bin" / "python", "-c", where], env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(bare))


def test_rooms_are_named_once_and_none_is_forgotten() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert packages == set(ROOMS)
    assert project["tool"]["mypy"]["packages"] == [f"longtail.{room}" for room in ROOMS]
    assert f"ROOMS = {ROOMS}".replace("'", '"') in (ROOT / "setup.py").read_text()


def test_the_wheel_holds_every_file_below_longtail_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "--", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert names == {f"longtail/{name}" for name in tracked.stdout.split()}
    assert scripts(wheel) == {"longtail", "longtail-audit", "longtail-train", "longtail-index", "longtail-serve"}


def test_an_image_has_only_the_commands_of_its_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("bundle", "commands", "index", "serving"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    told: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", told.update)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "setup.py"))
    assert sorted(told["packages"]) == [f"longtail.{room}" for room in ("bundle", "commands", "index", "serving")]
    names = [line.split(" = ")[0] for line in told["entry_points"]["console_scripts"]]
    assert names == ["longtail", "longtail-index", "longtail-serve"]


def test_commands_say_their_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (commands.trainer, commands.audit, commands.index, commands.serving):
        monkeypatch.setattr(sys, "argv", ["longtail", "--version"])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code in (0, None)
    assert re.fullmatch(r"(longtail-\w+ \d\S*\n){4}", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["train", "audit", "index", "serve"])
def test_longtail_runs_the_command_that_its_first_word_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[str]] = []
    monkeypatch.setitem(commands._COMMANDS, name, lambda: received.append(sys.argv))
    monkeypatch.setattr(sys, "argv", ["longtail", name, "build", "--help"])
    commands.main()
    assert received == [[f"longtail-{name}", "build", "--help"]]


def test_longtail_lists_its_commands_and_refuses_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, text in (([], "  train  Draft"), (["--help"], "  serve  Run"), (["--version"], "longtail 0.")):
        monkeypatch.setattr(sys, "argv", ["longtail", *words])
        commands.main()
        assert text in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["longtail", "fit"])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    refusal = "longtail: expected a command, one of train, audit, index, serve, received 'fit'\n"
    assert capsys.readouterr().err == refusal


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("longtail-train", "train"),
        ("longtail-audit", "audit"),
        ("longtail-index", "index"),
        ("longtail-serve", "serve"),
    ],
)
def test_a_command_without_its_extra_says_which_one_in_a_line(command: str, extra: str, bare: Path) -> None:
    found = subprocess.run([bare / "bin" / command, "--help"], capture_output=True, text=True)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"{command}: expected the extra '{extra}', found no module ")
    assert line.endswith(f": pip install 'longtail[{extra}]'")


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["longtail-train", "fit", "recipe.toml", "--out", "bundle"], "keras", "train"),
        (["longtail-train", "fit", "recipe.toml", "--out", "bundle"], "jax", "jax"),
        (["longtail-index", "build", "bundle", "--releases", "releases"], "faiss", "index"),
        (["longtail-serve", "run", "releases"], "faiss", "index"),
        (["longtail-serve", "run", "releases"], "fastapi", "serve"),
    ],
)
def test_a_command_that_lacks_a_part_names_its_extra(
    command: list[str], missing: str, extra: str, tmp_path: Path
) -> None:
    """With the other extras installed."""
    tiny.write_job(tmp_path)
    room = {"longtail-train": "trainer", "longtail-index": "index", "longtail-serve": "serving"}[command[0]]
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = {command!r}; "
        f"import longtail.commands; longtail.commands.{room}()"
    )
    backend = {"KERAS_BACKEND": "jax" if missing == "jax" else "tensorflow"}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | backend, capture_output=True, text=True
    )
    assert found.stderr.splitlines() == [
        f"{command[0]}: expected the extra '{extra}', found no module '{missing}': pip install 'longtail[{extra}]'"
    ]
    assert found.returncode == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii:strict"])
def test_commands_write_to_a_terminal_that_is_not_utf_8(encoding: str, tmp_path: Path) -> None:
    """Building says λ; a refused recipe and a refused path repeat what they were given."""
    make_bundle(labels=12).write(tmp_path / "bundle")
    tiny.write_job(tmp_path)
    commands = {
        ("index", "build", "bundle", "--releases", "releases", "--publish"): 0,
        ("trainer", "check", "recipe.toml", "--set", 'name="λ-日本"'): 1,
        ("serving", "check", "λ-日本"): 2,
    }
    for (room, *words), code in commands.items():
        found = subprocess.run(
            [sys.executable, "-m", f"longtail.{room}", *words],
            cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": encoding, "KERAS_BACKEND": "tensorflow"},
            capture_output=True, check=False,
        )  # fmt: skip
        said = (found.stdout + found.stderr).decode("latin-1")
        assert (found.returncode, "Traceback" in said) == (code, False), said
        # Click takes ASCII for a terminal that is set up wrongly, and writes its own errors as UTF-8.
        assert "?" in said or "λ" in found.stderr.decode("utf-8", "replace")
    assert Releases(tmp_path / "releases").current() is not None
