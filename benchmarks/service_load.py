"""The service under load, beside what it is made of: how much of the possible rate one worker reaches.

    python -m benchmarks.service_load [--labels 1000000] [--k 20] [--connections 32] [--seconds 8]

In one run, on data of benchmarks.index_recall: a bare FastAPI echo of the same bodies and the service, each one
process, loaded by wrk (which must be installed) from another; and the raw work of ONNX Runtime and of FAISS, one
query after the other on one thread of this process. "In sequence" is the rate that the three costs, one after the
other, would allow. Then, at 70 % of the service's rate with random arrivals, how far p99 lies from p50.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import faiss
import numpy as np
import typer

from benchmarks import echo
from benchmarks.index_recall import synthetic_bundle
from longtail.bundle import Tower
from longtail.index import IndexSpec, build, open_releases
from tests.serving.process import server

_SCRIPT = """
local bodies, turn = {}, 0
local think = tonumber(os.getenv("THINK_MS"))
init = function()
  for line in io.lines(os.getenv("BODIES")) do
    bodies[#bodies + 1] = wrk.format("POST", nil, {["Content-Type"] = "application/json"}, line)
  end
  math.randomseed(1)
end
request = function()
  turn = turn % #bodies + 1
  return bodies[turn]
end
if think > 0 then
  delay = function() return math.floor(0.5 - math.log(1 - math.random()) * think) end
end
done = function(summary, latency)
  io.write(string.format("FIGURES %d %d %d %d %d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), summary.errors.status))
end
"""
_FIGURES = re.compile(r"FIGURES (\d+) (\d+) (\d+) (\d+) (\d+)")
_BODIES = 500
_USERS = 20
_HISTORY = 10
_CACHE = Path(tempfile.gettempdir()) / "longtail"


@dataclass(frozen=True)
class Load:
    """What wrk saw: requests per second, milliseconds, and the share that was not answered with 200."""

    rate: float
    p50: float
    p99: float
    refused: float


def main(
    labels: int = 1_000_000,
    k: int = 20,
    connections: Annotated[int, typer.Option(help="Requests under way at once.")] = 32,
    seconds: Annotated[int, typer.Option(help="Length of each measurement.")] = 8,
    dir: Annotated[Path, typer.Option(help="Where the release is kept.")] = _CACHE,
) -> None:
    """Measure echo, raw work and service; then the service at 70 % load."""
    if shutil.which("wrk") is None:
        sys.exit("expected wrk on the PATH; it is a package of every Linux distribution")
    releases = clustered_release(dir, labels)
    print(f"{labels:,} labels, d = 64, k = {k}, {connections} connections, one worker")
    onnx, search = _raw(releases, labels, k)
    print(f"{'':44}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}")
    print(f"{'ONNX Runtime alone, one query a call':44}{1 / onnx:11,.0f}")
    print(f"{'FAISS alone, one query a call':44}{1 / search:11,.0f}")
    with (
        server(releases, dir / "load.log", drain_seconds=0) as process,
        echo.running() as (echo_port, _),
    ):
        process.wait_until_ready(120)
        retrieve = f"{process.url}/v1/retrieve"
        bodies = {name: _write_bodies(dir, name, labels, k) for name in _FILTERS}
        _wrk(retrieve, bodies["none"], connections, 2)
        echoed = _show(
            "FastAPI echo", _wrk(f"http://127.0.0.1:{echo_port}{echo.PATH}", bodies["none"], connections, seconds)
        )
        served = {
            name: _show(f"service, filter: {name}", _wrk(retrieve, path, connections, seconds))
            for name, path in bodies.items()
        }
        rate = served["none"].rate
        in_sequence = 1 / (1 / echoed.rate + onnx + search)
        print(f"  in sequence: {in_sequence:,.0f}/s; service / in sequence: {rate / in_sequence:.2f}")
        clients = 4 * connections
        think_ms = clients * 1e3 / (0.7 * rate) - served["none"].p50 / 2
        partly = _show("service at 70 % load", _wrk(retrieve, bodies["none"], clients, seconds, think_ms=think_ms))
        print(f"  {partly.rate / rate:.0%} of its rate; p99 / p50: {partly.p99 / partly.p50:.1f}")


def clustered_release(directory: Path, labels: int) -> Path:
    """Releases whose CURRENT is an `auto` index over clustered labels; built below `directory` unless it is there."""
    root = directory / f"clustered-{labels}"
    if open_releases(root / "releases").current() is None:
        synthetic_bundle(labels).write(root / "bundle")
        build(root / "bundle", root / "releases", spec=IndexSpec("auto"), name="clustered")
        open_releases(root / "releases").publish("clustered")
    return root / "releases"


def _query(rng: np.random.Generator, labels: int, k: int) -> dict[str, Any]:
    history = [f"item-{row}" for row in rng.integers(labels, size=_HISTORY)]
    features = {"user_id": f"u{rng.integers(_USERS)}", "history": history}
    return {"features": features, "k": k, "bias_removal": round(float(rng.uniform(0, 1)), 3)}


_FILTERS: dict[str, Callable[[np.random.Generator, int], dict[str, Any]]] = {
    "none": lambda _rng, _labels: {},
    "exclude 10": lambda rng, labels: {"exclude": [f"item-{row}" for row in rng.integers(labels, size=10)]},
    "exclude 1,000": lambda rng, labels: {"exclude": [f"item-{row}" for row in rng.integers(labels, size=1000)]},
    "buckets torso and tail": lambda _rng, _labels: {"buckets": ["torso", "tail"]},
    "allow 1,000": lambda rng, labels: {"allow": [f"item-{row}" for row in rng.integers(labels, size=1000)]},
}


def _write_bodies(directory: Path, name: str, labels: int, k: int) -> Path:
    rng = np.random.default_rng(0)
    path = directory / f"bodies-{name.replace(' ', '-')}.txt"
    with path.open("w") as file:
        for _ in range(_BODIES):
            query = _query(rng, labels, k) | _FILTERS[name](rng, labels)
            file.write(json.dumps({"queries": [query]}, separators=(",", ":")) + "\n")
    return path


def _raw(releases: Path, labels: int, k: int) -> tuple[float, float]:
    """Seconds a query of the tower and the FAISS index: the work that no service can save."""
    name = open_releases(releases).current() or ""
    release = open_releases(releases).open(name)
    bundle, searcher = release.bundle, release.searcher
    encoder = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, bundle.manifest.dim)
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    inputs = [encoder.read([_query(rng, labels, k)["features"]]) for _ in range(_BODIES)]
    onnx = _seconds(lambda turn: encoder.embed(inputs[turn]))
    queries = [bundle.augmentation.queries(encoder.embed(batch), 0.5) for batch in inputs]
    params = faiss.SearchParametersIVF(nprobe=searcher.params.nprobe)
    index = searcher.index
    params = params if index.kind == "ivf_flat" else None
    search = _seconds(lambda turn: index.index.search(queries[turn], k, params=params))
    return onnx, search


def _seconds(work: Callable[[int], object]) -> float:
    """Mean seconds of one turn, over several thousand."""
    for turn in range(_BODIES):
        work(turn)
    started = time.perf_counter()
    for turn in range(4 * _BODIES):
        work(turn % _BODIES)
    return (time.perf_counter() - started) / (4 * _BODIES)


def _wrk(url: str, bodies: Path, connections: int, seconds: int, *, think_ms: float = 0) -> Load:
    """Load a URL from another process, each connection with one request after the other."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_SCRIPT)
        script.flush()
        output = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", script.name, url],
            env=os.environ | {"BODIES": str(bodies), "THINK_MS": str(think_ms)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    figures = _FIGURES.search(output)
    if figures is None:
        raise RuntimeError(f"expected wrk to print its figures, found {output!r}")
    requests, duration, p50, p99, refused = map(int, figures.groups())
    return Load(requests / duration * 1e6, p50 / 1e3, p99 / 1e3, refused / max(1, requests))


def _show(name: str, load: Load) -> Load:
    print(f"{name:44}{load.rate:11,.0f}{load.p50:9.2f}{load.p99:9.2f}", flush=True)
    return load


if __name__ == "__main__":
    typer.run(main)
