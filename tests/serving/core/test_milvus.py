"""A retriever over Milvus answers as one over FAISS, under every filter and after every change; filters are its own."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Hide, Restore, Upsert
from longtail.bundle.arrays import Float32
from longtail.index import Filter, PriorSpec, Releases, build, open_releases
from longtail.index.search.milvus_searcher import ALL_LISTS, MilvusSearcher
from longtail.serving import Retriever
from longtail.serving.core import lifetimes
from longtail.serving.core.attributes import LabelAttributes
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from tests.bundles import make_bundle
from tests.milvus import COLLECTIONS, RunningMilvus, milvus as milvus
from tests.serving.core.shop import DATED, dated, draw_filter, shop_bundle
from tests.serving.plane import read_results

pytestmark = [pytest.mark.process, pytest.mark.nightly]
LABELS = 3_000
AT = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def releases(milvus: RunningMilvus, tmp_path_factory: pytest.TempPathFactory) -> Releases:  # noqa: ARG001
    root = tmp_path_factory.mktemp("shops")
    dated(shop_bundle(LABELS, cooccurrence=True)).write(root / "bundle")
    for spec in ("flat", *COLLECTIONS):
        _build(open_releases(root / "releases"), spec)
    return open_releases(root / "releases")


def _build(releases: Releases, spec: str) -> None:
    build(
        releases.root.parent / "bundle", releases.root, spec=spec, name=spec,
        priors=PriorSpec(bonuses={"open": {"open": True}}, decay={"since": "10d"}, slopes={"price": "auto"}),
    )  # fmt: skip


def rows_that_meet(searcher: MilvusSearcher, queries: Float32, expression: str) -> set[int]:
    """Get the rows for which the server itself finds an expression true."""
    _, rows = searcher.collection.search(queries, searcher.labels, ALL_LISTS, expression)
    return set(rows[rows >= 0].tolist())


def filters_are_the_servers_own_and_equal_masks(releases: Releases) -> None:
    """Compare what the server finds by an expression with the mask of the same filter."""
    release = releases.open("milvus_flat")
    searcher, display = release.searcher, release.bundle.labels.display
    assert isinstance(searcher, MilvusSearcher)
    attributes = LabelAttributes(display)
    rng = np.random.default_rng(1)
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries[:1], 0.5)
    passed, history = [], set[int]()
    for _ in range(100):
        filter_ = draw_filter(rng)
        selection, _ = attributes.select(filter_, "filter")
        if id(selection) in history:
            continue
        history.add(id(selection))
        expression = searcher._expression(Filter(selection=selection))
        assert rows_that_meet(searcher, queries, expression) == set(np.flatnonzero(selection.mask)), filter_
        _, rows = searcher.search(queries, 100, [Filter(selection=selection)])
        matched_rows = rows[0][rows[0] >= 0]
        count = np.count_nonzero(selection.mask)
        assert len(matched_rows) == min(100, count)
        assert selection.mask[matched_rows].all()
        passed.append(count)
    assert {0, LABELS} < set(passed)


def test_numbers_at_the_ends_of_their_types(releases: Releases, tmp_path: Path) -> None:
    labels, least, most = 1_100, -(2**63), 2**63 - 1
    item = np.arange(labels)

    def some(values: list[Any], type_: pa.DataType) -> pa.Array:
        return pa.array([values[row % len(values)] for row in item], type_)

    infinite = [float("-inf"), -1.5, 0.1, None, float("nan"), 1.5, float("inf")]
    columns = pa.table(
        {
            "half": pa.array([None if value is None else np.float16(value) for value in np.resize(infinite, labels)]),
            "single": some(infinite, pa.float32()),
            "double": some([*infinite, 1.7976931348623157e308], pa.float64()),
            "long": some([least, least + 1, -1, 0, None, 7, most - 1, most], pa.int64()),
            "byte": some([0, 7, 255, None], pa.uint8()),
        }
    )
    bundle = make_bundle(labels=labels)
    manifest = bundle.manifest.model_copy(update={"display": columns.column_names})
    replace(bundle, labels=replace(bundle.labels, display=columns), manifest=manifest).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec="milvus_flat", name="a")
    release = open_releases(tmp_path / "releases", milvus=releases.milvus()).open("a")
    attributes, searcher = LabelAttributes(release.bundle.labels.display), release.searcher
    assert isinstance(searcher, MilvusSearcher)
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries[:1], 0.5)
    values = [least - 1, least, least + 1, -1.5, 0, 0.1, 6.5, 7, 255, 256, most, most + 1, 1e300, -1e300, 10**400]
    history = set[int]()
    for column in columns.column_names:
        for value in values:
            for operator in ("eq", "ne", "in", "not_in", "lt", "le", "gt", "ge"):
                filter_ = {column: {operator: [value, 7] if "in" in operator else value}}
                selection, _ = attributes.select(filter_, "filter")
                expression = searcher._expression(Filter(selection=selection))
                met = rows_that_meet(searcher, queries, expression)
                assert met == set(np.flatnonzero(selection.mask)), (filter_, expression)
                history.add(len(met))
    assert len(history) > 8


@pytest.mark.parametrize("name", COLLECTIONS)
def test_answers_equal_those_of_faiss(name: str, releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, milvus = (load_release(releases, item, max_new_labels=500) for item in ("flat", name))
    rng = np.random.default_rng(3)
    pairs = [(exact, milvus), (changed(exact), changed(milvus)), (exact, milvus)]
    for seconds, (exact, milvus) in zip((-5, 0, 40), pairs, strict=True):
        monkeypatch.setattr(lifetimes, "now", lambda: DATED.timestamp() + seconds)  # noqa: B023
        assert 0.2 < exact.availability["labels"] / LABELS < 0.8
        queries = [_query(rng) for _ in range(60)]
        agreed = _agreement(read_results(exact.retrieve(queries)), read_results(milvus.retrieve(queries)))
        assert agreed == 1 if name == "milvus_flat" else agreed > 0.97
    near = SimilarQuery(id="item-7", k=20, filter={"open": True})
    assert _agreement(read_results(exact.similar([near])), read_results(milvus.similar([near]))) > 0.94


def test_answers_match_the_rows_of_milvus(releases: Releases) -> None:
    release = releases.open("milvus_flat")
    searcher = release.searcher
    assert isinstance(searcher, MilvusSearcher)
    record = searcher.collection.record
    milvus_rows = searcher.collection.server.ask(
        lambda client, seconds: client.query(
            record.name, filter="row in [0, 7, 2999]", output_fields=["label_id", "bucket", "display"], timeout=seconds
        )
    )
    served = load_release(releases, "milvus_flat")
    for row in milvus_rows:
        label = served.label(row["label_id"])
        assert row["display"] == label["display"]
        assert ["head", "torso", "tail", "new"][row["bucket"]] == label["bucket"]


def changed(retriever: Retriever) -> Retriever:
    """With labels hidden, restored, embedded anew and added."""
    rng = np.random.default_rng(2)
    hidden = [f"item-{row}" for row in rng.choice(LABELS, 300, replace=False)]
    records: list[Any] = [Hide(id=id_, at=AT) for id_ in hidden]
    records += [Restore(id=id_, at=AT) for id_ in hidden[:50]]
    for i, row in enumerate(rng.choice(LABELS, 60, replace=False).tolist()):
        id_ = f"item-{row}" if i % 2 else f"new-{row}"
        display = {"brand": f"brand-{row % 9}", "price": row / 100, "tags": ["t1", "fresh"]}
        records.append(Upsert(id=id_, at=AT + timedelta(seconds=i), features={"genres": ["g1"]}, display=display))
    return retriever.with_changes(records[:200]).with_changes(records[200:])


def _query(rng: np.random.Generator) -> RetrieveQuery:
    request: dict[str, Any] = {"features": {"user_id": f"u{rng.integers(20)}"}, "k": int(rng.integers(1, 150))}
    request["bias_removal"] = float(rng.choice([-1, 0, 0.5, 1, 2]))
    if rng.random() < 0.5:
        request["filter"] = draw_filter(rng)
    if rng.random() < 0.3:
        request["exclude"] = [f"item-{row}" for row in rng.choice(LABELS, rng.integers(1, 400))]
    if rng.random() < 0.2:
        request["allow"] = [f"item-{row}" for row in rng.choice(LABELS, rng.integers(1, 1_000))]
    if rng.random() < 0.3:
        request["buckets"] = ["torso", "tail"]
    if rng.random() < 0.5:
        request["bonus"] = {"tail": float(rng.uniform(-5, 5)), "open": float(rng.uniform(-5, 5))}
    if rng.random() < 0.3:
        request |= {"slope": {"price": float(rng.uniform(-1, 1))}, "decay": {"column": "since", "half_life": "30d"}}
    return RetrieveQuery.model_validate(request)


def _agreement(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> float:
    """The share of answered labels whose scores are as good; as many are answered."""
    good = count = 0
    for first, other in zip(expected, actual, strict=True):
        scores = [[label["score"] for label in answer["labels"]] for answer in (first, other)]
        assert len(scores[0]) == len(scores[1])
        count += len(scores[0])
        good += sum(abs(a - b) <= 1e-4 * max(1, abs(a)) for a, b in zip(*scores, strict=True))
    return good / count
