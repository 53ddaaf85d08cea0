"""A service whose events go to Kafka, through an outage, and training data from its topic by docs/events.md."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import httpx2 as httpx
import pyarrow.parquet as pq
import pytest

from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.kafka import MockKafka
from tests.serving.process import until

DOCS = Path(__file__).parents[2] / "docs" / "events.md"


@pytest.fixture
def kafka() -> Iterator[MockKafka]:
    kafka = MockKafka()
    yield kafka
    kafka.stop()


@pytest.mark.process
def test_acknowledged_events_reach_topic_and_export(tmp_path: Path, kafka: MockKafka) -> None:
    releases = publish_bundle(make_bundle(), tmp_path)
    acknowledged: set[str] = set()
    settings = {"workers": 2, "events": f"kafka://{kafka.brokers}/events?message.timeout.ms=2000", "answer_share": 1}
    with server(releases, tmp_path / "log", **settings) as process, httpx.Client(base_url=process.url) as client:
        process.wait_until_ready(90)

        def answer_id() -> str:
            answer = client.post("/v1/retrieve", json={"queries": [{"features": {"user_id": "u1"}, "k": 5}]})
            assert answer.status_code == 200
            return str(answer.json()["results"][0]["answer_id"])

        def choose(key: str, answer: str) -> int:
            event = {"answer_id": answer, "labels": ["item-1"], "features": {"user_id": 1}, "idempotency_key": key}
            response = client.post("/v1/feedback", json={"events": [event]}, timeout=30)
            if response.status_code == 200:
                acknowledged.add(key)
            else:
                assert (response.status_code, response.json()["error"]["type"]) == (503, "storage")
            return response.status_code

        for number in range(10):
            assert choose(f"before-{number}", answer_id()) == 200
        kafka.take_down()
        assert choose("lost", answer_id()) == 503
        until(lambda: "longtail_events_dropped_total 0.0" not in client.get("/metrics").text, "answers to be dropped")
        kafka.bring_up()
        until(lambda: choose("again", answer_id()) == 200, "the brokers to be found again")
        assert choose("again", answer_id()) == 200
        assert process.terminate() == 0
    topic, events = tmp_path / "topics" / "longtail-events", tmp_path / "events"
    topic.mkdir(parents=True)
    (topic / "part.json").write_bytes(b"\n".join(kafka.messages("events").elements()))
    events.mkdir()
    (sql,) = re.findall(r"```text\n(COPY .*?)```", DOCS.read_text(), re.DOTALL)
    duckdb.sql(sql.replace("'topics/", f"'{tmp_path}/topics/").replace("'events/", f"'{events}/"))
    out = tmp_path / "out.parquet"
    command = [
        sys.executable,
        "-m",
        "longtail.serving",
        "export-feedback",
        releases,
        "--events",
        events,
        "--until",
        "0m",
    ]
    command += ["--out", out]
    exported = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert exported.returncode == 0, exported.stderr
    rows = pq.read_table(out).to_pylist()
    keys = [row["idempotency_key"] for row in rows]
    assert acknowledged <= set(keys) <= acknowledged | {"lost"}
    assert len(keys) == len(set(keys))
    assert {(row["user_id"], row["label_id"], row["position"] is None) for row in rows} <= {
        ("1", "item-1", True), ("1", "item-1", False),
    }  # fmt: skip
    assert all(len(row["impressions"]) == 5 for row in rows if row["idempotency_key"].startswith("before"))
