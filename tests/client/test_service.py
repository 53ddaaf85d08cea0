"""Both clients against the real server in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import httpx2 as httpx
import pytest

from longtail.client import Answer, AsyncClient, Client, NotFoundError, Query
from tests.bundles import make_bundle
from tests.client.conftest import Make
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.rounding import within_rounding

pytestmark = pytest.mark.process

LABELS = 60
FEATURES = {"user_id": "u3", "history": ["item-1", "item-2"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("client")
    releases = publish_bundle(make_bundle(labels=LABELS, users=20), root, "first")
    with server(releases, root / "server.log", drain_seconds=0) as process:
        process.wait_until_ready()
        yield process.url


def test_retrieve_equals_the_route(asker: Make, url: str) -> None:
    answer = asker(url=url)("retrieve", features=FEATURES, k=5, bias_removal=0.25, popularity=0.5)
    assert isinstance(answer, Answer)
    query = {"features": FEATURES, "k": 5, "bias_removal": 0.25, "popularity": 0.5}
    plain = httpx.post(f"{url}/v1/retrieve", json={"queries": [query]}).json()
    (result,), (expected,) = answer.results, plain["results"]
    assert [(label.id, label.score, label.bucket, label.display) for label in result.labels] == [
        (label["id"], label["score"], label["bucket"], label["display"]) for label in expected["labels"]
    ]
    assert (answer.release, result.bias_removal, result.popularity, len(result.labels)) == ("first", 0.25, 0.5, 5)
    assert answer.request_id != plain["request_id"]


def test_every_part_of_a_query_is_heeded(asker: Make, url: str) -> None:
    observed = ["item-1", "item-2", "no such item"]
    queries = [
        Query(FEATURES),
        Query(FEATURES, k=LABELS, exclude=observed),
        Query(FEATURES, allow={"item-7", "item-8"}),
        Query(FEATURES, k=LABELS, buckets=["tail"]),
        Query(FEATURES, allow=[]),
        Query(FEATURES, filter={"title": {"in": ["Title 3", "Title 4", "no such title"]}}),
        Query(FEATURES, k=3, max_per={"title": 1}, mmr=0.5, pool=20),
        Query(FEATURES, k=3, at_least={"bucket": {"tail": 3}}),
    ]
    plain, unseen, allowed, tail, none, titled, separate, floored = asker(url=url)("retrieve", queries).results
    assert len(plain.labels) == 10
    assert (len(unseen.labels), unseen.unknown["exclude"]) == (LABELS - 2, 1)
    assert {label.id for label in allowed.labels} == {"item-7", "item-8"}
    assert {label.bucket for label in tail.labels} == {"tail"}
    assert none.labels == ()
    assert {label.id for label in titled.labels} == {"item-3", "item-4"}
    assert (len(separate.labels), separate.pool, plain.pool) == (3, 20, None)
    assert [label.bucket for label in floored.labels] == ["tail"] * 3
    assert floored.floors == [{"bucket": "tail", "n": 3, "met": 3}]
    assert floored.cost is not None
    assert floored.cost > 0
    assert plain.floors is None


def test_labels_are_listed_hidden_and_restored(asker: Make, url: str) -> None:
    longtail, expected = asker(url=url), sorted(f"item-{row}" for row in range(LABELS))
    for listing in ({"limit": 7}, {}):
        assert [label["id"] for label in longtail("labels", **listing)] == expected
    assert {label["bucket"] for label in longtail("labels", bucket="tail")} == {"tail"}
    assert longtail("delete_labels", ["item-3", "item-5", "item-3"])["accepted"] == 2
    with pytest.raises(NotFoundError, match=r'"no such" \(ids.1\)'):
        longtail("restore_labels", ["item-5", "no such"])
    assert longtail("restore_labels", ["item-5"])["accepted"] == 1
    assert [(label["id"], label["state"]) for label in longtail("labels", state="hidden")] == [("item-3", "hidden")]
    assert longtail("restore_labels", ["item-3"])["release"] == "first"


def test_threads_share_a_client(url: str) -> None:
    with Client(url) as longtail, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: longtail.retrieve(features=FEATURES, answer_ids=False), range(40)))
        named = [longtail.retrieve(features=FEATURES).results[0].answer_id for _ in range(2)]
    expected = within_rounding(asdict(answers[0].results[0]))
    assert all([asdict(result) for result in answer.results] == [expected] for answer in answers)
    assert len({answer.request_id for answer in answers}) == 40
    assert len({answers[0].results[0].answer_id, *named}) == 3


def test_tasks_share_a_client(url: str) -> None:
    async def ask() -> list[Answer]:
        async with AsyncClient(url) as longtail:
            return await asyncio.gather(*(longtail.retrieve(features=FEATURES) for _ in range(40)))

    answers = asyncio.run(ask())
    assert len({answer.request_id for answer in answers}) == 40
