"""What a score is made of, and the λ between which a label is in the answer, against a scan by thousandths."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.serving.core.queries import Query
from tests.bundles import make_bundle
from tests.serving.core.test_tree_ranking import retriever_of
from tests.serving.plane import ExactSearcher, results_of

FEATURES = {"user_id": "u3", "history": ["item-1"]}
STEP = 1e-3


def answer(bundle: Bundle, **asked: Any) -> dict[str, Any]:
    (result,) = results_of(retriever_of(bundle, ExactSearcher(bundle)).retrieve([Query(features=FEATURES, **asked)]))
    return result


def scanned(bundle: Bundle, places: np.ndarray, **asked: Any) -> list[set[str]]:
    """The ids that are answered at each λ."""
    retriever = retriever_of(bundle, ExactSearcher(bundle))
    queries = [Query(features=FEATURES, **asked | {"bias_removal": float(place)}) for place in places]
    return [{label["id"] for label in result["labels"]} for result in results_of(retriever.retrieve(queries))]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosine": ({}, {"bias_removal": 0.3}),
    "dot with a bias and μ": ({"cosine": False, "bias": True, "popularity": True}, {"popularity": 0.5}),
    "filtered": ({"bias": True}, {"bias_removal": 1.1, "exclude": ["item-7"], "buckets": ["torso", "tail"]}),
    "at the end": ({}, {"bias_removal": 2.0}),
    "a tree": ({"proposal": True}, {"bias_removal": 0.5}),
}


@pytest.mark.parametrize(("of_bundle", "asked"), CASES.values(), ids=CASES)
def test_intervals_are_those_of_a_scan(of_bundle: dict[str, Any], asked: dict[str, Any]) -> None:
    bundle = make_bundle(labels=90, **of_bundle)
    found = answer(bundle, k=8, explain=True, **asked)
    dial = bundle.manifest.bias_removal
    places = np.linspace(dial.minimum, dial.maximum, round((dial.maximum - dial.minimum) / STEP) + 1)
    inside = scanned(bundle, places, k=8, **asked)

    assert [label["id"] for label in found["labels"]] == [
        label["id"] for label in answer(bundle, k=8, **asked)["labels"]
    ]
    for label in found["labels"]:
        low, high = label["explanation"]["bias_removal"]
        assert low <= found["bias_removal"] <= high
        within = (places >= low) & (places <= high)
        assert all(label["id"] in ids for ids, place in zip(inside, within, strict=True) if place)
        for end, beyond in ((low, low - 2 * STEP), (high, high + 2 * STEP)):
            if dial.minimum < beyond < dial.maximum:
                assert label["id"] not in inside[round((beyond - dial.minimum) / STEP)], (label["id"], end)


@pytest.mark.parametrize(("of_bundle", "asked"), CASES.values(), ids=CASES)
def test_parts_add_up_to_the_score(of_bundle: dict[str, Any], asked: dict[str, Any]) -> None:
    bundle = make_bundle(labels=90, **of_bundle)
    found, labels = answer(bundle, k=8, explain=True, **asked), bundle.labels
    for label in found["labels"]:
        part, row = label["explanation"], labels.row_of[label["id"]]
        assert sum(part[name] for name in ("taste", "bias", "noise", "popularity")) == pytest.approx(
            label["score"], abs=1e-4
        )
        assert part["popularity"] == pytest.approx(found["popularity"] * labels.log_pi[row], abs=1e-5)
        if not of_bundle.get("proposal"):
            assert part["noise"] == pytest.approx(found["bias_removal"] * labels.log_pn[row], abs=1e-4)
        assert bool(part["bias"]) == bool(of_bundle.get("bias"))


def test_what_was_drawn_has_no_interval() -> None:
    bundle = make_bundle(labels=90)
    labels = answer(bundle, k=8, explain=True, bias_removal=1.5, explore={"tail": 3})["labels"]
    drawn = [label["explanation"]["bias_removal"] for label in labels if label["propensity"] < 1]
    assert None in drawn
    assert None not in [label["explanation"]["bias_removal"] for label in labels if label["propensity"] == 1]


def test_over_http(client: httpx.Client) -> None:
    query = {"features": {"user": "north"}, "k": 2, "bias_removal": 0, "explain": True}
    labels = client.post("/v1/retrieve", json={"queries": [query]}).json()["results"][0]["labels"]
    # b and c/é: 2 and 1.8 beside log p_n of −2·ln 2 and −3·ln 2; a has 0 and −ln 2, 4 −1 and −3·ln 2.
    b, c = (label["explanation"] for label in labels)
    assert b.pop("bias_removal") == pytest.approx([-1, 2], abs=STEP)
    assert c.pop("bias_removal") == pytest.approx([-1, 0.9 / np.log(2)], abs=STEP)
    assert b == pytest.approx({"taste": 2, "bias": 0, "noise": 0, "popularity": 0, "cooccurrence": 0}, abs=1e-6)
    for wrong in ([query, query], [{**query, "k": 51}]):
        answer = client.post("/v1/retrieve", json={"queries": wrong})
        assert answer.status_code == 422
        assert "expected one query with explain, of k <= 50" in answer.json()["error"]["message"]
