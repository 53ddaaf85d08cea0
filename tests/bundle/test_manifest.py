from typing import Any

import pytest
from pydantic import ValidationError

from longtail.bundle import Bonus, CurvePoint, Feature, Interval, Manifest, Popularity
from tests.bundles import make_bundle

HISTORY = {"name": "history", "kind": "history", "vocabulary": "items", "max_length": 10}


@pytest.mark.parametrize(
    "feature",
    [
        {"name": "user_id", "kind": "id", "vocabulary": "users"},
        HISTORY,
        {"name": "genres", "kind": "bag", "vocabulary": "genres", "max_length": 5},
        {"name": "title", "kind": "text", "hash_rows": 100, "max_length": 5},
        {"name": "age", "kind": "number", "missing": 31.5},
    ],
    ids=lambda feature: feature["kind"],
)
def test_every_kind_of_feature_survives_json(feature: dict[str, Any]) -> None:
    built = Feature(**feature)

    assert Feature.model_validate_json(built.model_dump_json()) == built


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"name": "a", "kind": "id"}, "vocabulary belongs to id, history, audience, bag and text with"),
        ({"name": "a", "kind": "number", "vocabulary": "v"}, "vocabulary belongs to id, history, audience, bag"),
        ({"name": "a", "kind": "text", "max_length": 3}, "hash_rows belongs to text"),
        ({"name": "a", "kind": "id", "vocabulary": "v", "hash_rows": 9}, "hash_rows belongs to text"),
        ({"name": "a", "kind": "bag", "vocabulary": "v"}, "max_length belongs to history, bag and text"),
        ({"name": "a", "kind": "id", "vocabulary": "v", "max_length": 3}, "max_length belongs to history"),
        (
            {"name": "a", "kind": "text", "standardize": "lower", "max_length": 3},
            "standardize belongs to text with a voc",
        ),
        (HISTORY | {"standardize": "lower"}, "standardize belongs to text with a vocabulary, and only to it"),
        (
            {"name": "a", "kind": "text", "standardize": "none", "vocabulary": "v", "max_length": 3, "hash_rows": 9},
            "hash_rows belongs to text without standardize, and only to it",
        ),
        (HISTORY | {"max_length": 0}, "greater than or equal to 1"),
        (HISTORY | {"name": "no spaces"}, "String should match pattern"),
        (
            HISTORY | {"kind": "image"},
            "Input should be 'id', 'history', 'audience', 'bag', 'text', 'number', 'vector' or 'date'",
        ),
        (HISTORY | {"unknown": 1}, "Extra inputs are not permitted"),
    ],
)
def test_feature_with_fields_of_another_kind_is_refused(feature: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Feature(**feature)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": 0}, "labels\n.*greater than or equal to 1"),
        ({"dim": 0}, "dim\n.*greater than or equal to 1"),
        ({"temperature": 0}, "temperature\n.*greater than 0"),
        ({"kappa": 0}, "kappa\n.*greater than 0"),
        ({"kappa_popularity": 0}, "kappa_popularity\n.*greater than 0"),
        ({"similarity": "euclidean"}, "similarity\n.*'dot' or 'cosine'"),
        ({"label_bias": True}, "kappa_bias belongs to a bundle with label_bias, and only to it"),
        ({"kappa_bias": 1.0}, "kappa_bias belongs to a bundle with label_bias, and only to it"),
        ({"query_features": [HISTORY, HISTORY]}, r"expected distinct names, received \['history', 'history'\]"),
        ({"files": {"a": {"sha256": "short", "bytes": 1}}}, "files.a.sha256"),
        ({"bonus": {"torso": {}, "tail": {}}}, "bonus: expected torso, tail, new, received torso, tail"),
        ({"bonus": {"head": {}, "torso": {}, "tail": {}, "new": {}}}, "Input should be 'torso', 'tail' or 'new'"),
        ({"surprise": 1}, "surprise\n.*Extra inputs are not permitted"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inconsistent_manifest_is_refused(change: dict[str, Any], message: str) -> None:
    manifest = make_bundle(labels=3).manifest.model_dump()

    with pytest.raises(ValidationError, match=message):
        Manifest.model_validate(manifest | change)


def test_default_of_a_prior_is_within_limits() -> None:
    assert Popularity() == Popularity(default=0, minimum=-1, maximum=2)
    with pytest.raises(ValidationError, match=r"expected -1.0 <= default <= 2.0, received -2"):
        Popularity(default=-2)


def test_manifest_describes_the_bonus() -> None:
    manifest = make_bundle(labels=3).manifest
    assert manifest.bonus == {bucket: Bonus(default=0, minimum=-5, maximum=5) for bucket in ("torso", "tail", "new")}
    curve = [
        CurvePoint(bias_removal=1, bonus=bonus, metrics={"recall@20": Interval(value=value)})
        for bonus, value in (({}, 0.3), ({"tail": 1.5}, 0.25))
    ]
    dial = manifest.bias_removal.model_copy(
        update={"default": 1.0, "chosen_by": "valid recall@20", "curve": curve}
    )  # fmt: skip
    bonus = manifest.bonus | {"tail": Bonus(default=1.5)}
    changed = manifest.model_copy(update={"bias_removal": dial, "bonus": bonus})

    assert changed.in_words().endswith(", recall@20 0.2500 at λ = 1, β tail = 1.5")
