"""Requests under an experiment, on the plane: their arms, what wins, what is refused, and the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from longtail.serving import create_app
from longtail.serving.http.schemas.experiments import EXAMPLE, ExperimentsAnswer
from longtail.serving.http.schemas.retrieval import RetrieveAnswer
from tests.serving.client import client_of
from tests.serving.plane import plane_retriever, plane_settings

TWO = """
[experiments.tail_week]
unit = "user"
{options}
[experiments.tail_week.arms.control]
share = {control}
[experiments.tail_week.arms.tail]
share = {tail}
{settings}
"""
EAST, NORTH = {"features": {"user": "east"}}, {"features": {"user": "north"}}
Say = Callable[..., None]


def two(settings: str = "bias_removal = 0.25", control: float = 0.0, options: str = "") -> str:
    return TWO.format(control=control, tail=1 - control, settings=settings, options=options)


@pytest.fixture
def say(app: FastAPI, tmp_path: Path) -> Say:
    """Write experiments.toml and have it read."""

    def said(content: str | None = None, **options: Any) -> None:
        (tmp_path / "experiments.toml").write_text(two(**options) if content is None else content)
        app.state.follower.experiments.check()

    return said


def ask(client: httpx.Client, *queries: dict[str, Any], status: int = 200, **request: Any) -> Any:
    response = client.post("/v1/retrieve", json={"queries": list(queries), **request})
    assert response.status_code == status, response.text
    if status == 200:
        RetrieveAnswer.model_validate_json(response.content, strict=True)
    return response.json()


def report(client: httpx.Client) -> Any:
    response = client.get("/v1/experiments")
    assert response.status_code == 200, response.text
    ExperimentsAnswer.model_validate_json(response.content)
    return response.json()


def figures(client: httpx.Client, app: FastAPI, arm: str = "tail") -> Any:
    app.state.service.monitoring.figures.flush()
    (found,) = [one for one in report(client)["experiment"]["arms"] if one["name"] == arm]
    return found


def arm(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("experiment", "arm", "assigned_by", "counted"))


def test_without_a_file_nothing_is_said(client: httpx.Client, app: FastAPI) -> None:
    app.state.follower.experiments.check()
    answer = ask(client, EAST, unit="u", arm="whichever")
    assert not {"experiment", "arm", "assigned_by", "counted"} & answer["results"][0].keys()
    assert report(client) | {"request_id": ""} == {"experiment": None, "others": [], "refused": None, "request_id": ""}


def test_the_example_of_the_document_is_an_answer() -> None:
    ExperimentsAnswer.model_validate_json(json.dumps(EXAMPLE))


def test_an_arm_answers_with_its_settings(client: httpx.Client, app: FastAPI, say: Say) -> None:
    say()
    first, second = ask(client, EAST, NORTH | {"k": 2})["results"]
    assert (first["bias_removal"], second["bias_removal"], len(second["labels"])) == (0.25, 0.25, 2)
    assert arm(first) == arm(second) == ("tail_week", "tail", "feature", True)
    (named,) = ask(client, EAST, unit="u1")["results"]
    assert arm(named) == ("tail_week", "tail", "unit", True)
    (nobody,) = ask(client, {"features": {}})["results"]
    assert arm(nobody) == ("tail_week", "tail", "answer", True)
    found = figures(client, app)
    assert (found["answers"], found["units"]) == (4, 4)
    # k = 10 of 4 labels, but once 2: at λ = 1/4 b and c/é, torso and tail.
    assert {name: one["count"] for name, one in found["exposures"].items()} == {
        "head": 3, "torso": 4, "tail": 7, "new": 0
    }  # fmt: skip
    assert found["coverage"] == 1
    assert found["exposures"]["tail"]["coverage"] == 1


def test_a_requests_own_settings_win_and_are_not_counted(client: httpx.Client, app: FastAPI, say: Say) -> None:
    say()
    (result,) = ask(client, EAST | {"bias_removal": 0.75})["results"]
    assert (result["bias_removal"], *arm(result)) == (0.75, "tail_week", "tail", "feature", False)
    say(control=1.0)
    (result,) = ask(client, EAST | {"bias_removal": 0.75})["results"]
    assert arm(result) == ("tail_week", "control", "feature", False), (
        "in no arm, or the arms would differ by who asks so"
    )
    control = figures(client, app, "control")
    assert (control["answers"], control["units"], control["left_out"]["own_settings"]) == (0, 0, 1)


def test_a_request_may_name_its_arm(client: httpx.Client, app: FastAPI, say: Say) -> None:
    say()
    (result,) = ask(client, EAST, arm="control")["results"]
    assert (result["bias_removal"], *arm(result)) == (0.5, "tail_week", "control", "arm", False)
    (result,) = ask(client, EAST, arm="tail")["results"]
    assert (result["bias_removal"], *arm(result)) == (0.25, "tail_week", "tail", "arm", True)
    assert figures(client, app, "control")["left_out"]["named"] == 1
    error = ask(client, EAST, arm="tali", status=422)["error"]
    assert (error["field"], error["message"]) == (
        "arm", "expected one of the arms of tail_week, ['control', 'tail'], received \"tali\""
    )  # fmt: skip


def test_a_preview_has_an_arm_and_is_not_counted(client: httpx.Client, app: FastAPI, say: Say) -> None:
    say()
    (result,) = ask(client, EAST, preview=True)["results"]
    assert (result["bias_removal"], *arm(result)) == (0.25, "tail_week", "tail", "feature", False)
    found = figures(client, app)
    assert (found["answers"], sum(found["left_out"].values())) == (0, 0)


def test_units_outside_get_the_default(client: httpx.Client, app: FastAPI, say: Say) -> None:
    say(options="traffic = 1e-9")
    (result,) = ask(client, EAST)["results"]
    assert (result["bias_removal"], *arm(result)) == (0.5, "tail_week", None, "feature", False)
    assert figures(client, app)["answers"] == 0


def test_nobody_is_refused_because_of_an_arm(client: httpx.Client, app: FastAPI, say: Say, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            say(settings="bias_removal = 2.5")
    assert [record.message for record in caplog.records] == [
        "arm tail cannot answer, its units get the default: bias_removal: expected -1.0 <= bias_removal <= 2.0, "
        "received 2.5"
    ]
    (result,) = ask(client, EAST)["results"]
    assert (result["bias_removal"], *arm(result)) == (0.5, "tail_week", "tail", "feature", False)
    found = figures(client, app)
    assert found["left_out"]["unavailable"] == 1
    assert "expected -1.0 <= bias_removal" in found["unavailable"]
    # Where only the request and the arm together are wrong, the request is answered as it would be without.
    say(settings="k = 3")
    say(settings="explore = {tail = 3}")
    (result,) = ask(client, EAST | {"k": 2})["results"]
    assert (len(result["labels"]), result["counted"]) == (2, False)
    error = ask(client, EAST, EAST | {"k": 9}, status=422)["error"]
    assert error["field"] == "queries.1.k"


def test_a_bad_file_leaves_the_one_before_in_force(
    client: httpx.Client, app: FastAPI, say: Say, caplog: Any, tmp_path: Path
) -> None:
    say()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            say("[experiments.x]\narms = 3")
    (message,) = [record.message for record in caplog.records]
    said = "refused, tail_week goes on as before: experiments.x.arms: expected a valid dictionary, found 3"
    assert message.endswith(f"experiments.toml {said}")
    assert ask(client, EAST)["results"][0]["arm"] == "tail"
    assert report(client)["refused"] == "experiments.x.arms: expected a valid dictionary, found 3"
    assert client.get("/readyz").status_code == 200
    assert "longtail_experiments_refused 1.0" in client.get("/metrics").text
    findings = client.get("/v1/monitoring").json()["verdict"]["findings"]
    assert [found["severity"] for found in findings if found["signal"] == "experiments"] == ["act"]
    say()
    assert report(client)["refused"] is None
    (tmp_path / "experiments.toml").unlink()
    (tmp_path / "experiments.toml").mkdir()
    app.state.follower.experiments.check()
    assert "Is a directory" in report(client)["refused"]
    (tmp_path / "experiments.toml").rmdir()
    app.state.follower.experiments.check()
    assert "experiment" not in ask(client, EAST)["results"][0]


def test_shares_change_while_it_serves(client: httpx.Client, app: FastAPI, say: Say) -> None:
    say(control=0.0)
    assert ask(client, EAST)["results"][0]["arm"] == "tail"
    before = figures(client, app)
    assert before["answers"] == 1
    say(control=1.0)
    assert ask(client, EAST)["results"][0]["arm"] == "control"
    assert figures(client, app)["answers"] == 0, "other shares are another run"
    say(control=0.0)
    assert figures(client, app)["answers"] == 1, "the figures of a run are there when it comes back"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"unit": 3}, "unit"),
        ({"unit": ""}, "unit"),
        ({"unit": "x" * 513}, "unit"),
        ({"unit": ["u"]}, "unit"),
        ({"unit": {"a": {"b": 1}}}, "unit"),
        ({"arm": ""}, "arm"),
        ({"arm": "x" * 65}, "arm"),
        ({"arm": True}, "arm"),
    ],
)
def test_units_and_arms_that_cannot_be(client: httpx.Client, say: Say, request_: dict[str, Any], field: str) -> None:
    say()
    assert ask(client, EAST, status=422, **request_)["error"]["field"] == field


@pytest.mark.parametrize("user", ["x" * 15_000, "\u2028\0", "", 3, 3.5, True, None, 10**30])
def test_units_of_whatever_a_feature_holds(client: httpx.Client, say: Say, user: Any) -> None:
    say()
    response = client.post("/v1/retrieve", json={"queries": [{"features": {"user": user}}], "unit": None})
    assert response.status_code in (200, 422)
    if response.status_code == 200:
        by = "answer" if user in ("", None) else "feature"
        assert arm(response.json()["results"][0]) == ("tail_week", "tail", by, True)


def test_an_arm_may_have_a_release_of_its_own(tmp_path: Path, caplog: Any) -> None:
    loads: list[str] = []

    def load(name: str) -> Any:
        loads.append(name)
        if name == "gone":
            raise FileNotFoundError("no such release")
        return plane_retriever(name, prefix="other-")

    app = create_app(plane_settings(tmp_path), retriever=plane_retriever("plane-1"))
    follower = app.state.follower.experiments
    follower._load = load
    with client_of(app) as client:
        (tmp_path / "experiments.toml").write_text(two(settings='release = "plane-2"', control=0.5))
        follower.check()
        follower.check()
        assert loads == ["plane-2"]
        arms = {unit: ask(client, EAST, unit=unit) for unit in map(str, range(12))}
        assert {(one["results"][0]["arm"], one["release"]) for one in arms.values()} == {
            ("control", "plane-1"),
            ("tail", "plane-2"),
        }
        by_arm = {one["results"][0]["arm"]: unit for unit, one in arms.items()}
        queries = [{"features": {"user": unit}} for unit in "abcdefgh"]
        mixed = ask(client, *queries[:5])
        assert mixed["release"] == "plane-1"
        for result in mixed["results"]:
            other = result["arm"] == "tail"
            assert result["labels"][0]["id"].startswith("other-") == other
            assert result.get("release") == ("plane-2" if other else None)
        pinned = ask(client, EAST, unit=by_arm["tail"], release="plane-1")
        assert (pinned["release"], pinned["results"][0]["counted"]) == ("plane-1", False)
        # It stays while CURRENT moves, and hidden labels are hidden in it.
        app.state.service.serve(plane_retriever("plane-3"))
        app.state.service.serve(plane_retriever("plane-4"))
        follower.check()
        assert ask(client, EAST, unit=by_arm["tail"])["release"] == "plane-2"
        assert ask(client, EAST, unit=by_arm["control"])["release"] == "plane-4"
        places = {0: by_arm["tail"], 1: by_arm["control"]}
        chosen = ask(client, *({"features": {"user": "east"}} for _ in places), unit=by_arm["tail"])
        feedback = {"answer_id": chosen["answer_id"], "query": 1, "labels": ["other-a", "other-b"]}
        assert client.post("/v1/feedback", json={"events": [feedback]}).status_code == 200
        found = figures(client, app)
        assert (found["recall"]["all"]["positives"], found["recall"]["all"]["hits"]) == (2, 2)
        assert found["coverage"] == 1
        (tmp_path / "experiments.toml").write_text(two(settings='release = "gone"', control=0.5))
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                follower.check()
        assert [record.message for record in caplog.records] == [
            "arm tail cannot answer, its units get the default: release gone: FileNotFoundError: no such release"
        ]
        assert loads == ["plane-2", "gone"], "it is tried again later"
        (result,) = ask(client, EAST, unit=by_arm["tail"])["results"]
        assert (result["arm"], result["counted"]) == ("tail", False)
        follower.check(again=True)
        assert loads == ["plane-2", "gone", "gone"]
        assert client.post("/v1/retrieve", json={"queries": [EAST], "release": "plane-2"}).status_code == 404
