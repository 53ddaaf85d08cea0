"""What a request costs one replica, two and three: SQLite beside PostgreSQL, on this machine.

    python -m benchmarks.replica_cost [--labels 100000] [--k 20] [--seconds 8] [--rounds 3]

Clustered labels of benchmarks.service_load, `auto`, answers kept. Replicas are processes of one worker on ports of
their own, which a client on keep-alive connections loads in turns; all of them, the client and the database share the
cores, so what counts is CPU: microseconds a request of the replicas together, and of PostgreSQL's processes. In the
second half of the table every tenth request is feedback on an answer of any replica.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import typer

from benchmarks.paired_rate import cpu_seconds, example_requests, load, request
from benchmarks.service_load import clustered_release
from tests.postgres import PostgresServer, postgres
from tests.serving.process import ServerProcess, server

_CONNECTIONS = 12
_EVENTS = 500


@contextmanager
def _replicas(
    releases: Path, folder: Path, number: int, database: PostgresServer | None
) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        url = None if database is None else database.url()
        found = []
        for replica in range(number):
            own = folder / f"{'sqlite' if url is None else 'postgres'}-{number}-{replica}"
            place = {"state": own} if url is None else {"state": url, "local_state": own}
            found.append(stack.enter_context(server(releases, folder / f"{own.name}.log", **place)))
            found[-1].wait_until_ready(60)
        yield found


def _events(replicas: Sequence[ServerProcess], query: bytes) -> list[bytes]:
    """Feedback on answers, each of another replica than the one before."""
    body = json.loads(query[query.index(b"\r\n\r\n") :])
    found = []
    for number in range(_EVENTS):
        said = httpx.post(f"{replicas[number % len(replicas)].url}/v1/retrieve", json=body).json()
        event = {"answer_id": said["answer_id"], "labels": [said["results"][0]["labels"][0]["id"]]}
        found.append(request(json.dumps({"events": [event]}).encode(), "/v1/feedback"))
    return found


def _row(
    replicas: Sequence[ServerProcess], database: PostgresServer | None, mixed: bool, k: int, seconds: float, rounds: int
) -> str:
    ports = [int(replica.url.rsplit(":", 1)[1]) for replica in replicas]
    (query,) = example_requests(ports[0], k)
    requests = [query]
    if mixed:
        requests = [each for event in _events(replicas, query) for each in (*[query] * 9, event)]
    load(ports, requests, _CONNECTIONS, 1.0)
    rates, own, theirs, refused = [], [], [], 0
    for _ in range(rounds):
        pids = [] if database is None else database.processes
        before = [sum(map(cpu_seconds, group)) for group in ([each.process.pid for each in replicas], pids)]
        done, took, wrong = load(ports, requests, _CONNECTIONS, seconds)
        after = [sum(map(cpu_seconds, group)) for group in ([each.process.pid for each in replicas], pids)]
        rates.append(done / took)
        refused += wrong
        own.append((after[0] - before[0]) / done * 1e6)
        theirs.append((after[1] - before[1]) / done * 1e6)
    figures = [f"{statistics.median(each):,.0f}" for each in (rates, own, theirs)]
    return " | ".join([*figures, str(refused)])


def main(labels: int = 100_000, k: int = 20, seconds: float = 8.0, rounds: int = 3) -> None:
    """Print a row for each number of replicas and engine."""
    print("| state | replicas | requests | requests/s | CPU µs a request | of PostgreSQL | not 200 |")
    print("|---|---:|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder, postgres() as database:
        releases = clustered_release(Path(folder), labels)
        for mixed in (False, True):
            for number, engine in ((1, None), (1, database), (2, database), (3, database)):
                with _replicas(releases, Path(tempfile.mkdtemp(dir=folder)), number, engine) as replicas:
                    what = "9 of 10 queries" if mixed else "queries"
                    name = "SQLite" if engine is None else "PostgreSQL"
                    print(
                        f"| {name} | {number} | {what} | {_row(replicas, engine, mixed, k, seconds, rounds)} |",
                        flush=True,
                    )


if __name__ == "__main__":
    typer.run(main)
