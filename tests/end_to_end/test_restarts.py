"""Stops and restarts under load lose no request, with one worker and with several.

`LONGTAIL_RESTARTS=100 pytest tests/end_to_end/test_restarts.py -s` makes a hundred of each and prints what they took.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.bundles import make_bundle
from tests.end_to_end.gateway import Gateway
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import until

RESTARTS = int(os.environ.get("LONGTAIL_RESTARTS", "1"))
PAUSES = [0.0] * 6 + [0.01] * 4 + [0.05] * 2
"""Twelve connections that are kept: some ask without a pause, some are mostly idle."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_bundle(make_bundle(labels=500), tmp_path_factory.mktemp("restarts"))


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_restarts_lose_no_request(releases: Path, tmp_path: Path, workers: int) -> None:
    total: Counter[str] = Counter()
    lost: list[str] = []
    seconds: list[float] = []
    for turn in range(RESTARTS):
        log = tmp_path / f"log-{turn}"
        with server(releases, log, workers=workers, drain_seconds=1, state=tmp_path / "state") as process:
            gateway = Gateway(process.url)
            with gateway.sending(PAUSES, fresh=2):
                process.wait_until_ready()
                gateway.up.set()
                until(lambda gateway=gateway: gateway.answered["200"] >= 200, "200 answers")  # type: ignore[misc]
                began = time.monotonic()
                process.process.send_signal(signal.SIGTERM)
                assert process.process.wait(40) == 0
                seconds.append(time.monotonic() - began)
        total += gateway.answered
        lost += [f"{turn}, {round(float(line.rsplit(' ', 1)[1]) - began, 3)} s after: {line}" for line in gateway.lost]
        assert "Traceback" not in log.read_text()
    print(f"\n{workers} workers, {RESTARTS} restarts: {dict(total)}, {len(lost)} lost; stops took "
          f"{min(seconds):.1f} to {max(seconds):.1f} s")  # fmt: skip
    assert lost == []
    assert total.keys() <= {"200", "last", "closed"}
    assert total["last"] >= RESTARTS


def ask(connection: HTTPConnection, path: str = "/livez") -> tuple[int, str | None]:
    """Status and `Connection` of an answer."""
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    return response.status, response.headers["connection"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_second_signal_closes_idle_connections_at_once(releases: Path, tmp_path: Path, workers: int) -> None:
    with server(releases, tmp_path / "log", workers=workers, drain_seconds=60, state=tmp_path / "state") as process:
        process.wait_until_ready()
        with closing(HTTPConnection(process.url.removeprefix("http://"), timeout=10)) as idle:
            assert ask(idle) == (200, None)
            process.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{process.url}/readyz").status_code == 503, "not to be ready")
            assert httpx.get(f"{process.url}/v1/release").status_code == 200, "requests are taken all the same"
            # Signals do not queue: let every worker handle the first.
            time.sleep(0.5)
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(20) == 0


def test_new_connection_is_answered_during_stop(releases: Path, tmp_path: Path) -> None:
    with server(releases, tmp_path / "log", drain_seconds=0.1, state=tmp_path / "state") as process:
        process.wait_until_ready()
        address = httpx.URL(process.url).netloc.decode()
        with closing(HTTPConnection(address, timeout=10)) as connection:
            connection.connect()
            process.process.send_signal(signal.SIGTERM)
            until(lambda: not listens(address), "the server to accept no more connections")
            assert ask(connection) == (200, "close")
            assert process.process.wait(40) == 0


def listens(address: str) -> bool:
    try:
        with closing(HTTPConnection(address, timeout=10)) as connection:
            connection.connect()
    except OSError:
        return False
    return True
