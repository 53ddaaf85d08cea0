"""What counts as what: one call for each outcome, and both views agree on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.serving.monitoring import ArmAnswer, Monitoring
from longtail.serving.monitoring.outcomes import UNKNOWN_ROUTE
from longtail.serving.monitoring.records import IdCounts
from tests.clock import Clock
from tests.serving.monitoring.shop import BUCKETS, answered, chosen, scrape


def requests(monitoring: Monitoring, clock: Clock) -> dict[str, float]:
    """What the report says of requests; not the report that is cached."""
    clock.pass_(1)
    figures: dict[str, float] = monitoring.report()["windows"]["5m"]["requests"]
    return figures


@pytest.mark.parametrize(
    ("route", "status", "count", "errors"),
    [
        ("/v1/retrieve", 200, 1, 0),
        ("/v1/similar", 200, 1, 0),
        ("/v1/retrieve", 503, 1, 1),
        ("/v1/similar", 500, 1, 1),
        # Refusals say nothing of how long answers take, and what is asked of other routes nothing of the model.
        ("/v1/retrieve", 422, 0, 0),
        ("/v1/retrieve", 429, 0, 0),
        ("/v1/similar", 499, 0, 0),
        ("/v1/labels", 200, 0, 0),
        ("/livez", 200, 0, 0),
        (UNKNOWN_ROUTE, 404, 0, 0),
    ],
)
def test_requests_are_in_series_and_traffic_in_report(
    monitoring: Monitoring, clock: Clock, route: str, status: int, count: int, errors: int
) -> None:
    monitoring.count_request(route, status, 0.004)
    counted = scrape(monitoring)
    assert counted[f'longtail_requests_total{{route="{route}",status="{status // 100}xx"}}'] == 1
    assert counted[f'longtail_request_seconds_count{{route="{route}"}}'] == 1
    assert counted[f'longtail_request_seconds_sum{{route="{route}"}}'] == 0.004
    reported = requests(monitoring, clock)
    assert (reported["count"], reported["errors"], reported["shed"]) == (count, errors, 0)
    assert (reported["p50_ms"] is not None) == bool(count)


def test_answers_are_in_series_and_report(monitoring: Monitoring, clock: Clock) -> None:
    monitoring.count_answers(replace(answered([[0, 1, 4], [0, 8, 12]]), unknown={"exclude": 2, "allow": 1}))
    counted = scrape(monitoring)
    assert counted["longtail_queries_total"] == 2
    exposures = {"head": 3, "torso": 1, "tail": 1, "new": 1}
    by_bucket = {name: counted[f'longtail_exposures_total{{bucket="{name}",restricted="no"}}'] for name in exposures}
    assert by_bucket == exposures
    dial = [counted[f'longtail_query_bias_removal_bucket{{le="{le}"}}'] for le in ("0.25", "0.5")]
    assert (dial, counted["longtail_query_bias_removal_count"]) == ([0, 2], 2)
    assert counted['longtail_scores_total{decile="1"}'] == 6
    assert counted['longtail_ids_unknown_total{list="exclude"}'] == 2
    assert counted['longtail_ids_unknown_total{list="allow"}'] == 1
    clock.pass_(1)
    figures = monitoring.report()["windows"]["5m"]
    assert figures["queries"] == 2
    assert {name: of["count"] for name, of in figures["exposures"].items()} == exposures


def test_restricted_answers_have_their_own_series(monitoring: Monitoring) -> None:
    monitoring.count_answers(answered([[0, 1, 4]], restrictions=["buckets"]))
    counted = scrape(monitoring)
    assert counted['longtail_exposures_total{bucket="head",restricted="yes"}'] == 2
    assert counted['longtail_exposures_total{bucket="head",restricted="no"}'] == 0
    assert counted['longtail_scores_total{decile="1"}'] == 0


def test_answers_with_floors_are_counted(monitoring: Monitoring) -> None:
    monitoring.count_answers(answered([[0, 1, 4]] * 5, floored=(4, 1)))
    monitoring.count_answers(answered([[0, 1, 4]]))
    counted = scrape(monitoring)
    assert [counted[f'longtail_floored_queries_total{{met="{met}"}}'] for met in ("yes", "no")] == [3, 1]
    assert monitoring.report()["windows"]["5m"]["floored"] == {"queries": 4, "unmet": 1}


def test_choices_are_in_series_and_report(monitoring: Monitoring, clock: Clock) -> None:
    monitoring.count_choice(chosen([0, 5, -1], [0, 4], arm=ArmAnswer("week-1", "tail", 7)))
    monitoring.count_choice(chosen([8], source="organic"))
    counted = scrape(monitoring)
    for name, head, torso in (("positives", 1, 1), ("hits", 1, 0)):
        of_bucket = [counted[f'longtail_{name}_total{{bucket="{of}",source="feedback"}}'] for of in ("head", "torso")]
        assert of_bucket == [head, torso]
    assert counted['longtail_positives_total{bucket="tail",source="organic"}'] == 1
    assert [counted[f'longtail_feedback_events_total{{source="{of}"}}'] for of in ("feedback", "organic")] == [1, 1]
    # λ of answers, by whether they held the label: 0.5 of one that did, and of two that did not.
    at = [counted[f'longtail_choice_bias_removal_bucket{{hit="{hit}",le="0.5"}}'] for hit in ("yes", "no")]
    assert (at, counted['longtail_choice_bias_removal_bucket{hit="no",le="0.25"}']) == ([1, 2], 0)
    assert counted['longtail_arm_choices_total{arm="tail",bucket="head",run="week-1"}'] == 1
    clock.pass_(1)
    results = monitoring.report()["windows"]["5m"]["recall"]
    assert [(of["all"]["positives"], of["all"]["hits"]) for of in results.values()] == [(2, 1), (1, 0)]


def test_dropped_events_are_in_series_and_report(monitoring: Monitoring) -> None:
    monitoring.count("dropped", 2)
    assert scrape(monitoring)["longtail_events_dropped_total"] == 2
    assert monitoring.report()["windows"]["5m"]["dropped"] == 2


def test_totals_add_up_workers_and_survive_restarts(open_monitoring: Callable[..., Monitoring]) -> None:
    for _ in range(2):
        for worker in range(2):
            monitoring = open_monitoring(worker=worker, routes=["/livez"], groups={"user": ["ä"]})
            monitoring.count_request("/livez", 200, 0.1)
            monitoring.count_answers(replace(answered([[0], [4]]), features_B=[{"user": "ä"}, None]))
            monitoring.count_choice(chosen([0], [0], arm=ArmAnswer("week-1", "tail", 7)))
            monitoring.count("timeouts")
            monitoring.close()
    series = scrape(open_monitoring(routes=["/livez"], groups={"user": ["ä"]}))
    for name in (
        'longtail_requests_total{route="/livez",status="2xx"}', 'longtail_request_seconds_count{route="/livez"}',
        'longtail_group_queries_total{group="user",value="ä"}', "longtail_timeouts_total",
        'longtail_arm_choices_total{arm="tail",bucket="head",run="week-1"}',
    ):  # fmt: skip
        assert series[name] == 4, name
    assert series["longtail_queries_total"] == 8


def test_joint_counting_equals_single_counting(clock: Clock, tmp_path: Path) -> None:
    batches = [
        answered([[0, 1, 4], [0, 8, 12]], floored=(2, 1)),
        answered([[]], bias_removal=2.5),
        answered([[3]], restrictions=["buckets"], ids={"query": IdCounts(1, 2, 1)}),
        replace(answered([[5, 6], [7]]), arms_B=[None, ArmAnswer("week-1", "tail", 7)], explored={2: 3}),
        replace(answered([[9]], cooccurrence=0.7, ids={"query": IdCounts(1, 1, 0)}), bases={"model": 1}),
    ]
    results = []
    for together in (True, False):
        monitoring = Monitoring(tmp_path / str(together), routes=["/v1/retrieve"], clock=clock)
        monitoring.begin_release("r1", BUCKETS, None)
        for position, batch in enumerate(batches):
            monitoring.count_request("/v1/retrieve", 200 + 300 * (position % 2), 0.004 * position)
            seconds = {"encode": 0.001, "search": 0.25 * position, "answer": 3.0}
            unknown = {"exclude": position, "allow": 1}
            monitoring.count_answers(replace(batch, unknown=unknown, waited=[0.001, 20.0], seconds=seconds))
            if not together:
                monitoring.flush()
        results.append((scrape(monitoring), monitoring.report()))
    of_process = "process_", "python_", "longtail_coverage_", "longtail_gini"
    first, second = (
        {name: of for name, of in counted.items() if not name.startswith(of_process)} for counted, _ in results
    )
    assert first == pytest.approx(second, nan_ok=True)
    assert results[0][1] == results[1][1]
