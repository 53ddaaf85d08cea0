"""The answer of /v1/experiments."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from longtail.serving.core.queries import BucketName


class Shown(BaseModel):
    """What one bucket got of an arm's answers."""

    count: int
    share: float | None
    coverage: float | None = Field(
        description="Share of the bucket's labels that the arm answered at all, of the release that it answers from."
    )


class RateFigure(BaseModel):
    """A rate with the bounds that hold at every look; null of nothing."""

    hits: int = Field(description="Labels chosen that the answer held.")
    value: float | None
    low: float | None
    high: float | None


class RecallFigure(RateFigure):
    """Of the labels chosen after an answer, how many it held."""

    positives: int


class DifferenceFigure(BaseModel):
    """Hits per answer beyond those of the first arm, with the bounds that hold at every look."""

    value: float
    low: float
    high: float
    real: bool = Field(description="The bounds leave out 0.")


class ArmFigures(BaseModel):
    """One arm and what it did."""

    name: str
    share: float
    settings: dict[str, JsonValue]
    release: str | None = Field(description="That it answers from; null: the current one.")
    unavailable: str | None = Field(description="Why the arm cannot answer, so that its units get the default.")
    units: int = Field(description="Different units that its answers were given to.")
    answers: int
    left_out: dict[Literal["own_settings", "named", "unavailable"], int] = Field(
        description="Answers to its units that are in no figures: the request set what the arms set, named its arm, or "
        "the arm could not answer."
    )
    exposures: dict[BucketName, Shown]
    coverage: float | None
    hits_per_answer: RateFigure
    recall: dict[BucketName | Literal["all"], RecallFigure]
    difference: DifferenceFigure | None = Field(description="Null of the first arm, which others are compared with.")


class SampleRatio(BaseModel):
    """Whether units are divided as the shares say."""

    expected: dict[str, float]
    found: dict[str, float | None]
    evidence: float = Field(description="That they are not: an e-value, 1000 or more once in 1000 where they are.")
    mismatch: bool = Field(description="Do not trust the comparison: something loses or adds units of one arm.")


class ExperimentFigures(BaseModel):
    """The experiment that runs."""

    name: str
    run: str = Field(description="Names these arms, shares and settings; others are another run, and begin at zero.")
    unit: str | None = Field(description="The feature whose value is the unit.")
    traffic: float
    since: datetime | None = Field(description="Of the first answer.")
    confidence: float = Field(description="That bounds hold, all looks at a figure together.")
    arms: list[ArmFigures]
    sample_ratio: SampleRatio


class ExperimentsAnswer(BaseModel):
    """Answer of GET /v1/experiments."""

    experiment: ExperimentFigures | None = Field(description="Null: none runs.")
    others: list[str] = Field(description="Experiments in the file that are not active.")
    refused: str | None = Field(description="What is wrong with experiments.toml, so that the one before is in force.")
    request_id: str


EXAMPLE: dict[str, JsonValue] = {
    "experiment": {
        "name": "tail_week",
        "run": "e7795076365f",
        "unit": "user_id",
        "traffic": 0.5,
        "since": "2023-11-15T12:00:00Z",
        "confidence": 0.95,
        "arms": [
            {
                "name": "control",
                "share": 0.5,
                "settings": {},
                "release": None,
                "unavailable": None,
                "units": 3923,
                "answers": 8713,
                "left_out": {"own_settings": 0, "named": 0, "unavailable": 0},
                "exposures": {
                    "head": {"count": 17941, "share": 0.6864, "coverage": 0.98},
                    "torso": {"count": 6287, "share": 0.2405, "coverage": 0.7},
                    "tail": {"count": 1911, "share": 0.0731, "coverage": 0.4},
                    "new": {"count": 0, "share": 0.0, "coverage": 0.0},
                },
                "coverage": 0.61,
                "hits_per_answer": {"hits": 1054, "value": 0.121, "low": 0.1096, "high": 0.1324},
                "recall": {
                    "head": {"positives": 891, "hits": 768, "value": 0.862, "low": 0.8235, "high": 0.9004},
                    "torso": {"positives": 470, "hits": 225, "value": 0.4787, "low": 0.4033, "high": 0.5542},
                    "tail": {"positives": 295, "hits": 61, "value": 0.2068, "low": 0.1134, "high": 0.3002},
                    "new": {"positives": 0, "hits": 0, "value": None, "low": None, "high": None},
                    "all": {"positives": 1656, "hits": 1054, "value": 0.6365, "low": 0.6001, "high": 0.6728},
                },
                "difference": None,
            },
            {
                "name": "tail",
                "share": 0.5,
                "settings": {"bias_removal": 0.3},
                "release": None,
                "unavailable": None,
                "units": 4095,
                "answers": 9074,
                "left_out": {"own_settings": 0, "named": 0, "unavailable": 0},
                "exposures": {
                    "head": {"count": 15525, "share": 0.5703, "coverage": 0.98},
                    "torso": {"count": 8070, "share": 0.2965, "coverage": 0.7},
                    "tail": {"count": 3627, "share": 0.1332, "coverage": 0.4},
                    "new": {"count": 0, "share": 0.0, "coverage": 0.0},
                },
                "coverage": 0.74,
                "hits_per_answer": {"hits": 1325, "value": 0.146, "low": 0.1339, "high": 0.1581},
                "recall": {
                    "head": {"positives": 960, "hits": 796, "value": 0.8292, "low": 0.7903, "high": 0.8681},
                    "torso": {"positives": 571, "hits": 371, "value": 0.6497, "low": 0.5839, "high": 0.7156},
                    "tail": {"positives": 398, "hits": 158, "value": 0.397, "low": 0.3147, "high": 0.4793},
                    "new": {"positives": 0, "hits": 0, "value": None, "low": None, "high": None},
                    "all": {"positives": 1929, "hits": 1325, "value": 0.6869, "low": 0.6546, "high": 0.7192},
                },
                "difference": {"value": 0.0251, "low": 0.0086, "high": 0.0415, "real": True},
            },
        ],
        "sample_ratio": {
            "expected": {"control": 0.5, "tail": 0.5},
            "found": {"control": 0.4893, "tail": 0.5107},
            "evidence": 0.9429,
            "mismatch": False,
        },
    },
    "others": [],
    "refused": None,
    "request_id": "5f0c6e1d9a34",
}
"""Of the answer."""
