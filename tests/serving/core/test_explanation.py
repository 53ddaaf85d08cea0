"""What a score is made of, and the λ between which a label is in the answer, against a scan by thousandths."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.serving.core.explanation import intervals
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.core.ranking import Batch
from tests.bundles import make_bundle
from tests.serving.plane import make_retriever, read_results

FEATURES = {"user_id": "u3", "history": ["item-1"]}
STEP = 1e-3


def answer(bundle: Bundle, **options: Any) -> dict[str, Any]:
    (result,) = read_results(make_retriever(bundle).retrieve([RetrieveQuery(features=FEATURES, **options)]))
    return result


def ended(steps: Generator[None, None, Any]) -> Any:
    """What a generator returns after its steps."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def scanned(bundle: Bundle, positions: np.ndarray, **options: Any) -> list[set[str]]:
    """The ids that are answered at each λ."""
    retriever = make_retriever(bundle)
    queries = [RetrieveQuery(features=FEATURES, **options | {"bias_removal": float(i)}) for i in positions]
    return [{label["id"] for label in result["labels"]} for result in read_results(retriever.retrieve(queries))]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosine": ({}, {"bias_removal": 0.3}),
    "dot with a bias and μ": ({"cosine": False, "bias": True, "popularity": True}, {"popularity": 0.5}),
    "filtered": ({"bias": True}, {"bias_removal": 1.1, "exclude": ["item-7"], "buckets": ["torso", "tail"]}),
    "at the end": ({}, {"bias_removal": 2.0}),
    "a tree": ({"proposal": True}, {"bias_removal": 0.5}),
}


@pytest.mark.parametrize(("of_bundle", "options"), CASES.values(), ids=CASES)
def test_intervals_equal_a_scan(of_bundle: dict[str, Any], options: dict[str, Any]) -> None:
    bundle = make_bundle(labels=90, **of_bundle)
    result = answer(bundle, k=8, explain=True, **options)
    dial = bundle.manifest.bias_removal
    positions = np.linspace(dial.minimum, dial.maximum, round((dial.maximum - dial.minimum) / STEP) + 1)
    inside = scanned(bundle, positions, k=8, **options)

    assert [label["id"] for label in result["labels"]] == [
        label["id"] for label in answer(bundle, k=8, **options)["labels"]
    ]
    for label in result["labels"]:
        low, high = label["explanation"]["bias_removal"]
        assert low <= result["bias_removal"] <= high
        within = (positions >= low) & (positions <= high)
        assert all(label["id"] in ids for ids, i in zip(inside, within, strict=True) if i)
        for end, beyond in ((low, low - 2 * STEP), (high, high + 2 * STEP)):
            if dial.minimum < beyond < dial.maximum:
                assert label["id"] not in inside[round((beyond - dial.minimum) / STEP)], (label["id"], end)


@pytest.mark.parametrize(("of_bundle", "options"), CASES.values(), ids=CASES)
def test_parts_add_up_to_the_score(of_bundle: dict[str, Any], options: dict[str, Any]) -> None:
    bundle = make_bundle(labels=90, **of_bundle)
    result, labels = answer(bundle, k=8, explain=True, **options), bundle.labels
    for label in result["labels"]:
        part, row = label["explanation"], labels.rows_by_id[label["id"]]
        assert sum(part[name] for name in ("taste", "bias", "noise", "popularity")) == pytest.approx(
            label["score"], abs=1e-4
        )
        assert part["popularity"] == pytest.approx(result["popularity"] * labels.log_pi[row], abs=1e-5)
        if not of_bundle.get("proposal"):
            assert part["noise"] == pytest.approx(result["bias_removal"] * labels.log_pn[row], abs=1e-4)
        assert bool(part["bias"]) == bool(of_bundle.get("bias"))


def test_parts_of_an_answer_by_popularity() -> None:
    bundle = make_bundle(labels=90, cosine=False, bias=True, popularity=True, cooccurrence=True)
    query = RetrieveQuery(features={"user_id": "nobody"}, history=["item-1"], bias_removal=0.7, explain=True, k=60)
    (result,) = read_results(make_retriever(bundle).retrieve([query]))
    assert (result["basis"], result["bias_removal"], result["popularity"], result["cooccurrence"]) == (
        "cooccurrence", 0, 1, 2
    )  # fmt: skip
    for label in result["labels"]:
        part = label["explanation"]
        assert (part["taste"], part["bias"], part["noise"], part["bias_removal"]) == (0, 0, 0, [0, 0])
        assert part["popularity"] == pytest.approx(
            bundle.labels.log_pi[bundle.labels.rows_by_id[label["id"]]], abs=1e-5
        )
        assert part["popularity"] + part["cooccurrence"] == pytest.approx(label["score"], abs=1e-4)
    assert any(label["explanation"]["because"] for label in result["labels"])


class Lines:
    """A ranker whose scores are lines in λ, counting its searches."""

    proposal = "π"

    def __init__(self, at_zero: np.ndarray, slope: np.ndarray) -> None:
        self.at_zero_L, self.slope_L, self.searches = at_zero, slope, 0

    def rank(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        self.searches += 1
        scores_BL = self.at_zero_L + batch.bias_removal_B[:, None] * self.slope_L
        best_BK = np.argsort(-scores_BL, axis=1, kind="stable")[:, : batch.k]
        return np.take_along_axis(scores_BL, best_BK, axis=1), best_BK

    def scores(self, batch: Batch, rows_B: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [
            self.at_zero_L[rows] + at * self.slope_L[rows]
            for at, rows in zip(batch.bias_removal_B, rows_B, strict=True)
        ]


def exact_interval(ranker: Lines, row: int, expected: float, k: int) -> tuple[float, float]:
    """Walk over all crossings with other labels, from the query's λ to both sides."""
    others = np.arange(len(ranker.slope_L)) != row
    slope_L, ahead_L = (
        (ranker.slope_L - ranker.slope_L[row])[others],
        (ranker.at_zero_L - ranker.at_zero_L[row])[others],
    )
    crossings = -ahead_L / slope_L
    ends = []
    for limit, side in ((-1.0, -1), (2.0, 1)):
        between = crossings[((crossings - expected) * side > 0) & (crossings > -1) & (crossings < 2)]
        positions = [expected, *sorted(between, key=lambda at: abs(at - expected)), limit]
        middles = [(near + far) / 2 for near, far in pairwise(positions)]
        out = [at for at, middle in enumerate(middles) if (ahead_L + middle * slope_L > 0).sum() >= k]
        ends.append(positions[out[0]] if out else positions[-1])
    return ends[0], ends[1]


def test_an_interval_holds_no_gap_however_small() -> None:
    rng, gaps = np.random.default_rng(2), 0
    for _ in range(60):
        labels, k, expected = 300, int(rng.integers(1, 12)), float(rng.uniform(0, 1))
        ranker = Lines(rng.normal(0, 1.5, labels) + 1.5, rng.normal(0, 1, labels) - 2)
        batch = Batch(
            np.zeros((1, 1), np.float32), {}, np.array([expected], np.float32), np.zeros(1, np.float32), [None], k
        )
        expected = float(batch.bias_removal_B[0])
        (rows_K,) = ranker.rank(batch)[1]
        ranker.searches = 0
        intervals_K = ended(intervals(ranker, batch, rows_K, (-1.0, 2.0)))

        assert ranker.searches <= 20
        for row, interval in zip(rows_K, intervals_K, strict=True):
            low, high = exact_interval(ranker, int(row), expected, k)
            assert interval is not None
            assert interval[0] >= low - 2e-6
            assert interval[1] <= high + 2e-6
            assert interval == pytest.approx((low, high), abs=STEP)
            # Where no searched λ lies in a gap, the end is exact.
            ends = zip(interval, (low, high), strict=True)
            gaps += any(abs(end - exact) < 3e-6 and -1 < exact < 2 for end, exact in ends)
    assert gaps


def test_drawn_labels_have_no_interval() -> None:
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
