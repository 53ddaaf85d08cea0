"""Check that a commit can be tagged as a release: the last step of `make release-check`.

Builds the sdist and the wheel, and follows README's own-logs section with each supported Python in an environment that
has only the wheel. Prints one line a check; the first problem ends the program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import longtail

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
COPYLEFT = re.compile(r"\bA?GPL|GNU (Affero )?General Public|Server Side Public|Commons Clause", re.IGNORECASE)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output; exit with the output if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def require(condition: object, problem: str) -> None:
    if not condition:
        sys.exit(problem)


def check_versions() -> None:
    version = PROJECT["version"]
    headings = re.findall(r"(?m)^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?", (ROOT / "CHANGELOG.md").read_text())
    citation = dict(re.findall(r"(?m)^(version|date-released): (.+)", (ROOT / "CITATION.cff").read_text()))
    require(longtail.__version__ == version, f"longtail/__init__.py: expected {version}, found {longtail.__version__}")
    require(headings[0][0] == version, f"CHANGELOG.md: expected [{version}] first, found [{headings[0][0]}]")
    expected = {"version": version, "date-released": headings[0][1]}
    require(citation == expected, f"CITATION.cff: expected {expected}, found {citation}")
    require(not run("git", "tag", "--list", f"v{version}"), f"v{version}: expected no such tag; raise the version")
    changes = run("git", "status", "--porcelain")
    require(not changes, f"expected no uncommitted files, found\n{changes}")
    print(f"version {version} of {headings[0][1]} in pyproject.toml, longtail, CITATION.cff and CHANGELOG.md")


def check_hashes() -> None:
    """Require a hash for every package that images install."""
    for path in sorted((ROOT / "docker").glob("requirements-*.txt")):
        pins = path.read_text().replace("\\\n", " ").splitlines()
        pins = [pin for pin in pins if pin.strip() and not pin.lstrip().startswith(("#", "-"))]
        bare = [pin.split()[0] for pin in pins if "==" not in pin or "--hash=sha256:" not in pin]
        require(pins and not bare, f"{path}: expected NAME==VERSION --hash=sha256:…, found {bare}")
        print(f"{path.name}: {len(pins)} packages, each with a version and hashes")


def check_licences(python: Path) -> None:
    """Require that every package next to Longtail names a licence, which is not a strong copyleft one."""
    paths = json.loads(run(python, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"))
    licences = {}
    for package in Distribution.discover(path=paths):
        names = [
            line.split(" :: ")[-1] for line in package.metadata.get_all("Classifier") or () if "License ::" in line
        ]
        texts = [package.metadata.get("License-Expression"), ", ".join(names), package.metadata.get("License")]
        # Some packages name their licence in its own file alone.
        texts += [path.read_text() for path in package.files or () if re.match(r"LICEN[CS]E", path.name)]
        licences[package.name] = next((text.strip()[:500] for text in texts if text and text.strip()), "")
    problems = {name: text for name, text in licences.items() if not text or COPYLEFT.search(text)}
    require(not problems, f"expected packages with a permissive licence, found {problems}")
    print(f"{len(licences)} installed packages name a permissive licence")


def check_wheel(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel for a Python, then go from the example's log to recommendations."""
    environment, shop = folder / version, ROOT / "examples/shop"
    run("uv", "venv", "--quiet", "--python", version, environment)
    python, scripts = environment / "bin/python", environment / "bin"
    run("uv", "pip", "install", "--quiet", "--python", python, f"{wheel}[train,index,serve,client]")
    data = ("--labels", shop / "products.parquet", "--queries", shop / "users.parquet")
    for command in (
        ("longtail-train", "init", shop / "clicks.parquet", *data, "--out", "recipe.toml"),
        ("longtail-train", "fit", "recipe.toml", "--out", "bundle", "--set", "training.epochs=2",
         "--set", "model.temperature=0.1"),
        ("longtail-index", "build", "bundle", "--releases", "releases", "--publish"),
    ):  # fmt: skip
        run(scripts / command[0], *command[1:], cwd=environment)
    program = "import longtail; print(len(longtail.load('releases').recommend({'user_id': 'u42'}, k=10)))"
    require(run(python, "-c", program, cwd=environment).strip() == "10", f"Python {version}: expected 10 labels")
    print(f"Python {version}: installed, trained, built, 10 labels recommended")
    if version == PYTHONS[0]:
        check_licences(python)


def main() -> None:
    check_versions()
    check_hashes()
    with TemporaryDirectory() as folder:
        run("uv", "build", "--quiet", "--out-dir", folder)
        (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
        print(f"built {wheel.name} and {sdist.name}")
        for version in PYTHONS:
            check_wheel(wheel, version, Path(folder))
    print(f"ready: git tag --sign --annotate v{PROJECT['version']}")


if __name__ == "__main__":
    main()
