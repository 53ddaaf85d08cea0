"""Priors from a table to a release: what is read, what is refused, what is searched, and what a refresh changes."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, Patch, Priors, Upsert
from longtail.bundle.label_changes import replay
from longtail.index import (
    Exposure,
    IndexSpec,
    Limits,
    LongtailIndexError,
    NotPublishableError,
    PriorsError,
    PriorTable,
    RecallFloorError,
    ReleaseCorruptError,
    ReleaseManifest,
    build,
    open_releases,
    refresh_priors,
)
from longtail.index.building.merge import with_changes
from longtail.index.building.priors import PriorSpec
from longtail.index.building.training import order_by_max_score
from longtail.index.building.tuning import tune_index
from longtail.index.recall import Calibration
from longtail.index.release.index_files import read_priors
from tests.bundles import make_bundle
from tests.index.test_cli import run
from tests.serving.core.shop import shop_bundle

AT = datetime(2027, 1, 1, tzinfo=UTC)
L = 60


def quiet(_: str) -> None:
    """No progress."""


def write(path: Path, bundle: Bundle, **columns: object) -> Path:
    """A table of every label's priors; Parquet, or CSV by its name."""
    table = pa.table({"label_id": bundle.labels.ids, **columns})
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(labels=L, bias=True, popularity=True, queries=20).write(
        tmp_path_factory.mktemp("bundle") / "model"
    )


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_table_in_any_order_gives_every_label_its_own_numbers(suffix: str, bundle: Bundle, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(L)
    recent, stock = rng.normal(0, 2, L), rng.integers(0, 2, L).astype(bool)
    ids = bundle.labels.ids.take(pa.array(order))
    table = {"stock": stock[order], "label_id": pa.concat_arrays([ids, pa.array(["nobody"])]), "recent": recent[order]}
    table = {name: values if name == "label_id" else np.append(values, 0) for name, values in table.items()}
    table["stock"] = table["stock"].astype(bool)
    path = tmp_path / f"priors{suffix}"
    (pq.write_table if suffix == ".parquet" else pyarrow.csv.write_csv)(pa.table(table), path)
    progress_lines: list[str] = []
    priors = PriorTable(path).read(bundle, progress=progress_lines.append)
    assert priors.names == ["stock", "recent"]
    np.testing.assert_array_equal(priors.values_LP, np.stack([stock, recent], 1).astype(np.float32))
    assert progress_lines == ["priors: 60 of 60 labels found, 1 rows of no label"]
    limits = [(prior.minimum, prior.default, prior.maximum) for prior in priors.settings]
    assert limits[1] == (-float(f"{3 / recent.astype(np.float32).std():.1g}"), 0.0, -limits[1][0])


@pytest.mark.parametrize(("missing", "expected"), [("min", -4), ("median", 1), (0.5, 0.5)])
def test_missing_priors_use_the_chosen_default_for_added_labels_too(
    missing: float, expected: float, bundle: Bundle, tmp_path: Path
) -> None:
    values: list[float | None] = [1.0] * L
    values[3], values[4], values[5] = None, float("nan"), -4.0
    path = write(tmp_path / "t.parquet", bundle, r=pa.array(values))
    with pytest.raises(PriorsError, match="expected a number for every label, found none for 2 of 60, the first 'item"):
        PriorTable(path).read(bundle, progress=quiet)
    priors = PriorTable(path, missing=missing).read(bundle, progress=quiet)  # type: ignore[arg-type]
    assert priors.values_LP[3:6, 0].tolist() == [expected, expected, -4]
    added = priors.added_values(np.array([-1, 5]), [{}, {}], np.zeros(2, np.int8), bundle.labels.display.column)
    assert added.tolist() == [[expected], [-4]]


def test_every_kind_of_table_of_priors_is_read_by_the_same_rules(bundle: Bundle, tmp_path: Path) -> None:
    """Quoted titles, words for nothing, exponents, booleans and decimals; gzip, JSON lines, folders and URLs."""
    ids = bundle.labels.ids.to_pylist()
    rows = [
        ("NA" if at == 3 else f"{at / 1e7!r}", "yes, no" if at else "", at % 2 == 0, f"{at / 4:.2f}") for at in range(L)
    ]
    lines = [
        f'{id_},{small},"{title}",{str(in_stock).upper()},{price}'
        for id_, (small, title, in_stock, price) in zip(ids, rows, strict=True)
    ]
    text = "\ufefflabel_id,small,title,in_stock,price\r\n" + "\r\n".join(lines)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "folder").mkdir()
    for part in range(2):
        of_part = zip(ids[part::2], rows[part::2], strict=True)
        (tmp_path / "folder" / f"{part}.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "label_id": id_,
                        "small": None if small == "NA" else float(small),
                        "in_stock": in_stock,
                        "price": price,
                    }
                )
                + "\n"
                for id_, (small, _, in_stock, price) in of_part
            )
        )
    limits = {name: Limits(0, 1) for name in ("small", "in_stock", "price")}
    expected = np.array([[at / 1e7, at % 2 == 0, at / 4] for at in range(L)], np.float32)
    expected[3, 0] = 9
    for source in (tmp_path / "t.csv.gz", tmp_path / "folder", f"file://{tmp_path}/t.csv.gz"):
        priors = PriorTable(source, limits, missing=9).read(bundle, progress=quiet)
        assert priors.names == ["small", "in_stock", "price"]
        np.testing.assert_array_equal(priors.values_LP, expected)


@pytest.mark.parametrize("ids", [[float(at) for at in range(L)], [f"{at}.0" for at in range(L)], [*range(L)]])
def test_whole_floats_are_the_ids_of_integers(ids: list[object], bundle: Bundle, tmp_path: Path) -> None:
    labels = replace(bundle.labels, ids=pa.array(map(str, range(L))))
    pq.write_table(pa.table({"label_id": ids, "r": np.arange(L)}), tmp_path / "t.parquet")
    priors = PriorTable(tmp_path / "t.parquet").read(replace(bundle, labels=labels), progress=quiet)
    assert priors.values_LP[:, 0].tolist() == [*range(L)]


BROKEN = {
    "a line": ("label_id,r\nitem-1,1\nitem-2\nitem-3\n", r"t\.csv: line 3 and 1 more: expected 2 columns, found 1"),
    "a word": (
        "label_id,r\nitem-1,1\nitem-2,soon\n",
        r"column 'r', row 1: expected a number that float32 holds, found 'soon'",
    ),
    "a quotation": ('label_id,r\nitem-1,"1\nitem-2,2\n', "column 'r', row 0: expected a number that float32 holds"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_table_is_refused_with_its_row(what: str, bundle: Bundle, tmp_path: Path) -> None:
    text, message = BROKEN[what]
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(PriorsError, match=message):
        PriorTable(tmp_path / "t.csv", missing=0).read(bundle, progress=quiet)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no priors": ({}, r"expected 1 to 8 priors, found \[\]"),
    "text": ({"r": ["x"] * L}, "column 'r', row 0: expected a number that float32 holds, found 'x'"),
    "infinite": ({"r": [1.0] * 9 + [1e39] * (L - 9)}, r"column 'r', row 9: expected a number that float32 holds"),
    "too many": ({f"r{column}": [1.0] * L for column in range(9)}, "expected 1 to 8 priors"),
}


@pytest.mark.parametrize(("columns", "message"), REFUSED.values(), ids=REFUSED)
def test_a_table_that_cannot_be_read_is_refused(
    columns: dict[str, object], message: str, bundle: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(PriorsError, match=message):
        PriorTable(write(tmp_path / "t.parquet", bundle, **columns)).read(bundle, progress=quiet)


def test_repeated_ids_missing_columns_and_files_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    def read(**table: object) -> None:
        pq.write_table(pa.table(table), tmp_path / "t.parquet")
        PriorTable(tmp_path / "t.parquet", {"r": Limits(0, 1)}).read(bundle, progress=quiet)

    with pytest.raises(PriorsError, match=r"expected every id once, found \['item-1'\] more often"):
        read(label_id=["item-1", "item-1"], r=[1, 2])
    with pytest.raises(PriorsError, match="expected an id in every row, found 1 nulls"):
        read(label_id=["item-1", None], r=[1, 2])
    with pytest.raises(PriorsError, match="expected a column 'label_id', found id, r"):
        read(id=["item-1"], r=[1])
    with pytest.raises(PriorsError, match=r"expected a column for each prior \['r'\], found none for \['r'\]"):
        read(label_id=["item-1"], s=[1])
    (tmp_path / "t.parquet").write_text("label_id,r")
    with pytest.raises(PriorsError, match=r"t\.parquet: expected a readable parquet file"):
        PriorTable(tmp_path / "t.parquet").read(bundle, progress=quiet)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("table = 3", "table"),
        ("table", r"priors\.toml: expected a TOML file of priors"),
        ("limits = 3", "limits: Unexpected keyword argument"),
        ("[slopes]\nprice = { minimum = 0 }", "slopes.price.*maximum: Field required"),
        ("[slopes]\nprice = { minimum = 0, maximum = inf }", "prior: expected finite weights"),
        ("[slopes]\nprice = { minimum = 0, maximum = 1, middle = 0 }", "middle: Unexpected keyword argument"),
        ("exposed = { half_life = '7d', limits = { minimum = 1, maximum = -1 } }", "prior: expected finite weights"),
        ("[table]\npath = 't.csv'\nmissing = 'mean'", "missing"),
        ("[bonuses]\npromoted = 'red'", "bonuses.promoted"),
    ],
)
def test_wrong_files_of_priors_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "priors.toml").write_text(text)
    with pytest.raises(PriorsError, match=message):
        PriorSpec.load(str(tmp_path / "priors.toml"))


def test_a_file_of_priors_has_the_fields_of_the_spec(tmp_path: Path) -> None:
    (
        tmp_path / "priors.toml"
    ).write_text("""exposed = { half_life = "7d", limits = { minimum = -1, maximum = 0, default = -0.3 } }

[table]
path = "margins.parquet"
missing = "median"
limits.recent = { minimum = 0, maximum = 2 }

[bonuses.promoted]
seller = "s1"

[decay]
since = "1d"

[slopes]
price = "auto"
weight = { minimum = -0.1, maximum = 0.1 }
""")
    assert PriorSpec.load(str(tmp_path / "priors.toml")) == PriorSpec(
        PriorTable(tmp_path / "margins.parquet", {"recent": Limits(0, 2)}, "median"),
        {"promoted": {"seller": "s1"}},
        {"since": "1d"},
        {"price": "auto", "weight": Limits(-0.1, 0.1)},
        Exposure("7d", Limits(-1, 0, -0.3)),
    )
    assert PriorSpec.load("s3://bucket/t.parquet") == PriorSpec("s3://bucket/t.parquet")
    (tmp_path / "priors.toml").write_text("table = \"SELECT * FROM 'margins.parquet'\"")
    table = PriorSpec.load(str(tmp_path / "priors.toml")).table
    assert isinstance(table, PriorTable)
    assert str(tmp_path / "margins.parquet") in str(table.path)


@pytest.mark.parametrize("spec", ["flat", "ivf_flat", "ivf_sq"])
def test_a_release_scores_by_formula_before_and_after_a_refresh(spec: str, tmp_path: Path) -> None:
    bundle = make_bundle(labels=700, bias=True, popularity=True, queries=20).write(tmp_path / "model")
    rng = np.random.default_rng(1)

    def table(name: str) -> tuple[Path, np.ndarray]:
        values = np.stack([rng.normal(0, 2, 700), rng.lognormal(1, 1, 700)], 1).astype(np.float32)
        return write(tmp_path / name, bundle, recent=values[:, 0], margin=values[:, 1]), values

    (path, values), (later, values_later) = table("t.parquet"), table("u.csv")
    limits = {"recent": Limits(-1, 1.5), "margin": Limits(0, 0.2)}
    built = build(bundle, tmp_path / "r", spec=spec, name="first", priors=PriorTable(path, limits))
    corners = [at for at in built.recall if at.priors["margin"] > 0]
    assert min(at.recall for at in built.recall) >= 0.95
    assert {(at.bias_removal, at.priors["recent"], at.priors["margin"]) for at in corners} == {
        (dial, recent, 0.2) for dial in (-1, 0.5, 2) for recent in (-1, 1.5)
    }
    open_releases(tmp_path / "r").publish("first")
    refreshed = refresh_priors(tmp_path / "r", later, name="second")
    assert refreshed.kind == built.kind
    first, second = (open_releases(tmp_path / "r").open(name).searcher.index for name in (built.name, "second"))
    if first.has_lists:
        np.testing.assert_array_equal(first.centroids, second.centroids)
    before, after = (open_releases(tmp_path / "r").open(name) for name in ("first", "second"))
    weights = np.float32([1.3, 0.15, 0, 0, 0])
    for release, numbers in ((before, values), (after, values_later)):
        queries = release.bundle.augmentation.queries(bundle.calibration_queries[:20], 0.3, 0.4, weights)
        scores, rows = release.searcher.search(queries, 10)
        formula = (
            bundle.calibration_queries[:20].astype(float) @ bundle.embeddings.T / bundle.manifest.temperature
            + bundle.labels.bias
            + 0.3 * bundle.labels.log_pn
            + 0.4 * bundle.labels.log_popularity
            + numbers @ weights[:2]
        )
        row_scores = np.take_along_axis(formula, rows, 1)
        np.testing.assert_allclose(scores / bundle.manifest.temperature, row_scores, rtol=1e-4, atol=1e-4)
        best = -np.sort(-formula, 1)[:, :10]
        if spec in ("ivf_sq", "ivf_fastscan"):
            assert (row_scores >= best[:, -1:] - 1e-4).mean() >= 0.95
        else:
            np.testing.assert_allclose(row_scores, best, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "r/first/bundle/embeddings.npy").samefile(tmp_path / "r/second/bundle/embeddings.npy")


def test_the_head_by_max_score_has_labels_that_a_prior_lifts() -> None:
    bundle = make_bundle(labels=6000, dim=16, queries=20)
    values = np.random.default_rng(2).lognormal(1, 1, (6000, 1)).astype(np.float32)
    from_table = PriorTable(Path("-"))._setting("margin", values[:, 0], 0.0, bundle, None)
    with_priors = replace(bundle, priors=Priors((from_table,), values))
    first = order_by_max_score(with_priors, None, Calibration(with_priors, None))[:10]
    assert {values.argmax(), bundle.labels.log_pi.argmax()} <= set(first)
    chosen = tune_index(with_priors, IndexSpec("ivf_flat", 0), quiet)
    assert chosen.chosen.lowest.recall >= 0.99


def test_a_refresh_below_the_floor_leaves_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle(labels=60).write(tmp_path / "model")
    path = write(tmp_path / "t.parquet", bundle, r=np.arange(60))
    build(bundle, tmp_path / "r", spec="ivf_flat", name="first", priors=path)
    measure = Calibration.measure

    def worse(self: Calibration, searcher: object) -> object:
        recall, rate = measure(self, searcher)  # type: ignore[arg-type]
        return [at.model_copy(update={"recall": at.recall / 2}) for at in recall], rate

    monkeypatch.setattr(Calibration, "measure", worse)
    with pytest.raises(RecallFloorError, match=r"measured 0.5000 at λ = .*Use --spec flat, or lower --recall"):
        refresh_priors(tmp_path / "r", path, source="first", name="second")
    assert open_releases(tmp_path / "r").names() == ["first"]


def test_impossible_refreshes_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", bundle, r=np.arange(L), s=np.arange(L))
    build(bundle, tmp_path / "r", name="none")
    build(bundle, tmp_path / "r", name="one", priors=PriorTable(path, {"r": Limits(0, 1)}))
    with pytest.raises(LongtailIndexError, match="expected a published release, or the path of one, found nothing"):
        refresh_priors(tmp_path / "r", path)
    with pytest.raises(PriorsError, match="none: expected a release that was built with priors, found one without"):
        refresh_priors(tmp_path / "r", path, source="none")
    with pytest.raises(PriorsError, match=r"expected one of the release's, \['r'\], received 's'; a further prior"):
        refresh_priors(tmp_path / "r", PriorTable(path, {"s": Limits(0, 1)}), source="one")
    narrower = refresh_priors(tmp_path / "r", PriorTable(path, {"r": Limits(0, 0.5)}), source="one", name="two")
    assert max(at.priors["r"] for at in narrower.recall) == 0.5


def test_a_refresh_of_a_pruned_release_fails_without_leftovers(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", bundle, r=np.arange(L))
    for name in ("source", "newer"):
        build(bundle, tmp_path / "r", name=name, priors=path)
    releases = open_releases(tmp_path / "r")
    with pytest.raises(LongtailIndexError, match="deleted while its release was written"):
        refresh_priors(
            releases.root, path, source="source", name="late", progress=lambda _: releases.prune(keep=1) and None
        )
    assert releases.names() == ["newer"]


def test_a_release_that_drops_a_prior_is_not_published(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", bundle, r=np.arange(L))
    build(bundle, tmp_path / "r", name="with", priors=path)
    build(bundle, tmp_path / "r", name="without")
    shelf = open_releases(tmp_path / "r")
    shelf.publish("with")
    with pytest.raises(NotPublishableError, match="prior 'r': expected as in the published release, found none"):
        shelf.publish("without")
    shelf.publish("without", force=True)
    assert shelf.current() == "without"


def test_bonuses_slopes_and_decay_stay_in_later_releases(tmp_path: Path) -> None:
    bundle = shop_bundle().write(tmp_path / "model")
    path = write(tmp_path / "t.parquet", bundle, r=np.arange(400))
    (tmp_path / "priors.toml").write_text(f"""table = "{path.name}"
bonuses.bright.colour = "red"
decay.since = "7d"
slopes.price = {{ minimum = -2, maximum = 1, default = 0.5 }}
""")
    options = ["--releases", tmp_path / "r", "--name", "one", "--publish", "--priors", tmp_path / "priors.toml"]
    assert run("build", tmp_path / "model", *options) == 0
    shelf, columns = open_releases(tmp_path / "r"), bundle.labels.display
    before = shelf.open("one").bundle
    names = ["r", "bonus.torso", "bonus.tail", "bonus.new", "bonus.bright", "slope.price", "decay.since"]
    assert before.priors.names == names
    days = [None if day is None else (day - date(2026, 2, 9)).days for day in columns["since"].to_pylist()]
    oldest = min(day for day in days if day is not None)
    decay = before.priors.settings[-1]
    assert (decay.minimum, decay.maximum) == (0, pytest.approx(np.log(2) / 7))
    assert before.priors.values_LP[:, -1].tolist() == [oldest if day is None else day for day in days]
    price = columns["price"].to_numpy()
    expected = np.nan_to_num(price - np.nanmedian(price))
    np.testing.assert_allclose(before.priors.values_LP[:, -2], expected, atol=1e-6)
    assert before.priors.values_LP[:, 4].tolist() == [colour == "red" for colour in columns["colour"].to_pylist()]
    assert before.priors.values_LP[:, 2].tolist() == (bundle.labels.buckets == 2).tolist()

    write(path, bundle, r=2 * np.arange(400))
    assert run("priors", shelf.root / "one", tmp_path / "priors.toml") == 0
    (made_name,) = {*shelf.names()} - {"one"}
    np.testing.assert_array_equal(shelf.open(made_name).bundle.priors.values_LP[:, 0], 2 * np.arange(400))
    refresh_priors(shelf.root, write(tmp_path / "u.csv", bundle, r=-np.arange(400)), name="two")
    after = shelf.open("two").bundle.priors
    assert after.names == names
    np.testing.assert_array_equal(after.values_LP[:, 0], -np.arange(400))
    np.testing.assert_array_equal(after.values_LP[:, 1:], before.priors.values_LP[:, 1:])

    records = [
        Upsert(id="fresh", at=AT, features={"genres": ["g1"]}, display={"colour": "red", "since": "2026-02-10"}),
        Patch(id="item-3", at=AT, display={"colour": "red", "price": None}),
    ]
    merged, _ = with_changes(before, replay(records))
    assert merged.priors.values_LP[400].tolist() == [199.5, 0, 0, 1, 1, 0, 1]
    assert merged.priors.values_LP[3, 4:6].tolist() == [1, 0]

    build(bundle, shelf.root, name="less", priors=PriorSpec(path, decay={"since": "7d"}, slopes={"price": "auto"}))
    with pytest.raises(NotPublishableError, match=r"prior 'bonus\.bright': expected as in the published release"):
        shelf.publish("less")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bonuses": {"tail": {"open": True}}}, "bonus: expected another name than a bucket's, received 'tail'"),
        ({"bonuses": {"x": {}}}, "bonus.x: expected a filter with a condition, received none"),
        ({"bonuses": {"x": {"colr": "red"}}}, "bonus.x: expected display columns, .* received 'colr'"),
        ({"bonuses": {"x": {"price": "red"}}}, "bonus.x.price: expected a finite number"),
        (
            {"decay": {"price": "1d"}},
            r"decay.price: expected a display column of kind date with values, one of \['since'",
        ),
        ({"decay": {"since": "1"}}, "decay.since: expected a span such as '90m'"),
        ({"slopes": {"since": "auto"}}, "slope.since: expected a display column of kind number"),
        ({"bonuses": {f"x{n}": {"open": True} for n in range(9)}}, "expected at most 8 priors, bonuses, slopes and"),
    ],
)
def test_impossible_bonuses_slopes_and_decay_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PriorsError, match=message):
        PriorSpec(**options).read(shop_bundle())


def test_damaged_priors_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", bundle, r=np.arange(L))
    build(bundle, tmp_path / "r", name="one", priors=path)
    release = tmp_path / "r/one"
    manifest = ReleaseManifest.model_validate_json((release / "release.json").read_text())
    assert read_priors(release, manifest) is not None
    for wrong in (np.zeros((L, 2), np.float32), np.zeros((L, 4)), np.full((L, 4), np.nan, np.float32)):
        np.save(release / "index/priors.npy", wrong)
        with pytest.raises(ReleaseCorruptError, match=r"priors.npy: expected finite float32 \[60, 4\], found float"):
            read_priors(release, manifest)
    with pytest.raises(ReleaseCorruptError, match=r"priors.npy: expected sha256"):
        open_releases(tmp_path / "r").open("one")
    (release / "index/priors.npy").write_bytes(b"garbled")
    with pytest.raises(ReleaseCorruptError, match=r"priors.npy: expected a NumPy array file"):
        read_priors(release, manifest)
    (release / "index/priors.npy").unlink()
    with pytest.raises(ReleaseCorruptError, match=r"priors.npy: expected a NumPy array file, found none"):
        read_priors(release, manifest)
