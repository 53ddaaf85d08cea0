"""Feedback as training data: a typed column for every feature, a row for every label chosen, each once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Feature
from longtail.index import build, open_releases
from longtail.serving import export as module
from longtail.serving.errors import StateError
from longtail.serving.events.folder import DAMAGED
from longtail.serving.events.schema import event_json
from longtail.serving.export import FeedbackExportError, export, read_window
from tests.bundles import make_bundle
from tests.events import write_events
from tests.serving.monitoring.shop import NOON

FEATURES = [
    Feature(name="user", kind="id", vocabulary="users"),
    Feature(name="seen", kind="history", vocabulary="users", max_length=2),
    Feature(name="tags", kind="bag", vocabulary="users", max_length=3),
    Feature(name="words", kind="text", hash_rows=11, max_length=3),
    Feature(name="age", kind="number"),
    Feature(name="taste", kind="vector", dims=2, missing=None),
    Feature(name="day", kind="date", parts=["weekday"], reference="2026-01-01"),
    Feature(name="weight", kind="number"),
    Feature(name="joined", kind="bag", vocabulary="users", max_length=3, separator="'"),
]
TEXT, NUMBER, TEXTS = pa.string(), pa.float64(), pa.list_(pa.string())
TYPES = {
    "user": TEXT, "seen": TEXTS, "tags": TEXTS, "words": TEXT, "age": NUMBER, "taste": pa.list_(NUMBER),
    "day": TEXT, "feature_weight": NUMBER, "joined": TEXTS, "label_id": TEXT, "answer": TEXT, "idempotency_key": TEXT,
    "event": TEXT, "weight": NUMBER, "propensity": NUMBER, "debiased_weight": NUMBER, "position": pa.int32(),
    "bias_removal": pa.float32(), "popularity": pa.float32(), "cooccurrence": pa.float32(), "release": TEXT,
    "source": TEXT,
    "time": pa.timestamp("us", "UTC"), "arm": TEXT, "run": TEXT, "unit": pa.int64(), "impressions": TEXTS,
}  # fmt: skip


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose release has the features above, and a folder of events without any."""
    publish(monkeypatch)
    (tmp_path / "events").mkdir()
    return tmp_path


def publish(monkeypatch: pytest.MonkeyPatch, **columns: str) -> None:
    """Publish a bundle with the features above, whose recipe named these columns."""
    manifest = SimpleNamespace(query_features=FEATURES, training_data=columns, cooccurrence=None)
    monkeypatch.setattr(module, "read_published", lambda _: manifest)


def choice(labels: list[str], features: Any = None, *, at: float = NOON, **more: Any) -> bytes:
    fields = {
        "kind": "choice", "time": at, "answer": "a", "release": "r1", "labels": labels, "event": "click", "weight": 1,
        "positions": list(range(len(labels))), "propensities": [1] * len(labels), "buckets": [0] * len(labels),
        "features": None if features is None else orjson.dumps(features).decode(),
    }  # fmt: skip
    return event_json(**fields | more)


def exported(releases: Path, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what was said of them."""
    out = releases / "out.parquet"
    message = export(releases, releases / "events", out, **{"window": (0, NOON + 86_400), **options})
    return pq.read_table(out).to_pylist(), message


def test_columns_have_their_types_also_without_events(releases: Path) -> None:
    assert exported(releases) == ([], ["0 labels chosen", f"written: {releases / 'out.parquet'}"])
    assert {field.name: field.type for field in pq.read_schema(releases / "out.parquet")} == TYPES
    write_events(releases / "events", choice(["x"], {"user": 7}), choice(["y"], {"user": "u1"}))
    exported(releases)
    assert {field.name: field.type for field in pq.read_schema(releases / "out.parquet")} == TYPES


@pytest.mark.parametrize(
    ("name", "sent", "written"),
    [
        ("user", 7, "7"),
        ("user", "007", "007"),
        ("user", 2**63 - 1, str(2**63 - 1)),
        ("user", 'a"b\\ü\n', 'a"b\\ü\n'),
        ("user", None, None),
        ("seen", ["a", 2], ["a", "2"]),
        ("seen", [], []),
        ("tags", {"a": 0.5, "b": 1}, ["a", "b"]),
        ("user", 39.0, "39"),
        ("user", "39.0", "39.0"),
        ("user", 0.5, "0.5"),
        ("user", True, "true"),
        ("seen", [39.0, "39.0", True], ["39", "39.0", "true"]),
        ("tags", "['a', 'b']", ["a", "b"]),
        ("joined", "a ' b'", ["a", "b"]),
        ("joined", "['a, b', 'c']", ["a, b", "c"]),
        ("age", 3, 3.0),
        ("age", "3.5", 3.5),
        ("age", True, 1.0),
        ("age", 3.5, 3.5),
        ("taste", [1, 0.5], [1.0, 0.5]),
        ("day", "2026-01-02", "2026-01-02"),
    ],
)
def test_values_have_the_types_of_training(releases: Path, name: str, sent: object, written: object) -> None:
    write_events(releases / "events", choice(["x"], {name: sent}))
    ((row,), _) = exported(releases)
    assert row[name] == written


def test_a_row_by_hand(releases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, label_id="item", query_id="user")
    write_events(
        releases / "events",
        choice(
            ["x", "y"], {"user": 7, "weight": 2}, weight=3, positions=[4, None], propensities=[0.25, 1], unit=-5,
            run="week-1", arm="tail", bias_removal=0.5, idempotency_key="k",
        ),
        choice(["z"], {"user": 8}, at=NOON + 1, kind="organic", answer=None, positions=[None]),
    )  # fmt: skip
    (x, y, z), message = exported(releases)
    assert message[0] == "3 labels chosen"
    columns = ("item", "user", "feature_weight", "weight", "propensity", "debiased_weight", "position", "source")
    assert [tuple(row[name] for name in columns) for row in (x, y, z)] == [
        ("x", "7", 2, 3, 0.25, 12, 4, "answer"), ("y", "7", 2, 3, 1, 3, None, "answer"),
        ("z", "8", None, 1, 1, 1, None, "organic"),
    ]  # fmt: skip
    assert (x["arm"], x["run"], x["unit"], x["bias_removal"], x["idempotency_key"]) == ("tail", "week-1", -5, 0.5, "k")
    assert (x["answer"], x["release"], x["time"].timestamp(), z["answer"]) == ("a", "r1", NOON, None)


def test_repeats_are_dropped(releases: Path) -> None:
    user = {"user": "u"}
    organic = {"kind": "organic", "answer": None, "idempotency_key": "k1"}
    write_events(
        releases / "events",
        *(choice(["x", "y"], user, at=NOON + of) for of in range(2)),
        choice(["x"], user, event="purchase", at=NOON + 2),
        choice(["x"], user, answer="b", at=NOON + 3),
        *(choice(["o"], user, at=NOON + 4 + of, **organic) for of in range(2)),
        *(choice(["o"], user, at=NOON + 6, **organic | {"idempotency_key": key}) for key in ("k2", None, None)),
    )
    rows, message = exported(releases)
    assert message[1] == "left out: 3 labels sent again: by an idempotency key, or by answer, label and event"
    assert [(row["label_id"], row["event"], row["answer"]) for row in rows] == [
        ("x", "click", "a"), ("y", "click", "a"), ("x", "purchase", "a"), ("x", "click", "b"), ("o", "click", None),
        *[("o", "click", None)] * 3,
    ]  # fmt: skip
    assert rows[0]["time"].timestamp() == NOON
    # A repeat in another window is no other choice.
    assert len(exported(releases, window=(NOON + 1, NOON + 5))[0]) == 3
    assert len(exported(releases, window=(NOON + 5, NOON + 9))[0]) == 3


def test_idempotency_keys_are_per_client(releases: Path) -> None:
    order = {"kind": "organic", "answer": None, "idempotency_key": "order-0"}
    write_events(
        releases / "events",
        *(choice(["o"], {"user": user}, at=NOON + at, client=user, **order) for at, user in enumerate("abab")),
        choice(["o"], {"user": "nobody"}, at=NOON + 4, **order),
    )
    rows, _ = exported(releases)
    assert [row["user"] for row in rows] == ["a", "b", "nobody"]


def test_recorded_answers_fill_impressions_and_features(releases: Path) -> None:
    answer = choice(["x", "y", "z"], {"user": "shown"}, kind="answer", at=NOON - 3600)
    write_events(releases / "events", answer, choice(["y"]), choice(["q"], {"user": "said"}), choice(["y"], answer="b"))
    rows, message = exported(releases)
    assert [(row["label_id"], row["user"], row["impressions"]) for row in rows] == [
        ("q", "said", ["x", "y", "z"]), ("y", "shown", ["x", "y", "z"])
    ]  # fmt: skip
    assert message[1] == (
        "left out: 1 labels whose query's features are not known: send `features` with feedback (--all takes these, "
        "too)"
    )
    rows, message = exported(releases, everything=True)
    assert [(row["user"], row["answer"]) for row in rows if row["user"] is None] == [(None, "b")]
    assert message[0] == "3 labels chosen"


def test_features_that_the_release_does_not_read_are_text(releases: Path) -> None:
    write_events(
        releases / "events", choice(["x"], {"session": 7, "no name": 1, 'a"; DROP': 2, "time": 3}), choice(["y"], {})
    )
    rows, message = exported(releases)
    assert [(row["session"], row["feature_time"]) for row in rows] == [("7", "3"), (None, None)]
    assert message[1:-1] == ['left out: 2 features that cannot be columns of their own: "a\\"; DROP", "no name"']
    write_events(releases / "events", choice(["z"], {f"f{number}": 1 for number in range(120)}))
    assert len(exported(releases)[0][0].keys() - TYPES.keys()) == 100


@pytest.mark.parametrize(
    ("sent", "column", "left_out"),
    [
        ("User", "user", "User"),
        ("Label_ID", "feature_Label_ID", None),
        ("feature_weight", "feature_weight", "feature_weight"),
    ],
)
def test_feature_names_never_collide_with_columns(releases: Path, sent: str, column: str, left_out: str | None) -> None:
    write_events(releases / "events", choice(["x"], {sent: 1, "user": 1, "weight": 1}))
    (row,), message = exported(releases)
    assert (row["label_id"], str(row[column])[0]) == ("x", "1")
    assert [f'"{left_out}"' in line for line in message[1:-1]] == ([] if left_out is None else [True])
    assert row.keys() - TYPES.keys() <= {column}


def test_events_in_other_exports_are_reported(releases: Path) -> None:
    write_events(releases / "events", choice(["x"], {}), choice(["y"], {}, at=NOON + 60, answer="b"))
    rows, message = exported(releases, window=(0, NOON + 60))
    assert [row["label_id"] for row in rows] == ["x"]
    assert message[1].startswith("left out: 1 events of 2023-11-15T12:01:00+00:00 and later")
    (releases / "events/.deleted").touch()
    assert "are not kept" in exported(releases)[1][1]


def test_invalid_event_lines_are_reported(releases: Path) -> None:
    (releases / "events" / f"one{DAMAGED}").write_bytes(b"rubbish\n")
    assert exported(releases)[1][1] == f"left out: lines of one{DAMAGED} that are no events"


def test_columns_match_the_published_release(tmp_path: Path) -> None:
    make_bundle().write(tmp_path / "bundle")
    with pytest.raises(
        FeedbackExportError, match="expected a published release, whose features are columns, found none"
    ):
        exported(tmp_path)
    build(tmp_path / "bundle", tmp_path, spec="flat", name="first")
    open_releases(tmp_path).publish("first")
    with pytest.raises(StateError, match="expected a folder of events, found none"):
        exported(tmp_path)
    write_events(tmp_path / "events", choice(["item-1"], {"user_id": 7, "history": ["item-1", 2]}))
    (row,), _ = exported(tmp_path)
    assert (row["user_id"], row["history"], row["label_id"]) == ("7", ["item-1", "2"], "item-1")


def test_choices_that_training_refuses_are_left_out_and_counted(
    releases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(
        releases / "events",
        choice(["x", ""], {"user": "u1", "session": 7.0}, answer="a"),
        choice(["y", "z"], {"user": "u1"}, answer="b"),
        choice(["y"], {"user": "u1", "session": ""}, answer="c"),
        choice(["v"], answer="d"),
    )
    refused = "training refuses rows without an id"
    features = "left out: 1 labels whose query's features are not known: send `features` with feedback"
    rows, message = exported(releases)
    assert [row["label_id"] for row in rows] == ["x", "y", "z", "y"]
    assert message[1].startswith(features)
    assert message[2] == f"left out: 1 labels whose label is empty: {refused}"
    publish(monkeypatch, query_id="session")
    rows, message = exported(releases)
    assert [(row["session"], row["user"], row["label_id"]) for row in rows] == [("7", "u1", "x")]
    assert message[1].startswith(features)
    assert message[2] == f"left out: 4 labels whose label is empty, or whose query has no session: {refused}"
    rows, message = exported(releases, everything=True)
    assert [row["label_id"] for row in rows] == ["x", "y", "z", "y", "v"]
    assert message[1] == f"left out: 1 labels whose label is empty: {refused}"
    # The column is there also where nobody sends the id, and once where the release reads it.
    publish(monkeypatch, query_id="account")
    assert exported(releases)[0] == []
    assert pq.read_schema(releases / "out.parquet").field("account").type == TEXT
    publish(monkeypatch, query_id="user")
    assert len(exported(releases)[0]) == 4
    assert pq.read_schema(releases / "out.parquet").names.count("user") == 1
    for name in ("weight", "label_id", "session id"):
        publish(monkeypatch, query_id=name)
        assert exported(releases)[1][2] == f"left out: 1 labels whose label is empty: {refused}"
    publish(monkeypatch, label_id="weight", query_id="user")
    assert exported(releases)[0][0]["label_id"] == "x"


def test_malformed_times_are_refused() -> None:
    assert read_window("7d", None, 1e9) == (1e9 - 7 * 86_400, 1e9 - 60)
    assert read_window("7d", None, 1e9, "events") == (1e9 - 7 * 86_400, 1e9 - 60)
    assert read_window("7d", None, 1e9, "s3://shop/events") == (1e9 - 7 * 86_400, 1e9 - 30 * 60)
    assert read_window("7d", "5m", 1e9, "s3://shop/events") == (1e9 - 7 * 86_400, 1e9 - 5 * 60)
    with pytest.raises(FeedbackExportError, match="received '20m' and '30m'"):
        read_window("20m", None, 1e9, "s3://shop/events")
    assert read_window("1970-01-02", "1970-01-02T02:00:00+01:00", 1e9) == (86_400, 86_400 + 3600)
    with pytest.raises(FeedbackExportError, match="--since: expected ISO 8601, or an age"):
        read_window("last week", None, 1e9)
    with pytest.raises(FeedbackExportError, match="before --until"):
        read_window("1h", "2h", 1e9)
