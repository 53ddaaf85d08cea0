from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longtail.serving.monitoring import LiveFigures
from tests.serving.monitoring.shop import Clock, a_live


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_live(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., LiveFigures]]:
    """Opens the facade on one state directory; what is still open at the end is closed."""
    with ExitStack() as stack:

        def opened(**arguments: object) -> LiveFigures:
            live = a_live(tmp_path, clock, **arguments)  # type: ignore[arg-type]
            stack.callback(live.close)
            return live

        yield opened


@pytest.fixture
def live(open_live: Callable[..., LiveFigures]) -> LiveFigures:
    return open_live()
