"""The TFRS environment: `legacy/` runs inside it, under legacy Keras; the rest calls it."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    collect_ignore = ["legacy"]


@pytest.fixture(scope="session")
def tfrs_python() -> str:
    path = os.environ.get("LONGTAIL_TFRS_PYTHON")
    if path is None:
        pytest.fail("expected LONGTAIL_TFRS_PYTHON, a Python with tensorflow-recommenders; `make test` sets it")
    return path
