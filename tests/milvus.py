"""A real Milvus server, the wheel `milvus`, in a temporary folder, on ports of loopback."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.serving.process import free_port

_PORTS = (
    "etcd", "root_coord", "proxy", "proxy_internal", "query_coord", "query_node", "index_coord", "index_node",
    "data_coord", "data_node",
)  # fmt: skip
_START_SECONDS, _ATTEMPTS = 120, 3
COLLECTIONS = ("milvus_flat", "milvus_ivf_flat")
"""Kinds of index that it holds."""


class RunningMilvus:
    """Started, killed and started again over the same files, on the same ports."""

    def __init__(self, folder: Path) -> None:
        milvus = pytest.importorskip(
            "milvus", reason="expected the wheel `milvus`, a server of Milvus for x86-64 Linux"
        )
        self._folder = folder
        # A quarter of a gigabyte, unpacked once for all.
        programs = Path(tempfile.gettempdir()) / f"longtail-milvus-{milvus.__version__}-{os.getuid()}"
        programs.mkdir(exist_ok=True)
        with (programs / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            milvus._initialize_data_files(str(programs))
        self._program = programs / "bin" / "milvus"
        for attempt in range(1, _ATTEMPTS + 1):
            ports = {f"{name}_port": free_port() for name in _PORTS}
            milvus.MilvusServerConfig(data_dir=str(folder), **ports).resolve()
            self.port, self._health = ports["proxy_port"], free_port()
            self._configure_etcd(ports["etcd_port"], free_port())
            # Somebody else may have taken a port by now.
            with suppress(*([ChildProcessError] if attempt < _ATTEMPTS else [])):
                self._process = self._start()
                break

    def _configure_etcd(self, port: int, peers: int) -> None:
        """Its port for peers, of which there are none, is the same for every server otherwise."""
        client, peer = (f"http://127.0.0.1:{number}" for number in (port, peers))
        names = {"client": ("listen-client-urls", "advertise-client-urls")}
        names["peer"] = ("listen-peer-urls", "initial-advertise-peer-urls")
        lines = [f"{name}: {url}" for kind, url in (("client", client), ("peer", peer)) for name in names[kind]]
        (self._folder / "etcd.yaml").write_text("\n".join([*lines, f"initial-cluster: default={peer}"]))

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses it."""
        return {"LONGTAIL_MILVUS": self.uri}

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Memory in RAM, its mapped files among it."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def disk_bytes(self) -> int:
        """Of all that it has written."""
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())

    def kill(self) -> None:
        """SIGKILL: what it has not written is gone."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def start(self) -> None:
        """Over the same files; returns when it says that it is well."""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "DEPLOY_MODE": "STANDALONE",
            "ETCD_CONFIG_PATH": str(self._folder / "etcd.yaml"),
            "METRICS_PORT": str(self._health),
            "MILVUS_RUN_DIR": str(self._folder / "run"),
            "LD_LIBRARY_PATH": f"{self._program.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        }
        log = (self._folder / "log").open("ab")
        process = subprocess.Popen(
            [str(self._program), "run", "standalone"], cwd=self._folder, env=environment, stdout=log, stderr=log
        )
        log.close()
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self._health}/healthz", timeout=5) as answer,
            ):
                if b"OK" in answer.read():
                    return process
            time.sleep(0.1)
        if process.poll() is not None:
            raise ChildProcessError(f"expected Milvus to start, found that it ended: {self._folder / 'log'}")
        process.kill()
        process.wait()
        raise TimeoutError(f"expected Milvus to be well within {_START_SECONDS} s: {self._folder / 'log'}")


@contextmanager
def running_milvus() -> Iterator[RunningMilvus]:
    """A server, with its address in the environment."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        server = RunningMilvus(Path(folder))
        for name, value in server.environment.items():
            patched.setenv(name, value)
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                server.kill()


@pytest.fixture(scope="module")
def milvus() -> Iterator[RunningMilvus]:
    """One for the tests of a module, for it computes while it waits, too."""
    with running_milvus() as server:
        yield server
