"""Small and large requests of several keys at once: every answer is whole, and what its queries are answered alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import orjson
import pytest

from longtail.index import IndexSpec, Releases, build
from tests.bundles import make_bundle
from tests.serving.process import ServerProcess, server

LABELS, USERS = 120, 300
SIZES, K = (1, 8, 64, 256), (1, 10, 60, 100)
KEYS = [f"key-{name}-0123456789abcdef" for name in "abc"]
THREADS, ROUNDS = 10, 2
CLOSE = 1e-3
"""Of scores in logits, that batches of another size round otherwise; another query's differ by whole ones."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("company")
    make_bundle(labels=LABELS, users=USERS).write(root / "bundle")
    build(root / "bundle", root / "releases", spec=IndexSpec("flat"), name="only")
    Releases(root / "releases").publish("only")
    settings = {"api_keys": ",".join(KEYS), "queue_limit": THREADS * max(SIZES), "request_seconds": 30}
    with server(root / "releases", root / "log", **settings) as process:
        process.wait_until_ready()
        yield process
        assert process.terminate() == 0


def ask(client: httpx.Client, users: list[int], k: list[int]) -> list[dict[str, Any]]:
    queries = [{"features": {"user_id": f"u{user}"}, "k": each} for user, each in zip(users, k, strict=True)]
    answer = client.post("/v1/retrieve", content=orjson.dumps({"queries": queries}))
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = orjson.loads(answer.content)["results"]
    return results


def scores_of(results: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{label["id"]: label["score"] for label in result["labels"]} for result in results]


def test_every_answer_is_whole_and_its_own(service: ServerProcess) -> None:
    def client_of(key: str) -> httpx.Client:
        headers = {"x-api-key": key, "content-type": "application/json"}
        return httpx.Client(base_url=service.url, headers=headers, timeout=60)

    with client_of(KEYS[0]) as client:
        alone = [scores_of(ask(client, [user], [LABELS]))[0] for user in range(USERS)]
    best = [np.array(list(scores.values())) for scores in alone]

    def be_client(thread: int) -> int:
        chance = random.Random(thread)
        asked = 0
        with client_of(KEYS[thread % len(KEYS)]) as client:
            for size in chance.sample(SIZES * ROUNDS, len(SIZES) * ROUNDS):
                users, most = chance.choices(range(USERS), k=size), chance.choice(K)
                k = [chance.randint(1, most) for _ in users]
                found = scores_of(ask(client, users, k))
                assert [len(scores) for scores in found] == k, f"a request of {size} queries"
                for user, scores in zip(users, found, strict=True):
                    answered = np.array(list(scores.values()))
                    assert np.abs(answered - best[user][: len(scores)]).max() < CLOSE
                    assert np.abs(answered - [alone[user][id_] for id_ in scores]).max() < CLOSE
                asked += size
        return asked

    with ThreadPoolExecutor(THREADS) as threads:
        asked = sum(threads.map(be_client, range(THREADS)))
    metrics = httpx.get(f"{service.url}/metrics", headers={"x-api-key": KEYS[0]}).text
    assert f"longtail_queries_total {float(USERS + asked)}" in metrics
