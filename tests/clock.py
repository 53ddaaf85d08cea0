"""A clock that tests set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Stands still unless it is moved."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds
