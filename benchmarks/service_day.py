"""What single requests of every kind take of a large catalogue, the first time and then, and what memory they leave.

    python -m benchmarks.service_day [--labels 1000000] [--dim 64] [--spec ivf_flat] [--columns 2] [--dir DIR]

One worker of the real service, one client, one request at a time: milliseconds of the first and of the median of the
five after it, and the worker's own memory afterwards. Filters, lists and buckets are others each time where it says so.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.service_memory import bytes_of, twin_releases
from tests.serving.process import server

_KEPT = Path(tempfile.gettempdir()) / "longtail"
_KEY = "day-key-of-sixteen-letters"
_AGAIN = 5


def main(
    labels: int = 1_000_000,
    dim: int = 64,
    spec: str = "ivf_flat",
    columns: int = 2,
    dir: Annotated[Path, typer.Option(help="Where the release is kept.")] = _KEPT,
) -> None:
    """Build the release if it is not there, and ask it everything once and again."""
    releases = twin_releases(dir, labels=labels, dim=dim, columns=columns, spec=spec)
    shutil.rmtree(releases / ".state", ignore_errors=True)
    print(f"{labels:,} labels\n\n| request | first ms | then ms | private MB |\n|---|---:|---:|---:|")
    with server(releases, dir / "day.log", drain_seconds=0, admin_keys=_KEY) as process:
        process.wait_until_ready(300)
        headers = {"Authorization": f"Bearer {_KEY}"}
        with httpx.Client(base_url=process.url, headers=headers, timeout=100) as client:
            for what, ask in _requests(client, labels):
                seconds = [_seconds(ask) for _ in range(1 + _AGAIN)]
                first, then = seconds[0] * 1e3, statistics.median(seconds[1:]) * 1e3
                print(f"| {what} | {first:,.0f} | {then:,.0f} | {bytes_of(process)[0] / 1e6:,.0f} |", flush=True)
        process.terminate()


def _seconds(ask: Callable[[], httpx.Response]) -> float:
    started = time.perf_counter()
    ask().raise_for_status()
    return time.perf_counter() - started


def _requests(client: httpx.Client, labels: int) -> Iterator[tuple[str, Callable[[], httpx.Response]]]:
    """Kinds of requests, in words and as what sends one more of it."""
    turn = count(1)

    def retrieve(**options: Any) -> httpx.Response:
        features = {"user_id": "u1", "history": ["item-1", f"item-{next(turn)}"]}
        return client.post("/v1/retrieve", json={"queries": [{"features": features, "k": 20, **options}]})

    def spread(number: int) -> list[str]:
        step, start = labels // (2 * number), next(turn)
        return [f"item-{start + place * step}" for place in range(number)]

    yield "20 labels", retrieve
    yield "at λ = 1", lambda: retrieve(bias_removal=1.0)
    yield "1,000 others excluded", lambda: retrieve(exclude=spread(1000))
    yield "1,000 others allowed", lambda: retrieve(allow=spread(1000))
    yield "of the tail", lambda: retrieve(buckets=["tail"])
    yield "filtered by a price", lambda: retrieve(filter={"column_1": {"lt": 50}})
    yield "filtered by another price", lambda: retrieve(filter={"column_1": {"lt": 20 + next(turn) / 10}})
    yield "a label", lambda: client.get(f"/v1/labels/item-{next(turn)}")
    yield "a page of labels", lambda: client.get("/v1/labels", params={"limit": 100})
    yield "a page of those with a text", lambda: client.get("/v1/labels", params={"search": f"{next(turn)},"})
    yield "another label hidden", lambda: client.delete(f"/v1/labels/item-{labels // 2 + next(turn)}")
    yield "20 labels, some being hidden", retrieve
    yield "/v1/monitoring", lambda: client.get("/v1/monitoring")
    yield "/metrics", lambda: client.get("/metrics")


if __name__ == "__main__":
    typer.run(main)
