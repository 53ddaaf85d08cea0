"""Floors, against their rule applied to every label, and against the best of all lists."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from longtail.bundle import BUCKET_NAMES, Upsert
from longtail.serving import Retriever
from longtail.serving.core.exploration import Draws, Lottery
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from longtail.serving.errors import InvalidRequestError
from tests.serving.core.shop import meets
from tests.serving.core.test_cooccurrence import BUNDLES, changes
from tests.serving.plane import make_retriever, plane_retriever, read_results

Floors = list[dict[str, Any]]


@pytest.fixture(scope="module")
def retriever() -> Retriever:
    """A release with ω·c, hidden labels, new ones, and some of the catalogue that were embedded again."""
    # Scores that differ: labels that the release does not know would score alike by their genres alone.
    records = [
        first.model_copy(update={"features": {**(first.features or {}), "year": n / 50}})
        if isinstance(first, Upsert)
        else first
        for n, first in enumerate(changes())
    ]
    return make_retriever(BUNDLES["dot, bias, μ"](), "flat", *records)


def answer(retriever: Retriever, draws: Draws | None = None, **options: Any) -> dict[str, Any]:
    query = RetrieveQuery.model_validate({"features": {"user_id": "u1"}, "history": ["item-7", "item-41"], **options})
    return read_results(retriever.retrieve([query], draws))[0]


@cache
def everything(retriever: Retriever) -> dict[int, list[dict[str, Any]]]:
    """Every label of each user, best first."""
    return {user: answer(retriever, features={"user_id": f"u{user}"}, k=440)["labels"] for user in range(5)}


def holds(label: dict[str, Any], floor: dict[str, Any]) -> bool:
    return label["bucket"] == floor.get("bucket", label["bucket"]) and meets(label["display"], floor.get("filter", {}))


def draw_floors(rng: np.random.Generator, most: int) -> Floors:
    """Up to four floors of together at most so many labels, which may meet several."""
    floors = []
    for _ in range(int(rng.integers(1, 5))):
        bucket = {"bucket": str(rng.choice(BUCKET_NAMES))}
        filter_ = {
            "filter": [
                {"brand": f"brand-{rng.integers(8)}"}, {"price": {"lt": float(rng.integers(1, 30)) / 10}},
                {"open": True}, {"tags": {"in": [f"t{rng.integers(5)}"]}},
            ][rng.integers(4)]
        }  # fmt: skip
        n = int(rng.integers(1, 4))
        if sum(floor["n"] for floor in floors) + n <= most:
            floors.append({**[bucket, filter_, {**bucket, **filter_}][rng.integers(3)], "n": n})
    return floors


def list_by_rule(labels: list[dict[str, Any]], floors: Floors, k: int) -> list[dict[str, Any]]:
    """The list of k, from all eligible labels, best first."""

    def counts(some: list[dict[str, Any]]) -> list[int]:
        return [sum(holds(label, floor) for label in some) for floor in floors]

    def filled(reserved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        others = [label for label in labels if label not in reserved][: k - len(reserved)]
        return [label for label in labels if label in [*reserved, *others]]

    reserved: list[dict[str, Any]] = []
    for label in labels:
        unmet = [count < floor["n"] for count, floor in zip(counts(reserved), floors, strict=True)]
        if any(open_ and holds(label, floor) for open_, floor in zip(unmet, floors, strict=True)):
            reserved.append(label)
    needs = [min(floor["n"], count) for floor, count in zip(floors, counts(labels), strict=True)]
    for label in reserved[::-1]:
        fewer = filled([other for other in reserved if other != label])
        if all(count >= need for count, need in zip(counts(fewer), needs, strict=True)):
            reserved.remove(label)
    return filled(reserved)


def checked(result: dict[str, Any], labels: list[dict[str, Any]], floors: Floors, k: int) -> np.ndarray:
    """Check an answer's counts, order and cost against all eligible labels; return which labels hold, [F, C]."""
    holds_FC = np.array([[holds(label, floor) for label in labels] for floor in floors])
    displayed = result["labels"]
    assert len({label["id"] for label in displayed}) == len(displayed) == min(k, len(labels))
    assert [label["score"] for label in displayed] == sorted((label["score"] for label in displayed), reverse=True)
    met = [sum(holds(label, floor) for label in displayed) for floor in floors]
    assert result["floors"] == [{**floor, "met": count} for floor, count in zip(floors, met, strict=True)]
    assert all(
        count >= min(floor["n"], eligible)
        for count, floor, eligible in zip(met, floors, holds_FC.sum(axis=1).tolist(), strict=True)
    )
    best = sum(label["score"] for label in labels[:k])
    assert result["cost"] == pytest.approx(best - sum(label["score"] for label in displayed), abs=2e-5)
    return holds_FC


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(100, 300))]
)
def test_every_list_of_few_labels(retriever: Retriever, seed: int) -> None:
    rng = np.random.default_rng(seed)
    user, k = int(rng.integers(5)), int(rng.integers(1, 6))
    all_labels = everything(retriever)[user]
    labels = [all_labels[i] for i in sorted(rng.choice(120, 14, replace=False))]
    floors = draw_floors(rng, k) or [{"bucket": "tail", "n": 1}]
    result = answer(
        retriever, features={"user_id": f"u{user}"}, k=k, at_least=floors, allow=[label["id"] for label in labels]
    )
    holds_FC = checked(result, labels, floors, k)
    assert [label["id"] for label in result["labels"]] == [label["id"] for label in list_by_rule(labels, floors, k)]
    lists = np.array(list(combinations(range(14), k)))
    needs = np.minimum([floor["n"] for floor in floors], holds_FC.sum(axis=1))
    lists = lists[(holds_FC[:, lists].sum(axis=2) >= needs[:, None]).all(axis=0)]
    best = np.array([label["score"] for label in labels])[lists].sum(axis=1).max()
    summed = sum(label["score"] for label in result["labels"])
    assert summed <= best + 2e-5
    if holds_FC.sum(axis=0).max() < 2:  # no label meets two floors
        assert summed == pytest.approx(best, abs=2e-5)


def test_other_scores(retriever: Retriever) -> None:
    """Similar labels, and a tree p_n(y|x)."""
    floors: Floors = [{"bucket": "new", "n": 2}, {"bucket": "torso", "n": 3}]
    tree = make_retriever(BUNDLES["tree"](), "flat")
    for k in (5, 8):
        for at in (0.0, 1.0):
            options = {"features": {"user_id": "u2"}, "bias_removal": at}
            labels = answer(tree, k=400, **options)["labels"]
            result = answer(tree, k=k, at_least=floors, **options)
            assert [label["id"] for label in result["labels"]] == [
                label["id"] for label in list_by_rule(labels, floors, k)
            ]
        for by in ("embedding", "cooccurrence"):
            similar = {"id": "item-3", "by": by}
            results = [
                read_results(retriever.similar([SimilarQuery.model_validate({**similar, **options})]))[0]
                for options in ({"k": 440}, {"k": k, "at_least": floors})
            ]
            expected = list_by_rule(results[0]["labels"], floors, k)
            assert [label["id"] for label in results[1]["labels"]] == [label["id"] for label in expected]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 60))]
)
def test_floors_with_few_labels_of_a_brand(retriever: Retriever, seed: int) -> None:
    rng = np.random.default_rng(2000 + seed)
    k, most, floors = int(rng.integers(3, 9)), int(rng.integers(1, 3)), draw_floors(rng, 3)
    labels = everything(retriever)[1]
    counts: Counter[Any] = Counter()

    def take(target: list[dict[str, Any]], upto: int) -> list[dict[str, Any]]:
        chosen: list[dict[str, Any]] = []
        for label in target:
            brand = label["display"]["brand"]
            if len(chosen) < upto and (brand is None or counts[brand] < most) and label not in chosen:
                chosen.append(label)
                counts[brand] += 1
        return chosen

    expected = take(labels, k)
    if any(sum(holds(label, floor) for label in expected) < floor["n"] for floor in floors):
        counts.clear()
        reserved: list[dict[str, Any]] = []
        for label in labels:
            if any(
                holds(label, floor) and sum(holds(other, floor) for other in reserved) < floor["n"] for floor in floors
            ):
                reserved += take([label], 1)
        others = [label for label in labels if label not in reserved]
        expected = sorted([*reserved, *take(others, k - len(reserved))], key=lambda label: -label["score"])
    result = answer(retriever, k=k, at_least=floors, max_per={"brand": most})
    assert [label["id"] for label in result["labels"]] == [label["id"] for label in expected]
    # The order of MMR, and as many labels of each floor as there are.
    diverse = answer(retriever, k=k, at_least=floors, mmr=0.4)
    for floor, floor_of_answer in zip(floors, diverse["floors"], strict=True):
        eligible = sum(holds(label, floor) for label in labels)
        assert floor_of_answer["met"] >= min(floor["n"], eligible)
    without = answer(retriever, k=k, mmr=0.4)["labels"]
    if all(sum(holds(label, floor) for label in without) >= floor["n"] for floor in floors):
        assert diverse["labels"] == without
    assert len(diverse["labels"]) == k


@pytest.mark.parametrize("options", [{"max_per": {"brand": 1}}, {"mmr": 0.5}, {"explore": {"head": 1}}, {}])
def test_floors_where_no_label_is_eligible(retriever: Retriever, options: dict[str, Any]) -> None:
    floors = [{"bucket": "tail", "n": 2}]
    result = answer(retriever, features={"user_id": "u1"}, k=5, allow=[], at_least=floors, **options)
    assert (result["labels"], result["floors"], result["cost"]) == ([], [{**floors[0], "met": 0}], 0)


def test_propensities_of_explored_slots_are_the_frequencies(retriever: Retriever) -> None:
    floors: Floors = [{"bucket": "tail", "n": 2}, {"filter": {"brand": "brand-2"}, "n": 2}]
    certain = answer(retriever, k=6, at_least=floors)
    displayed: Counter[str] = Counter()
    stated: dict[str, float] = {}
    draws = 600
    query = RetrieveQuery.model_validate({
        "features": {"user_id": "u1"}, "history": ["item-7", "item-41"], "k": 8, "at_least": floors,
        "explore": {"tail": 1, "torso": 1}, "display": False,
    })  # fmt: skip
    for result in read_results(retriever.retrieve([query] * draws, Draws(Lottery(candidates=8, seed=5)))):
        displayed.update(label["id"] for label in result["labels"])
        stated |= {label["id"]: label["propensity"] for label in result["labels"]}
    # The six places that chance does not touch hold the list of six with these floors.
    assert {id_ for id_, count in displayed.items() if count == draws} == {label["id"] for label in certain["labels"]}
    assert all(stated[label["id"]] == 1 for label in certain["labels"])
    assert result["cost"] == pytest.approx(certain["cost"], abs=1e-5)
    assert sum(stated.values()) == pytest.approx(8)
    assert len(stated) == 6 + 2 * 8
    for id_, propensity in stated.items():
        error = np.sqrt(propensity * (1 - propensity) / draws)
        assert abs(displayed[id_] / draws - propensity) <= 4.5 * error + 1e-9, id_


def test_slots_and_floors_of_few_labels(retriever: Retriever) -> None:
    new = [label["id"] for label in everything(retriever)[1] if label["bucket"] == "new"]
    head = [label["id"] for label in everything(retriever)[1] if label["bucket"] == "head"]
    few = answer(retriever, k=5, allow=new[:2] + head[:1], at_least=[{"bucket": "new", "n": 2}], explore={"new": 2})
    # All that may be answered is answered, whether chance or a floor has it first.
    assert {label["id"] for label in few["labels"]} == {*new[:2], *head[:1]}
    assert few["floors"][0]["met"] == 2


def test_short_form_and_explanation(retriever: Retriever) -> None:
    long = answer(retriever, k=5, at_least=[{"bucket": "tail", "n": 2}, {"bucket": "new", "n": 1}], explain=True)
    short = answer(retriever, k=5, at_least={"bucket": {"tail": 2, "new": 1}}, explain=True)
    assert short == long
    without = {label["id"] for label in answer(retriever, k=5)["labels"]}
    reasons = {label["id"]: label["explanation"]["floor"] for label in long["labels"]}
    assert {id_ for id_, reason in reasons.items() if reason is None} == without & reasons.keys()
    assert sum(reason["price"] for reason in reasons.values() if reason) == pytest.approx(long["cost"], abs=1e-5)
    buckets = {label["id"]: label["bucket"] for label in long["labels"]}
    assert {(buckets[id_], *reason["floors"]) for id_, reason in reasons.items() if reason} <= {("tail", 0), ("new", 1)}
    assert long["cost"] > 0
    # Floors that are met anyway cost nothing and change nothing; no promise of the release holds for any of these.
    free = answer(retriever, k=5, at_least=[{"filter": {"price": {"ge": 0}}, "n": 1}])
    assert free["labels"] == answer(retriever, k=5)["labels"]
    assert free["cost"] == 0
    query = RetrieveQuery.model_validate({"features": {"user_id": "u1"}, "k": 5, "at_least": {"bucket": {"head": 1}}})
    assert np.isnan(retriever.retrieve([query]).judged_at_B).all()


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"k": 2, "at_least": {"bucket": {"head": 2, "tail": 1}}}, "queries.0.at_least", "at most k = 2 labels, rec"),
        (
            {"k": 2, "at_least": {"bucket": {"tail": 2}}, "explore": {"tail": 1}},
            "queries.0.at_least", "k = 2 labels less the 1 slots",
        ),
        ({"buckets": ["head"], "at_least": {"bucket": {"tail": 1}}}, "queries.0.at_least.0.bucket", "may be answered"),
        ({"at_least": [{"filter": {"brand": 1}, "n": 1}]}, "queries.0.at_least.0.filter.brand", "can be filtered by"),
    ],
)  # fmt: skip
def test_impossible_floors(options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        answer(plane_retriever(), features={}, **options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("floors", "message"),
    [
        ([{"n": 1}], "expected a bucket or a filter with n"),
        ([{"bucket": "tail", "n": 0}], "greater than or equal to 1"),
        ([{"bucket": "tail"}], "Field required"),
        ([{"bucket": "rare", "n": 1}], "'head', 'torso', 'tail' or 'new'"),
        ({"bucket": {"rare": 1}}, "'head', 'torso', 'tail' or 'new'"),
        ({"filter": {"brand": "a"}, "n": 1}, "valid list"),
        ([{"bucket": "tail", "n": 1}] * 9, "at most 8 items"),
    ],
)
def test_malformed_floors(floors: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetrieveQuery.model_validate({"features": {}, "at_least": floors})
