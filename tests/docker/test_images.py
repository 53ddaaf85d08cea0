"""The images: pinned, without root, stopped by SIGTERM, and started by a command that exists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from longtail.serving.cli import app as serve_app
from tests.docker.tools import DOCKER, run

ROOT = DOCKER.parent
IMAGES = ["serving", "serving-gpu", "trainer"]
SERVING = ["serving", "serving-gpu"]


def instructions(image: str) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^#.*\n", "", (DOCKER / f"{image}.Dockerfile").read_text())
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [(keyword, rest) for keyword, _, rest in (line.partition(" ") for line in lines if line)]


def final_stage(image: str) -> dict[str, str]:
    lines = instructions(image)
    start = max(i for i, (keyword, _) in enumerate(lines) if keyword == "FROM")
    return dict(lines[start:])


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` out: everything but the names it lists."""
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    return not any(Path(path).match(line[1:]) for line in lines if line.startswith("!"))


@pytest.mark.parametrize("image", IMAGES)
def test_base_is_pinned_by_version_and_digest(image: str) -> None:
    bases = [rest.split()[0] for keyword, rest in instructions(image) if keyword == "FROM"]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", bases[0])


@pytest.mark.parametrize("image", IMAGES)
def test_runs_without_root(image: str) -> None:
    stage = final_stage(image)
    user, group = stage["USER"].split(":")
    assert int(user) == int(group) == 10001
    assert stage["STOPSIGNAL"] == "SIGTERM"


@pytest.mark.parametrize("image", IMAGES)
def test_only_pinned_wheels_are_installed(image: str) -> None:
    steps = [rest for keyword, rest in instructions(image) if keyword == "RUN"]
    installs = [part for step in steps for part in step.split("&&") if " install " in part and " pip " in part]
    assert len(installs) == 3
    for install in installs:
        assert "--require-hashes --only-binary :all:" in install or "--no-deps --no-index /wheels/*.whl" in install
    assert not any(word in step for step in steps for word in ("curl", "wget", "apt-get"))


@pytest.mark.parametrize("image", IMAGES)
def test_copied_files_exist_in_the_build_context(image: str) -> None:
    sources = [
        source
        for keyword, rest in instructions(image)
        if keyword == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert f"docker/requirements-{image}.txt" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored("tests")
    assert ignored("docker/secrets")


@pytest.mark.parametrize("image", SERVING)
def test_service_command_exists(image: str) -> None:
    stage = final_stage(image)
    assert json.loads(stage["ENTRYPOINT"]) == ["longtail-serve"]
    name, *words = json.loads(stage["CMD"])
    options = {word for word in words if word.startswith("--")}
    command = typer.main.get_command(serve_app).commands[name]
    assert options <= {option for parameter in command.params for option in parameter.opts}
    assert stage["VOLUME"] == words[words.index("--state") + 1] == "/state"


@pytest.mark.parametrize("image", SERVING)
def test_healthcheck_asks_with_python(image: str) -> None:
    check = shlex.split(final_stage(image)["HEALTHCHECK"].split(" CMD ")[0])
    assert {word.split("=")[0] for word in check} == {"--interval", "--timeout", "--start-period", "--retries"}
    python, flag, program = json.loads(final_stage(image)["HEALTHCHECK"].split(" CMD ")[1])
    assert (python, flag) == ("python", "-c")
    compile(program, "HEALTHCHECK", "exec")
    assert "http://127.0.0.1:{os.environ.get('LONGTAIL_PORT', 8000)}/livez" in program


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint(image: str) -> None:
    run("hadolint", f"{image}.Dockerfile")


def test_shellcheck() -> None:
    run("shellcheck", *sorted(str(path) for path in DOCKER.rglob("*.sh")))
