"""Staging on the real service: two workers mirror what they are asked."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import pytest

from longtail.index import build, open_releases
from longtail.serving.core.mirror import StagedCounts
from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.serving.process import until

pytestmark = pytest.mark.process


def test_a_staged_release_gets_shadow_queries_then_is_published(tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        build(make_bundle(labels=60, seed=seed).write(tmp_path / name), tmp_path / "r", name=name)
    shelf = open_releases(tmp_path / "r")
    shelf.publish("first")
    with (
        server(shelf.root, tmp_path / "log", workers=2, mirror_share=1.0, poll_seconds=0.05) as process,
        httpx.Client(base_url=process.url) as client,
    ):
        process.wait_until_ready()
        shelf.stage("second")
        until(lambda: client.get("/v1/release/staged", headers={"Connection": "close"}).status_code == 200)

        def mirrored() -> bool:
            queries = [{"features": {"user_id": f"u{user}"}, "k": 5} for user in range(10)]
            answer = httpx.post(f"{process.url}/v1/retrieve", json={"queries": queries})
            assert answer.json()["release"] == "first"
            choice = {"features": {"user_id": "u3"}, "labels": ["item-3", "item-40"]}
            assert httpx.post(f"{process.url}/v1/feedback", json={"events": [choice]}).status_code in (200, 202)
            return StagedCounts.read_all(shelf.root / ".state", "second", "first").queries >= 100

        until(mirrored, seconds=30)
        counts = StagedCounts.read_all(shelf.root / ".state", "second", "first")
        assert 0 < counts.overlap < counts.queries
        assert sum(counts.exposures) == 5 * counts.queries == sum(counts.exposures_of_current)
        assert sum(counts.positives) > 0
        assert (shelf.root / ".state/staged").is_dir()
        shelf.publish("second")
        until(lambda: client.get("/v1/release").json()["name"] == "second")
        assert httpx.get(f"{process.url}/v1/release/staged").status_code == 404
