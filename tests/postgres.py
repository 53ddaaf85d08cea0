"""A real PostgreSQL in a temporary folder, of an unprivileged user, on a port of loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from tests.serving.process import children, free_port


def _programs() -> Path | None:
    """The folder of `initdb` and `postgres`; Debian has it outside of PATH."""
    folders = [Path(program).resolve().parent for name in ("initdb", "postgres") if (program := shutil.which(name))]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


PROGRAMS = _programs()


class PostgresServer:
    """Started, killed and started again over the same files."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAMS is not None
        self.port = free_port()
        self._data = folder / "data"
        self._log = (folder / "log").open("wb")
        # PostgreSQL refuses to be root's.
        root = os.getuid() == 0
        users = {user.pw_name for user in pwd.getpwall()}
        self._user = ("postgres" if "postgres" in users else "nobody") if root else None
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._run("initdb", "--auth=trust", "--username=longtail", "--encoding=UTF8", "--no-instructions").wait()
        self._process = self._start()

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        assert PROGRAMS is not None
        command = [str(PROGRAMS / program), "-D", str(self._data), *arguments]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd="/", user=self._user)

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": ""}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + 60
        process = self._run("postgres", *arguments)
        while time.monotonic() < deadline:
            if process.poll() is not None:  # what was killed has not let go of everything yet
                process = self._run("postgres", *arguments)
            with suppress(psycopg.OperationalError), psycopg.connect(self.url(schema=None), connect_timeout=2):
                return process
            time.sleep(0.05)
        process.kill()
        process.wait()
        raise TimeoutError(f"expected PostgreSQL to answer within 60 s: {self._log.name}")

    def url(self, schema: str | None = "") -> str:
        """Of a schema that nothing else has, unless it is named; None: of none."""
        url = f"postgresql://longtail@127.0.0.1:{self.port}/postgres"
        return url if schema is None else f"{url}?schema={schema or f't_{uuid4().hex[:12]}'}"

    @property
    def processes(self) -> list[int]:
        """Ids of all of its processes."""
        return [self._process.pid, *children(self._process.pid)]

    def kill(self) -> None:
        """SIGKILL to every process."""
        os.kill(self._process.pid, signal.SIGSTOP)
        for pid in [*children(self._process.pid), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP to every process: connections stay, and nothing answers."""
        for pid in self.processes:
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT after `pause`."""
        for pid in [*children(self._process.pid), self._process.pid]:
            os.kill(pid, signal.SIGCONT)

    def start(self) -> None:
        """Again, after `kill`."""
        self._process = self._start()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._log.close()


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """A server; the test is skipped where there is no PostgreSQL."""
    if PROGRAMS is None:
        pytest.skip("PostgreSQL: expected initdb and postgres, as of Debian's package postgresql, found neither")
    with tempfile.TemporaryDirectory(prefix="longtail-postgres-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder))
        try:
            yield server
        finally:
            server.close()


@pytest.fixture(scope="session")
def database_server() -> Iterator[PostgresServer]:
    """One of the whole run of this process; tests have schemas of their own."""
    with postgres() as server:
        yield server
