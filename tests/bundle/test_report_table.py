import io

from rich.console import Console

from longtail.bundle import Interval
from longtail.bundle.report_table import Cell, ReportTable, metric_cell, metric_cells

TABLE = ReportTable(
    ["", "recall", "says"],
    [
        [Cell("a [1] <b>", "k 5"), metric_cell(Interval(value=0.25, low=0.125, high=0.5)), "not yet"],
        ["model", "–", Cell("x", markup="<i>x</i>")],
    ],
    marked=[1], title="Top 20", caption="two rows",
)  # fmt: skip


def test_the_same_rows_print_in_a_terminal_as_text_markdown_and_html() -> None:
    screen = io.StringIO()
    Console(file=screen, width=60).print(TABLE.rich())
    text = screen.getvalue()
    assert all(part in text for part in ("Top 20", "two rows", "a [1] <b>", "▶ model", "0.2500"))
    assert "k 5" not in text
    assert [*TABLE.lines()] == ["           recall  says", "a [1] <b>  0.2500  not yet", "model      –       x"]
    assert TABLE.markdown() == (
        "|  | recall | says |\n|---|---|---|\n"
        "| a [1] <b> [k 5] | 0.2500 [0.1250–0.5000] | not yet |\n| **model** | – | x |\n"
    )
    assert TABLE.html() == (
        "<div class=scroll><table><thead><tr><th></th><th>recall</th><th>says</th></tr></thead><tbody>"
        "<tr><th>a [1] &lt;b&gt;<small>k 5</small></th><td>0.2500<small>0.1250–0.5000</small></td><td>not yet</td></tr>"
        "<tr class=chosen><th>model</th><td>–</td><td><i>x</i></td></tr></tbody></table></div>"
    )


def test_recall_of_a_bucket_without_pairs_is_a_dash() -> None:
    nothing, not_found = Interval(value=0, low=0, high=0), Interval(value=0, low=0, high=0.25)
    metrics = {
        "recall@2/new": nothing, "recall@2/tail": not_found, "recall@2": nothing, "exposure@2/new": nothing,
        "coverage@2/new": Interval(value=0),
    }  # fmt: skip
    cells = [(str(cell), cell.note) for cell in metric_cells(metrics, metrics)]
    zero = ("0.0000", "0.0000–0.0000")
    assert cells == [("–", ""), ("0.0000", "0.0000–0.2500"), zero, zero, ("0.0000", "")]
    (difference,) = metric_cells(metrics, ["recall@2/new"], signed=True)
    assert str(difference) == "+0.0000"


def test_signed_figures_and_missing_figures() -> None:
    cells = metric_cells({"d": Interval(value=0.5, low=-0.25, high=1)}, ["d", "e"], signed=True)
    assert [(str(cell), cell.note) for cell in cells] == [("+0.5000", "-0.2500 to +1.0000"), ("", "")]
