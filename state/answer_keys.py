"""Create, share and rotate the keys that sign answer ids."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from sqlalchemy import delete, insert, select

from longtail.bundle.store import replace_file
from longtail.state.engines import autocommit, store_errors, writing
from longtail.state.errors import StoreError
from longtail.state.label_server import LabelServer
from longtail.state.location import Postgres, StateLocation
from longtail.state.tables import answer_keys

logger = logging.getLogger(__name__)

KEYS_FILE = "answer_keys.json"
"""File in the state directory that only its owner may read."""
_VERSION = 1
_SECRET_BYTES = 32
_ROTATION_SECONDS = 86_400
_REFRESH_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
_NUMBERS = 256


class _Key(NamedTuple):
    number: int
    at: int
    secret: bytes


class AnswerKeys:
    """The keys of one service; a new one signs after each day. Thread-safe.

    Args:
        lifetime: time during which an answer id is accepted, in seconds; keys are kept for as long after their last
            day.

    Attributes:
        secrets: secrets of all kept keys, by number modulo 256.
        signing: number and secret of the signing key; None before the first `load`.
    """

    def __init__(self, location: StateLocation, lifetime: float, clock: Callable[[], float]) -> None:
        self._location = location
        self._lifetime = lifetime
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: _Key | None = None
        self._loaded_at = self._tend_at = -math.inf
        self.secrets: dict[int, bytes] = {}
        self.signing: tuple[int, bytes] | None = None

    def tend(self) -> None:
        """Create another key when it is due; errors are logged, and retried after ten seconds."""
        newest = self._newest
        if (newest is None or self._clock() - newest.at >= _ROTATION_SECONDS) and monotonic() >= self._tend_at:
            self._tend_at = monotonic() + _PATIENCE_SECONDS
            try:
                self.load()
            except StoreError as error:
                logger.warning("no other key of answer ids, the one before goes on: %s", error)

    def refresh(self) -> None:
        """Read the keys again, at most ten times a second; raises StoreError."""
        if monotonic() - self._loaded_at >= _REFRESH_SECONDS:
            self.load()

    def load(self) -> None:
        """Read the keys, and add one when it is due; raises StoreError if there is no key then."""
        now = int(self._clock())
        with self._lock, store_errors(f"{self._location}: expected keys of answer ids, found"):
            self._loaded_at = monotonic()
            if isinstance(self._location, Postgres):
                self._read_server(self._location, now)
            else:
                self._read_file(self._location / KEYS_FILE, now)

    def _use(self, keys: list[_Key]) -> None:
        if keys:
            self.secrets = {key.number % _NUMBERS: key.secret for key in keys}
            self._newest = keys[-1]
            self.signing = self._newest.number % _NUMBERS, self._newest.secret

    def _read_file(self, path: Path, now: int) -> None:
        with path.with_name(f".{KEYS_FILE}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            stored = _read(path)
            self._use(stored)
            keys = self._keys_to_keep(stored, now)
            if keys != stored:
                rows = [[key.number, key.at, key.secret.hex()] for key in keys]
                replace_file(path, json.dumps({"version": _VERSION, "keys": rows}).encode(), mode=0o600)
            self._use(keys)

    def _read_server(self, location: Postgres, now: int) -> None:
        server = LabelServer(location)
        try:
            engine = server.engine(make=True)
            assert engine is not None
            order = select(answer_keys.c.number, answer_keys.c.at, answer_keys.c.secret).order_by(answer_keys.c.number)
            with autocommit(engine) as connection:
                stored = [_Key(*row) for row in connection.execute(order)]
            self._use(stored)
            if self._keys_to_keep(stored, now) == stored:
                return
            with writing(engine, "answer keys") as connection:
                stored = [_Key(*row) for row in connection.execute(order)]
                keys = self._keys_to_keep(stored, now)
                connection.execute(delete(answer_keys))
                connection.execute(insert(answer_keys), [key._asdict() for key in keys])
            self._use(keys)
        finally:
            server.close()

    def _keys_to_keep(self, stored: list[_Key], now: int) -> list[_Key]:
        """Return the keys to keep, with a new one when due."""
        # A key signs until the next one exists, and its answer ids are accepted for `lifetime` after that.
        ends = [*(later.at for later in stored[1:]), now]
        keys = [key for key, end in zip(stored, ends, strict=False) if now - end < self._lifetime + _ROTATION_SECONDS]
        newest = stored[-1] if stored else None
        if newest is None or now - newest.at >= _ROTATION_SECONDS:
            number = secrets.randbelow(_NUMBERS) if newest is None else newest.number + 1
            keys.append(_Key(number, now, secrets.token_bytes(_SECRET_BYTES)))
        return keys


def _read(path: Path) -> list[_Key]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise StoreError(f"{path}: expected JSON, found {error}; without it, another is made") from None
    try:
        if content["version"] != _VERSION:
            raise StoreError(f"{path}: expected version {_VERSION}, found {content['version']}")
        return [_Key(int(number), int(at), bytes.fromhex(secret)) for number, at, secret in content["keys"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: expected keys of answer ids, found other JSON: {error!r}") from None
