"""Create self-contained HTML pages in one style."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.resources import files
from string import Template

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, SOFT, BLUE, AMBER, GREEN = "#334155", "#94a3b8", "#2563eb", "#d97706", "#059669"

_STYLE = {
    "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "svg.hashsalt": "longtail",
}  # fmt: skip


def page(
    title: str, intro: str, cards: Mapping[str, str], plots: Sequence[str], body: str, *, verdict: str = ""
) -> bytes:  # fmt: skip
    """Create a page as one file of HTML: title, verdict, intro, plots, body, and cards of facts."""
    template = Template((files("longtail.bundle") / "page.html").read_text(encoding="utf-8"))
    content = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in cards.items()
    )
    lead = verdict and f"<p class=verdict>{html.escape(verdict)}</p>"
    return template.substitute(
        title=html.escape(title), verdict=lead, intro=intro, cards=content, plots="".join(plots), body=body
    ).encode()  # fmt: skip


def style() -> AbstractContextManager[None]:
    """Enter a context in which figures have the look of the pages."""
    return mpl.rc_context(_STYLE)  # type: ignore[arg-type]


def plot(draw: Callable[[Axes], None], description: str) -> str:
    """Draw a figure as HTML, with a description for screen readers."""
    with style():
        figure = Figure(figsize=(4.6, 3.3), layout="constrained")
        draw(figure.subplots())
        return picture(figure, description)


def picture(figure: Figure, description: str) -> str:
    """Embed a figure in HTML, with a description for screen readers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    image = base64.b64encode(buffer.getvalue()).decode()
    return f'<figure><img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{image}"></figure>'
