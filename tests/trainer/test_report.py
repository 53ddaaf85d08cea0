import base64
import re

import pytest

from longtail.bundle import BiasRemoval, CurvePoint, Interval
from longtail.trainer.evaluation.report import evaluation_markdown, html_report
from longtail.trainer.history import TrainingHistory
from tests.trainer import tiny

BUCKETS = ("head", "torso", "tail")


def point(bias_removal: float, recall: float) -> CurvePoint:
    names = [
        *(f"{name}@2" for name in ("recall", "ndcg", "hit_rate", "balanced_error", "coverage", "gini")),
        *(f"{name}@2/{bucket}" for name in ("recall", "exposure") for bucket in BUCKETS),
    ]
    metrics = {name: Interval(value=recall, low=recall - 0.1, high=recall + 0.1) for name in names}
    return CurvePoint(bias_removal=bias_removal, metrics=metrics | {"gini@2": Interval(value=0.75)})


CURVE = [point(0, 0.25), point(0.5, 0.5), point(1, 0.375)]
DIAL = BiasRemoval(default=0.5, chosen_by="valid recall@2", curve_split="test", curve=CURVE)


@pytest.fixture(scope="module")
def page() -> str:
    history = TrainingHistory([2.0, 1.0], {1: 0.1, 2: 0.2}, 2)
    return html_report(tiny.recipe(), DIAL, history, {"Loss": "softmax <in_batch>"}).decode()


def test_the_page_needs_nothing_else(page: str) -> None:
    assert re.findall(r'(?:src|href)="(?!data:|#)', page) == []
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", page)
    assert "@import" not in page
    assert "<script" not in page


def test_the_page_has_its_three_plots_with_words_for_those_who_cannot_see_them(page: str) -> None:
    plots = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)"', page)

    assert len(plots) == 3
    for words, image in plots:
        assert len(words) > 20
        assert b"<svg" in base64.b64decode(image)


def test_the_page_shows_every_point_and_marks_the_default(page: str) -> None:
    rows = re.findall(r"<tr(.*?)><th>(.*?)</th>", page)

    assert [row for row in rows if row[1] in ("0", "0.5", "1")] == [("", "0"), (" class=chosen", "0.5"), ("", "1")]
    assert "<td>0.5000<small>0.4000–0.6000</small></td>" in page
    assert "<td>0.7500</td>" in page


def test_the_page_escapes_what_it_is_told(page: str) -> None:
    assert "softmax &lt;in_batch&gt;" in page
    assert "<title>" in page
    assert "$" not in page


def test_the_page_is_the_same_every_time(page: str) -> None:
    history = TrainingHistory([2.0, 1.0], {1: 0.1, 2: 0.2}, 2)

    assert html_report(tiny.recipe(), DIAL, history, {"Loss": "softmax <in_batch>"}).decode() == page


def test_markdown_has_a_row_per_point_with_the_interval_of_the_first_figure() -> None:
    lines = evaluation_markdown(DIAL, "recall@2").splitlines()

    assert lines[0].startswith("| λ | recall@2 | ndcg@2 |")
    assert lines[2].startswith("| 0 | 0.2500 [0.1500, 0.3500] | 0.2500 |")
    assert lines[3].startswith("| **0.5** | 0.5000 [0.4000, 0.6000] |")
    assert len({line.count("|") for line in lines}) == 1
