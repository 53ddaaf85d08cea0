"""A job leaves nothing in the temporary folder, neither when it ends nor when it is killed.

AutoGraph would: it writes each function that it rewrites to a file, which Python compiles to another one beside it
that nobody removes, and a killed process leaves both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import tiny
from tests.trainer.test_resume import FIT

pytestmark = pytest.mark.process


@pytest.mark.parametrize("batch", [None, 20], ids=["finished", "killed"])
def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = tiny.write_job(tmp_path / "job"), tmp_path / "temporary"
    folder.mkdir()
    died = ["batch", str(batch)] if batch else ["never", "0"]
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    process = subprocess.run(
        [sys.executable, "-c", FIT, *died, "fit", str(recipe), "--out", str(tmp_path / "out")],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TMPDIR": str(folder)}, capture_output=True, check=False,
    )  # fmt: skip

    assert process.returncode == (-signal.SIGKILL if batch else 0), process.stderr.decode()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == []
