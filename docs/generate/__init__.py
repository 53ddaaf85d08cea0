"""Parts of pages that are made from the repository, written into the committed Markdown.

What stands between `<!-- include: PATH # HEADING -->` and `<!-- end -->` is that section of a file; after
`<!-- api: MODULE -->` the reference of a module, after `<!-- http: PATH -->` that of an OpenAPI document.
`make docs-pages` writes all of them, and a test compares.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from docs.generate.api import module_reference
from docs.generate.http_api import http_reference

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(?ms)^<!-- (include|api|http): ([^\n]+?) -->$.*?^<!-- end -->$")
CODE = r"(?ms)^ *```.*?^ *```$|`[^`\n]+`"
LINK = re.compile(CODE + r"|(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)")


def generated(text: str, page: Path) -> str:
    """Return a page with every generated part made again.

    Args:
        text: the page as it stands.
        page: its file, by which links are made relative.

    Raises:
        ValueError: a marker names a section or module that is not there.
    """

    def part(match: re.Match[str]) -> str:
        kind, what = match[1], match[2]
        if kind == "api":
            level = len(re.findall(r"(?m)^(#+) ", PART.sub("", text[: match.start()]))[-1])
            body = module_reference(what, "#" * (level + 1))
        elif kind == "http":
            body = http_reference(ROOT / what)
        else:
            path, heading = what.split(" # ")
            body = _linked(section((ROOT / path).read_text(encoding="utf-8"), heading, path), ROOT / path, page)
        return f"<!-- {kind}: {what} -->\n\n{body.strip()}\n\n<!-- end -->"

    return PART.sub(part, text)


def section(text: str, heading: str, path: str) -> str:
    """Return what stands under a heading of a Markdown file, up to the next one of its level or above.

    Raises:
        ValueError: no such heading.
    """
    found = re.search(rf"(?m)^(#+) {re.escape(heading)}$", text)
    if found is None:
        raise ValueError(f"{path}: expected a heading {heading!r}, found none")
    rest = text[found.end() :]
    code = [match.span() for match in re.finditer(CODE, rest)]
    for end in re.finditer(rf"(?m)^#{{1,{len(found[1])}}} ", rest):
        if not any(start <= end.start() < stop for start, stop in code):
            return rest[: end.start()]
    return rest


def _linked(text: str, origin: Path, page: Path) -> str:
    """Relative links of one file, as another file needs them."""

    def rewritten(match: re.Match[str]) -> str:
        if match[2] is None or re.match(r"[a-z]+:", match[2]):
            return match[0]
        target = posixpath.normpath(origin.parent / match[2])
        return f"{match[1]}({posixpath.relpath(target, page.parent)}"

    return LINK.sub(rewritten, text)
