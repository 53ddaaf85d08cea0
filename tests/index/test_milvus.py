"""The search contract on Milvus: what holds for FAISS, flat and banded, holds for both kinds of collection."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.index import (
    EngineUnavailableError,
    Filter,
    FilterMask,
    LongtailIndexError,
    MilvusServer,
    RecallFloorError,
    Release,
    SpecError,
    build,
    open_releases,
    refresh_priors,
)
from tests.bundles import make_bundle
from tests.index import test_filters, test_hidden, test_search
from tests.milvus import COLLECTIONS, RunningMilvus, milvus as milvus
from tests.serving.core import test_milvus as test_served
from tests.serving.core.shop import shop_bundle

if TYPE_CHECKING:
    from pymilvus import MilvusClient

pytestmark = pytest.mark.process
LABELS = 6_000


@pytest.fixture(scope="module")
def opened(milvus: RunningMilvus, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Release]:  # noqa: ARG001
    """Opens the release of a kind over one bundle, building it the first time."""
    folder = tmp_path_factory.mktemp("milvus")
    make_bundle(labels=LABELS, dim=8, bias=True).write(folder / "bundle")
    releases: dict[str, Release] = {}

    def open_(spec: str) -> Release:
        if spec not in releases:
            build(folder / "bundle", folder / "releases", spec=spec, name=spec)
            releases[spec] = open_releases(folder / "releases").open(spec)
        return releases[spec]

    return open_


@pytest.mark.parametrize("spec", [COLLECTIONS[0], pytest.param(COLLECTIONS[1], marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "contract",
    [
        test_search.test_every_kind_scores_exactly_and_recalls,
        test_search.test_k_beyond_the_catalogue_returns_every_label_once,
        test_filters.test_filters_worked_case_by_case,
        test_hidden.test_hidden_labels_are_never_answered_under_any_filter,
        test_filters.test_any_filter_fills_k,
        test_filters.test_recall_holds_under_a_bucket_filter,
        test_hidden.test_recall_holds_when_the_best_labels_are_hidden,
    ],
    ids=lambda contract: contract.__name__.removeprefix("test_"),
)
def test_contract(
    contract: Callable[[str, Callable[[str], Release]], None], spec: str, opened: Callable[[str], Release]
) -> None:
    contract(spec, opened)


def test_the_exact_kind_answers_like_faiss(opened: Callable[[str], Release]) -> None:
    flat, milvus = opened("flat"), opened("milvus_flat")
    rng = np.random.default_rng(0)
    queries = flat.bundle.augmentation.queries(flat.bundle.calibration_queries, rng.uniform(-1, 2, 50).astype("f4"))
    filters: list[Filter | None] = [
        None,
        Filter(exclude=rng.choice(LABELS, 40)),
        Filter(buckets=frozenset({2})),
        Filter(allow=rng.choice(LABELS, 3_000)),
        Filter(selection=FilterMask(rng.random(LABELS) < 0.4)),
    ] * 10
    expected, results = (release.searcher.search(queries, 30, filters) for release in (flat, milvus))
    np.testing.assert_allclose(results[0], expected[0], atol=1e-5)
    assert (results[1] == expected[1]).mean() > 0.999  # ties


@pytest.mark.parametrize("in_expression", [pytest.param(10_000, marks=pytest.mark.nightly), 50])
@pytest.mark.parametrize("share", [pytest.param(0.3, marks=pytest.mark.nightly), 0.97])
@pytest.mark.parametrize("spec", [COLLECTIONS[0], pytest.param(COLLECTIONS[1], marks=pytest.mark.nightly)])
def test_answers_are_complete_where_many_labels_are_hidden(
    spec: str, share: float, in_expression: int, opened: Callable[[str], Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.index.search.milvus_searcher._MOST_IN_EXPRESSION", in_expression)
    release = opened(spec)
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries[:4], 0.5)
    best = np.argsort(-(queries[0] @ release.bundle.rows().T))
    hidden = best[: int(share * LABELS)]
    filters = [None, Filter(exclude=best[-50:]), Filter(buckets=frozenset({1, 2})), Filter(allow=best[::2])]
    searcher = release.searcher.without(hidden)
    flat = opened("flat").searcher.without(hidden)
    for k in (1, 60, 400):
        (scores, rows), expected = searcher.search(queries, k, filters), flat.search(queries, k, filters)
        assert not np.isin(rows, hidden).any()
        assert (np.isfinite(scores) == np.isfinite(expected[0])).all()
        if spec == "milvus_flat":
            np.testing.assert_allclose(scores, expected[0], atol=1e-5)


@pytest.mark.nightly
def test_prune_drops_a_collection_that_no_release_holds(opened: Callable[[str], Release], tmp_path: Path) -> None:
    other_release = opened("milvus_flat")
    bundle = make_bundle(labels=1_200, seed=1).write(tmp_path / "bundle")
    releases = open_releases(tmp_path / "releases")
    for name, filterable in (("one", ["title"]), ("two", ["title"]), ("three", [])):
        build(bundle, releases.root, spec="milvus_flat", name=name, filterable=filterable)
    named = {name: _named(releases.open(name)) for name in releases.names()}
    assert len({*named.values()}) == 3
    for name in ("one", "three"):
        releases.publish(name)
    assert releases.rollback() == "one"
    releases.publish("three")
    assert releases.prune(1) == ["two"]
    assert _collections(other_release) & set(named.values()) == {named["one"], named["three"]}
    releases.publish("three")
    build(bundle, releases.root, spec="flat", name="four")
    releases.publish("four")
    assert releases.prune(1) == ["one"]
    assert _collections(other_release) & set(named.values()) == {named["three"]}


@pytest.mark.nightly
def test_a_changed_collection_is_not_published(opened: Callable[[str], Release], tmp_path: Path) -> None:
    release = opened("milvus_flat")
    releases = open_releases(tmp_path)
    build(release.bundle, tmp_path, spec="milvus_flat", name="one", filterable=[])
    name = _named(releases.open("one"))
    client = _client(release)
    rows = client.query(name, filter="row < 3000", output_fields=["*"], limit=3_000)
    client.upsert(name, [{**row, "vector": [-number for number in row["vector"]]} for row in rows])
    with pytest.raises(RecallFloorError, match=r"expected recall@100 >= 0\.95 .* Use --spec milvus_flat"):
        _eventually(lambda: releases.publish("one"))
    client.delete(name, filter="row < 10")
    with pytest.raises(LongtailIndexError, match="expected 6000 rows of 13 coordinates, found 5990 of 13"):
        _eventually(lambda: releases.open("one"))
    client.drop_collection(name)
    with pytest.raises(
        EngineUnavailableError, match=rf"Milvus at http://127\.0\.0\.1:\d+, collection {name}: can't find"
    ):
        releases.open("one")


@pytest.mark.nightly
def test_labels_of_long_texts_are_written_in_parts(
    opened: Callable[[str], Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.index.building.milvus._BATCH_BYTES", 100_000)
    bundle = make_bundle(labels=1_100, dim=4)
    long = replace(bundle.labels, display=pa.table({"text": [f"{row} {'é' * 900}" for row in range(1_100)]}))
    manifest = bundle.manifest.model_copy(update={"display": ["text"]})
    replace(bundle, labels=long, manifest=manifest).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec="milvus_flat", name="a")
    release = open_releases(tmp_path / "releases").open("a")
    entities = _client(opened("milvus_flat")).query(
        _named(release), filter="row in [0, 1099]", output_fields=["display", "value_0"], consistency_level="Strong"
    )
    assert sorted(row["display"]["text"][:4] for row in entities) == ["0 éé", "1099"]


def test_filters_are_the_servers_own_and_equal_masks(milvus: RunningMilvus, tmp_path: Path) -> None:  # noqa: ARG001
    """Here, where a server runs already; other answers over Milvus are nightly."""
    shop_bundle(test_served.LABELS, cooccurrence=True).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec="milvus_flat", name="milvus_flat")
    test_served.filters_are_the_servers_own_and_equal_masks(open_releases(tmp_path / "releases"))


def test_a_build_that_fails_leaves_no_collection_behind(
    opened: Callable[[str], Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _collections(opened("milvus_flat"))
    bundle = make_bundle(labels=2_000, dim=8)
    long = replace(bundle.labels, display=pa.table({"title": ["x" * 70_000] * 2_000}))
    replace(bundle, labels=long, manifest=bundle.manifest.model_copy(update={"display": ["title"]})).write(
        tmp_path / "long"
    )
    with pytest.raises(SpecError, match="label 'item-0': expected display columns of at most 65,536 bytes as JSON"):
        build(tmp_path / "long", tmp_path / "releases", spec="milvus")
    monkeypatch.setattr("longtail.index.building.milvus.MOST_FIELDS", 6)
    with pytest.raises(SpecError, match=r"expected at most 0 display columns to filter by, .* --filterable says which"):
        build(tmp_path / "long", tmp_path / "releases", spec="milvus")
    make_bundle(labels=60).write(tmp_path / "small")
    for spec, least in (("milvus", "1,024"), ("milvus_ivf_flat", "2,048")):
        with pytest.raises(SpecError, match=f"expected at least {least} labels, received 60; use --spec flat"):
            build(tmp_path / "small", tmp_path / "releases", spec=spec)
    assert _collections(opened("milvus_flat")) == before
    assert open_releases(tmp_path / "releases").names() == []


@pytest.mark.nightly
def test_other_priors_make_another_collection(opened: Callable[[str], Release], tmp_path: Path) -> None:
    release = opened("milvus_flat")
    table = {"label_id": release.bundle.labels.ids, "recent": np.linspace(-1, 1, LABELS)}
    pq.write_table(pa.table(table), tmp_path / "priors.parquet")
    build(release.bundle, tmp_path / "r", spec="milvus_ivf_flat", name="one", priors=tmp_path / "priors.parquet")
    releases = open_releases(tmp_path / "r")
    pq.write_table(pa.table(table | {"recent": np.linspace(1, -1, LABELS)}), tmp_path / "priors.parquet")
    refresh_priors(tmp_path / "r", tmp_path / "priors.parquet", source="one", name="two")
    first, second = (releases.open(name) for name in ("one", "two"))
    assert len({_named(version) for version in (release, first, second)}) == 3
    for version in (first, second):
        queries = version.bundle.augmentation.queries(
            version.bundle.calibration_queries[:5], 0.5, 0.0, np.full((5, 1), 2, np.float32)
        )
        expected = -np.sort(-(queries @ version.bundle.rows().T), axis=1)[:, :20]
        np.testing.assert_allclose(version.searcher.search(queries, 20)[0], expected, atol=1e-4)


def test_a_search_of_many_filters_has_one_deadline(
    opened: Callable[[str], Release], milvus: RunningMilvus, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = opened("milvus_flat")
    monkeypatch.setattr(release.searcher.collection, "patient", False)
    monkeypatch.setattr(release.searcher.collection.server, "seconds", 1.0)
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries[:40], 0.5)
    filters = [Filter(exclude=np.arange(300 + query)) for query in range(40)]
    expected = release.searcher.search(queries, 5, filters)[1].tolist()
    milvus.pause()
    try:
        began = time.monotonic()
        with pytest.raises(EngineUnavailableError):
            release.searcher.search(queries, 5, filters)
        assert time.monotonic() - began < 5
    finally:
        milvus.resume()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(EngineUnavailableError):
            assert release.searcher.search(queries, 5, filters)[1].tolist() == expected
            return
        time.sleep(0.2)
    pytest.fail("expected the server to answer again within 60 s")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("127.0.0.1:19530", r"LONGTAIL_MILVUS: expected http://HOST:PORT or .*, received '127\.0\.0\.1:19530'"),
        ("ftp://host", "received 'ftp://host'"),
        ("user:secret@host:19530", "received one with a user, which is for LONGTAIL_MILVUS_TOKEN"),
        ("http://user:se/cret@host:19530", "received one with a user"),
        ("http://[::1", "received 'http://"),
        ("http://host:port", "received 'http://host:port'"),
    ],
)
def test_invalid_server_addresses_are_refused(uri: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        MilvusServer(uri)
    assert "secret" not in str(caught.value).replace("/", "")


def test_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGTAIL_MILVUS", raising=False)
    with pytest.raises(
        SpecError, match=r"expected the address of a Milvus server in LONGTAIL_MILVUS, .* received none"
    ):
        MilvusServer.named()


def _client(release: Release) -> MilvusClient:
    return release.searcher.collection.server._connected(10)


def _collections(release: Release) -> set[str]:
    return set(_client(release).list_collections())


def _named(release: Release) -> str:
    assert release.manifest.collection is not None
    return release.manifest.collection.name


def _eventually(work: Callable[[], object], seconds: float = 10) -> None:
    """Repeat until Milvus shows a change, and raise the error that it causes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()
        time.sleep(0.2)
