from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longtail.serving.monitoring import LiveFigures
from longtail.state import Place
from tests.postgres import database_server as database_server
from tests.serving.monitoring.shop import Clock, a_live


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(tmp_path: Path) -> Place:
    """Where answers and feedback are kept."""
    return tmp_path


@pytest.fixture
def open_live(tmp_path: Path, clock: Clock, kept: Place) -> Iterator[Callable[..., LiveFigures]]:
    """Opens the facade on one state directory; what is still open at the end is closed."""
    with ExitStack() as stack:

        def opened(**arguments: object) -> LiveFigures:
            live = a_live(tmp_path, clock, **({"kept": kept} | arguments))  # type: ignore[arg-type]
            stack.callback(live.close)
            return live

        yield opened


@pytest.fixture
def live(open_live: Callable[..., LiveFigures]) -> LiveFigures:
    return open_live()
