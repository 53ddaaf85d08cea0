from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.serving.dashboard.browser import Browser, Page, executable
from tests.serving.dashboard.service import Service


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = executable()
    if program is None:
        pytest.skip("expected chromium, chromium-browser or google-chrome on PATH, found none")
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.fixture
def opened(browser: Browser, service: Service) -> Iterator[Callable[..., Page]]:
    """Opens the dashboard and waits until it says something; closes its tabs."""
    pages: list[Page] = []

    def open_(state: str = "ready", **options: object) -> Page:
        pages.append(Page(browser, service.url, **options))
        pages[-1].until(f"document.getElementById('state').className === '{state}'")
        if state == "ready":
            pages[-1].until("document.getElementById('answer-summary').textContent")
        return pages[-1]

    yield open_
    for page in pages:
        page.close()
