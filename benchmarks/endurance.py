"""What the service keeps and loses when it is killed, swapped and stopped under load, over minutes.

    python -m benchmarks.endurance feedback [--seconds 600]
    python -m benchmarks.endurance mixed [--seconds 300]
    python -m benchmarks.endurance stops [--stops 10] [--burners 2]

Two workers of the real service on loopback, loaded from threads of this process. `feedback` sends at full rate while
a worker dies by SIGKILL every 15 s and the whole service every 60 s; then it exports, and holds the export against
what was acknowledged. `mixed` retrieves, sends feedback, patches and swaps releases, and prints memory. `stops` sends
SIGTERM under twelve kept connections while other processes take every core. Each fails where something was lost.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb
import typer

from longtail.index import IndexSpec, Releases, build
from longtail.serving.export import export
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.gateway import Gateway
from tests.end_to_end.killing import Service, serving
from tests.serving.process import free_port, until

_WORKER_KILL_SECONDS, _SERVICE_KILL_SECONDS = 15, 60
_EVENTS_A_REQUEST = 10
_K, _QUERIES = 50, 20
_PATCHED = 2_000
_KEPT = [0.0] * 6 + [0.01] * 4 + [0.05] * 2
"""Mean pauses of twelve kept connections, in seconds."""
_QUERY = {"features": {"user_id": "u1", "history": ["item-1", "item-2"]}, "k": _K}
app = typer.Typer(help="Load the service for minutes, and count what is lost.")


class Sender:
    """A client with one connection, which sends a request again until it is answered."""

    def __init__(self, url: str, name: str) -> None:
        self._host, self._name = urlsplit(url).netloc, name
        self._connection = HTTPConnection(self._host, timeout=20)
        self._choices: list[tuple[str, str]] = []
        self.events = self.repeated = self.requests = 0

    def send(self, method: str, path: str, body: object) -> dict[str, Any]:
        """Return the answer with status 200; repeat after any other outcome."""
        content = json.dumps(body)
        while True:
            with suppress(HTTPException, OSError):
                self._connection.request(method, path, content, {"Content-Type": "application/json"})
                response = self._connection.getresponse()
                answer = response.read()
                self.requests += 1
                if response.status == 200:
                    return dict(json.loads(answer))
                assert response.status in (429, 503), f"{response.status}: {answer!r}"
            self._connection.close()
            self.repeated += 1
            time.sleep(0.02)

    def choose(self) -> None:
        """Send feedback on labels of answers, each chosen once; the events have numbers as keys."""
        if len(self._choices) < _EVENTS_A_REQUEST:
            results = self.send("POST", "/v1/retrieve", {"queries": [_QUERY] * _QUERIES})["results"]
            self._choices = [(result["answer_id"], label["id"]) for result in results for label in result["labels"]]
        events = [
            {
                "answer_id": answer_id, "labels": [id_], "features": _QUERY["features"],
                "idempotency_key": f"{self._name}-{self.events + number}",
            }
            for number, (answer_id, id_) in enumerate(self._choices[:_EVENTS_A_REQUEST])
        ]  # fmt: skip
        self.send("POST", "/v1/feedback", {"events": events})
        self.events += len(events)
        self._choices = self._choices[_EVENTS_A_REQUEST:]


@contextmanager
def repeating(*actions: Callable[[], object]) -> Iterator[None]:
    """Run each action in a thread, again and again."""
    stop = threading.Event()

    def repeat(action: Callable[[], object]) -> None:
        while not stop.is_set():
            action()

    with ThreadPoolExecutor(len(actions)) as pool:
        running = [pool.submit(repeat, action) for action in actions]
        try:
            yield
        finally:
            stop.set()
    for future in running:
        future.result()


def releases_in(folder: Path) -> Releases:
    """Write two releases, and publish the first."""
    make_bundle(labels=5_000, dim=32, label_tower=True).write(folder / "bundle")
    for name in ("a", "b"):
        build(folder / "bundle", folder / "releases", spec=IndexSpec("flat"), name=name)
    releases = Releases(folder / "releases")
    releases.publish("a")
    return releases


@app.command()
def feedback(seconds: float = 600, clients: int = 8, port: int = 0) -> None:
    """Send feedback at full rate under SIGKILL, and hold the export against what was acknowledged."""
    rng, kills = random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        releases = releases_in(folder)
        settings = Settings(releases=releases.root, port=port or free_port(), workers=2)
        url = f"http://127.0.0.1:{settings.port}"
        senders = [Sender(url, str(client)) for client in range(clients)]
        began = time.monotonic()
        with ExitStack() as stack:
            with repeating(*(sender.choose for sender in senders)):
                while (elapsed := time.monotonic() - began) < seconds:
                    with serving(settings, folder / "log") as service:
                        service.wait_until_ready()
                        end = time.monotonic() + min(_SERVICE_KILL_SECONDS, seconds - elapsed)
                        _kill_workers(service, end, rng, kills)
                        service.kill()
                        kills["services"] += 1
                service = stack.enter_context(serving(settings, folder / "log"))
                service.wait_until_ready()
            wall_seconds = time.monotonic() - began
            assert service.terminate() == 0
        events = folder / "releases/.state/events"
        print(*export(releases.root, events, folder / "out.parquet", window=(0, time.time() + 1)), sep="\n")
        acknowledged = sum(sender.events for sender in senders)
        raw, keys_in_events, rows, keys = duckdb.execute(
            "SELECT * FROM (SELECT count(*), count(DISTINCT idempotency_key) FROM read_parquet(?)), "
            "(SELECT count(*), count(DISTINCT idempotency_key) FROM read_parquet(?))",
            [str(events / "*.parquet"), str(folder / "out.parquet")],
        ).fetchone() or (0, 0, 0, 0)
        size = sum(path.stat().st_size for path in events.glob("*.parquet"))
    print(f"{wall_seconds:.0f} s, {clients} connections, {_EVENTS_A_REQUEST} events a request; killed: {dict(kills)}")
    print(
        f"{acknowledged:,} events acknowledged, {acknowledged / wall_seconds:,.0f} a second, with the pauses of kills"
    )
    print(f"requests sent again: {sum(sender.repeated for sender in senders):,}")
    twice = raw - keys_in_events
    print(f"kept: {keys_in_events:,} events, {twice:,} of them twice in the folder, {size / raw:.1f} bytes each")
    print(f"exported: {rows:,} rows of {keys:,} events; lost {acknowledged - keys:,}, twice {rows - keys:,}")
    assert acknowledged == keys == rows


def _kill_workers(service: Service, end: float, rng: random.Random, kills: Counter[str]) -> None:
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _WORKER_KILL_SECONDS))
        if time.monotonic() < end and service.workers:
            service.kill_worker(rng)
            kills["workers"] += 1


@app.command()
def mixed(seconds: float = 300, port: int = 0) -> None:
    """Retrieve, send feedback, patch and swap, and print the memory of the processes by minute."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        releases = releases_in(folder)
        settings = Settings(releases=releases.root, port=port or free_port(), workers=2)
        url = f"http://127.0.0.1:{settings.port}"
        retrieving, choosing, patching = (
            [Sender(url, f"{role}-{client}") for client in range(clients)]
            for role, clients in (("retrieve", 4), ("choose", 2), ("patch", 1))
        )
        rng, swaps, patches = random.Random(0), 0, 0

        def patch() -> None:
            nonlocal patches
            ids = rng.sample(range(_PATCHED), 10)
            labels = [{"id": f"item-{row}", "display": {"title": f"{row}, {patches}"}} for row in ids]
            patching[0].send("PATCH", "/v1/labels", {"labels": labels})
            patches += len(labels)
            time.sleep(0.1)

        def retrieve(sender: Sender) -> Callable[[], object]:
            return lambda: sender.send("POST", "/v1/retrieve", {"queries": [_QUERY] * rng.choice([1, 1, 4])})

        def swap() -> None:
            nonlocal swaps
            swaps += 1
            releases.publish("ab"[swaps % 2])
            time.sleep(5)

        with serving(settings, folder / "log") as service:
            service.wait_until_ready()
            began = time.monotonic()
            actions = [*map(retrieve, retrieving), *(sender.choose for sender in choosing), patch, swap]
            with repeating(*actions):
                for minute in range(int(seconds // 60) + 1):
                    time.sleep(max(0.0, began + 60 * minute - time.monotonic()))
                    memory = ", ".join(map(_memory, service.workers))
                    print(f"{minute} min: workers {memory} MB; {swaps} swaps, {patches:,} patches", flush=True)
            for name, group in (("retrieved", retrieving), ("fed back", choosing)):
                requests, repeated = (sum(getattr(sender, of) for sender in group) for of in ("requests", "repeated"))
                print(f"{name}: {requests:,} requests, {requests / seconds:,.0f} a second, {repeated:,} sent again")
            assert service.terminate() == 0


def _memory(pid: int) -> str:
    """Return resident MB of a process, and of these the anonymous ones."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss, anonymous = (int(fields[name].split()[0]) / 1000 for name in ("VmRSS", "RssAnon"))
    return f"{rss:.0f} ({anonymous:.0f} anonymous)"


@app.command()
def stops(stops: int = 10, burners: int = 2, port: int = 0) -> None:
    """Stop the service under load with every core taken, and count what became of requests and new connections."""
    answered, lost, fresh, seconds = Counter[str](), list[str](), Counter[str](), list[float]()
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burners)]
    try:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            releases = releases_in(folder)
            for _ in range(stops):
                settings = Settings(releases=releases.root, port=port or free_port(), workers=2, drain_seconds=1)
                with serving(settings, folder / "log") as service:
                    gateway = Gateway(service.url)
                    with gateway.sending(_KEPT, fresh=2):
                        service.wait_until_ready()
                        gateway.up.set()
                        until(lambda gateway=gateway: gateway.answered["200"] >= 500, "500 answers", 60)  # type: ignore[misc]
                        began = time.monotonic()
                        service.process.terminate()
                        while service.process.is_alive():
                            fresh[_new_connection(service.url)] += 1
                            time.sleep(0.005)
                        service.process.join()
                        assert service.process.exitcode == 0
                        seconds.append(time.monotonic() - began)
                answered += gateway.answered
                lost += [
                    f"{float(line.rsplit(' ', 1)[1]) - began:.3f} s after the signal: {line}" for line in gateway.lost
                ]
    finally:
        for burner in burning:
            burner.send_signal(signal.SIGKILL)
            burner.wait()
    print(f"{stops} stops with {burners} busy processes, {min(seconds):.1f} to {max(seconds):.1f} s: {dict(answered)}")
    print(f"lost on connections of the gateway: {len(lost)}", *lost, sep="\n")
    print(f"connections made after the signal, and what became of them: {dict(fresh)}")
    assert not lost


def _new_connection(url: str) -> str:
    """Ask on a new connection, and return what became of it."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.connect()
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return f"{type(error).__name__} while connecting"
    try:
        connection.request("GET", "/livez")
        return f"answered {connection.getresponse().status}"
    except (HTTPException, OSError) as error:
        return f"accepted, then {type(error).__name__}"
    finally:
        connection.close()


if __name__ == "__main__":
    app()
