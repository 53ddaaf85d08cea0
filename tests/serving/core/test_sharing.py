"""Who is served next, who makes room, and that work done in parts is one work: tenants of the batcher."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle.lookup import fingerprints
from longtail.serving import create_app
from longtail.serving.core.batcher import Batcher, Part
from longtail.serving.core.fair_queue import MOST_TENANTS, FairQueue, Lane
from longtail.serving.core.queries import Mmr, Query, SimilarQuery
from longtail.serving.core.searches import Search
from longtail.serving.errors import InvalidRequestError, QueueFullError
from longtail.serving.monitoring import join_batches
from tests.serving.client import client_of
from tests.serving.core.test_batcher import Gate, busy, run
from tests.serving.monitoring.shop import answered
from tests.serving.plane import plane_retriever, plane_settings


@dataclass(eq=False)
class Job:
    """One that waits."""

    name: str
    size: int = 1
    cost: float = 1.0
    key: str = "k"
    since: float = 0.0
    begun: bool = False
    done: list[str] = field(default_factory=list)


def queue(**jobs: Sequence[Job]) -> FairQueue[Job]:
    waiting: FairQueue[Job] = FairQueue()
    for tenant, of in jobs.items():
        for job in of:
            waiting.append(tenant, job)
    return waiting


def served(waiting: FairQueue[Job], max_size: int = 1, max_cost: float = 100.0) -> list[str]:
    """Names in the order of service, batches joined by +."""
    batches = []
    while waiting:
        batches.append("+".join(job.name for job in waiting.take_batch(max_size, max_cost)))
    return batches


def test_tenants_take_turns_by_what_they_cost() -> None:
    waiting = queue(a=[Job(f"a{n}", cost=3) for n in range(4)], b=[Job(f"b{n}") for n in range(4)])
    # Clocks of (a, b): 0 0, 3 0, 3 1, 3 2, 3 3, 6 3, 6 4, 9 4.
    assert served(waiting) == ["a0", "b0", "b1", "b2", "a1", "b3", "a2", "a3"]


def test_who_comes_late_is_not_paid_for_the_time_away() -> None:
    waiting = queue(a=[Job(f"a{n}") for n in range(4)])
    assert [waiting.take_batch(1, 9)[0].name for _ in range(2)] == ["a0", "a1"]
    for n in range(3):
        waiting.append("b", Job(f"b{n}"))
    # b starts where a was served last, at 1: one of b before a's next, then they alternate.
    assert served(waiting) == ["b0", "a2", "b1", "a3", "b2"]


def test_a_batch_has_one_of_each_in_turn_and_only_what_fits() -> None:
    waiting = queue(
        a=[Job("a0"), Job("a1", cost=50), Job("a2"), Job("a3", key="other")], b=[Job("b0", size=9), Job("b1")]
    )
    # b0 is too large, a1 too dear, a3 of another key: each waits for a batch of its own.
    assert served(waiting, max_size=4, max_cost=10.0) == ["a0+b1+a2", "b0", "a1", "a3"]


def test_a_full_queue_is_shared_by_size() -> None:
    waiting = queue(a=[Job("a0", size=4), Job("a1", size=4)], b=[Job("b0", size=1)])
    assert waiting.size == 9
    assert waiting.may_displace("new", 7)
    assert not waiting.may_displace("new", 8)
    assert waiting.may_displace("b", 6)
    assert not waiting.may_displace("b", 7)
    assert not waiting.may_displace("a", 1)
    # Of 12, a has 8 and b 1: a third each were 4 with a newcomer, a half 6 without.
    assert waiting.has_share("b", 12, 0.0)
    assert not waiting.has_share("a", 12, 0.0)
    assert waiting.has_share("new", 1, 0.0)
    assert waiting.has_share("a", 19, 0.0)
    assert waiting.displace().name == "a1"
    assert waiting.has_share("a", 12, 0.0)
    assert waiting.size == 5


def test_tenants_are_bounded_and_forgotten() -> None:
    waiting: FairQueue[Job] = FairQueue()
    for n in range(MOST_TENANTS + 500):
        waiting.append(n, Job(str(n)))
    assert waiting.tenants(0.0) == MOST_TENANTS + 1
    assert waiting.take_batch(1, 1)[0].name == "0"
    assert len(waiting.drop(lambda _: True)) == waiting.size + MOST_TENANTS + 499
    assert waiting.tenants(2.0) == 0


def test_a_client_of_two_models_has_one_share_and_each_model_half_of_it() -> None:
    waiting: FairQueue[Job] = FairQueue()
    for n in range(4):
        waiting.append("a", Job(f"a{n}"))
        waiting.append(Lane("b", "films"), Job(f"f{n}", key="f"))
        waiting.append("b", Job(f"b{n}"))
    # Clocks of (a, films, b): 0 0 0, 1 0 0, 1 2 0, 1 2 2, 2 2 2, 3 2 2, 3 4 2, 3 4 4, 4 4 4.
    assert served(waiting) == ["a0", "f0", "b0", "a1", "a2", "f1", "b1", "a3", "f2", "b2", "f3", "b3"]


def test_the_queue_is_shared_by_clients_and_what_each_has_of_it_by_its_models() -> None:
    waiting: FairQueue[Job] = FairQueue()
    for n in range(6):
        waiting.append("a", Job(f"a{n}"))
        waiting.append(Lane("b", "films"), Job(f"f{n}", key="f"))
    # Of 12: a half to either client, a quarter to either model of one that asks two.
    assert not waiting.has_share("a", 12, 0.0)
    assert waiting.has_share("b", 12, 0.0)
    waiting.append("b", Job("b0"))
    # films has 6 where it may have 3, and makes room for b's other model and for a.
    assert waiting.may_displace("b", 1)
    assert waiting.may_displace("a", 1)
    assert [waiting.displace().name for _ in range(3)] == ["f5", "f4", "f3"]
    assert not waiting.may_displace(Lane("b", "films"), 1)
    # With b's two models gone quiet, what is left of it is whole again.
    assert len(waiting.drop(lambda job: job.name.startswith(("f", "b")))) == 4
    assert waiting.tenants(2.0) == 1
    assert waiting.has_share("a", 7, 2.0)


def divide(work: Any, cost: float) -> Part[Any] | None:
    """Works are lists of numbers, each of cost 1."""
    take = max(1, int(cost))
    return Part(work[:take], take, work[take:]) if isinstance(work, list) and len(work) > take else None


class Lists(Gate):
    """Doubles numbers and lists of them; 13 fails."""

    def run(self, key: Any, works: Sequence[Any], waited: Sequence[float]) -> list[Any]:  # noqa: ARG002
        self.batches.append((key, list(works)))
        assert self.open.wait(10)
        return [
            ValueError("13") if work == [13] else [2 * n for n in work] if isinstance(work, list) else 2 * work
            for work in works
        ]


def sharing(gate: Gate, **changes: Any) -> Batcher[Any, Any]:
    options = {"threads": 1, "window": 0.0, "max_batch": 1, "max_pending": 600, "timeout": 5.0, "divide": divide}
    return Batcher(gate.run, **(options | changes), join=lambda _, parts: [n for part in parts for n in part])


def test_large_work_is_done_in_parts_with_others_between() -> None:
    gate = Lists()

    async def work() -> None:
        batches = sharing(gate)
        first = await busy(batches, gate)
        greedy = batches.submit("a", list(range(300)), 300, tenant="greedy", cost=300)
        polite = [batches.submit("a", n, 1, tenant="polite", cost=1) for n in (1, 2)]
        gate.open.set()
        assert await asyncio.gather(first, *polite) == [0, 2, 4]
        assert await greedy == [2 * n for n in range(300)]
        assert (batches.depth, len(batches._running)) == (0, 0)

    run(work)
    # Parts of 128 / 8 while two share; 300 is 18 of them and a rest. The polite come after one.
    works = [works[0] for _, works in gate.batches]
    assert [work if isinstance(work, int) else len(work) for work in works] == [0, 16, 1, 2, *[16] * 17, 12]


def test_the_rest_of_a_work_is_never_taken_for_a_whole_one_of_anothers_batch() -> None:
    gate = Lists()

    async def work() -> None:
        batches = sharing(gate, max_batch=64, max_pending=2000)
        first = await busy(batches, gate)
        greedy = batches.submit("a", list(range(1040)), 1040, tenant="greedy", cost=1040)
        polite = batches.submit("a", 1, 1, tenant="polite", cost=2000)
        late = batches.submit("a", 2, 1, tenant="polite", cost=1)
        gate.open.set()
        assert await asyncio.gather(first, polite, late) == [0, 2, 4]
        assert await greedy == [2 * n for n in range(1040)]
        assert (batches.depth, len(batches._running)) == (0, 0)

    run(work)


def test_a_work_under_way_takes_no_room_of_those_that_wait() -> None:
    waiting = queue(a=[large := Job("large", size=500, cost=500), Job("next", size=100)])
    waiting.begin_next(128)
    assert (waiting.size, waiting.has_share("a", 200, 0.0)) == (100, True)
    waiting.begin_next(128)
    assert (waiting.size, bool(waiting), waiting.next) == (100, True, large)
    assert waiting.drop(lambda job: job is not large)[0].name == "next"
    assert (waiting.size, bool(waiting)) == (0, True)


def test_alone_parts_are_large() -> None:
    gate = Lists()

    async def work() -> None:
        batches = sharing(gate)
        assert await batches.submit("a", list(range(300)), 300, tenant="greedy", cost=300) == [
            2 * n for n in range(300)
        ]

    run(work)
    assert [len(works[0]) for _, works in gate.batches] == [128, 128, 44]


def test_a_part_that_fails_fails_the_work_and_spares_the_rest() -> None:
    gate = Lists()

    async def work() -> None:
        batches = sharing(gate, divide=lambda work, _: divide(work, 1))
        with pytest.raises(ValueError, match="13"):
            await batches.submit("a", [1, 13, 2, 3], 4, cost=500)
        assert (batches.depth, len(batches._running)) == (0, 0)
        assert await batches.submit("a", 4, 1) == 8

    run(work)
    assert [works[0] for _, works in gate.batches] == [[1], [13], 4]


def test_the_newest_of_whoever_holds_most_makes_room() -> None:
    gate = Lists()

    async def work() -> None:
        batches = sharing(gate, max_pending=4)
        first = await busy(batches, gate)
        greedy = [batches.submit("a", n, 2, tenant="greedy") for n in (1, 2)]
        assert batches.has_room("polite")
        assert not batches.has_room("greedy")
        with pytest.raises(QueueFullError, match="found 4 and received 1 more"):
            batches.submit("a", 3, 1, tenant="greedy")
        polite = batches.submit("a", 4, 1, tenant="polite")
        gate.open.set()
        with pytest.raises(QueueFullError, match="shared fairly, found that others with fewer need the room"):
            await greedy[1]
        assert await asyncio.gather(first, greedy[0], polite) == [0, 2, 8]

    run(work)


def test_what_times_out_amid_its_parts_leaves_nothing_behind() -> None:
    gate = Lists()

    async def work() -> None:
        batches = sharing(gate, timeout=0.1, divide=lambda work, _: divide(work, 1))
        gate.open.clear()
        future = batches.submit("a", [1, 2, 3], 3, cost=500)
        done = await asyncio.gather(future, return_exceptions=True)
        assert "found the service too busy" in str(done[0])
        gate.open.set()
        assert await batches.submit("a", 5, 1) == 10
        assert (batches.depth, len(batches._running)) == (0, 0)

    run(work)
    assert [works[0] for _, works in gate.batches] == [[1], 5]


def test_parts_that_are_joined_count_as_one_batch() -> None:
    first = answered([[0, 4], [8]], names=["a", "a"], bias_removal=0.25)
    drawn = replace(
        answered([[1, 2, 12]], names=["a"], score=2.0),
        places=[2],
        propensities_N=np.array([1, 0.5, 0.25], np.float32),
        explored={0: 1, 1: 2},
        request_ids=["theirs"],
    )
    last = replace(answered([[], [5]], names=["a", "a"]), explored={1: 3}, features_B=[b"{}", None])
    whole = join_batches([first, drawn, last])
    assert (whole.release, whole.answer_ids, whole.places) == ("r1", ["a"] * 5, [0, 0, 2, 0, 0])
    assert whole.ends_B == [2, 3, 6, 6, 7]
    assert whole.rows_N.tolist() == [0, 4, 8, 1, 2, 12, 5]
    assert whole.buckets_N.tolist() == [0, 1, 2, 0, 0, 3, 1]
    assert whole.counts_N.tolist() == [100, 10, 1, 100, 100, 0, 10]
    assert whole.scores_N.tolist() == [0.5] * 3 + [2.0] * 3 + [0.5]
    assert whole.bias_removal_B.tolist() == [0.25, 0.25, 0.5, 0.5, 0.5]
    assert whole.propensities_N is not None
    assert whole.propensities_N.tolist() == [1, 1, 1, 1, 0.5, 0.25, 1]
    assert whole.explored == {0: 1, 1: 5}
    assert whole.features_B == [None, None, None, b"{}", None]
    assert whole.request_ids == [None, None, "theirs", None, None]
    assert whole.arms_B is None
    assert whole.fingerprints_N.tolist() == fingerprints(f"item-{row}" for row in whole.rows_N).tolist()


def test_a_request_in_parts_is_counted_in_one_go(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, max_batch=1), retriever=plane_retriever())
    monitoring = app.state.service.monitoring
    counted: list[int] = []
    count = monitoring.count_answers
    monitoring.count_answers = lambda batch, unknown: (counted.append(len(batch.ends_B)), count(batch, unknown))
    queries = [{"features": {"user": "east"}, "k": 1, "exclude": ["nobody"]}] * 5
    with client_of(app) as client:
        assert client.post("/v1/retrieve", json={"queries": queries}).status_code == 200
        assert 'longtail_labels_unknown_total{list="exclude"} 5.0' in client.get("/metrics").text
    assert counted == [5]


def test_a_search_is_divided_by_cost_and_its_errors_name_the_requests_queries() -> None:
    queries = [Query(features={}, k=k) for k in (100, 36, 1000, 10, 10)]
    search = Search(queries, "own", "theirs")
    assert search.cost == 164 + 100 + 1064 + 74 + 74
    assert search.labels == 1156
    part = search.divide(300.0)
    assert part is not None
    assert (part.cost, part.work.asked, part.rest.asked) == (264, queries[:2], queries[2:])
    second = part.rest.divide(300.0)
    assert second is not None
    assert (second.work.queries, list(second.work.places), list(second.rest.places)) == (1, [2], [3, 4])
    error = second.rest.located(InvalidRequestError("no", field="queries.1.k"))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "queries.4.k"
    assert Search(queries[:1], "own", "theirs").divide(1.0) is None
    # 64 and its pool: 4·k, at least 100, or what is asked for.
    apart = [
        Query(features={}, k=10, max_per={"brand": 2}),
        Query(features={}, k=50, mmr=Mmr(weight=0.5)),
        Query(features={}, k=10, mmr=Mmr(weight=0.5), pool=4000),
    ]
    deep = Search(apart, "own", "theirs")
    assert (deep.cost, deep.labels) == (164 + 264 + 4064, 70)
    first = deep.divide(500.0)
    assert first is not None
    assert (first.cost, first.rest.asked) == (428, apart[2:])
    alike = Search(SimilarQuery(ids=["a", "b"], k=10, max_per={"brand": 1}, pool=200), "own", "theirs")
    assert (alike.cost, alike.labels) == (2 * 264, 20)
    similar = Search(SimilarQuery(ids=["a", "b", "c"], k=36), "own", "theirs").divide(200.0)
    assert similar is not None
    assert isinstance(similar.rest.asked, SimilarQuery)
    assert (similar.work.queries, similar.rest.asked.labels, list(similar.rest.places)) == (2, ["c"], [2])
    error = similar.rest.located(InvalidRequestError("no", field="k"))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "k"
