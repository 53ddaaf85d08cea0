"""A service's feedback becomes training data: exported while it runs and afterwards, read by a recipe's `[data]`."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest

from longtail.client import Client, Feedback, LongtailError, NewLabel, Query, Result
from longtail.serving.events.folder import read_lines
from longtail.serving.events.schema import event_json
from longtail.serving.export import export
from longtail.trainer.config import DataConfig
from longtail.trainer.data.loading import load_dataset
from tests.bundles import make_bundle
from tests.end_to_end.commands import longtail
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import until

ADMIN = "admin-key-of-sixteen"
FEATURES = {"user_id": "u1", "history": ["item-1", 2]}


def find_label(result: Result, label: str) -> tuple[int, float]:
    (match,) = [(i, answered.propensity) for i, answered in enumerate(result.labels) if answered.id == label]
    return match[0], pytest.approx(match[1], rel=1e-3)  # type: ignore[return-value]


def test_feedback_trains_the_next_model(tmp_path: Path) -> None:
    releases, out = publish_bundle(make_bundle(label_tower=True), tmp_path, "first"), tmp_path / "feedback.parquet"
    settings = {"admin_keys": ADMIN, "api_keys": "asker-key-of-sixteen", "workers": 2, "answer_share": 1}
    with server(releases, tmp_path / "log", **settings) as process:
        process.wait_until_ready(90)
        with Client(process.url, ADMIN) as client:
            client.add_labels([NewLabel(f"new-{n}", {"genres": [f"g{n}"], "year": 0}) for n in range(5)])
            query = Query(FEATURES, k=6, bias_removal=0.25, explore={"new": 2})

            def has_new() -> bool:
                (result,) = client.retrieve(query, preview=True).results
                return result.exploration is not None and result.exploration["slots"] == {"new": 2}

            until(lambda: all(has_new() for _ in range(8)), "every worker to have the new labels")
            first, second = client.retrieve([query, query]).results
            drawn = next(label.id for label in second.labels if label.propensity < 1)
            sure_label = next(label.id for label in first.labels if label.propensity == 1)
            (near,) = client.similar("item-3", k=2).results
            names = [str(result.answer_id) for result in (first, second, near)]
            events = [
                Feedback(names[0], [sure_label, "never shown"], FEATURES),
                Feedback(names[1], [drawn]),  # its features came with the question
                Feedback(names[1], [drawn], event="purchase", weight=10.0),
                Feedback(names[2], [near.labels[0].id]),  # and these were not known
            ]
            client.feedback(events)
        with Client(process.url, ADMIN) as client:  # maybe another worker
            client.feedback(events)
            client.feedback(Feedback(None, ["item-5"], {"user_id": 7}, event="view", weight=0.5))
            with pytest.raises(LongtailError, match=r"events\.1\.answer_id: .* changed or cut"):
                client.feedback([events[0], Feedback(names[0][:-5] + names[1][-5:], [sure_label])])

        def metrics() -> str:
            return httpx.get(f"{process.url}/metrics", headers={"X-API-Key": ADMIN}).text

        until(lambda: 'longtail_explored_total{bucket="new"} 4.0' in metrics(), "both workers to have counted")
        assert 'longtail_answer_ids_refused_total{reason="forged"} 1.0' in metrics()
        assert "left out: " in longtail("serving", "export-feedback", releases, "--out", out), "the last minute's"
        output = longtail("serving", "export-feedback", releases, "--out", out, "--until", "0m")
        assert process.terminate() == 0
    assert "left out: 1 labels whose query's features are not known" in output
    table = pq.read_table(out)
    rows = {(row["label_id"], row["event"]): row for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    assert set(rows) == {
        (sure_label, "click"), ("never shown", "click"), (drawn, "click"), (drawn, "purchase"), ("item-5", "view"),
    }  # fmt: skip
    for label, result in ((sure_label, first), (drawn, second)):
        row = rows[label, "click"]
        assert (row["position"], row["propensity"]) == find_label(result, label)
        assert (row["user_id"], row["history"]) == ("u1", ["item-1", "2"])
        assert row["impressions"] == [label.id for label in result.labels]
        assert (row["release"], row["bias_removal"], row["popularity"], row["source"]) == ("first", 0.25, 0.0, "answer")
        assert abs(datetime.now(UTC) - row["time"]) < timedelta(minutes=5)
    bought, missed, organic = rows[drawn, "purchase"], rows["never shown", "click"], rows["item-5", "view"]
    assert bought["weight"] == 10
    assert bought["debiased_weight"] == pytest.approx(10 / bought["propensity"])
    assert (missed["position"], missed["propensity"]) == (None, 1)
    assert (organic["source"], organic["user_id"], organic["weight"], organic["answer"]) == ("organic", "7", 0.5, None)
    # All of it; then of a time without any.
    assert {path.suffix for path in (releases / ".state/events").iterdir()} == {".parquet"}
    every = "--since", "1h", "--until", "0m", "--all"
    assert "6 labels chosen" in longtail("serving", "export-feedback", releases, "--out", out, *every)
    data = DataConfig(
        train=recorded(out), query_id="user_id", label_id="label_id", timestamp="time", weight="debiased_weight"
    )
    dataset = load_dataset(data, seed=0)
    assert (len(dataset.train), set(dataset.query_ids.to_pylist())) == (5, {"u1", "7"})
    assert "0 labels chosen" in longtail("serving", "export-feedback", releases, "--until", "1h", "--out", out)
    assert [(field.name, field.type) for field in pq.read_schema(out)] == [
        (column.name, column.type) for column in table.schema
    ]


def recorded(out: Path) -> Path:
    """The file without rows whose query is not known."""
    table, clean = pq.read_table(out), out.with_name("clean.parquet")
    pq.write_table(table.filter(table["user_id"].is_valid()), clean)
    return clean


def test_full_disk_refuses_feedback_only(tmp_path: Path) -> None:
    releases, disk = publish_bundle(make_bundle(label_tower=True), tmp_path, "first"), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk may be mounted: {mounted.stderr.decode()}")
    try:
        (disk / "ballast").write_bytes(bytes(1 << 20))
        with (
            server(releases, tmp_path / "log", events=disk / "events") as process,
            Client(process.url, retries=0) as client,
        ):
            process.wait_until_ready()
            (result,) = client.retrieve(features=FEATURES).results
            acknowledged = list[str]()

            def refusal(key: str) -> LongtailError | None:
                features = {"history": [f"item-{n}" for n in range(5_000)]}
                try:
                    client.feedback(Feedback(str(result.answer_id), [key], features, idempotency_key=key))
                except LongtailError as error:
                    return error
                acknowledged.append(key)
                return None

            refused = next(error for number in range(100) if (error := refusal(f"before-{number}")))
            assert (refused.status, refused.type) == (503, "storage")
            assert "could not be written to the disk" in refused.message
            assert all(refusal(f"refused-{number}") for number in range(20))
            assert len(client.retrieve(features=FEATURES).results[0].labels) == 10
            assert len(list((disk / "events").iterdir())) == 1
            (disk / "ballast").unlink()
            assert refusal("after") is None
            assert process.terminate() == 0
        export(releases, disk / "events", tmp_path / "out.parquet", window=(0, time.time() + 1))
        exported_labels = pq.read_table(tmp_path / "out.parquet")["label_id"].to_pylist()
        assert sorted(exported_labels) == sorted(acknowledged)
        assert "after" in acknowledged
        assert len(acknowledged) > 5
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.process
def test_events_dated_ahead_are_reported(tmp_path: Path) -> None:
    releases = publish_bundle(make_bundle(label_tower=True), tmp_path, "first")
    folder, out = tmp_path / "events", tmp_path / "feedback.parquet"
    folder.mkdir()
    now, days = time.time(), 86_400.0
    for name, at in (("true", now - 2 * days), ("ahead", now + 9 * days)):
        table, _ = read_lines(event_json(kind="organic", time=at, labels=["item-1"], features="{}") + b"\n")
        pq.write_table(table, folder / f"{name}.parquet")
        os.utime(folder / f"{name}.parquet", (at, at))
    with server(releases, tmp_path / "log", events=folder, events_days=4) as process:
        process.wait_until_ready(90)
        with Client(process.url) as client:
            client.feedback(Feedback(None, ["item-5"], {"user_id": 7}))
            findings = {}

            def is_said() -> bool:
                verdict = httpx.get(f"{process.url}/v1/monitoring").json()["verdict"]
                findings.update({finding["signal"]: finding for finding in verdict["findings"]})
                return "clock" in findings

            until(is_said, "the verdict to name the clock")
    assert findings["clock"]["severity"] == "watch"
    assert findings["clock"]["sentence"].startswith("Older events are dated up to 20")

    output = longtail("serving", "export-feedback", releases, "--events", folder, "--out", out, "--until", "0m")
    assert "2 labels chosen" in output
    assert "of these 1 are dated ahead of this machine's clock" in output
    ahead = datetime.fromtimestamp(now + 10 * days, UTC).isoformat()
    assert "3 labels chosen" in longtail(
        "serving", "export-feedback", releases, "--events", folder, "--out", out, "--until", ahead
    )
