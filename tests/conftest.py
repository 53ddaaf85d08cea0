"""Which tests `make quick` leaves out.

`process`: starts other processes, a browser among them. Whole folders are marked here, single tests where they stand;
an unmarked test that starts one fails, so that the mark cannot be forgotten. `slow`: takes seconds.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROCESS_FOLDERS = tuple(HERE / folder for folder in ("docker", "end_to_end", "examples", "serving/dashboard", "tfrs"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in PROCESS_FOLDERS):
            item.add_marker(pytest.mark.process)


@pytest.fixture(autouse=True)
def _processes_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("process") is None:

        def refuse(_: object, command: object, *__: object, **___: object) -> None:
            pytest.fail(f"expected the mark `process` on a test that starts one, found {command}")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
