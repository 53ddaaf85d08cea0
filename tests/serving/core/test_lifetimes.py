"""Lifetimes of labels against brute force, by a clock that the tests set."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import BundleInvariantError, Hide, Patch, Restore, Upsert
from longtail.bundle.lifetimes import read_lifetimes
from longtail.index import IndexSpec, KnownQueries, Releases, build, open_releases
from longtail.serving import Retriever
from longtail.serving.batch import BatchError, TableOptions, answer
from longtail.serving.core import lifetimes
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.label_changes import LabelPatchById, LabelToAdd, create_patches, create_upserts
from longtail.serving.core.listing import LabelListing, list_labels
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import QueriesFor, RetrieveQuery, SimilarQuery
from longtail.serving.errors import InvalidRequestError
from tests.bundles import make_bundle
from tests.clock import Clock
from tests.serving.core.shop import DATED, LABELS, dated, draw_filter, meets, shop_bundle
from tests.serving.plane import make_retriever, read_results

AT = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(DATED.timestamp())
    monkeypatch.setattr(lifetimes, "now", clock)
    return clock


def alive(displayed: dict[str, Any], at: float) -> bool:
    """Whether a label that is shown so is available, from its texts."""
    begin, until = (displayed[name] or None for name in ("available_from", "available_until"))
    at_iso = datetime.fromtimestamp(at // 1, UTC)

    def time(text: str) -> datetime:
        time_ = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return time_ if time_.tzinfo else time_.replace(tzinfo=UTC)

    return (begin is None or time(begin) <= at_iso) and (until is None or at_iso < time(until))


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    root = tmp_path_factory.mktemp("shops")
    dated(shop_bundle(cooccurrence=True)).write(root / "bundle")
    for spec in ("flat", "ivf_flat"):
        build(root / "bundle", root / "releases", spec=IndexSpec(spec, recall_floor=0.0), name=spec)
    return open_releases(root / "releases")


def changed(retriever: Retriever) -> Retriever:
    """Hide, embed again, add and patch labels, each with lifetimes of its own."""
    rng = np.random.default_rng(2)
    rows = rng.choice(LABELS, 70, replace=False).tolist()
    records: list[Any] = [Hide(id=f"item-{row}", at=AT) for row in rows[:10]]
    for i, row in enumerate(rows[10:]):
        begin = DATED + timedelta(seconds=int(rng.integers(-60, 60)))
        lifetime: dict[str, Any] = {
            "available_from": begin.isoformat() if i % 3 else None,
            "available_until": (begin + timedelta(seconds=30)).isoformat() if i % 4 else None,
        }
        at = AT + timedelta(seconds=i)
        if i % 3 == 0:
            records.append(Patch(id=f"item-{row}", at=at, display=lifetime))
        else:
            id_ = f"item-{row}" if i % 2 else f"new-{row}"
            records.append(Upsert(id=id_, at=at, features={"genres": ["g1"]}, display=lifetime))
    return retriever.with_changes(records[:30]).with_changes(records[30:])


@pytest.mark.parametrize("spec", ["flat", "ivf_flat"])
def test_answers_are_the_best_available(spec: str, releases: Releases, clock: Clock) -> None:
    retriever = changed(load_release(releases, spec, max_new_labels=99))
    overlay, bundle, rng = retriever.overlay, retriever.bundle, np.random.default_rng(3)
    labels_json = retriever.catalogue.labels_json(range(overlay.labels))
    rows_LE = np.concatenate([bundle.rows(), overlay.rows.augmented_ME])
    visible = ~np.isin(np.arange(overlay.labels), overlay.masked)
    visible[overlay.base :] = overlay.rows.in_use_M
    filters = [draw_filter(rng) for _ in range(4)]
    answered_at_once, compared = set[int](), 0
    for step in range(80):
        # Mostly second by second, as caches of one second serve the next one; sometimes far, or back.
        clock.now += rng.choice([0, 0.4, 1, 1, 1, 30, -45])
        lives = np.array([alive(label["display"], clock.now) for label in labels_json]) & visible
        request: dict[str, Any] = {"k": int(rng.integers(1, 30)), "cooccurrence": 0.0}
        passes = lives.copy()
        if step % 2:
            request["filter"] = filters[rng.integers(4)]
            passes &= [meets(label["display"], request["filter"]) for label in labels_json]
        if step % 5 == 1:
            request["buckets"] = ["torso", "new"]
            passes &= np.isin([label["bucket"] for label in labels_json], request["buckets"])
        for name, chosen in (("exclude", [0, 5, 300]), ("allow", [0, 6, 200])):
            if step % 3 == 2 and (count := rng.choice(chosen)):
                rows = rng.choice(overlay.labels, count, replace=False)
                request[name] = [labels_json[row]["id"] for row in rows]
                is_listed = np.isin([label["id"] for label in labels_json], request[name])
                passes &= is_listed if name == "allow" else ~is_listed
        query = RetrieveQuery.model_validate({"features": {"user_id": f"u{rng.integers(20)}"}, **request})
        queries_BE = bundle.augmentation.queries(
            retriever.encoder.embed(retriever.encoder.read([query.features or {}])), 0.5
        )
        scores_L = np.where(passes, queries_BE[0] @ rows_LE.T / 0.1, -np.inf)
        (result,) = read_results(retriever.retrieve([query]))
        scores = [label["score"] for label in result["labels"]]
        rows = [retriever.catalogue.row(label["id"]) for label in result["labels"]]
        assert passes[rows].all()
        assert len(rows) == min(request["k"], int(passes.sum()))
        assert scores == pytest.approx(scores_L[rows].tolist(), abs=1e-3)
        if spec == "flat":
            assert scores == pytest.approx(np.sort(scores_L)[::-1][: len(rows)].tolist(), abs=1e-3)
        compared += len(rows)
        assert retriever.availability["labels"] == lives.sum()
        answered_at_once.add(int(lives.sum()))
        others = [
            {"explore": {"tail": 2}}, {"max_per": {"brand": 1}}, {"mmr": 0.3},
            {"cooccurrence": 1.0, "history": ["item-1"]},
        ]  # fmt: skip
        query = RetrieveQuery.model_validate({"features": {}, "k": 9, **others[step % 4], "explain": step % 8 == 0})
        similar = SimilarQuery.model_validate({"id": "item-3", "k": 9, "by": ["embedding", "cooccurrence"][step % 2]})
        for other in (*read_results(retriever.retrieve([query])), *read_results(retriever.similar([similar]))):
            assert lives[[retriever.catalogue.row(label["id"]) for label in other["labels"]]].all()
    assert compared > 300
    assert len(answered_at_once) > 20


def test_a_label_comes_and_ends_at_its_second(releases: Releases, clock: Clock) -> None:
    retriever = load_release(releases, "flat", max_new_labels=9)
    row = next(
        row for row, label in enumerate(retriever.catalogue.labels_json(range(LABELS)))
        if label["display"]["available_from"] and label["display"]["available_until"]
    )  # fmt: skip
    id_ = f"item-{row}"
    assert retriever.bundle.labels.lifetimes is not None
    begin, until = retriever.bundle.labels.lifetimes[row].tolist()

    def is_answered() -> bool:
        (result,) = read_results(retriever.retrieve([RetrieveQuery(features={}, k=3, allow=[id_, "item-0"])]))
        in_answer = id_ in [label["id"] for label in result["labels"]]
        (listed,) = (
            label for label in list_labels(retriever, LabelListing(limit=LABELS))["labels"] if label["id"] == id_
        )
        assert retriever.label(id_)["available"] == listed["available"] == in_answer
        return in_answer

    for seconds, available in ((begin - 0.001, False), (begin, True), (until - 0.001, True), (until, False)):
        clock.now = seconds
        assert is_answered() == available, seconds
    clock.now = begin - 0.5
    next_change = retriever.availability["next_change"]
    assert next_change == datetime.fromtimestamp(begin, UTC)
    pinned = retriever.view_at(begin - 0.5)
    clock.now = until + 5
    later = (datetime.fromtimestamp(until, UTC) + timedelta(hours=1)).isoformat()
    (patch,) = create_patches([LabelPatchById(id=id_, display={"available_until": later})], retriever)
    retriever = retriever.with_changes([patch])
    assert is_answered()
    assert pinned.with_changes([patch]).retrieve([RetrieveQuery(features={}, k=1, allow=[id_])]).results[0]["labels"]
    clock.now = begin - 1
    assert not is_answered()
    assert pinned.view_at() is pinned


def test_a_wrong_lifetime_is_refused_where_it_enters(releases: Releases, tmp_path: Path) -> None:
    retriever = load_release(releases, "flat", max_new_labels=9)
    late, early = "2026-07-02T00:00:00Z", "2026-07-01"
    new = {"id": "n", "features": {"genres": ["g1"]}}
    with pytest.raises(
        InvalidRequestError, match=r'expected a time after available_from, "2026-07-02.*received "2026-07-01'
    ):
        create_upserts(
            [LabelToAdd.model_validate({**new, "display": {"available_from": late, "available_until": early}})],
            retriever,
        )
    with pytest.raises(InvalidRequestError, match='ISO 8601, received "soon"') as caught:
        create_upserts([LabelToAdd.model_validate({**new, "display": {"available_until": "soon"}})], retriever)
    assert caught.value.field == "labels.0.display.available_until"

    def patch(*displays: dict[str, Any]) -> list[Patch]:
        return create_patches([LabelPatchById(id="item-1", display=display) for display in displays], retriever)

    with pytest.raises(InvalidRequestError, match="expected a time after available_from"):
        patch({"available_from": late}, {"available_until": early})
    retriever = retriever.with_changes(patch({"available_from": late, "available_until": None}))
    with pytest.raises(InvalidRequestError, match="expected a time after available_from"):
        patch({"available_until": early})
    for columns, message in (
        ({"available_from": [late], "available_until": [early]}, 'lifetime of label "a" begins before it ends'),
        ({"available_until": ["soon"]}, 'available_until\' holds times.*"soon"'),
        ({"available_from": [3]}, "available_from' holds times.*found int64"),
    ):
        with pytest.raises(BundleInvariantError, match=message):
            read_lifetimes(pa.table(columns), pa.array(["a"]))
    bundle = make_bundle(labels=9)
    display = pa.table({"available_until": ["soon"] * 9})
    manifest = bundle.manifest.model_copy(update={"display": ["available_until"]})
    replace(bundle, labels=replace(bundle.labels, display=display), manifest=manifest).write(tmp_path / "bundle")
    with pytest.raises(BundleInvariantError, match="holds times"):
        build(tmp_path / "bundle", tmp_path / "releases", spec="flat")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([datetime(2026, 6, 1), None]), pa.array([DATED.date(), None]),
        pa.array(["2026-06-01 00:00:00.25", ""]),
        pa.array([DATED, None], pa.timestamp("ns", "Europe/Berlin")), pa.array(["2026-06-01T02:00+02:00", None]),
        pa.array(["2026-06-01", None]).dictionary_encode(), pa.array([None, None]),
    ],
    ids=lambda column: str(column.type),
)  # fmt: skip
def test_times_of_every_kind(column: pa.Array) -> None:
    read = read_lifetimes(pa.table({"available_from": column}), pa.array(["a", "b"]))
    limits = np.iinfo(np.int64)
    begin = limits.min if pa.types.is_null(column.type) else int(DATED.timestamp())
    assert read.tolist() == [[begin, limits.max], [limits.min, limits.max]]
    assert make_bundle().labels.lifetimes is None


@pytest.mark.usefixtures("clock")
def test_known_queries_are_answered_from_the_start(tmp_path: Path) -> None:
    """Later requests share the first view of a load, so it must have the index of queries."""
    users = [f"u{user}" for user in range(20)]
    pq.write_table(pa.table({"user_id": users}), tmp_path / "users.parquet")
    dated(make_bundle(labels=90, users=20)).write(tmp_path / "bundle")
    inputs = KnownQueries(tmp_path / "users.parquet", "user_id")
    build(tmp_path / "bundle", tmp_path / "releases", name="a", spec="flat", queries=inputs)
    retriever = load_release(open_releases(tmp_path / "releases"), "a")
    assert retriever.availability["next_change"] is not None
    (answer,) = find_known_queries(retriever.view_at(), [QueriesFor(id="item-1", k=20)])
    assert {query["id"] for query in answer["queries"]} == set(users)


def test_a_tree_obeys_lifetimes(clock: Clock) -> None:
    bundle = dated(make_bundle(labels=90, proposal=True))
    retriever = make_retriever(bundle)
    displayed = [label["display"] for label in retriever.catalogue.labels_json(range(90))]
    for seconds in (-200, -20, -19, 30, 200):
        clock.now = DATED.timestamp() + seconds
        query = RetrieveQuery.model_validate({"features": {"user_id": "u3"}, "k": 90, "bias_removal": 1.0})
        (result,) = read_results(retriever.retrieve([query]))
        ids = {label["id"] for label in result["labels"]}
        assert ids == {f"item-{row}" for row in range(90) if alive(displayed[row], clock.now)}


def test_a_batch_is_of_one_time(releases: Releases, clock: Clock, tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": [f"u{n}" for n in range(4)]}), tmp_path / "queries.parquet")
    displayed = [label["display"] for label in load_release(releases, "flat").catalogue.labels_json(range(LABELS))]

    def answered(out: str, at: str | None) -> set[str]:
        options = TableOptions({"k": LABELS}, at=at)
        answer(releases.root, tmp_path / "queries.parquet", tmp_path / out, options, release="flat")
        return set(pq.read_table(tmp_path / out)["labels"][2].as_py())

    def available(seconds: float) -> set[str]:
        return {f"item-{row}" for row in range(LABELS) if alive(displayed[row], DATED.timestamp() + seconds)}

    assert answered("then", "2026-06-01T00:00:25Z") == available(25) != available(0)
    assert answered("now", None) == available(0)
    clock.now += 25
    next((tmp_path / "now").glob("part-*")).unlink()
    assert answered("now", None) == available(0)
    with pytest.raises(BatchError, match='--at: expected a date or time in ISO 8601, received "noon"'):
        answered("other", "noon")


def test_answers_are_judged_only_while_nearly_the_same_labels_are_available(releases: Releases, clock: Clock) -> None:
    clock.now = DATED.timestamp() - 1000
    retriever = load_release(releases, "flat")
    assert retriever.promises is not None
    query = RetrieveQuery(features={"user_id": "u1"})
    assert np.isfinite(retriever.retrieve([query]).judged_at_B).all()
    assert not retriever.promises.is_complete
    clock.now = DATED.timestamp()
    assert np.isnan(retriever.retrieve([query]).judged_at_B).all()
    assert np.isfinite(load_release(releases, "flat").retrieve([query]).judged_at_B).all()


def test_catalogues_without_lifetimes_are_never_copied() -> None:
    bundle = make_bundle(labels=9)
    retriever = make_retriever(bundle)
    assert retriever.view_at() is retriever
    assert retriever.availability == {"labels": 9, "next_change": None}
    hidden = retriever.with_changes([Hide(id="item-1", at=AT)])
    assert hidden.availability["labels"] == 8
    assert hidden.with_changes([Restore(id="item-1", at=AT)]).availability["labels"] == 9
    assert json.loads(json.dumps(hidden.label("item-2")["available"])) is True
