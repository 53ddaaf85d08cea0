"""What the README shows is true: its commands exist, its recipe is valid, its folders are there."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

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
from tests.trainer import tiny
from tests.trainer.conftest import KERAS_VARIABLES_PREDATE_NUMPY_2

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = README + "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).replace("\\\n", "")
COMMANDS = sorted(
    set(re.findall(r"(?m)^ *(longtail-(?:train|audit|index|serve) [^\n`&]+)$|`(longtail-\w+ [^`]+)`", GUIDES))
)
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
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"(?m)^{target}:", makefile), target


@pytest.mark.slow
@pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2)
def test_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block for block in blocks("python") if "from longtail.index" in block]
    recipe = tiny.write_job(tmp_path / "shop")
    monkeypatch.chdir(tmp_path)
    exec(code.replace("shop/recipe.toml", str(recipe)).replace("recall@20", "recall@5"))
    assert 0 < float(capsys.readouterr().out.splitlines()[-1]) <= 1
    assert Releases("releases").current() is not None
