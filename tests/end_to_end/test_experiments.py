"""An experiment over real processes: two arms of two releases, shares changed live, a kill, a restart, the report."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from longtail.client import Client, Feedback
from longtail.index import IndexSpec, Releases, build
from longtail.serving.cli import app
from tests.bundles import make_bundle
from tests.serving.process import server, until

pytestmark = pytest.mark.process
UNITS = [f"shopper-{number}" for number in range(120)]


def say(releases: Path, control: float, tail: float, settings: str = "bias_removal = 0.3") -> None:
    path = releases / "experiments.toml"
    path.with_suffix(".new").write_text(
        f"""
[experiments.tail_week]
unit = "user_id"
[experiments.tail_week.arms.control]
share = {control}
[experiments.tail_week.arms.tail]
share = {tail}
release = "second"
{settings}
"""
    )
    path.with_suffix(".new").replace(path)


def arms_of(longtail_: Client, units: list[str]) -> dict[str, tuple[str | None, str, float]]:
    """Arm, release and λ that every unit is answered with."""
    found = {}
    for unit in units:
        answer = longtail_.retrieve(features={"user_id": "u1"}, k=4, unit=unit, preview=True)
        (result,) = answer.results
        found[unit] = result.arm, answer.release, result.bias_removal
    return found


def shop(shopper: Client, units: list[str]) -> int:
    """Every unit asks once and chooses one label of tail's answers, of control's one in four; how many chose."""
    chosen = 0
    for number, unit in enumerate(units):
        answer = shopper.retrieve(features={"user_id": "u1"}, k=4, unit=unit)
        (result,) = answer.results
        if result.arm == "tail" or number % 4 == 0:
            shopper.feedback(Feedback(answer_id=answer.answer_id, labels=[result.labels[0].id]))
            chosen += 1
    return chosen


def test_two_arms_of_two_workers(tmp_path: Path) -> None:
    releases, state = tmp_path / "releases", tmp_path / "state"
    for name, seed in (("first", 0), ("second", 1)):
        make_bundle(labels=60, seed=seed).write(tmp_path / name)
        build(tmp_path / name, releases, spec=IndexSpec("flat"), name=name)
    Releases(releases).publish("first")
    Releases(releases).stage("second")
    say(releases, 0.5, 0.5)
    settings = {"workers": 2, "state": state, "drain_seconds": 0, "poll_seconds": 0.05}

    def compared() -> dict[str, Any]:
        options = ["experiments", str(releases), "--state", str(state), "--json"]
        return json.loads(CliRunner().invoke(app, options).output)

    def counted() -> tuple[int, int, int]:
        arms = compared()["arms"]
        return tuple(sum(arm[name] for arm in arms) for name in ("answers", "units", "hits"))  # type: ignore[return-value]

    with server(releases, tmp_path / "log", **settings) as process:
        process.wait_until_ready(60)
        with Client(process.url) as shopper:
            until(lambda: {arm for arm, *_ in arms_of(shopper, UNITS[:8] * 3).values()} == {"control", "tail"})
            before = arms_of(shopper, UNITS)
            assert {(arm, release, round(λ, 3)) for arm, release, λ in before.values()} == {
                ("control", "first", 0.5),
                ("tail", "second", 0.3),
            }
            hits = shop(shopper, UNITS)
            until(lambda: counted() == (120, 120, hits), "all answers and hits to be kept")
            report = compared()
            assert report["arms"][1]["difference"]["real"]
            assert report["arms"][1]["difference"]["low"] > 0
            assert not report["sample_ratio"]["mismatch"]
            # Both workers count choices.
            metrics = httpx.get(f"{process.url}/metrics").text
            chosen = re.findall(r'(?m)^longtail_arm_choices_total\{.*run="tail_week-.* (\d+)\.0$', metrics)
            assert sum(map(int, chosen)) == hits
            again = shop(shopper, UNITS[:40])
        supervisor = process.process.pid
        workers = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in (supervisor, *map(int, workers)):
            os.kill(pid, signal.SIGKILL)
        process.process.wait()

    with server(releases, tmp_path / "log-2", **settings) as process:
        process.wait_until_ready(60)
        # Feedback is on disk, with the answer it is about, when it is acknowledged; an answer alone within a moment.
        until(lambda: counted()[2] == hits + again, "all that was acknowledged before the kill")
        assert 120 + again <= counted()[0] <= 160
        assert counted()[1] == 120
        with Client(process.url) as shopper:
            until(lambda: all(arms_of(shopper, UNITS[:4] * 4)[unit] == before[unit] for unit in UNITS[:4]))
            assert arms_of(shopper, UNITS) == before
            # Other shares, no restart: as few units as must be change their arm, and another run begins.
            say(releases, 0.25, 0.75)
            assert counted() == (0, 0, 0)
            until(lambda: sum(arm == "tail" for arm, *_ in arms_of(shopper, UNITS).values()) > 72, "both workers")
            after = arms_of(shopper, UNITS)
            moved = {(before[unit][0], after[unit][0]) for unit in UNITS} - {("tail", "tail"), ("control", "control")}
            assert moved == {("control", "tail")}
            # The units of an arm whose release is not loaded get the default.
            (releases / "experiments.toml").write_text(
                (releases / "experiments.toml").read_text().replace("second", "third")
            )
            until(lambda: {release for _, release, _ in arms_of(shopper, UNITS[:30]).values()} == {"first"})
            assert httpx.get(f"{process.url}/readyz").status_code == 200
        assert process.terminate() == 0
