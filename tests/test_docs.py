"""What the documents say holds: citations and links lead somewhere, the site lists its pages, and versions agree."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import longtail
from longtail.index.cli import app as index_app
from longtail.serving.cli import app as serve_app
from longtail.trainer import LOSSES, SAMPLERS, WEIGHTS
from longtail.trainer.audit.cli import app as audit_app
from longtail.trainer.cli import app as train_app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SITE_ALONE = re.compile(r"<!-- page: (\S+) -->$", re.MULTILINE)


def tracked(*endings: str) -> list[Path]:
    """Files of the repository with these endings, those not yet committed among them."""
    result = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"*{ending}" for ending in endings)],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [path for name in result.stdout.split() if (path := ROOT / name).exists() and not path.is_symlink()]


def prose(path: Path) -> str:
    """A Markdown file without fenced code and code spans."""
    return re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`", "", path.read_text())


def anchors(path: Path) -> set[str]:
    """What a link to this Markdown file may end with: GitHub's anchors of its headings, and its own."""
    titles = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^ *```.*?^ *```$", "", path.read_text()))
    slugs = {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', path.read_text()))


CITING = [path for path in tracked(".py", ".md", ".toml") if path != Path(__file__)]


def test_cited_sections_exist() -> None:
    methods = [
        (path.name, f"methods.md#s{number}")
        for path in CITING
        for numbers in re.findall(r"METHODS((?:,? §\d+(?:\.\d+)?)+)", path.read_text())
        for number in re.findall(r"\d+(?:\.\d+)?", numbers)
    ]
    design = [
        (path.name, f"design.md#{heading.lower()}")
        for path in CITING
        for heading in re.findall(r"\[DESIGN, (\w+)\]", path.read_text())
    ]
    assert len(methods) > 30
    targets = {f"{page}#{anchor}" for page in ("methods.md", "design.md") for anchor in anchors(DOCS / page)}
    assert [citation for citation in methods + design if citation[1] not in targets] == []


@pytest.mark.parametrize("path", tracked(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name}: {target}"
        if file.suffix == ".md":
            assert not anchor or anchor in anchors(file), f"{path.name}: {target}"
            source = SITE_ALONE.match(file.read_text())
            assert not source or source[1] in (path.name, str(path.relative_to(ROOT))), (
                f"{path.name}: link to {source[1]}"
            )


def pages() -> set[str]:
    return {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}


def test_the_navigation_lists_every_page_once() -> None:
    listed = []
    for page in DOCS.rglob("*.md"):
        for body in re.findall(r"(?ms)^<!-- toctree:[^\n]*\n(.*?)^-->$", page.read_text()):
            listed += body.split()
    assert sorted(listed) == sorted(pages() - {"index"})


@pytest.mark.process  # griffe calls git
def test_generated_parts_of_pages_are_current() -> None:
    pytest.importorskip("griffe")
    from docs.generate import PART, generated

    generated_pages = [page for page in DOCS.rglob("*.md") if PART.search(page.read_text())]
    assert len(generated_pages) > 10
    stale = [
        str(page.relative_to(ROOT)) for page in generated_pages if generated(page.read_text(), page) != page.read_text()
    ]
    assert stale == [], "run python -m docs.generate"


def test_pages_are_complete_without_the_site() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        if source := SITE_ALONE.match(text):
            assert f"](../{source[1]})" in text
        markers = re.findall(r"(?m)^<!-- (\w+)", text)
        assert {*markers} <= {"page", "include", "api", "http", "toctree", "end"}
        assert markers.count("end") == sum(kind in ("include", "api", "http") for kind in markers), page
        assert "```{" not in text, page


def test_figures_of_the_short_answer_are_the_notebooks() -> None:
    figures = re.findall(r"\*\*(\d+)\*\*", (DOCS / "films.md").read_text())
    notebook = (ROOT / "examples/movielens.ipynb").read_text()
    assert len(figures) == 4
    assert all(f"**{figure}**" in notebook for figure in figures)


def test_how_it_works_is_one_picture_and_short() -> None:
    text = (DOCS / "how.md").read_text()
    assert len(re.findall(r"!\[", text)) == 1
    assert len(text.split()) <= 300
    assert "](docs/how.md)" in (ROOT / "README.md").read_text()


def test_paths_in_contributing_exist() -> None:
    paths = re.findall(r"`([a-z_]+/[\w./]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 30
    assert [path for path in paths if path != "build/docs" and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", sorted(pages()))
def test_modules_and_names_in_pages_exist(page: str) -> None:
    for name in set(re.findall(r"`(longtail(?:\.\w+)+)`", (DOCS / page).with_suffix(".md").read_text())):
        try:
            module = find_spec(name)
        except ModuleNotFoundError:
            module = None
        if module is None and not name.startswith(("longtail.trainer.tfrs", "longtail.trainer.torch")):
            owner, _, attribute = name.rpartition(".")
            assert hasattr(import_module(owner), attribute), f"{page}: {name}"


def test_the_pages_of_samplers_weights_and_losses_name_every_row() -> None:
    text = (DOCS / "methods.md").read_text()
    for name in (*SAMPLERS, *WEIGHTS, *LOSSES):
        assert f"`{name}`" in text, name


def test_the_page_of_commands_has_every_command_and_option() -> None:
    documented: dict[str, set[str]] = {}
    for line in (DOCS / "cli.md").read_text().splitlines():
        if line.startswith("### "):
            _, program, *words = line.split()
            command = program if program == "longtail-audit" else f"{program} {words.pop(0)}"
            documented[command] = {*words}
        elif option := re.match(r"\| `(--[\w-]+)", line):
            documented[command].add(option[1])
    real = {"longtail-audit": get_command(audit_app)}
    for program, app in (("longtail-train", train_app), ("longtail-index", index_app), ("longtail-serve", serve_app)):
        real |= {f"{program} {name}": command for name, command in get_command(app).commands.items()}
    assert documented == {
        name: {
            parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[0]
            for parameter in command.params
        }
        for name, command in real.items()
    }


def test_the_page_on_installing_lists_every_extra() -> None:
    table = re.findall(r"(?m)^\| (`.+?`) \|", (DOCS / "install.md").read_text().partition("## Extras")[2])
    assert sorted(re.findall(r"`(\w+)`", " ".join(table))) == sorted(PROJECT["optional-dependencies"])


def test_versions_agree() -> None:
    version = PROJECT["version"]
    newest, date, section = re.findall(
        r"(?ms)^## \[(\d[^\]]*)\] - (\S+)\n(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text()
    )[0]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (newest, cited["version"], str(cited["date-released"])) == (version, version, date)
    assert len(section.splitlines()) <= 90
    assert json.loads((ROOT / "serving/openapi.json").read_text())["info"]["version"] == version
    assert longtail.__version__ == version
    files = [*(ROOT / "docker").rglob("*.yaml"), ROOT / "docker/README.md", DOCS / "orchestrators.md"]
    text = "\n".join(path.read_text() for path in files)
    tags = re.findall(r"longtail-(?:serving|trainer)[a-z-]*:([\d.]+\d)|newTag: (\S+?)}?$", text, re.MULTILINE)
    assert len(tags) > 10
    assert {first or second for first, second in tags} == {version}


def targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text()))


def runs(path: Path) -> list[str]:
    """Commands that a workflow runs."""
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_continuous_integration_runs_make_targets_that_exist() -> None:
    files = [
        *WORKFLOWS,
        *(ROOT / name for name in (".ci/run", ".pre-commit-config.yaml", "CONTRIBUTING.md", "README.md")),
    ]
    for path in files:
        for target in re.findall(r"(?m)(?:^ *|: |`)make ([a-z-]+)", path.read_text()):
            assert target in targets(), f"{path.name}: make {target}"
    commands = [command for path in WORKFLOWS for command in runs(path)]
    assert {"make check", "make docs", "make audit"} <= set(commands)
    assert [command for command in commands if not command.startswith(("make ", "sudo apt-get "))] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_read_only_and_pin_their_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/checkout@v4")), step


def test_project_urls_are_files_of_one_repository() -> None:
    urls = PROJECT["urls"]
    assert set(urls) == {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
    home = urls["Repository"]
    assert {home, home.removeprefix("https://")} & set((ROOT / "README.md").read_text().split())
    for url in urls.values():
        assert url.startswith(home)
        if "/blob/main/" in url:
            assert (ROOT / url.split("/blob/main/")[1]).exists(), url


def test_every_declared_python_is_tested() -> None:
    versions = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]["test"]
    assert "make ${{ matrix.target }}" in [step.get("run") for step in checks["steps"]]
    targets_by_version = {job["python-version"]: job["target"] for job in checks["strategy"]["matrix"]["include"]}
    assert targets_by_version == dict.fromkeys(versions, "quick") | {versions[0]: "test"}
