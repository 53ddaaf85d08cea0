"""Headless Chromium, run once for each page: what it shows after its requests, and what it complains of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def executable() -> str | None:
    """Return the browser on PATH, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def render(url: str, profile: Path) -> tuple[str, list[str]]:
    """Return the page's document as HTML once it has drawn itself, and its console messages."""
    program = executable()
    if program is None:
        pytest.skip("expected chromium, chromium-browser or google-chrome on PATH, found none")
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=4000",
        f"--user-data-dir={profile}", "--dump-dom", url,
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return process.stdout, re.findall(r"CONSOLE[^\"]*\"(.*)\"", process.stderr)
