"""λ and μ under floors, by any metric of any bucket [METHODS §9]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longtail.bundle import CurvePoint, Interval
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Noise, Setting, best_dial
from longtail.trainer.limits import check_choice
from tests.trainer import tiny

GRID = [0.0, 0.25, 0.5, 0.75, 1.0]
ONE_DIAL = Noise("π", constant=False, apart=False)


def measured(settings: list[Setting]) -> list[CurvePoint]:
    """Recall rises with λ from .1 to .2, its nDCG is best at λ = .37, the tail's recall falls from .04 to .02."""
    return [
        CurvePoint(
            bias_removal=at.bias_removal,
            popularity=at.popularity,
            metrics={
                "recall@2": Interval(value=0.1 + 0.1 * at.bias_removal),
                "recall@2/tail": Interval(value=0.04 - 0.02 * at.bias_removal),
                "ndcg@2": Interval(value=1 - (at.bias_removal - 0.37) ** 2),
            },
        )
        for at in settings
    ]


def config(**changes: Any) -> EvaluationConfig:
    defaults = {"ks": [2], "metric": "recall@2", "bias_removal": GRID, "popularity": [0.0, 0.5], "bootstrap": 10}
    return EvaluationConfig.model_validate(defaults | changes)


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
    best, _ = best_dial(measured, config(metric=metric, floor=floor), ONE_DIAL)

    assert best == Setting(expected)


def test_a_metric_of_a_bucket_without_valid_pairs_is_refused() -> None:
    data = tiny.dataset(tiny.pairs((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)), queries=3, labels=4)
    job = tiny.recipe(evaluation={"ks": [2], "metric": "recall@2/tail"})

    check_choice(job, replace(data, valid=tiny.pairs((1, 2))))
    with pytest.raises(DataError, match="expected valid pairs of tail labels for recall@2/tail, found none"):
        check_choice(job, replace(data, valid=tiny.pairs((1, 0))))
