import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = subprocess.run(["git", "ls-files", "*.md", "Makefile"], cwd=ROOT, capture_output=True, text=True, check=True)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES.stdout.split()}
MODULES = sorted({name for text in TEXTS.values() for name in re.findall(r"-m (benchmarks[.\w]*)", text)})
FINAL = dict(re.findall(r"\| `(\w+)\.py` \| (\w{8}) \|", TEXTS["benchmarks/RESULTS.md"]))
OBJECTS = "\n".join(f"{commit}:benchmarks/{program}.py" for program, commit in FINAL.items())
FILES = subprocess.run(["git", "cat-file", "--batch-check"], cwd=ROOT, capture_output=True, text=True, input=OBJECTS)
SHALLOW = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_of_a_page_exists_or_has_a_commit(module: str) -> None:
    assert find_spec(module) is not None or module.removeprefix("benchmarks.") in FINAL
    assert len(MODULES) > 5


@pytest.mark.skipif(SHALLOW.stdout.strip() != "false", reason="needs the history of the repository")
def test_the_commits_of_final_figures_have_their_programs() -> None:
    assert [line.split()[1] for line in FILES.stdout.splitlines()] == ["blob"] * len(FINAL)
    assert not [program for program in FINAL if (ROOT / f"benchmarks/{program}.py").exists()]
