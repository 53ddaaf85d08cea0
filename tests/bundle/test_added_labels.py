"""Which feature is a label's own id, and that the label tower gives a label of the bundle its own row."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Bundle, Feature, Upsert, Vocabulary
from longtail.bundle.added_labels import LabelAdder, own_id_feature
from tests.bundles import label_features, make_bundle

AT = datetime(2026, 6, 1, tzinfo=UTC)


def with_features(bundle: Bundle, features: list[Feature], **vocabularies: list[str]) -> Bundle:
    return replace(
        bundle,
        manifest=bundle.manifest.model_copy(update={"label_features": features}),
        vocabularies=bundle.vocabularies | {name: Vocabulary(pa.array(ids)) for name, ids in vocabularies.items()},
    )


def of(name: str, vocabulary: str | None = None) -> Feature:
    return Feature(name=name, kind="id", vocabulary=vocabulary or name)


@pytest.mark.parametrize("variant", [{}, {"cosine": False, "bias": True}])
def test_a_label_of_the_bundle_is_embedded_to_its_own_row(variant: dict[str, bool]) -> None:
    bundle = make_bundle(label_tower=True, **variant)
    ids = bundle.labels.ids.to_pylist()
    records = [Upsert(id=id_, at=AT, features=label_features(row)) for row, id_ in enumerate(ids)]
    added, refused = LabelAdder(bundle, {id_: row for row, id_ in enumerate(ids)}).add(records)
    np.testing.assert_allclose(added.embeddings, bundle.embeddings, atol=1e-6)
    assert (added.catalogue_rows.tolist(), refused) == (list(range(60)), {})


def test_a_new_label_is_as_noisy_and_as_popular_as_the_rarest() -> None:
    bundle = make_bundle(label_tower=True, popularity=True)
    labels = bundle.labels
    # A noise that draws rare labels more often than frequent ones: its least is not the rarest label's.
    backwards = np.log((1 / (labels.counts + 1)) / (1 / (labels.counts + 1)).sum()).astype(np.float32)
    labels = replace(labels, log_pn=backwards)
    adder = LabelAdder(replace(bundle, labels=labels), {"item-3": 3})
    records = [Upsert(id=id_, at=AT, features=label_features(3)) for id_ in ("new", "item-3")]
    added, _ = adder.add(records)
    rarest = int(labels.counts.argmin())
    assert added.log_pn.tolist() == [labels.log_pn[rarest], labels.log_pn[3]]
    assert added.log_popularity.tolist() == [labels.log_popularity[rarest], labels.log_popularity[3]]
    twice = added.take(np.array([1])).followed_by(added)
    assert twice.log_popularity.tolist() == [added.log_popularity[row] for row in (1, 0, 1)]


def test_the_own_id_is_the_id_whose_vocabulary_is_the_catalogue() -> None:
    bundle = make_bundle(labels=30)
    ids = bundle.labels.ids.to_pylist()
    brand, item = of("brand"), of("item", "ids")
    assert own_id_feature(bundle) is None
    assert own_id_feature(with_features(bundle, [brand], brand=["x", "y"])) is None
    assert own_id_feature(with_features(bundle, [brand, item], brand=ids[:20], ids=ids)) == "item"
    assert own_id_feature(with_features(bundle, [of("parent", "item"), of("item")], item=ids)) == "item"
    assert own_id_feature(with_features(bundle, [of("one", "ids"), of("two", "ids")], ids=ids)) == "one"
    bag = Feature(name="bag", kind="bag", vocabulary="ids", max_length=3)
    assert own_id_feature(with_features(bundle, [bag], ids=ids)) is None


def test_labels_without_training_pairs_may_be_missing_from_it_and_labels_that_are_gone_may_stand_in_it() -> None:
    bundle = make_bundle(labels=30)
    ids, counts = bundle.labels.ids.to_pylist(), bundle.labels.counts.copy()
    counts[7] = 0
    bundle = replace(bundle, labels=replace(bundle.labels, counts=counts))
    assert own_id_feature(with_features(bundle, [of("item")], item=["gone", *ids[:7], *ids[8:]])) == "item"
    assert own_id_feature(with_features(bundle, [of("item")], item=ids[:29])) is None
    none = replace(bundle, labels=replace(bundle.labels, counts=counts * 0))
    assert own_id_feature(with_features(none, [of("item")], item=ids[:29])) is None
    assert own_id_feature(with_features(none, [of("item")], item=ids)) == "item"


def test_from_version_4_on_the_manifest_names_it_whatever_its_vocabulary_leaves_out() -> None:
    """A recipe's `min_count` leaves out labels that have training pairs."""
    bundle = with_features(make_bundle(labels=30), [of("brand"), of("item")], brand=["x"], item=["item-1"])
    assert own_id_feature(bundle) is None
    named = replace(bundle, manifest=bundle.manifest.model_copy(update={"own_id": "item"}))
    assert own_id_feature(named) == "item"
