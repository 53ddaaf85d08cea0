import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [path for pattern in ("Makefile", "*.md", "benchmarks/*.md", "docs/*.md") for path in ROOT.glob(pattern)]
MODULES = sorted({name for page in PAGES for name in re.findall(r"-m (benchmarks[.\w]*)", page.read_text())})
RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text()
FINAL = dict(re.findall(r"\| `(\w+)\.py` \| (\w{8}) \|", RESULTS))
OBJECTS = "\n".join(f"{commit}:benchmarks/{program}.py" for program, commit in FINAL.items())


def git(*words: str, text: str = "") -> str:
    """Return what git prints; "" outside of a clone or without git."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, input=text).stdout
    except FileNotFoundError:
        return ""


IS_SHALLOW = git("rev-parse", "--is-shallow-repository").strip() != "false"
FILES = git("cat-file", "--batch-check", text=OBJECTS).splitlines()


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_of_a_page_exists_or_has_a_commit(module: str) -> None:
    assert find_spec(module) is not None or module.removeprefix("benchmarks.") in FINAL
    assert len(MODULES) > 5


@pytest.mark.skipif(IS_SHALLOW, reason="needs git and the whole history: clone, or run `git fetch --unshallow`")
def test_the_commits_of_final_figures_have_their_programs() -> None:
    assert [line.split()[1] for line in FILES] == ["blob"] * len(FINAL)
    assert not [program for program in FINAL if (ROOT / f"benchmarks/{program}.py").exists()]
