"""What SIGHUP asks for: settings and keys as they are now, or, where they are wrong, those of before."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from types import FrameType

from pydantic import ValidationError

from longtail.serving.settings import LIVE, Settings, explain

logger = logging.getLogger(__name__)

_held: list[bool] = []


class Terminal:
    """The terminal that a process was started at, if at one; whoever closes it sends SIGHUP as well."""

    def __init__(self) -> None:
        self._was_one = os.isatty(0)

    @property
    def closed(self) -> bool:
        """Whether it is gone."""
        return self._was_one and not os.isatty(0)


def hold_hangups() -> None:
    """Remember a SIGHUP that comes before the service can do what it asks for; it would end the process."""
    signal.signal(signal.SIGHUP, lambda *_: _held.append(True))


def take_hangups(handle: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGHUP from now on, and one that came before."""
    signal.signal(signal.SIGHUP, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if _held:
        _held.clear()
        signal.raise_signal(signal.SIGHUP)


def read_again(settings: Settings) -> Settings | None:
    """Settings with the live ones as the files say now; says in the log what changes, and what waits for a restart.

    Returns:
        None if they cannot be used, which the log says as well: what was read before holds.
    """
    try:
        found = settings.again()
        again = settings.taking(found)
        asking, changing = again.all_api_keys(), again.all_admin_keys()
        if (settings.api_keys or settings.api_keys_file or settings.admin_keys or settings.admin_keys_file) and not (
            asking or changing
        ):
            raise ValueError("expected at least one key, as before, found none; without keys everybody may do all")
    except ValidationError as error:
        name, wrong = explain(error)
        refuse(wrong if name is None else f"{name}: {wrong}")
        return None
    except (ValueError, OSError) as error:
        refuse(error)
        return None
    changed = [name for name in Settings.model_fields if getattr(found, name) != getattr(settings, name)]
    live = [name for name in changed if name in LIVE]
    logger.info(
        "settings and keys were read again: %s; %d keys may ask, %d may change things",
        ", ".join(live) or "no other settings", len(asking), len(changing),
    )  # fmt: skip
    if waiting := [name for name in changed if name not in LIVE]:
        logger.warning("these settings have changed and wait for a restart: %s", ", ".join(waiting))
    return again


def refuse(wrong: object) -> None:
    """Say in the log that what was read again cannot be used."""
    logger.error("settings and keys were read again and refused, those of before hold: %s", wrong)
