from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from fastapi import FastAPI

from longtail.serving import create_app
from tests.serving.client import client_of
from tests.serving.plane import plane_retriever, plane_settings


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return create_app(plane_settings(tmp_path), retriever=plane_retriever())


@pytest.fixture
def client(app: FastAPI) -> Iterator[httpx.Client]:
    with client_of(app) as client:
        yield client
