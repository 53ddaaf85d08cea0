"""What is counted of arms: by run, over workers and restarts, with feedback that finds the arm it is about."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from longtail.serving.export import export
from longtail.serving.monitoring import AnswerFeedback, ArmAnswer, Design, LiveFigures
from tests.serving.monitoring.shop import BASELINE, BUCKETS, Clock, a_live, answered

ROOT = Path(__file__).parents[3]
FIXTURE = ROOT / "tests" / "fixtures" / "state_v3"


def design(run: str = "r-1", release: str | None = None) -> dict[str, Any]:
    arms = [
        {"name": name, "share": 0.5, "settings": {}, "release": release, "unavailable": None} for name in ("ctl", "new")
    ]
    return {"name": "exp", "run": run, "unit": "user", "traffic": 1.0, "arms": arms}


def in_arms(
    names: Sequence[str], arms: Sequence[ArmAnswer | None], lists: Sequence[Sequence[int]] | None = None
) -> Any:
    return replace(answered(lists or [[0, 4, 8]] * len(arms), names=names), arms_B=arms)


def figures(live: LiveFigures) -> dict[str, Any]:
    live.flush()
    found = live.comparison.report()["experiment"]
    return {arm["name"]: arm for arm in found["arms"]} | {"sample_ratio": found["sample_ratio"]}


CTL, NEW = (ArmAnswer("r-1", arm, unit) for arm, unit in (("ctl", 5), ("new", 6)))


def test_answers_units_exposures_and_hits_by_arm(live: LiveFigures) -> None:
    live.comparison.compare(Design(design()))
    far = ArmAnswer("r-1", "new", 6 + 3 * 1024)
    alone = ArmAnswer("r-1", "new", 2**64 - 1, alone=True)
    out = [ArmAnswer("r-1", "new", 7, left_out=why) for why in ("own_settings", "named", "unavailable")]  # type: ignore[arg-type]
    arms = [CTL, NEW, NEW, far, alone, *out, None]
    live.count_answers(in_arms([f"a{place}" for place in range(9)], arms, [[0, 1, 4]] + [[8, 9, 0]] * 8))
    chosen = {
        0: ["item-0", "item-11"],
        1: ["item-8", "item-9"],
        2: ["item-4"],
        3: ["item-0"],
        5: ["item-8"],
        8: ["item-8"],
    }
    live.flush()
    for _ in range(2):  # sent again, it counts once
        live.record_feedback(
            [
                AnswerFeedback(f"a{place}", 0, ids, [int(BUCKETS[int(id_[5:])]) for id_ in ids])
                for place, ids in chosen.items()
            ]
        )
    live.record_feedback([AnswerFeedback("a1", 0, ["item-8"], [2], event="purchase")])
    found = figures(live)
    assert [(found[arm]["answers"], found[arm]["units"]) for arm in ("ctl", "new")] == [(1, 1), (4, 3)]
    assert found["new"]["left_out"] == {"own_settings": 1, "named": 1, "unavailable": 1}
    assert {name: one["count"] for name, one in found["new"]["exposures"].items()} == {
        "head": 4, "torso": 0, "tail": 8, "new": 0
    }  # fmt: skip
    assert found["new"]["exposures"]["tail"]["coverage"] == 2 / 4
    assert found["ctl"]["coverage"] == 3 / 12
    pairs = {
        arm: {
            bucket: (one["positives"], one["hits"]) for bucket, one in found[arm]["recall"].items() if one["positives"]
        }
        for arm in ("ctl", "new")
    }
    assert pairs == {
        "ctl": {"head": (1, 1), "tail": (1, 0), "all": (2, 1)},
        "new": {"head": (1, 1), "torso": (1, 0), "tail": (2, 2), "all": (4, 3)},
    }
    assert found["new"]["hits_per_answer"]["value"] == 3 / 4
    assert (found["ctl"]["difference"], found["new"]["difference"]["value"]) == (None, 3 / 4 - 1)
    assert not found["new"]["difference"]["real"]


def test_a_run_goes_on_after_a_restart_and_another_begins_at_zero(
    open_live: Callable[..., LiveFigures], tmp_path: Path
) -> None:
    first = open_live()
    first.comparison.compare(Design(design()))
    first.count_answers(in_arms(["a", "b"], [CTL, NEW]))
    first.close()
    again, other_worker = open_live(), open_live(worker=1)
    for live in (again, other_worker):
        live.comparison.compare(Design(design()))
        live.count_answers(in_arms(["c"], [NEW], [[1, 1, 1]]))
        live.flush()
    found = figures(again)
    assert (found["new"]["answers"], found["new"]["units"], found["new"]["coverage"]) == (3, 1, 4 / 12)
    again.comparison.compare(Design(design("r-2")))
    assert figures(again)["new"]["answers"] == 0
    assert not list((tmp_path / "live" / "r1").glob("arm-r-1-*.0.ring"))
    again.comparison.compare(Design(design()))
    assert figures(again)["new"]["answers"] == 3


def test_old_runs_are_forgotten(live: LiveFigures, clock: Clock, tmp_path: Path) -> None:
    for number in range(20):
        live.count_answers(in_arms([f"a{number}"], [ArmAnswer(f"run-{number}", "new", number)]))
        live.flush()
    clock.pass_(61)
    live.flush()
    with closing(sqlite3.connect(tmp_path / "feedback.sqlite")) as connection:
        for table in ("arms", "arm_units", "arm_clusters"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (16,), table
    live.record_feedback([AnswerFeedback("a0", 0, ["item-0"], [0])])
    live.flush()


def test_units_beyond_those_that_are_told_apart_are_not_counted(open_live: Callable[..., LiveFigures]) -> None:
    live = open_live(max_answers=10)
    live.comparison.compare(Design(design()))
    for turn in range(4):
        names = [f"{turn}-{place}" for place in range(10)]
        live.count_answers(in_arms(names, [ArmAnswer("r-1", "new", 10 * turn + place) for place in range(10)]))
        live.flush()
    found = figures(live)
    assert (found["new"]["answers"], found["new"]["units"]) == (40, 10)


def test_a_retried_request_in_another_arm_is_still_one_answer(live: LiveFigures) -> None:
    live.comparison.compare(Design(design()))
    for name, arm in (("a", CTL), ("b", NEW)):
        live.count_answers(replace(in_arms([name], [arm]), request_ids=["the-gateways"]))
    live.flush()
    live.record_feedback([AnswerFeedback(None, 0, ["item-0"], [0], request_id="the-gateways")])
    found = figures(live)
    assert found["ctl"]["recall"]["all"]["positives"] + found["new"]["recall"]["all"]["positives"] == 1
    assert live._store.totals()["ambiguous"] == 0


def test_units_that_are_divided_otherwise_are_seen(live: LiveFigures) -> None:
    live.comparison.compare(Design(design()))
    arms = [ArmAnswer("r-1", "ctl" if unit % 3 else "new", unit) for unit in range(600)]
    live.count_answers(in_arms([f"a{place}" for place in range(600)], arms))
    found = figures(live)["sample_ratio"]
    assert found["mismatch"]
    assert found["found"] == {"ctl": pytest.approx(2 / 3), "new": pytest.approx(1 / 3)}


def test_a_difference_that_is_there_becomes_real(live: LiveFigures) -> None:
    live.comparison.compare(Design(design()))
    chance = np.random.default_rng(0)
    units = range(800)
    arms = [ArmAnswer("r-1", "ctl" if unit % 2 else "new", unit) for unit in units]
    live.count_answers(in_arms([f"a{place}" for place in units], arms))
    live.flush()
    chosen = [place for place in units if chance.random() < (0.1 if place % 2 else 0.4)]
    live.record_feedback([AnswerFeedback(f"a{place}", 0, ["item-0"], [0]) for place in chosen])
    difference = figures(live)["new"]["difference"]
    assert difference["real"]
    assert 0 < difference["low"] < 0.3 < difference["high"]
    found = {metric.name: metric.samples for metric in live.collect() if "_experiment" in metric.name}
    assert [sample.labels for sample in found["longtail_experiment_real"]] == [{"experiment": "exp", "arm": "new"}]
    assert all(found.values())
    documented = (ROOT / "serving" / "METRICS.md").read_text()
    assert [name for name in found if f"| `{name}` |" not in documented] == []


def test_state_of_version_3_is_brought_here(tmp_path: Path) -> None:
    """Left by one worker at noon: two answers, one under a request's id; feedback joined, and waiting for `not yet`."""
    shutil.copytree(FIXTURE, tmp_path / "state")
    live = a_live(tmp_path / "state", Clock())
    live.comparison.compare(Design(design()))
    live.count_answers(in_arms(["not yet"], [NEW], [[3, 2]]))
    live.flush()
    live.record_feedback([AnswerFeedback("second", 0, ["item-5"], [1])])
    live.record_feedback([AnswerFeedback(None, 0, ["item-9"], [2], request_id="a-request")])
    live.flush()
    recall = live.report()["windows"]["5m"]["recall"]["feedback"]["all"]
    assert (recall["positives"], recall["hits"]) == (5, 4)
    assert figures(live)["new"]["recall"]["all"]["hits"] == 1, "of the answer in an arm alone"
    live.close()
    assert not list((tmp_path / "state").glob("*.aside"))


_WORKER = """
import sys
from dataclasses import replace
from pathlib import Path
import longtail.serving.monitoring.live_figures
from longtail.serving.export import export
from longtail.serving.monitoring import AnswerFeedback, ArmAnswer, LiveFigures
from tests.serving.monitoring.shop import BASELINE, BUCKETS, answered

longtail.serving.monitoring.live_figures._TICK_SECONDS = 0.005
live = LiveFigures(Path(sys.argv[1]), max_answers=100_000)
live.begin_release("r1", BUCKETS, BASELINE)
for number in range(100_000):
    names = [f"{number}-{place}" for place in range(4)]
    arms = [ArmAnswer("r-1", ("ctl", "new")[place % 2], 4 * number + place) for place in range(4)]
    live.count_answers(replace(answered([[0, 4], [1, 8], [0, 5], [9]], names=names), arms_B=arms))
    live.record_feedback([AnswerFeedback(name, 0, ["item-0", "item-8"], [0, 2]) for name in names])
    print(number + 1, flush=True)
"""


@pytest.mark.process
def test_a_kill_loses_nothing_acknowledged_and_counts_nothing_twice(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(40)]
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait(60)
    process.stdout.close()
    batches = len([line for line in said if line])
    live = LiveFigures(tmp_path, max_answers=100_000)
    live.begin_release("r1", BUCKETS, BASELINE)
    live.comparison.compare(Design(design()))
    found = figures(live)
    live.close()
    # The batch it was killed in may be counted, no other. Of four answers, item-0 was in two, both control's.
    held = [batches, batches + 1]
    assert found["ctl"]["answers"] in [2 * batch for batch in held]
    assert found["new"]["answers"] == found["new"]["units"] == found["ctl"]["answers"]
    assert (found["ctl"]["recall"]["all"]["positives"], found["ctl"]["recall"]["all"]["hits"]) in [
        (4 * batch, 2 * batch) for batch in held
    ]
    assert (found["new"]["recall"]["all"]["positives"], found["new"]["recall"]["all"]["hits"]) in [
        (4 * batch, batch) for batch in held
    ]


def exported(state: Path, out: Path) -> dict[str, tuple[str | None, str | None]]:
    """Run and arm of every label that is exported."""
    rows = pq.read_table(export(state, out, window=(0.0, 1e12)).out).to_pylist()
    return {row["label_id"]: (row["experiment_run"], row["arm"]) for row in rows}


def test_the_arm_is_exported_of_what_counts_for_it(live: LiveFigures, tmp_path: Path) -> None:
    named = ArmAnswer("r-1", "new", 7, left_out="named")
    batch = in_arms(["first", "second", "named", "outside"], [CTL, NEW, named, None], [[0], [1], [2], [3]])
    live.count_answers(replace(batch, features_B=[b'{"arm": "of the query"}'] * 4))
    live.flush()
    for name, row in (("first", 0), ("second", 1), ("named", 2), ("outside", 3)):
        live.record_feedback([AnswerFeedback(name, 0, [f"item-{row}"], [0])])
    live.flush()
    out = tmp_path / "out.parquet"
    assert exported(tmp_path, out) == {
        "item-0": ("r-1", "ctl"), "item-1": ("r-1", "new"), "item-2": (None, None), "item-3": (None, None),
    }  # fmt: skip
    assert pq.read_table(out)["feature_arm"].to_pylist() == ["of the query"] * 4


def test_version_4_is_brought_here_and_what_was_pending_finds_its_arm(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE.with_name("state_v4"), tmp_path / "state")
    live = a_live(tmp_path / "state", Clock())
    live.comparison.compare(Design(design()))
    live.flush()
    found = figures(live)
    assert [(found[arm]["answers"], found[arm]["recall"]["all"]["hits"]) for arm in ("ctl", "new")] == [(1, 1), (1, 1)]
    assert exported(tmp_path / "state", tmp_path / "out.parquet") == {
        "item-4": (None, None), "item-11": (None, None), "item-2": (None, None), "item-3": (None, None),
        "item-1": ("r-1", "new"), "item-0": ("r-1", "new"),
    }  # fmt: skip
    live.close()
    assert not list((tmp_path / "state").glob("*.aside"))
