"""The label tower gives a label of the bundle its own row."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from longtail.bundle import InputError, Upsert
from longtail.bundle.added_labels import LabelAdder
from tests.bundles import label_features, make_bundle

AT = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize("variant", [{}, {"cosine": False, "bias": True}])
def test_known_label_is_embedded_to_the_same_row(variant: dict[str, bool]) -> None:
    bundle = make_bundle(label_tower=True, **variant)
    ids = bundle.labels.ids.to_pylist()
    records = [Upsert(id=id_, at=AT, features=label_features(row)) for row, id_ in enumerate(ids)]
    added, refused = LabelAdder(bundle).add(records)
    np.testing.assert_allclose(added.embeddings, bundle.embeddings, atol=1e-6)
    assert (added.catalogue_rows.tolist(), refused) == (list(range(60)), {})


def test_new_label_gets_noise_and_popularity_of_the_rarest() -> None:
    bundle = make_bundle(label_tower=True, popularity=True)
    labels = bundle.labels
    # A noise that draws rare labels more often than frequent ones: its least is not the rarest label's.
    backwards = np.log((1 / (labels.counts + 1)) / (1 / (labels.counts + 1)).sum()).astype(np.float32)
    labels = replace(labels, log_pn=backwards)
    adder = LabelAdder(replace(bundle, labels=labels))
    records = [Upsert(id=id_, at=AT, features=label_features(3)) for id_ in ("new", "item-3")]
    added, _ = adder.add(records)
    rarest = int(labels.counts.argmin())
    assert added.log_pn.tolist() == [labels.log_pn[rarest], labels.log_pn[3]]
    assert added.log_popularity.tolist() == [labels.log_popularity[rarest], labels.log_popularity[3]]


def test_check_stops_at_the_first_invalid_record(monkeypatch: pytest.MonkeyPatch) -> None:
    adder, batches = LabelAdder(make_bundle(label_tower=True)), []
    embed = LabelAdder._embed

    def counted(self: LabelAdder, records: list[Upsert]) -> np.ndarray:
        batches.append(len(records))
        return embed(self, records)

    monkeypatch.setattr(LabelAdder, "_embed", counted)
    fits = [Upsert(id=f"new-{row}", at=AT, features=label_features(row)) for row in range(300)]
    wrong = [Upsert(id=f"wrong-{row}", at=AT, features={"genres": 7}) for row in range(600)]
    with pytest.raises(InputError) as refused:
        adder.check(fits + wrong)
    assert (refused.value.row, refused.value.field) == (300, "features.genres")
    assert batches == [256, 256]
    with pytest.raises(InputError) as refused:
        adder.check([*fits[:3], Upsert(id="x", at=AT, features=label_features(1), priors={"recent": 1.0}), *wrong])
    assert (refused.value.row, refused.value.field, len(batches)) == (3, "priors", 2)
