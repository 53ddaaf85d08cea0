"""Several worker processes on one port: what they share, what adds up over them, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longtail.bundle import BUCKET_NAMES
from longtail.client import Client, NewLabel, NotFoundError
from tests.bundles import label_features, make_bundle
from tests.end_to_end.gateway import Gateway
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import ServerProcess, children, free_port, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks processes up in /proc")

LABELS, DIM = 20_000, 32
FEATURES = {"user_id": "u3", "history": ["item-1"]}
MAPPED = (".faiss", "/embeddings.npy")
ANSWERED = "longtail_requests_total route=/v1/retrieve status=2xx"


def find_workers(process: ServerProcess) -> list[int]:
    return sorted(id_ for id_, command in children(process.process.pid).items() if b"spawn_main" in command)


def gone(ids: list[int]) -> bool:
    """Whether no such process runs any more; one that nobody has waited for counts as gone."""
    for id_ in ids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{id_}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


@contextmanager
def connected(process: ServerProcess, worker: int) -> Iterator[tuple[Client, httpx.Client]]:
    """Two clients that share one connection, kept to one worker: the others cannot accept while it is made."""
    transport = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
    others = [other for other in find_workers(process) if other != worker]
    # A worker that is being started takes its connection only after its imports.
    http = httpx.Client(base_url=process.url, transport=transport, timeout=90)
    with Client(process.url, transport=transport) as longtail:
        for other in others:
            os.kill(other, signal.SIGSTOP)
        try:
            until(lambda: http.get("/readyz").status_code == 200, f"worker {worker} to be ready")
        finally:
            for other in others:
                os.kill(other, signal.SIGCONT)
        yield longtail, http


def samples(http: httpx.Client) -> dict[str, float]:
    """/metrics, by name and labels as Prometheus writes them."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = make_bundle(labels=LABELS, dim=DIM, label_tower=True)
    return publish_bundle(bundle, tmp_path_factory.mktemp("workers"), "first")


def several_workers(releases: Path, state: Path, workers: int = 2) -> Any:
    state.mkdir(exist_ok=True)
    return server(releases, state / "server.log", state=state, workers=workers, drain_seconds=0.1)


@pytest.fixture(scope="module")
def service(releases: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with several_workers(releases, tmp_path_factory.mktemp("state")) as process:
        process.wait_until_ready()
        assert len(find_workers(process)) == 2
        yield process
        process.terminate()


@pytest.fixture
def both(service: ServerProcess) -> Iterator[list[tuple[Client, httpx.Client]]]:
    """Clients of each of the two workers."""
    with ExitStack() as stack:
        yield [stack.enter_context(connected(service, worker)) for worker in find_workers(service)]


def test_figures_add_up_over_workers(service: ServerProcess, both: list[tuple[Client, httpx.Client]]) -> None:
    (first, http_one), (other, http_other) = both
    before, reported = samples(http_one), first.monitoring()["windows"]["1h"]["queries"]

    def once(_: int) -> int:
        with Client(service.url) as longtail:
            return len(longtail.retrieve(features=FEATURES, k=7).results[0].labels)

    for longtail, requests in ((first, 30), (other, 50)):
        assert {len(longtail.retrieve(features=FEATURES, k=7).results[0].labels) for _ in range(requests)} == {7}
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(once, range(60))) == {7}

    def more(http: httpx.Client, *names: str) -> float:
        after = samples(http)
        return sum(after[name] - before.get(name, 0) for name in names)

    for http in (http_one, http_other):
        # Each worker counts what it has answered twice a second, or when it is scraped itself.
        until(lambda http=http: more(http, "longtail_queries_total") == 140, "every query to be counted")  # type: ignore[misc]
        buckets = [f"longtail_exposures_total bucket={bucket} restricted=no" for bucket in BUCKET_NAMES]
        assert more(http, *buckets) == 7 * 140
        until(lambda http=http: more(http, ANSWERED) == 140, "every request to be counted")  # type: ignore[misc]
        assert more(http, "longtail_request_seconds_count route=/v1/retrieve") == 140
        assert more(http, "longtail_stage_seconds_count stage=queue") == 140
        after = samples(http)
        assert (after["longtail_ready"], after["longtail_release_info release=first"]) == (1, 1)
    for longtail in (first, other):
        until(
            lambda longtail=longtail: longtail.monitoring()["windows"]["1h"]["queries"] == reported + 140,  # type: ignore[misc]
            "the report to count what both answered",
        )
        exposures = longtail.monitoring()["windows"]["1h"]["exposures"]
        assert sum(bucket["count"] for bucket in exposures.values()) >= 7 * 140


def test_label_changes_reach_all_workers(
    both: list[tuple[Client, httpx.Client]],
) -> None:
    (first, _), (other, _) = both

    def answers(longtail: Client, id_: str) -> bool:
        return len(longtail.retrieve(features=FEATURES, allow=[id_]).results[0].labels) == 1

    first.add_labels(NewLabel("fresh", label_features(1), {"title": "Fresh"}))
    assert answers(first, "fresh")
    until(lambda: answers(other, "fresh"), "the other worker to answer with the label")
    assert other.label("fresh")["display"] == {"title": "Fresh"}
    other.delete_label("fresh")
    with pytest.raises(NotFoundError):
        other.label("fresh")
    until(lambda: not answers(first, "fresh"), "the label to be gone from the first worker's answers")
    first.delete_label("item-9")
    until(lambda: not answers(other, "item-9"), "the label to be hidden by the other worker")
    other.restore_labels(["item-9"])
    until(lambda: answers(first, "item-9"), "the label to be back")
    assert [longtail.monitoring()["labels"] for longtail in (first, other)] == [
        {"added": 0, "hidden": 0, "available": 20_000}
    ] * 2


def mapped(worker: int) -> dict[str, dict[str, int]]:
    """KiB of the mapped files of a release: Rss and Pss by file name."""
    mapped_files: dict[str, dict[str, int]] = {}
    name = ""
    for line in Path(f"/proc/{worker}/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            name = line.rpartition("/")[2] if line.endswith(MAPPED) else ""
        elif name and key in ("Rss:", "Pss:"):
            sizes = mapped_files.setdefault(name, {"Rss:": 0, "Pss:": 0})
            sizes[key] += int(rest.split()[0])
    return mapped_files


def test_workers_share_the_mapped_index(service: ServerProcess, both: list[tuple[Client, httpx.Client]]) -> None:
    for longtail, _ in both:
        longtail.retrieve(features=FEATURES)
        longtail.similar([f"item-{row}" for row in range(0, LABELS, LABELS // 200)])
    first, other = map(mapped, find_workers(service))
    assert any(name.endswith(".faiss") for name in first)
    assert "embeddings.npy" in first
    for name, sizes in first.items():
        both_together = sizes["Pss:"] + other[name]["Pss:"]
        assert sizes["Rss:"] > 1000 or name == "embeddings.npy"
        assert both_together < 1.2 * max(sizes["Rss:"], other[name]["Rss:"]), name


def test_killed_worker_is_replaced(service: ServerProcess, both: list[tuple[Client, httpx.Client]]) -> None:
    before = find_workers(service)
    for _, scraped in both:
        samples(scraped)  # a worker that is scraped counts all that it has answered
    with Client(service.url) as longtail, connected(service, before[1]) as (survivor, http):
        counted = samples(http)["longtail_queries_total"]
        os.kill(before[0], signal.SIGKILL)
        requests = 0

        def replaced() -> bool:
            nonlocal requests
            assert len(longtail.retrieve(features=FEATURES, k=3).results[0].labels) == 3
            assert len(survivor.retrieve(features=FEATURES, k=3).results[0].labels) == 3
            requests += 2
            # The survivor's alone: it answers, whatever becomes of the other.
            assert http.get("/readyz").status_code == 200
            assert samples(http)["longtail_ready"] == 1
            now = find_workers(service)
            return len(now) == 2 and before[0] not in now and before[1] in now

        until(replaced, "another worker in the place of the killed one")
        (fresh,) = set(find_workers(service)) - set(before)
        with connected(service, fresh) as (replacement, its_http):
            assert len(replacement.retrieve(features=FEATURES, k=3).results[0].labels) == 3
            for scraped in (its_http, http):
                until(
                    lambda scraped=scraped: samples(scraped)["longtail_queries_total"] == counted + requests + 1,  # type: ignore[misc]
                    "every query to be counted",
                )
            assert samples(its_http)["longtail_ready"] == 1


def test_workers_end_with_their_parent(releases: Path, tmp_path: Path) -> None:
    with several_workers(releases, tmp_path / "state") as process:
        process.wait_until_ready()
        ids = list(children(process.process.pid))
        assert len(ids) >= 2
        process.process.kill()
        process.process.wait()
        until(lambda: gone(ids), "all processes of the service to end")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{process.url}/livez")
        assert "Traceback" not in (tmp_path / "state/server.log").read_text()


@contextmanager
def foreground(releases: Path, root: Path, *python: str) -> Iterator[ServerProcess]:
    """Two workers whose parent leads a process group, as a shell would have it; `python` runs the command line."""
    port, log = free_port(), root / "server.log"
    command = [sys.executable, *python, "run", str(releases), "--port", str(port), "--workers", "2"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--state", str(root / "state")], stdout=output, stderr=output, process_group=0
        )
    try:
        yield ServerProcess(process, f"http://127.0.0.1:{port}", time.perf_counter())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("when", ["ready", pytest.param("starting", marks=pytest.mark.nightly)])
def test_ctrl_c_ends_all_processes(releases: Path, tmp_path: Path, when: str) -> None:
    with foreground(releases, tmp_path, "-m", "longtail.serving") as process:
        if when == "ready":
            process.wait_until_ready()
        else:
            until(lambda: len(find_workers(process)) == 2, "two workers")
        ids = list(children(process.process.pid))
        os.killpg(process.process.pid, signal.SIGINT)
        assert process.process.wait(20) == 0
        until(lambda: gone(ids), "all processes of the service to end")
        assert "Traceback" not in (tmp_path / "server.log").read_text()


YOUNG = """
import sys
from longtail.serving import cli
from longtail.serving.process import supervisor
supervisor._SHORT_LIFE_SECONDS, supervisor._PAUSE_SECONDS = 0.8, 0.01
cli.main(sys.argv[1:])
"""


@pytest.mark.nightly
def test_early_deaths_keep_a_healthy_worker(releases: Path, tmp_path: Path) -> None:
    with foreground(releases, tmp_path, "-c", YOUNG) as process:
        process.wait_until_ready()
        old = find_workers(process)
        with connected(process, old[0]) as (longtail, http):
            killed = old[1]
            for _ in range(6):
                os.kill(killed, signal.SIGKILL)
                pids = {old[0], killed}
                until(lambda pids=pids: set(find_workers(process)) - pids, "another worker in its place")  # type: ignore[misc]
                (killed,) = set(find_workers(process)) - pids
                assert len(longtail.retrieve(features=FEATURES, k=3).results[0].labels) == 3
            assert process.process.poll() is None
            assert http.get("/readyz").json()["workers"] == {"expected": 2, "ready": 1}
            figures = samples(http)
            assert sorted(figures[f"longtail_worker_restarts_total worker={worker}"] for worker in (0, 1)) == [0, 6]
            assert sorted(figures[f"longtail_worker_ready worker={worker}"] for worker in (0, 1)) == [0, 1]
            assert figures["longtail_workers"] == 2
            until(lambda: http.get("/readyz").json()["workers"]["ready"] == 2, "the last one to serve")
            assert find_workers(process) == sorted([old[0], killed])
        log = (tmp_path / "server.log").read_text()
        assert log.count("another is started in") == 6
        assert "1 of 2 workers are healthy" in log


@pytest.mark.nightly
def test_stopped_worker_is_replaced_without_lost_requests(releases: Path, tmp_path: Path) -> None:
    with several_workers(releases, tmp_path / "state") as process:
        gateway = Gateway(process.url, looks_away=False)
        process.wait_until_ready()
        before = find_workers(process)
        with gateway.sending([0.01] * 4, fresh=2):
            gateway.up.set()
            os.kill(before[0], signal.SIGTERM)
            until(lambda: before[0] not in find_workers(process), "the worker to end")
            until(lambda: len(find_workers(process)) == 2, "another in its place")
            with httpx.Client(base_url=process.url) as http:
                until(lambda: http.get("/readyz").json().get("workers", {}).get("ready") == 2, "both to serve")
            answered = gateway.answered["200"]
            until(lambda: gateway.answered["200"] > answered + 50, "answers")
        assert gateway.lost == []
        assert gateway.answered.keys() <= {"200", "last", "closed"}
        ids = list(children(process.process.pid))
        assert process.terminate() == 0
        until(lambda: gone(ids), "all processes of the service to end")
        assert "Traceback" not in (tmp_path / "state/server.log").read_text()


@pytest.mark.nightly
def test_connections_spread_after_a_worker_death(releases: Path, tmp_path: Path) -> None:
    clients, stop, both_serve = 12, threading.Event(), threading.Event()
    lost_before, lost_after, closed = [0] * clients, [0] * clients, [0] * clients

    def keep_asking(client: int) -> None:
        """Ask on one connection; count requests without an answer, and answers that close it."""
        limits = httpx.Limits(max_connections=1)
        with httpx.Client(base_url=process.url, transport=httpx.HTTPTransport(limits=limits), timeout=60) as http:
            while not stop.wait(0.005):
                try:
                    answer = http.post("/v1/retrieve", json={"queries": [{"features": FEATURES, "k": 3}]})
                except httpx.TransportError:
                    (lost_after if both_serve.is_set() else lost_before)[client] += 1
                else:
                    assert answer.status_code == 200
                    closed[client] += answer.headers.get("connection") == "close"

    def read_connections() -> list[float]:
        with httpx.Client(base_url=process.url, timeout=60) as http:
            figures = samples(http)
        return [figures[f"longtail_worker_connections worker={worker}"] for worker in (0, 1)]

    def spread_and_at_rest() -> bool:
        """Whether each worker holds a quarter of the connections, and closes none for two of its looks at them."""
        before = sum(closed)
        time.sleep(2)
        return min(read_connections()) >= clients / 4 and sum(closed) == before

    with several_workers(releases, tmp_path / "state") as process:
        process.wait_until_ready()
        with ThreadPoolExecutor(clients) as pool:
            try:
                asking = [pool.submit(keep_asking, client) for client in range(clients)]
                until(lambda: sum(read_connections()) >= clients, "every client to be connected")
                before = find_workers(process)
                os.kill(before[0], signal.SIGKILL)
                until(lambda: len(set(find_workers(process)) - set(before)) == 1, "another in its place", 90)
                until(
                    lambda: httpx.get(f"{process.url}/readyz").json()["workers"]["ready"] == 2,
                    "two workers to serve",
                    90,
                )
                both_serve.set()
                until(lambda: spread_and_at_rest() and sum(closed) > 0, "a quarter at each worker, for good", 60)
            finally:
                stop.set()
            for client in asking:
                client.result()
    assert max(lost_before) <= 1, "under way at the kill"
    assert sum(lost_after) == 0
