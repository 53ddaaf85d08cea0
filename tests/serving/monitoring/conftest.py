from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longtail.serving.monitoring import Monitoring
from tests.clock import Clock
from tests.serving.monitoring import shop


@pytest.fixture
def clock() -> Clock:
    return Clock(shop.NOON)


@pytest.fixture
def open_monitoring(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Monitoring]]:
    """Opens monitoring on one state directory; what is still open at the end is closed."""
    with ExitStack() as stack:

        def opened(**arguments: object) -> Monitoring:
            monitoring = shop.open_monitoring(tmp_path, clock, **arguments)  # type: ignore[arg-type]
            stack.callback(monitoring.close)
            return monitoring

        yield opened


@pytest.fixture
def monitoring(open_monitoring: Callable[..., Monitoring]) -> Monitoring:
    return open_monitoring(routes=["/v1/retrieve", "/v1/similar", "/v1/labels", "/livez"])
