from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longtail.state import AnswerKeys, StateLocation, StoreError
from longtail.state.answer_keys import KEYS_FILE
from tests.clock import Clock

DAY = 86_400.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(state_location: StateLocation, clock: Clock) -> Callable[[], AnswerKeys]:
    return lambda: AnswerKeys(state_location, 2 * DAY, clock)


def test_services_of_one_state_share_a_key(opened: Callable[[], AnswerKeys]) -> None:
    several = [opened() for _ in range(6)]
    assert all(keys.signing is None for keys in several)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(AnswerKeys.load, several))
    assert len({keys.signing for keys in several}) == 1


def test_key_rotates_daily_and_older_keys_still_read(opened: Callable[[], AnswerKeys], clock: Clock) -> None:
    first, second = opened(), opened()
    first.load()
    second.load()
    number, secret = first.signing or (0, b"")
    clock.now += DAY
    first.tend()
    assert first.signing != (number, secret)
    assert first.secrets[number] == secret
    # The other replica learns of it by itself.
    second._loaded_at = 0
    second.refresh()
    assert second.signing == first.signing
    # An answer of a key's last second may be two days old.
    clock.now += 2 * DAY - 1
    first.load()
    assert first.secrets[number] == secret
    clock.now += 4 * DAY
    first.load()
    clock.now += DAY
    first.load()
    assert number not in first.secrets


def test_refresh_rate_is_limited(opened: Callable[[], AnswerKeys], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.state.answer_keys._REFRESH_SECONDS", 60)
    keys = opened()
    keys.load()
    keys.load = lambda: pytest.fail("read again")  # type: ignore[method-assign]
    keys.refresh()


def test_file_is_private(tmp_path: Path, clock: Clock) -> None:
    AnswerKeys(tmp_path, DAY, clock).load()
    assert (tmp_path / KEYS_FILE).stat().st_mode & 0o777 == 0o600


def test_failed_rotation_keeps_the_key(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    AnswerKeys(tmp_path, DAY, clock).load()
    clock.now += 2 * DAY
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("longtail.state.answer_keys.replace_file", lambda *_, **__: (_ for _ in ()).throw(full))
    keys = AnswerKeys(tmp_path, DAY, clock)
    keys.tend()
    before = keys.signing
    assert before is not None
    assert "no other key of answer ids, the one before goes on" in caplog.text
    monkeypatch.undo()
    keys.tend()  # not yet again
    assert keys.signing == before
    monkeypatch.setattr("longtail.state.answer_keys._PATIENCE_SECONDS", 0)
    keys._tend_at = 0
    keys.tend()
    assert keys.signing != before
    assert before[0] in keys.secrets


def test_key_is_kept_while_answer_ids_are_accepted(tmp_path: Path, clock: Clock) -> None:
    keys = AnswerKeys(tmp_path, 2 * DAY, clock)
    keys.load()
    number, secret = keys.signing or (0, b"")
    clock.now += 9 * DAY  # no other could be made
    keys.load()
    assert keys.secrets[number] == secret
    clock.now += 2 * DAY
    keys.load()
    assert keys.secrets[number] == secret


@pytest.mark.parametrize(
    ("content", "result"),
    [
        (b"{", "expected JSON"),
        (b'{"version": 9, "keys": []}', "expected version 1, found 9"),
        (b'{"version": 1, "keys": [[1, 2]]}', "found other JSON"),
        (b"[]", "found other JSON"),
    ],
)
def test_a_damaged_file_is_refused_and_stays(tmp_path: Path, clock: Clock, content: bytes, result: str) -> None:
    path = tmp_path / KEYS_FILE
    path.write_bytes(content)
    with pytest.raises(StoreError, match=result):
        AnswerKeys(tmp_path, DAY, clock).load()
    assert path.read_bytes() == content


def test_unwritable_state_is_an_error(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(StoreError, match="expected keys of answer ids, found"):
        AnswerKeys(tmp_path / "missing", DAY, clock).load()
