"""For everybody: small screens, dark rooms, keyboards, screen readers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.serving.dashboard import canned
from tests.serving.dashboard.browser import Page
from tests.serving.dashboard.service import Service

Opened = Callable[..., Page]
OPEN_TABLES = "document.querySelectorAll('details').forEach((details) => { details.open = true })"
OUTSIDE = """[...document.querySelectorAll('.chart text')]
  .filter((text) => text.getBoundingClientRect().right > innerWidth
    || text.getBoundingClientRect().left < text.closest('.chart').getBoundingClientRect().left)
  .map((text) => text.textContent)"""
OVERLAPS = """[...document.querySelectorAll('.chart svg')].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  const met = ([, a], i) => boxes.slice(i + 1).filter(([, b]) => meet(a, b));
  return boxes.flatMap((box, i) => met(box, i).map(([other]) => `${box[0]} / ${other}`));
})"""


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
@pytest.mark.parametrize("name", ["5m", "24h"])
def test_nothing_is_cut_and_no_labels_overlap(opened: Opened, width: int, name: str) -> None:
    page = opened(width=width)
    page.run(f"document.querySelector('[value=\"{name}\"]').click()")
    page.run(OPEN_TABLES)
    assert page.until("document.documentElement.scrollWidth") <= width
    assert page.run(OUTSIDE) == []
    assert page.run(OVERLAPS) == []


@pytest.mark.parametrize(
    ("scheme", "page_", "head"), [("light", "255, 255, 255", "36, 71, 168"), ("dark", "20, 23, 28", "143, 168, 255")]
)
def test_light_and_dark(opened: Opened, scheme: str, page_: str, head: str) -> None:
    page = opened(media={"prefers-color-scheme": scheme})
    assert page.run("getComputedStyle(document.body).backgroundColor") == f"rgb({page_})"
    assert page.run("getComputedStyle(document.querySelector('.line.head')).stroke") == f"rgb({head})"
    assert page.run("getComputedStyle(document.querySelector('.name.head')).color") == f"rgb({head})"


@pytest.mark.parametrize(("wish", "behaviour"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_motion_only_where_it_is_welcome(opened: Opened, wish: str, behaviour: str) -> None:
    page = opened(media={"prefers-reduced-motion": wish})
    assert page.run("getComputedStyle(document.documentElement).scrollBehavior") == behaviour
    assert page.run("document.getAnimations().length") == 0


def test_every_control_is_reached_by_tab_named_and_visibly_focused(opened: Opened, service: Service) -> None:
    service.key = "k"
    page = opened("refused")
    page.run("document.getElementById('key-field').value = 'k'")
    page.press("Enter")
    page.until("document.querySelectorAll('#results li').length === 10")
    page.run("document.querySelector('.skip').focus()")
    reached, unseen = {}, []
    for _ in range(60):
        page.press("Tab")
        found = page.run(
            "((e) => e === document.body ? null : { id: e.id || e.value || e.textContent, tag: e.tagName, "
            "ring: [e, e.closest('.choice')].some((x) => x && getComputedStyle(x).outlineStyle !== 'none') })"
            "(document.activeElement)"
        )
        if found is None:
            break
        node = page.send("Runtime.evaluate", expression="document.activeElement")["result"]["objectId"]
        (tree, *_) = page.send("Accessibility.getPartialAXTree", objectId=node, fetchRelatives=False)["nodes"]
        reached[found["id"]] = tree["name"]["value"]
        if not found["ring"]:
            unseen.append(found["id"])
    assert unseen == []
    assert all(name.strip() for name in reached.values())
    named = {id_: reached[id_] for id_ in ("1h", "forget", "features", "lambda", "mu", "k", "default", "Ask")}
    assert named == {
        "1h": "1 hour",
        "forget": "Forget the key",
        "features": "Features JSON",
        "lambda": "Bias removal λ",
        "mu": "Prior μ above 0: frequent labels",
        "k": "Labels k",
        "default": "Defaults",
        "Ask": "Ask",
    }
    assert sum(name.endswith("as a table") for name in reached.values()) == 8


def test_the_window_is_chosen_by_arrow_keys(opened: Opened) -> None:
    page = opened()
    page.run("document.querySelector('[value=\"1h\"]').focus()")
    page.press("ArrowRight")
    assert page.text("#share-title") == "Share of the answers, the last 24 hours"


def test_landmarks_headings_and_live_regions(opened: Opened) -> None:
    page = opened()
    headings = page.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => [h.tagName, h.textContent.trim()])")
    assert headings[0] == ["H1", "Longtail"]
    assert [text for tag, text in headings if tag == "H2"] == [
        "Verdict: Act",
        "What head, torso, tail and new labels get",
        "Recall by bucket",
        "The dial",
        "Latency and load",
        "Staged release",
        "Ask it",
        "Releases",
    ]
    assert page.run("['header', 'nav', 'main'].map((tag) => document.querySelectorAll(tag).length)") == [1, 1, 1]
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.getElementById('state').getAttribute('role')") == "status"
    assert page.run("document.getElementById('updated').closest('[aria-live], [role=status], [role=alert]')") is None


def test_every_chart_has_a_name_and_a_table(opened: Opened) -> None:
    page = opened()
    names = page.run("[...document.querySelectorAll('.chart svg')].map((s) => [s.getAttribute('role'), s.ariaLabel])")
    assert len(names) == 12
    assert all(role == "img" and name for role, name in names)
    page.run(OPEN_TABLES)
    rows = "[...document.querySelectorAll('details table')].map((table) => table.tBodies[0].rows.length)"
    assert page.until(rows, lambda found: len(found) == 8) == [73, 73, 73, 2, 7, 7, 73, 73]


def test_many_swaps_leave_the_labels_readable(opened: Opened, service: Service) -> None:
    data = canned.monitoring()
    names = [f"2026030{i % 10}T{i:06d}Z-movielens-100k" for i in range(60)]
    data["releases"] = [
        {"name": name, "from": data["series"]["at"][i * 20], "until": None} for i, name in enumerate(names)
    ]
    service.monitoring = lambda: (200, data)
    page = opened()
    page.run("document.querySelector('[value=\"24h\"]').click()")
    assert page.run("document.querySelector('#share-rows .chart').querySelectorAll('line.swap').length") == 59
    assert page.run(OVERLAPS) == []


def test_labels_that_crowd_at_the_bottom_stay_in_the_chart(opened: Opened, service: Service) -> None:
    release = canned.release()
    for point in release["bias_removal"]["curve"]:
        for bucket in canned.BUCKETS:
            point["metrics"][f"recall@20/{bucket}"] = {"value": 0.0005, "low": None, "high": None}
    service.release = lambda: (200, release)
    page = opened()
    assert page.run(OVERLAPS) == []
    plot = "document.querySelector('#dial-charts svg')"
    lowest = f"Math.max(...[...{plot}.querySelectorAll('text.end')].map((t) => t.getBoundingClientRect().bottom))"
    assert page.run(f"{lowest} <= {plot}.getBoundingClientRect().bottom")
