"""Labels kept apart, against the same choice made by brute force over the whole catalogue."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Upsert
from longtail.index import IndexSpec, build, open_releases
from longtail.serving import Retriever
from longtail.serving.core import resolved
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.errors import InvalidRequestError
from tests.serving.core.shop import meets, shop_bundle
from tests.serving.plane import plane_retriever, read_results

AT = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def retrievers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Retriever]:
    """A flat and an approximate release, each with labels added."""
    root = tmp_path_factory.mktemp("diverse")
    shop_bundle().write(root / "bundle")
    answer = {"brand": "brand-new", "tags": ["t1", "fresh"], "price": 0.25}
    records = [
        Upsert(id=f"{'item' if n % 2 else 'new'}-{n}", at=AT, features={"genres": [f"g{n % 5}"]}, display=answer)
        for n in range(40)
    ]
    for spec in ("flat", "ivf_flat"):
        build(root / "bundle", root / "releases", spec=IndexSpec(spec, recall_floor=0.0), name=spec)
    releases = open_releases(root / "releases")
    return {
        spec: load_release(releases, spec, max_new_labels=99).with_changes(records) for spec in ("flat", "ivf_flat")
    }


@cache
def get_display(retriever: Retriever, row: int) -> dict[str, Any]:
    display: dict[str, Any] = retriever.catalogue.labels_json([row])[0]["display"]
    return display


def rank_labels(retriever: Retriever, user: str, filter_: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Every label that passes, best first, and the scores, by the formula."""
    overlay = retriever.overlay
    rows_LE = np.concatenate([retriever.bundle.rows(), overlay.rows.augmented_ME])
    query_D = retriever.encoder.embed(retriever.encoder.read([{"user_id": user}]))
    scores_L = (retriever.bundle.augmentation.queries(query_D, 0.5) @ rows_LE.T)[0] / 0.1
    passes = [
        row
        for row in range(overlay.labels)
        if row not in overlay.masked and meets(get_display(retriever, row), filter_)
    ]
    order = np.array(passes)[np.argsort(-scores_L[passes], kind="stable")]
    return order, scores_L[order]


def get_values(retriever: Retriever, row: int, column: str) -> set[Any]:
    value = get_display(retriever, row)[column]
    return {first for first in (value if isinstance(value, list) else [value]) if first is not None}


def greedily(retriever: Retriever, order: np.ndarray, max_per: dict[str, int], k: int) -> list[int]:
    chosen: list[int] = []
    counts: Counter[Any] = Counter()
    for row in order.tolist():
        values = [(name, value) for name in max_per for value in get_values(retriever, row, name)]
        if len(chosen) < k and all(counts[name, value] < max_per[name] for name, value in values):
            chosen.append(row)
            counts.update(values)
    return chosen


def marginally(
    retriever: Retriever, order: np.ndarray, scores: np.ndarray, weight: float, max_per: dict[str, int], k: int
) -> list[int]:
    vectors = retriever.catalogue.embeddings(order.tolist()).astype(np.float64)
    cosines = vectors @ vectors.T / np.outer(np.linalg.norm(vectors, axis=1), np.linalg.norm(vectors, axis=1))
    worth = (scores - scores[-1]) / (scores[0] - scores[-1])
    chosen: list[int] = []
    while len(chosen) < k:
        gains = {}
        for i, row in enumerate(order.tolist()):
            so_far = [int(order[first]) for first in chosen]
            if row not in so_far and len(greedily(retriever, np.array([*so_far, row]), max_per, k)) == len(chosen) + 1:
                nearest = max((cosines[i, first] for first in chosen), default=0.0)
                gains[i] = (1 - weight) * worth[i] - weight * nearest
        if not gains:
            break
        chosen.append(max(gains, key=lambda i: gains[i]))
    return [int(order[i]) for i in chosen]


def ask(retriever: Retriever, **options: Any) -> dict[str, Any]:
    query = RetrieveQuery.model_validate({"features": {"user_id": "u1"}, **options})
    plain = RetrieveQuery.model_validate({"features": {"user_id": "u2"}, "k": 3})
    return read_results(retriever.retrieve([plain, query]))[1]


def read_rows(retriever: Retriever, result: dict[str, Any]) -> list[int]:
    return [retriever.catalogue.row(label["id"]) for label in result["labels"]]


@pytest.mark.parametrize("spec", ["flat", "ivf_flat"])
def test_crowding_is_greedy_down_the_scores(spec: str, retrievers: dict[str, Retriever]) -> None:
    retriever = retrievers[spec]
    rng = np.random.default_rng(4)
    pools = set()
    for _ in range(20):
        user, k = f"u{rng.integers(0, 20)}", int(rng.integers(1, 40))
        columns = rng.choice(["brand", "price", "tags", "open", "since"], rng.integers(1, 3), replace=False)
        max_per = {name: int(rng.integers(1, 4)) for name in columns.tolist()}
        filter_ = {"tags": {"exists": True}} if rng.random() < 0.3 else {}
        result = ask(
            retriever, features={"user_id": user}, k=k, max_per=max_per, filter=filter_, pool=k + 1, display=False
        )
        order, scores = rank_labels(retriever, user, filter_)
        answered_rows, expected = read_rows(retriever, result), greedily(retriever, order, max_per, k)
        pools.add(result["pool"])
        assert len(answered_rows) == len(expected)
        assert answered_rows == greedily(retriever, np.array(answered_rows), max_per, k)
        score_of = dict(zip(order.tolist(), scores.tolist(), strict=True))
        answered = [label["score"] for label in result["labels"]]
        assert answered == pytest.approx([score_of[row] for row in answered_rows], abs=1e-3)
        assert answered == sorted(answered, reverse=True)
        if spec == "flat":
            assert answered_rows == expected
    assert len(pools) > 5


def test_mmr_is_the_choice_of_brute_force(retrievers: dict[str, Retriever]) -> None:
    retriever = retrievers["flat"]
    order, scores = rank_labels(retriever, "u1", {})
    plain = [int(row) for row in order[:8]]
    for weight, max_per in ((0.0, {}), (0.3, {}), (0.7, {}), (1.0, {}), (0.5, {"brand": 1}), (0.3, {"tags": 2})):
        result = ask(retriever, k=8, mmr=weight, max_per=max_per, pool=30)
        actual = read_rows(retriever, result)
        pool = result.get("pool")
        assert pool == (None if weight == 0 else 30)
        if weight == 0:
            assert actual == plain  # as without mmr
            continue
        assert actual == marginally(retriever, order[:30], scores[:30], weight, max_per, 8)
        assert actual[0] == plain[0]
        assert actual != plain


def test_pools_widen_until_k_labels_or_the_catalogue_ends(
    retrievers: dict[str, Retriever], monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = retrievers["flat"]
    # Two of open = true, two of open = false, and those that do not say: 4 beside them, found far down.
    result = ask(retriever, k=60, max_per={"open": 2}, pool=60)
    missing = sum(row not in retriever.overlay.masked and not get_values(retriever, row, "open") for row in range(400))
    eligible = retriever.overlay.labels - len(retriever.overlay.masked)
    assert len(result["labels"]) == min(60, missing + 20 + 4)
    assert result["pool"] in (240, eligible)
    # One label for each title: every label passes, so the first pool is enough.
    assert ask(retriever, k=60, max_per={"title": 1}, pool=70)["pool"] == 70
    assert ask(retriever, k=60, max_per={"title": 1})["pool"] == 240
    assert ask(retriever, k=5, mmr=0.5)["pool"] == 100
    everything = ask(retriever, k=30, max_per={"brand": 1}, filter={"brand": {"exists": True}})
    assert len(everything["labels"]) == 8
    assert everything["pool"] < eligible
    monkeypatch.setattr(resolved, "MOST_POOL", 130)
    bounded = ask(retriever, k=30, max_per={"brand": 1}, filter={"brand": {"exists": True}})
    assert bounded["pool"] == 130
    assert len(bounded["labels"]) <= 8


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"max_per": {"b" * 5_000: 1}}, f"max_per.{'b' * 100}", "5000 characters"),
    ({"pool": 1, "mmr": 0.3}, "pool", "expected 2 <= pool <= 4096, from k on, received 1"),
    ({"mmr": 0.3, "explore": {"tail": 1}}, "explore", "expected explore or mmr, received both"),
    ({"max_per": {"year": 1}, "mmr": 0, "explore": {"tail": 1}}, "explore", "or max_per and mmr, received"),
]


@pytest.mark.parametrize(("options", "field", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_invalid_diversity_options_are_refused(options: dict[str, Any], field: str, message: str) -> None:
    query = RetrieveQuery.model_validate({"features": {"user": "east"}, "k": 2, **options})
    with pytest.raises(InvalidRequestError, match=message) as caught:
        plane_retriever().retrieve([query])
    assert caught.value.field == f"queries.0.{field}"
