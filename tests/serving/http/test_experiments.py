"""Requests under an experiment, on the plane: their arms, which settings win, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from longtail.serving.compare import compare
from longtail.serving.http.schemas.retrieval import RetrieveAnswer
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

EAST, NORTH = {"features": {"user": "east"}}, {"features": {"user": "north"}}
Say = Callable[..., None]


def two_arms(settings: str = "bias_removal = 0.25", control: float = 0.0, options: str = "") -> str:
    return f"""
[experiments.tail_week]
unit = "user"
{options}
[experiments.tail_week.arms.control]
share = {control}
[experiments.tail_week.arms.tail]
share = {1 - control}
{settings}
"""


@pytest.fixture
def say(app: Starlette, tmp_path: Path) -> Say:
    """Write experiments.toml and have it read."""

    def write_experiments(content: str | None = None, **options: Any) -> None:
        (tmp_path / "experiments.toml").write_text(two_arms(**options) if content is None else content)
        app.state.follower.experiments.check()

    return write_experiments


def ask(client: httpx.Client, *queries: dict[str, Any], status: int = 200, **request: Any) -> Any:
    response = client.post("/v1/retrieve", json={"queries": list(queries), **request})
    assert response.status_code == status, response.text
    if status == 200:
        RetrieveAnswer.model_validate_json(response.content, strict=True)
    return response.json()


def figures(app: Starlette, arm: str = "tail") -> Any:
    service = app.state.service
    service._events.append([]).result(10)  # what was offered before is written
    report = compare(service.searches.experiment, service.settings.state_directory / "events", (0.0, 1e10))
    return next(single for single in report["arms"] if single["name"] == arm)


def read_arm(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["bias_removal"], result["arm"], result["counted"]


def test_an_arm_answers_with_its_settings(client: httpx.Client, app: Starlette, say: Say) -> None:
    say()
    first, second = ask(client, EAST, NORTH | {"k": 2})["results"]
    assert read_arm(first) == read_arm(second) == (0.25, "tail", True)
    assert (len(second["labels"]), first["run"]) == (2, app.state.service.searches.experiment.run)
    assert read_arm(ask(client, EAST, unit="u1", answer_ids=False)["results"][0]) == (0.25, "tail", True)
    answer = ask(client, {"features": {}})
    assert read_arm(answer["results"][0]) == (0.0, "tail", True)  # popularity ranks, in every arm
    (result,) = answer["results"]
    event = {"answer_id": result["answer_id"], "labels": [result["labels"][0]["id"], "nothing"]}
    assert client.post("/v1/feedback", json={"events": [event]}).status_code == 200
    arm_figures = figures(app)
    # k = 10 of 4 labels, but once 2: at λ = 1/4 b and c/é, torso and tail.
    assert {name: single["count"] for name, single in arm_figures["exposures"].items()} == {
        "head": 3, "torso": 4, "tail": 7, "new": 0
    }  # fmt: skip
    assert (arm_figures["answers"], arm_figures["units"], arm_figures["chosen"], arm_figures["hits"]) == (4, 4, 1, 1), (
        "without a share of answers"
    )
    metrics = client.get("/metrics").text
    assert f'longtail_arm_answers_total{{arm="tail",run="{first["run"]}"}} 4.0' in metrics
    assert f'longtail_arm_exposures_total{{arm="tail",bucket="tail",run="{first["run"]}"}} 7.0' in metrics
    assert f'longtail_arm_choices_total{{arm="tail",bucket="{result["labels"][0]["bucket"]}"' in metrics


def test_settings_of_a_request_override_its_arm_and_are_not_counted(
    client: httpx.Client, app: Starlette, say: Say
) -> None:
    for control, arm in ((0.0, "tail"), (1.0, "control")):
        say(control=control)
        (result,) = ask(client, EAST | {"bias_removal": 0.75})["results"]
        # In neither arm, or the arms would differ by who sets it.
        assert read_arm(result) == (0.75, arm, False)
        assert figures(app, arm)["answers"] == 0


def test_a_request_may_name_its_arm(client: httpx.Client, app: Starlette, say: Say) -> None:
    say()
    assert read_arm(ask(client, EAST, arm="control")["results"][0]) == (0.5, "control", False)
    assert read_arm(ask(client, EAST, arm="tail")["results"][0]) == (0.25, "tail", True)
    error = ask(client, EAST, arm="tali", status=422)["error"]
    assert (error["field"], error["message"]) == (
        "arm", "expected one of the arms of tail_week, ['control', 'tail'], received \"tali\""
    )  # fmt: skip
    assert read_arm(ask(client, EAST, preview=True)["results"][0])[:2] == (0.25, "tail")
    assert figures(app)["answers"] == 1, "of a preview nothing is"


def test_no_request_is_refused_because_of_an_arm(client: httpx.Client, say: Say, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            say(settings="bias_removal = 2.5")
    assert [record.message for record in caplog.records] == [
        "arm tail cannot answer, its units get the default: bias_removal: expected -1.0 <= bias_removal <= 2.0, "
        "received 2.5"
    ]
    assert read_arm(ask(client, EAST)["results"][0]) == (0.5, "tail", False)
    # Where only the request and the arm together are wrong, the request is answered as it would be without.
    say(settings="pool = 3\nmmr = 0.5\nk = 2")
    (result,) = ask(client, EAST | {"k": 4})["results"]
    assert (len(result["labels"]), result["counted"]) == (4, False)
    error = ask(client, EAST, EAST | {"k": 4, "buckets": ["head"], "explore": {"tail": 1}}, status=422)["error"]
    assert error["field"] == "queries.1.explore.tail"
    say(settings="explore = {tail = 1}")
    (result,) = ask(client, EAST | {"k": 2, "mmr": 0.5})["results"]
    assert (len(result["labels"]), result["counted"]) == (2, False)


def test_a_bad_file_leaves_the_one_before_in_force(
    client: httpx.Client, app: Starlette, say: Say, caplog: Any, tmp_path: Path
) -> None:
    say()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            say("[experiments.x]\narms = 3")
    (message,) = [record.message for record in caplog.records]
    assert message.endswith("refused, tail_week goes on: experiments.x.arms: expected a table, received 3")
    assert ask(client, EAST)["results"][0]["arm"] == "tail"
    assert client.get("/readyz").status_code == 200
    findings = client.get("/v1/monitoring").json()["verdict"]["findings"]
    assert [finding["severity"] for finding in findings if finding["signal"] == "experiments"] == ["act"]
    (tmp_path / "experiments.toml").unlink()
    (tmp_path / "experiments.toml").mkdir()
    app.state.follower.experiments.check()
    assert ask(client, EAST)["results"][0]["arm"] == "tail"
    (tmp_path / "experiments.toml").rmdir()
    say()
    findings = client.get("/v1/monitoring").json()["verdict"]["findings"]
    assert not [finding for finding in findings if finding["signal"] == "experiments"], "the same content is read again"
    (tmp_path / "experiments.toml").unlink()
    app.state.follower.experiments.check()
    assert "arm" not in ask(client, EAST)["results"][0]


@pytest.mark.parametrize("user", ["x" * 15_000, "\u2028\0", "", 3, 3.5, True, None, 10**30])
def test_units_of_any_feature(client: httpx.Client, say: Say, user: Any) -> None:
    say()
    response = client.post("/v1/retrieve", json={"queries": [{"features": {"user": user}}], "unit": None})
    assert response.status_code in (200, 422)
    if response.status_code == 200:
        assert read_arm(response.json()["results"][0]) == (0.0, "tail", True)  # popularity ranks, in every arm


def test_an_arm_may_name_a_release(tmp_path: Path, caplog: Any) -> None:
    app = create_app(plane_settings(tmp_path), retriever=plane_retriever("plane-1"))
    follower, service = app.state.follower.experiments, app.state.service
    with open_client(app) as client:
        service.stage(plane_retriever("plane-2", prefix="other-"))
        (tmp_path / "experiments.toml").write_text(two_arms(settings='release = "plane-2"', control=0.5))
        follower.check()
        answers = {unit: ask(client, EAST, unit=unit) for unit in map(str, range(12))}
        assert {(single["results"][0]["arm"], single["release"]) for single in answers.values()} == {
            ("control", "plane-1"), ("tail", "plane-2")
        }  # fmt: skip
        by_arm = {single["results"][0]["arm"]: unit for unit, single in answers.items()}
        mixed = ask(client, *({"features": {"user": unit}} for unit in "abcde"))
        assert mixed["release"] == "plane-1"
        for result in mixed["results"]:
            assert result["labels"][0]["id"].startswith("other-") == (result["arm"] == "tail")
            assert result["release"] == ("plane-2" if result["arm"] == "tail" else "plane-1")
        pinned = ask(client, EAST, unit=by_arm["tail"], release="plane-1")
        assert (pinned["release"], pinned["results"][0]["counted"]) == ("plane-1", False)
        chosen = ask(client, EAST, EAST, unit=by_arm["tail"])
        feedback = {"answer_id": chosen["results"][1]["answer_id"], "labels": ["other-a", "other-b"]}
        assert client.post("/v1/feedback", json={"events": [feedback]}).status_code == 200
        arm_figures = figures(app)
        assert (arm_figures["chosen"], arm_figures["hits"]) == (2, 2)
        service.stage(None)
        (result,) = ask(client, EAST, unit=by_arm["tail"])["results"]
        # Nobody is refused, even before the arms are looked at again.
        assert (result["release"], *read_arm(result)) == ("plane-1", 0.5, "tail", False)
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                follower.check()
        assert [record.message for record in caplog.records] == [
            "arm tail cannot answer, its units get the default: release: expected one of the releases loaded, "
            "['plane-1'], received \"plane-2\""
        ]
        (result,) = ask(client, EAST, unit=by_arm["tail"])["results"]
        assert (result["arm"], result["counted"]) == ("tail", False)
