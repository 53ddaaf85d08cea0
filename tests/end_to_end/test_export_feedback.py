"""A service's feedback becomes training data: exported while it runs and afterwards, read by a recipe's `[data]`."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.client import Answer, Client, Feedback, Interaction, NewLabel, Query
from longtail.index import Releases, build
from longtail.serving.export import ExportError, _column_type, _kinds, _value, read_window
from tests.bundles import make_bundle
from tests.serving.process import server, until

ADMIN = "admin-key-of-sixteen"


def export(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longtail.serving", "export-feedback", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def shown(answer: Answer, query: int = 0) -> dict[str, tuple[int, float]]:
    """Place and propensity of every label of a result."""
    return {
        label.id: (place, pytest.approx(label.propensity)) for place, label in enumerate(answer.results[query].labels)
    }


def test_feedback_trains_the_next_model(tmp_path: Path) -> None:
    make_bundle(label_tower=True).write(tmp_path / "bundle")
    releases = tmp_path / "releases"
    build(tmp_path / "bundle", releases, spec="flat", name="first")
    Releases(releases).publish("first")
    out = tmp_path / "feedback.parquet"
    settings = {"admin_keys": ADMIN, "api_keys": "asker-key-of-sixteen", "workers": 2}
    with server(releases, tmp_path / "log", **settings) as process:
        process.wait_until_ready(90)
        with Client(process.url, ADMIN) as client:
            client.add_labels([NewLabel(f"new-{n}", {"genres": [f"g{n}"], "year": 0}) for n in range(5)])
            queries = [
                Query({"user_id": f"u{user}", "history": ["item-1", 2]}, k=6, bias_removal=0.25, explore={"new": 2})
                for user in range(2)
            ]
            until(
                lambda: all(
                    result.exploration is not None and result.exploration.slots == {"new": 2}
                    for _ in range(8)
                    for result in client.retrieve(queries, preview=True).results
                ),
                "every worker to have the new labels",
            )
            answer = client.retrieve(queries)
            for result in answer.results:
                assert sum(label.bucket == "new" for label in result.labels) >= 2
                assert result.exploration is not None
                assert result.exploration.candidates == {"new": 5}
                assert sum(label.propensity < 1 for label in result.labels) in (1, 2)
            drawn = next(label.id for label in answer.results[1].labels if label.propensity < 1)
            kept = next(label.id for label in answer.results[0].labels if label.propensity == 1)
            near = client.similar("item-3", k=2)
            client.feedback(
                [
                    Feedback(answer_id=answer.answer_id, labels=[kept, "never shown"]),
                    Feedback(answer_id=answer.answer_id, labels=[drawn], query=1),
                    Feedback(answer_id=answer.answer_id, labels=[drawn], query=1, event="purchase", weight=10.0),
                    Feedback(answer_id=answer.answer_id, labels=[drawn], query=1, event="purchase", weight=10.0),
                    Feedback(request_id=near.request_id, labels=[near.results[0].labels[0].id]),
                    Feedback(answer_id="nobody", labels=["item-9"]),
                ]
            )
            client.interactions(Interaction({"user_id": 7}, ["item-5"], event="view", weight=0.5))
            metrics = client._http.get("/metrics").text
            assert 'longtail_explored_total{bucket="new"} 4.0' in metrics
            # One label found, however often it was chosen. The report may be a second old.
            until(lambda: _found(client) == (3, 3), "feedback to be joined and counted")
            exported = export(releases, "--out", out)
        assert process.terminate() == 0
    assert "left out: 1 labels whose query has no features" in exported.stdout, exported.stderr + exported.stdout
    rows = {(row["label_id"], row["event"]): row for row in pq.read_table(out).to_pylist()}
    assert set(rows) == {
        (kept, "click"), ("never shown", "click"), (drawn, "click"), (drawn, "purchase"), ("item-5", "view"),
    }  # fmt: skip
    for label, query in ((kept, 0), (drawn, 1)):
        row = rows[label, "click"]
        assert (row["position"], row["propensity"]) == shown(answer, query)[label]
        assert (row["user_id"], row["history"]) == (f"u{query}", ["item-1", "2"])
        assert (row["answer_id"], row["query"], row["release"]) == (answer.answer_id, query, "first")
        assert row["request_id"] == answer.request_id
        assert (row["bias_removal"], row["popularity"], row["source"]) == (0.25, 0.0, "answer")
        assert abs(datetime.now(UTC) - row["time"]) < timedelta(minutes=5)
    bought, missed, organic = rows[drawn, "purchase"], rows["never shown", "click"], rows["item-5", "view"]
    assert bought["weight"] == 10
    assert bought["debiased_weight"] == pytest.approx(10 / bought["propensity"])
    assert (missed["position"], missed["propensity"]) == (None, 1)
    assert (organic["source"], organic["user_id"], organic["weight"]) == ("organic", "7", 0.5)
    # From the folder alone, all of it, under a recipe's own name for labels.
    again = export("--state", releases / ".state", "--out", out, "--since", "1h", "--label-id", "item_id", "--all")
    assert "6 labels chosen" in again.stdout, again.stderr + again.stdout
    assert "left out: 1 labels of the last minute" in again.stdout
    assert _read_by_a_recipe(out) == (5, {"u0", "u1", "7"})
    assert "0 labels chosen" in export(releases, "--until", "1h", "--out", out).stdout


def _found(client: Client) -> tuple[int, int]:
    """Positives and hits of feedback in the last five minutes, of all buckets."""
    found = client.monitoring()["windows"]["5m"]["recall"]["feedback"]["all"]
    return found["positives"], found["hits"]


def _read_by_a_recipe(out: Path) -> tuple[int, set[str]]:
    """Pairs and queries that the trainer finds in the file."""
    from longtail.trainer.config import DataConfig
    from longtail.trainer.data.dataset import load_dataset

    table = pq.read_table(out)
    clean = out.with_name("clean.parquet")
    pq.write_table(table.filter(table["user_id"].is_valid()), clean)
    data = DataConfig(train=clean, query_id="user_id", label_id="item_id", timestamp="time", weight="debiased_weight")
    dataset = load_dataset(data, seed=0)
    return len(dataset.train), set(dataset.query_ids.to_pylist())


@pytest.mark.parametrize(
    ("values", "kind", "written"),
    [
        ([["a", 2], None], pa.list_(pa.string()), [["a", "2"], None]),
        ([[0, 0.5], [1, 0]], pa.list_(pa.float64()), [[0, 0.5], [1, 0]]),
        ([[1, 2], 3, "x"], pa.list_(pa.string()), [["1", "2"], ["3"], ["x"]]),
        ([["a"], {"b": 0.5}], pa.map_(pa.string(), pa.float64()), [[("a", 1)], [("b", 0.5)]]),
        ([{"ids": ["a", 2], "times": [3, 4]}, ["b"]], pa.list_(pa.string()), [["a", "2"], ["b"]]),
        ([{"ids": 0.5, "a": 2}], pa.map_(pa.string(), pa.float64()), [[("ids", 0.5), ("a", 2)]]),
        ([1, 2.5], pa.float64(), [1, 2.5]),
        ([1, 2**70], pa.string(), ["1", str(2**70)]),
    ],
)
def test_a_column_holds_every_value_of_its_feature(values: list[object], kind: pa.DataType, written: object) -> None:
    found = _column_type(set().union(*map(_kinds, values)))

    assert found == kind
    assert pa.array([_value(value, found) for value in values], found).to_pylist() == written


def test_times_and_places_that_are_none(tmp_path: Path) -> None:
    assert read_window("7d", None, 1e9) == (1e9 - 7 * 86_400, 1e9)
    assert read_window("1970-01-02", "1970-01-02T02:00:00+01:00", 1e9) == (86_400, 86_400 + 3600)
    with pytest.raises(ExportError, match="--since: expected ISO 8601, or an age"):
        read_window("last week", None, 1e9)
    with pytest.raises(ExportError, match="before --until"):
        read_window("1h", "2h", 1e9)
    refused = export("--state", tmp_path, "--out", tmp_path / "out.parquet")
    assert refused.returncode == 2
    assert "expected feedback that can be read, found no feedback.sqlite" in refused.stderr
    assert not (tmp_path / "out.parquet").exists()
