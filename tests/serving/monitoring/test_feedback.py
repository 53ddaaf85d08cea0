from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from longtail.serving.errors import NotReadyError
from longtail.serving.monitoring import AnswerFeedback, LiveFigures, ShadowPair, feedback_of
from longtail.serving.monitoring.database import open_engine
from longtail.state import Place, read_place
from longtail.state.engines import reading
from tests.serving.monitoring.shop import BUCKETS, Clock, answered

Opening = Callable[..., LiveFigures]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Both kinds of place."""
    return tmp_path if request.param == "sqlite" else read_place(request.getfixturevalue("database_server").url())


def selected(place: Place, query: str) -> list[Any]:
    """What a query finds in the place."""
    engine = open_engine(place, "FULL")
    try:
        with reading(engine) as connection:
            return [tuple(row) for row in connection.execute(text(query))]
    finally:
        engine.dispose()


def recall(
    live: LiveFigures, clock: Clock, source: str = "feedback", window: str = "24h"
) -> dict[str, tuple[int, int]]:
    """Positives and hits per bucket, after the background work was done."""
    live.flush()
    clock.pass_(1)
    figures: dict[str, Any] = live.report()["windows"][window]["recall"][source]
    return {bucket: (of["positives"], of["hits"]) for bucket, of in figures.items()}


def event(request_id: str, *rows: int, query: int = 0) -> AnswerFeedback:
    """Labels by row; what the service knows of them is their bucket."""
    return AnswerFeedback(request_id, query, [f"item-{row}" for row in rows], [int(BUCKETS[row]) for row in rows])


def unmatched(live: LiveFigures) -> float:
    (family,) = (metric for metric in live.collect() if metric.name == "longtail_feedback_unmatched")
    return float(family.samples[0].value)


def test_recall_by_hand(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0, 1, 8], [4, 5, 9]], names=["a", "b"]))
    live.record_feedback([event("a", 0, 2, 8, 11), event("b", 4)])
    assert recall(live, clock) == {"head": (2, 1), "torso": (1, 1), "tail": (2, 1), "new": (0, 0), "all": (5, 3)}
    figures = live.report()["windows"]["5m"]["recall"]["feedback"]["all"]
    # Wilson's interval of 3 of 5.
    assert (figures["value"], figures["low"], figures["high"]) == (
        pytest.approx(3 / 5),
        pytest.approx(0.2307, abs=1e-4),
        pytest.approx(0.8824, abs=1e-4),
    )
    assert live.report()["series"]["recall"]["feedback"]["head"] == [pytest.approx(1 / 2)]


def test_a_retry_counts_once(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0, 4]], names=["a"]))
    for _ in range(3):
        live.record_feedback([event("a", 0, 0, 5)])
        assert recall(live, clock)["all"] == (2, 1)
    # A label more is one positive more.
    live.record_feedback([event("a", 0, 5, 4)])
    assert recall(live, clock)["all"] == (3, 2)
    (family,) = (metric for metric in live.collect() if metric.name == "longtail_feedback_events")
    assert {sample.labels["kind"]: sample.value for sample in family.samples} == {"answer": 2, "organic": 0}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("first", ["answer", "request"])
def test_an_answer_that_is_named_in_both_ways_counts_once(
    live: LiveFigures, clock: Clock, kept: Place, first: str, at_once: bool
) -> None:
    live.count_answers(replace(answered([[0, 4]], names=["own"]), request_ids=["theirs"]))
    named = {"answer": event("own", 0, 5), "request": replace(event("own", 0, 5), answer_id=None, request_id="theirs")}
    bought = replace(named["request"], labels=["item-0"], buckets=[0], event="purchase", weight=9.0)
    order = [named[first], *(of for name, of in named.items() if name != first), bought]
    for _ in range(2):
        for said in [order] if at_once else [[of] for of in order]:
            live.record_feedback(said)
            assert recall(live, clock)["all"] == (2, 1)
    with feedback_of(kept) as feedback:
        rows = [(row.label, row.event, row.position) for row in feedback.rows(0, clock.now + 1)]
    assert sorted(rows) == [("item-0", "click", 0), ("item-0", "purchase", 0), ("item-5", "click", None)]
    # Of a request's id that is another's as well by now, nobody knows whose: the answer's own id says it still.
    live.count_answers(replace(answered([[1]], names=["next"]), request_ids=["theirs"]))
    live.record_feedback([event("next", 0), event("own", 4)])
    assert recall(live, clock)["all"] == (4, 2)


def test_an_event_may_come_before_its_answer(live: LiveFigures, clock: Clock) -> None:
    live.record_feedback([event("a", 0)])
    assert recall(live, clock)["all"] == (0, 0)
    clock.pass_(30)
    live.count_answers(answered([[0]], names=["a"]))
    clock.pass_(10)
    assert recall(live, clock)["all"] == (1, 1)
    assert unmatched(live) == 0


def test_events_of_no_answer_are_unmatched(live: LiveFigures, clock: Clock) -> None:
    live.record_feedback([event("x", 0, 1), event("y", 2)])
    clock.pass_(59)
    assert recall(live, clock)["all"] == (0, 0)
    assert unmatched(live) == 0
    clock.pass_(10)
    assert recall(live, clock)["all"] == (0, 0)
    assert unmatched(live) == 2
    # Too late.
    live.count_answers(answered([[0]], names=["x"]))
    clock.pass_(10)
    assert recall(live, clock)["all"] == (0, 0)


def test_labels_that_nobody_knows_are_no_positives(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0, 12]], names=["a"]))
    live.record_feedback([AnswerFeedback("a", 0, ["nonsense", "item-12", "\ud800"], [-1, -1, -1])])
    # Row 12 was added since: what was answered is known by the answer.
    assert recall(live, clock) == {"head": (0, 0), "torso": (0, 0), "tail": (0, 0), "new": (1, 1), "all": (1, 1)}


def test_events_of_an_earlier_release_are_its_own(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0]], names=["a"]))
    live.flush()
    live.begin_release("r2", BUCKETS, None)
    live.record_feedback([event("a", 0)])
    assert recall(live, clock)["all"] == (0, 0)
    assert live.report()["series"]["recall"]["feedback"]["all"] == [1]


def test_answers_of_a_release_not_begun_lately_count_and_take_feedback(live: LiveFigures, clock: Clock) -> None:
    """A staged release that an arm of an experiment answers from."""
    shown, judged, deciles = live.count_answers(answered([[0, 4]], release="staged", names=["a"]))
    assert (shown.tolist(), judged.tolist(), deciles) == ([1, 1, 0, 0], [1, 1, 0, 0], None)
    live.record_feedback([event("a", 0, 5)])
    assert recall(live, clock)["all"] == (0, 0)
    live.begin_release("staged", BUCKETS, None)
    assert recall(live, clock)["all"] == (2, 1)
    assert live.report()["windows"]["5m"]["queries"] == 1


def test_any_worker_takes_the_event_and_one_counts_it(open_live: Opening, clock: Clock) -> None:
    first, second, third = (open_live(worker=worker) for worker in range(3))
    first.count_answers(answered([[0, 4]], names=["a"]))
    second.record_feedback([event("a", 0, 8)])
    first.flush()
    threads = [threading.Thread(target=live.flush) for live in (first, second, third) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for live in (first, second, third):
        assert recall(live, clock)["all"] == (2, 1)


def test_organic_recall_by_hand(live: LiveFigures, clock: Clock) -> None:
    def interaction(answered: list[int], interacted: list[int]) -> ShadowPair:
        return ShadowPair(np.array(answered), np.array(interacted, np.int64))

    # An unknown label (−1) is no positive, one added since (row 12) is new.
    live.record_shadow("r1", [interaction([0, 4, 12], [0, 0, 1, 12]), interaction([5], [4, -1])])
    assert recall(live, clock, "organic") == {
        "head": (2, 1),
        "torso": (1, 0),
        "tail": (0, 0),
        "new": (1, 1),
        "all": (4, 2),
    }
    assert recall(live, clock)["all"] == (0, 0)
    with pytest.raises(NotReadyError, match="r9"):
        live.record_shadow("r9", [])


def test_planted_recall_is_recovered(open_live: Opening, clock: Clock) -> None:
    live = open_live(max_answers=10_000)
    rng = np.random.default_rng(0)
    planted = {"head": 0.8, "torso": 0.5, "tail": 0.15}
    for start in range(0, 1500, 50):
        lists, events = [], []
        for place in range(start, start + 50):
            # One label of every bucket is interacted with, and answered as often as planted.
            positives = [int(4 * bucket + rng.integers(4)) for bucket in range(3)]
            found = [row for row, share in zip(positives, planted.values(), strict=True) if rng.random() < share]
            lists.append(found or [12])
            events.append(event(f"q{place}", *positives))
        live.count_answers(answered(lists, names=[f"q{place}" for place in range(start, start + 50)]))
        live.record_feedback(events)
    live.flush()
    clock.pass_(1)
    figures = live.report()["windows"]["5m"]["recall"]["feedback"]
    for bucket, share in planted.items():
        assert figures[bucket]["positives"] == 1500
        assert figures[bucket]["low"] < share < figures[bucket]["high"]
        assert figures[bucket]["high"] - figures[bucket]["low"] < 0.06


def test_the_oldest_answers_go_first(open_live: Opening, clock: Clock, kept: Place) -> None:
    live = open_live(max_answers=10)
    for number in range(30):
        live.count_answers(answered([[0]], names=[f"a{number}"]))
        live.flush()
    live.record_feedback([event("a0", 0), event("a19", 0), event("a20", 0), event("a29", 0)])
    assert recall(live, clock)["all"] == (2, 2)
    assert selected(kept, "SELECT count(*) FROM answers") == [(10,)]


def test_settled_feedback_goes_after_two_days(live: LiveFigures, clock: Clock, kept: Place) -> None:
    def held() -> tuple[int, int]:
        counts = "SELECT (SELECT count(*) FROM feedback), (SELECT count(*) FROM recall)"
        ((feedback, minutes),) = selected(kept, counts)
        return feedback, minutes

    live.count_answers(answered([[0]], names=["a"]))
    live.record_feedback([event("a", 0), event("unknown", 0)])
    live.flush()
    clock.pass_(47 * 3600)
    live.flush()
    assert held() == (2, 1)
    clock.pass_(2 * 3600)
    live.flush()
    assert held() == (0, 0)


def test_feedback_is_kept_as_long_as_is_set(tmp_path: Path, clock: Clock, kept: Place) -> None:
    def known() -> list[tuple[str, int | None, float, float]]:
        with feedback_of(kept) as feedback:
            return [
                (row.label, row.position, row.weight, row.propensity or 0) for row in feedback.rows(0, clock.now + 1)
            ]

    live = LiveFigures(tmp_path, kept=kept, max_answers=10, max_feedback=4, feedback_seconds=7200, clock=clock)
    live.begin_release("r1", BUCKETS, None)
    drawn = replace(answered([[0, 1, 8]], names=["a"]), propensities_N=np.array([1, 1, 0.25], np.float32))
    live.count_answers(drawn)
    bought = replace(event("a", 8), event="purchase", weight=10.0)
    live.record_feedback([event("a", 8, 5), bought, bought])
    assert recall(live, clock)["all"] == (2, 1)
    assert known() == [("item-8", 2, 1.0, 0.25), ("item-5", None, 1.0, 1.0), ("item-8", 2, 10.0, 0.25)]
    clock.pass_(3600)
    live.record_feedback([event("a", 0), event("a", 1)])
    for _ in range(2):
        live.flush()
        clock.pass_(61)
    # Four at most: the oldest went.
    assert [label for label, *_ in known()] == ["item-5", "item-8", "item-0", "item-1"]
    clock.pass_(3600)
    for _ in range(2):
        live.flush()
        clock.pass_(61)
    assert [label for label, *_ in known()] == ["item-0", "item-1"]
    live.close()


def test_features_of_answers_are_kept_no_longer(clock: Clock, tmp_path: Path, kept: Place) -> None:
    def held() -> list[tuple[bytes | None]]:
        return selected(kept, "SELECT features FROM answers ORDER BY id")

    live = LiveFigures(tmp_path, kept=kept, max_answers=10, feedback_seconds=7200, clock=clock)
    live.begin_release("r1", BUCKETS, None)
    for name in ("a", "b", "c"):
        live.count_answers(replace(answered([[0]], names=[name]), features_B=[b'{"user":"' + name.encode() + b'"}']))
        live.flush()
        clock.pass_(3000)
    live.flush()
    assert held() == [(None,), (b'{"user":"b"}',), (b'{"user":"c"}',)]
    live.record_feedback([event("a", 0), event("b", 0)])
    assert recall(live, clock)["all"] == (2, 2), "feedback still finds its answer"
    with feedback_of(kept) as feedback:
        assert [row.features for row in feedback.rows(0, clock.now + 1)] == [None, b'{"user":"b"}']
    clock.pass_(7200)
    live.flush()
    live.close()
    assert held() == [(None,)] * 3


def test_an_organic_choice_counts_once_under_its_key_while_the_key_is_kept(
    live: LiveFigures, clock: Clock, kept: Place
) -> None:
    def choice(key: str | None) -> ShadowPair:
        return ShadowPair(np.array([0, 1]), np.array([1, 5]), [("item-1", 0)], b"{}", idempotency_key=key)

    for _ in range(3):
        live.record_shadow("r1", [choice("k1"), choice("k2"), choice("k1")])
    assert recall(live, clock, "organic")["all"] == (4, 2)
    live.record_shadow("r1", [choice(None)] * 2)
    assert recall(live, clock, "organic")["all"] == (8, 4)
    assert live._store.totals()["events_organic"] == 4
    clock.pass_(49 * 3600)
    live.flush()
    assert selected(kept, "SELECT count(*) FROM organic") == [(0,)]
    live.record_shadow("r1", [choice("k1")])
    assert live._store.totals()["events_organic"] == 5
