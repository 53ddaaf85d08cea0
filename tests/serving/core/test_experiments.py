"""experiments.toml: what it may say, who is in which arm, and which requests an arm leaves alone."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from longtail.serving.core.experiments import Experiment, ExperimentsError, parse_experiments
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.settings import Settings

LIMITS = Settings(releases=Path("releases"), max_k=1000, max_queries=100)
UNITS = [f"u{number}" for number in range(8_000)]


def toml(arms: dict[str, str], **options: str) -> bytes:
    lines = ["[experiments.x]", *(f"{name} = {value}" for name, value in options.items())]
    for name, body in arms.items():
        lines += [f"[experiments.x.arms.{name}]", body]
    return "\n".join(lines).encode()


def running(arms: dict[str, str], **options: str) -> Experiment:
    experiment = parse_experiments(toml(arms, **options), LIMITS)
    assert experiment is not None
    return experiment


def shares(*values: float) -> dict[str, str]:
    return {name: f"share = {value}" for name, value in zip("abcdefgh", values, strict=False)}


def assign_units(experiment: Experiment) -> list[str]:
    query = RetrieveQuery(features={})
    return [experiment.assign(query, "q", unit=unit, arm=None, pinned=False)[1].arm for unit in UNITS]


def moved(before: Experiment, after: Experiment) -> float:
    return sum(first != other for first, other in zip(assign_units(before), assign_units(after), strict=True)) / len(
        UNITS
    )


def test_units_are_divided_by_the_shares_and_always_the_same() -> None:
    experiment = running(shares(0.5, 0.3, 0.2, 0))
    arm_counts = Counter(assign_units(experiment))
    assert [arm_counts[name] / len(UNITS) for name in "abcd"] == pytest.approx([0.5, 0.3, 0.2, 0], abs=0.025)
    # Of 2026-11-22, in whatever process, worker or version: a unit's arm never changes by itself.
    assert "".join(str(arm) for arm in assign_units(experiment)[:24]) == "aaaacbbbaaacbaababcaabac"
    again = running({name: f"share = {share}" for name, share in zip("dcba", (0, 0.2, 0.3, 0.5), strict=True)})
    assert assign_units(again) == assign_units(experiment), "the order of the file does not matter"
    assert again.run == experiment.run


def test_no_more_units_move_than_must() -> None:
    half = running(shares(0.5, 0.5))
    assert moved(half, running(shares(0.4, 0.6))) == pytest.approx(0.1, abs=0.015)
    three = running(shares(0.4, 0.4, 0.2))
    # Of an arm that is added, or taken out, only its own units move.
    assert moved(half, three) == pytest.approx(0.2, abs=0.015)
    assert {pair for pair in zip(assign_units(half), assign_units(three), strict=True) if pair[0] != pair[1]} == {
        ("a", "c"),
        ("b", "c"),
    }


def test_other_shares_or_settings_are_another_run() -> None:
    run = running(shares(0.5, 0.5)).run
    assert run != running(shares(0.4, 0.6)).run
    assert run != running({"a": "share = 0.5\nk = 5", "b": "share = 0.5"}).run


def test_a_request_that_sets_an_option_of_the_arms_is_in_no_arm() -> None:
    experiment = running(
        {"control": "share = 0.5", "tail": 'share = 0.5\nbias_removal = 0.3\ndisplay = ["title"]\nexplore = {new = 2}'}
    )

    def takes_part(experiment: Experiment, **options: Any) -> bool:
        query = RetrieveQuery.model_validate({"features": {}, **options})
        return experiment.assign(query, "q", unit="u", arm=None, pinned=False)[1].counted

    open_ = partial(takes_part, experiment)

    assert open_()
    assert open_(exclude=["a"], allow=["b"], k=2, buckets=["new", "head"])
    assert not open_(bias_removal=0.3)
    assert not open_(bias_removal=None), "it says: the release's default"
    assert not open_(popularity=0.1), "λ + μ has limits"
    assert not open_(display=True)
    assert not open_(explore={})
    assert not open_(k=1), "two slots do not fit"
    assert not open_(buckets=["head"]), "new labels may not be answered"
    assert not open_(at_least={"bucket": {"tail": 1}}), "slots and floors take of the same k"
    assert not open_(mmr=0.5), "what is drawn at random is not kept apart"
    assert not open_(max_per={"brand": 1})
    floored = running({
        "a": "share = 0.5", "b": 'share = 0.5\nat_least = [{bucket = "tail", n = 1}, {filter = {brand = "x"}, n = 2}]'
    })  # fmt: skip
    assert floored.arms["b"].json_settings == {
        "at_least": [{"bucket": "tail", "n": 1}, {"filter": {"brand": "x"}, "n": 2}]
    }
    assert takes_part(floored, k=3, buckets=["tail"])
    for options in ({"k": 2}, {"buckets": ["head"]}, {"at_least": []}, {"explore": {}}):
        assert not takes_part(floored, **options)
    priors = running({"a": "share = 0.5", "b": "share = 0.5\npriors = {recent = 0.5}"})
    assert priors.arms["b"].settings == {"priors": {"recent": 0.5}}
    assert not takes_part(priors, priors={})
    with_k = running({"a": "share = 0.5", "b": "share = 0.5\nk = 5"})
    assert takes_part(with_k, bias_removal=1)
    assert not takes_part(with_k, k=5)


def test_a_vector_is_valid_for_its_release_only() -> None:
    of_arms = {"a": "share = 0.5", "b": "share = 0.5\nrelease = 'other'"}
    for arms, counted in ((of_arms, False), (shares(0.5, 0.5), True)):
        experiment = running(arms)
        for unit in UNITS[:20]:
            vector, features = RetrieveQuery(vector=[0.5, 1.0]), RetrieveQuery(features={})
            _, arm, release = experiment.assign(vector, "q", unit=unit, arm=None, pinned=False)
            assert (arm.counted, release) == (counted, None)
            assert experiment.assign(features, "q", unit=unit, arm=None, pinned=False)[1].counted


TWO = toml(shares(0.5, 0.5)) + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "expected TOML in UTF-8"),
        (b"[experiments.x", "expected TOML"),
        (b"a = " + b"[" * 30_000, "expected TOML"),
        (b"[experiment.x]", "received an unknown key: did you mean 'experiments'?"),
        (b"experiments = 3", "experiments: expected a table, received 3"),
        (b'[experiments."a b"]', "experiments.a b: expected a string that matches"),
        (toml(shares(1)), "experiments.x.arms: expected at least 2 of them, received 1"),
        (toml(dict.fromkeys("abcdefghi", "share = 0.1")), "experiments.x.arms: expected at most 8"),
        (toml(shares(0.5, 0.4)), "experiments.x: shares of arms with the sum 1, not 0.9"),
        (toml({"a": "share = nan", "b": "share = 1"}), "experiments.x.arms.a.share: expected a finite number"),
        (toml({"a": "share = -0.5", "b": "share = 1.5"}), "experiments.x.arms.a.share: expected at least 0"),
        (toml({"a": 'share = "0.5"', "b": "share = 0.5"}), "x.arms.a.share: expected a number"),
        (toml({"a": "release = 'r'", "b": "share = 0.5"}), "experiments.x.arms.a.share: expected a value"),
        (toml(shares(0.5, 0.5), unit="3"), "experiments.x.unit: expected a string, received 3"),
        (toml(shares(0.5, 0.5), weight="3"), "experiments.x.weight: expected one of unit, arms, received"),
        (toml({"a": "share = 0.5\nlambda = 3", "b": "share = 0.5"}), "arms.a.lambda: expected one of k, bias_removal"),
        (toml({"a": "share = 0.5\nexclude = ['x']", "b": "share = 0.5"}), "arms.a: no exclude"),
        (toml({"a": "share = 0.5\nbias_removal = inf", "b": "share = 0.5"}), "a.bias_removal: expected a"),
        (toml({"a": "share = 0.5\nbias_removal = 2020-01-01", "b": "share = 0.5"}), "a.bias_removal: expected a"),
        (toml({"a": "share = 0.5\nk = 0", "b": "share = 0.5"}), "arms.a.k: expected at least 1"),
        (toml({"a": "share = 0.5\nk = 101", "b": "share = 0.5"}), "arms.a.k: expected at most 100"),
        (toml({"a": "share = 0.5\nk = 9223372036854775808", "b": "share = 0.5"}), "arms.a.k: expected at most 100"),
        (toml({"a": "share = 0.5\nexplore = {top = 1}", "b": "share = 0.5"}), "arms.a.explore.top"),
        (TWO + TWO.replace(b".x", b".y"), "experiments: expected at most 1 of them"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_says_what_and_where(content: bytes, message: str) -> None:
    with pytest.raises(ExperimentsError) as raised:
        parse_experiments(content, LIMITS)
    assert message in raised.value.message
    assert len(raised.value.message) < 500


def test_arms_that_leave_k_open_have_no_k_to_limit() -> None:
    assert parse_experiments(TWO, LIMITS.model_copy(update={"max_k": 5})) is not None


def test_without_an_experiment_none_runs() -> None:
    assert parse_experiments(b"", LIMITS) is None
