from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings


@pytest.fixture
def app(tmp_path: Path) -> Starlette:
    return create_app(plane_settings(tmp_path), retriever=plane_retriever())


@pytest.fixture
def client(app: Starlette) -> Iterator[httpx.Client]:
    with open_client(app) as client:
        yield client
