"""Promises of releases: refusals, printed figures, --force and builds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from longtail.bundle import BiasRemoval, BundleError, CurvePoint, Interval, Manifest, Popularity
from longtail.index import NotPublishableError, QualityPromise, Releases, build, open_releases
from tests.bundles import make_bundle
from tests.index.test_cli import run

RECALLS = {
    "good": (0.20, 0.06, 0.020),
    "better": (0.21, 0.06, 0.021),
    "poor": (0.25, 0.06, 0.017),
    "bare": None,
}
"""Release → recall@20 of head, torso and tail at λ = 0.8; its default is 0.75."""


def dial(recalls: tuple[float, float, float] | None) -> BiasRemoval:
    """A curve of two points; the other one is below every floor, and its recall@10 above."""
    if recalls is None:
        return BiasRemoval(default=0.75)
    names = [f"recall@20/{bucket}" for bucket in ("head", "torso", "tail")]
    near = {name: Interval(value=value) for name, value in zip(names, recalls, strict=True)}
    far = {name: Interval(value=0.0) for name in names}
    others = {"recall@20": Interval(value=0.0), "recall@10/tail": Interval(value=1.0)}
    return BiasRemoval(
        default=0.75,
        curve=[CurvePoint(bias_removal=0.0, metrics=far), CurvePoint(bias_removal=0.8, metrics=near | others)],
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Releases that differ in nothing but their curves."""
    root = tmp_path_factory.mktemp("promises")
    for name, recalls in RECALLS.items():
        plain = make_bundle()
        manifest = plain.manifest.model_copy(update={"bias_removal": dial(recalls)})
        dataclasses.replace(plain, manifest=manifest).write(root / "bundles" / name)
        build(root / "bundles" / name, root / "releases", name=name)
    return root / "releases"


@pytest.fixture
def releases(built: Path) -> Releases:
    """With nothing published and no floors."""
    for file in ("CURRENT", "promise.toml"):
        (built / file).unlink(missing_ok=True)
    return open_releases(built)


def write_promise(releases: Releases, text: str) -> None:
    (releases.root / "promise.toml").write_text(text)


def test_a_release_below_a_floor_is_not_published(releases: Releases) -> None:
    write_promise(releases, "[floors]\ntail = 0.02\nhead = 0.1\n")
    releases.publish("good")
    sentence = "broken: λ = 0.8: recall@20/tail 0.0170, promised >= 0.02"
    with pytest.raises(NotPublishableError) as refused:
        releases.publish("poor")
    assert refused.value.unmet == [sentence]
    start = f"poor is not published, CURRENT stays as it was: {sentence}; `longtail-index publish --force`"
    assert str(refused.value).startswith(start)
    assert releases.current() == "good"
    assert releases.pointers().history == ("good",)


def test_floors_and_ceilings_take_full_metric_names(releases: Releases) -> None:
    promise = QualityPromise(floors={"recall@20/head": 0.19}, ceilings={"recall@20/torso": 0.05})
    with pytest.raises(NotPublishableError) as refused:
        releases.publish("good", promise=promise)
    assert refused.value.unmet == ["broken: λ = 0.8: recall@20/torso 0.0600, promised <= 0.05"]


def test_a_drop_is_relative_to_the_published_release(releases: Releases) -> None:
    write_promise(releases, "max_drop = 0.1")
    releases.publish("good")
    with pytest.raises(NotPublishableError, match=r"tail 0\.0170, promised >= 0\.018 \(10 % below CURRENT's 0\.02\)"):
        releases.publish("poor")
    write_promise(releases, "max_drop = 0.15")
    assert releases.publish("poor").lines == [
        "recall@20 at λ = 0.8: head 0.2000 → 0.2500, torso 0.0600 → 0.0600, tail 0.0200 → 0.0170",
        "kept: λ = 0.8: recall@20/head 0.2500, promised >= 0.17 (15 % below CURRENT's 0.2)",
        "kept: λ = 0.8: recall@20/torso 0.0600, promised >= 0.051 (15 % below CURRENT's 0.06)",
        "kept: λ = 0.8: recall@20/tail 0.0170, promised >= 0.017 (15 % below CURRENT's 0.02)",
    ]


def make_curve(**buckets: float) -> Manifest:
    """A manifest whose curve has one point, with recalls by bucket."""
    metrics = {f"recall@20/{bucket}": Interval(value=value) for bucket, value in buckets.items()}
    curve = [CurvePoint(bias_removal=1, metrics=metrics)]
    return make_bundle(labels=3).manifest.model_copy(update={"bias_removal": BiasRemoval(default=1, curve=curve)})


def test_new_labels_have_a_floor_and_no_largest_drop() -> None:
    """New labels differ from release to release, and there may be none."""
    before = make_curve(head=0.3, torso=0.3, tail=0.3, new=0.1)
    after = make_curve(head=0.3, torso=0.3, tail=0.3, new=0.0)
    assert QualityPromise(max_drop=0.1).judge_release(after, before)[1] == []
    unmet = QualityPromise(max_drop=0.1, floors={"new": 0.05}).judge_release(after, before)[1]
    assert unmet == ["broken: λ = 1: recall@20/new 0.0000, promised >= 0.05"]
    assert QualityPromise(max_drop=0.1).judge_release(make_curve(head=0.3, torso=0.3, tail=0.3), before)[1] == []


def test_every_broken_bound_is_named(releases: Releases) -> None:
    releases.publish("better")
    with pytest.raises(NotPublishableError) as refused:
        releases.publish("poor", promise=QualityPromise(max_drop=0.1, floors={"tail": 0.0165, "head": 0.5}))
    assert refused.value.unmet == [
        "broken: λ = 0.8: recall@20/head 0.2500, promised >= 0.5",
        "broken: λ = 0.8: recall@20/tail 0.0170, promised >= 0.0189 (10 % below CURRENT's 0.021)",
    ]


def test_figures_are_of_the_point_nearest_to_the_defaults() -> None:
    def point(bias_removal: float, popularity: float, tail: float) -> CurvePoint:
        metrics = {"recall@20/tail": Interval(value=tail)}
        return CurvePoint(bias_removal=bias_removal, popularity=popularity, metrics=metrics)

    curve = [point(0, 0, 0.1), point(1, 0, 0.2), point(1, -0.5, 0.3), point(1, 0.5, 0.4)]
    update = {"bias_removal": BiasRemoval(default=1, curve=curve), "popularity": Popularity(default=-0.4)}
    manifest = make_bundle(labels=3).manifest.model_copy(update=update)
    assert QualityPromise().judge_release(manifest, None)[0] == ["recall@20 at λ = 1, μ = -0.5: tail 0.3000"]


def test_a_release_without_the_metric_breaks_the_promise(releases: Releases) -> None:
    write_promise(releases, "[floors]\ntail = 0.0\n")
    missing = "'recall@20/tail' is not allowed because the release's curve has no such figure"
    with pytest.raises(NotPublishableError, match=missing):
        releases.publish("bare")
    with pytest.raises(NotPublishableError, match=r"max_drop: 'recall@50/head' .* such as 'recall@20/head'"):
        releases.publish("good", promise=QualityPromise(metric="recall@50", max_drop=0.5))
    assert releases.current() is None
    assert releases.publish("good", promise=QualityPromise(metric="recall@10", floors={"tail": 1})).unmet == []


def test_force_publishes_and_prints_what_is_broken(releases: Releases, capsys: pytest.CaptureFixture[str]) -> None:
    write_promise(releases, "[floors]\ntail = 0.02\n")
    assert run("publish", releases.root / "good") == 0
    assert capsys.readouterr().out.splitlines() == [
        "recall@20 at λ = 0.8: head 0.2000, torso 0.0600, tail 0.0200",
        "kept: λ = 0.8: recall@20/tail 0.0200, promised >= 0.02",
        "published: good",
    ]
    write_promise(releases, "max_drop = 0.1")
    assert run("publish", releases.root / "poor") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("longtail-index: poor is not published, CURRENT stays as it was: broken: λ = 0.8: recall@20")
    assert releases.current() == "good"

    assert run("publish", releases.root / "poor", "--force") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "published: poor"
    assert captured.err.splitlines()[:2] == [
        "longtail-index: poor IS PUBLISHED ALL THE SAME (--force):",
        "  broken: λ = 0.8: recall@20/tail 0.0170, promised >= 0.018 (10 % below CURRENT's 0.02)",
    ]
    assert releases.current() == "poor"


def test_build_writes_a_release_that_breaks_the_promise(
    releases: Releases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = releases.root.parent / "bundles" / "poor"
    options = ("--releases", tmp_path, "--name", "new", "--publish")
    (tmp_path / "promise.toml").write_text("[floors]\ntail = 0.02\n")
    assert run("build", bundle, *options) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith(f"written: {tmp_path / 'new'}\n")
    assert "new is not published" in captured.err
    assert open_releases(tmp_path).names() == ["new"]
    assert open_releases(tmp_path).current() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_dorp = 0.1", "max_dorp: expected one of floors, ceilings, metric, max_drop, groups, over,"),
        ("[floors]\ntail = nan", "floors.tail: expected a finite number"),
        ("[floors]\ntail = 'high'", "floors.tail: expected a number"),
        ("max_drop = -0.1", "max_drop: expected at least 0"),
        ("max_drop = 1.1", "max_drop: expected at most 1"),
        ("floors = 3", "floors: expected a table, received 3"),
        ('metric = "recall"', "metric: expected a string that matches"),
        ("[over.popularity]", "'over' is not allowed because a release's curve has no such figures"),
        ("a =", "TOML: Invalid value"),
    ],
)
def test_an_invalid_promise_is_refused_before_publishing(text: str, message: str, releases: Releases) -> None:
    write_promise(releases, text)
    with pytest.raises(BundleError, match=rf"promise\.toml: .*{re.escape(message)}"):
        releases.publish("good")
    assert releases.current() is None
