"""Define the schema of events, version 1.

An event is one choice, one answer or one label change. In JSON, keys with null values are left out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import orjson
import pyarrow as pa

VERSION = 1
Kind = Literal["choice", "organic", "answer", "label"]
"""`choice`: from an answer. `organic`: a choice without an answer. `answer`: an answer. `label`: a label change."""

SCHEMA = pa.schema(
    [
        ("version", pa.int8()),
        ("kind", pa.string()),
        (
            "time",
            pa.timestamp("us", "UTC"),
        ),  # of an `answer`: its own time; otherwise when the service received the event
        ("client", pa.string()),  # fingerprint of the API key that sent a choice; null without keys
        ("idempotency_key", pa.string()),  # chosen by the client
        ("answer", pa.string()),  # names the answer: the signature of its answer_id
        ("answered_at", pa.timestamp("us", "UTC")),
        ("release", pa.string()),
        ("bias_removal", pa.float32()),  # λ of the answer
        ("popularity", pa.float32()),  # μ of the answer
        ("cooccurrence", pa.float32()),  # ω of the answer; 0 where the release has no such term
        ("priors", pa.list_(pa.float32())),  # weights, in the release's order
        ("restricted", pa.bool_()),  # whether the client restricted the eligible labels
        ("run", pa.string()),  # run of an experiment, if the answer counts in the comparison of arms
        ("arm", pa.string()),
        ("unit", pa.int64()),
        ("labels", pa.list_(pa.string())),  # chosen, answered in order, or changed
        ("positions", pa.list_(pa.int32())),  # from 0, of each label in the answer; null: not in it
        ("propensities", pa.list_(pa.float32())),  # of each label; 1 if it was not drawn
        ("buckets", pa.list_(pa.int8())),  # of each label: 0 head, 1 torso, 2 tail, 3 new, −1 unknown
        ("event", pa.string()),  # click, purchase, … of choices; upsert, patch, hide, restore of label changes
        ("weight", pa.float64()),  # in training
        ("features", pa.string()),  # of the query, JSON
        ("options", pa.string()),  # of an answered query, JSON: other options set by its client or arm
    ]
)


def event_json(**fields: Any) -> bytes:
    """Return an event as one line of JSON.

    Args:
        fields: columns of SCHEMA, times in seconds since 1970; None is left out.

    Example:
        >>> event_json(kind="organic", time=0.5, labels=["7"])
        b'{"version":1,"kind":"organic","time":"1970-01-01T00:00:00.500000Z","labels":["7"]}'
    """
    line = {"version": VERSION, **{name: value for name, value in fields.items() if value is not None}}
    for name in ("time", "answered_at"):
        if name in line:
            line[name] = datetime.fromtimestamp(line[name], UTC)
    return orjson.dumps(line, option=orjson.OPT_UTC_Z)
