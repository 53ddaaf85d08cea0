"""How Sphinx builds the site: Markdown by MyST, formulas as MathML."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from pages import expand  # noqa: E402

_PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

_log = logging.getLogger(__name__)

project = "Longtail"
author = "the Longtail authors"
release = version = _PROJECT["version"]
extensions = ["myst_parser"]
exclude_patterns = ["_ext", "generate"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 5
myst_heading_slug_func = "pages.slug"
myst_dmath_double_inline = True

html_theme = "furo"
html_title = f"Longtail {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


_FUNCTION = re.compile(r"(<mi>(?:log|ln)</mi>\s*)<mo>&ApplyFunction;</mo>(?=\s*<m(?:i|sub|sup|row)[ >])")
"""A function's name before an argument without brackets: browsers leave no space there."""


def _expand(_app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = expand(source[0], page)


def _mathml(node: nodes.Node, *, as_block: bool) -> str:
    try:
        formula = str(tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        _log.warning("formula %r: %s", node.astext(), error, location=node)
        return ""
    return _FUNCTION.sub(r'\1<mspace width="0.17em"/>', formula)


def _inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Sphinx calls this: files as pages, links, and formulas that every browser draws without a script."""
    app.connect("source-read", _expand)
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
