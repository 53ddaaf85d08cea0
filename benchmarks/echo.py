"""A bare FastAPI service that answers with the body of the request: what HTTP, JSON and pydantic alone cost.

python -m benchmarks.echo PORT
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from tests.serving.process import free_port

PATH = "/echo"


class Body(BaseModel):
    """The body of a request to retrieve, as far as the echo checks it."""

    queries: list[dict[str, Any]]


def create_app() -> FastAPI:
    """Create the application."""
    app = FastAPI()

    @app.post(PATH)
    async def echo(body: Body) -> Body:
        return body

    return app


@contextmanager
def running() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run the echo in a process of its own; yield its port and the process."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.echo", str(port)])
    try:
        for _ in range(200):
            try:
                urlopen(f"http://127.0.0.1:{port}{PATH}")
            except HTTPError:  # the echo answers, though not to a GET
                break
            except OSError:
                time.sleep(0.05)
        yield port, process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), access_log=False, log_level="error")
