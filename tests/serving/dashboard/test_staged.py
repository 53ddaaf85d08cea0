"""The section of a staged release: hidden without one, its figures beside the served one's, on a phone, in the dark."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtail.index import StagedCounts
from tests.serving.dashboard import canned
from tests.serving.dashboard.browser import Page
from tests.serving.dashboard.service import Service

pytestmark = pytest.mark.process
NEXT = "20260303T080000Z-movielens-100k"


def figures(**more: Any) -> dict[str, Any]:
    """GET /v1/release/staged: 1,200 queries of which three were refused, 400 choices, most of the head."""
    counts = {
        "queries": 1200, "refused": 3, "reason": "queries.0.features.age: expected a finite number", "skipped": 41,
        "overlap": 861.84, "overlap_squares": 700.0, "shift": -149.625, "seconds": 1.8,
        "exposures": [18_000, 4_800, 1_000, 140], "exposures_of_current": [20_500, 3_200, 200, 40],
        "positives": [200, 120, 60, 20], "hits": [10, 20, 10, 2], "hits_of_current": [16, 2, 1, 0],
        "hits_of_both": [50, 20, 2, 0],
    }  # fmt: skip
    return {**StagedCounts(staged=NEXT, current=canned.NEW, **counts | more).figures(), "request_id": "r-staged"}  # type: ignore[arg-type]


@pytest.fixture
def with_staged(service: Service) -> Callable[..., None]:
    def answer(**more: Any) -> None:
        found, data = figures(**more), {**canned.monitoring(), "staged": NEXT}
        service.staged = lambda: (200, copy.deepcopy(found))
        service.monitoring = lambda: (200, data)

    return answer


def test_it_is_hidden_and_not_asked_for_where_nothing_is_staged(opened: Callable[..., Page], service: Service) -> None:
    page = opened()
    assert page.run("document.getElementById('staged').hidden")
    assert service.asked("/v1/release/staged") == []


def test_it_stands_beside_what_is_served(opened: Callable[..., Page], with_staged: Callable[..., None]) -> None:
    with_staged()
    page = opened()
    page.until("!document.getElementById('staged').hidden")
    assert page.text("#staged-lead") == (
        f"{NEXT} is asked beside {canned.NEW}, and nobody sees its answers. "
        "Its shadow recall is higher: +0.058 (+0.020 to +0.095)."
    )
    shown = page.text("#staged-figures")
    for figure in ("1,200", "41 more were left out", "3 queries.0.features.age", "72.0 %", "−0.13", "1.50 ms"):
        assert figure in shown, (figure, shown)
    rows = page.run("[...document.querySelectorAll('#staged tbody tr')].map((row) => row.innerText)")
    rows = [" ".join(row.split()) for row in rows]
    assert rows[0] == "Head 85.6 % 75.2 % −10.4 pt"
    assert rows[2] == "Tail 0.8 % 4.2 % +3.3 pt"
    assert rows[4] == "All 0.228 0.285 +0.058 +0.020 to +0.095 400"
    assert rows[5] == "Head 0.330 0.300 −0.030 −0.080 to +0.020 200"
    assert page.problems() == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"queries": 0, "refused": 0, "positives": [0] * 4}, "No query was mirrored yet."),
        ({"positives": [0] * 4}, "Its shadow recall wants organic interactions."),
        ({"hits": [2, 0, 0, 0]}, "Its shadow recall is lower: −0.043"),
        ({"hits": [16, 2, 1, 1]}, "Its shadow recall may be the same: +0.003"),
    ],
)
def test_what_its_recall_says(
    opened: Callable[..., Page], with_staged: Callable[..., None], more: dict[str, Any], said: str
) -> None:
    with_staged(**more)
    page = opened()
    page.until("!document.getElementById('staged').hidden")
    assert said in page.text("#staged-lead")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_on_a_phone(
    opened: Callable[..., Page], with_staged: Callable[..., None], tmp_path: Path, scheme: str
) -> None:
    with_staged()
    page = opened(width=360, height=740, media={"prefers-color-scheme": scheme})
    page.until("!document.getElementById('staged').hidden")
    assert page.run("document.documentElement.scrollWidth") == 360
    assert page.run("[...document.querySelectorAll('#staged table')].every((table) => table.clientWidth <= 332)")
    cells = "[...document.querySelectorAll('#staged :is(th, td)')].filter((cell) => !cell.offsetWidth).length"
    assert page.run(cells) == 0, "every column is shown"
    page.run("document.getElementById('staged').scrollIntoView()")
    page.screenshot(tmp_path / "staged.png", whole=False)
