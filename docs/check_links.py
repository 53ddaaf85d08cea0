"""Checks every link of the built site that stays on it: the file is there, and so is the anchor.

Run by `make docs`. Links to other hosts are counted and not followed: the build needs no network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take what is linked to, and what can be."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name == "src" or (name == "href" and tag != "link"):
                self.links.append(value)


def broken_links(site: Path) -> tuple[list[str], int, int]:
    """What is broken, one sentence each; how many links stay on the site, and how many leave it."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    broken, inside, outside = [], 0, 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside += parts.scheme in ("http", "https")
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            page_path = path.relative_to(site)
            if not target.is_relative_to(site) or not target.exists():
                broken.append(f"{page_path}: expected a file at {link}, found none")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{page_path}: expected an anchor at {link}, found none")
    return broken, inside, outside


if __name__ == "__main__":
    broken, inside, outside = broken_links(Path(sys.argv[1]).resolve())
    for sentence in broken:
        print(sentence, file=sys.stderr)
    print(f"{inside} links inside the site, {len(broken)} broken; {outside} to other hosts, not followed")
    sys.exit(bool(broken) or not inside)
