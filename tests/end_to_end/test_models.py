"""Several models in one real process: each answers as a service of its own would, and none touches another."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from longtail.client import Client, Feedback, NewLabel, NotFoundError
from longtail.index import IndexSpec, Releases, build
from tests.bundles import label_features, make_bundle
from tests.end_to_end.gateway import Gateway
from tests.end_to_end.test_workers import connected, samples, workers_of
from tests.serving.process import ServerProcess, server, until

LABELS = {"first": 300, "books": 200}
FEATURES = {"user_id": "u3", "history": ["item-1", "item-2"]}
BODIES: list[tuple[str, Any]] = [
    ("retrieve", {"queries": [{"features": FEATURES, "k": 20}]}),
    ("retrieve", {"queries": [{"features": {"user_id": f"u{n}"}, "k": 7, "bias_removal": n / 8} for n in range(8)]}),
    ("retrieve", {"queries": [{"features": FEATURES, "exclude": ["item-3"], "buckets": ["tail", "torso"]}]}),
    ("similar", {"ids": ["item-3", "item-4"], "k": 9}),
    ("embed", {"queries": [{"features": FEATURES}]}),
    ("embed", {"labels": ["item-5"]}),
]


@dataclass(frozen=True)
class Shelves:
    """Directories of releases of two different models, two releases in each: NAME-1, which is published, and NAME-2."""

    root: Path

    @property
    def first(self) -> Path:
        return self.root / "first"

    @property
    def books(self) -> Path:
        return self.root / "books"

    @property
    def models(self) -> str:
        return f"books={self.books}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built")
    for place, (name, labels) in enumerate(LABELS.items()):
        for turn in (1, 2):
            seed, bundle = 10 * place + turn, root / f"{name}-{turn}"
            make_bundle(labels=labels, dim=16 + 16 * place, seed=seed, label_tower=True).write(bundle)
            build(bundle, root / "shelves" / name, spec=IndexSpec("flat"), name=f"{name}-{turn}")
        Releases(root / "shelves" / name).publish(f"{name}-1")
    return root / "shelves"


@pytest.fixture
def shelves(built: Path, tmp_path: Path) -> Shelves:
    shutil.copytree(built, tmp_path / "shelves", copy_function=os.link)
    return Shelves(tmp_path / "shelves")


@contextmanager
def serving(shelves: Shelves, log: Path, **settings: object) -> Iterator[ServerProcess]:
    """Both models in one service that looks for releases often."""
    options: dict[str, object] = {"models": shelves.models, "poll_seconds": 0.05, "drain_seconds": 0.1}
    with server(shelves.first, log, **(options | settings)) as process:
        yield process


def answers(url: str, base: str) -> list[tuple[int, bytes]]:
    """What the service of a URL answers to BODIES, but for ids of answers and requests."""
    found = []
    with httpx.Client(base_url=url) as http:
        for path, body in BODIES:
            response = http.post(f"{base}/{path}", json=body, headers={"x-request-id": "one"})
            assert response.status_code == 200, response.text
            content = json.loads(response.content)
            content.pop("answer_id", None)
            start = response.content.partition(b',"answer_id"')[0]
            found.append((response.status_code, start + json.dumps(content).encode()))
    return found


def test_each_model_answers_as_a_service_of_its_own_bit_for_bit(shelves: Shelves, tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = stack.enter_context(serving(shelves, tmp_path / "both.log", state=tmp_path / "state"))
        single = {
            name: stack.enter_context(server(shelves.root / name, tmp_path / f"{name}.log", state=tmp_path / name))
            for name in LABELS
        }
        for process in (both, *single.values()):
            process.wait_until_ready(60)
        of_first, of_books = answers(both.url, "/v1"), answers(both.url, "/v1/models/books")
        assert of_first == answers(single["first"].url, "/v1") == answers(both.url, "/v1/models/default")
        assert of_books == answers(single["books"].url, "/v1")
        assert all(one != other for one, other in zip(of_first, of_books, strict=True))
        # Together, so that requests to both stand in one queue.
        with ThreadPoolExecutor(8) as threads:
            paths = ["/v1", "/v1/models/books"] * 20
            for path, found in zip(paths, threads.map(lambda path: answers(both.url, path), paths), strict=True):
                assert found == (of_first if path == "/v1" else of_books)
        assert both.terminate() == 0


def contents(state: Path) -> dict[str, str]:
    """Digests of what is kept in a state directory, but for the file that says who uses it."""
    return {
        str(path.relative_to(state)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(state.rglob("*"))
        if path.is_file() and path.name in ("labels.sqlite", "feedback.sqlite", "releases.json")
    }


def test_what_is_done_to_one_never_touches_the_other_and_outlives_kill_9(shelves: Shelves, tmp_path: Path) -> None:
    def seen(url: str, model: str | None) -> dict[str, Any]:
        with Client(url, model=model) as longtail:
            report = longtail.monitoring()
            feedback = report["windows"]["1h"]["recall"]["feedback"]["all"]["positives"]
            listed = {(label.id, label.state) for label in longtail.labels() if label.state != "visible"}
            return {"labels": report["labels"], "feedback": feedback, "changed": listed}

    untouched = {"labels": {"added": 0, "hidden": 0}, "feedback": 0, "changed": set()}
    changed = {
        "labels": {"added": 1, "hidden": 2},
        "feedback": 1,
        "changed": {("fresh", "added"), ("item-3", "hidden"), ("item-4", "hidden")},
    }
    state_of = {None: shelves.first / ".state", "books": shelves.books / ".state"}
    for turn, model in enumerate(["books", None]):
        other = None if model == "books" else "books"
        with serving(shelves, tmp_path / f"{turn}.log") as process:
            process.wait_until_ready(60)
            with Client(process.url, model=model) as longtail:
                longtail.add_labels(NewLabel("fresh", label_features(1)))
                longtail.delete_labels(["item-3", "item-4"])
                answer = longtail.retrieve(features=FEATURES, k=5)
                longtail.feedback(Feedback(answer_id=answer.answer_id, labels=[answer.results[0].labels[0].id]))
            until(lambda: seen(process.url, model) == changed, "feedback to be counted")  # noqa: B023
            expected = untouched if turn == 0 else changed
            assert seen(process.url, other) == expected
            before = contents(state_of[other]).get("labels.sqlite")
            process.process.send_signal(signal.SIGKILL)
            process.process.wait()
        assert contents(state_of[other]).get("labels.sqlite") == before
        with serving(shelves, tmp_path / f"{turn}-again.log") as process:
            process.wait_until_ready(60)
            assert (seen(process.url, model), seen(process.url, other)) == (changed, expected)
            assert process.terminate() == 0
    assert set(contents(state_of[None])) == set(contents(state_of["books"]))


def test_swaps_of_one_under_load_of_both_fail_no_request(shelves: Shelves, tmp_path: Path) -> None:
    releases, stop, seen = Releases(shelves.books), Event(), Counter[str]()

    def ask_books(url: str) -> None:
        with httpx.Client(base_url=url) as http:
            while not stop.is_set():
                answer = http.post("/v1/models/books/retrieve", json=BODIES[0][1])
                assert answer.status_code == 200, answer.text
                seen[answer.json()["release"]] += 1

    with serving(shelves, tmp_path / "log") as process, ThreadPoolExecutor(2) as threads:
        process.wait_until_ready(60)
        before = answers(process.url, "/v1")
        gateway = Gateway(process.url)
        gateway.up.set()
        with gateway.sending([0.01] * 3, fresh=1):
            asking = threads.submit(ask_books, process.url)
            try:
                with Client(process.url, model="books") as longtail:
                    for turn in range(6):
                        name = "books-2" if turn % 2 == 0 else "books-1"
                        if turn % 2 == 0:
                            releases.publish(name)
                        else:
                            releases.rollback()
                        until(lambda: longtail.release()["name"] == name, f"{name} to be served")  # noqa: B023
                        before_turn = seen[name]
                        until(lambda: seen[name] > before_turn + 5, f"answers of {name}")  # noqa: B023
                        assert answers(process.url, "/v1") == before
            finally:
                stop.set()
            asking.result()
        assert gateway.lost == []
        assert gateway.answered.keys() <= {"200", "closed"}
        assert gateway.answered["200"] > 100
        assert set(seen) == {"books-1", "books-2"}
        figures = figures_of(process)
        assert figures["longtail_release_swaps_total model=books"] == 7
        assert figures["longtail_release_swaps_total"] == 1
        assert process.terminate() == 0


def figures_of(process: ServerProcess) -> dict[str, float]:
    with httpx.Client(base_url=process.url) as http:
        return samples(http)


def damage(releases: Path, name: str) -> None:
    """Put other bytes in the place of a release's embeddings, whose links others have too."""
    path = releases / name / "bundle/embeddings.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_a_broken_release_of_one_leaves_the_other_serving(shelves: Shelves, tmp_path: Path) -> None:
    damage(shelves.books, "books-1")
    with serving(shelves, tmp_path / "log") as process, httpx.Client(base_url=process.url) as http:

        def listed() -> dict[str, Any]:
            models = http.get("/v1/models").json()["models"]
            return {model["name"]: (model["release"], model["ready"], model["problem"]) for model in models}

        with Client(process.url, model="books", retries=0) as books, Client(process.url) as first:
            until(lambda: _answers(http, "/v1/models/default/readyz", 200), "the first model to be served")
            refused = "the published release, books-1, could not be loaded, none is served; the log says why"
            until(lambda: listed()["books"] == (None, False, refused), "the release to be refused")
            answer = http.get("/readyz")
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "not_ready")
            assert answer.json()["detail"] == f"expected a release of every model, found none of books: {refused}"
            assert not books.ready()
            assert listed()["default"] == ("first-1", True, None)
            assert len(first.retrieve(features=FEATURES, k=5).results[0].labels) == 5
            assert _answers(http, "/v1/models/books/retrieve", 503, BODIES[0][1])

            Releases(shelves.books).publish("books-2")
            until(books.ready, "the next one to be served")
            assert http.get("/readyz").status_code == 200
            Releases(shelves.first).publish("first-2")
            until(lambda: first.release()["name"] == "first-2", "the first model's next one")
            damage(shelves.first, "first-1")
            shelves_current(shelves.first, "first-1")
            until(lambda: listed()["default"][2] is not None, "the broken one to be refused")
            assert listed()["default"][:2] == ("first-2", True)
            assert listed()["books"] == ("books-2", True, None)
            assert http.get("/readyz").status_code == 200
            figures = samples(http)
            assert figures["longtail_release_load_failures_total"] >= 1
            assert figures["longtail_release_load_failures_total model=books"] >= 1
            assert [figures[f"longtail_verdict {of}signal=refused_release"] for of in ("", "model=books ")] == [2, 0]
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert {line["model"] for line in lines if "refused" in line["message"]} == {"default", "books"}


def shelves_current(releases: Path, name: str) -> None:
    """Point CURRENT at a release that `publish` would refuse."""
    (releases / "CURRENT.new").write_text(f"{name}\n")
    (releases / "CURRENT.new").rename(releases / "CURRENT")


def _answers(http: httpx.Client, path: str, status: int, body: Any = None) -> bool:
    try:
        return http.request("GET" if body is None else "POST", path, json=body).status_code == status
    except httpx.TransportError:
        return False


def test_two_workers_serve_both(shelves: Shelves, tmp_path: Path) -> None:
    with serving(shelves, tmp_path / "log", workers=2, state=tmp_path / "state") as process:
        process.wait_until_ready(60)
        with ExitStack() as stack:
            (_, one), (_, other) = (stack.enter_context(connected(process, worker)) for worker in workers_of(process))
            for asked, http in enumerate((one, other), 1):
                for base in ("/v1", "/v1/models/books"):
                    for _ in range(3 * asked):
                        answer = http.post(f"{base}/retrieve", json=BODIES[0][1])
                        assert answer.json()["release"] == ("first-1" if base == "/v1" else "books-1")
            assert one.delete("/v1/models/books/labels/item-9").status_code == 200
            until(lambda: other.get("/v1/models/books/labels/item-9").status_code == 404, "the other worker to hide it")
            assert other.get("/v1/labels/item-9").status_code == 200
            for http in (one, other):
                figures = samples(http)
                for model in ("", " model=books"):
                    assert figures[f"longtail_queries_total{model}"] == 9
                    assert figures[f"longtail_ready{model}"] == 1
                assert figures["longtail_labels_hidden model=books"] == 1
                assert figures["longtail_labels_hidden"] == 0
                assert "longtail_queue_depth model=books" not in figures
                assert http.get("/v1/models/books/readyz").json()["workers"] == {"expected": 2, "ready": 2}
                families = [line for line in http.get("/metrics").text.splitlines() if line.startswith("# TYPE")]
                assert len(set(families)) == len(families)
            os.kill(workers_of(process)[0], signal.SIGKILL)
            until(lambda: len(workers_of(process)) == 2, "another worker")
        with httpx.Client(base_url=process.url) as http:
            until(lambda: http.get("/readyz").json().get("workers", {}).get("ready") == 2, "both to serve both")
        assert (tmp_path / "state/models/books/labels.sqlite").stat().st_size > 0
        assert process.terminate() == 0
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said


def test_names_that_are_none(shelves: Shelves, tmp_path: Path) -> None:
    """As they come over the wire, which no client of ours would send."""
    with serving(shelves, tmp_path / "log") as process:
        process.wait_until_ready(60)
        for name, kind in {
            "..": "unknown_model", "%2e%2e": "unknown_model", "..%2Fbooks": "unknown_model",
            "b%C3%B6cher": "unknown_model",
            "BOOKS": "unknown_model", "%00": "unknown_model", "books%20": "unknown_model", "%ff": "unknown_model",
            "x" * 3000: "unknown_model", "": "unknown_model", "books;": "unknown_model",
            "books%2F..": "unknown_route", "books/..": "unknown_route", "books//": "unknown_route",
            "books/..%2F..%2F": "unknown_route", "books/models/books": "unknown_route",
        }.items():  # fmt: skip
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                connection = HTTPConnection(urlsplit(process.url).netloc, timeout=10)
                connection.request(method, f"/v1/models/{name}/retrieve", "{}", {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
                assert (answer.status, answer.headers["content-type"]) == (404, "application/problem+json"), name
                assert method == "HEAD" or json.loads(content)["error"]["type"] == kind, (name, content)
                connection.close()
        # An encoded slash is one, here as in every path.
        assert httpx.post(f"{process.url}/v1/models/books%2Fretrieve", json=BODIES[0][1]).status_code == 200
        known = r"unknown_model: expected one of the models \['default', 'books'\]"
        with Client(process.url, model="films") as films, pytest.raises(NotFoundError, match=known):
            films.release()
        figures = figures_of(process)
        # But for probes while the releases were being loaded.
        assert not any(value for name, value in figures.items() if "status=5xx" in name and "/readyz" not in name)
        assert process.terminate() == 0


def test_one_state_has_one_service_and_settings_are_read_again_for_all(shelves: Shelves, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[models]\nbooks = "{shelves.books}"\n')
    with server(shelves.first, tmp_path / "log", settings_file=file) as process:
        process.wait_until_ready(60)
        with server(shelves.books, tmp_path / "second.log") as second:
            assert second.process.wait(60) == 2
            assert f"state directory {shelves.books}/.state: expected one that no other" in (
                (tmp_path / "second.log").read_text()
            )
        file.write_text(f'max_k = 4\n[models]\nfilms = "{shelves.books}"\n')
        process.process.send_signal(signal.SIGHUP)
        with httpx.Client(base_url=process.url) as http:
            for base in ("/v1", "/v1/models/books"):
                until(lambda: _answers(http, f"{base}/retrieve", 422, BODIES[0][1]), "k <= 4")  # noqa: B023
                assert _answers(http, f"{base}/retrieve", 200, {"queries": [{"features": FEATURES, "k": 4}]})
            assert http.get("/v1/models").json()["models"][1]["release"] == "books-1"
        assert "these settings have changed and wait for a restart: models" in (tmp_path / "log").read_text()
        assert process.terminate() == 0
