"""SIGHUP: files of keys are read again by every worker, while requests go on."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import until

OLD, NEW, ADMIN = "old-key-of-this-service", "new-key-of-this-service", "admin-key-of-this-service"
ENOUGH = 12
"""Requests that all workers have a share in."""


def statuses(url: str, key: str) -> set[int]:
    """Of many requests, on a connection each."""
    releases = set()
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=10)) as connection:
        for _ in range(ENOUGH):
            connection.request("GET", "/v1/release", headers={"Authorization": f"Bearer {key}", "Connection": "close"})
            with connection.getresponse() as response:
                releases.add(response.status)
                response.read()
    return releases


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_keys_change_without_a_restart(tmp_path: Path, workers: int) -> None:
    publish_bundle(make_bundle(labels=60), tmp_path)
    keys, admins, log = (tmp_path / name for name in ("keys", "admins", "log"))
    keys.write_text(f"{OLD}\n")
    admins.write_text(f"{ADMIN}\n")
    with server(
        tmp_path / "releases", log, api_keys_file=keys, admin_keys_file=admins, workers=workers,
        state=tmp_path / "state", drain_seconds=0,
    ) as process:  # fmt: skip

        def hang_up(content: str) -> None:
            keys.write_text(content)
            process.process.send_signal(signal.SIGHUP)

        until(lambda: "listening on" in log.read_text(), "a first line")
        for _ in range(20):  # while it starts it ends nothing
            process.process.send_signal(signal.SIGHUP)
        process.wait_until_ready()
        assert "ended with" not in log.read_text()
        assert (statuses(process.url, OLD), statuses(process.url, NEW)) == ({200}, {401})
        hang_up(f"{OLD}\n{NEW}\n")
        until(lambda: log.read_text().count("2 may ask") >= workers, "the new key to be known to every worker")
        assert statuses(process.url, NEW) == {200}
        assert statuses(process.url, OLD) == {200}
        before = log.read_text().count("1 may ask")
        hang_up(f"{NEW}\n")
        until(lambda: log.read_text().count("1 may ask") >= before + workers, "the old key to be forgotten")
        assert statuses(process.url, OLD) == {401}
        hang_up("short")
        until(lambda: "refused, those of before hold" in log.read_text())
        assert (statuses(process.url, NEW), statuses(process.url, OLD)) == ({200}, {401})
        assert process.terminate() == 0
        messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
        assert "keys were read again: 1 may ask, 1 may change things" in messages
        assert not any(OLD in line or NEW in line for line in messages)
