"""Wheel, sdist and editable install: `longtail` alone, every file, commands of the rooms there, extras named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail import commands
from longtail.index import open_releases
from tests.bundles import make_bundle
from tests.trainer import tiny

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
ROOMS = ("bundle", "client", "commands", "index", "serving", "state", "tables", "trainer")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def pip(*arguments: object, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)


def copy_source(folder: Path, rooms: Iterable[str] = ROOMS) -> Path:
    """Copy what a build reads, as a clone or an image's context has it."""
    shutil.copytree(ROOT / "longtail", folder / "longtail", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for room in rooms:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def list_tracked(*rooms: str) -> set[str]:
    """Return the committed files of rooms, and of `longtail` itself, as paths in an installed package."""
    listed = subprocess.run(["git", "ls-files", "--", *rooms], cwd=ROOT, capture_output=True, text=True, check=True)
    links = {f"longtail/{room}" for room in ROOMS}
    package_files = subprocess.run(
        ["git", "ls-files", "longtail"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {f"longtail/{name}" for name in listed.stdout.split()} | (set(package_files.stdout.split()) - links)


@pytest.fixture(scope="module")
def build_tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with setuptools as pyproject.toml demands it, for builds without an environment each."""
    folder = tmp_path_factory.mktemp("tools")
    pip("install", "--no-compile", "--target", folder, *PROJECT["build-system"]["requires"])
    return str(folder)


def build_wheel(source: Path, build_tools: str) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", source / "dist", source, PYTHONPATH=build_tools)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(build_tools: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_source(tmp_path_factory.mktemp("source")), build_tools)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing that it depends on."""
    environment = tmp_path_factory.mktemp("bare")
    venv.create(environment, with_pip=False)
    pip("--python", environment / "bin" / "python", "install", "--no-compile", "--no-deps", "--no-index", wheel)
    return environment


def list_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def list_scripts(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        lines = archive.read(entry_points).decode().splitlines()
    return {line.split(" = ")[0] for line in lines if " = " in line}


def test_the_wheel_builds_and_answers_without_the_repository(bare: Path, tmp_path: Path) -> None:
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
        result = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
    program_text = "import longtail.bundle as room; print(room.__file__)"
    program = [bare / "bin" / "python", "-c", program_text]
    result = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stdout.startswith(str(bare))


def test_every_room_has_a_link_in_the_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "longtail"}
    links = {path.name: path.readlink() for path in (ROOT / "longtail").iterdir() if path.is_symlink()}
    assert packages == set(ROOMS)
    assert links == {room: Path("..", room) for room in ROOMS}


def test_the_wheel_holds_every_file_below_longtail_and_nothing_else(wheel: Path) -> None:
    assert list_files(wheel) == list_tracked(*ROOMS)
    assert list_scripts(wheel) == {"longtail", "longtail-audit", "longtail-train", "longtail-index", "longtail-serve"}


def test_the_wheel_of_an_sdist_is_the_wheel_of_a_clone(wheel: Path, build_tools: str, tmp_path: Path) -> None:
    program = "import setuptools.build_meta as build; build.build_sdist('dist')"
    environment = os.environ | {"PYTHONPATH": build_tools}
    source = wheel.parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    rebuilt = build_wheel(unpacked, build_tools)
    assert list_files(rebuilt) == list_files(wheel)
    assert list_scripts(rebuilt) == list_scripts(wheel)


@pytest.mark.parametrize("image", ["serving", pytest.param("serving-gpu", marks=pytest.mark.nightly), "trainer"])
def test_the_wheel_of_an_image_has_only_its_rooms_and_their_commands(
    image: str, build_tools: str, tmp_path: Path
) -> None:
    text = (ROOT / f"docker/{image}.Dockerfile").read_text()
    rooms = {name for name, target in re.findall(r"(?m)^COPY (\w+) (\w+)$", text) if name == target} - {"longtail"}
    built = build_wheel(copy_source(tmp_path / "source", rooms), build_tools)
    assert rooms < set(ROOMS)
    assert list_files(built) == list_tracked(*rooms)
    room_commands = {"longtail-audit", "longtail-train"} if image == "trainer" else {"longtail-serve"}
    assert list_scripts(built) == {"longtail", "longtail-index"} | room_commands


def test_an_editable_install_is_a_path_that_editors_follow(build_tools: str, tmp_path: Path) -> None:
    """Editors read lines of `.pth` files that name a folder, and none that run code."""
    source, environment = copy_source(tmp_path / "source"), tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = ("install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", source)
    pip("--python", python, *install, PYTHONPATH=build_tools)
    (path_file,) = environment.glob("lib/python*/site-packages/*.pth")
    assert path_file.read_text().splitlines() == [str(source)]
    program = "import longtail.commands as room; print(room.__file__)"
    result = subprocess.run([python, "-c", program], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert result.stdout.strip() == str(source / "longtail/commands/__init__.py"), result.stderr


def test_commands_print_their_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (commands.trainer, commands.audit, commands.index, commands.serving):
        monkeypatch.setattr(sys, "argv", ["longtail", "--version"])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code in (0, None)
    assert re.fullmatch(r"(longtail-\w+ \d\S*\n){4}", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["train", "audit", "index", "serve"])
def test_longtail_runs_the_named_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_command_names_its_missing_extra_in_one_line(command: str, extra: str, bare: Path, wheel: Path) -> None:
    result = subprocess.run([bare / "bin" / command, "--help"], capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{command}: expected the extra '{extra}', found no module ")
    assert line.endswith(f": pip install '{wheel}[{extra}]'"), "what it came from, as no index has it"


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
def test_a_command_names_the_extra_of_a_missing_module(
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
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | backend, capture_output=True, text=True
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{command[0]}: expected the extra '{extra}', found no module '{missing}': pip install '")
    assert line.endswith(f"[{extra}]'")
    assert result.returncode == 2


@pytest.mark.parametrize("encoding", [pytest.param("latin-1", marks=pytest.mark.nightly), "ascii:strict"])
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
        result = subprocess.run(
            [sys.executable, "-m", f"longtail.{room}", *words],
            cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": encoding, "KERAS_BACKEND": "tensorflow"},
            capture_output=True, check=False,
        )  # fmt: skip
        output = (result.stdout + result.stderr).decode("latin-1")
        assert (result.returncode, "Traceback" in output) == (code, False), output
        # Click takes ASCII for a terminal that is set up wrongly, and writes its own errors as UTF-8.
        assert "?" in output or "λ" in result.stderr.decode("utf-8", "replace")
    assert open_releases(tmp_path / "releases").current() is not None
