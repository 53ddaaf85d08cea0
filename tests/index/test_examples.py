"""The examples in the docstrings of the names that a user meets first; each runs in a folder with a bundle."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import longtail.index
from tests.bundles import make_bundle


@pytest.mark.parametrize("name", ["build", "publish", "Searcher"])
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bundle(labels=60).write(tmp_path / "runs" / "model")
    monkeypatch.chdir(tmp_path)
    item = getattr(longtail.index, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(item, name, globs={})
    assert example.examples
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(example, out=output.append).failed == 0, "".join(output)
