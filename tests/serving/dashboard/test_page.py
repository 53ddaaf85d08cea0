"""What is served: one file, under a policy that allows it and nothing else, in colours for every eye."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re

import numpy as np
import numpy.typing as npt
import pytest

from longtail.serving.dashboard import csp, page

PAGE = page().decode()
(STYLE,) = re.findall(r"<style>(.*?)</style>", PAGE, flags=re.DOTALL)
(SCRIPT,) = re.findall(r'<script type="module">(.*?)</script>', PAGE, flags=re.DOTALL)
LIGHT, DARK = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", block)) for block in STYLE.split("prefers-color-scheme"))
# Machado et al. 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
}


def linear(colour: str) -> npt.NDArray[np.float64]:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    share = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clip(0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_it_is_small_and_needs_nothing_else() -> None:
    assert len(page()) < 76_000
    assert set(re.findall(r"https?://[^'\"\s]+", PAGE)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"(?:src|href)=\"([^#][^\"]{0,4})", PAGE)) == {"data:"}


def test_the_policy_allows_this_style_and_this_script_only() -> None:
    directives = dict(directive.split(" ", 1) for directive in csp().split("; "))
    assert directives == {
        "default-src": "'none'",
        "style-src": source(STYLE),
        "script-src": source(SCRIPT),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_nothing_is_parsed_as_html_or_code() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", SCRIPT)
    assert not re.search(r"\sstyle=|\son[a-z]+=", PAGE.replace(SCRIPT, ""))


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_contrast(colours: dict[str, str]) -> None:
    for name in ("ink", "soft", "head", "torso", "tail", "new", "good", "warn", "bad"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    for name in ("soft", "ink"):
        assert contrast(colours[name], colours["raised"]) >= 4.5, name
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["ink"], colours["alert"]) >= 4.5
    assert contrast(colours["edge"], colours["page"]) >= 3


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_buckets_can_be_told_apart_by_colour_blind_eyes(colours: dict[str, str], deficiency: str) -> None:
    seen = [
        lab(np.array(DEFICIENCIES[deficiency]) @ linear(colours[bucket])) for bucket in ("head", "torso", "tail", "new")
    ]
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 30  # CIE76; about 2 is just noticeable
