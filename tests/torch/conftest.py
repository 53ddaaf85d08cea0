"""The PyTorch environment: `inside/` runs there; the rest calls it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    collect_ignore = ["inside"]


@pytest.fixture(scope="session")
def torch_python() -> str:
    path = os.environ.get("LONGTAIL_TORCH_PYTHON")
    if path is None:
        pytest.fail("expected LONGTAIL_TORCH_PYTHON, a Python with torch; `make test-nightly` sets it")
    return path
