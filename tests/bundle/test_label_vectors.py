"""Vectors of labels that a bundle keeps: written, memory-mapped, checked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle, BundleCorruptError, BundleInvariantError, Feature
from tests.bundles import make_bundle

L = 6
SEEN = Feature(name="seen", kind="vector", dims=2, missing=None, of_label="picture")
PICTURE = Feature(name="picture", kind="vector", dims=2, missing=None)
VECTORS = np.arange(2 * L, dtype=np.float32).reshape(L, 2)
VECTORS[4] = np.nan


def bundle(seen: Feature = SEEN, picture: Feature = PICTURE, vectors: Any = VECTORS, **more: Any) -> Bundle:
    made = make_bundle(labels=L)
    manifest = made.manifest
    features = {"query_features": [*manifest.query_features, seen], "label_features": [picture]}
    return replace(made, manifest=manifest.model_copy(update=features), label_vectors={"picture": vectors} | more)


def test_they_are_read_as_they_were_written_and_stay_on_disk(tmp_path: Path) -> None:
    written = bundle().write(tmp_path / "bundle")

    loaded = Bundle.load(tmp_path / "bundle")

    assert written.manifest.files["label_vectors/picture.npy"].bytes == 128 + 4 * 2 * L
    assert isinstance(loaded.label_vectors["picture"], np.memmap)
    np.testing.assert_array_equal(loaded.label_vectors["picture"], VECTORS)
    assert loaded.manifest.query_features[-1] == SEEN
    file = tmp_path / "bundle" / "label_vectors" / "picture.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleCorruptError, match=r"label_vectors/picture\.npy"):
        Bundle.load(tmp_path / "bundle")


WRONG = {
    "no file": ({"label_vectors": {}}, "has a file for each .* expected .'picture'., found .."),
    "a file too many": ({"other": VECTORS}, "and no other"),
    "a label too few": ({"vectors": VECTORS[:-1]}, "expected float32 .6, 2., found float32 .5, 2"),
    "doubles": ({"vectors": VECTORS.astype(np.float64)}, "found float64"),
    "half a vector": ({"vectors": np.where(np.arange(2) == 1, np.nan, VECTORS)}, "NaN in a whole row.* row 0"),
    "infinity": ({"vectors": np.full((L, 2), np.inf, np.float32)}, "finite, or NaN in a whole row"),
    "other dims": (
        {"picture": PICTURE.model_copy(update={"dims": 3})},
        "of the same dims among the label features: expected one of dims 2",
    ),
    "of no feature": ({"seen": SEEN.model_copy(update={"of_label": "photo"})}, "names a vector .* found photo"),
    "of a label": ({"picture": PICTURE.model_copy(update={"of_label": "picture"})}, "is of query features only"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_contradicts_the_features_is_refused(change: dict[str, Any], message: str) -> None:
    made = replace(bundle(), **change) if "label_vectors" in change else bundle(**change)
    with pytest.raises(BundleInvariantError, match=message):
        made.validate()
