"""`fit` on frames and places: the recipe of `init`, kept with its data; then an audit, an index and vectors."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import longtail
from longtail.bundle import BundleExistsError
from longtail.tables import DataError
from longtail.trainer.init.recipe import draft_recipe
from tests.trainer import tiny
from tests.trainer.conftest import turn_off_compiler_and_ink

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

CLICKS = tiny.clustered(users=40, items=16, per_user=8, seed=0).rename_columns(["user_id", "product_id", "clicked_at"])
PRODUCTS = pa.table({"product_id": range(16), "title": [f"Title {item}" for item in range(16)]})
COLUMNS = {"query": "user_id", "label": "product_id", "time": "clicked_at"}
QUICK = ["training.epochs=1", "evaluation.baselines=[]", "model.temperature=0.1", "evaluation.bootstrap=10"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[longtail.Model, Path]:
    out = tmp_path_factory.mktemp("fit") / "runs" / "shop"
    import_module("longtail.trainer.backend")
    with pytest.MonkeyPatch.context() as patched:
        turn_off_compiler_and_ink(patched)
        model = longtail.fit(CLICKS.to_pandas(), labels=PRODUCTS, out=out, overrides=QUICK, **COLUMNS)
    return model, out


def sources(kind: str, folder: Path) -> tuple[Any, Any]:
    if kind == "path":
        pq.write_table(CLICKS, folder / "clicks.parquet")
        pq.write_table(PRODUCTS, folder / "products.parquet")
        return str(folder / "clicks.parquet"), folder / "products.parquet"
    if kind == "polars":
        polars = pytest.importorskip("polars")
        return polars.from_arrow(CLICKS), polars.from_arrow(PRODUCTS).lazy()
    if kind == "duckdb":
        return duckdb.from_arrow(CLICKS), duckdb.from_arrow(PRODUCTS)
    return (CLICKS, PRODUCTS) if kind == "arrow" else (CLICKS.to_pandas(), PRODUCTS.to_pandas())


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "duckdb", "path"])
def test_every_source_drafts_the_recipe_of_init(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is left out; the recipe that it would read is compared."""
    trained: list[Any] = []

    def no_training(recipe: Any, *_: object) -> Any:
        trained.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("longtail.trainer.job.fit", no_training)
    clicks, products = sources(kind, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        longtail.fit(clicks, labels=products, out=tmp_path / "out", **COLUMNS)
    pq.write_table(CLICKS, tmp_path / "clicks.parquet")
    pq.write_table(PRODUCTS, tmp_path / "labels.parquet")
    draft_recipe(
        tmp_path / "clicks.parquet", tmp_path / "recipe.toml", labels=tmp_path / "labels.parquet",
        query_id="user_id", label_id="product_id", timestamp="clicked_at",
    )  # fmt: skip
    drafted = longtail.trainer.load_recipe(tmp_path / "recipe.toml")  # type: ignore[attr-defined]
    (recipe,) = trained
    paths = {"train", "labels", "queries"}
    assert recipe.data.model_dump(exclude=paths) == drafted.data.model_dump(exclude=paths)
    assert recipe.model_dump(exclude={"data"}) == drafted.model_dump(exclude={"data"})
    file_names = {path.name for path in (tmp_path / "out.data").iterdir()}
    assert file_names == {"recipe.toml"} | (set() if kind == "path" else {"clicks.parquet", "labels.parquet"})


def test_a_fitted_model_answers_and_is_indexed(fitted: tuple[longtail.Model, Path], tmp_path: Path) -> None:
    model, out = fitted
    answers = model.recommend(pd.DataFrame({"user_id": [3, 4], "history": [[], []]}), k=5)
    assert list(answers.columns[:5]) == ["user_id", "rank", "product_id", "score", "bucket"]
    assert answers["user_id"].tolist() == [3] * 5 + [4] * 5
    assert (out.parent / "shop.data" / "recipe.toml").exists()
    release = longtail.build(model, tmp_path / "releases", spec="flat")
    longtail.publish(tmp_path / "releases", release.name)
    again = longtail.load(tmp_path / "releases").recommend({"user_id": 3}, k=5)
    assert again.equals(model.recommend({"user_id": 3}, k=5))
    assert longtail.evaluate(model).name == "clicks"
    assert "<img" in model._repr_html_()
    assert len(repr(longtail.evaluate(model))) <= 200


def test_lists_of_a_model_can_be_audited(fitted: tuple[longtail.Model, Path]) -> None:
    """Lists of labels that each query has in test, and nothing else, find everything."""
    order = CLICKS.sort_by("clicked_at")
    train, test = order.slice(0, 280), order.slice(280)
    lists = fitted[0].recommend(pa.table({"user_id": range(40), "history": [[]] * 40}), k=16, exclude_history=False)
    report = longtail.audit(lists, train.to_pandas(), test, query="user_id", label="product_id", k=16, baselines=())
    assert report.metrics["recall@16"].value == 1.0
    assert len(repr(report)) <= 200


def test_failed_fits_leave_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="product"):
        longtail.fit(CLICKS, label="product", out=tmp_path / "out")
    with pytest.raises(longtail.trainer.RecipeError, match="did you mean 'training'"):  # type: ignore[attr-defined]
        longtail.fit(CLICKS, out=tmp_path / "out", overrides=["train.epochs=1"], **COLUMNS)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleExistsError):
        longtail.fit(CLICKS, out=tmp_path / "out", **COLUMNS)
    with pytest.raises(TypeError, match="because the recipe names them"):
        longtail.fit(tmp_path / "recipe.toml", label="product_id", out=tmp_path / "new")


def test_vectors_in_a_frame_become_a_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(30, 4)).astype(np.float32)
    frame = pd.DataFrame({
        "item": [f"i{row}" for row in range(30)], "pairs": range(1, 31), "vector": [*vectors], "title": "t",
    })  # fmt: skip
    model = longtail.from_vectors(frame, id="item", count="pairs", out=tmp_path / "vectors")
    answers = model.recommend(vector=vectors[7], k=30, bias_removal=0)
    expected = np.argsort(-(vectors @ vectors[7]), kind="stable")
    assert answers["label_id"].tolist() == [f"i{row}" for row in expected]
    assert answers["title"].tolist() == ["t"] * 30
