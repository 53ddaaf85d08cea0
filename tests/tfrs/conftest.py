"""The TFRS environment: `legacy/` runs inside it, under legacy Keras; the rest calls it."""

from __future__ import annotations

import os

import pytest

from tests.conftest import other_python

if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    collect_ignore = ["legacy"]


@pytest.fixture(scope="session")
def tfrs_python() -> str:
    return other_python("tensorflow-recommenders", "LONGTAIL_TFRS_PYTHON", "make test-nightly")
