"""A query's history is left out of its answer where the release says so, or the request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.index import build, open_releases
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from tests.bundles import make_bundle
from tests.serving.plane import make_retriever, read_results

HISTORY = ["item-1", "item-2", "no such item"]


def ids(default: bool, **options: Any) -> list[str]:
    bundle = make_bundle(labels=60)
    bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"exclude_history": default}))
    retriever = make_retriever(bundle)
    query = RetrieveQuery(**{"features": {"user_id": "u3", "history": HISTORY}, "k": 60, **options})
    (result,) = read_results(retriever.retrieve([query]))
    # What the tower reads of a history is counted, whether or not the answer leaves the history out.
    unknown = int((options.get("features", {"history": HISTORY}) or {}).get("history") == HISTORY)
    assert result["unknown"] == {"query": 0, "history": unknown, "exclude": 0, "allow": 0}
    return [label["id"] for label in result["labels"]]


@pytest.mark.parametrize(
    ("default", "options", "left_out"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_the_request_says_or_else_the_release(default: bool, options: bool | None, left_out: bool) -> None:
    answered_ids = ids(default, exclude_history=options)
    everything = ids(False)
    assert answered_ids == [id_ for id_ in everything if not (left_out and id_ in HISTORY)]
    assert len(everything) == 60


def test_excluded_history_combines_with_other_filters() -> None:
    assert not {"item-1", "item-2", "item-7"} & {*ids(True, exclude=["item-7", "item-2"])}
    assert ids(True, allow=["item-1", "item-5"]) == ["item-5"]
    by_default = ids(True, k=5)
    assert by_default == [id_ for id_ in ids(False) if id_ not in HISTORY][:5]
    assert ids(True, features={"user_id": "u3", "history": None}) == ids(False, features={"user_id": "u3"})
    assert len(ids(True, features=None, vector=[0.5] * 8)) == 60


def test_the_baseline_of_drift_leaves_out_what_answers_leave_out(tmp_path: Path) -> None:
    created = make_bundle(labels=60)
    scores_CL = (
        created.augmentation.queries(created.calibration_queries, created.manifest.bias_removal.default)
        @ created.rows().T
    )
    best_CL = np.argsort(-scores_CL, axis=1)
    history = [(query, row) for query, rows in enumerate(best_CL) for row in sorted(rows[: 3 * (query % 2)])]
    replace(created, calibration_seen=np.array(history, np.int32)).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="a")
    baseline = load_release(open_releases(tmp_path / "releases"), "a").promises.default
    answered = np.concatenate([rows[3 * (query % 2) :][:20] for query, rows in enumerate(best_CL)])
    assert baseline.popularity == pytest.approx(created.labels.counts[answered].mean())
    assert baseline.shares == pytest.approx(np.bincount(created.labels.buckets[answered], minlength=4) / len(answered))


def test_the_baseline_of_drift_is_of_the_default_weight_of_cooccurrence(tmp_path: Path) -> None:
    created = make_bundle(labels=60, cooccurrence=True)
    assert created.cooccurrence is not None
    histories = np.random.default_rng(9).integers(0, 60, (50, 5)).astype(np.int32)
    histories[::2] = -1
    replace(created, calibration_histories=histories).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="a")
    baseline = load_release(open_releases(tmp_path / "releases"), "a").promises.default
    scores_CL = created.augmentation.queries(created.calibration_queries, 0.5) @ created.rows().T / 0.1
    factors = np.array([0.8**4, 0.8**3, 0.8**2, 0.8, 1])
    scores_CL[1::2] += 0.5 * np.einsum("r,crl->cl", factors, created.cooccurrence.matrix().toarray()[histories[1::2]])
    answered = np.argsort(-scores_CL, axis=1)[:, :20].ravel()
    assert baseline.popularity == pytest.approx(created.labels.counts[answered].mean())
    deciles = np.quantile(np.sort(scores_CL, axis=1)[:, -20:], np.linspace(0.1, 0.9, 9))
    assert baseline.score_edges == pytest.approx(deciles, abs=0.05)
