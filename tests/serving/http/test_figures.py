"""What counts: previews do in nothing; the verdict tells what is broken, and no longer than it is."""

from __future__ import annotations

import math
import re
from pathlib import Path

import httpx2 as httpx
from starlette.applications import Starlette

from longtail.serving.core.follower import ReleaseFollower
from tests.serving.http.test_routes import Loads, ids, refused, retrieve, series
from tests.serving.process import until


def test_previews_are_answered_and_in_no_figure(app: Starlette, client: httpx.Client) -> None:
    before, figures = series(client), app.state.service.monitoring.figures
    first = retrieve(client, preview=True)
    assert ids(first) == ids(retrieve(client, preview=True)) == ["a", "c/é", "b"]
    assert client.post("/v1/similar", json={"id": "a", "exclude": ["z"], "preview": True}).status_code == 200
    refused(retrieve(client, preview=True, release="no such"), 404, "unknown_release", "release")
    # Nobody saw the answer, so there is nothing to say of it.
    assert "answer_id" not in first.json()["results"][0]
    monitored, after = figures.report(), series(client)
    assert after.pop('longtail_previews_total{status="2xx"}') == 3
    assert after.pop('longtail_previews_total{status="4xx"}') == 1
    for name, value in before.items():
        # The scrape itself, and what a process holds.
        if name in after and not re.search('route="/metrics"|longtail_worker_|_disk_free_', name):
            assert after[name] == value or math.isnan(value), name
    for window in monitored["windows"].values():
        assert (window["queries"], window["requests"]["count"], window["requests"]["p99_ms"]) == (0, 0, None)
        assert window["dials"] == {"bias_removal": [], "popularity_weight": []}
        assert window["recall"]["feedback"]["all"]["positives"] == 0
    assert monitored["series"]["at"] == []
    retrieve(client, preview=False)
    assert series(client)["longtail_queries_total"] == 1


def test_the_verdict_says_what_is_broken(tmp_path: Path, app: Starlette, client: httpx.Client) -> None:
    follower = ReleaseFollower(tmp_path, app.state.service, load=Loads())

    def broken() -> list[str]:
        verdict = client.get("/v1/monitoring").json()["verdict"]
        return [found["signal"] for found in verdict["findings"] if found["severity"] == "act"]

    (tmp_path / "CURRENT").write_text('{"current": "plane-2"}')
    follower.check()
    assert broken() == []
    (tmp_path / "CURRENT").write_text('{"current": "broken"}')
    follower.check()
    assert broken() == ["refused_release"]
    assert series(client)['longtail_verdict{signal="refused_release"}'] == 2
    app.state.service.set_unreadable(True)
    verdict = client.get("/v1/monitoring").json()["verdict"]
    assert (broken(), verdict["severity"]) == (["label_log", "refused_release"], "act")
    assert verdict["headline"].startswith("The changes of labels cannot be read")
    app.state.service.set_unreadable(False)
    (tmp_path / "CURRENT").write_text('{"current": "plane-2"}')
    follower.check()
    assert broken() == []


def test_a_log_of_label_changes_that_cannot_be_read_is_told_while_it_is(
    tmp_path: Path, app: Starlette, client: httpx.Client
) -> None:
    service = app.state.service
    assert client.delete("/v1/labels/b").status_code == 200
    kept = service.settings.state_directory / "labels.sqlite"
    written = kept.with_name("written")
    (tmp_path / "CURRENT").write_text('{"current": "plane-1"}')
    follower = ReleaseFollower(tmp_path, service, load=Loads())
    follower.start()

    def told() -> set[str]:
        return {found["signal"] for found in client.get("/v1/monitoring").json()["verdict"]["findings"]}

    try:
        kept.rename(written)
        kept.write_bytes(b"\0" * 200)
        until(lambda: "label_log" in told(), "the verdict to say that they cannot be read")
        written.replace(kept)
        until(lambda: "label_log" not in told(), "the verdict to say no more of it")
    finally:
        follower.stop()
