"""Estimates for other λ: without bias, with bounds that hold the truth at every look, and silent where they must be.

`LONGTAIL_EXPERIMENTS=2000 pytest tests/serving/test_off_policy.py -s` simulates so many and prints the shares.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.label_changes import Hide, Patch, Restore
from longtail.index import open_releases
from longtail.serving.cli import main
from longtail.serving.compare import boundary
from longtail.serving.core.exploration import Lottery, explore, inclusion_probabilities
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.events.schema import event_json
from longtail.serving.off_policy import (
    COVERED,
    ExplorationLog,
    OffPolicyError,
    estimate,
    estimate_settings,
    off_policy,
    read_log,
    report_lines,
    settings_table,
)
from longtail.state import LabelStore
from tests.bundles import make_bundle
from tests.end_to_end.releases import publish_bundle
from tests.events import write_events
from tests.serving.monitoring.shop import NOON
from tests.serving.plane import plane_retriever, read_results

ROOT = Path(__file__).parents[2]
EXPERIMENTS, ANSWERS, USERS, LABELS, K = int(os.environ.get("LONGTAIL_EXPERIMENTS", "30")), 300, 5, 40, 6
BUCKETS = np.arange(LABELS, dtype=np.int64) // 10 % 3
LOTTERY = Lottery(candidates=8, temperature=0.7)
FLOORS = {0: 1, 1: 1, 2: 1}
_chance = np.random.default_rng(5)
SCORES_UL = (_chance.normal(size=(USERS, LABELS)) - BUCKETS).astype(np.float32)
CHANCES_UL = _chance.uniform(0.02, 0.15, (USERS, LABELS)) * np.array([1.0, 1.0, 3.0])[BUCKETS]
PULL_L = BUCKETS + 0.5 * _chance.normal(size=LABELS)
LAMBDAS = (0.5, 1.0, 20.0)


def rank_best(user: int, at: float) -> np.ndarray:
    """The rows of a user's answer at λ, which gives back what the tail lost."""
    return np.argsort(-(SCORES_UL[user] + at * PULL_L), kind="stable")[:K]


def find_candidates(user: int) -> set[int]:
    """Rows that the user may be shown at λ = 0."""
    rows = set(rank_best(user, 0.0).tolist())
    for bucket in FLOORS:
        ranked = [row for row in np.argsort(-SCORES_UL[user], kind="stable").tolist() if BUCKETS[row] == bucket]
        certain = max(sum(row in rows for row in ranked) - 1, 0)
        rows.update(ranked[: certain + LOTTERY.candidates])
    return rows


for _user in range(USERS):
    # What the log could not show brings more than what it could.
    CHANCES_UL[_user, [row for row in range(LABELS) if row not in find_candidates(_user)]] = 0.9


def add_up_slots(first: int, answers: int) -> dict[str, np.ndarray]:
    """Count the slots of answers by bucket, and those that the log could not show."""
    counts = {"exposures_GB": np.zeros((len(LAMBDAS) + 1, 4), np.int64)} | {
        name: np.zeros(len(LAMBDAS) + 1, np.int64) for name in ("open_G", "gained_G", "lost_G")
    }
    for user, times in enumerate(np.bincount(np.arange(first, first + answers) % USERS, minlength=USERS)):
        own_rows, possible_rows = {*rank_best(user, 0.0).tolist()}, find_candidates(user)
        for i, at in enumerate((0.0, *LAMBDAS)):
            answer_rows = {*rank_best(user, at).tolist()}
            counts["exposures_GB"][i] += times * np.bincount(BUCKETS[[*answer_rows]], minlength=4)
            counts["open_G"][i] += times * len(answer_rows - possible_rows)
            counts["gained_G"][i] += times * len(answer_rows - possible_rows - own_rows)
            counts["lost_G"][i] += times * len(own_rows - possible_rows - answer_rows)
    return counts


@cache
def simulate_log(answers: int) -> ExplorationLog:
    """Answers at λ = 0 that explored, users in turn; every answer is its own unit."""
    chance, parts = np.random.default_rng(7), []
    held_UGL = np.array([[np.isin(np.arange(LABELS), rank_best(user, at)) for at in (0.0, *LAMBDAS)]
                         for user in range(USERS)])  # fmt: skip
    eligible = []
    for scores_L in SCORES_UL:
        order = np.argsort(-scores_L, kind="stable").astype(np.int64)
        ranked = {bucket: (rows := order[BUCKETS[order] == bucket], scores_L[rows]) for bucket in FLOORS}
        eligible.append(((order[:K], scores_L[order[:K]], BUCKETS[order[:K]].astype(np.int8)), ranked))
    for answer in range(answers):
        user = answer % USERS
        best, ranked = eligible[user]
        explored = explore(best, ranked, FLOORS, LOTTERY, chance)
        chosen_K = chance.random(K) < CHANCES_UL[user, explored.rows_K]
        parts.append((explored.propensities_K, chosen_K, explored.rows_K, held_UGL[user][:, explored.rows_K]))
    rows_S = np.concatenate([rows_K for _, _, rows_K, _ in parts])
    return ExplorationLog(
        lambda_G=(None, *LAMBDAS),
        propensities_S=np.concatenate([part[0] for part in parts]).astype(np.float64),
        chosen_S=np.concatenate([part[1] for part in parts]).astype(np.float64),
        buckets_S=BUCKETS[rows_S].astype(np.int8),
        unit_S=np.repeat(np.arange(answers), K),
        held_GS=np.concatenate([part[3] for part in parts], axis=1),
        answers_U=np.ones(answers),
        **add_up_slots(0, answers),
        changed_G=np.array([0, 1, 1, 1]),
        without_unit=0,
        left_out={},
    )


def take_part(log: ExplorationLog, first: int, answers: int) -> ExplorationLog:
    labels = slice(first * K, (first + answers) * K)
    return replace(
        log,
        propensities_S=log.propensities_S[labels],
        chosen_S=log.chosen_S[labels],
        buckets_S=log.buckets_S[labels],
        unit_S=log.unit_S[labels] - first,
        held_GS=log.held_GS[:, labels],
        answers_U=log.answers_U[first : first + answers],
        **add_up_slots(first, answers),
    )


def truth(at: float, *, of: str = "all") -> float:
    """Labels chosen per answer at λ: of all slots, or of those that the log could show."""
    return float(np.mean([
        sum(CHANCES_UL[user, row] for row in rank_best(user, at) if of == "all" or row in find_candidates(user))
        for user in range(USERS)
    ]))  # fmt: skip


def compute_recall(at: float, bucket: int | None) -> float:
    """Return the share of what all labels that the log could show would bring, at λ."""
    answered = possible = 0.0
    for user in range(USERS):
        rows = [row for row in find_candidates(user) if bucket in (None, BUCKETS[row])]
        possible += CHANCES_UL[user, rows].sum()
        answered += CHANCES_UL[user, [row for row in rows if row in rank_best(user, at)]].sum()
    return answered / possible


def share_covered(at: float) -> float:
    return float(np.mean([len(find_candidates(user) & {*rank_best(user, at).tolist()}) / K for user in range(USERS)]))


def test_estimate_is_unbiased_and_counting_is_biased() -> None:
    log = simulate_log(EXPERIMENTS * ANSWERS)
    answers, settings = len(log.answers_U), estimate_settings(log)
    for at, held_S, setting in zip(LAMBDAS, log.held_GS[1:], settings[1:], strict=True):
        found_N = (held_S / log.propensities_S * log.chosen_S).reshape(answers, K).sum(axis=1)
        plain_N = (held_S * log.chosen_S).reshape(answers, K).sum(axis=1)
        error, expected = found_N.std() / math.sqrt(answers), truth(at, of="covered")
        print(f"λ {at}: {expected:.4f}, estimated {found_N.mean():.4f} ± {error:.4f}, counted {plain_N.mean():.4f}")
        assert setting["chosen_per_answer"]["value"] == pytest.approx(found_N.mean())
        assert abs(found_N.mean() - expected) < 4 * error < 0.2
        assert abs(plain_N.mean() - expected) > 10 * error
        assert setting["covered"] == pytest.approx(share_covered(at))
    assert [setting["says"] for setting in settings[1:]] == ["better", "better", "better"]
    assert [setting["covered"] >= COVERED for setting in settings] == [True, True, True, False]
    # From λ = 1, as if that had been their own, to what was.
    back = replace(log, held_GS=log.held_GS[[2, 0, 0, 0]], open_G=log.open_G * 0, gained_G=log.gained_G * 0)
    assert estimate_settings(back)[1]["says"] == "worse"


def test_intervals_cover_the_truth_at_every_look_or_report_missing_support() -> None:
    """Looks from the 10th answer on; all λ together. Recall is of head, torso, tail, and all."""
    expected_recall = {name: [compute_recall(at, bucket) for at in (0.0, *LAMBDAS)]
                       for name, bucket in (("head", 0), ("torso", 1), ("tail", 2), ("all", None))}  # fmt: skip
    missed_recall = dict.fromkeys(expected_recall, 0)
    log, missed, fixed, verdicts = simulate_log(EXPERIMENTS * ANSWERS), 0, 0, []
    local, truths, alone = truth(0.0), [truth(at) for at in LAMBDAS], [share_covered(at) for at in LAMBDAS]
    assert alone[:2] == [1.0, 1.0]
    assert alone[2] < 0.9
    for first in range(0, EXPERIMENTS * ANSWERS, ANSWERS):
        outside = outside_once = False
        outside_recall = dict.fromkeys(expected_recall, False)
        for answers in np.geomspace(10, ANSWERS, 15).astype(int).tolist():
            history = take_part(log, first, answers)
            own_setting, *settings = every = estimate_settings(history)
            outside |= not own_setting["chosen_per_answer"]["low"] <= local <= own_setting["chosen_per_answer"]["high"]
            for name, expected_G in expected_recall.items():
                for setting, expected in zip(every, expected_G, strict=True):
                    if figure := setting["recall"][name]:
                        outside_recall[name] |= not figure["low"] <= expected <= figure["high"]
            for setting, expected in zip(settings, truths, strict=True):
                figure, change = setting["chosen_per_answer"], setting["difference"]
                outside |= not figure["low"] <= expected <= figure["high"]
                outside |= not change["low"] <= expected - local <= change["high"]
            found_N = (history.held_GS[1] / history.propensities_S * history.chosen_S).reshape(answers, K).sum(axis=1)
            reach = 1.96 * found_N.std() / math.sqrt(answers)
            outside_once |= abs(found_N.mean() - truths[0]) > reach
        missed += outside
        missed_recall = {name: count + outside_recall[name] for name, count in missed_recall.items()}
        fixed += outside_once
        verdicts.append([setting["says"] for setting in settings])
    print("recall", {name: count / EXPERIMENTS for name, count in missed_recall.items()})
    print(
        f"left out at some look {missed / EXPERIMENTS:.3f}, of fixed size {fixed / EXPERIMENTS:.3f}; last "
        f"{verdicts[-1]}"
    )
    assert max(missed, *missed_recall.values()) / EXPERIMENTS <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)
    assert fixed / EXPERIMENTS > 0.2, "an interval of fixed size is no use here"
    assert {says[2] for says in verdicts} <= {"cannot tell", "better"}
    assert sum(says[2] == "cannot tell" for says in verdicts) > EXPERIMENTS / 2


def test_table_of_the_guide_equals_the_command() -> None:
    lines = settings_table({"settings": estimate_settings(simulate_log(3_000))}).lines()
    guide = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    (table,) = (part for part in guide.split("```") if part.startswith("text\nλ "))
    assert [line.split() for line in table.splitlines()[1:]] == [line.split() for line in lines]


def test_estimates_by_hand() -> None:
    # Two units of 2 and 3 answers: 4 · 1 and 1 + 0 over 5 answers.
    coefficients, chosen, unit = np.array([4.0, 4.0, 1.0, 0.0]), np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1])
    interval = estimate(coefficients, chosen, unit, np.array([2.0, 3.0]), alpha=0.1)
    assert interval is not None
    # By unit 4 − 2 and 1 − 3 make V = 8; two of three labels that count were chosen, so that V is at least 2/3 · 33.
    reach = math.sqrt(11) * boundary(22 / 11, 0.1) / 5
    assert interval == {"value": 1.0, "low": pytest.approx(1 - reach), "high": pytest.approx(1 + reach)}
    nothing = np.zeros(2)
    unknown = {"value": 0, "low": -math.inf, "high": math.inf}
    assert estimate(nothing, nothing, np.zeros(2, np.int64), np.ones(1)) == unknown
    assert estimate(nothing, nothing, np.zeros(2, np.int64), np.zeros(1)) is None


def answer(name: str, user: str | None, displayed: Mapping[str, float], *, candidates: int = 100, **more: Any) -> bytes:
    buckets = [{"a": 0, "b": 1}.get(label, 2) for label in displayed]
    options = more.pop("options", {"k": 2, "bias_removal": 0.0, "explore": {"tail": 1}})
    fields = {
        "kind": "answer", "time": NOON, "answer": name, "release": "plane-1", "labels": [*displayed],
        "buckets": buckets,
        "propensities": [*displayed.values()], "features": user and json.dumps({"user": user}),
        "options": json.dumps(options | ({"candidates": candidates} if candidates else {})),
    }  # fmt: skip
    return event_json(**{**fields, **more})


def choice(name: str, *labels: str, event: str = "click") -> bytes:
    return event_json(kind="choice", time=NOON + 1, answer=name, labels=labels, event=event)


WINDOW = (NOON - 1, NOON + 60)
CHANGED = "that the release does not answer so any more"
UNRECORDED = "whose candidates are not recorded, from before 0.1.0"
EVERY = {"head": 1, "torso": 1, "tail": 1}


def test_a_log_by_hand(tmp_path: Path) -> None:
    """At λ = 0, east is answered a, c/é and north b, c/é; at λ = 2 c/é gives way to a, which north is never shown."""
    folder = write_events(
        tmp_path,
        answer("1", "east", {"a": 1, "c/é": 0.75}),
        answer("2", "east", {"a": 1, "4": 0.25}),
        answer("3", "north", {"b": 1, "4": 0.5}),
        answer("other", "east", {"a": 1, "c/é": 0.75}, release="plane-0"),
        answer("plain", "east", {"a": 1, "c/é": 1}, options={"k": 2}),
        answer("unknown", None, {"a": 1, "c/é": 0.75}),
        answer("refused", "east", {"a": 1, "4": 1}, options={"k": 2, "popularity": 0.5, "explore": {"tail": 1}}),
        answer(
            "floored",
            "east",
            {"a": 1, "4": 1},
            options={"k": 2, "explore": {"tail": 1}, "at_least": [{"bucket": "head", "n": 1}]},
        ),
        answer("changed", "east", {"b": 1, "4": 0.25}),
        answer("gone", "east", {"gone": 0.5, "b": 1, "4": 1}, options={"k": 3, "bias_removal": 0, "explore": EVERY}),
        *[choice("1", "c/é"), choice("1", "c/é", "nobody", event="purchase"), choice("2", "4", "a"), choice("3", "b")],
        choice("other", "a"),
    )
    log = read_log(plane_retriever(), folder, WINDOW, [0.0, 2.0])
    assert sorted(log.left_out.values()) == [1, 1, 1, 1, 1, 2]
    assert (log.answers_U.tolist(), log.changed_G.tolist()) == ([2, 1], [0, 0, 1])
    assert log.exposures_GB.tolist() == [[2, 1, 3, 0], [2, 1, 3, 0], [3, 1, 2, 0]]
    local, same, other = estimate_settings(log)
    # Chosen: c/é, shown with 3/4; a; 4, with 1/4, which no answer holds; b.
    assert local["chosen_per_answer"]["value"] == pytest.approx((4 / 3 + 1 + 1) / 3)
    assert other["chosen_per_answer"]["value"] == pytest.approx((4 / 3 + 1 + 1) / 3)
    assert (local["covered"], other["covered"]) == (1, pytest.approx(5 / 6))
    assert local["recall"]["all"]["value"] == pytest.approx((4 / 3 + 1 + 1) / (4 / 3 + 1 + 4 + 1))
    assert (local["recall"]["tail"]["value"], local["recall"]["new"]) == (pytest.approx((4 / 3) / (4 / 3 + 4)), None)
    assert (same["says"], other["says"], other["difference"]["value"]) == ("the same", "cannot tell", 0)
    # No label that was shown is in one answer and not in the other.
    assert (other["difference"]["low"], other["difference"]["high"]) == (-2, 2)
    assert (local["chosen_per_answer"]["low"], local["chosen_per_answer"]["high"]) == (0, 2)
    many = replace(
        log, **{name: np.tile(getattr(log, name), 100) for name in ("propensities_S", "chosen_S", "buckets_S")},
        unit_S=(log.unit_S + 2 * np.arange(100)[:, None]).ravel(), held_GS=np.tile(log.held_GS, 100),
        answers_U=np.tile(log.answers_U, 100), exposures_GB=100 * log.exposures_GB, open_G=100 * log.open_G,
    )  # fmt: skip
    # The slot of north's that is not covered may bring one choice more; own λ and two others share the 5 %, twice.
    interval = estimate(
        many.held_GS[2] / many.propensities_S, many.chosen_S, many.unit_S, many.answers_U, alpha=0.05 / 6
    )
    assert interval is not None
    own_many, _, many_other = estimate_settings(many)
    assert many_other["chosen_per_answer"]["low"] == pytest.approx(interval["low"])
    assert many_other["chosen_per_answer"]["high"] == pytest.approx(interval["high"] + 1 / 3)
    assert own_many["chosen_per_answer"]["high"] == pytest.approx(interval["high"])
    bought = read_log(plane_retriever(), folder, WINDOW, [2.0], event="purchase", unit="user")
    assert (bought.chosen_S.tolist(), bought.answers_U.tolist()) == ([0, 1, 0, 0, 0, 0], [2, 1])
    report = {
        "release": "plane-1", "since": None, "until": "now", "cut": True, "answers": 3, "units": 2, "chosen": 4,
        "without_unit": 3, "left_out": log.left_out, "confidence": 0.95, "settings": [local, same, other],
    }  # fmt: skip
    lines = [*report_lines(report)]
    assert lines[1] == "3 answers that explored, of 2 units; 4 labels chosen"
    assert [line.split()[0] for line in lines[3:6]] == ["own", "0", "2"]
    assert lines[5].endswith("cannot tell")
    assert len([line for line in lines if line.startswith("left out: ")]) == 6
    assert "without the feature of --unit: 3 answers, by the experiment's or all features" in lines


def test_unexplored_buckets_are_not_covered(tmp_path: Path) -> None:
    """At λ = 0 north is answered b, at −1 c/é; a slot of tail takes the place of b, which the log never shows."""
    options = {"k": 1, "bias_removal": 0.0, "explore": {"tail": 1}}
    displayed = [{"4": 0.25} if visit % 4 == 0 else {"c/é": 0.75} for visit in range(400)]
    answers = [
        answer(f"{visit}", "north", labels, options=options, features=json.dumps({"user": "north", "age": visit}))
        for visit, labels in enumerate(displayed)
    ]
    folder = write_events(tmp_path, *answers, *[choice(f"{visit}", "c/é") for visit in range(400) if visit % 4])
    log = read_log(plane_retriever(), folder, WINDOW, [-1.0])
    local, other = estimate_settings(log)
    assert (len(log.answers_U), local["covered"], other["covered"]) == (400, 0, 1)
    assert (other["difference"]["value"], other["says"]) == (1, "cannot tell")
    assert other["difference"]["low"] < 0, "north may choose b as well"
    every = replace(log, lost_G=log.lost_G * 0, open_G=log.open_G * 0)
    assert estimate_settings(every)[1]["says"] == "better", "or there were too few answers"


@pytest.mark.parametrize(
    ("candidates", "left_out", "propensities"),
    [(100, {}, [1, 1, 1, 0.5]), (1, {CHANGED: 1}, [1, 1]), (0, {UNRECORDED: 1}, [1, 1])],
)
def test_slots_are_drawn_from_the_recorded_candidates(
    tmp_path: Path, candidates: int, left_out: dict[str, int], propensities: list[float]
) -> None:
    """East's tail is c/é, then 4, which a draw from one label never shows."""
    first = answer("1", "east", {"a": 1, "c/é": 1}, candidates=1)
    folder = write_events(tmp_path, first, answer("2", "east", {"a": 1, "4": 0.5}, candidates=candidates))
    log = read_log(plane_retriever(), folder, WINDOW, [0.0])
    assert (log.left_out, log.propensities_S.tolist()) == (left_out, propensities)


def test_a_unit_that_no_query_has_is_an_error(tmp_path: Path) -> None:
    folder = write_events(
        tmp_path,
        answer("1", "east", {"a": 1, "c/é": 0.75}, unit=7),
        answer("2", "east", {"a": 1, "c/é": 0.75}, unit=8),
        answer("3", "east", {"a": 1, "c/é": 0.75}, features=json.dumps({"user": "east", "age": 30})),
    )
    with pytest.raises(OffPolicyError, match=r"--unit: expected a feature of queries, such as .*received 'usr'"):
        read_log(plane_retriever(), folder, WINDOW, [0.5], unit="usr")
    log = read_log(plane_retriever(), folder, WINDOW, [0.5], unit="age")
    assert (log.without_unit, len(log.answers_U)) == (2, 3)
    log = read_log(plane_retriever(), folder, WINDOW, [0.5], unit="words")
    assert (log.without_unit, len(log.answers_U)) == (3, 3), "a feature that no answer happens to have"


def test_outdated_answers_are_skipped(releases: Path, tmp_path: Path) -> None:
    """From before events were deleted, or labels changed; a column that changed matters to filters alone."""
    retriever, events, state = load_release(open_releases(releases), "only"), tmp_path / "events", tmp_path / "state"
    options = {"k": 5, "explore": EVERY}
    lines = []
    for i in range(5):
        query = RetrieveQuery.model_validate({**options, "features": {"user_id": f"u{i}"}})
        labels = read_results(retriever.retrieve([query]))[0]["labels"]
        if i == 4:  # another label of its bucket in the place of one that is shown always
            always = next(label for label in labels if label["propensity"] == 1)
            all_of_it = query.model_copy(update={"explore": {}, "buckets": [always["bucket"]], "k": 20})
            displayed = [label["id"] for label in labels]
            always["id"] = next(label["id"] for label in read_results(retriever.retrieve([all_of_it]))[0]["labels"]
                                if label["id"] not in displayed)  # fmt: skip
        lines.append(event_json(
            kind="answer", time=NOON + 10 * i, answer=f"{i}", release="only",
            labels=[label["id"] for label in labels], propensities=[label["propensity"] for label in labels],
            buckets=[BUCKET_NAMES.index(label["bucket"]) for label in labels],
            features=json.dumps({"user_id": f"u{i}"}), options=json.dumps(options | {"candidates": 100}),
        ))  # fmt: skip
    write_events(events, *lines)

    def report() -> dict[str, Any]:
        return off_policy(releases, events, (NOON - 60, NOON + 60), [0.0], state=state)

    assert (report()["answers"], report()["cut"], report()["left_out"]) == (4, False, {CHANGED: 1})
    (events / ".deleted").touch()
    os.utime(events / ".deleted", (NOON + 5, NOON + 5))
    assert (report()["answers"], report()["cut"]) == (3, True)
    state.mkdir()
    store = LabelStore(state)
    store.append([Patch(id="item-1", at=datetime.fromtimestamp(NOON + 35, UTC), display={"title": "New"})])
    assert report()["answers"] == 3
    store.append([Hide(id="item-1", at=datetime.fromtimestamp(NOON + 14, UTC))])
    store.append([Restore(id="item-1", at=datetime.fromtimestamp(NOON + 15, UTC))])
    explored = report()
    store.close()
    assert (explored["answers"], explored["left_out"]) == (2, {"from before the newest label change": 1, CHANGED: 1})


def test_log_without_usable_answers_is_an_error(tmp_path: Path) -> None:
    folder = write_events(tmp_path, answer("plain", "east", {"a": 1}, options={"k": 2}))
    with pytest.raises(OffPolicyError, match="that explored, found none; left out: 1 answers that did not explore"):
        read_log(plane_retriever(), folder, WINDOW, [0.5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at", "7"], "--at: expected -1.0 <= λ <= 2.0, received [7.0]"),
        (["--out", "report.html"], "expected matplotlib, which draws the page"),
        ([], "expected a folder of events, found none"),
    ],
)
def test_impossible_estimates_are_refused(
    releases: Path, options: list[str], message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["off-policy", str(releases), *options])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("releases")
    return publish_bundle(make_bundle(labels=20), folder)


def test_a_missing_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffPolicyError, match="expected a published release, found none"):
        off_policy(tmp_path, tmp_path, WINDOW)


def test_the_simulation_draws_rarer_labels_than_a_service() -> None:
    probabilities = inclusion_probabilities(SCORES_UL[0, :8], 1, LOTTERY.temperature)
    assert 1 / probabilities.min() > 20, "or the simulation is easier than the service"
