"""What the README shows is true: its commands exist, its recipe is valid, its folders are there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from datetime import datetime, timedelta
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from typer.main import get_command

from longtail import client
from longtail.index import Releases
from longtail.index.cli import app as index_app
from longtail.index.release.bucket_floors import BucketFloors
from longtail.serving.cli import app as serve_app
from longtail.serving.http.schemas.retrieval import RetrieveRequest
from longtail.trainer.audit.cli import app as audit_app
from longtail.trainer.audit.promise import Promise
from longtail.trainer.cli import app as train_app
from longtail.trainer.config import Recipe
from tests.serving.process import ServerProcess, ended_after, free_port
from tests.trainer.conftest import KERAS_VARIABLES_PREDATE_NUMPY_2

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = README + "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).replace("\\\n", "")
COMMAND = r"(?m)^ *(longtail-(?:train|audit|index|serve) (?!--version)[^\n`&]+)$|`(longtail-\w+ [^`]+)`"
COMMANDS = sorted(set(re.findall(COMMAND, GUIDES)))
APPS = {
    "longtail-train": train_app, "longtail-audit": audit_app, "longtail-index": index_app, "longtail-serve": serve_app,
}  # fmt: skip


def blocks(language: str, text: str = README) -> list[str]:
    found = re.findall(rf"(?ms)^( *)```{language}\n(.*?)^ *```", text)
    return [re.sub(rf"(?m)^{indent}", "", body) for indent, body in found]


@pytest.mark.parametrize("line", [block or inline for block, inline in COMMANDS])
def test_command_parses(line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    command = get_command(APPS[program])
    if hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        if word.startswith("--"):
            assert word in options, f"{line}: no option {word}"


def test_recipe_is_valid() -> None:
    (recipe,) = blocks("toml")
    tree = tomllib.loads(recipe)
    assert Recipe.model_validate(tree).name == "shop"
    tree["data"]["typo"] = 1
    with pytest.raises(ValidationError):
        Recipe.model_validate(tree)


def test_promise_is_valid() -> None:
    for page, floor in (("production", 0.02), ("tutorial_operator", 0.001)):
        (promise,) = blocks("toml", (ROOT / "docs" / f"{page}.md").read_text())
        assert BucketFloors.model_validate(tomllib.loads(promise)).floors == {"tail": floor}
    (of_audits,) = blocks("toml", (ROOT / "docs" / "audit.md").read_text())
    assert Promise.model_validate(tomllib.loads(of_audits)).floors["tail"] == 0.02


def test_client_code_compiles_and_names_what_is_there() -> None:
    (code,) = [block for block in blocks("python") if "from longtail.client" in block]
    compile(code, "README.md", "exec")
    for name in re.findall(r"longtail\.(\w+)\(", code):
        assert hasattr(client.Client, name)


def test_request_is_valid_and_fits_the_recipe() -> None:
    (request,) = re.findall(r"-d '(\{.*?\})'", README, flags=re.DOTALL)
    (query,) = RetrieveRequest.model_validate_json(json.dumps(json.loads(request))).queries
    recipe = Recipe.model_validate(tomllib.loads(blocks("toml")[0]))
    assert set(query.features) == {feature.name for feature in recipe.query.features}
    assert {*json.loads(request)["queries"][0]["filter"], *query.max_per} <= set(recipe.data.display)


def test_the_readme_is_read_in_five_minutes() -> None:
    assert 900 <= len(README.split()) <= 1_200


def test_the_drawing_names_folders_and_commands_that_are_there() -> None:
    drawing = README.split("## How it fits together")[1].split("```")[1]
    folders = re.findall(r"(\w+)/", drawing)
    assert len(folders) == 3
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert set(re.findall(r"longtail-\w+", drawing)) == set(APPS) - {"longtail-audit"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
    assert "demo" in targets
    for target in targets:
        assert re.search(rf"(?m)^{target}:", makefile), target


@pytest.mark.process
def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    code = "import sys; sys.version, sys.version_info = '3.10.13 (main)', (3, 10, 13); $2"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    old.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", f"{venv}/.installed", f"VENV={venv}", f"PYTHON={old}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert made.stderr.startswith("expected Python 3.11 or newer, found 3.10.13: name another one")
    assert not venv.exists()


def write_shop(folder: Path) -> None:
    """The three files of README's section on own logs, with their columns: 60 users, 60 products, 800 clicks."""
    rng, rows, start = np.random.default_rng(0), range(60), datetime(2026, 1, 1)
    tables = {
        "clicks": {
            "user_id": [f"u{user}" for user in rng.integers(60, size=800)],
            "product_id": [f"p{product}" for product in rng.integers(60, size=800)],
            "clicked_at": [start + timedelta(minutes=10 * row) for row in range(800)],
        },
        "products": {
            "product_id": [f"p{row}" for row in rows],
            "title": [f"{('red', 'blue', 'green', 'white')[row % 4]} thing {row}" for row in rows],
            "brand": [f"brand{row % 7}" for row in rows],
            "price": [5 + row * 3.7 % 30 for row in rows],
        },
        "users": {"user_id": [f"u{row}" for row in rows], "country": [("NO", "SE", "DK")[row % 3] for row in rows]},
    }
    folder.mkdir()
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")


@pytest.mark.process
@pytest.mark.slow
def test_own_logs_by_the_commands_to_the_letter(tmp_path: Path) -> None:
    """Commands as a reader types them, in their order, in a folder with `.venv` and the three files; no other port."""
    port = free_port()
    section = README.split("\n## On your own logs\n")[1].split("\n## ")[0].replace("8000", str(port))
    *commands, request = blocks("sh", section)
    *steps, serve = "".join(commands).splitlines()
    activate = "".join(line + "\n" for line in steps if "/bin/activate" in line)
    write_shop(tmp_path / "shop")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = os.environ | {"PATH": os.defpath}

    def run(script: str) -> str:
        command = ["bash", "-e", "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}"
        return done.stdout

    run("\n".join(steps))
    with (tmp_path / "log").open("wb") as log:
        command, started = ["bash", "-e", "-c", f"{activate}exec {serve}"], time.perf_counter()
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    with ended_after(ServerProcess(process, f"http://127.0.0.1:{port}", started)) as service:
        service.wait_until_ready()
        words = shlex.split(request.replace("\\\n", ""))
        address, body = next(word for word in words if "/v1/" in word), words[words.index("-d") + 1]
        answer = httpx.post(f"http://{address}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
        labels = answer.json()["results"][0]["labels"]
        assert len(labels) == 10
        assert all(label["display"]["price"] < 20 for label in labels)
        (code,) = [block for block in blocks("python", section) if "from longtail.client" in block]
        lines = run(f"{activate}python -c {shlex.quote(code)}").splitlines()
        assert len(lines) == 10
        assert all(re.fullmatch(r"p\d+ \S+ (head|torso|tail|new) \w+ thing \d+", line) for line in lines)
        assert service.terminate() == 0


@pytest.mark.slow
@pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2)
def test_own_logs_by_hand_and_without_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = blocks("toml")
    (code,) = [block for block in blocks("python") if "import longtail\n" in block]
    write_shop(tmp_path / "shop")
    (tmp_path / "shop/recipe.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    exec(code)
    rows = re.findall(r"(?m)^\d +(\d+) +p\d+ ", capsys.readouterr().out)
    assert rows == [str(rank) for rank in range(1, 11)]
    assert Releases("releases/shop").current() is not None
