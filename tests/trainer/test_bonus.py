"""β for torso, tail and new: chosen by floors alone, and compared with λ and reserved places."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bonus, CurvePoint, Interval
from longtail.trainer import evaluate, fit
from longtail.trainer.evaluation.dial import Noise, Setting, best_dial, best_with_bonus, lines
from longtail.trainer.evaluation.frontier import reserve_slots
from tests.trainer import tiny
from tests.trainer.conftest import Finished

NOISE = Noise("π", constant=False, separate_prior=False)


def test_reserved_slots_hold_the_best_of_the_tail() -> None:
    rng, rows, labels, k = np.random.default_rng(7), 60, 12, 6
    buckets = np.int8(rng.integers(0, 4, labels))
    scores = rng.normal(size=(rows, labels)) - 1.5 * (buckets == 2)
    scores[rng.random((rows, labels)) < 0.4] = -np.inf  # seen: some lists end early

    def lists(scores: np.ndarray) -> np.ndarray:
        top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.where(np.take_along_axis(scores, top, axis=1) > -np.inf, top, -1).astype(np.int32)

    first, tail_first = lists(scores), lists(scores + 1e3 * (buckets == 2))
    assert (first == -1).any()
    for reserved in range(k + 1):
        for row, slots in enumerate(reserve_slots(first, tail_first, buckets, reserved)):
            order = [label for label in np.argsort(-scores[row]).tolist() if scores[row, label] > -np.inf]
            tail = [label for label in order if buckets[label] == 2][:reserved]
            others = [label for label in order if label not in tail][: k - len(tail)]
            assert sorted(slots[slots >= 0].tolist()) == sorted(tail + others), (row, reserved)
    assert reserve_slots(first, tail_first, buckets, 0).tolist() == first.tolist()


def priced(settings: list[Setting]) -> list[CurvePoint]:
    """λ < 1 and β of the tail both find the tail; β costs a tenth of the recall, β of the torso a little more.

    β of new labels is best at ¾.
    """
    return [
        at.point(
            {
                "recall@2": Interval(
                    value=0.3
                    - 0.1 * (1 - at.bias_removal)
                    - 0.01 * at.tail
                    - 0.02 * at.torso
                    - 0.001 * (at.new - 0.75) ** 2
                ),
                "recall@2/tail": Interval(value=0.02 * (1 - at.bias_removal) + 0.02 * at.tail),
                "recall@2/torso": Interval(value=0.01 * at.torso),
                "recall@2/new": Interval(value=0.01 * at.new),
                "recall@2/head": Interval(value=0.1 * at.bias_removal),
            }
        )
        for at in settings
    ]


@pytest.mark.parametrize(
    ("floor", "expected"),
    [
        ({}, Setting(1, new=0.75)),
        ({"tail": 0.02}, Setting(1, tail=1)),
        ({"tail": 0.013}, Setting(1, tail=0.75)),  # between the grid's .5 and 1
        ({"recall@2/tail": 0.003}, Setting(1, tail=0.25)),
        ({"tail": 0.03, "torso": 0.01}, Setting(1, torso=1, tail=1.5)),
        ({"tail": 0.02, "head": 0.06}, Setting(1, tail=1)),
        ({"tail": 0.02, "new": 0.0}, Setting(1, tail=1, new=1)),
        ({"head": 0.06}, Setting(1)),
        ({"recall@2": {"times": 0.9}, "tail": {"times": 2, "bias_removal": 0.5}}, Setting(1, tail=1)),
    ],
)
def test_floors_take_the_bonus_of_least_loss(floor: dict[str, Any], expected: Setting) -> None:
    evaluation = {"ks": [2], "metric": "recall@2", "bias_removal": [0.0, 0.5, 1.0], "floor": floor}
    config, measured = tiny.recipe(evaluation=evaluation).evaluation, list[Setting]()

    def measure(settings: list[Setting]) -> list[CurvePoint]:
        measured.extend(settings)
        return priced(settings)

    best, curve = best_dial(measure, config, NOISE)
    assert best_with_bonus(measure, curve, best, config, NOISE) == expected
    if not floor.keys() - {"head"}:
        of_new = [] if floor else [Setting(1, new=step / 4) for step in range(9)]
        expected_settings = [*(Setting(at) for at in (0, 0.5, 1)), *of_new]
        assert measured == expected_settings, "without a floor of torso, tail or new, their β is not tried"
    assert all(-5 <= beta <= 5 for at in measured for beta in at.bonus.values())


def test_lines_go_through_the_served_bonus_and_show_the_dial_without_it() -> None:
    config = tiny.recipe(evaluation={"ks": [2], "metric": "recall@2", "bias_removal": [0.0, 1.0]}).evaluation
    served = Setting(1, tail=1.5)
    assert lines(config, NOISE, served) == [Setting(0, tail=1.5), served, Setting(0), Setting(1)]
    assert lines(config, NOISE, Setting(1)) == [Setting(0), Setting(1)]
    assert served.with_bonus(0.5, 2, new=True) == Setting(1, torso=0.5, tail=2, new=2)


def test_a_floor_puts_the_bonus_into_the_bundle(tmp_path: Path) -> None:
    reporter, screen = tiny.record_output()
    recipe = tiny.write_job(tmp_path)
    overrides = ["training.epochs=1", "evaluation.baselines=[]", 'evaluation.floor={"exposure@5/tail"=0.45}']
    bundle = fit(recipe, tmp_path / "model", reporter, overrides=overrides)

    bonus = {bucket: dial.default for bucket, dial in bundle.manifest.bonus.items()}
    assert bonus["tail"] > 0
    assert bonus["new"] == 0, "without a floor of their own, new labels take no places from the tail"
    assert bundle.manifest.bonus["tail"] == Bonus(default=bonus["tail"], minimum=-5, maximum=5)
    assert f"β tail = {bonus['tail']:g}" in bundle.manifest.in_words()
    at = bundle.manifest.default_point
    assert at.bonus == {bucket: beta for bucket, beta in bonus.items() if beta}
    assert at.metrics["exposure@5/tail"].value > 0.35, "on test, near the floor"
    again = evaluate(bundle, recipe, overrides=overrides)
    assert again.value("recall@5") == at.metrics["recall@5"].value
    assert [*map(Setting.read_point, again.curve)] == [*map(Setting.read_point, evaluate(bundle).curve)]
    assert again.value("recall@5", bias_removal=1.0, bonus={}) > 0
    assert "β tail" in screen.getvalue()
    assert f", β tail = {bonus['tail']:g}" in (tmp_path / "model" / "report.html").read_text()


def test_without_floors_no_bonus_is_served_and_its_cost_is_reported(finished: Finished) -> None:
    figures = json.loads((finished.out / "metrics.json").read_text())
    ways = figures["frontier"]
    assert list(ways) == ["dial λ", "bonus", "places"]
    assert [point["at"] for point in ways["dial λ"]] == ["λ = 0", "λ = 0.5", "λ = 1"]
    served = next(point for point in figures["curve"] if point["bias_removal"] == figures["default"])
    assert not any(point["bonus"] for point in figures["curve"])
    for way in ("bonus", "places"):
        assert ways[way][0]["recall"] == pytest.approx(served["metrics"]["recall@5"]["value"])
        tails = [point["tail"] for point in ways[way]]
        assert tails == sorted(tails)
    assert [point["at"] for point in ways["places"]] == ["0 of 5 places", "1 of 5 places", "2 of 5 places"]
    page = (finished.out / "report.html").read_text()
    assert "Recall@5 against recall@5 of the tail, by dial λ, bonus, places" in page
