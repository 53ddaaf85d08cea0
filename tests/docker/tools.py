"""Programs that check docker/'s files where they are installed; docker/README.md says how to get them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).parent.parent.parent / "docker"


def run(program: str, *arguments: str, cwd: Path = DOCKER, env: dict[str, str] | None = None) -> str:
    """What `program` printed. Skips the test where it is not installed; fails it unless the exit status is 0."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not on PATH")
    result = subprocess.run([path, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{program} {' '.join(arguments)}\n{result.stdout}{result.stderr}"
    return result.stdout
