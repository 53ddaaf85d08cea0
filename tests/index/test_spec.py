"""What a spec comes to, and how a spec that cannot be built is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtail.index import IndexSpec, SpecError, build


@pytest.mark.parametrize(
    ("text", "labels", "kind"),
    [
        ("auto", 50_000, "flat"),
        ("auto", 50_001, "ivf_flat"),
        ("flat", 10**7, "flat"),
    ],
)
def test_kind(text: str, labels: int, kind: str) -> None:
    assert IndexSpec(text).kind(labels) == kind


@pytest.mark.parametrize(
    ("text", "labels", "dim", "expected"),
    [
        ("flat", 600, 9, ("Flat", 9)),
        ("ivf_flat", 1_000_000, 65, ("IVF4000(PQ65x4fs,RFlat),Flat", 65)),
        ("ivf_flat", 3_000_000, 65, ("IVF12000(PQ65x4fs,RFlat),Flat", 65)),
        ("ivf_flat", 10_000_000, 65, ("IVF25298(PQ65x4fs,RFlat),Flat", 65)),
        ("ivf_flat", 62_000, 65, ("IVF996,Flat", 65)),  # few enough cells to look at all
        ("ivf_flat", 390, 65, ("IVF10,Flat", 65)),  # 39 rows a cell
        ("ivf_flat", 5, 65, ("IVF1,Flat", 65)),
        ("ivf_sq", 1_000_000, 65, ("IVF4000(PQ80x4fs,RFlat),SQ8", 80)),  # 16 codes at a time
        ("ivf_fastscan", 1_000_000, 65, ("IVF4000(PQ66x4fs,RFlat),PQ33x4fsr", 66)),  # 33 codes of 2 coordinates
    ],
)
def test_factory(text: str, labels: int, dim: int, expected: tuple[str, int]) -> None:
    assert IndexSpec(text).factory(labels, dim) == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ivfflat", ["expected auto, flat", "received 'ivfflat'"]),
        ("", ["received ''"]),
        ("ivf_fastscan", ["624 labels", "received 600"]),
    ],
)
def test_refused_specs_say_why(spec: str, words: list[str], bundle_path: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        build(bundle_path, tmp_path, spec=IndexSpec(spec))
    for word in words:
        assert word in str(refused.value)
    assert list(tmp_path.iterdir()) == []
