"""Two models in one process beside a process for each: CPU a request, requests a second, and memory.

    python -m benchmarks.several_models RELEASES FURTHER [--seconds 3] [--rounds 5]

All three services are up all the time and are loaded in turns by one process, as paired_rate does: only ratios mean
something on a machine that does other things as well. `both` is asked both models in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import typer

from benchmarks.paired_rate import Rate, Served, load, measure, request, served

_KIB = 1024


def private_mib(service: Served) -> float:
    """What the process has to itself, in MiB."""
    rollup = Path(f"/proc/{service.process.pid}/smaps_rollup").read_text()
    own = [line for line in rollup.splitlines() if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    return sum(int(line.split()[1]) for line in own) / _KIB


def requests_of(service: Served, base: str, k: int) -> list[bytes]:
    """A request of a model's own example, at its path."""
    with urlopen(f"http://127.0.0.1:{service.port}{base}/release") as answer:
        features = json.load(answer)["example"]
    return [request(json.dumps({"queries": [{"features": features, "k": k}]}).encode(), f"{base}/retrieve")]


def main(
    releases: Path, further: Path, connections: int = 16, k: int = 10, seconds: float = 3, rounds: int = 5
) -> None:
    """Load in turns: each model alone in its process, then each in the shared one, then both in it; medians."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        services = {}
        for name, root, models in (
            ("first", releases, ""), ("further", further, ""), ("shared", releases, f"further={further.absolute()}"),
        ):  # fmt: skip
            (state := Path(scratch, name)).mkdir()
            services[name] = stack.enter_context(served(sys.executable, root, state, models=models))
        first, other, shared = services.values()
        of_first, of_further = requests_of(shared, "/v1", k), requests_of(shared, "/v1/models/further", k)
        loads = {
            "first, alone": (first, of_first),
            "first, shared": (shared, of_first),
            "further, alone": (other, requests_of(other, "/v1", k)),
            "further, shared": (shared, of_further),
            "both, shared": (shared, of_first + of_further),
        }
        for service, requests in loads.values():
            load(service.port, requests, connections, 1)
        rates: dict[str, list[Rate]] = {name: [] for name in loads}
        for _ in range(rounds):
            for name, (service, requests) in loads.items():
                rates[name].append(measure(service, requests, connections, seconds))
        held = {name: private_mib(service) for name, service in services.items()}
    print(f"k = {k}, {connections} connections, {rounds} rounds of {seconds:g} s each, medians")
    print(f"{'':18}{'requests/s':>12}{'CPU µs':>9}{'not 200':>9}")
    for name, of in rates.items():
        rate, cpu = statistics.median(r.requests for r in of), statistics.median(r.cpu_us for r in of)
        print(f"{name:18}{rate:12,.0f}{cpu:9.0f}{sum(r.refused for r in of):9}")
    for name in ("first", "further"):
        pairs = zip(rates[f"{name}, alone"], rates[f"{name}, shared"], strict=True)
        ratios = sorted(shared.cpu_us / alone.cpu_us for alone, shared in pairs)
        print(
            f"{name}: CPU a request, shared / alone: {statistics.median(ratios):.2f} "
            f"(from {ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    print("private memory, MiB: " + ", ".join(f"{name} {size:.0f}" for name, size in held.items()))


if __name__ == "__main__":
    typer.run(main)
