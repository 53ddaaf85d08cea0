"""What the README shows is true: its commands exist, its recipe is valid, its folders are there."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

import demo
from longtail import client
from longtail.bundle import Bundle
from longtail.bundle.promise import QualityPromise
from longtail.index import open_releases
from longtail.serving.http.schemas.retrieval import RetrieveRequest
from longtail.trainer.config import Recipe
from longtail.trainer.evaluation.dial import Dial, Setting
from tests.pages import blocks, clone, script, section, typed
from tests.serving.process import free_port
from tests.trainer.conftest import KERAS_VARIABLES_PREDATE_NUMPY_2

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_recipe_is_valid() -> None:
    (recipe,) = blocks("toml", README)
    tree = tomllib.loads(recipe)
    assert Recipe.model_validate(tree).name == "shop"
    tree["data"]["typo"] = 1
    with pytest.raises(ValidationError):
        Recipe.model_validate(tree)


def test_promise_is_valid() -> None:
    for page, floor in (("production", 0.02), ("tutorial_operator", 0.001)):
        (promise,) = blocks("toml", (ROOT / "docs" / f"{page}.md").read_text())
        assert QualityPromise.model_validate(tomllib.loads(promise)).floors == {"tail": floor}
    _, of_audits = blocks("toml", (ROOT / "docs" / "audit.md").read_text())
    assert QualityPromise.model_validate(tomllib.loads(of_audits)).floors["tail"] == 0.02


def test_client_code_compiles_and_its_methods_exist() -> None:
    (code,) = [block for block in blocks("python", README) if "from longtail.client" in block]
    compile(code, "README.md", "exec")
    for name in re.findall(r"longtail\.(\w+)\(", code):
        assert hasattr(client.Client, name)


def test_request_is_valid_and_fits_the_recipe() -> None:
    (request,) = re.findall(r"-d '(\{.*?\})'", README, flags=re.DOTALL)
    (query,) = RetrieveRequest.model_validate_json(json.dumps(json.loads(request))).queries
    recipe = Recipe.model_validate(tomllib.loads(blocks("toml", README)[0]))
    assert set(query.features) == {feature.name for feature in recipe.query.features}
    assert {*json.loads(request)["queries"][0]["filter"], *query.max_per} <= set(recipe.data.display)


def test_the_readme_is_short() -> None:
    assert 900 <= len(README.split()) <= 1_200


def test_folders_and_commands_in_the_drawing_exist() -> None:
    drawing = README.split("## How it fits together")[1].split("```")[1]
    folders = re.findall(r"(\w+)/", drawing)
    assert len(folders) == 3
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert set(re.findall(r"longtail-\w+", drawing)) == {"longtail-train", "longtail-index", "longtail-serve"}


@pytest.mark.process
def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    code = "import sys; sys.version, sys.version_info = '3.10.13 (main)', (3, 10, 13); $2"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    old.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", f"{venv}/.installed", f"VENV={venv}", f"PYTHON={old}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert result.stderr.startswith("expected Python 3.11 or newer, found 3.10.13; set PYTHON")
    assert not venv.exists()


OWN_LOGS = section(README, "On your own logs")
SHOP = ROOT / "examples" / "shop"


def test_the_shop_is_small_and_reproducible(tmp_path: Path) -> None:
    shutil.copy(SHOP / "make.py", tmp_path)
    runpy.run_path(str(tmp_path / "make.py"), run_name="__main__")
    tables = sorted(path.name for path in SHOP.glob("*.parquet"))
    assert tables == ["clicks.parquet", "products.parquet", "users.parquet"]
    for name in tables:
        assert pq.read_table(tmp_path / name).equals(pq.read_table(SHOP / name)), name
    assert sum(path.stat().st_size for path in SHOP.iterdir()) <= 500_000


def test_the_demo_prints_the_next_commands_of_the_readme() -> None:
    lines = "".join(blocks("sh", OWN_LOGS)).splitlines()
    for line in demo.NEXT:
        assert line in lines


@pytest.mark.process
@pytest.mark.nightly
def test_commands_for_your_own_logs_run(tmp_path: Path) -> None:
    """Every block but the recipe by hand and what does without commands, in a clone."""
    without_commands = OWN_LOGS.split("\nWithout the commands:\n")[0]
    output = typed(script(without_commands, free_port(), written=False), clone(tmp_path))
    (answer,) = re.findall(r'(?m)^\{"results":.*?\}(?=p\d+ |\n|$)', output)
    labels = json.loads(answer)["results"][0]["labels"]
    assert len(labels) == 10
    assert all(label["display"]["in_stock"] for label in labels)
    lines = re.findall(r"p\d+ -?[\d.]+ (?:head|torso|tail|new) \w+ \w+ \w+", output)
    assert len(lines) == 10


@pytest.mark.nightly
@pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2)
def test_a_handwritten_recipe_and_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = blocks("toml", README)
    (code,) = [block for block in blocks("python", README) if "import longtail\n" in block]
    shutil.copytree(SHOP, tmp_path / "shop")
    (tmp_path / "shop/recipe.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    exec(code)
    rows = re.findall(r"(?m)^\d +(\d+) +p\d+ ", capsys.readouterr().out)
    assert rows == [str(rank) for rank in range(1, 11)]
    metrics = json.loads(Path("runs/second/metrics.json").read_text())
    assert len(metrics["baselines"]) == 8
    best = max(baseline["recall@20"]["value"] for baseline in metrics["baselines"].values())
    default = Dial.read_manifest(Bundle.load(Path("runs/second")).manifest)
    (at_default,) = [point for point in default.curve if Setting.read_point(point) == default.default]
    assert best <= at_default.metrics["recall@20"].value <= 1
    assert open_releases("releases/shop").current() is not None


@pytest.mark.nightly
@pytest.mark.process
def test_a_fresh_clone_installs_and_serves(tmp_path: Path) -> None:
    """With nothing but what package indexes hold; installs gigabytes."""
    (install,) = [block for block in blocks("sh", (ROOT / "docs/install.md").read_text()) if "venv" in block]
    steps = "".join(line for line in install.splitlines(keepends=True) if not line.startswith("git clone"))
    own_logs = OWN_LOGS.split("\nWithout the commands:\n")[0]
    typed(
        f"unset PYTHONPATH; PATH={Path(sys.executable).parent}:$PATH\n{steps}" + script(own_logs, free_port()),
        clone(tmp_path, environment=None),
    )
