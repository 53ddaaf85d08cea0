"""Pages over labels against plain Python over the same labels: which, in which order, each in its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Bundle, LabelRecord, Labels
from longtail.bundle.label_changes import replay
from longtail.serving import Retriever
from longtail.serving.core.listing import LabelListing, list_labels
from tests.bundles import make_bundle
from tests.serving.core.test_overlay import draw_records
from tests.serving.plane import make_retriever

L = 60


def pages(retriever: Retriever, **query: Any) -> Iterator[dict[str, Any]]:
    cursor = None
    while True:
        page = list_labels(retriever, LabelListing(**query, cursor=cursor))
        yield page
        cursor = page["next_cursor"]
        if cursor is None:
            return


def listed(retriever: Retriever, **query: Any) -> list[tuple[str, str]]:
    return [(label["id"], label["state"]) for page in pages(retriever, **query) for label in page["labels"]]


def list_states(bundle: Bundle, records: Sequence[LabelRecord]) -> dict[str, str]:
    """State by id, in the order of ids."""
    ids, changes = bundle.labels.ids.to_pylist(), replay(records)
    states = {id_: "hidden" if id_ in changes.hidden else "visible" for id_ in ids}
    return dict(sorted((dict.fromkeys(changes.upserts, "added") | states).items()))


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_every_label_comes_once_in_its_state(limit: int) -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    records = draw_records(np.random.default_rng(limit), 150)
    changed, states = make_retriever(bundle, "exact", *records), list_states(bundle, records)
    assert set(states.values()) == {"visible", "hidden", "added"}
    assert listed(changed, limit=limit) == list(states.items())
    for state in ("visible", "hidden", "added"):
        assert listed(changed, limit=limit, state=state) == [pair for pair in states.items() if pair[1] == state]
    new = {id_ for id_, state in states.items() if state == "added"}
    assert {id_ for id_, _ in listed(changed, limit=limit, bucket="new")} == new
    tail = {str(id_) for id_, bucket in zip(bundle.labels.ids, bundle.labels.buckets, strict=True) if bucket == 2}
    assert {id_ for id_, _ in listed(changed, limit=limit, bucket="tail")} == tail
    sizes = [len(page["labels"]) for page in pages(changed, limit=limit)]
    assert sizes[:-1] == [limit] * (len(sizes) - 1)
    assert sizes[-1] > 0


def test_lasting_labels_are_listed_once_despite_changes_between_pages() -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    order = np.random.default_rng(5).permutation(L)
    table = bundle.labels
    turned = replace(  # a release after a training: the same labels in other rows
        bundle,
        labels=Labels(
            ids=table.ids.take(pa.array(order)), counts=table.counts[order], log_pn=table.log_pn[order],
            buckets=table.buckets[order], bias=None if table.bias is None else table.bias[order],
            display=table.display.take(pa.array(order)),
        ),
        embeddings=bundle.embeddings[order],
    )  # fmt: skip
    rng = np.random.default_rng(6)
    for _ in range(5):
        records: list[LabelRecord] = []
        history: list[str] = []
        throughout, cursor = set(bundle.labels.ids.to_pylist()), None
        while True:
            served = make_retriever(bundle if rng.random() < 0.5 else turned, "exact", *records)
            page = list_labels(served, LabelListing(limit=5, state="visible", cursor=cursor))
            history += [label["id"] for label in page["labels"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
            records += draw_records(rng, 4)
            throughout -= {*replay(records).hidden}
        assert history == sorted(set(history))
        assert throughout <= set(history)
