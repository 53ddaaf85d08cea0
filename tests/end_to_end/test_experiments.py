"""An experiment over real processes: two arms of two releases, shares changed live, a kill, a restart, the report."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from longtail.client import Client, Feedback
from longtail.index import IndexSpec, Releases, build
from longtail.serving.cli import app
from tests.bundles import make_bundle
from tests.serving.process import ServerProcess, server, until

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


def report(process: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{process.url}/v1/experiments").json()["experiment"]


def shop(longtail_: Client, units: list[str]) -> int:
    """Every unit asks once and chooses one label of tail's answers, of control's one in four; how many chose."""
    chosen = 0
    for number, unit in enumerate(units):
        answer = longtail_.retrieve(features={"user_id": "u1"}, k=4, unit=unit)
        (result,) = answer.results
        if result.arm == "tail" or number % 4 == 0:
            longtail_.feedback(Feedback(answer_id=answer.answer_id, labels=[result.labels[0].id]))
            chosen += 1
    return chosen


def counted(process: ServerProcess) -> tuple[int, int, int]:
    """Answers, units and hits of both arms."""
    arms = report(process)["arms"]
    return (
        sum(arm["answers"] for arm in arms),
        sum(arm["units"] for arm in arms),
        sum(arm["hits_per_answer"]["hits"] for arm in arms),
    )


def test_two_arms_of_two_workers(tmp_path: Path) -> None:
    releases, state = tmp_path / "releases", tmp_path / "state"
    for name, seed in (("first", 0), ("second", 1)):
        make_bundle(labels=60, seed=seed).write(tmp_path / name)
        build(tmp_path / name, releases, spec=IndexSpec("flat"), name=name)
    Releases(releases).publish("first")
    say(releases, 0.5, 0.5)
    settings = {"workers": 2, "state": state, "drain_seconds": 0, "poll_seconds": 0.05}
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
            until(lambda: counted(process) == (120, 120, hits), "all answers and hits to be counted")
            found = report(process)
            assert found["arms"][1]["difference"]["real"]
            assert found["arms"][1]["difference"]["low"] > 0
            assert not found["sample_ratio"]["mismatch"]
            metrics = httpx.get(f"{process.url}/metrics").text
            assert 'longtail_experiment_real{arm="tail",experiment="tail_week"} 1.0' in metrics
            # A request's own λ, and one that chooses its arm, are in no figures.
            assert shopper.retrieve(features={"user_id": "u1"}, unit="x", bias_removal=0.5).results[0].counted is False
            other = "tail" if before[UNITS[0]][0] == "control" else "control"
            assert shopper.retrieve(features={"user_id": "u1"}, unit=UNITS[0], arm=other).results[0].counted is False
            assert shopper.experiments()["experiment"]["run"] == found["run"]

            printed = CliRunner().invoke(app, ["experiments", str(releases), "--state", str(state)]).output
            assert re.search(r"(?m)^tail +0\.5 +\d+ .* real$", printed)

            again = shop(shopper, UNITS[:40])
        supervisor = process.process.pid
        workers = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in (supervisor, *map(int, workers)):
            os.kill(pid, signal.SIGKILL)
        process.process.wait()

    (releases / "experiments.toml").write_text("[experiments.tail_week]\narms = 3")
    with server(releases, tmp_path / "log-2", **settings) as process:
        process.wait_until_ready(60)
        assert httpx.get(f"{process.url}/v1/experiments").json()["experiment"] is None
        say(releases, 0.5, 0.5)
        process.process.send_signal(signal.SIGHUP)
        until(lambda: report(process) is not None, "the experiment to run")
        # Feedback is on disk, with the answer it is about, when it is acknowledged; an answer alone within a moment.
        until(lambda: counted(process)[2] == hits + again, "all that was acknowledged before the kill")
        assert 120 + again <= counted(process)[0] <= 160
        assert counted(process)[1] == 120
        with Client(process.url) as shopper:
            until(lambda: all(arms_of(shopper, UNITS[:4] * 4)[unit] == before[unit] for unit in UNITS[:4]))
            assert arms_of(shopper, UNITS) == before
            # Other shares: no restart, as few units as must be change their arm, another run begins.
            say(releases, 0.25, 0.75)
            until(lambda: counted(process) == (0, 0, 0), "another run")
            until(lambda: sum(arm == "tail" for arm, *_ in arms_of(shopper, UNITS).values()) > 72, "both workers")
            after = arms_of(shopper, UNITS)
            moved = {(before[unit][0], after[unit][0]) for unit in UNITS} - {("tail", "tail"), ("control", "control")}
            assert moved == {("control", "tail")}
            # A release that is not there: its units get the default, and it is said.
            (releases / "experiments.toml").write_text(
                (releases / "experiments.toml").read_text().replace("second", "third")
            )
            until(lambda: (report(process)["arms"][1]["unavailable"] or "").startswith("release third"))
            until(lambda: {release for _, release, _ in arms_of(shopper, UNITS[:30]).values()} == {"first"})
            assert httpx.get(f"{process.url}/readyz").status_code == 200
        assert process.terminate() == 0
