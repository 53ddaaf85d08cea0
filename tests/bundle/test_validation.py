"""Errors of pydantic name the key, the expected value, and the name that was probably meant."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from longtail.bundle.validation import describe_problems, did_you_mean, nearest


class Share(BaseModel):
    model_config = ConfigDict(extra="forbid")

    times: float = Field(gt=0)
    of: str | None = None


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    floor: dict[str, Annotated[float, Field(ge=0, le=1)] | Share] = {}
    files: list[Path | str] | None = None
    steps: int = 3
    widths: list[int] = Field(default=[0], min_length=1, max_length=2)
    devices: Literal["one", "all"] = "one"
    shares: tuple[Share, ...] = ()
    from_: str = Field(default="", alias="from", pattern="^[a-z]{2}$")
    fast: bool = False

    @field_validator("steps")
    @classmethod
    def _odd(cls, steps: int) -> int:
        if steps % 2 == 0:
            raise ValueError("expected odd steps")
        return steps


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "member of a union": (
        {"floor": {"tail": 2}}, ["floor.tail: expected at most 1 or a table of times, of, received 2"],
    ),
    "key in a member": (
        {"floor": {"tail": {"time": 2}}},
        # The number, too, refuses a table.
        ["floor.tail: expected a number, received {'time': 2}", "floor.tail.times: expected a value, received none",
         "floor.tail.time: expected one of times, of, received an unknown key: did you mean 'times'?"],
    ),
    "words for a number": ({"steps": "two"}, ["steps: expected a whole number, received 'two'"]),
    "broken number": ({"steps": 1.5}, ["steps: expected a whole number, received 1.5"]),
    "own rule": ({"steps": 2}, ["steps: expected odd steps"]),
    "too many": ({"widths": [1, 2, 3]}, ["widths: expected at most 2 of them, received 3"]),
    "none": ({"widths": []}, ["widths: expected at least 1 of them, received 0"]),
    "entry": ({"widths": [1, "a"]}, ["widths.1: expected a whole number, received 'a'"]),
    "choice": ({"devices": 4}, ["devices: expected 'one' or 'all', received 4"]),
    "misspelt choice": ({"devices": "al"}, ["devices: expected 'one' or 'all', received 'al': did you mean 'all'?"]),
    "table in a list": ({"shares": [{"times": 0}]}, ["shares.0.times: expected more than 0, received 0"]),
    "no table": ({"shares": [7]}, ["shares.0: expected a table of times, of, received 7"]),
    "by its other name": (
        {"form": "ab"},
        ["form: expected one of floor, files, steps, widths, devices, shares, from, fast, received an unknown key: did "
         "you mean 'from'?"],
    ),
    "braces in a pattern": ({"from": "abc"}, ["from: expected a string that matches ^[a-z]{2}$, received 'abc'"]),
    "several": (
        {"fast": "no way", "files": 3},
        ["files: expected a list, received 3", "fast: expected true or false, received 'no way'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
def test_problems_name_path_and_expectation(values: dict[str, Any], message: list[str]) -> None:
    with pytest.raises(ValidationError) as raised:
        Settings.model_validate(values)
    assert [*map(str, describe_problems(raised.value.errors(), Settings))] == message


def test_names_of_other_libraries() -> None:
    assert did_you_mean("lambda", ["bias_removal", "k"], {"lambda": "bias_removal"}) == ": did you mean 'bias_removal'?"
    assert did_you_mean("lambda", ["k"], {"lambda": "bias_removal"}) == ""
    assert did_you_mean("weigth", ["weight", "family"]) == ": did you mean 'weight'?"


def test_long_name_is_not_compared() -> None:
    started = perf_counter()
    assert nearest("weight" * 1_000_000, ["weight"] * 1_000) is None
    assert perf_counter() - started < 0.1
