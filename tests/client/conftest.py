from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.asking import Asker, Handler


@pytest.fixture(params=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def asker(flavour: str) -> Iterator[Callable[..., Asker]]:
    """Makes clients of either kind, of a handler in this process or of a server at `url`."""
    made: list[Asker] = []

    def make(handler: Handler | None = None, url: str = "http://longtail.test", **settings: Any) -> Asker:
        made.append(Asker(flavour, url, handler, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Clock:
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    async def sleep_awaited(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock in place of the real one, and ½ for every random number."""
    clock = Clock()
    monkeypatch.setattr("longtail.client.sync_client.sleep", clock.sleep)
    monkeypatch.setattr("longtail.client.async_client.sleep", clock.sleep_awaited)
    monkeypatch.setattr("longtail.client.transport.monotonic", lambda: clock.now)
    monkeypatch.setattr("longtail.client.transport.time", lambda: clock.now)
    monkeypatch.setattr("longtail.client.transport.random", lambda: 0.5)
    return clock
