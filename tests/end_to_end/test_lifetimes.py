"""A label becomes available and ends while twelve clients ask a real server all the time."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx2 as httpx

from tests.bundles import make_bundle
from tests.end_to_end.releases import publish_bundle
from tests.serving.core.shop import dated
from tests.serving.process import server

CLIENTS, SECONDS = 12, 2
QUERY = {"features": {"user_id": "u3"}, "k": 2, "allow": ["item-1", "item-2"]}


def test_answers_respect_label_lifetimes(tmp_path: Path) -> None:
    publish_bundle(dated(make_bundle(label_tower=True)), tmp_path)
    with server(tmp_path / "releases", tmp_path / "log") as process:
        process.wait_until_ready()
        begin = math.ceil(time.time()) + 1
        lifetime = {"available_from": begin, "available_until": begin + SECONDS}
        display = {name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in lifetime.items()}
        with httpx.Client(base_url=process.url) as admin:
            admin.patch("/v1/labels/item-1", json={"display": display}).raise_for_status()
            before = admin.get("/v1/labels/item-1").json()["available"]
            change = datetime.fromisoformat(admin.get("/v1/release").json()["available"]["next_change"])

        def ask(_: int) -> list[tuple[float, float, bool]]:
            observations = []
            with httpx.Client(base_url=process.url, timeout=30) as client:
                while not observations or observations[-1][0] < begin + SECONDS + 0.5:
                    asked_at = time.time()
                    answer = client.post("/v1/retrieve", json={"queries": [QUERY]}).raise_for_status().json()
                    ids = [label["id"] for label in answer["results"][0]["labels"]]
                    observations.append((asked_at, time.time(), "item-1" in ids))
            return observations

        with ThreadPoolExecutor(CLIENTS) as pool:
            observations = [observation for of_client in pool.map(ask, range(CLIENTS)) for observation in of_client]
        process.terminate()
    assert (before, change.timestamp()) == (False, begin)
    for asked_at, answered, is_seen in observations:
        if is_seen:
            assert answered >= begin
            assert asked_at < begin + SECONDS
        else:
            assert asked_at < begin or answered >= begin + SECONDS
    times = [(is_seen, asked_at >= begin + SECONDS) for asked_at, _, is_seen in observations]
    assert {*times} >= {(False, False), (True, False), (False, True)}
