"""The demo shows its own service, and leaves none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

import demo
from tests.bundles import make_bundle
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import children, free_port

ROOT = Path(__file__).parent.parent
WITHOUT_TRAINING = """
import sys
from pathlib import Path
import demo
demo.run = demo.show_dial = demo.show_queries = lambda *words: None
demo.RELEASES = Path(sys.argv.pop(1))
demo.main()
"""


def start(*words: object, cwd: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.process
def test_a_port_in_use_is_refused_before_training(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = start(ROOT / "demo.py", "--port", port, cwd=tmp_path)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output == (
        f"expected a free port for the demo's service, found 127.0.0.1 port {port}: Address already in use; "
        f"choose another: make demo PORT={port + 1 if port < 65_535 else 8000}\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_service_too(tmp_path: Path, number: signal.Signals) -> None:
    releases = publish_bundle(make_bundle(), tmp_path)
    process = start("-c", WITHOUT_TRAINING, releases, "--port", free_port(), cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert any("The service keeps running" in line for line in process.stdout)
        (service,) = (pid for pid, command in children(process.pid).items() if b"longtail-serve" in command)
        process.send_signal(number)
        assert process.wait(60) == (0 if number == signal.SIGINT else 128 + number)
        with pytest.raises(ProcessLookupError):
            os.kill(service, 0)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def other_service(body: bytes) -> Iterator[str]:
    """A service that answers every path alike; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.process
@pytest.mark.parametrize("body", [b'{"name": "theirs"}', b'{"status": "ready"}', b"[]", b"<html>"])
def test_answers_of_another_service_are_not_shown(body: bytes) -> None:
    ending = [sys.executable, "-c", "import sys, time; time.sleep(1); sys.exit(3)"]
    with (
        other_service(body) as url,
        subprocess.Popen(ending) as service,
        pytest.raises(SystemExit, match=r"it ended with exit code 3: another program .* make demo PORT=\d+$"),
    ):
        demo.wait_until_ready(url, service, published="ours")


@pytest.mark.process
def test_its_own_service_is_known_by_the_release() -> None:
    with other_service(b'{"name": "ours"}') as url, subprocess.Popen(["sleep", "60"]) as service:
        demo.wait_until_ready(url, service, published="ours")
        service.kill()


def test_the_highest_port_has_another() -> None:
    assert (demo.another(8000), demo.another(65_535)) == (8001, 8000)


def test_a_free_port_is_accepted() -> None:
    demo.refuse_taken_port(free_port())
