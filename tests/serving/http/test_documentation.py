"""The page at /docs in a real browser: it draws the document, with nothing from elsewhere."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.serving.dashboard.browser import executable
from tests.serving.process import server, until


@pytest.mark.process
@pytest.mark.skipif(executable() is None, reason="no chromium on the PATH")
def test_the_page_draws_the_document(tmp_path: Path) -> None:
    with server(tmp_path, tmp_path / "log") as process:

        def alive() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{process.url}/livez").status_code == 200
            return False

        until(alive, "an answer of /livez")
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ]
        dom = subprocess.run(
            [str(executable()), *options, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000",
             "--dump-dom", f"{process.url}/docs"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
    assert "Unable to render" not in dom
    for path in ("/v1/retrieve", "/v1/feedback", "/v1/labels/{id}"):
        assert f'data-path="{path}"' in dom
