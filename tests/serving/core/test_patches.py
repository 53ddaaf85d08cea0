"""Columns of labels that change while a release serves: shown, filtered by, kept beside all that else changes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle, LabelChanges, LabelRecord, Patch
from longtail.bundle.label_changes import needed_positions, replay
from longtail.serving import Retriever
from longtail.serving.core.label_changes import LabelPatchById, create_patches
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.errors import InvalidRequestError, NoLabelTowerError, UnknownLabelError
from longtail.state import LabelStore
from tests.bundles import make_bundle
from tests.serving.core.test_overlay import AT, hide, restore, upsert
from tests.serving.plane import make_retriever, read_results

LATER = AT + timedelta(days=1)


def patch(id_: str, **display: Any) -> Patch:
    return Patch(id=id_, at=LATER, display=display)


def serve_after(*records: LabelRecord, bundle: Bundle | None = None) -> Retriever:
    return make_retriever(bundle or make_bundle(labels=60), "exact", *records)


def answered(retriever: Retriever, **request: Any) -> dict[str, dict[str, Any]]:
    query = RetrieveQuery(**{"features": {"user_id": "u3"}, "k": 61, "bias_removal": 0.5} | request)
    (result,) = read_results(retriever.retrieve([query]))
    return {label["id"]: label for label in result["labels"]}


def test_a_patched_label_shows_its_columns_and_scores_as_before() -> None:
    before, now = answered(serve_after()), answered(serve_after(patch("item-7", title="Sold out")))
    assert now["item-7"]["display"] == before["item-7"]["display"] | {"title": "Sold out"}
    assert now["item-7"]["score"] == pytest.approx(before["item-7"]["score"], abs=1e-5)
    assert now.keys() == before.keys()
    assert {id_ for id_ in now if now[id_]["display"] != before[id_]["display"]} == {"item-7"}


def test_filters_go_by_the_columns_of_now() -> None:
    changed = serve_after(
        patch("item-7", title="Sold out"), patch("item-9", title="Sold out"), patch("item-9", title="Here")
    )
    assert set(answered(changed, filter={"title": "Sold out"})) == {"item-7"}
    assert set(answered(changed, filter={"title": {"in": ["Title 7", "Title 9", "Here"]}})) == {"item-9"}


def test_restored_labels_keep_their_patches() -> None:
    once = [patch("item-7", title="Sold out"), hide("item-7")]
    assert "item-7" not in answered(serve_after(*once))
    assert answered(serve_after(*once, restore("item-7")))["item-7"]["display"]["title"] == "Sold out"
    late = [*once, patch("item-7", title="Meanwhile")]  # by another replica, which had not heard of it
    assert "item-7" not in answered(serve_after(*late))
    assert answered(serve_after(*late, restore("item-7")))["item-7"]["display"]["title"] == "Meanwhile"
    deleted = [upsert("new", genres=["g1"], year=1.0), patch("new", title="Newer"), hide("new"), restore("new")]
    bundle = make_bundle(labels=60, label_tower=True)
    assert "new" not in answered(serve_after(*deleted, bundle=bundle))
    again = upsert("new", genres=["g1"], display={"title": "Again"})
    assert answered(serve_after(*deleted, again, bundle=bundle))["new"]["display"]["title"] == "Again"


def test_an_embedded_label_keeps_its_embedding() -> None:
    bundle, anew = make_bundle(labels=60, label_tower=True), upsert("item-7", genres=["g1"], year=1.0)
    new = upsert("new", genres=["g2"], display={"title": "New"})
    before = answered(serve_after(anew, new, bundle=bundle))
    now = answered(serve_after(anew, new, patch("item-7", title="A"), patch("new", title="B"), bundle=bundle))
    assert {id_: label["score"] for id_, label in now.items()} == pytest.approx(
        {id_: label["score"] for id_, label in before.items()}, abs=1e-5
    )
    assert (now["item-7"]["display"]["title"], now["new"]["display"]["title"]) == ("A", "B")


@pytest.mark.parametrize("seed", range(5))
def test_a_shortened_log_amounts_to_the_same(seed: int) -> None:
    rng, records = np.random.default_rng(seed), list[LabelRecord]()
    for _ in range(300):
        id_ = f"item-{rng.integers(8)}"
        kinds = [patch(id_, title=str(rng.integers(99))), patch(id_, year=1), hide(id_), restore(id_), upsert(id_)]
        records.append(kinds[rng.integers(5)])
    full = replay(records)
    assert replay(full.records()) == full
    cut, positions = int(rng.integers(300)), needed_positions(records)
    assert replay(records[:cut]).apply(records[cut:]) == full
    assert LabelChanges().apply(replay(records[:cut]).records()).apply(records[cut:]) == full
    # What a store forgets: a new reader ends where all others do, and so does one that was in the middle.
    assert len(positions) < 60
    assert replay([records[i] for i in positions]) == full
    assert replay(records[:cut]).apply([records[i] for i in positions if i >= cut]) == full


def test_a_store_that_is_shortened_keeps_patches(tmp_path: Path) -> None:
    records = [
        upsert("new", genres=["g1"], display={"title": "New"}), *(patch("new", title=str(at)) for at in range(9)),
        patch("item-3", title="A"), patch("item-3", year=1), patch("item-4", title="B"), hide("item-4"),
    ]  # fmt: skip
    store = LabelStore(tmp_path)
    store.append(records)
    full = replay(store.read_from().records)
    store.compact()
    remaining = store.read_from().records
    store.close()
    assert (len(remaining), replay(remaining)) == (6, full)


def test_a_patch_is_dated_by_itself() -> None:
    """What a release of newer data has taken in stays so, whatever is patched after it."""
    bundle = make_bundle(labels=60, label_tower=True)
    bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"created_at": AT + timedelta(hours=12)}))
    old = [Patch(id="item-7", at=AT, display={"title": "Before"}), upsert("item-9", genres=["g1"], year=1.0)]
    built = answered(serve_after(bundle=bundle))
    now = answered(serve_after(*old, patch("item-9", title="After"), bundle=bundle))
    assert now["item-7"] == built["item-7"]
    assert now["item-9"]["score"] == pytest.approx(built["item-9"]["score"], abs=1e-5)
    assert now["item-9"]["display"]["title"] == "After"


def test_patches_need_no_tower_even_with_added_labels() -> None:
    both = serve_after(upsert("new", genres=["g1"]), patch("item-3", title="Here"))
    assert answered(both)["item-3"]["display"]["title"] == "Here"
    assert both.overlay.skipped.keys() == {"new"}


def test_columns_of_another_release_are_ignored() -> None:
    both = serve_after(patch("item-3", title="Here", price=9), patch("item-5", price=9), patch("of another", price=9))
    assert answered(both)["item-3"]["display"]["title"] == "Here"
    assert not both.overlay.skipped


def test_impossible_patches_are_refused() -> None:
    def records(*labels: dict[str, Any], retriever: Retriever) -> list[Patch]:
        return create_patches([LabelPatchById(**label) for label in labels], retriever)

    title = {"display": {"title": "A"}}
    hidden = serve_after(hide("item-3"))
    for id_ in ("no such", "item-3"):
        with pytest.raises(UnknownLabelError, match=r"the id of a label of this release|not hidden, received"):
            records({"id": "item-5", **title}, {"id": id_, **title}, retriever=hidden)
    with pytest.raises(InvalidRequestError, match="colour"):
        records({"id": "item-5", "display": {"colour": "red"}}, retriever=hidden)
    with pytest.raises(NoLabelTowerError, match=r"has no leaf for them: train again"):
        records({"id": "item-5", **title}, retriever=serve_after(bundle=make_bundle(labels=90, proposal=True)))
    assert records({"id": "item-5", **title}, retriever=hidden)[0].display == {"title": "A"}


def test_a_newer_table_undoes_older_patches_and_names_them() -> None:
    def built(hours: int) -> Bundle:
        bundle = make_bundle(labels=60, label_tower=True)
        return replace(bundle, manifest=bundle.manifest.model_copy(update={"created_at": AT + timedelta(hours=hours)}))

    records = [
        Patch(id="item-1", at=AT, display={"title": "before"}),
        Patch(id="item-2", at=AT + timedelta(hours=9), display={"title": "after"}),
    ]
    before, newer = (serve_after(*records, bundle=built(hours)).overlay for hours in (-5, 5))
    assert (newer.undone_patches(before), before.undone_patches(before), before.undone_patches(newer)) == (
        ["item-1"], [], [],
    )  # fmt: skip


def test_a_hidden_label_is_not_called_unknown() -> None:
    with pytest.raises(UnknownLabelError, match="is hidden; POST /v1/labels/restore brings it back"):
        serve_after(hide("item-2")).label("item-2")
