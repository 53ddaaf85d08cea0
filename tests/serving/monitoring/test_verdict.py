"""One verdict over every signal: what is drift, what is chance, what is too little to tell, and what comes first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.exposure import psi
from longtail.serving.monitoring import Baseline, LiveFigures, OfflineFigures, drift
from longtail.serving.monitoring.findings import Evidence
from longtail.serving.monitoring.likeness import pairs_of, telling
from longtail.serving.monitoring.offline import OfflineRecall
from longtail.serving.monitoring.verdict import judge
from tests.serving.monitoring.shop import BASELINE, BUCKETS, Clock, answered

PROMISED = {"head": 0.93, "torso": 0.065, "tail": 0.005, "new": 0.0}
RECALL = {20: {"all": OfflineRecall(0.26, 0.23, 0.29), "tail": OfflineRecall(0.1, 0.05, 0.15)}}


def baseline(shares: Mapping[str, float] = PROMISED, queries: int = 1000) -> dict[str, Any]:
    rests_on: dict[str, Any] = {"queries": queries, "telling": (5.0 * queries,) * 4, "coverage": (1, 0.8, 0.5, 0)}
    return replace(BASELINE, shares=tuple(shares.values()), **rests_on).report_json() | {"k": 20}


def recall(positives: int = 0, hits: int = 0) -> dict[str, Any]:
    return {
        kind: {"positives": positives, "hits": hits, "value": hits / positives if positives else None}
        for kind in (*BUCKET_NAMES, "all")
    }


def window(
    queries: int = 2000,
    shares: Mapping[str, float] = PROMISED,
    *,
    scores: float = 0.01,
    dials: Mapping[float, int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Twenty labels a query; those of one answer are as alike as if every fifth were drawn alone."""
    labels = 20 * queries
    exposures = {
        name: {
            "count": round(labels * share),
            "share": share if queries else None,
            "telling": labels / 5,
            "coverage": {"head": 1.0, "torso": 0.8, "tail": 0.5, "new": 0.0}[name],
        }
        for name, share in shares.items()
    }
    counts = np.array([round(labels * share) for share in shares.values()])
    dials = {0.0: queries} if dials is None else dials
    return {
        "queries": queries,
        "exposures": exposures,
        "psi": {"buckets": psi(counts, list(PROMISED.values())), "scores": scores if labels >= 200 else None},
        "dials": {
            "bias_removal": [{"at": at, "queries": asked} for at, asked in dials.items() if asked],
            "popularity_weight": [{"at": 0.0, "queries": queries}] if queries else [],
        },
        "recall": {"feedback": recall(), "shadow": recall()},
        "dropped": 0,
        "requests": {"count": queries, "errors": 0, "shed": 0},
        **changes,
    }


def evidence(hour: dict[str, Any], day: dict[str, Any] | None = None, **changes: Any) -> Evidence:
    given: dict[str, Any] = {
        "windows": {"5m": hour, "1h": hour, "24h": day or hour},
        "baseline": baseline(),
        "offline": OfflineFigures(RECALL),
        "bucket_sizes": [1000, 1000, 1000, 0],
    }
    return Evidence(**given | changes)


def findings(verdict: Mapping[str, Any], *severities: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    return {
        (found["signal"], found["bucket"]): found
        for found in verdict["findings"]
        if found["severity"] in (severities or ("watch", "act"))
    }


def test_a_bucket_that_doubled_its_share_is_not_steady_and_comes_first() -> None:
    """Torso 14.2 % against 6.5 %: the PSI of all shares is 0.07, "steady", and was all that was looked at."""
    live = {"head": 0.853, "torso": 0.142, "tail": 0.005, "new": 0.0}
    verdict = judge(evidence(window(shares=live, scores=2.54)))
    assert verdict["severity"] == "act"
    assert verdict["headline"] == (
        "Torso gets 14.2 % of the answers in the last hour where the release promised 6.5 %, 2.2 times as much."
    )
    first, second = verdict["findings"][:2]
    assert (first["signal"], first["bucket"], first["severity"]) == ("share_drift", "torso", "act")
    assert (first["observed"], first["expected"]) == (0.142, 0.065)
    # Wilson at 8,000 labels, z = 3.29.
    assert (first["low"], first["high"]) == (pytest.approx(0.1297, abs=2e-4), pytest.approx(0.1554, abs=2e-4))
    assert (second["signal"], second["severity"], second["observed"]) == ("score_drift", "act", 2.54)
    assert "other queries, features or dials" in second["sentence"]
    assert set(findings(verdict)) == {("share_drift", "torso"), ("score_drift", None)}


def test_all_well_says_so_and_on_what_it_rests() -> None:
    verdict = judge(evidence(window()))
    assert (verdict["severity"], findings(verdict, "watch", "act", "unknown")) == ("steady", {})
    assert verdict["headline"] == "The answers are what the release promised: 2,000 queries in the last hour."
    assert {found["signal"] for found in verdict["findings"]} == {
        "share_drift", "score_drift", "coverage_loss", "dials", "errors", "shed", "records",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("torso", "severity"),
    [(0.065, "steady"), (0.075, "steady"), (0.09, "watch"), (0.14, "act"), (0.03, "act"), (0.05, "watch")],
)
def test_what_matters_of_what_is_real(torso: float, severity: str) -> None:
    verdict = judge(evidence(window(50_000, {"head": 0.995 - torso, "torso": torso, "tail": 0.005, "new": 0.0})))
    assert findings(verdict, severity)["share_drift", "torso"]["observed"] == torso


@pytest.mark.parametrize("queries", [1, 10, 30])
def test_few_answers_are_neither_drift_nor_steady(queries: int) -> None:
    live = {"head": 0.9, "torso": 0.09, "tail": 0.01, "new": 0.0}
    hour = window(queries, live, scores=0.6)
    for share in hour["exposures"].values():
        share["telling"] = queries
    verdict = judge(evidence(hour))
    assert (verdict["severity"], findings(verdict)) == ("unknown", {})
    assert verdict["headline"].startswith("Too few answers in the last 24 hours to judge t")
    assert verdict["headline"].endswith(f"{queries} {'query is' if queries == 1 else 'queries are'} counted.")


def test_the_day_is_asked_where_the_hour_cannot_tell() -> None:
    drifted = {"head": 0.85, "torso": 0.145, "tail": 0.005, "new": 0.0}
    verdict = judge(evidence(window(4, drifted), window(9000, drifted)))
    assert "in the last 24 hours where the release promised 6.5 %" in verdict["headline"]
    verdict = judge(evidence(window(0, dict.fromkeys(PROMISED, 0.0)), window(9000)))
    assert verdict["headline"] == "The answers are what the release promised: 9,000 queries in the last 24 hours."


def test_nothing_to_judge_by() -> None:
    silent = judge(evidence(window(0, dict.fromkeys(PROMISED, 0.0))))
    assert (silent["severity"], silent["headline"]) == (
        "unknown", "No queries in the last 24 hours: there is nothing to judge yet.",
    )  # fmt: skip
    unheld = judge(evidence(window(), baseline=None))
    assert (unheld["severity"], unheld["headline"][:12]) == ("unknown", "No baseline:")


def test_labels_added_since_have_no_promise_and_take_from_the_others() -> None:
    live = {"head": 0.6, "torso": 0.03, "tail": 0.002, "new": 0.368}
    with_added = findings(judge(evidence(window(shares=live), added=40)))
    assert ("share_drift", "new") not in with_added
    assert ("share_drift", "torso") in with_added
    assert ("share_drift", "new") in findings(judge(evidence(window(shares=live))))


def test_dials_other_than_those_it_was_measured_at() -> None:
    """A mean of 0.4 hides that 40 % ask for 1."""
    verdict = judge(evidence(window(dials={0.0: 1200, 1.0: 800})))
    found = findings(verdict)["dials", None]
    assert (found["severity"], found["observed"]) == ("watch", 0.4)
    assert "40.0 % of the queries in the last hour ask for another λ than the 0.00" in found["sentence"]
    assert "most of them for 1.00 (40.0 %)" in found["sentence"]


@pytest.mark.parametrize(
    ("positives", "hits", "severity"),
    [(2000, 520, "steady"), (2000, 700, "steady"), (2000, 400, "watch"), (2000, 200, "act"), (5, 0, "steady")],
)
def test_recall_against_the_evaluation(positives: int, hits: int, severity: str) -> None:
    """0.26 promised: more is no matter, and an interval that holds it is none either."""
    figures = {"feedback": recall(), "shadow": recall() | {"all": recall(positives, hits)["all"]}}
    found = findings(judge(evidence(window(recall=figures))), severity)["shadow_recall", None]
    assert (found["observed"], found["expected"]) == (hits / positives, 0.26)
    assert "recall@20, 0.230–0.290" in found["sentence"]


def test_recall_is_held_against_no_more_labels_than_were_answered() -> None:
    figures = {"feedback": recall(2000, 10), "shadow": recall(2000, 10)}
    verdict = judge(evidence(window(recall=figures), shadow_k=19, offline=OfflineFigures(RECALL)))
    assert {signal for signal, _ in findings(verdict)} == {"feedback_recall"}
    assert OfflineFigures({5: {}, 10: {}, 20: {}}).recall_within(12.5) == (10, {})


def test_coverage_is_lost_only_where_as_many_answers_cover_less() -> None:
    hour = window(2000)
    hour["exposures"]["tail"]["coverage"] = 0.2
    found = findings(judge(evidence(hour)))
    assert found["coverage_loss", "tail"]["severity"] == "act"
    fewer = window(900)
    fewer["exposures"]["tail"]["coverage"] = 0.2
    assert ("coverage_loss", "tail") not in findings(judge(evidence(fewer)), "steady", "watch", "act")


def test_what_is_broken_comes_before_what_has_drifted() -> None:
    live = {"head": 0.5, "torso": 0.4, "tail": 0.1, "new": 0.0}
    hour = window(shares=live, requests={"count": 1000, "errors": 40, "shed": 3}, dropped=7)
    verdict = judge(
        evidence(
            hour,
            troubles={"refused_release": "The published release, r2, could not be loaded.", "label_log": "No log."},
            age_days=45.0,
            stale_days=30.0,
        )
    )
    told = [(found["signal"], found["severity"]) for found in verdict["findings"]]
    assert told[:4] == [("label_log", "act"), ("refused_release", "act"), ("errors", "act"), ("share_drift", "act")]
    assert verdict["headline"] == "No log."
    found = findings(verdict)
    assert found["errors", None]["sentence"] == "40 of 1,003 requests in the last 5 minutes broke (5xx)."
    assert {signal for (signal, _), of in found.items() if of["severity"] == "watch"} >= {
        "records", "shed", "stale_release",
    }  # fmt: skip
    worst_first = [("act", "watch", "unknown", "steady").index(severity) for _, severity in told]
    assert worst_first == sorted(worst_first)


def test_labels_of_one_answer_tell_less_than_as_many_drawn_alone() -> None:
    exposures, ends = np.array([200, 0, 200, 0]), list(range(4, 401, 4))
    # A hundred answers of four, all head or all tail, p = ½: Σ (X − 2)² = 100 · 4, of 400², with 100 / 99.
    alike = np.array(([0] * 4 + [2] * 4) * 50, np.int8)
    head, torso, tail, new = telling(exposures, pairs_of(alike, ends), 100)
    assert head == tail == pytest.approx(max(100, 0.25 / (400 / 400**2 * 100 / 99)))
    assert (torso, new) == (100, 100)  # nothing was shown: nothing to go by but the queries
    # 3 : 1 and 1 : 3: Σ (X − 2)² = 100; the variance is a quarter of that.
    some = np.array([0, 0, 0, 2, 0, 2, 2, 2] * 50, np.int8)
    assert telling(exposures, pairs_of(some, ends), 100)[0] == pytest.approx(0.25 / (100 / 400**2 * 100 / 99))
    # Never more than there are labels.
    mixed = np.array([0, 0, 2, 2] * 99 + [0, 0, 0, 2], np.int8)
    assert telling(np.array([201, 0, 199, 0]), pairs_of(mixed, ends), 100)[0] == 400
    # Batches add up, be they of one query or of many.
    assert pairs_of(some[:4], [4]).reshape(4, 4).tolist() == [[9, 0, 3, 0], [0] * 4, [3, 0, 1, 0], [0] * 4]
    assert (pairs_of(some[:4], [4]) + pairs_of(some[4:], ends[:-1])).tolist() == pairs_of(some, ends).tolist()
    # What was answered before pairs were counted, and too little to tell a variance.
    assert telling(exposures, np.zeros(16), 100) == [100] * 4
    assert telling(np.array([40, 0, 40, 0]), pairs_of(some[:80], ends[:20]), 20) == [20] * 4


def test_healthy_traffic_raises_no_alarm_and_drift_does() -> None:
    """500 services whose every answer leans its own way (a Dirichlet's), at 40 to 4,000 queries."""
    rng, shares = np.random.default_rng(3), np.array([0.6, 0.3, 0.1])

    def hour(queries: int, of: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        counts_B = rng.multinomial(20, rng.dirichlet(8 * of, queries))
        counts = np.append(counts_B.sum(axis=0), 0)
        pairs = np.zeros((4, 4))
        pairs[:3, :3] = counts_B.T @ counts_B
        found = window(queries, dict(zip(BUCKET_NAMES, (counts / counts.sum()).tolist(), strict=True)))
        for name, rests_on in zip(BUCKET_NAMES, telling(counts, pairs.ravel(), queries), strict=True):
            found["exposures"][name]["telling"] = rests_on
        return found, counts

    def alarms(of: np.ndarray, services: int) -> list[bool]:
        raised = []
        for _ in range(services):
            promised, _ = hour(1000, shares)
            live, counts = hour(int(10 ** rng.uniform(1.6, 3.6)), of)
            usual = {name: promised["exposures"][name]["share"] for name in BUCKET_NAMES}
            live["psi"]["buckets"] = psi(counts, list(usual.values()))
            held = baseline(usual) | {
                "telling": {name: promised["exposures"][name]["telling"] for name in BUCKET_NAMES}
            }
            raised.append(bool(findings(judge(evidence(live, baseline=held)))))
        return raised

    assert np.mean(alarms(shares, 500)) < 0.02
    assert np.mean(alarms(np.array([0.2, 0.4, 0.4]), 50)) > 0.9


def live_verdict(live: LiveFigures, clock: Clock) -> dict[str, Any]:
    clock.pass_(1)
    verdict: dict[str, Any] = live.report()["verdict"]
    return verdict


def test_the_report_has_the_verdict_of_what_was_answered(live: LiveFigures, clock: Clock) -> None:
    assert live_verdict(live, clock)["severity"] == "unknown"
    live.count_answers(answered([[0, 1, 4, 8]] * 400, bias_removal=0.0, score=0.5))
    verdict = live_verdict(live, clock)
    # Promised half, a quarter, a quarter; but every score is in the lowest decile.
    assert set(findings(verdict)) == {("score_drift", None)}
    live.count_answers(answered([[0]] * 3000, bias_removal=0.5))
    assert {bucket for signal, bucket in findings(live_verdict(live, clock)) if signal == "share_drift"} == {
        "head", "torso", "tail", None,
    }  # fmt: skip
    window = live.report()["windows"]["1h"]
    assert window["dials"] == {
        "bias_removal": [{"at": 0.0, "queries": 400}, {"at": 0.5, "queries": 3000}],
        "popularity_weight": [{"at": 0.0, "queries": 3400}],
    }
    assert window["exposures"]["head"]["telling"] < 4600


@pytest.mark.parametrize("value", [-7.0, -(2.0**53), 2.0**53, math.nan])
@pytest.mark.parametrize("kind", ["answers", "likeness", "requests", "new", "dropped"])
def test_damaged_counts_are_no_reason_not_to_answer(
    live: LiveFigures, clock: Clock, tmp_path: Path, kind: str, value: float
) -> None:
    live.count_answers(answered([[0, 1, 4, 8]] * 400))
    live.count_request(0.01, 200)
    ring = np.memmap(tmp_path / "live" / "r1" / f"{kind}.0.ring", np.float64, "r+", offset=4096)
    row = ring.reshape(1440, -1)[int(clock.now // 60) % 1440]
    for columns in (slice(1, None, 2), slice(2, None, 2), slice(1, None)):
        row[columns] = value
        assert live_verdict(live, clock)["headline"]


def test_troubles_are_told_until_they_are_over(live: LiveFigures, clock: Clock) -> None:
    live.set_trouble("label_log", "It cannot be read.")
    verdict = live_verdict(live, clock)
    assert (verdict["severity"], verdict["headline"]) == ("act", "It cannot be read.")
    live.set_trouble("label_log", None)
    assert live_verdict(live, clock)["severity"] == "unknown"


def test_old_training_data_is_stale(open_live: Callable[..., LiveFigures], clock: Clock) -> None:
    live = open_live(begin=False, stale_days=30.0)
    live.begin_release("r1", BUCKETS, BASELINE, OfflineFigures(data_until=clock.now - 31 * 86_400))
    (found,) = findings(live_verdict(live, clock)).values()
    assert found["sentence"] == ("The release's training data is 31 days old; more than 30 days is stale.")


def test_settings_of_dials_beyond_the_bins_count_at_their_ends(live: LiveFigures, clock: Clock) -> None:
    for at in (-7.0, -1.0, 0.349, 0.8, 2.0, 99.0):
        live.count_answers(answered([[0]], bias_removal=at, popularity=-at))
    clock.pass_(1)
    asked = live.report()["windows"]["5m"]["dials"]
    assert {one["at"]: one["queries"] for one in asked["bias_removal"]} == {-1.0: 2, 0.35: 1, 0.8: 1, 2.0: 2}
    assert {one["at"]: one["queries"] for one in asked["popularity_weight"]} == {
        -1.0: 2,
        -0.8: 1,
        -0.35: 1,
        1.0: 1,
        2.0: 1,
    }


def test_a_baseline_of_before_is_taken_as_exact() -> None:
    old = {"bias_removal": 0.0, "k": 3, "shares": [0.5, 0.25, 0.25, 0.0], "popularity": 1.0}
    old |= {"score_edges": list(range(9)), "score_shares": [0.1] * 10}
    held = Baseline.from_json(old).report_json()
    assert (held["queries"], held["telling"], held["coverage"]) == (0, None, None)
    verdict = judge(evidence(window(2000, {"head": 0.5, "torso": 0.25, "tail": 0.25, "new": 0.0}), baseline=held))
    assert not [bucket for signal, bucket in findings(verdict) if signal == "share_drift" and bucket]
    assert not math.isnan(verdict["findings"][0]["observed"])


def test_a_part_of_the_labels_that_stands_for_all_raises_no_alarm_by_chance() -> None:
    """Of eight million labels of the tail half a million are counted, and as many are shown as the promise says."""
    rng, size, part = np.random.default_rng(0), 8_000_000, 500_000
    promise = {**baseline(), "coverage": {"tail": 100 / size}, "queries": 1, "k": 1}
    severities: Counter[str] = Counter()
    for _ in range(300):
        shown = window()
        shown["exposures"]["tail"]["coverage"] = rng.binomial(part, 100 / size) / part
        given = evidence(
            shown, baseline=promise, bucket_sizes=[1000, 1000, size, 0], counted=[1000, 1000, part, 0]
        )  # fmt: skip
        found = drift._coverage(given, promise, "tail", "1h")
        severities[found.severity if found else "none"] += 1
    assert severities == {"steady": 300}
    shown["exposures"]["tail"]["coverage"] = 0.0
    lost = {**promise, "coverage": {"tail": 2000 / size}}
    given = evidence(shown, baseline=lost, bucket_sizes=[1000, 1000, size, 0], counted=[1000, 1000, part, 0])
    found = drift._coverage(given, lost, "tail", "1h")
    assert found is not None
    assert found.severity == "act"
