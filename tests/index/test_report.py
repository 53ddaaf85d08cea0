"""The curve that a build keeps, and the page that draws it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from longtail.bundle import Bundle
from longtail.index import IndexSpec, Release
from longtail.index.cli import main
from longtail.index.construct.tuning import tune_index
from tests.bundles import make_bundle


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=6000, dim=8)


@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_sq", "hnsw"])
def test_the_curve_is_of_the_efforts_up_to_the_chosen_one_and_the_next_two(kind: str, bundle: Bundle) -> None:
    built = tune_index(bundle, IndexSpec(kind), "cpu", lambda _: None)
    tried = [trial.effort for trial in built.trials if trial.head == built.chosen.head]
    assert [point.effort for point in built.curve[: len(tried)]] == tried
    beyond = built.curve[len(tried) :]
    assert len(beyond) == 2
    for point in built.curve:
        assert (point.kind, point.head, point.bytes_per_label) == (kind, built.chosen.head, built.bytes_per_label)
        assert [at.where for at in point.recall] == [at.where for at in built.chosen.recall]
        assert point.queries_per_second > 0
    for point in beyond:
        assert point.effort.probes >= built.chosen.effort.probes
        assert point.effort.refine >= built.chosen.effort.refine
        assert point.lowest.recall >= built.chosen.lowest.recall


@pytest.mark.nightly
def test_auto_keeps_a_curve_of_every_kind(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.index.construct.spec.FLAT_UP_TO", 5000)
    built = tune_index(bundle, IndexSpec("auto"), "cpu", lambda _: None)
    assert {point.kind for point in built.curve} == {trial.kind for trial in built.trials}


def test_the_page_has_the_figures_of_the_manifest(
    opened: Callable[[str], Release], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = opened("ivf_flat")
    main_succeeds(["report", str(release.path.parent), release.path.name, "--out", str(tmp_path / "pages/report.html")])
    assert capsys.readouterr().out == f"written: {tmp_path / 'pages/report.html'}\n"
    page = (tmp_path / "pages/report.html").read_text()
    for point in release.manifest.curve:
        row = f"<td>{point.queries_per_second:,.0f}</td><td>{point.bytes_per_label:g}</td>" + "".join(
            f"<td>{at.recall:.4f}</td>" for at in point.recall
        )
        assert row in page
    assert page.count("<tr class=chosen>") == 1
    assert f"{release.manifest.labels:,} × {release.manifest.dim} coordinates" in page
    alts = re.findall(r'<img alt="([^"]+)" src="data:image/svg', page)
    assert [alt.split()[0] for alt in alts] == ["Lowest", "Recall", "Lowest"]
    assert "http" not in page.replace("http://www.w3.org", "")


def main_succeeds(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
