"""Bucket floors: what is refused, what is said, and what --force and rollback do all the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from longtail.bundle import BiasRemoval, CurvePoint, Interval, Manifest, Popularity
from longtail.index import BucketFloors, LongtailIndexError, NotPublishableError, Releases, build
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
    return Releases(built)


def write_floors(releases: Releases, text: str) -> None:
    (releases.root / "promise.toml").write_text(text)


def test_a_floor_refuses_what_lies_below_it(releases: Releases) -> None:
    write_floors(releases, "[floors]\ntail = 0.02\nhead = 0.1\n")
    releases.publish("good")
    with pytest.raises(
        NotPublishableError,
        match=r"poor is not published, CURRENT stays as it was: "
        r"tail: expected recall@20 of at least 0\.02 \(the floor\), found 0\.017 at λ = 0\.8; .* --force",
    ) as refused:
        releases.publish("poor")
    assert refused.value.unmet == ["tail: expected recall@20 of at least 0.02 (the floor), found 0.017 at λ = 0.8"]
    assert releases.current() == "good"
    assert releases.pointers().history == ("good",)


def test_a_drop_is_relative_to_what_is_published(releases: Releases) -> None:
    write_floors(releases, "max_drop = 0.1")
    releases.publish("good")
    with pytest.raises(NotPublishableError, match=r"tail: .* at least 0\.018 \(10 % below CURRENT's 0\.02\), found 0"):
        releases.publish("poor")
    write_floors(releases, "max_drop = 0.15")
    report = releases.publish("poor")
    assert report.lines == [
        "bucket floors: recall@20: none of head, torso, tail more than 15 % below CURRENT's",
        "recall@20 at λ = 0.8: head 0.2000 → 0.2500, torso 0.0600 → 0.0600, tail 0.0200 → 0.0170",
    ]


def curve_of(at: tuple[float, float] = (1, 0), **buckets: float) -> Manifest:
    """A manifest whose curve has one point, with these recalls."""
    metrics = {f"recall@20/{bucket}": Interval(value=value) for bucket, value in buckets.items()}
    curve = [CurvePoint(bias_removal=at[0], popularity=at[1], metrics=metrics)]
    return make_bundle(labels=3).manifest.model_copy(update={"bias_removal": BiasRemoval(default=1, curve=curve)})


def test_new_labels_have_a_floor_and_no_largest_drop() -> None:
    """Which labels are new, and whether any is, differs from release to release."""
    before = curve_of(head=0.3, torso=0.3, tail=0.3, new=0.1)
    after = curve_of(head=0.3, torso=0.3, tail=0.3, new=0.0)
    assert BucketFloors(max_drop=0.1).compare(after, before).unmet == []
    unmet = BucketFloors(max_drop=0.1, floors={"new": 0.05}).compare(after, before).unmet
    assert unmet == ["new: expected recall@20 of at least 0.05 (the floor), found 0 at λ = 1"]
    of_an_old_trainer = curve_of(head=0.3, torso=0.3, tail=0.3)
    assert BucketFloors(max_drop=0.1).compare(of_an_old_trainer, before).unmet == []


def test_the_stricter_of_floor_and_drop_counts_and_every_bucket_below_it_is_named(releases: Releases) -> None:
    releases.publish("better")
    strict = BucketFloors(max_drop=0.1, floors={"tail": 0.0175, "head": 0.5})
    with pytest.raises(NotPublishableError) as refused:
        releases.publish("poor", floors=strict)
    assert refused.value.unmet == [
        "head: expected recall@20 of at least 0.5 (the floor), found 0.25 at λ = 0.8",
        "tail: expected recall@20 of at least 0.0189 (10 % below CURRENT's 0.021), found 0.017 at λ = 0.8",
    ]


def test_the_figures_are_those_of_the_point_nearest_on_both_dials() -> None:
    def point(bias_removal: float, popularity: float, tail: float) -> CurvePoint:
        metrics = {"recall@20/tail": Interval(value=tail)}
        return CurvePoint(bias_removal=bias_removal, popularity=popularity, metrics=metrics)

    curve = [point(0, 0, 0.1), point(1, 0, 0.2), point(1, -0.5, 0.3), point(1, 0.5, 0.4)]
    update = {"bias_removal": BiasRemoval(default=1, curve=curve), "popularity": Popularity(default=-0.4)}
    manifest = make_bundle(labels=3).manifest.model_copy(update=update)
    assert BucketFloors().compare(manifest, None).lines[1] == "recall@20 at λ = 1, μ = -0.5: tail 0.3000"


def test_a_release_without_the_metric_meets_no_floor(releases: Releases) -> None:
    write_floors(releases, "[floors]\ntail = 0.0\n")
    with pytest.raises(NotPublishableError, match=r"expected recall@20/tail in the curve, found none; .* --force"):
        releases.publish("bare")
    with pytest.raises(NotPublishableError, match=r"expected recall@50/head .* found recall@10, recall@20; exp"):
        releases.publish("good", floors=BucketFloors(metric="recall@50", max_drop=0.5))
    assert releases.current() is None
    assert releases.publish("good", floors=BucketFloors(metric="recall@10", floors={"tail": 1})).unmet == []


def test_the_command_refuses_and_force_says_so_loudly(releases: Releases, capsys: pytest.CaptureFixture[str]) -> None:
    write_floors(releases, "[floors]\nhead = 0.1\ntail = 0.02\n")
    assert run("publish", releases.root, "good") == 0
    assert capsys.readouterr().out.splitlines() == [
        "bucket floors: recall@20: head at least 0.1, tail at least 0.02",
        "recall@20 at λ = 0.8: head 0.2000, torso 0.0600, tail 0.0200",
        "published: good",
    ]
    write_floors(releases, "max_drop = 0.1")
    assert run("publish", releases.root, "poor") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(
        "longtail-index: poor is not published, CURRENT stays as it was: tail: expected recall@20 of at"
    )
    assert releases.current() == "good"

    assert run("publish", releases.root, "poor", "--force") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "published: poor"
    assert captured.err.splitlines()[:2] == [
        "longtail-index: poor IS PUBLISHED ALL THE SAME (--force):",
        "  tail: expected recall@20 of at least 0.018 (10 % below CURRENT's 0.02), found 0.017 at λ = 0.8",
    ]
    assert releases.current() == "poor"


def test_build_writes_a_release_that_it_may_not_publish(
    releases: Releases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = releases.root.parent / "bundles" / "poor"
    options = ("--releases", tmp_path, "--name", "new", "--publish")
    (tmp_path / "promise.toml").write_text("[floors]\ntail = 0.02\n")
    assert run("build", bundle, *options) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith(f"written: {tmp_path / 'new'}\n")
    assert "new is not published" in captured.err
    assert Releases(tmp_path).names() == ["new"]
    assert Releases(tmp_path).current() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_dorp = 0.1",
            "max_dorp: expected one of metric, max_drop, floors, received an unknown key: did you mean 'max_drop'?",
        ),
        ("[floors]\nmid = 0.1", "floors.mid: expected 'head', 'torso', 'tail' or 'new', received 'mid'"),
        ("[floors]\ntail = 1.1", "floors.tail: expected at most 1, received 1.1"),
        ("[floors]\ntail = nan", "floors.tail: expected a finite number"),
        ("max_drop = -0.1", "max_drop: expected at least 0"),
        ("floors = 3", "floors: expected a table, received 3"),
        ('metric = "recall"', "metric: expected a string that matches"),
        ("a =", "TOML, Invalid value"),
    ],
)
def test_a_wrong_file_says_what_is_wrong_and_publishes_nothing(text: str, message: str, releases: Releases) -> None:
    write_floors(releases, text)
    with pytest.raises(LongtailIndexError, match=rf"promise\.toml: .*{re.escape(message)}"):
        releases.publish("good")
    assert releases.current() is None
