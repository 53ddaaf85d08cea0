"""Overlays against scores by formula, `s_λ = u·v/T + b + λ·log p_n`, of every label that should be answered."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest

from longtail.bundle import Bundle, Hide, LabelRecord, Patch, Restore, Tower, Upsert
from longtail.bundle.label_changes import replay
from longtail.index import Filter
from longtail.serving.core.overlay import Overlay, OverlaySearcher
from longtail.serving.core.ranking import Batch, LabelSearcher
from longtail.serving.core.tree_ranking import TreeRanker
from longtail.serving.errors import InvalidRequestError, NoLabelTowerError
from tests.bundles import label_features, make_bundle
from tests.serving.plane import ExactSearcher, rows_in_use

AT = datetime(2026, 6, 1, tzinfo=UTC)
L = 60


def make_overlay(bundle: Bundle, *records: LabelRecord, most: int = 1000) -> Overlay:
    return Overlay.as_built(bundle, ExactSearcher(bundle), bundle.labels.rows_by_id, max_new_labels=most).with_changes(
        records
    )


def upsert(id_: str, at: datetime = AT, display: dict[str, Any] | None = None, **features: Any) -> Upsert:
    return Upsert(id=id_, at=at, features=features, display=display or {})


def hide(id_: str) -> Hide:
    return Hide(id=id_, at=AT)


def restore(id_: str) -> Restore:
    return Restore(id=id_, at=AT)


def draw_records(rng: np.random.Generator, count: int) -> list[LabelRecord]:
    """Changes of 60 known and 25 new labels."""
    records: list[LabelRecord] = []
    for _ in range(count):
        row = int(rng.integers(85))
        id_ = f"item-{row}" if row < L else f"new-{row}"
        kind = rng.choice(["upsert", "upsert", "hide", "restore"])
        features = {"genres": [f"g{genre}" for genre in rng.integers(0, 5, 2)], "year": float(rng.normal())}
        records.append(upsert(id_, **features) if kind == "upsert" else hide(id_) if kind == "hide" else restore(id_))
    return records


def score_by_formula(
    bundle: Bundle, records: list[LabelRecord], u: np.ndarray, λ: float, μ: float
) -> dict[str, tuple[float, int]]:
    """s·T and bucket of every label that should be answered, in float64, with a label tower of its own."""
    changes = replay(records)
    tables = {
        table.name: onnx.numpy_helper.to_array(table).astype(np.float64)
        for table in onnx.load_from_string(bundle.label_tower).graph.initializer
    }
    labels, T = bundle.labels, bundle.manifest.temperature
    rows = {id_: row for row, id_ in enumerate(labels.ids.to_pylist())}
    scored = {}
    for id_ in rows.keys() | changes.upserts.keys():
        row = rows.get(id_)
        if id_ in changes.hidden:
            continue
        if id_ in changes.upserts:
            features = changes.upserts[id_].features
            v = tables["own"][0 if row is None else row + 1] + features["year"] * tables["genres_table"][0]
            v = v + sum(tables["genres_table"][int(genre[1:]) + 1] for genre in features["genres"])
            v = v / np.linalg.norm(v) if bundle.manifest.similarity == "cosine" else v
        else:
            v = bundle.embeddings[row].astype(np.float64)
        b = 0.0 if labels.bias is None or row is None else float(labels.bias[row])
        log_pi = labels.log_pn if labels.log_popularity is None else labels.log_popularity
        noise, prior = (float(log.min() if row is None else log[row]) for log in (labels.log_pn, log_pi))
        scored[id_] = (float(u @ v) + T * (b + λ * noise + μ * prior), 3 if row is None else int(labels.buckets[row]))
    return scored


def draw_filter(rng: np.random.Generator, labels: int) -> Filter | None:
    def some(share: float) -> np.ndarray:
        return np.flatnonzero(rng.random(labels) < share)

    return [
        None,
        Filter(exclude=some(0.3)),
        Filter(allow=some(0.3)),
        Filter(allow=np.empty(0, np.int64)),
        Filter(allow=np.arange(L, labels)),
        Filter(buckets=frozenset({2})),
        Filter(buckets=frozenset({0, 1}), exclude=some(0.9)),
        Filter(exclude=some(0.2), allow=some(0.5), buckets=frozenset({1, 2, 3})),
        Filter(buckets=frozenset({3})),
    ][rng.integers(8)]


@pytest.mark.parametrize(
    "variant",
    [{}, {"cosine": False}, {"cosine": False, "bias": True}, {"bias": True}, {"popularity": True, "bias": True}],
)
def test_answers_equal_the_formula_under_any_filter(variant: dict[str, bool]) -> None:
    bundle = make_bundle(labels=L, label_tower=True, **variant)
    rng = np.random.default_rng(1)
    records = draw_records(rng, 60)
    overlay = make_overlay(bundle, *records[:50]).with_changes(records[50:])
    assert 10 < overlay.rows.count < len(overlay.rows)
    assert len(overlay.hidden) > 3
    ids = bundle.labels.ids.to_pylist() + overlay.added.ids.tolist()
    in_use = rows_in_use(overlay)
    dials, priors = rng.choice([0.0, 0.5, 1.0, -1.0], (2, 40)).astype(np.float32)
    filters = [draw_filter(rng, overlay.labels) for _ in dials]
    queries = bundle.calibration_queries[:40]
    for k in (1, 7, overlay.labels):
        scores, rows = overlay.searcher.search(bundle.augmentation.queries(queries, dials, priors), k, filters)
        assert (scores.dtype, rows.dtype, rows.shape) == (np.float32, np.int64, (40, k))
        request = zip(queries.astype(np.float64), dials, priors, filters, strict=True)
        for query, (u, λ, μ, filter_) in enumerate(request):
            scored = score_by_formula(bundle, records, u, float(λ), float(μ))
            eligible = {
                row: scored[ids[row]][0]
                for row in range(overlay.labels)
                if ids[row] in scored
                and in_use.get(ids[row], row) == row
                and (filter_ is None or filter_.exclude is None or row not in filter_.exclude)
                and (filter_ is None or filter_.allow is None or row in filter_.allow)
                and (filter_ is None or filter_.buckets is None or scored[ids[row]][1] in filter_.buckets)
            }
            best = sorted(eligible.values(), reverse=True)[:k]
            answered_rows = rows[query][rows[query] >= 0].tolist()
            assert len(answered_rows) == len(set(answered_rows)) == len(best)
            assert set(answered_rows) <= eligible.keys()
            np.testing.assert_allclose(scores[query, : len(best)], best, atol=2e-5)
            np.testing.assert_allclose([eligible[row] for row in answered_rows], best, atol=2e-5)
            assert (scores[query, len(best) :] == -np.inf).all()


def test_an_empty_overlay_uses_the_index_directly() -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    overlay = make_overlay(bundle)
    base = overlay.searcher
    assert isinstance(base, ExactSearcher)
    assert overlay.with_changes([]) is overlay
    hidden = overlay.with_changes([hide("item-3"), hide("nobody")])
    assert isinstance(hidden.searcher, ExactSearcher)
    assert hidden.searcher.hidden_R.tolist() == hidden.hidden.tolist() == [3]
    assert hidden.with_changes([restore("item-3")]).searcher is base
    added = hidden.with_changes([upsert("new", year=1)])
    assert isinstance(added.searcher, OverlaySearcher)
    assert added.searcher._base is hidden.searcher
    assert added.with_changes([hide("new")]).searcher is hidden.searcher
    assert (overlay.labels, hidden.labels, added.labels) == (60, 60, 61)


def test_only_new_labels_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    embedded: list[list[int]] = []
    embed = Tower.embed

    def counting(tower: Tower, inputs: Any) -> np.ndarray:
        embedded.append(inputs["item_id"].tolist())
        return embed(tower, inputs)

    monkeypatch.setattr(Tower, "embed", counting)
    overlay = make_overlay(bundle, *[upsert(f"new-{at}", year=at) for at in range(5)])
    more = overlay.with_changes([upsert("new-5", year=5), hide("new-0"), upsert("item-1", year=1)])
    assert embedded == [[0] * 5, [0, 2]]
    assert [*rows_in_use(more)] == ["new-1", "new-2", "new-3", "new-4", "new-5", "item-1"]
    assert [*rows_in_use(overlay)] == [f"new-{at}" for at in range(5)]


@pytest.mark.parametrize("seed", range(3))
def test_later_changes_do_not_alter_an_overlay(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlays of running requests share arrays with those after them, and two may continue the same one."""
    monkeypatch.setattr("longtail.serving.core.overlay._MOST_RETIRED", 5)
    bundle = make_bundle(labels=L, label_tower=True, bias=True)
    rng = np.random.default_rng(seed)
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)

    def describe_overlay(overlay: Overlay) -> tuple[Any, ...]:
        scores, rows = overlay.searcher.search(queries, 30)
        in_use = rows_in_use(overlay)
        answer = {id_: overlay.added.display[row - L] for id_, row in in_use.items()}
        assert all(overlay.find_row(id_) == in_use.get(id_) for id_ in [f"new-{row}" for row in range(L, 85)])
        return (
            rows.tolist(),
            scores.tolist(),
            in_use,
            answer,
            overlay.masked.tolist(),
            overlay.find_served_rows(np.arange(L)).tolist(),
        )

    overlays = [make_overlay(bundle)]
    before = [describe_overlay(overlays[0])]
    for _ in range(40):
        overlays.append(overlays[rng.integers(len(overlays))].with_changes(draw_records(rng, 4)))
        before.append(describe_overlay(overlays[-1]))
    assert [describe_overlay(overlay) for overlay in overlays] == before
    lengths = [len(overlay.rows) - overlay.rows.count for overlay in overlays]
    assert 0 < max(lengths) <= 9, "retired rows go"


def test_a_label_that_changes_all_the_time_takes_few_rows() -> None:
    overlay = make_overlay(make_bundle(labels=L, label_tower=True), upsert("new", year=0), upsert("other", year=0))
    for year in range(600):
        overlay = overlay.with_changes([upsert("new", year=year)])
        assert overlay.rows.count == 2
        assert len(overlay.rows) <= 2 + 257
    np.testing.assert_array_equal(
        overlay.rows.augmented_ME[overlay.rows.find_row("new")],
        make_overlay(make_bundle(labels=L, label_tower=True), upsert("new", year=599)).rows.augmented_ME[0],
    )


def test_ids_keep_every_byte() -> None:
    ids = ["a\0", "a", "ä", " "]
    overlay = make_overlay(make_bundle(labels=L, label_tower=True), *[upsert(id_, year=1) for id_ in ids])
    assert [*rows_in_use(overlay)] == ids


@pytest.mark.parametrize("seed", range(5))
def test_incremental_changes_equal_one_build(seed: int) -> None:
    bundle = make_bundle(labels=L, label_tower=True, bias=True)
    rng = np.random.default_rng(seed)
    records = draw_records(rng, 80)
    stepwise = make_overlay(bundle)
    for start in range(0, 80, 4):
        stepwise = stepwise.with_changes(records[start : start + 4])
    at_once = make_overlay(bundle, *records)
    compacted = make_overlay(bundle, *replay(records).records())
    for overlay in (at_once, compacted):
        assert overlay.changes == stepwise.changes
        expected, in_use = rows_in_use(overlay), rows_in_use(stepwise)
        assert expected.keys() == in_use.keys()
        assert all(overlay.find_row(id_) == row for id_, row in expected.items())
        assert all(stepwise.find_row(id_) == row for id_, row in in_use.items())
        assert overlay.find_served_rows(np.arange(L)).tolist() == [expected.get(f"item-{row}", row) for row in range(L)]
        assert stepwise.find_served_rows(np.arange(L)).tolist() == [in_use.get(f"item-{row}", row) for row in range(L)]
        assert (overlay.new_labels, overlay.rows.count) == (stepwise.new_labels, stepwise.rows.count)
        for name in ("hidden", "masked"):
            np.testing.assert_array_equal(getattr(overlay, name), getattr(stepwise, name))
        rows, stepwise_rows = [np.array([of[id_] for id_ in expected]) - L for of in (expected, in_use)]
        augmented, stepwise_augmented = overlay.rows.augmented_ME[rows], stepwise.rows.augmented_ME[stepwise_rows]
        np.testing.assert_allclose(augmented, stepwise_augmented, atol=1e-6)
        for name in ("display", "catalogue_rows", "counts", "log_pn", "log_popularity", "buckets", "bias"):
            column, stepwise_column = getattr(overlay.added, name), getattr(stepwise.added, name)
            if column is not None:
                np.testing.assert_array_equal(column[rows], stepwise_column[stepwise_rows])
        of_queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)
        scores = [item.searcher.search(of_queries, 30)[0] for item in (overlay, stepwise)]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_catalogue_labels_keep_their_figures_and_columns() -> None:
    bundle = make_bundle(labels=L, label_tower=True, bias=True)
    labels = bundle.labels
    overlay = make_overlay(
        bundle,
        upsert("item-7", **label_features(7)),
        upsert("new", year=0),
        upsert("named", year=0, display={"title": "Named"}),
        upsert("item-8", year=0, display={"title": "Renamed"}),
    )
    added = overlay.added
    assert added.catalogue_rows.tolist() == [7, -1, -1, 8]
    assert overlay.new_labels == 2
    assert added.display.tolist() == [{"title": "Title 7"}, {"title": None}, {"title": "Named"}, {"title": "Renamed"}]
    assert added.counts.tolist() == [labels.counts[7], 0, 0, labels.counts[8]]
    assert added.buckets.tolist() == [labels.buckets[7], 3, 3, labels.buckets[8]]
    assert added.log_pn.tolist() == [labels.log_pn[7], labels.log_pn.min(), labels.log_pn.min(), labels.log_pn[8]]
    assert labels.bias is not None
    assert added.bias is not None
    assert added.bias.tolist() == [labels.bias[7], 0, 0, labels.bias[8]]
    np.testing.assert_allclose(overlay.rows.augmented_ME[0], bundle.rows()[7], atol=1e-6)
    assert (overlay.masked.tolist(), overlay.hidden.tolist()) == ([7, 8], [])
    assert not overlay.hides(7)
    gone = overlay.with_changes([hide("item-7")])
    assert (gone.masked.tolist(), gone.hidden.tolist()) == ([7, 8], [7])
    assert (gone.hides(7), gone.hides(8), gone.hides(59)) == (True, False, False)
    assert gone.find_row("item-7") is None


@pytest.mark.parametrize(
    ("record", "field", "message"),
    [
        (upsert("x", genre=["g1"]), "labels.1.features.genre", "expected one of the features ['item_id', 'genres', "),
        (upsert("x", year="early"), "labels.1.features.year", 'expected a finite number, received "early"'),
        (upsert("x", genres=["g1", None]), "labels.1.features.genres.1", "expected an id (a string, number or boo"),
        (upsert("x", year=3e38), "labels.1.features", "expected features that the label tower "),
        (upsert("x", display={"name": "X"}), "labels.1.display.name", "expected one of the display columns ['title']"),
        (upsert("x", display={"title": 3}), "labels.1.display.title", "expected a value that a column of string can h"),
        (upsert("x", display={"title": ["a"]}), "labels.1.display.title", "expected a value that a column of string"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_served_are_refused_before_they_are_acknowledged(
    record: Upsert, field: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    overlay = make_overlay(bundle)
    with pytest.raises(InvalidRequestError) as caught:
        overlay.check([upsert("y", year=1), record])
    assert caught.value.field == field
    assert caught.value.message.startswith(message)
    with caplog.at_level(logging.WARNING):
        lenient = overlay.with_changes([upsert("y", year=1), record])
    assert lenient.added.ids.tolist() == ["y"]
    assert lenient.skipped == {"x": f"{field.removeprefix('labels.1.')}: {caught.value.message}"}
    assert "1 changed labels are not served with this release" in caplog.text
    assert lenient.with_changes([upsert("x", year=2)]).skipped == {}


def test_new_labels_beyond_the_limit_are_refused() -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    overlay = make_overlay(bundle, upsert("a"), upsert("item-1"), most=3)
    overlay.check([upsert("a", year=1), upsert("item-1"), upsert("b")])
    with pytest.raises(InvalidRequestError, match="at most 1 more labels, as 2 of 3 are added already"):
        overlay.check([upsert("b"), upsert("c")])
    full = make_overlay(bundle, *[upsert(f"new-{at}") for at in range(5)], most=3)
    assert len(full.added) == 5, "what was acknowledged is served, whatever the setting says now"
    with pytest.raises(InvalidRequestError, match=r"at most 0 more labels, as 5 of 3 are added already, received 1"):
        full.check([upsert("b")])
    full.check([upsert("new-1")])


@pytest.mark.parametrize(
    ("variant", "word"), [({"proposal": True, "label_tower": True}, "a tree"), ({}, "label_tower")]
)
def test_releases_that_cannot_embed_labels_can_still_hide_them(variant: dict[str, bool], word: str) -> None:
    overlay = make_overlay(make_bundle(labels=L, **variant))
    with pytest.raises(NoLabelTowerError, match=f"found one with.* {word}.*hiding works"):
        overlay.check([upsert("new")])
    overlay.check([])
    changed = overlay.with_changes([upsert("new"), hide("item-5")])
    assert (changed.labels, changed.hidden.tolist(), list(changed.skipped)) == (60, [5], ["new"])


def test_changes_in_a_newer_release_are_not_applied_again() -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    created = bundle.manifest.created_at
    before, after = created - timedelta(seconds=1), created + timedelta(seconds=1)
    overlay = make_overlay(
        bundle,
        upsert("item-1", at=before, year=1),
        upsert("item-2", at=created, year=1),
        upsert("item-3", at=after, year=1),
        upsert("new", at=before, year=1),
        Hide(id="item-4", at=before),
    )
    assert [*rows_in_use(overlay)] == ["item-3", "new"]
    assert overlay.hidden.tolist() == [4], "hidden until it is restored"
    again = overlay.with_changes([upsert("item-1", at=after, year=2)])
    assert [*rows_in_use(again)] == ["item-3", "new", "item-1"]


def test_columns_of_other_types_are_json() -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    display = pa.table(
        {
            "day": pa.array([datetime(2020, 1, 1, tzinfo=UTC).date()] * L),
            "tags": pa.array([["a", "b"]] * L),
            "kind": pa.array(["film"] * L).dictionary_encode(),
            "stars": pa.array([4] * L, pa.int8()),
        }
    )
    manifest = bundle.manifest.model_copy(update={"display": display.column_names})
    overlay = make_overlay(replace(bundle, manifest=manifest, labels=replace(bundle.labels, display=display)))
    arguments = {"day": "2021-02-03", "tags": ["c"], "kind": "song", "stars": 5}
    overlay.check([upsert("x", display=arguments), upsert("item-3", display={"stars": None})])
    changed = overlay.with_changes([upsert("x", display=arguments), upsert("item-3", display={"stars": None})])
    answer = {"day": "2020-01-01", "tags": ["a", "b"], "kind": "film", "stars": None}
    assert changed.added.display.tolist() == [arguments, answer]
    for wrong in (
        {"day": "soon"},
        {"day": 3},
        {"tags": "c"},
        {"kind": 1},
        {"stars": 300},
        {"stars": 1.5},
        {"stars": {}},
    ):
        with pytest.raises(InvalidRequestError, match="expected a value that a column of"):
            overlay.check([upsert("x", display=wrong)])


@pytest.mark.parametrize("few", [False, True])
def test_a_tree_answers_no_hidden_label_from_either_side(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if few:
        monkeypatch.setattr("longtail.serving.core.tree_ranking._WHOLE_UP_TO", 5)
        monkeypatch.setattr("longtail.serving.core.tree_ranking._EXCLUDE_BY_OVERFETCH_UP_TO", 5)
    bundle = make_bundle(labels=L, proposal=True)
    assert bundle.proposal is not None
    overlay = make_overlay(bundle, *[hide(f"item-{row}") for row in range(0, L, 3)])

    def ranker(searcher: LabelSearcher, hidden: np.ndarray) -> TreeRanker:
        return TreeRanker(searcher, bundle, bundle.proposal, hidden)

    rng = np.random.default_rng(3)
    inputs = {
        "user_id": rng.integers(0, 20, 30, np.int32),
        "history": rng.integers(0, L, (30, 4), np.int32),
        "history__weight": np.ones((30, 4), np.float32),
    }
    dials, priors = (rng.choice(values, 30).astype(np.float32) for values in ([0.0, 0.5, 1.0, 2.0], [-1.0, 0.0, 1.5]))
    filters = [draw_filter(rng, L) for _ in dials]
    hidden_too = []
    for filter_ in filters:
        request = Filter() if filter_ is None else filter_
        exclude = overlay.hidden if request.exclude is None else np.union1d(overlay.hidden, request.exclude)
        hidden_too.append(replace(request, exclude=exclude))
    queries = bundle.calibration_queries[:30]
    actual = ranker(overlay.searcher, overlay.hidden).rank(Batch(queries, inputs, dials, priors, filters, L))
    expected = ranker(ExactSearcher(bundle), np.empty(0, np.int64)).rank(
        Batch(queries, inputs, dials, priors, hidden_too, L)
    )
    np.testing.assert_array_equal(actual[1], expected[1])
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    assert (actual[1].max(axis=1) > 0).any()


def add_years() -> Bundle:
    bundle = make_bundle(label_tower=True)
    years = pa.array([2000] * bundle.manifest.labels)
    return replace(bundle, labels=replace(bundle.labels, display=bundle.labels.display.append_column("year", years)))


def test_features_sent_again_keep_the_columns_and_priors_that_changes_have_set() -> None:
    bundle = add_years()
    new = upsert("new", display={"title": "New", "year": 1999}, **label_features(3)).model_copy(
        update={"priors": {"margin": 2.0}}
    )
    overlay = make_overlay(bundle, new, Patch(id="new", at=AT, display={"year": 2026}))
    later = AT + timedelta(seconds=1)

    again = overlay.complete(upsert("new", later, **label_features(4)))
    assert again.display == {"title": "New", "year": 2026}
    assert again.priors == {"margin": 2.0}
    assert again.features == label_features(4)
    assert overlay.complete(upsert("new", later, {"title": None})).display == {"title": None, "year": 2026}
    changed = overlay.with_changes([again])
    assert changed.added.display[changed.rows.find_row("new")] == {"title": "New", "year": 2026}

    other = upsert("other", later, **label_features(4))
    assert overlay.complete(other) == other
    hidden = overlay.with_changes([hide("new")])
    assert hidden.complete(upsert("new", later, **label_features(4))).display == {}


def test_unknown_columns_of_a_patch_are_dropped() -> None:
    bundle = add_years()
    old = upsert("new", display={"title": "New", "year": "soon", "colour": "red"}, **label_features(3))
    overlay = replace(make_overlay(bundle), changes=replay([old]))
    assert overlay.complete(upsert("new", **label_features(4))).display == {"title": "New"}
