"""What the site changes in the committed Markdown: whole files of the repository as pages, and links.

A page that begins with the line `<!-- page: PATH -->` is replaced by that file, a notebook by its text, code and
outputs; on GitHub every link leads to the file itself. Links go to the page that shows a file, or, for a file that no
page shows, to `DOCS_SOURCE_URL` if that is set; else the link is left out and its text stays. `<!-- toctree: CAPTION …
-->` holds a part of the navigation, which GitHub does not show.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "bundle/FORMAT.md": "bundle.md",
    "docker/README.md": "docker.md",
    "examples/movielens.ipynb": "films.md",
    "serving/METRICS.md": "metrics.md",
    "serving/openapi.json": "http.md",
    "serving/settings.py": "api/serving.md",
    "trainer/config": "recipe.md",
}
"""The page that shows a file or folder of the repository."""

_PAGE = re.compile(r"(?ms)^<!-- page: (\S+) -->$.*")
_TREE = re.compile(r"(?ms)^<!-- toctree: ?([^\n]*)\n(.*?)^-->$")
_CODE = r"(?ms)^ *```.*?^ *```$|`[^`\n]+`"
_LINK = re.compile(_CODE + r"|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CITATION = re.compile(_CODE + r"|\b(METHODS (§\d+(?:\.\d+)?)|DESIGN, (\w+))(?=[];,])")


def expand(text: str, page: str) -> str:
    """A page's source as the site has it.

    Args:
        text: the page as it stands in `docs/`.
        page: its name without the ending, such as `api/client`.
    """
    folder = base = posixpath.dirname(posixpath.join("docs", page))
    if source := _PAGE.match(text):
        text, base = (ROOT / source[1]).read_text(encoding="utf-8"), posixpath.dirname(source[1])
        if source[1].endswith(".ipynb"):
            text = _read_notebook(json.loads(text))
    tree = _TREE.sub(r"```{toctree}\n:caption: \1\n:hidden:\n\n\2```", text)
    return _cited(_linked(tree, base, folder), folder)


def _read_notebook(notebook: dict[str, Any]) -> str:
    """Convert a notebook to Markdown.

    Cells that Jupyter shows without their source are folded. A cell's metadata `alt` describes its picture.
    """
    parts = list[str]()
    for cell in notebook["cells"]:
        source, metadata = "".join(cell["source"]), cell["metadata"]
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        code = f"```python\n{source}\n```"
        if metadata.get("jupyter", {}).get("source_hidden"):
            code = f"<details><summary>Code</summary>\n\n{code}\n\n</details>"
        parts.append(code)
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![{metadata['alt']}](data:image/png;base64,{picture})")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def slug(title: str) -> str:
    """The anchor of a heading: `s2.1` of a numbered one, else GitHub's, so that links hold there too."""
    numbered = re.match(r"(\d+(?:\.\d+)*)\.? ", title)
    return f"s{numbered[1]}" if numbered else re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def _linked(text: str, base: str, folder: str) -> str:
    """Relative links, read from the folder `base`, as a page of the folder `own` needs them."""

    def rewritten(match: re.Match[str]) -> str:
        image, text_of_link, target = match.groups()
        if target is None:  # code
            return match[0]
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(base, path))
        anchor = f"#{anchor}" if anchor else ""
        if file in PAGES:
            file = f"docs/{PAGES[file]}"
        elif not file.startswith("docs/") and not image:
            url = os.environ.get("DOCS_SOURCE_URL")
            return f"[{text_of_link}]({url}/{file}{anchor})" if url else text_of_link
        return f"{image}[{text_of_link}]({posixpath.relpath(file, folder)}{anchor})"

    return _LINK.sub(rewritten, text)


def _cited(text: str, folder: str) -> str:
    """`[METHODS §2.1]` and `[DESIGN, Budgets]` with links to what they cite."""
    up = posixpath.relpath("docs", folder)

    def link(match: re.Match[str]) -> str:
        if match[1] is None:  # code
            return match[0]
        if match[2]:
            return f"[{match[1]}]({up}/methods.md#s{match[2][1:]})"
        return f"[{match[1]}]({up}/design.md#{match[3].lower()})"

    return _CITATION.sub(link, text)
