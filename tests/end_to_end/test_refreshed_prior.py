"""π* of a release is refreshed from later pairs: by the command, and by a service from its own events under load."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.index import LongtailIndexError, RefreshOptions, open_releases
from longtail.index.building.refresh import refresh as refresh_release
from longtail.index.errors import PriorsError, PublishedMeanwhileError
from longtail.serving import Settings, refresh as module
from longtail.serving.events.schema import event_json
from longtail.serving.refresh import refresh, refreshing
from longtail.trainer.config import recipe_toml
from tests.end_to_end.commands import fitted_and_published, longtail
from tests.end_to_end.killing import server
from tests.serving.process import children, until
from tests.trainer.test_prior import DAYS, FORECAST, recipe, write_log

RARE = "i7"
HISTORY = {"name": "seen", "kind": "history", "table": "item", "dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that ends now, its model in `model` and a release of it in `releases`."""
    root = tmp_path_factory.mktemp("refreshed")
    write_log(root, start=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=DAYS))
    of = recipe(root, FORECAST, query={"features": [{"name": "user", "kind": "id", "dim": 8}, HISTORY]})
    (root / "recipe.toml").write_text(recipe_toml(of, root))
    fitted_and_published(root)
    return root


def get_first_release(folder: Path) -> str:
    """The release that was built after training."""
    return min(open_releases(folder / "releases").names())


def later(folder: Path, users: list[str]) -> Path:
    """Write a log in which each of some users chooses the rare label now."""
    now = datetime.datetime.now(datetime.UTC)
    rows = {"user": users, "item": [RARE] * len(users), "at": [now] * len(users)}
    pq.write_table(pa.table(rows), folder / "later.parquet")
    return folder / "later.parquet"


def read_share(folder: Path, name: str) -> float:
    """π* of the rare label in a release."""
    labels = open_releases(folder / "releases").open(name).bundle.labels
    assert labels.log_popularity is not None
    return float(np.exp(labels.log_popularity[labels.rows_by_id[RARE]]))


def test_refresh_command_updates_prior_and_lists(folder: Path) -> None:
    log = later(folder, [f"u{user}" for user in range(300)])
    output = longtail("index", "refresh", folder / "releases", log, "--every", "90m")

    name = output.partition(":")[0]
    assert read_share(folder, name) > 10 * read_share(folder, get_first_release(folder))
    second = open_releases(folder / "releases").open(name).bundle
    assert second.forecast is not None
    assert {*second.forecast.settings.nats} >= {"count", "decayed"}  # of the 300 pairs
    assert second.forecast.settings.ahead == 5400
    assert listed(second) > listed(open_releases(folder / "releases").open(get_first_release(folder)).bundle) + 0.1


def listed(bundle: Bundle) -> float:
    """The share of lists of five at λ = 0, μ = 1 that hold the rare label."""
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.0, 1.0)
    best = np.argsort(-queries @ bundle.rows().T, axis=1)[:, :5]
    return float((best == bundle.labels.rows_by_id[RARE]).any(axis=1).mean())


def test_repeated_events_of_one_client_count_once(folder: Path) -> None:
    all_users = [f"u{user}" for user in range(300)]
    for name, users in (("burst", all_users + ["u1"] * 1000), ("single", all_users)):
        refresh_release(folder / "releases", later(folder, users), source=get_first_release(folder), name=name)

    np.testing.assert_allclose(read_share(folder, "burst"), read_share(folder, "single"), rtol=1e-3)
    assert read_share(folder, "single") > 10 * read_share(folder, get_first_release(folder))


def test_unattended_refresh_refuses_sudden_popularity(folder: Path) -> None:
    log, names = later(folder, [f"u{user}" for user in range(2000)]), open_releases(folder / "releases").names()
    with pytest.raises(PriorsError, match=r"share .* 55 times .* that of .i7. go from [\d.e-]+ to 0\.\d+"):
        refresh_release(
            folder / "releases", log, RefreshOptions(unattended=True), source=get_first_release(folder), name="flood"
        )
    assert open_releases(folder / "releases").names() == names
    refresh_release(folder / "releases", log, source=get_first_release(folder), name="flood")
    assert read_share(folder, "flood") > 55 * read_share(folder, get_first_release(folder))


def test_labels_that_are_merged_have_a_forecast(folder: Path) -> None:
    forecast = Bundle.load(folder / "model").forecast
    assert forecast is not None
    features = [{"category": "c1", "price": 2.0}, {"category": "c5", "price": 55.0, "listed": "2000-01-01"}]
    rows = np.r_[4:10, len(forecast.first) + np.arange(2)]
    more = forecast.with_labels(np.array([3, -1]), features, [forecast.settings.until] * 2).take(rows)

    np.testing.assert_array_equal(more.sums[-2], forecast.sums[3])
    assert not more.sums[-1].any()
    assert np.isinf(more.first[-1])
    assert more.about["category"].to_pylist()[-1] == "c5"
    assert np.isfinite(more.log_popularity()).all()


def test_refresh_without_later_pairs_is_refused(folder: Path) -> None:
    with pytest.raises(PriorsError, match="expected pairs later than those it knows"):
        refresh_release(folder / "releases", before_test(folder), source=get_first_release(folder))
    in_future = pq.read_table(later(folder, ["u1", "u2"]))
    ahead = pa.array([datetime.datetime(2086, 1, 1, tzinfo=datetime.UTC)] * 2)
    pq.write_table(in_future.set_column(2, "at", ahead), folder / "ahead.parquet")
    with pytest.raises(PriorsError, match="times between 1990 and tomorrow, in most rows, found 2 of 2 rows without"):
        refresh_release(folder / "releases", folder / "ahead.parquet", source=get_first_release(folder))
    with pytest.raises(PublishedMeanwhileError, match="expected another to be published still"):
        open_releases(folder / "releases").publish(get_first_release(folder), instead_of="another")


def test_a_refresh_without_events_makes_no_release(folder: Path, tmp_path: Path) -> None:
    settings = Settings(releases=folder / "releases", state=tmp_path, record_features=True)
    (tmp_path / "events").mkdir()
    names = open_releases(folder / "releases").names()
    with pytest.raises(PriorsError, match="expected pairs later than those it knows"):
        refresh(settings)
    assert open_releases(folder / "releases").names() == names
    assert not [path for path in (folder / "releases").iterdir() if path.name.endswith(".bundle")]


def test_an_event_at_the_end_of_a_refresh_counts_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "releases", tmp_path / "releases")
    releases, end = open_releases(tmp_path / "releases"), int(time.time()) - 60
    releases.publish(get_first_release(folder))
    lines = [
        event_json(
            kind="organic", time=end + micros / 1e6, labels=["i8"], event="click", features=f'{{"user": "{user}"}}'
        )
        for user, micros in (("u1", 122), ("u2", 123), ("u3", 124))
    ]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "of-an-end.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    settings = Settings(releases=releases.root, state=tmp_path, record_features=True)
    rows, counts = releases.open(get_first_release(folder)).bundle.labels.rows_by_id, list[float]()
    before = releases.open(get_first_release(folder)).bundle.forecast
    for now in (end + 5 + 123e-6, end + 8.0):
        clock = SimpleNamespace(
            time=lambda now=now: now, gmtime=lambda now=now: time.gmtime(now), strftime=time.strftime
        )
        monkeypatch.setattr("longtail.serving.refresh.time", clock)
        after = releases.open(refresh(settings)).bundle.forecast
        assert before is not None
        assert after is not None
        decay = 0.5 ** ((after.settings.until - before.settings.until) / before.settings.half_lives[0])
        counts.append(after.sums[rows["i8"], 0] - before.sums[rows["i8"], 0] * decay)
        before = after

    assert counts == pytest.approx([2, 1], rel=1e-3)


def test_client_is_recognised_by_id_or_history(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "releases", tmp_path / "releases")
    releases, now = open_releases(tmp_path / "releases"), time.time() - 60
    releases.publish(get_first_release(folder))
    clicks = [({"seen": ["i3"] + [RARE] * click}, RARE) for click in range(300)]  # the history grows with each click
    clicks += [({"user": "u1", "seen": [f"i{click % 40}"]}, "i8") for click in range(300)]
    clicks += [({"user": f"u{user}", "seen": ["i9"]}, "i9") for user in range(30)]
    clicks += [({"user": "", "seen": [f"i{visitor + 11}"]}, "i10") for visitor in range(20)]  # an empty id is none
    lines = [
        event_json(kind="organic", time=now - 600 + click, labels=[label], event="click", features=json.dumps(features))
        for click, (features, label) in enumerate(clicks)
    ]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "of-clients.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    settings = Settings(releases=releases.root, state=tmp_path, record_features=True, refresh="1h")
    before, after = (releases.open(name).bundle.forecast for name in (get_first_release(folder), refresh(settings)))

    assert before is not None
    assert after is not None
    assert after.settings.ahead == 3600
    decay = 0.5 ** ((after.settings.until - before.settings.until) / np.array(before.settings.half_lives[:5]))
    rows = [
        releases.open(get_first_release(folder)).bundle.labels.rows_by_id[label] for label in (RARE, "i8", "i9", "i10")
    ]
    added = (after.sums[:, :5] - before.sums[:, :5] * decay)[rows]
    assert (added[:2] <= 1).all()
    np.testing.assert_allclose(added, [[1] * 5, [1] * 5, [30] * 5, [20] * 5], rtol=0.02)


@pytest.mark.process
def test_failed_refreshes_are_retried_with_backoff(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "releases", tmp_path / "releases")
    settings = Settings(releases=tmp_path / "releases", state=tmp_path, record_features=True, refresh=0.2)
    (tmp_path / "events").mkdir()
    open_releases(settings.releases).publish(get_first_release(folder))

    def find_child(other_than: int) -> int:
        until(lambda: any(it.pid != other_than for it in multiprocessing.active_children()), seconds=30)
        return multiprocessing.active_children()[0].pid or 0

    with refreshing(settings):
        killed, waits = 0, list[float]()
        for attempts in (1, 2, 3):
            began, killed = time.monotonic(), find_child(killed)
            waits.append(time.monotonic() - began)
            os.kill(killed, signal.SIGKILL)
            expected = (
                rf"since 20\d\d-.* UTC: {attempts} attempts? .*failed, most recently: its process ended with -9\.$"
            )
            until(lambda: _says(settings.refresh_problem, expected), seconds=30)  # noqa: B023
        assert waits[2] > 0.7  # 4 intervals
        until(lambda: not settings.refresh_problem.exists(), seconds=60)  # there is nothing new, which is no failure
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("interval", [None, 3600.0])
def test_service_start_clears_the_refresh_problem(tmp_path: Path, interval: float | None) -> None:
    settings = Settings(releases=tmp_path / "releases", state=tmp_path / "state", refresh=interval)
    with refreshing(settings):
        assert not settings.refresh_problem.exists(), "no state yet"
    settings.refresh_problem.parent.mkdir(exist_ok=True)
    settings.refresh_problem.write_text(
        "Forecast, co-occurrence and exposure have not been refreshed since 2026-11-01."
    )
    with refreshing(settings):
        assert not settings.refresh_problem.exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LongtailIndexError(200_000 * "é"), 10_000 * "é"),
        (OSError(5, "/var/secret"), "OSError, of which the service's own log says more"),
        (TypeError("postgresql://user:password@host"), "TypeError, of which the service's own log says more"),
    ],
    ids=["long", "a file", "unexpected"],
)
def test_refresh_failure_is_cut_and_names_no_files(
    error: Exception, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    os.set_blocking(sender.fileno(), False)  # a full pipe is an error then, where the process would wait for ever

    def fail(_: Settings) -> str:
        raise error

    monkeypatch.setattr(module, "refresh", fail)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module.logs, "configure", lambda _: None)
    module._refresh_once(Settings(releases=tmp_path, state=tmp_path), sender)
    assert receiver.recv() == expected


def _says(file: Path, expected: str) -> bool:
    return file.exists() and re.search(expected, file.read_text()) is not None


@pytest.mark.nightly
@pytest.mark.process
def test_verdict_reports_a_killed_refresh(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "releases", tmp_path / "releases")
    open_releases(tmp_path / "releases").publish(get_first_release(folder))
    with (
        server(tmp_path / "releases", tmp_path / "server.log", refresh="2s", workers=2) as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        running.wait_until_ready()

        def findings() -> dict[str, str]:
            findings = http.get("/v1/monitoring").json()["verdict"]["findings"]
            return {finding["signal"]: f"{finding['severity']}: {finding['sentence']}" for finding in findings}

        others = set(children(running.process.pid))

        def kill_the_refresher() -> bool:
            for child in set(children(running.process.pid)) - others:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            return "2 attempts in a row failed, most recently: its process ended with -9" in findings().get(
                "refresh", ""
            )

        until(kill_the_refresher, seconds=60)
        assert findings()["refresh"].startswith(
            "watch: Forecast, co-occurrence and exposure have not been refreshed since 20"
        )
        assert 'longtail_verdict{signal="refresh"} 1.0' in http.get("/metrics").text
        until(lambda: "refresh" not in findings(), seconds=60)  # an attempt that is left alone


@pytest.mark.process
def test_service_does_not_refresh_after_a_rollback(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "releases", tmp_path / "releases")
    releases = open_releases(tmp_path / "releases")
    refresh_release(releases.root, later(folder, ["u1", "u2"]), name="again", source=get_first_release(folder))
    releases.publish("again")
    assert releases.rollback() == get_first_release(folder)
    settings = Settings(releases=releases.root, state=tmp_path, refresh=0.05)

    def count_warnings() -> int:
        return caplog.text.count("not refreshed after a rollback, until `longtail-index publish`")

    with refreshing(settings):
        until(count_warnings, seconds=10)
        time.sleep(0.5)
        assert not multiprocessing.active_children()
        assert _says(settings.refresh_problem, "after a rollback")
        releases.publish("again")
        until(multiprocessing.active_children, seconds=30)
    assert count_warnings() == 1
    assert releases.current() == "again"


def before_test(folder: Path) -> Path:
    """Write the first half of the log."""
    log = pq.read_table(folder / "log.parquet")
    pq.write_table(log.slice(0, len(log) // 2), folder / "half.parquet")
    return folder / "half.parquet"


@pytest.mark.process
@pytest.mark.nightly
def test_a_service_refreshes_its_prior_under_load(folder: Path) -> None:
    with (
        server(folder / "releases", folder / "server.log", refresh="5s") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        running.wait_until_ready()
        nats = http.get("/v1/release").json()["forecast"]["nats"]
        assert nats["forecast"] > nats["decayed"] > nats["count"]

        added = {"id": "brand-new", "features": {"category": "c5", "price": 58.0}}
        answer = http.post("/v1/labels", json={"labels": [added]})
        assert answer.status_code == 200, answer.text

        def log_popularity(id_: str) -> float:
            return float(http.get(f"/v1/labels/{id_}").json()["log_popularity"])

        least = min(log_popularity(f"i{item}") for item in range(40))
        assert log_popularity("brand-new") > least + 1
        before, stop, failed, releases = log_popularity(RARE), Event(), list[str](), set[str]()

        def ask() -> None:
            with httpx.Client(base_url=running.url, timeout=30) as client:
                while not stop.is_set():
                    answer = client.post("/v1/retrieve", json={"queries": [{"features": {"user": "u1"}}]})
                    if answer.status_code == 200:
                        releases.add(answer.json()["release"])
                    else:
                        failed.append(answer.text)

        asking = Thread(target=ask)
        asking.start()
        try:
            labels = [RARE if user < 12 else f"i{user % 40}" for user in range(200)]
            events = [{"features": {"user": f"u{user}"}, "labels": [label]} for user, label in enumerate(labels)]
            assert http.post("/v1/feedback", json={"events": events}).status_code == 200
            until(lambda: log_popularity(RARE) > before + 2 and len(releases) > 1, seconds=60)
        finally:
            stop.set()
            asking.join()

        assert not failed
        assert http.get("/v1/release").json()["forecast"]["until"] > time.time() - 60
        metrics = http.get("/metrics").text
        assert 0 < float(metrics.split("\nlongtail_prior_age_seconds ")[1].split()[0]) < 60
        assert 'longtail_prior_nats{kind="decayed"}' in metrics
        assert log_popularity("brand-new") > least + 1
    assert 1 <= sum(".refreshed-" in name for name in open_releases(folder / "releases").names()) <= 3
