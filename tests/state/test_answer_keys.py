from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longtail.state import AnswerKeys, Place, StoreCorruptError, StoreError, read_place
from longtail.state.answer_keys import KEYS_FILE

DAY = 86_400.0


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["directory", pytest.param("postgresql", marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return tmp_path if request.param == "directory" else read_place(request.getfixturevalue("database_server").url())


@pytest.fixture
def opened(place: Place, clock: Clock) -> Callable[[], AnswerKeys]:
    return lambda: AnswerKeys(place, 2 * DAY, clock)


def test_all_who_share_the_state_sign_with_one_key(opened: Callable[[], AnswerKeys]) -> None:
    several = [opened() for _ in range(6)]
    assert all(keys.due and keys.signing is None for keys in several)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(AnswerKeys.load, several))
    assert len({keys.signing for keys in several}) == 1
    assert not several[0].due


def test_a_day_later_another_key_signs_and_the_one_before_still_reads(
    opened: Callable[[], AnswerKeys], clock: Clock
) -> None:
    first, second = opened(), opened()
    first.load()
    second.load()
    number, secret = first.signing or (0, b"")
    clock.now += DAY
    assert first.due
    first.load()
    assert first.signing != (number, secret)
    assert first.secrets[number] == secret
    # The other replica learns of it by itself.
    second.refresh()
    assert second.signing == first.signing
    # An answer of a key's last second may be two days old.
    clock.now += 2 * DAY - 1
    first.load()
    assert first.secrets[number] == secret
    clock.now += 2 * DAY
    first.load()
    assert number not in first.secrets


def test_keys_are_read_again_once_a_second(opened: Callable[[], AnswerKeys], clock: Clock) -> None:
    keys = opened()
    keys.load()
    clock.now += 0.5
    keys.load = lambda: pytest.fail("read again")  # type: ignore[method-assign]
    keys.refresh()


def test_nobody_else_may_read_the_file(tmp_path: Path, clock: Clock) -> None:
    AnswerKeys(tmp_path, DAY, clock).load()
    assert (tmp_path / KEYS_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", "expected JSON"),
        (b'{"version": 9, "keys": []}', "expected version 1, found 9"),
        (b'{"version": 1, "keys": [[1, 2]]}', "found other JSON"),
        (b"[]", "found other JSON"),
    ],
)
def test_a_damaged_file_is_refused_and_stays(tmp_path: Path, clock: Clock, content: bytes, found: str) -> None:
    path = tmp_path / KEYS_FILE
    path.write_bytes(content)
    with pytest.raises(StoreCorruptError, match=found):
        AnswerKeys(tmp_path, DAY, clock).load()
    assert path.read_bytes() == content


def test_a_state_that_cannot_be_written(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(StoreError, match="expected keys of answer ids, found"):
        AnswerKeys(tmp_path / "missing", DAY, clock).load()
