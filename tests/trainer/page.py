"""docs/extending.md: its examples are what is tested, each as the page shows it."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = (Path(__file__).parents[2] / "docs/extending.md").read_text()
PYTHON, TOML = (re.findall(rf"(?ms)^```{language}\n(.*?)^```", _TEXT) for language in ("python", "toml"))


def page_toml(part: str) -> str:
    """The one block of TOML that has this in it."""
    (found,) = [block for block in TOML if part in block]
    return found
