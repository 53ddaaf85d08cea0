"""λ and μ between the points of their grids, under floors, by any metric of any bucket [METHODS §9]."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longtail.bundle import CurvePoint, Interval
from longtail.trainer import evaluate, fit
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Noise, Setting, best_dial, floors_of, lines
from longtail.trainer.evaluation.target import FoundByLabel
from longtail.trainer.limits import check_choice
from tests.trainer import tiny

GRID = [0.0, 0.25, 0.5, 0.75, 1.0]
ONE_DIAL, TWO_DIALS = Noise("π", constant=False, apart=False), Noise("π^0.5", constant=False, apart=True)


class Measured:
    """Recall rises with λ from .1 to .2, its nDCG is best at λ = .37 and μ = .13, the tail's recall falls from .04 to
    .02 with λ; and which settings were asked for."""

    def __init__(self) -> None:
        self.requests: list[Setting] = []

    def __call__(self, settings: list[Setting]) -> list[CurvePoint]:
        self.requests += settings
        return [
            CurvePoint(
                bias_removal=at.bias_removal,
                popularity=at.popularity,
                metrics={
                    "recall@2": Interval(value=0.1 + 0.1 * at.bias_removal),
                    "recall@2/tail": Interval(value=0.04 - 0.02 * at.bias_removal),
                    "ndcg@2": Interval(value=1 - (at.bias_removal - 0.37) ** 2 - (at.popularity - 0.13) ** 2),
                    "hit_rate@2": Interval(value=0.5 + 0.1 * (0.5 <= at.bias_removal < 0.6)),
                    "mrr@2": Interval(value=0.3),
                },
            )
            for at in settings
        ]


def config(**changes: Any) -> EvaluationConfig:
    defaults = {"ks": [2], "metric": "recall@2", "bias_removal": GRID, "popularity": [0.0, 0.5], "bootstrap": 10}
    return EvaluationConfig.model_validate(defaults | changes)


@pytest.mark.parametrize("tolerance", [0.05, 0.01])
def test_the_best_is_looked_for_between_the_grid_s_neighbours(tolerance: float) -> None:
    measure = Measured()
    best, curve = best_dial(measure, config(metric="ndcg@2", refine=tolerance), ONE_DIAL)

    assert best.bias_removal == pytest.approx(0.37, abs=tolerance)
    assert [*map(Setting.of, curve)] == [*map(Setting, GRID), best], "the recipe's own grid, and what is served"
    assert [*map(Setting.of, curve)] == lines(config(refine=tolerance), ONE_DIAL, best.bias_removal)
    assert all(0 < at.bias_removal < 0.5 for at in measure.requests[5:])
    assert len(measure.requests) <= 5 + 10


@pytest.mark.parametrize("metric", ["hit_rate@2", "mrr@2", "recall@2"])
def test_what_is_no_better_is_not_taken(metric: str) -> None:
    """A step on which the grid's best stands already, a constant, and a metric that is best at the grid's end."""
    plain, refined = (best_dial(Measured(), config(metric=metric, refine=near), ONE_DIAL) for near in (None, 0.01))

    assert plain == refined
    assert plain[0] == Setting({"hit_rate@2": 0.5, "mrr@2": 1.0, "recall@2": 1.0}[metric])


@pytest.mark.parametrize(
    ("metric", "floor", "expected"),
    [
        ("recall@2", {"tail": 0.03}, 0.5),
        ("recall@2", {"recall@2/tail": 0.03}, 0.5),
        ("recall@2/tail", {"recall@2": 0.15}, 0.5),
        ("recall@2/tail", {}, 0.0),
        ("recall@2", {"tail": {"times": 1.75, "bias_removal": 1.0}}, 0.25),
        ("recall@2/tail", {"recall@2": {"times": 0.85}}, 0.75),
        ("recall@2", {"ndcg@2": {"times": 0.999}, "tail": 0.02}, 0.25),
    ],
)
def test_any_metric_may_choose_and_any_may_have_a_floor(metric: str, floor: dict[str, Any], expected: float) -> None:
    """tail ≥ .03 up to λ = ½; recall ≥ .15 from there; tail ≥ 1.75 · .02 up to ¼; recall ≥ .85 · .2 from .7; nDCG ≥
    .999 of its best of the grid, at ¼."""
    best, _ = best_dial(Measured(), config(metric=metric, floor=floor), ONE_DIAL)

    assert best == Setting(expected)


def test_what_is_refined_keeps_to_the_floor() -> None:
    """tail ≥ .033 up to λ = .35; recall is best there."""
    best, curve = best_dial(Measured(), config(floor={"tail": 0.033}, refine=0.01), ONE_DIAL)

    assert 0.335 < best.bias_removal <= 0.35
    assert len(curve) == 6


def test_a_relative_floor_is_of_the_grid_alone() -> None:
    """λ = .37 is better than all of it, and raises no floor."""
    relative = config(metric="ndcg@2", floor={"ndcg@2": {"times": 1.0}}, refine=0.01)
    _, curve = best_dial(Measured(), relative, ONE_DIAL)

    assert floors_of(curve, relative) == {"ndcg@2": pytest.approx(1 - 0.12**2 - 0.13**2)}


def test_a_metric_of_a_bucket_without_valid_pairs_is_refused() -> None:
    data = tiny.dataset(tiny.pairs((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)), queries=3, labels=4)
    job = tiny.recipe(evaluation={"ks": [2], "metric": "recall@2/tail"})

    check_choice(job, replace(data, valid=tiny.pairs((1, 2))))
    with pytest.raises(DataError, match="expected valid pairs of tail labels for recall@2/tail, found none"):
        check_choice(job, replace(data, valid=tiny.pairs((1, 0))))


def test_a_job_serves_what_it_refined(tmp_path: Path) -> None:
    """On test it is a point of the curve, which is measured again from the bundle alone."""
    recipe, out = tiny.write_job(tmp_path), tmp_path / "bundle"
    bundle = fit(
        recipe, out,
        overrides=["evaluation.refine=0.02", "evaluation.metric=ndcg@5", "evaluation.floor={ tail = { times = 1.0 } }",
                   "evaluation.baselines=[]", "training.epochs=2"],
    )  # fmt: skip
    dial = bundle.manifest.bias_removal
    on_grid = [0.0, 0.5, 1.0]

    assert dial.chosen_by == "the floor tail >= 1 × its best and valid ndcg@5"
    expected = on_grid if dial.default in on_grid else [*on_grid, dial.default]
    assert [point.bias_removal for point in dial.curve] == expected
    assert [*FoundByLabel.read(out).found] == [Setting(at) for at in expected], "what was tried beside is forgotten"
    again = evaluate(out, recipe, overrides=["evaluation.refine=0.02"])
    assert [Setting.of(point) for point in again.curve] == [Setting.of(point) for point in dial.curve]
