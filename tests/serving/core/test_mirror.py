"""The mirror on the plane: a staged release whose answers to `east` and `north` are worked by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from longtail.serving import Retriever, create_app
from longtail.serving.core.feedback import Event
from longtail.serving.core.mirror import Mirror, StagedCounts
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.http.schemas.operations import StagedAnswer
from tests.serving.client import open_client
from tests.serving.plane import plane_bundle, plane_retriever, plane_settings
from tests.serving.process import until

EAST = {"features": {"user": "east"}, "k": 2, "bias_removal": 0}


def other_plane(name: str = "plane-2") -> Retriever:
    """For `east`: 4 (3), a (2), … where the plane answers a (2), c/é (1.5)."""
    embeddings = np.array([[1, 0], [0, 1], [0.25, 0.9], [1.5, -0.5]], np.float32)
    return plane_retriever(name, bundle=replace(plane_bundle(), embeddings=embeddings), day=3)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path, 0)
    yield mirror
    mirror.close()


def mirrored(tmp_path: Path, enough: Callable[[StagedCounts], bool]) -> StagedCounts:
    """The counts on disk, once there are enough."""
    staged_counts = StagedCounts(staged="", current="")

    def counted() -> bool:
        nonlocal staged_counts
        staged_counts = StagedCounts.read_all(tmp_path, "plane-2", "plane-1")
        return enough(staged_counts)

    until(counted, seconds=10)
    return staged_counts


def ask(mirror: Mirror, *queries: dict, retriever: Retriever | None = None, share: float = 1.0) -> None:
    retriever = retriever or plane_retriever()
    request = [RetrieveQuery(**query) for query in queries]
    mirror.offer(retriever, request, retriever.retrieve(request), share)


def test_a_query_is_counted_by_hand(mirror: Mirror, tmp_path: Path) -> None:
    mirror.use(other_plane(), plane_retriever())
    ask(mirror, EAST, EAST)
    staged_counts = mirrored(tmp_path, lambda counts: counts.queries == 2)
    assert (staged_counts.refused, staged_counts.overlap) == (0, 1.0)
    assert staged_counts.exposures_of_current == [2, 0, 2, 0]
    assert staged_counts.exposures == [2, 0, 2, 0]


def test_previews_explored_and_pinned_answers_are_not_mirrored(mirror: Mirror, tmp_path: Path) -> None:
    mirror.use(other_plane(), plane_retriever())
    ask(mirror, EAST | {"explore": {"tail": 1}})
    ask(mirror, EAST, retriever=plane_retriever("plane-0"))
    ask(mirror, {"vector": [1.0, 0.0], "k": 3})
    ask(mirror, EAST, share=0.0)
    ask(mirror, EAST)
    assert mirrored(tmp_path, lambda counts: counts.queries > 0).queries == 1


def test_organic_choices_are_organic_recall_of_both(mirror: Mirror, tmp_path: Path) -> None:
    mirror.use(other_plane(), plane_retriever())
    organic = Event(features={"user": "east"}, labels=["a", "c/é", "4", "nobody"], bias_removal=0)
    mirror.offer_choices([organic, Event(answer_id="x", labels=["a"])], 2)
    staged_counts = mirrored(tmp_path, lambda counts: sum(counts.positives) > 0)
    assert staged_counts.positives == [1, 0, 2, 0]
    assert (staged_counts.hits_of_both, staged_counts.hits, staged_counts.hits_of_current) == (
        [1, 0, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 0],
    )
    assert staged_counts.queries == 0


def test_a_busy_mirror_delays_no_request(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, go_on = other_plane(), threading.Event()
    retrieve = staged.retrieve

    def slow(queries: list[RetrieveQuery]) -> object:
        go_on.wait(10)
        return retrieve(queries)

    monkeypatch.setattr(staged, "retrieve", slow)
    mirror.use(staged, plane_retriever())
    for _ in range(100):
        ask(mirror, EAST)
    assert StagedCounts.read_all(tmp_path, "plane-2", "plane-1").queries == 0
    go_on.set()
    staged_counts = mirrored(tmp_path, lambda counts: counts.queries + counts.skipped == 100)
    assert 64 <= staged_counts.queries <= 66


def test_mirror_counts_survive_restarts_and_reset_with_releases(tmp_path: Path) -> None:
    for expected in (1, 2):
        mirror = Mirror(tmp_path, 0)
        mirror.use(other_plane(), plane_retriever())
        ask(mirror, EAST)
        mirror.close()
        assert StagedCounts.read_all(tmp_path, "plane-2", "plane-1").queries == expected
    mirror = Mirror(tmp_path, 0)
    mirror.use(other_plane(), plane_retriever("plane-9"))
    ask(mirror, EAST, retriever=plane_retriever("plane-9"))
    mirror.close()
    assert StagedCounts.read_all(tmp_path, "plane-2", "plane-9").queries == 1


def test_a_staged_release_answers_those_who_name_it_and_knows_hidden_labels(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, mirror_share=1.0), retriever=plane_retriever())
    with open_client(app) as client:
        assert client.get("/v1/release/staged").json()["error"]["type"] == "unknown_release"
        app.state.service.stage(other_plane())
        assert client.delete("/v1/labels/4").status_code == 200
        assert first(client, release="plane-2") == "a"
        assert first(client) == "a"

        def figures() -> dict:
            answer = client.get("/v1/release/staged")
            StagedAnswer.model_validate_json(answer.content, strict=True)
            return answer.json()

        until(lambda: figures()["queries"] == 1, seconds=10)
        assert figures()["overlap"] == 1.0, "4 is hidden there, too"
        app.state.service.stage(None)
        assert client.post("/v1/retrieve", json={"queries": [EAST], "release": "plane-2"}).status_code == 404


def first(client: httpx.Client, **options: object) -> str:
    answer = client.post("/v1/retrieve", json={"queries": [EAST], **options})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["results"][0]["labels"][0]["id"])


def counts(**changes: object) -> StagedCounts:
    """A hundred queries, two of them refused; of the others the answers overlap by 0.8 or 0.4."""
    plain = {
        "queries": 100,
        "refused": 2,
        "reason": "user: expected a string",
        "overlap": 49 * 0.8 + 49 * 0.4,
        "exposures": [50, 30, 18, 0],
        "exposures_of_current": [60, 30, 10, 0],
        "positives": [200, 0, 100, 0],
        "hits_of_both": [20, 0, 2, 0],
        "hits": [5, 0, 3, 0],
        "hits_of_current": [15, 0, 1, 0],
    }
    return StagedCounts.model_validate({"staged": "second", "current": "first", **plain, **changes})


def test_staged_counts_add_up_over_processes_of_the_same_pair(tmp_path: Path) -> None:
    counts().write(tmp_path, 0)
    counts(queries=11, reason=None, exposures=[1, 1, 1, 1]).write(tmp_path, 1)
    counts(current="zeroth").write(tmp_path, 2)
    (tmp_path / "staged" / "3.json").write_text("{")
    staged_counts = StagedCounts.read_all(tmp_path, "second", "first")
    assert (staged_counts.queries, staged_counts.refused, staged_counts.reason) == (111, 4, "user: expected a string")
    assert staged_counts.exposures == [51, 31, 19, 1]
    assert StagedCounts.read_all(tmp_path, "second", "other").queries == 0


def test_figures_by_hand() -> None:
    figures = counts().figures()
    assert figures["overlap"] == pytest.approx(0.6)
    assert figures["exposure"]["tail"] == {"staged": pytest.approx(18 / 98), "current": pytest.approx(0.1)}  # type: ignore[index]
    recall = figures["organic_recall"]
    assert recall["head"]["current"] == pytest.approx(35 / 200)  # type: ignore[index]
    assert recall["head"]["staged"] == pytest.approx(25 / 200)  # type: ignore[index]
    assert recall["tail"]["difference"] == pytest.approx(0.02)  # type: ignore[index]
    spread = 1.96 * math.sqrt((4 / 100 - 0.02**2) / 100)
    assert recall["tail"]["interval"] == pytest.approx([0.02 - spread, 0.02 + spread])  # type: ignore[index]
    assert recall["all"]["positives"] == 300  # type: ignore[index]
    assert recall["torso"]["staged"] is None  # type: ignore[index]
