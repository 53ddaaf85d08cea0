"""What it costs replicas to have each other's figures, at a thousand requests a second each over a million labels.

    python -m benchmarks.figure_exchange [--labels 1000000] [--replicas 3] [--rate 1000] [--seconds 60]

Replicas of benchmarks.live_monitoring's traffic in one process, over one PostgreSQL on the same machine. CPU is of the
threads that tell and listen, and of PostgreSQL, which keeps no answers here; bytes are what the log of the database
grows by. How far behind others are is looked at once a second: queries counted of all against those answered.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psycopg
import typer

from benchmarks.live_monitoring import answered_batch, baseline_of, catalogue, thread_cpu
from benchmarks.paired_rate import cpu_seconds
from longtail.serving.monitoring import LiveFigures
from longtail.state import read_place
from tests.postgres import PostgresServer, postgres

_BATCH, _K, _DRAWN = 32, 20, 200


def main(labels: int = 1_000_000, replicas: int = 3, rate: int = 1000, seconds: float = 60.0) -> None:
    """Print one Markdown table."""
    with tempfile.TemporaryDirectory() as folder, postgres() as database:
        _measure(Path(folder), database, labels, replicas, rate, seconds)


def _measure(folder: Path, database: PostgresServer, labels: int, replicas: int, rate: int, seconds: float) -> None:
    rng, place = np.random.default_rng(0), read_place(database.url())
    counts_L, buckets_L = catalogue(rng, labels)
    drawn = [answered_batch(rng, counts_L, buckets_L, _BATCH, _K) for _ in range(_DRAWN)]
    lives = []
    for number in range(replicas):
        (folder / str(number)).mkdir()
        lives.append(LiveFigures(folder / str(number), kept=place, max_answers=0))
        lives[-1].begin_release("benchmark", buckets_L, baseline_of(rng, counts_L, buckets_L, _K))
    time.sleep(3)
    cpu, of_database, written = thread_cpu("figure-exchange"), _cpu(database), _written(database)
    began, reports, behind = time.time(), [], []
    asked, ended = 0, threading.Event()

    def ask() -> None:
        nonlocal asked
        while not ended.is_set():
            for live in lives:
                live.count_answers(drawn[asked // _BATCH % _DRAWN])
                asked += _BATCH
            ended.wait(max(0.0, began + asked / (rate * replicas) - time.time()))

    thread = threading.Thread(target=ask)
    thread.start()
    while time.time() < began + seconds:
        time.sleep(1.05)
        before = asked
        start = time.perf_counter()
        report = lives[0].report()
        reports.append(time.perf_counter() - start)
        behind.append((before - report["windows"]["1h"]["queries"]) / rate / replicas)
    ended.set()
    thread.join()
    took = time.time() - began
    own = (thread_cpu("figure-exchange") - cpu) / took / replicas
    held = sum(path.stat().st_size for path in (folder / "0").rglob("*") if path.is_file())
    columns = [
        ("telling and listening, share of a core, each replica", f"{own:.1%}"),
        ("PostgreSQL, share of a core", f"{(_cpu(database) - of_database) / took:.1%}"),
        ("its log grows by, a second", f"{(_written(database) - written) / took / 1e3:.0f} KB"),
        ("figures are behind by, median; most", f"{np.median(behind):.1f} s; {max(behind):.1f} s"),
        ("report(), median", f"{np.median(reports) * 1e3:.0f} ms"),
        ("files of a replica", f"{held / 1e6:.0f} MB"),
    ]
    print(f"| {replicas} replicas, {labels:,} labels, {rate} queries/s each for {took:.0f} s | |\n|---|---|")
    for name, figure in columns:
        print(f"| {name} | {figure} |")
    for live in lives:
        live.close()


def _cpu(database: PostgresServer) -> float:
    return sum(map(cpu_seconds, database.processes))


def _written(database: PostgresServer) -> int:
    with psycopg.connect(database.url(schema=None)) as connection:
        row = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')").fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    typer.run(main)
