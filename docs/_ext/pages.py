"""The parts of a page that are made from the repository when the site is built.

A line `<!-- include: PATH -->` or `<!-- include: PATH # HEADING -->` is replaced by that file of the repository, or by
one of its sections; `<!-- api: MODULE -->` by the reference of a module; `<!-- http: PATH -->` by that of an OpenAPI
document. Links are rewritten so that they hold on the site: to the page that shows a file, or, for a file that no page
shows, to `DOCS_SOURCE_URL` if that is set; else the link is left out and its text stays.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from api import module_reference
from http_api import http_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "bundle/FORMAT.md": "formats.md",
    "docker/README.md": "docker.md",
    "serving/METRICS.md": "metrics.md",
    "serving/openapi.json": "http.md",
    "serving/settings.py": "api/serving.md",
    "trainer/config": "recipe.md",
}
"""The page that shows a file or folder of the repository."""

_MARKER = re.compile(r"(?m)^<!-- (include|api|http): (.+?) -->$")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`")
_SPAN = re.compile(r"`[^`\n]+`")
_CITATION = re.compile(r"\b(METHODS (§\d+(?:\.\d+)?)|DESIGN, (\w+))(?=[];,])")


def expand(text: str, page: str) -> str:
    """A page's source with its generated parts, links as the site has them.

    Args:
        text: the page as it stands in `docs/`.
        page: its name without the ending, such as `api/client`.

    Raises:
        ValueError: a marker names a file, section or module that is not there.
    """
    own = posixpath.dirname(posixpath.join("docs", page))

    def generated(match: re.Match[str]) -> str:
        kind, what = match[1], match[2]
        if kind == "api":
            return _cited(module_reference(what), own, _SPAN)
        if kind == "http":
            return http_reference(ROOT / what)
        path, _, heading = (part.strip() for part in what.partition("#"))
        included = (ROOT / path).read_text(encoding="utf-8")
        if heading:
            included = section(included, heading, path)
        return _linked(_cited(included, own), posixpath.dirname(path), own)

    parts = _MARKER.split(_cited(_linked(text, own, own), own))
    whole = [parts[0]]
    for kind, what, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        match = _MARKER.match(f"<!-- {kind}: {what} -->")
        assert match is not None
        whole += [generated(match), after]
    return "".join(whole)


def section(text: str, heading: str, path: str) -> str:
    """What stands under a heading of a Markdown file, without the heading, up to the next one of its level or above.

    Raises:
        ValueError: no such heading.
    """
    found = re.search(rf"(?m)^(#+) {re.escape(heading)}$", text)
    if found is None:
        raise ValueError(f"{path}: expected a heading {heading!r}, found none")
    rest = text[found.end() :]
    code = [match.span() for match in re.finditer(r"(?ms)^ *```.*?^ *```$", rest)]
    for end in re.finditer(rf"(?m)^#{{1,{len(found[1])}}} ", rest):
        if not any(start <= end.start() < stop for start, stop in code):
            return rest[: end.start()]
    return rest


def slug(title: str) -> str:
    """The anchor of a heading: `s2.1` of a numbered one, else GitHub's, so that links hold there too."""
    numbered = re.match(r"(\d+(?:\.\d+)*)\.? ", title)
    return f"s{numbered[1]}" if numbered else re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def _linked(text: str, base: str, own: str) -> str:
    """Relative links, read from the folder `base`, as a page of the folder `own` needs them."""

    def rewritten(match: re.Match[str]) -> str:
        image, shown, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(base, path))
        anchor = f"#{anchor}" if anchor else ""
        if file in PAGES:
            file = f"docs/{PAGES[file]}"
        elif not file.startswith("docs/") and not image:
            url = os.environ.get("DOCS_SOURCE_URL")
            return f"[{shown}]({url}/{file}{anchor})" if url else shown
        return f"{image}[{shown}]({posixpath.relpath(file, own)}{anchor})"

    return _outside_code(text, lambda prose: _LINK.sub(rewritten, prose))


def _cited(text: str, own: str, code: re.Pattern[str] = _CODE) -> str:
    """`[METHODS §2.1]` and `[DESIGN, Budgets]` with links to what they cite."""
    up = posixpath.relpath("docs", own)

    def link(match: re.Match[str]) -> str:
        if match[2]:
            return f"[{match[1]}]({up}/methods.md#s{match[2][1:]})"
        return f"[{match[1]}]({up}/design.md#{match[3].lower()})"

    return _outside_code(text, lambda prose: _CITATION.sub(link, prose), code)


def _outside_code(text: str, change: Callable[[str], str], code: re.Pattern[str] = _CODE) -> str:
    """Text with `change` made between the matches of `code`: fenced blocks and code spans."""
    parts, at = [], 0
    for match in code.finditer(text):
        parts += [change(text[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*parts, change(text[at:])])
