import io
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from longtail.bundle import BiasRemoval, CurvePoint, Interval
from longtail.bundle.frequency import Buckets
from longtail.trainer.evaluation.comparison import Comparison
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.examples import Example
from longtail.trainer.evaluation.report import DefaultFigures, _exposure, html_report, plot_dial
from longtail.trainer.evaluation.tables import (
    adds_popularity,
    baseline_table,
    describe_buckets,
    evaluation_table,
    terminal_columns,
)
from longtail.trainer.history import TrainingHistory
from tests.bundles import make_bundle
from tests.trainer import tiny

BUCKETS = ("head", "torso", "tail", "new")


def point(bias_removal: float, recall: float) -> CurvePoint:
    names = [
        *(f"{name}@2" for name in ("recall", "ndcg", "hit_rate", "balanced_error", "coverage", "gini")),
        *(f"{name}@2/{bucket}" for name in ("recall", "exposure") for bucket in BUCKETS),
    ]
    metrics = {name: Interval(value=recall, low=recall - 0.1, high=recall + 0.1) for name in names}
    return CurvePoint(bias_removal=bias_removal, metrics=metrics | {"gini@2": Interval(value=0.75)})


CURVE = [point(0, 0.25), point(0.5, 0.5), point(1, 0.375)]
DIAL = Dial(BiasRemoval(default=0.5, chosen_by="valid recall@2", curve_split="test", curve=CURVE))


@pytest.fixture(scope="module")
def page() -> str:
    history = TrainingHistory([2.0, 1.0], {1: 0.1, 2: 0.2}, 2)
    return html_report(tiny.recipe(), DIAL, history, {"Loss": "softmax <in_batch>"}).decode()


def test_page_is_self_contained(page: str) -> None:
    assert re.findall(r'(?:src|href)="(?!data:|#)', page) == []
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", page)
    assert "@import" not in page
    assert "<script" not in page


def test_the_page_escapes_its_text(page: str) -> None:
    assert "softmax &lt;in_batch&gt;" in page
    assert "<title>" in page
    assert "$" not in page


COMPARED = Comparison(
    metric="recall@2", task="7 queries", model=point(0.5, 0.25).metrics,
    baselines={"iALS": point(0, 0.5).metrics, "popularity": point(0, 0.125).metrics},
    settings={"iALS": {"confidence": 5}, "popularity": {}}, seconds={"iALS": 1234.5, "popularity": 0.2}, best="iALS",
    differences={
        "iALS": {"recall@2": Interval(value=-0.25, low=-0.375, high=-0.125)},
        "popularity": {"recall@2": Interval(value=0.125, low=-0.0625, high=0.25)},
    }, notes=["item-kNN was left out: <too large>."],
)  # fmt: skip


def test_the_report_compares_baselines_with_the_model() -> None:
    page = html_report(
        tiny.recipe(), DIAL, TrainingHistory([1.0], {}, 1), {"Loss": "softmax"}, DefaultFigures(compared=COMPARED)
    ).decode()

    verdict = (
        "The model is behind iALS: recall@2 0.2500 against 0.5000 on the same 7 queries, a difference of "
        "-0.2500 [-0.3750, -0.1250]."
    )
    assert f"{verdict} item-kNN was left out: &lt;too large&gt;." in page
    assert re.findall(r"<tr([^>]*)><th>([^<]*(?:<small>[^<]*</small>)?)</th><td>([^<]*)<small>0", page) == [
        (" class=chosen", "the model", "0.2500"), ("", "iALS<small>confidence 5</small>", "0.5000"),
        ("", "popularity", "0.1250"), ("", "0", "0.2500"), (" class=chosen", "0.5", "0.5000"), ("", "1", "0.3750"),
    ]  # fmt: skip
    screen = io.StringIO()
    Console(file=screen, width=80).print(baseline_table(COMPARED, terminal_columns("recall@2")).rich())
    assert re.search(r"iALS +\S? ?0\.5000", screen.getvalue())
    assert "iALS 1,234 s, popularity 0 s" in screen.getvalue()
    assert "…" not in screen.getvalue()
    order = ("<p class=verdict>The model is behind iALS", "<img alt=", "<h2>The model and its baselines", "<dt>Loss")
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions), "the verdict comes first, and the facts last"


def test_report_explains_dial_and_buckets() -> None:
    words = describe_buckets(Buckets.by_count(head_from=4, torso_from=2), np.array([9, 5, 4, 3, 1, 0]))
    assert words == (
        "Labels by their training pairs: head over 3 training pairs (3 labels), torso over 1 (1 labels), "
        "tail fewer (1 labels), new none (1 labels)."
    )
    page = html_report(tiny.recipe(), DIAL, TrainingHistory([1.0], {}, 1), {}, buckets=words).decode()
    assert "0 ranks by taste, 1 by taste and popularity." in page
    assert words in page


@pytest.mark.parametrize(
    ("noise", "words", "axis"),
    [
        ("π", "adds popularity back as log π", True),
        ("π^0.5", "adds popularity back as log π^0.5", True),
        ("0.5·π + 0.5/L", "adds log ν back, ν = 0.5·π + 0.5/L", False),
        ("p_n(y|x)^0 · π", "adds log p_n(y|x), of which training took nothing away", False),
        ("uniform", "has nothing to add back", False),
    ],
)
def test_lambda_adds_what_training_took_away(noise: str, words: str, axis: bool) -> None:
    curve = [*CURVE, point(0.5, 0.375).model_copy(update={"cooccurrence": 1.0})]
    dial = DIAL._replace(bias_removal=DIAL.bias_removal.model_copy(update={"noise": noise, "curve": curve}))
    caption = evaluation_table("tiny", dial, "recall@2").caption
    assert caption.startswith(f"λ {words}, ω adds co-occurrence; ▶ default, by valid recall@2; ")
    page = html_report(tiny.recipe(), dial, TrainingHistory([1.0], {}, 1), {}).decode()
    assert ("0 ranks by taste, 1 by taste and popularity." in page) is axis
    assert adds_popularity(dial) is axis


def test_the_report_shows_answers_at_two_settings_of_the_dial() -> None:
    answers = {0.0: [("rare <mug>", "tail")], 0.5: [("lamp", "head")]}
    example = Example("u7", history=["pan"], chosen=["vase", "rug"], answers=answers)
    page = html_report(
        tiny.recipe(), DIAL, TrainingHistory([1.0], {}, 1), {}, DefaultFigures(examples=[example])
    ).decode()
    assert "<th>First at λ = 0</th><th>First at λ = 0.5</th>" in page
    assert "<th>u7</th><td>pan</td><td>vase<br>rug</td>" in page
    assert "rare &lt;mug&gt; <i>tail</i>" in page


def test_exposure_areas_are_named_unless_empty() -> None:
    axes = Figure().subplots()
    _exposure(axes, [0, 0.5, 1], CURVE, 0.5, "λ", "2")
    assert [text.get_text() for text in axes.texts] == ["head", "torso", "tail", "new"]
    nothing = {f"exposure@2/{bucket}": Interval(value=0.0) for bucket in ("tail", "new")}
    points = [point.model_copy(update={"metrics": point.metrics | nothing}) for point in CURVE]
    axes = Figure().subplots()
    _exposure(axes, [0, 0.5, 1], points, 0.5, "λ", "2")
    assert [text.get_text() for text in axes.texts] == ["head", "torso"]


def test_report_has_the_price_of_recall() -> None:
    curve = [
        CurvePoint(
            bias_removal=at,
            metrics=point(at, recall).metrics | {"recall@2/tail": Interval(value=tail)},
        )
        for at, recall, tail in ((0, 0.25, 0.125), (0.5, 0.5, 0.0), (1, 0.375, 0.0))
    ]
    dial = Dial(BiasRemoval(default=0.5, chosen_by="valid recall@2", curve_split="test", curve=curve))

    page = html_report(tiny.recipe(), dial, TrainingHistory([1.0], {}, 1), {}).decode()
    assert "What recall costs the tail" in page
    assert "<td>+0.2500</td><td>-0.1250</td><td>-2.00</td>" in page
    assert "<td>-0.1250</td><td>+0.0000</td><td>–</td>" in page


def test_dial_picture_has_three_panels_and_one_legend() -> None:
    plain = make_bundle()
    bundle = replace(plain, manifest=plain.manifest.model_copy(update={"bias_removal": DIAL.bias_removal}))
    figure = plot_dial(bundle, k=2)
    assert [len(axes.get_lines()) for axes in figure.axes] == [6, 1, 2]
    assert figure.axes[2].get_lines()[0].get_ydata().tolist() == [0.25, 0.5, 0.375]
    assert len(figure.legends) == 1
    with pytest.raises(ValueError, match=r"k = 3 is not allowed .* coverage@3"):
        plot_dial(bundle, k=3)
