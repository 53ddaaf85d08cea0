"""Every benchmark that a page or the Makefile names is there."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = subprocess.run(["git", "ls-files", "*.md", "Makefile"], cwd=ROOT, capture_output=True, text=True, check=True)
NAMED = sorted({
    name
    for page in PAGES.stdout.split()
    for name in re.findall(r"-m (benchmarks[.\w]*)", (ROOT / page).read_text(encoding="utf-8"))
})  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_benchmark_that_is_named_is_there(name: str) -> None:
    assert find_spec(name) is not None
    assert len(NAMED) > 5
