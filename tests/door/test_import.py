"""`import longtail`: names on first use, in little time, and one line for every object."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import BaseModel

import longtail
import longtail.bundle
import longtail.index
import longtail.trainer
from longtail.bundle.one_line import LONGEST, one_line
from longtail.index import ExactRows, open_releases
from longtail.trainer import load_recipe
from longtail.trainer.data.loading import load_dataset
from tests.trainer import tiny


@pytest.mark.process
def test_import_loads_nothing_else() -> None:
    """Nothing but the standard library, so that it takes milliseconds."""
    program = (
        "import sys; before = {*sys.modules}; import longtail; "
        "new = {name.partition('.')[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names}; "
        "assert new == {'longtail'}, new; assert not [n for n in sys.modules if n.startswith('longtail.')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.process
def test_answers_need_no_training_framework(releases: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('keras', 'tensorflow', 'jax', 'torch')));"
        f"import longtail; model = longtail.load({str(releases)!r});"
        "assert len(model.recommend({'user_id': 'u3'}, k=3)) == 3; model.similar('item-1'); model._repr_html_()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_exported_name_exists() -> None:
    assert [name for name in longtail.__all__ if not hasattr(longtail, name)] == []
    assert {*longtail.__all__} <= {*dir(longtail)}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        longtail.nothing  # noqa: B018


def test_repr_of_public_objects_is_one_short_line(releases: Path, model: longtail.Model, tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_job(tmp_path))
    release, bundle = open_releases(releases).open("first"), model.bundle
    objects = [
        model, bundle, bundle.manifest, release, release.manifest, release.spec, release.searcher, ExactRows(bundle),
        bundle.labels, bundle.augmentation, bundle.cooccurrence, bundle.remembered, bundle.vocabularies["users"],
        recipe, load_dataset(recipe.data, seed=0), longtail.index.Filter(exclude=np.arange(1000)),
        longtail.index.IndexSpec(),
        longtail.index.publish(releases, "first"), model.retriever, longtail.bundle.LabelChanges(),
        *bundle.manifest.query_features, bundle.manifest.bias_removal, evaluate_stored(bundle),
        longtail.serving.Settings(releases=releases),  # type: ignore[attr-defined]
    ]  # fmt: skip
    for value in objects:
        assert len(repr(value)) <= LONGEST, repr(value)
        assert "\n" not in repr(value)
    assert repr(model) == "Model('synthetic', 60 labels, d = 8 at λ = 0.5, ω = 0.5)"
    assert repr(release).startswith("Release('first', ")


def evaluate_stored(bundle: longtail.bundle.Bundle) -> object:
    manifest = bundle.manifest
    return longtail.trainer.EvaluationResult(
        manifest.name, "recall@20", manifest.bias_removal, manifest.popularity, manifest.cooccurrence
    )


def test_repr_shows_array_shapes_and_is_cut() -> None:
    class Thing(BaseModel, arbitrary_types_allowed=True):
        vectors: np.ndarray
        ids: pa.Array
        text: str
        more: list[int]
        nothing: None = None
        __repr__ = one_line

    thing = Thing(vectors=np.zeros((3, 2), np.float32), ids=pa.array(["a"]), text="a\nb", more=[*range(9)])
    assert repr(thing) == "Thing(vectors=float32[3, 2], ids=string[1], text='a\\nb', more=list[9])"
    thing.text = "x" * 500
    assert "text='" + "x" * 58 + "…" in repr(thing)


def test_a_card_has_facts_and_the_picture_of_a_curve(model: longtail.Model) -> None:
    card = model._repr_html_()
    assert "<h4>synthetic</h4>" in card
    assert "<td>60</td>" in card
    assert "<img" not in card  # no curve
