"""What a log of explored answers says about other λ is what users do who are answered at these λ."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from tests.bundles import make_bundle
from tests.end_to_end.commands import longtail
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle

USERS, LABELS, K, VISITS, LAMBDAS = 100, 30, 8, 30, (0.0, 0.1, 0.8)


@pytest.mark.process
@pytest.mark.nightly
def test_estimates_are_what_other_lambdas_bring(tmp_path: Path) -> None:
    """Users are answered at λ = 0, and choose a label that they see with a chance of their own, larger in head."""
    page, chance, bundle = tmp_path / "report.html", np.random.default_rng(3), make_bundle(labels=LABELS, users=USERS)
    releases = publish_bundle(bundle, tmp_path)
    tastes = chance.uniform(0.02, 0.1, (USERS, LABELS)) * np.where(bundle.labels.buckets == 0, 8.0, 1.0)

    def choice_probability(user: int, label: dict[str, Any]) -> float:
        return float(tastes[user, int(label["id"].removeprefix("item-"))])

    def estimate(out: Path, *options: object) -> None:
        at = [option for dial in LAMBDAS for option in ("--at", dial)]
        longtail("serving", "off-policy", releases, "--until", "0m", *at, *options, "--out", out)

    def read_estimate(*options: object) -> dict[str, Any]:
        estimate(tmp_path / "report.json", *options)
        report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        return report

    with server(releases, tmp_path / "log", answer_share=1) as process, httpx.Client(base_url=process.url) as client:
        process.wait_until_ready(90)

        def answers(at: float, **options: Any) -> list[dict[str, Any]]:
            queries = [
                {"features": {"user_id": f"u{user}"}, "k": K, "bias_removal": at, **options} for user in range(USERS)
            ]
            body = {"queries": queries, "preview": not options}
            return list(client.post("/v1/retrieve", json=body, timeout=30).json()["results"])

        def visit(visits: int, **explore: int) -> None:
            for _ in range(visits):
                events = []
                for user, result in enumerate(answers(LAMBDAS[0], explore=explore)):
                    labels = [
                        label["id"] for label in result["labels"] if chance.random() < choice_probability(user, label)
                    ]
                    if labels:
                        events.append({"answer_id": result["answer_id"], "labels": labels})
                assert client.post("/v1/feedback", json={"events": events}, timeout=30).status_code == 200

        labels_by_dial = {
            at: [label | {"user": user} for user, result in enumerate(answers(at)) for label in result["labels"]]
            for at in LAMBDAS
        }
        truth = {
            at: sum(choice_probability(label["user"], label) for label in labels) / USERS
            for at, labels in labels_by_dial.items()
        }
        visit(VISITS, head=1, torso=1, tail=1)
        report = read_estimate("--unit", "user_id")
        estimate(page, "--unit", "user_id")
        began = datetime.now(UTC)
        visit(3, tail=1)  # of head and torso that λ = 0.8 would show besides, it says nothing
        later = read_estimate("--since", began.isoformat(), "--event", "purchase")
    logged, *others = report["settings"]
    assert (report["answers"], report["units"], report["left_out"]) == (VISITS * USERS, USERS, {})
    for setting, (at, expected) in zip(others, truth.items(), strict=True):
        figure, labels = setting["chosen_per_answer"], labels_by_dial[at]
        print(f"λ {at}: {expected:.4f}, estimated {figure}, {setting['covered']}, {setting['says']}")
        assert setting["exposures"]["tail"] == sum(label["bucket"] == "tail" for label in labels) / len(labels)
        assert setting["covered"] == 1
        assert figure["low"] < expected < figure["high"]
        # The bounds are three to four standard errors away.
        assert abs(figure["value"] - expected) < 0.5 * (figure["high"] - figure["low"])
    assert [setting["says"] for setting in others] == ["the same", "not yet", "better"]
    assert (logged["bias_removal"], logged["chosen_per_answer"]["value"]) == (
        None,
        others[0]["chosen_per_answer"]["value"],
    )
    assert others[0]["changed"] == 0 < others[1]["changed"] < others[2]["changed"] <= VISITS * USERS
    assert page.read_text().count("<figure>") == 4
    assert [setting["says"] for setting in later["settings"][1:]] == ["the same", "not yet", "cannot tell"]
    print([setting["covered"] for setting in later["settings"]])
    assert later["settings"][3]["covered"] < 0.95 < later["settings"][2]["covered"] < 1
    assert (later["answers"], later["chosen"]) == (3 * USERS, 0), "nothing was bought"
