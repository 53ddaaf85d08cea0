"""Slots drawn at random: who is drawn how often, where they stand, and that feedback on them can be debiased."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from longtail.serving.core.exploration import Draws, Explored, Lottery, draw, explore, inclusion_probabilities
from longtail.serving.core.queries import RetrieveQuery
from tests.bundles import make_bundle
from tests.rounding import within_rounding
from tests.serving.plane import make_retriever, plane_retriever, read_results

HEAD, TAIL = 0, 2
DRAWS = 6000
# The answer without chance: eight head labels and two tail ones; forty tail labels stand below.
SCORES = np.linspace(5.0, 0.0, 50).astype(np.float32)
BUCKETS = np.array([HEAD] * 4 + [TAIL] + [HEAD] * 3 + [TAIL] + [HEAD] + [TAIL] * 40, np.int8)


@cache
def answers(floor: int, *, k: int = 10, draws: int = DRAWS, candidates: int = 20) -> list[Explored]:
    rows = np.arange(50)
    tail = rows[BUCKETS == TAIL]
    lottery, chance = Lottery(candidates, seed=1), np.random.default_rng(7)
    return [
        explore((rows[:k], SCORES[:k], BUCKETS[:k]), {TAIL: (tail, SCORES[tail])}, {TAIL: floor}, lottery, chance)
        for _ in range(draws)
    ]


def test_inclusion_probabilities_by_hand() -> None:
    scores = np.log([8, 1, 1]).astype(np.float32)
    # One slot: nine tenths by softmax, a tenth even.
    by_hand = [
        Fraction(9, 10) * share + Fraction(1, 30) for share in (Fraction(8, 10), Fraction(1, 10), Fraction(1, 10))
    ]
    assert inclusion_probabilities(scores, 1, 1.0) == pytest.approx([float(share) for share in by_hand])
    # Two slots: 2 · .7533 > 1, so the first is certain and the others share the second.
    assert inclusion_probabilities(scores, 2, 1.0) == pytest.approx([1, 1 / 2, 1 / 2])
    assert inclusion_probabilities(scores, 3, 1.0) == pytest.approx([1, 1, 1])
    assert inclusion_probabilities(scores, 0, 1.0) == pytest.approx([0, 0, 0])
    # At a high temperature all are alike, at a low one only the even tenth is left for the others.
    assert inclusion_probabilities(scores, 1, 1e6) == pytest.approx([1 / 3] * 3, abs=1e-5)
    assert inclusion_probabilities(scores, 1, 1e-3) == pytest.approx([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3])


def test_draws_have_their_size_and_no_label_twice() -> None:
    chance = np.random.default_rng(3)
    for _ in range(300):
        count = int(chance.integers(1, 30))
        slots = int(chance.integers(0, count + 1))
        scores = chance.normal(0, 5, count).astype(np.float32)
        probabilities = inclusion_probabilities(scores, slots, 1.0)
        assert probabilities.sum() == pytest.approx(slots)
        assert (probabilities <= 1).all()
        drawn = draw(probabilities, chance)
        assert len(drawn) == len(set(drawn.tolist())) == slots


def test_propensities_are_the_frequencies() -> None:
    displayed, stated = np.zeros(50), np.zeros(50)
    for answer in answers(3):
        displayed[answer.rows_K] += 1
        stated[answer.rows_K] = answer.propensities_K
    # Of ten slots three are tail's: without chance labels 4, 8 and the next best, 10. All three are drawn, from those
    # and the next 17 of the tail; the head keeps seven, all certain.
    assert np.flatnonzero(stated == 1).tolist() == [0, 1, 2, 3, 5, 6, 7]
    candidates = [4, 8, *range(10, 28)]
    assert sorted(np.flatnonzero((stated > 0) & (stated < 1)).tolist()) == candidates
    assert stated.sum() == pytest.approx(10)
    error = np.sqrt(stated * (1 - stated) / DRAWS)
    assert (np.abs(displayed / DRAWS - stated) <= 4.5 * error + 1e-9).all()


def test_the_bucket_gets_its_floor_and_no_more() -> None:
    # The answer of ten has two tail labels of its own, so a floor of one adds none: one is kept, one is drawn.
    for floor, tail in ((1, 2), (2, 2), (3, 3), (9, 9)):
        for answer in answers(floor, draws=20):
            assert np.count_nonzero(BUCKETS[answer.rows_K] == TAIL) == tail
            assert len(set(answer.rows_K.tolist())) == 10
            assert answer.slots == {TAIL: floor}
            if floor == 1:
                assert answer.propensities_K[answer.rows_K == 4].tolist() == [1]
                # What chance did not touch stands in order of score.
                certain = answer.scores_K[answer.propensities_K == 1]
                assert len(certain) == 9
                assert (np.diff(certain) <= 0).all()


def test_inverse_propensity_weighting_is_unbiased() -> None:
    """Clicks = what a label is worth × how much its place is looked at; the weighted mean finds the candidates' sum."""
    chance = np.random.default_rng(11)
    worth = np.where(np.arange(50) % 2, 0.9, 0.2) * np.linspace(0.2, 1.0, 50)
    attention = 0.8 ** np.arange(10)
    weighted, plain = np.zeros(DRAWS), np.zeros(DRAWS)
    for number, answer in enumerate(answers(3)):
        drawn = answer.propensities_K < 1
        clicked = chance.random(10) < worth[answer.rows_K] * attention
        weighted[number] = (clicked / answer.propensities_K)[drawn].sum()
        plain[number] = clicked[drawn].sum() * 20 / 3
    true = worth[[4, 8, *range(10, 28)]].sum() * attention.mean()
    standard_error = weighted.std() / np.sqrt(DRAWS)
    assert abs(weighted.mean() - true) < 4 * standard_error
    # Without the weights the labels that the model likes pass for all of them.
    assert abs(plain.mean() - true) > 5 * plain.std() / np.sqrt(DRAWS)


def test_through_the_retriever() -> None:
    retriever = plane_retriever()

    def answer(seed: int = 0, **options: object) -> dict[str, object]:
        query = RetrieveQuery.model_validate({"features": {"user": "east"}, "bias_removal": 0.0, **options})
        return read_results(retriever.retrieve([query], Draws(Lottery(seed=seed))))[0]

    def ids(result: dict[str, object]) -> list[str]:
        labels = result["labels"]
        assert isinstance(labels, list)
        return [label["id"] for label in labels]

    plain = answer(k=2)
    assert ids(plain) == ["a", "c/é"]
    assert "exploration" not in plain
    assert "propensity" not in plain["labels"][0]  # type: ignore[index]
    # The torso has one label, so it is certain; two tail labels are drawn from for one slot.
    torso = answer(k=2, explore={"torso": 1})
    assert sorted(ids(torso)) == ["a", "b"]
    assert torso["exploration"] == {"slots": {"torso": 1}, "candidates": {"torso": 1}, "temperature": 1.0}
    draws = [answer(seed, k=2, explore={"tail": 1}) for seed in range(40)]
    assert {tuple(sorted(ids(result))) for result in draws} == {("a", "c/é"), ("4", "a")}
    assert answer(5, k=3, explore={"tail": 1}) == answer(5, k=3, explore={"tail": 1})
    # 1.5 − (−2) = 3.5 logits apart.
    of_c = 0.9 / (1 + np.exp(-3.5)) + 0.05
    for result in draws:
        for label in result["labels"]:  # type: ignore[attr-defined]
            assert label["propensity"] == pytest.approx({"a": 1, "c/é": of_c, "4": 1 - of_c}[label["id"]], rel=1e-5)
    # Filters hold for what is drawn, and fewer than asked for is said.
    assert answer(k=2, explore={"tail": 2}, exclude=["c/é"])["exploration"]["slots"] == {"tail": 1}  # type: ignore[index]
    assert ids(answer(k=1, explore={"tail": 1}, allow=["a", "4"])) == ["4"]
    assert sorted(ids(answer(k=2, explore={"tail": 2}, allow=["a"]))) == ["a"]
    assert sorted(ids(answer(k=4, explore={"tail": 1, "head": 1}))) == ["4", "a", "b", "c/é"]


@pytest.mark.parametrize(("spec", "tree"), [("flat", False), ("ivf_flat", False), ("flat", True)])
def test_over_a_real_index(spec: str, tree: bool) -> None:
    retriever = make_retriever(make_bundle(labels=400, dim=8, users=5, proposal=tree), spec)
    queries = [
        RetrieveQuery(features={"user_id": f"u{user}"}, k=10, explore={} if user == 1 else {"tail": 4})
        for user in range(3)
    ]
    together = read_results(retriever.retrieve(queries, Draws(Lottery(seed=3), ["a", "b", "c"])))
    alone = read_results(retriever.retrieve(queries[2:], Draws(Lottery(seed=3), ["c"])))
    assert together[2] == within_rounding(alone[0])
    assert "exploration" not in together[1]
    for result in (together[0], together[2]):
        assert len({label["id"] for label in result["labels"]}) == 10
        assert sum(label["bucket"] == "tail" for label in result["labels"]) >= 4
        assert result["exploration"]["slots"] == {"tail": 4}
        assert sum(label["propensity"] < 1 for label in result["labels"]) <= 4
