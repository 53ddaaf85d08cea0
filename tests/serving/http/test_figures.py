"""What counts: previews do in nothing; the verdict tells what is broken, and no longer than it is."""

from __future__ import annotations

import math
import re
from pathlib import Path

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from longtail.serving.core.follower import ReleaseFollower
from tests.serving.client import check_error, open_client, read_series
from tests.serving.http.test_routes import ids, retrieve
from tests.serving.plane import PlaneLoader, plane_retriever, plane_settings
from tests.serving.process import until


def test_previews_are_answered_and_in_no_figure(app: Starlette, client: httpx.Client) -> None:
    before = read_series(client)
    first = retrieve(client, preview=True)
    assert ids(first) == ids(retrieve(client, preview=True)) == ["a", "c/é", "b"]
    assert client.post("/v1/similar", json={"id": "a", "exclude": ["z"], "preview": True}).status_code == 200
    check_error(retrieve(client, preview=True, release="no such"), 404, "unknown_release", "release")
    # Nobody saw the answer, so there is nothing to say of it.
    assert "answer_id" not in first.json()["results"][0]
    monitored, after = app.state.service.monitoring.report(), read_series(client)
    assert after.pop('longtail_previews_total{status="2xx"}') == 3
    assert after.pop('longtail_previews_total{status="4xx"}') == 1
    for name, value in before.items():
        # The scrape itself, and what a process holds.
        if name in after and not re.search('route="/metrics"|longtail_worker_|_disk_free_', name):
            assert after[name] == value or math.isnan(value), name
    for window in monitored["windows"].values():
        assert (window["queries"], window["requests"]["count"], window["requests"]["p99_ms"]) == (0, 0, None)
        assert window["dials"] == {"bias_removal": [], "popularity_weight": [], "cooccurrence": []}
        assert window["recall"]["feedback"]["all"]["positives"] == 0
    assert monitored["series"]["at"] == []
    retrieve(client, preview=False)
    assert read_series(client)["longtail_queries_total"] == 1


def test_the_verdict_names_failures(tmp_path: Path, app: Starlette, client: httpx.Client) -> None:
    follower = ReleaseFollower(tmp_path, app.state.service, load=PlaneLoader("broken"))

    def broken() -> list[str]:
        verdict = client.get("/v1/monitoring").json()["verdict"]
        return [finding["signal"] for finding in verdict["findings"] if finding["severity"] == "act"]

    (tmp_path / "CURRENT").write_text('{"current": "plane-2"}')
    follower.check()
    assert broken() == []
    (tmp_path / "CURRENT").write_text('{"current": "broken"}')
    follower.check()
    assert broken() == ["refused_release"]
    assert read_series(client)['longtail_verdict{signal="refused_release"}'] == 2
    app.state.service.set_unreadable(True)
    verdict = client.get("/v1/monitoring").json()["verdict"]
    assert (broken(), verdict["severity"]) == (["label_log", "refused_release"], "act")
    assert verdict["headline"].startswith("The changes of labels cannot be read")
    app.state.service.set_unreadable(False)
    (tmp_path / "CURRENT").write_text('{"current": "plane-2"}')
    follower.check()
    assert broken() == []


def test_an_unreadable_label_log_is_reported_until_readable(
    tmp_path: Path, app: Starlette, client: httpx.Client
) -> None:
    service = app.state.service
    assert client.delete("/v1/labels/b").status_code == 200
    stored = service.settings.state_directory / "labels.sqlite"
    written = stored.with_name("written")
    (tmp_path / "CURRENT").write_text('{"current": "plane-1"}')
    follower = ReleaseFollower(tmp_path, service, load=PlaneLoader("broken"))
    follower.start()

    def signals() -> set[str]:
        return {finding["signal"] for finding in client.get("/v1/monitoring").json()["verdict"]["findings"]}

    try:
        stored.rename(written)
        stored.write_bytes(b"\0" * 200)
        until(lambda: "label_log" in signals(), "the verdict to say that they cannot be read")
        written.replace(stored)
        until(lambda: "label_log" not in signals(), "the verdict to say no more of it")
    finally:
        follower.stop()


@pytest.mark.parametrize(("groups", "warned"), [({"user": [], "town": ["7"], "land": []}, 1), ({"user": []}, 0)])
def test_a_group_that_the_release_lacks_is_warned_of_once(
    groups: dict[str, list[str]], warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(plane_settings(tmp_path, groups=groups), retriever=plane_retriever())
    with open_client(app) as client:
        for _ in range(2):
            assert client.post("/v1/retrieve", json={"queries": [{"features": {"user": "east"}}]}).status_code == 200
    message = "release plane-1 has no query feature 'land', 'town': every query counts as missing"
    assert caplog.text.count(message) == warned
    assert caplog.text.count("LONGTAIL_GROUPS") == warned


def test_answers_are_counted_by_groups_of_queries(tmp_path: Path) -> None:
    """`seen` tells new users from others; ids, numbers and vectors have a value each, and series are there at 0."""
    groups = {"user": ["east", "west"], "seen": [], "age": ["7"]}
    app = create_app(plane_settings(tmp_path, groups=groups), retriever=plane_retriever())
    with open_client(app) as client:
        before = {name: value for name, value in read_series(client).items() if name.startswith("longtail_group_")}
        assert len(before) == (4 + 2 + 3) * (1 + 4)
        assert not any(before.values())
        query = [
            {"features": {"user": "east", "seen": ["north"], "age": 7}, "k": 3},
            {"features": {"user": "east", "seen": [], "age": 8.5}, "k": 2, "buckets": ["tail"]},
            {"features": {"user": "north"}, "k": 1},
            {"vector": [1, 0], "k": 1},
        ]
        assert client.post("/v1/retrieve", json={"queries": query}).status_code == 200
        assert client.post("/v1/retrieve", json={"queries": query[:1], "preview": True}).status_code == 200
        assert client.post("/v1/similar", json={"id": "a"}).status_code == 200
        after = read_series(client)

    def queries(group: str) -> dict[str, float]:
        series_name = re.compile(rf'longtail_group_queries_total{{group="{group}",value="(.*)"}}')
        return {match[1]: count for name, count in after.items() if (match := series_name.fullmatch(name))}

    assert queries("user") == {"east": 2, "west": 0, "other": 1, "missing": 1}
    assert queries("seen") == {"given": 1, "missing": 3}
    assert queries("age") == {"7": 1, "other": 1, "missing": 2}
    answer = {
        name: after[f'longtail_group_exposures_total{{bucket="{name}",group="user",value="east"}}']
        for name in ("head", "torso", "tail", "new")
    }
    assert answer == {"head": 1, "torso": 1, "tail": 3 - 2 + 2, "new": 0}
