"""Arms are compared by what the service kept, with bounds that hold the truth at every look, of users who come back.

`LONGTAIL_EXPERIMENTS=4000 pytest tests/serving/test_compare.py -s` simulates so many and prints the shares.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.serving.cli import main
from longtail.serving.compare import (
    Rate,
    boundary,
    difference_interval,
    rate_interval,
    read_experiment,
    sample_ratio_evidence,
)
from longtail.serving.events.schema import event_json
from tests.events import write_events
from tests.serving.monitoring.shop import NOON

EXPERIMENTS = int(os.environ.get("LONGTAIL_EXPERIMENTS", "400"))


def looks(experiments: int, *, units: int, looks: int, click: float, spread: float, lift: float, seed: int):
    """Hits and answers of every unit up to each look, [X, T, U]; the first half of the units is control.

    A unit has a click rate of its own (a gamma of shape 1/`spread`) and an activity of its own; most are there from the
    start, others arrive. So a unit's answers depend on each other, and what it does later is like what it did.
    """
    chance = np.random.default_rng(seed)
    shape = (experiments, 1, units)
    rate = click * (chance.gamma(1 / spread, spread, shape) if spread else np.ones(shape))
    rate = np.minimum(rate * np.where(np.arange(units) < units // 2, 1.0, 1.0 + lift), 1.0)
    activity = chance.gamma(1.0, 0.4, shape)
    present = np.arange(looks)[None, :, None] >= chance.integers(-looks // 2, looks, shape)
    answers = chance.poisson(np.broadcast_to(activity * present, (experiments, looks, units)))
    hits = chance.binomial(answers, np.broadcast_to(rate, answers.shape))
    return hits.cumsum(axis=1), answers.cumsum(axis=1)


def ever_left_out(hits: np.ndarray, answers: np.ndarray, truth: float = 0.0) -> tuple[float, float]:
    """Shares of the experiments whose difference, at some look, was outside: the sequence's, the fixed-size interval's.

    Both have the same variance by unit; the first look is at 5 hits in each arm.
    """
    half = hits.shape[2] // 2
    sequence, fixed = np.zeros(len(hits), bool), np.zeros(len(hits), bool)
    parts = [(hits[..., :half], answers[..., :half]), (hits[..., half:], answers[..., half:])]
    (H0, N0), (H1, N1) = [(h.sum(axis=2), n.sum(axis=2)) for h, n in parts]
    enough = (H0 >= 5) & (H1 >= 5)
    p0, p1 = H0 / np.maximum(N0, 1), H1 / np.maximum(N1, 1)
    V0, V1 = [((h - p[..., None] * n) ** 2).sum(axis=2) for (h, n), p in zip(parts, (p0, p1), strict=True)]
    w0, w1 = N0 / (N0 + N1), N1 / (N0 + N1)
    V, size = V1 * w0**2 + V0 * w1**2, np.maximum(N1 * w0, 1e-9)
    off = np.abs(p1 - p0 - truth)
    reach = np.vectorize(boundary)(V) / size
    sequence = (off > reach) & enough
    fixed = (off > 1.959963984540054 * np.sqrt(V) / size) & enough
    return float(sequence.any(axis=1).mean()), float(fixed.any(axis=1).mean())


@pytest.mark.parametrize(
    ("click", "spread"), [(0.02, 1.0), (0.3, 0.0), (0.3, 1.0)], ids=["rare clicks", "users alike", "users differ"]
)
def test_the_truth_is_inside_at_every_look(click: float, spread: float) -> None:
    runs = looks(EXPERIMENTS, units=300, looks=60, click=click, spread=spread, lift=0.0, seed=1)
    sequence, fixed = ever_left_out(*runs)
    print(f"click {click}, spread {spread}: left out at some look {sequence:.3f}, of fixed size {fixed:.3f}")
    # Three standard errors of a share of 5 %.
    assert sequence <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)
    assert fixed > 0.12, "an interval of fixed size is no use here"


def rate(hits: list[float], trials: list[float]) -> Rate:
    return Rate(np.array(hits, np.float64), np.array(trials, np.float64))


def test_the_bounds_by_hand() -> None:
    # Two units: 3 of 10 and 1 of 10, p̂ = 0.2, V = 1 + 1.
    arm, control = rate([3, 1], [10, 10]), rate([0, 2, 0], [10, 10, 20])
    assert (arm.value, arm.variance) == (0.2, 2)
    reach = math.sqrt(2 * 66 * math.log(math.sqrt(66 / 64) / 0.05 + 1))
    assert boundary(2) == pytest.approx(reach)
    interval = rate_interval(arm, highest=1.0)
    assert interval is not None
    assert interval == {"value": 0.2, "low": 0.0, "high": pytest.approx(min(1.0, 0.2 + reach / 20)), "real": False}
    # p̂₀ = 0.05, V₀ = 0.25 + 2.25 + 1; N₁ = 20 and N₀ = 40 weigh V₁ by (2/3)² and V₀ by (1/3)², H = 40/3.
    assert control.variance == pytest.approx(3.5)
    difference = difference_interval(arm, control)
    assert difference is not None
    variance = 2 * 4 / 9 + 3.5 / 9
    assert difference["value"] == pytest.approx(0.15)
    assert difference["high"] - difference["value"] == pytest.approx(boundary(variance) / (40 / 3))
    assert not difference["real"]
    assert rate_interval(rate([], [])) is None
    assert difference_interval(rate([1], [1]), rate([0], [0])) is None


def test_a_sample_ratio_that_is_off_is_seen_and_one_that_is_right_is_not() -> None:
    assert sample_ratio_evidence([0, 0], [0.5, 0.5]) == 1
    # Two units, both in the first of two equal arms: Γ(102)/Γ(100) · Γ(200)/Γ(202) · 4 = 4 · 100 · 101 / (200 · 201).
    assert sample_ratio_evidence([2, 0], [0.5, 0.5]) == pytest.approx(4 * 100 * 101 / (200 * 201))
    assert sample_ratio_evidence([5000, 4500], [0.5, 0.5]) > 1000
    assert sample_ratio_evidence([5050, 4950], [0.5, 0.5]) < 1
    assert sample_ratio_evidence([10**8, 2 * 10**7], [0.5, 0.5]) == math.inf
    assert sample_ratio_evidence([10, 0, 1], [0.5, 0.5, 0.0]) == math.inf
    chance = np.random.default_rng(4)
    alarms = 0
    for _ in range(200):
        counts = np.cumsum(chance.multinomial(1, [0.6, 0.3, 0.1], 400), axis=0)[::4]
        alarms += any(sample_ratio_evidence(look.tolist(), [0.6, 0.3, 0.1]) >= 20 for look in counts)
    assert alarms / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


Keep = Callable[..., Path]
TOML = """
[experiments.week.arms.ctl]
share = 0.5
[experiments.week.arms.new]
share = 0.5
k = 3
"""


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Keep events in the state of a directory of releases with an experiment."""
    (tmp_path / "experiments.toml").write_text(TOML)
    return partial(write_events, tmp_path / ".state/events")


def read_run(releases: Path) -> str:
    experiment = read_experiment(releases)
    assert experiment is not None
    return experiment.run


def answer(run: str | None, name: str, arm: str | None, unit: int, rows: Sequence[int], at: float = NOON) -> bytes:
    """To a query, with `item-0` in head, `item-1` in torso and so on."""
    labels, buckets = [f"item-{row}" for row in rows], [row % 4 for row in rows]
    return event_json(
        kind="answer", time=at, answer=name, run=run, arm=arm, unit=unit, labels=labels, buckets=buckets,
        positions=list(range(len(rows))),
    )  # fmt: skip


def choice(
    run: str | None, name: str, arm: str | None, unit: int, chosen: Mapping[int, int | None], at: float = NOON + 1,
    **more: Any,
) -> bytes:  # fmt: skip
    """Of labels by row, each with its position in the answer; row −1 is a label that the release does not know."""
    labels, buckets = [f"item-{row}" for row in chosen], [row % 4 if row >= 0 else -1 for row in chosen]
    return event_json(
        kind="choice", time=at, answer=name, run=run, arm=arm, unit=unit, labels=labels, buckets=buckets,
        positions=list(chosen.values()), **more,
    )  # fmt: skip


def command(capsys: pytest.CaptureFixture[str], releases: Path, *options: str) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["experiments", str(releases), *options])
    return capsys.readouterr().out


def test_what_was_kept_is_compared(keep: Keep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = read_run(tmp_path)
    keep(
        answer(run, "a", "ctl", 5, [0, 1, 4]),
        answer(run, "b", "new", 6, [0, 2, 6]),
        answer(run, "c", "new", 6, [2, 6, 1]),
        answer(run, "d", "new", -7, [0, 4, 5]),
        answer(None, "e", None, 0, [0]),
        answer("another", "f", "new", 8, [0]),
    )
    for _ in range(2):  # sent again, it counts once
        keep(
            choice(run, "a", "ctl", 5, {0: 0, 2: None}),
            choice(run, "b", "new", 6, {2: 1, 7: None, -1: None}),
            choice(run, "b", "new", 6, {2: 1}, event="purchase"),
            choice(run, "d", "new", -7, {5: 2}, idempotency_key="k"),
            choice(None, "e", None, 0, {0: 0}),
            choice("another", "f", "new", 8, {0: 0}),
        )
    report = json.loads(command(capsys, tmp_path, "--json"))
    ctl, new = report["arms"]
    assert [(arm["units"], arm["answers"], arm["chosen"], arm["hits"]) for arm in (ctl, new)] == [
        (1, 1, 2, 1), (2, 3, 3, 2)
    ]  # fmt: skip
    assert [single["count"] for single in new["exposures"].values()] == [3, 2, 4, 0]
    assert {name: single and single["value"] for name, single in new["recall"].items()} == {
        "head": None, "torso": 1.0, "tail": 1.0, "new": 0.0, "all": 2 / 3
    }  # fmt: skip
    assert (ctl["difference"], new["difference"]["value"], new["difference"]["real"]) == (None, 2 / 3 - 1, False)
    # Units of the new arm: 1 of 2 and 1 of 1, so V = (1 − 4/3)² + (1 − 2/3)² = 2/9; the only one of control has V = 0.
    assert new["hits_per_answer"]["high"] == pytest.approx(2 / 3 + boundary(2 / 9) / 3)
    lines = command(capsys, tmp_path).splitlines()
    assert lines[0].startswith(f"{run}, from its beginning to ")
    assert lines[3].split()[:4] == ["new", "0.5", "2", "3"]
    assert lines[3].endswith("not yet")
    assert lines[-2].endswith("not yet: they hold it")
    assert lines[-1] == "left out: the last minute, whose events may be under way (--until 0m takes all)"
    assert "the last minute" not in command(capsys, tmp_path, "--until", "0m")


def test_expired_events_are_reported(keep: Keep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, noon = read_run(tmp_path), datetime.fromtimestamp(NOON, UTC).isoformat()
    keep(answer(run, "a", "ctl", 5, [0, 1], NOON - 10), answer(run, "b", "new", 6, [0, 1], NOON - 10))
    keep(choice(run, "b", "new", 6, {0: 0}, NOON - 5))
    first = json.loads(command(capsys, tmp_path, "--json", "--until", noon))
    # Later comes feedback on earlier answers, some for the second time; then what is old goes.
    keep(answer(run, "c", "new", 6, [0, 1], NOON + 10))
    keep(choice(run, "a", "ctl", 5, {1: 1}, NOON + 20), choice(run, "b", "new", 6, {0: 0}, NOON + 20))
    deleted = tmp_path / ".state/events/.deleted"
    deleted.touch()
    os.utime(deleted, (NOON, NOON))
    later = json.loads(command(capsys, tmp_path, "--json"))

    def counts(report: dict[str, Any]) -> list[tuple[int, int, int]]:
        return [(arm["units"], arm["answers"], arm["hits"]) for arm in report["arms"]]

    assert (counts(first), first["cut"]) == ([(1, 1, 0), (1, 1, 1)], False)
    assert (counts(later), later["cut"]) == ([(0, 0, 1), (1, 1, 0)], True), "no event before is sure to be kept"
    assert "this is one look" in command(capsys, tmp_path)


def test_a_missing_experiment_or_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["experiments", str(tmp_path)])
    assert "expected a file of experiments, found none" in capsys.readouterr().err
    (tmp_path / "experiments.toml").write_text("")
    assert command(capsys, tmp_path) == "no experiment runs\n"
    (tmp_path / "experiments.toml").write_text(TOML)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["experiments", str(tmp_path)])
    assert "expected a folder of events, found none" in capsys.readouterr().err
