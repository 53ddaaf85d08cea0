"""Staging a release, the counts that a service leaves of it, and what promise.toml may ask of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from longtail.index import (
    LongtailIndexError,
    NotPublishableError,
    ReleaseNotFoundError,
    Releases,
    StagedCounts,
    StagedFloors,
    build,
)
from tests.bundles import make_bundle


@pytest.fixture
def shelf(tmp_path: Path) -> Releases:
    bundle = make_bundle(labels=60).write(tmp_path / "model")
    for name in ("first", "second", "third"):
        build(bundle, tmp_path / "r", name=name)
    shelf = Releases(tmp_path / "r")
    shelf.publish("first")
    return shelf


def counts(**changes: object) -> StagedCounts:
    """A hundred queries, two of them refused; of the others the answers overlap by 0.8 or 0.4."""
    plain = {
        "queries": 100,
        "refused": 2,
        "reason": "user: expected a string",
        "overlap": 49 * 0.8 + 49 * 0.4,
        "exposures": [50, 30, 18, 0],
        "exposures_of_current": [60, 30, 10, 0],
        "positives": [200, 0, 100, 0],
        "hits_of_both": [20, 0, 2, 0],
        "hits": [5, 0, 3, 0],
        "hits_of_current": [15, 0, 1, 0],
    }
    return StagedCounts.model_validate({"staged": "second", "current": "first", **plain, **changes})


def test_counts_of_processes_add_up_and_those_of_other_pairs_are_left_out(tmp_path: Path) -> None:
    counts().write(tmp_path, 0)
    counts(queries=11, reason=None, exposures=[1, 1, 1, 1]).write(tmp_path, 1)
    counts(current="zeroth").write(tmp_path, 2)
    (tmp_path / "staged" / "3.json").write_text("{")
    found = StagedCounts.read_all(tmp_path, "second", "first")
    assert (found.queries, found.refused, found.reason) == (111, 4, "user: expected a string")
    assert found.exposures == [51, 31, 19, 1]
    assert StagedCounts.read_all(tmp_path, "second", "other").queries == 0


def test_figures_by_hand() -> None:
    figures = counts().figures()
    assert figures["overlap"] == pytest.approx(0.6)
    assert figures["exposure"]["tail"] == {"staged": pytest.approx(18 / 98), "current": pytest.approx(0.1)}  # type: ignore[index]
    recall = figures["organic_recall"]
    assert recall["head"]["current"] == pytest.approx(35 / 200)  # type: ignore[index]
    assert recall["head"]["staged"] == pytest.approx(25 / 200)  # type: ignore[index]
    assert recall["tail"]["difference"] == pytest.approx(0.02)  # type: ignore[index]
    spread = 1.96 * math.sqrt((4 / 100 - 0.02**2) / 100)
    assert recall["tail"]["interval"] == pytest.approx([0.02 - spread, 0.02 + spread])  # type: ignore[index]
    assert recall["all"]["positives"] == 300  # type: ignore[index]
    assert recall["torso"]["staged"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("floors", "unmet"),
    [
        ({"max_refused": 0.02}, []),
        ({}, ["expected at most 0.00% of mirrored queries refused, found 2.00%: user: expected a string"]),
        (
            {"min_queries": 101, "max_refused": 1},
            ["expected at least 101 queries mirrored beside first, found 100 (98 answered)"],
        ),
        ({"max_refused": 1, "min_overlap": 0.7}, ["expected an overlap of at least 0.7, found 0.600"]),
        ({"max_refused": 1, "max_exposure_drop": 0.1}, ["head: expected at least 54.00% of the exposure, 10% below"]),
        ({"max_refused": 1, "max_exposure_drop": 0.2}, []),
        ({"max_refused": 1, "max_recall_drop": 0.02}, []),
        (
            {"max_refused": 1, "max_recall_drop": 0.0},
            ["head: expected organic recall at most 0 below 0.1750, found -0.0500"],
        ),
    ],
)
def test_what_a_promise_may_ask(floors: dict, unmet: list[str]) -> None:
    found = StagedFloors(**floors).unmet(counts())
    assert len(found) == len(unmet)
    assert all(sentence.startswith(expected) for sentence, expected in zip(found, unmet, strict=True)), found


def test_staging_is_a_pointer_that_publishing_clears(shelf: Releases) -> None:
    assert shelf.staged() is None
    shelf.stage("second")
    assert (shelf.staged(), shelf.current()) == ("second", "first")
    assert shelf.prune(keep=1) == []
    shelf.publish("third")
    assert shelf.staged() == "second"
    shelf.publish("second")
    assert shelf.staged() is None
    shelf.stage("first")
    assert (shelf.unstage(), shelf.unstage()) == ("first", None)
    with pytest.raises(LongtailIndexError, match="stage: expected another release than CURRENT, received 'second'"):
        shelf.stage("second")
    with pytest.raises(ReleaseNotFoundError, match="expected a staged and a published release, found none and second"):
        shelf.staged_report()
    with pytest.raises(ReleaseNotFoundError):
        shelf.stage("fourth")


def test_a_promise_of_mirrored_queries_is_kept(shelf: Releases, tmp_path: Path) -> None:
    (shelf.root / "promise.toml").write_text("[staged]\nmin_queries = 50\nmax_refused = 0.05\n")
    with pytest.raises(NotPublishableError, match="expected at least 50 queries mirrored beside first, found 0"):
        shelf.publish("second")
    counts().write(tmp_path / "state", 0)
    with pytest.raises(NotPublishableError):
        shelf.publish("second")
    shelf.publish("second", state=tmp_path / "state")
    shelf.publish("third", force=True)
    assert shelf.current() == "third"
