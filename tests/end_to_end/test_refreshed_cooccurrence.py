"""A service takes what was chosen together, and labels that were added, into releases of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Bundle, Vocabulary
from longtail.bundle.histories import LogPairs, remember
from longtail.bundle.manifest import CooccurrenceSettings, LogColumns
from longtail.bundle.neighbours import cooccurrences
from longtail.index import build, open_releases
from tests.bundles import label_features, make_bundle
from tests.end_to_end.killing import server
from tests.serving.process import until

NEW = "brand-new"


def with_cooccurrence(bundle: Bundle) -> Bundle:
    """Two users, of whom u1 has chosen item-1, then item-2."""
    columns = LogColumns(query_id="user_id")
    settings = CooccurrenceSettings(default=1, maximum=2, kind="walk", last=5, decay=0.9, until=1e9, log=columns)
    pairs = LogPairs(np.array([0, 0, 1]), np.array([1, 2, 1]))
    term = replace(cooccurrences(pairs, bundle.manifest.labels, [settings])[0], settings=settings)
    remembered = remember(pairs, Vocabulary(pa.array(["u1", "u2"])), np.array([1, 2], np.int32), 10)
    manifest = bundle.manifest.model_copy(update={"cooccurrence": settings})
    return replace(bundle, manifest=manifest, cooccurrence=term, remembered=remembered)


@pytest.mark.process
@pytest.mark.nightly
def test_a_label_added_while_serving_is_chosen_with_others(tmp_path: Path) -> None:
    with_cooccurrence(make_bundle(label_tower=True)).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="first")
    releases = open_releases(tmp_path / "releases")
    releases.publish("first")
    with (
        server(releases.root, tmp_path / "server.log", refresh="1s") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        running.wait_until_ready()
        added = http.post("/v1/labels", json={"labels": [{"id": NEW, "features": label_features(3)}]})
        assert added.status_code == 200, added.text
        events = [{"features": {"user_id": user}, "labels": [NEW]} for user in ("u1", "u2", "u3")]
        assert http.post("/v1/feedback", json={"events": events}).status_code == 200
        # An event is read once it is five seconds old.
        until(lambda: ".refreshed-" in str(releases.current()), seconds=60)
        until(lambda: http.get("/v1/release").json()["name"] == releases.current(), seconds=30)

        answer = http.post("/v1/similar", json={"ids": [NEW], "k": 3})
        assert answer.status_code == 200, answer.text

    bundle = releases.open(str(releases.current())).bundle
    term, remembered, rows = bundle.cooccurrence, bundle.remembered, bundle.labels.rows_by_id
    assert term is not None
    assert remembered is not None
    weights = term.matrix()
    # u1 chose it as the third label, u2 as the second: C = 1/3 + 1/2 with item-1, 1/3 with item-2.
    assert weights[rows[NEW], rows["item-1"]] == pytest.approx((1 / 3 + 1 / 2) / 3)
    assert weights[rows["item-2"], rows[NEW]] == pytest.approx(1 / 3)
    assert remembered.history("u3").tolist() == [rows[NEW]]
