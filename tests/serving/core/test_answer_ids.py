from __future__ import annotations

import random
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longtail.serving.core.answer_ids import AnswerIdError, AnswerRecord, read_answer_id, sign_answer
from longtail.serving.core.feedback import LONGEST_ANSWER_ID
from longtail.serving.monitoring import ArmAnswer

KEY = 7, b"k" * 32
NOW = 1_800_000_000.25


def sign(labels: list[str], **options: object) -> str:
    return sign_answer(KEY, NOW, b"demo", (0.3, -0.25, 0.75), labels, **options)[0]  # type: ignore[arg-type]


def read(text: str, oldest: float = NOW - 60) -> AnswerRecord:
    return read_answer_id(text, {KEY[0]: KEY[1]}, oldest)


def test_twenty_labels_take_about_a_hundred_url_safe_characters() -> None:
    text = sign([str(id_) for id_ in range(20)])
    assert len(text) <= 110
    assert text == urlsafe_b64encode(urlsafe_b64decode(text + "=" * (-len(text) % 4))).decode().rstrip("=")


@given(
    labels=st.lists(st.text(), max_size=120, unique=True),
    release=st.text(max_size=60),
    priors=st.lists(st.floats(-9, 9, width=32), max_size=4),
    restricted=st.booleans(),
    in_arm=st.booleans(),
    counted=st.booleans(),
    drawn=st.sets(st.integers(0, 119)),
)
def test_signed_ids_are_read_back(
    labels: list[str],
    release: str,
    priors: list[float],
    restricted: bool,
    in_arm: bool,
    counted: bool,
    drawn: set[int],
) -> None:
    arm = ArmAnswer("run-1", "bold", 2**64 - 1, counted) if in_arm else None
    propensities = np.array([0.37 ** (1 + i % 9) if i in drawn else 1 for i in range(len(labels))], "f4")
    name = release.encode("utf-8", "replace")
    text, answer = sign_answer(
        KEY, NOW, name, (0.3, -0.25, 0.75, *priors), labels,
        arm=arm, restricted=restricted, propensities_K=propensities,
    )  # fmt: skip
    record = read(text)
    assert (record.release, record.at) == (name.decode(), int(NOW))
    assert (record.bias_removal, record.popularity, record.cooccurrence) == (pytest.approx(0.3), -0.25, 0.75)
    assert list(record.priors) == priors
    assert (record.restricted, record.name) == (restricted, answer)
    assert record.arm == (arm if in_arm and counted else None)
    for i, position in enumerate(record.positions(labels[:100])):
        assert position is not None
        assert position <= i  # of two labels of one code it is the first
    stored = {i: propensity for i, propensity in enumerate(propensities.tolist()) if propensity < 1}
    later = [i for i in stored if i >= 100]
    stored = {i: stored[i] for i in stored if i not in later[100:]}
    assert record.propensities == pytest.approx(stored, rel=1e-3)


def test_answer_ids_hold_the_first_hundred_labels() -> None:
    record = read(sign([str(id_) for id_ in range(300)]))
    assert len(record.codes) == 100
    assert record.positions(["99", "5"]) == [99, 5]


def test_drawn_labels_after_the_hundredth_keep_position_and_propensity() -> None:
    random.seed(0)  # of 200 labels, two have the same code once in three
    labels, propensities = [str(id_) for id_ in range(1000)], np.ones(1000, np.float32)
    propensities[[7, 150, 999]] = 0.5, 0.25, 0.01
    text, _ = sign_answer(KEY, NOW, b"r", (1, 0, 0), labels, propensities_K=propensities)
    record = read(text)

    assert record.positions(["7", "150", "151", "999"]) == [7, 150, None, 999]
    assert record.propensities == pytest.approx({7: 0.5, 150: 0.25, 999: 0.01}, rel=1e-3)
    every, _ = sign_answer(KEY, NOW, b"r" * 255, (1, 0, 0), labels, propensities_K=np.full(1000, 0.5, np.float32))
    assert len(every) <= LONGEST_ANSWER_ID
    assert read(every).positions(["0", "199", "200"]) == [0, 199, None]


@pytest.mark.parametrize("form", ["other-{}", "{}", "item{:09d}"])
def test_a_label_not_answered_passes_for_one_of_k_with_k_in_65536(form: str) -> None:
    k, answers, others = 20, 1000, [form.format(id_) for id_ in range(100, 300)]
    hits = 0
    for _ in range(answers):
        record = read(sign([str(id_) for id_ in range(k)]))
        hits += sum(position is not None for position in record.positions(others))
    expected = answers * len(others) * k / 65_536
    assert abs(hits - expected) < 4 * sqrt(expected)


@pytest.mark.parametrize("i", range(0, 54, 3))
def test_a_changed_character_is_refused(i: int) -> None:
    text = sign(["a", "b"])
    changed = text[:i] + ("A" if text[i] != "A" else "B") + text[i + 1 :]
    with pytest.raises(AnswerIdError) as refused:
        read(changed)
    assert refused.value.reason in ("forged", "malformed")


@given(text=st.text(max_size=200) | st.binary(max_size=150).map(lambda raw: urlsafe_b64encode(raw).decode()))
def test_no_other_text_is_an_answer_id(text: str) -> None:
    with pytest.raises(AnswerIdError):
        read(text)


def test_cut_forged_and_expired_ids_have_different_errors() -> None:
    text = sign(["a"])
    for cut in (text[:-1], text[:20], text + "=", text + "\n", ""):
        with pytest.raises(AnswerIdError, match="cut") as refused:
            read(cut)
        assert refused.value.reason in ("malformed", "forged")
    with pytest.raises(AnswerIdError, match="another service gave") as refused:
        read_answer_id(text, {KEY[0]: secrets.token_bytes(32)}, 0)
    assert refused.value.reason == "forged"
    with pytest.raises(AnswerIdError, match="too old") as refused:
        read(text, oldest=NOW + 1)
    assert refused.value.reason == "expired"
    with pytest.raises(AnswerIdError, match="retired"):
        read_answer_id(text, {}, NOW + 1)
