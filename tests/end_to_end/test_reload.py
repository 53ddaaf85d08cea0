"""SIGHUP: keys and settings are read again by every worker, while requests go on; wrong ones leave those of before."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest

from longtail.index import IndexSpec, Releases, build
from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.serving.process import ServerProcess, until

OLD, NEW, ADMIN = "old-key-of-this-service", "new-key-of-this-service", "admin-key-of-this-service"
QUERY = {"features": {"user_id": "u1"}}
ENOUGH = 12
"""Requests that all workers have a share in."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reload")
    make_bundle(labels=60).write(root / "bundle")
    build(root / "bundle", root / "releases", spec=IndexSpec("flat"), name="only")
    Releases(root / "releases").publish("only")
    return root / "releases"


@dataclass
class Reloaded:
    """A service whose keys and settings are in files."""

    process: ServerProcess
    root: Path

    @property
    def log(self) -> str:
        """Messages, one a line."""
        return "\n".join(json.loads(line)["message"] for line in (self.root / "log").read_text().splitlines())

    def hang_up(self, *, keys: str | None = None, settings: str | None = None) -> None:
        """Write the files, and have them read."""
        for name, text in (("keys", keys), ("settings.toml", settings)):
            if text is not None:
                (self.root / name).write_text(text)
        self.process.process.send_signal(signal.SIGHUP)

    def statuses(self, key: str, k: int = 5) -> set[int]:
        """Of many requests, on a connection each."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Connection": "close"}
        found = set()
        with closing(HTTPConnection(self.process.url.removeprefix("http://"), timeout=10)) as connection:
            for _ in range(ENOUGH):
                connection.request("POST", "/v1/retrieve", json.dumps({"queries": [QUERY | {"k": k}]}), headers)
                with connection.getresponse() as response:
                    found.add(response.status)
                    response.read()
        return found


@contextmanager
def reloading(releases: Path, root: Path, workers: int) -> Iterator[Reloaded]:
    (root / "keys").write_text(f"{OLD}\n")
    (root / "admins").write_text(f"{ADMIN}\n")
    (root / "settings.toml").write_text(f"max_k = 5\nworkers = {workers}\n")
    with server(
        releases,
        root / "log",
        api_keys_file=root / "keys",
        admin_keys_file=root / "admins",
        settings_file=root / "settings.toml",
        state=root / "state",
        drain_seconds=0,
    ) as process:
        process.wait_until_ready()
        yield Reloaded(process, root)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_keys_and_settings_change_without_a_restart(releases: Path, tmp_path: Path, workers: int) -> None:
    with reloading(releases, tmp_path, workers) as service:
        assert service.statuses(OLD) == {200}
        assert service.statuses(NEW) == {401}
        assert service.statuses(OLD, k=6) == {422}
        service.hang_up(keys=f"{OLD}\n{NEW}\n")
        until(lambda: service.statuses(NEW) == {200}, "the new key to be known")
        assert service.statuses(OLD) == {200}
        service.hang_up(keys=f"{NEW}\n", settings="max_k = 6\nworkers = 7\ndevice = 'gpu'\nmax_queries = 200\n")
        until(lambda: service.statuses(OLD) == {401}, "the old key to be forgotten")
        until(lambda: service.statuses(NEW, k=6) == {200}, "a larger k")
        assert "these settings have changed and wait for a restart: workers, device" in service.log
        assert "were read again: max_queries, max_k; 1 keys may ask, 1 may change things" in service.log
        assert OLD not in service.log
        assert NEW not in service.log
        assert service.process.terminate() == 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_wrong_files_leave_what_was_before(releases: Path, tmp_path: Path, workers: int) -> None:
    right = f"max_k = 5\nworkers = {workers}\n"
    with reloading(releases, tmp_path, workers) as service:
        for number, (keys, settings, said) in enumerate(
            [
                ("short", right, "api_keys: expected keys of at least 16 characters, received a shorter one"),
                (OLD, "max_k = 0", "max_k: Input should be greater than or equal to 1, received 0"),
                (OLD, "max_k = ", "settings.toml: expected TOML, found "),
                (OLD, "max_kk = 3", 'settings.toml: expected names of settings, such as max_k, found "max_kk"'),
                # Twice as many would fit a queue that the file makes longer, but that waits for a restart.
                (OLD, "max_queries = 600\nqueue_limit = 700", "expected queue_limit >= max_queries"),
            ],
            start=1,
        ):
            service.hang_up(keys=keys, settings=settings)
            until(lambda number=number: service.log.count("refused, those of before hold") == number)  # type: ignore[misc]
            assert said in service.log
        (tmp_path / "admins").write_text("")
        service.hang_up(keys="", settings=right)
        until(lambda: "expected at least one key, as before, found none" in service.log)
        (tmp_path / "keys").unlink()
        service.hang_up()
        until(lambda: "No such file" in service.log)
        assert service.statuses(OLD) == {200}
        assert service.statuses(NEW) == {401}
        assert service.statuses(OLD, k=6) == {422}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_hang_up_while_it_starts_ends_nothing(releases: Path, tmp_path: Path, workers: int) -> None:
    with server(releases, tmp_path / "log", workers=workers, state=tmp_path / "state") as process:
        until(lambda: "listening on" in (tmp_path / "log").read_text(), "a first line")
        for _ in range(20):
            process.process.send_signal(signal.SIGHUP)
        process.wait_until_ready()
        assert "ended with" not in (tmp_path / "log").read_text()
