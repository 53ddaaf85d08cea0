"""CPU time of an answer with and without its answer_id, and of an event of feedback, of one worker.

    python -m benchmarks.feedback_cost RELEASES [--before OTHER/.venv/bin/python] [--seconds 3] [--rounds 7]

All kinds of requests are sent in turns to one service; with --before the events of another checkout, too.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.request import Request, urlopen

import typer

from benchmarks.paired_rate import Served, example_requests, load, measure, request, served

_ANSWERS, _TYPES = 200, 500
"""Numbers of answers and of event types; each pair is one distinct event."""


def main(
    releases: Path,
    before: Annotated[str | None, typer.Option(help="Python of the other checkout's environment.")] = None,
    connections: int = 16,
    k: int = 20,
    seconds: float = 3,
    rounds: int = 7,
) -> None:
    """Measure in turns; medians of CPU microseconds."""
    pythons = {"": sys.executable} | ({"before: ": before} if before else {})
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        kinds: dict[str, tuple[Served, Sequence[bytes], int]] = {}
        for name, python in pythons.items():
            (state := Path(scratch, name.strip(": ") or "after")).mkdir()
            service = stack.enter_context(served(python, releases, state))
            answers, bare = (example_requests(service.port, k, **of) for of in ({}, {"answer_ids": False}))
            kinds[f"{name}an answer"] = service, answers, 1
            if not name:
                kinds["an answer without answer_id"] = service, bare, 1
            for events in (1, 10, 100):
                kinds[f"{name}an event, {events} a request"] = service, _feedback(service.port, k, events), events
        for kind, (service, requests, _) in kinds.items():
            if "answer" in kind:
                load([service.port], requests, connections, 1)
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        # Answers first: after events a thread writes Parquet files.
        groups = [[kind for kind in kinds if ("answer" in kind) == answers] for answers in (True, False)]
        for kind in (kind for group in groups for _ in range(rounds) for kind in group):
            service, requests, events = kinds[kind]
            rate = measure(service, requests, connections, seconds)
            if rate.refused:
                sys.exit(f"{kind}: expected every answer to be 200, found {rate.refused} others")
            found[kind].append(rate.cpu_us / events)
    print(f"{releases}, k = {k}, {connections} connections, {rounds} rounds of {seconds:g} s each, CPU µs, medians")
    for kind, costs in found.items():
        print(f"{kind:34}{statistics.median(costs):9.0f}")
    pairs = zip(found["an answer"], found["an answer without answer_id"], strict=True)
    print(f"with / without answer_id: {statistics.median(one / bare for one, bare in pairs):.3f}")


def _feedback(port: int, k: int, events: int) -> list[bytes]:
    """Make requests of feedback on answers that the service gives."""
    with urlopen(f"http://127.0.0.1:{port}/v1/release") as answer:
        features = json.load(answer)["example"]
    content = json.dumps({"queries": [{"features": features, "k": k}]}).encode()
    asked = Request(f"http://127.0.0.1:{port}/v1/retrieve", content, {"Content-Type": "application/json"})
    found: list[dict[str, Any]] = []
    for _ in range(_ANSWERS):
        with urlopen(asked) as answer:
            body = json.load(answer)
        (result,) = body["results"]
        named = {"answer_id": result.get("answer_id") or body["answer_id"]}
        found.append(named | {"labels": [result["labels"][len(found) % k]["id"]]})
    distinct = [{**of, "event": f"type-{number}"} for number in range(_TYPES) for of in found]
    groups = [distinct[start : start + events] for start in range(0, len(distinct), events)]
    return [request(json.dumps({"events": group}).encode(), "/v1/feedback") for group in groups]


if __name__ == "__main__":
    typer.run(main)
