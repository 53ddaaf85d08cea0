"""What the live per-bucket figures cost, at a thousand requests a second over a million labels.

    python -m benchmarks.live_monitoring [--labels 1000000] [--k 20] [--batch 32] [--rate 1000] [--seconds 20]

Feeds so many queries a second, of Zipf labels, in batches as micro-batching makes them, from one thread, for
`--seconds` of real time, and one event of feedback per ten queries; minutes pass sixty times as fast, so that the
rings turn over. Beside the cost of each call: what the background thread takes, what the process grows by (private
memory; the rings are mapped files), and how long one report takes.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer

from longtail.bundle.lookup import fingerprints
from longtail.serving.monitoring import AnsweredBatch, AnswerFeedback, Baseline, LiveFigures, measure_baseline

_DRAWN = 200


def main(labels: int = 1_000_000, k: int = 20, batch: int = 32, rate: int = 1000, seconds: float = 20.0) -> None:
    """Print one Markdown table."""
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder), labels, k, batch, rate, seconds)


def _measure(state: Path, labels: int, k: int, batch: int, rate: int, seconds: float) -> None:
    rng = np.random.default_rng(0)
    counts_L, buckets_L = catalogue(rng, labels)
    drawn = [answered_batch(rng, counts_L, buckets_L, batch, k) for _ in range(_DRAWN)]
    begun = time.time()
    live = LiveFigures(state, max_answers=1_000_000, clock=lambda: begun + 60 * (time.time() - begun))
    begin = _timed(lambda: live.begin_release("benchmark", buckets_L, baseline_of(rng, counts_L, buckets_L, k)), 1)
    live.count_answers(drawn[0])
    before, answered_seconds, events_seconds = _private_mb(), [], []
    waiting, cpu_before = _named(drawn), thread_cpu("live-figures")
    for number in range(int(seconds * rate / batch)):
        names, answered = next(waiting)
        start = time.perf_counter()
        live.count_answers(answered)
        answered_seconds.append(time.perf_counter() - start)
        if number % 4 == 0:
            events = [
                AnswerFeedback(name, 0, [f"item-{answered.rows_N[row * k]}"], [0])
                for row, name in enumerate(names[::3])
            ]
            start = time.perf_counter()
            live.record_feedback(events)
            events_seconds.append(time.perf_counter() - start)
        time.sleep(max(0.0, begun + (number + 1) * batch / rate - time.time()))
    cpu = (thread_cpu("live-figures") - cpu_before) / (time.time() - begun)
    grown = _private_mb() - before
    report = [_timed(live.report, 1) for _ in range(3) if time.sleep(0.02) is None]
    columns = [
        (f"count_answers(), {batch} × {k} labels, median", f"{np.median(answered_seconds) * 1e6:.0f} µs"),
        ("count_answers(), 99 %", f"{np.quantile(answered_seconds, 0.99) * 1e6:.0f} µs"),
        ("count_request()", f"{_timed(lambda: live.count_request(0.004, 200), 100_000) * 1e6:.2f} µs"),
        ("count_shed()", f"{_timed(live.count_shed, 100_000) * 1e6:.2f} µs"),
        (f"record_feedback() of {len(events)}, on the disk, median", f"{np.median(events_seconds) * 1e3:.1f} ms"),
        ("background thread, share of a core", f"{cpu:.1%}"),
        ("report(), median of 3", f"{np.median(report) * 1e3:.0f} ms"),
        ("begin_release()", f"{begin * 1e3:.0f} ms"),
        ("private memory grown while fed", f"{grown:.1f} MB"),
        ("files", f"{sum(path.stat().st_size for path in state.rglob('*') if path.is_file()) / 1e6:.0f} MB"),
    ]
    print(f"| {labels:,} labels, {rate} queries/s for {seconds:.0f} s | |\n|---|---|")
    for name, figure in columns:
        print(f"| {name} | {figure} |")
    live.close()


def catalogue(rng: np.random.Generator, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Training pairs and bucket of every label, int64 and int8 [L]."""
    counts_L = np.sort(rng.zipf(1.3, labels).clip(max=10**6))[::-1].astype(np.int64)
    return counts_L, np.repeat(np.arange(3, dtype=np.int8), [labels // 3, labels // 3, labels - 2 * (labels // 3)])


def answered_batch(
    rng: np.random.Generator, counts_L: np.ndarray, buckets_L: np.ndarray, batch: int, k: int
) -> AnsweredBatch:
    """So many queries and k labels of each, by a power law."""
    rows = (rng.zipf(1.2, batch * k) % len(counts_L)).astype(np.int64)
    return AnsweredBatch(
        release="benchmark",
        answer_ids=[""] * batch,
        places=[0] * batch,
        bias_removal_B=np.full(batch, 0.5, np.float32),
        popularity_B=np.zeros(batch, np.float32),
        fingerprints_N=fingerprints(f"item-{row}" for row in rows),
        rows_N=rows,
        scores_N=rng.normal(size=len(rows)).astype(np.float32),
        ends_B=list(range(k, batch * k + 1, k)),
        buckets_N=buckets_L[rows],
        counts_N=counts_L[rows],
    )


def _named(drawn: list[AnsweredBatch]) -> Iterator[tuple[list[str], AnsweredBatch]]:
    """The drawn batches over and over, each under answer ids of its own."""
    number = 0
    while True:
        for answered in drawn:
            names = [f"{number:08x}-{place:04x}" for place in range(len(answered.places))]
            number += 1
            yield (
                names,
                replace(answered, answer_ids=names),
            )


def baseline_of(rng: np.random.Generator, counts_L: np.ndarray, buckets_L: np.ndarray, k: int) -> Baseline | None:
    """Of five hundred such queries."""
    rows = rng.zipf(1.2, (500, k)) % len(counts_L)
    return measure_baseline(rng.normal(size=rows.shape).astype(np.float32), rows, buckets_L, counts_L, 0.5, k)


def _timed(work: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def _private_mb() -> float:
    """Resident memory that no file backs."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3


def thread_cpu(name: str) -> float:
    """CPU seconds of the threads of this name so far."""
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in threading.enumerate() if thread.name == name]
    return sum(map(time.clock_gettime, clocks))


if __name__ == "__main__":
    typer.run(main)
