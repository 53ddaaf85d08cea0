"""The PyTorch environment: `inside/` runs there; the rest calls it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.conftest import other_python

if find_spec("torch") is None:
    collect_ignore = ["inside"]


@pytest.fixture(scope="session")
def torch_python() -> str:
    return other_python("torch", "LONGTAIL_TORCH_PYTHON", "make test-nightly")
