from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.data.sources import DATASETS
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.limits import check_negatives
from tests.trainer import tiny

SHIPPED = sorted(path.name for path in (files("trainer") / "recipes").iterdir() if path.name.endswith(".toml"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(tiny.RECIPE)
    return tmp_path / "recipe.toml"


def test_each_public_data_set_has_a_recipe() -> None:
    assert SHIPPED == [
        "amazon-beauty.toml",
        "delicious.toml",
        "gowalla-popularity.toml",
        "gowalla.toml",
        "movielens-100k.toml",
        "movielens-1m.toml",
    ]
    assert sorted(f"{name}.toml" for name in DATASETS) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_is_valid_and_says_how_to_run_it(name: str) -> None:
    path = Path(str(files("trainer") / "recipes" / name))
    head = path.read_text().split("\n\n")[0]
    stem = path.stem

    assert load_recipe(path).name == stem
    assert f"longtail-train data {stem} --out data/{stem}" in head
    assert f"longtail-train fit data/{stem}/recipe.toml --out runs/{stem}" in head


def test_paths_are_relative_to_the_recipe(path: Path) -> None:
    recipe = load_recipe(path, ["data.test=/elsewhere/test.parquet", "data.valid=sub/valid.csv"])

    assert recipe.data.train == path.parent / "interactions.parquet"
    assert recipe.data.labels == path.parent / "items.parquet"
    assert recipe.data.test == Path("/elsewhere/test.parquet")
    assert recipe.data.valid == path.parent / "sub" / "valid.csv"
    assert recipe.data.queries is None


OVERRIDES: dict[str, tuple[str, Callable[[Recipe], Any], Any]] = {
    "number": ("seed=7", lambda r: r.seed, 7),
    "nested": ("model.temperature=0.25", lambda r: r.model.temperature, 0.25),
    "new section": ("optimizer.l2=2", lambda r: r.optimizer.l2, 2),
    "new sections": ("loss.sampler.name=full", lambda r: r.loss.sampler.name, "full"),
    "bare string": ("loss.weight=tail", lambda r: r.loss.weight.name, "tail"),
    "quoted string": ('name="another"', lambda r: r.name, "another"),
    "string with =": ("data.query_id=a=b", lambda r: r.data.query_id, "a=b"),
    "list": ("evaluation.ks=[5, 7]", lambda r: r.evaluation.ks, [5, 7]),
    "list entry": ("query.features.1.max_length=3", lambda r: r.query.features[1].max_length, 3),
    "whole list entry": ("evaluation.ks.0=4", lambda r: r.evaluation.ks, [4, 5]),
    "table": (
        'loss.sampler={name="uniform", negatives=3}', lambda r: r.loss.sampler.arguments, {"negatives": 3}
    ),
    "boolean": ("model.label_bias=false", lambda r: r.model.label_bias, False),
}  # fmt: skip


@pytest.mark.parametrize(("override", "read", "expected"), OVERRIDES.values(), ids=OVERRIDES)
def test_overrides(path: Path, override: str, read: Callable[[Recipe], Any], expected: Any) -> None:
    assert read(load_recipe(path)) != expected
    assert read(load_recipe(path, [override])) == expected


BAD_OVERRIDES = {
    "no value": ("seed", r"--set: expected KEY=VALUE, received 'seed'"),
    "unknown key": ("seeds=3", r"seeds: expected one of name, seed, data, .*, received an unknown key"),
    "unknown nested key": (
        "model.dims=3",
        r"model.dims: expected one of dim, similarity, temperature, .*, received an unknown key",
    ),
    "unknown section": ("modle.dim=3", r"modle: expected one of name, .*model.*: did you mean 'model'\?"),
    "unknown key of a list's entry": ("query.features.0.knid=1", r"query.features.0.knid: expected one of name, kind,"),
    "index too high": (
        "query.features.9.dim=3",
        r"--set query.features.9.dim: expected an index below 2, received '9'",
    ),
    "no index": ("query.features.dim=3", r"--set query.features.dim: expected an index below 2, received 'dim'"),
    "below a value": ("model.dim.x=3", r"--set model.dim.x: expected a section before 'x', found 4"),
}


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES)
def test_bad_overrides(path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(path, [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"missing.toml: expected a recipe: No such file or directory"),
        (b"name = ", r"missing.toml: expected TOML: "),
        (b'name = "\xe9"', r"missing.toml: expected TOML: .*utf-8"),
        (
            b"PAR1 and more",
            r"a TOML file, received a table: `longtail-train init .*missing.toml` drafts a recipe from it",
        ),
        (b"", r"missing.toml: name: expected a value, received none; data: expected a value.*; query: .*; label: "),
    ],
    ids=["missing", "garbled", "latin-1", "a table", "empty"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "missing.toml").write_bytes(content)

    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("key", "received", "hint"), [("label_id", "product_id", ""), ("query_id", "user", ": did you mean 'user_id'?")]
)
def test_missing_id_column_is_the_first_problem(tmp_path: Path, key: str, received: str, hint: str) -> None:
    recipe = tiny.write_job(tmp_path)
    with pytest.raises(RecipeError) as refusal:
        load_recipe(recipe, [f"data.{key}={received}", "model.dim=no"])
    assert str(refusal.value) == (
        f"{recipe}: data.{key}: expected a column of {tmp_path / 'interactions.parquet'}, which has user_id, item_id, "
        f"timestamp, received {received!r}{hint}"
    )


def feature(**changes: Any) -> dict[str, Any]:
    return {"features": [{"name": "user_id", "kind": "id"} | changes]}


IMPOSSIBLE = {
    "feature twice": (
        {"query": {"features": [tiny.USER, tiny.USER]}},
        r"distinct names, received \['user_id', 'user_id'\]",
    ),
    "kind": (
        {"query": feature(kind="image")}, "feature: expected one of id, history, audience, bag, text, number, vector,"
    ),
    "a history of events without a column": (
        {"query": feature(kind="history", table="item_id", dim=4, events=["buy"])},
        r"query feature 'user_id': expected events of data\.events\.weights,",
    ),
    "no dims": ({"query": feature(kind="vector")}, "feature 'user_id': expected dims, the numbers in a vector"),
    "dims of an id": ({"query": feature(dims=3)}, "expected no dims: only for vector"),
    "label embeddings of a bag": (
        {"query": feature(kind="bag", entries="label_tower")},
        "expected no entries: only for history",
    ),
    "label embeddings in a table": (
        {"query": feature(kind="history", entries="label_tower", table="item_id")},
        "expected no table: entries =",
    ),
    "label embeddings of another width": (
        {"query": feature(kind="history", entries="label_tower", dim=8)},
        r"query feature 'user_id': expected dim = model\.dim = 4 with entries =",
    ),
    "a damped sum": (
        {"query": feature(kind="history", combiner="sum", damping=2)},
        "expected no damping: needs a mean of",
    ),
    "a damped number": (
        {"query": feature(kind="number", damping=2)},
        "expected no damping: needs a mean of",
    ),
    "half-life of a bag": ({"query": feature(kind="bag", half_life=3)}, "expected no half_life: only for history"),
    "buckets of a plain number": (
        {"query": feature(kind="number", buckets=3)}, "expected no buckets: needs transform ="
    ),
    "a date's table for ids": (
        {"query": feature(kind="date", table="item_id", dim=4)}, "table 'item_id': expected one dim, "
    ),
    "ranges of two sizes": (
        {
            "query": feature(kind="number", transform="quantile", table="age", buckets=8),
            "label": feature(name="age", kind="number", transform="quantile"),
        },
        "table 'age': expected one dim, and either ids or one kind",
    ),
    "layer of width 0": ({"query": feature() | {"hidden": [8, 0]}}, r"hidden: expected widths >= 1, received \[8, 0\]"),
    "sum of unequal widths": (
        {"query": {"combine": "sum", "features": [tiny.USER, {"name": "age", "kind": "number"}]}},
        r"combine = 'sum': expected features of equal width, received \[1, 4\]",
    ),
    "table of two widths": (
        {"query": feature(table="item_id", dim=8)},
        "table 'item_id': expected one dim, ",
    ),
    "table of ids and text": (
        {"query": feature(table="item_id", dim=4, kind="text")}, "table 'item_id': expected one dim, ",
    ),
    "table of texts hashed differently": (
        {
            "query": feature(name="query", kind="text", table="words", hash_rows=8),
            "label": feature(name="title", kind="text", table="words", hash_rows=64),
        },
        "table 'words': expected one dim, and either ids or one kind",
    ),
    "history of a label": (
        {"label": feature(kind="history")}, "label feature 'user_id': expected kinds other than history, which belongs",
    ),
    "a number in both towers": (
        {"query": feature(name="year", kind="number"), "label": feature(name="year", kind="number")},
        "number features: expected names of one tower each, received year in both",
    ),
    "weight": ({"loss": {"weight": "heavy"}}, "weight: expected one of unit, constant, .*, received 'heavy'"),
    "family": ({"loss": {"family": "cubic"}}, "family: expected one of softmax, bilateral_softmax.*, received 'cubic'"),
    "sampler": ({"loss": {"sampler": {"name": "lucky"}}}, "sampler: expected one of in_batch, .*, received 'lucky'"),
    "parameter of no sampler": (
        {"loss": {"sampler": {"name": "in_batch", "negatives": 5}}},
        "sampler 'in_batch': expected no parameters, received 'negatives'",
    ),
    "parameter of another sampler": (
        {"loss": {"sampler": {"name": "mixed", "negatives": 5, "alpha": 1}}},
        r"alpha\n  expected one of negatives, received an unknown key \(sampler 'mixed'\)",
    ),
    "parameter missing": (
        {"loss": {"sampler": {"name": "popularity"}}},
        r"negatives\n  expected a value, received none \(sampler 'popularity'\)",
    ),
    "row optimiser": (
        {"optimizer": {"embeddings": "lion"}},
        "embeddings: expected one of adagrad, adagrad_elementwise, adam, sgd, received 'lion'",
    ),
    "momentum without descent": (
        {"optimizer": {"momentum": 0.9}},
        "momentum: expected 0 where neither embeddings nor dense is sgd, received 0.9",
    ),
    "momentum of other embeddings": (
        {"optimizer": {"dense": "sgd", "embedding_momentum": 0.5}},
        "embedding_momentum: expected none with embeddings 'adam'",
    ),
    "k of 0": ({"evaluation": {"ks": [0, 2]}}, r"ks: expected values >= 1, received \[0, 2\]"),
    "unknown metric": ({"evaluation": {"metric": "luck@2"}}, "metric: expected recall.* one of .2., received 'luck@2'"),
    "metric at no k": (
        {"evaluation": {"metric": "recall@3"}},
        r"metric: expected .* one of \[2\], received 'recall@3'",
    ),
    "propensity score without propensity": (
        {"evaluation": {"metric": "psp@2"}}, "expected evaluation.propensity with 'psp@2'",
    ),
    "metric of a bucket": ({"evaluation": {"metric": "ndcg@2/tail"}}, "metric: expected .*received 'ndcg@2/tail'"),
    "floor of no metric": (
        {"evaluation": {"floor": {"gini@2": 0.1}}}, "floor: expected buckets of head.*, or metrics .*, received gini@2",
    ),
    "floor of a bucket's nDCG": ({"evaluation": {"floor": {"ndcg@2/tail": 0.1}}}, "floor: .*, received ndcg@2/tail"),
    "floor relative to no λ of the grid": (
        {"evaluation": {"floor": {"tail": {"times": 1.5, "bias_removal": 0.33}}}},
        r"floor: tail: expected one of bias_removal = \[0.0, .*\], received 0.33",
    ),
    "floor of a propensity score without propensity": (
        {"evaluation": {"floor": {"psp@2": 0.1}}}, "expected evaluation.propensity with 'psp@2'",
    ),
    "λ < 0 for a tree": (
        {
            "evaluation": {"bias_removal": [-0.5, 0]},
            "loss": {"family": "logistic", "sampler": {"name": "adversarial", "negatives": 2}},
        },
        r"evaluation\.bias_removal: expected λ >= 0 with sampler 'adversarial',",
    ),
    "split of everything": (
        {"data": {"split": {"strategy": "random", "valid": 0.5, "test": 0.5}}},
        r"split: expected valid \+ test < 1, received 0.5 \+ 0.5",
    ),
}  # fmt: skip


COSINES = {"similarity": "cosine", "temperature": 1}
SAMPLED = {"name": "uniform", "negatives": 5}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"cosine loss {name}": (
            {"loss": {"family": "contrastive"}, "model": COSINES | change},
            r"loss\.family: expected similarity = 'cosine', temperature = 1, fixed, and",
        )
        for name, change in {
            "at a temperature": {"temperature": 0.1}, "of a learned temperature": {"learn_temperature": True},
            "of inner products": {"similarity": "dot"}, "with a bias": {"label_bias": True},
        }.items()
    },
    "margin of no family": (
        {"loss": {"family": {"name": "hinge", "margin": 1}}},
        r"margin\n  expected one of pairwise, received an unknown key \(family 'hinge'\)",
    ),
    "ramp without a slope": (
        {"loss": {"family": {"name": "ramp", "margin": 0}}}, "expected more than 0, received 0 .family 'ramp'",
    ),
    "nce with weights": (
        {"loss": {"family": "nce", "weight": "tail"}},
        "weight: expected unit with family 'nce', a part of it, received 'tail'",
    ),
    "nce that never hits": (
        {"loss": {"family": "nce", "sampler": SAMPLED | {"exclude_positive": True}}},
        r"sampler\.exclude_positive, hits = 'mask': not allowed with family 'nce',",
    ),
    "A&R without importance weights": (
        {"loss": {"family": "augment_and_reduce"}},
        "weight: expected importance with family 'augment_and_reduce', .* received 'unit'",
    ),
    "A&R of the hardest": (
        {"loss": {"family": "augment_and_reduce", "weight": "importance", "mining": {"keep": 2}}},
        "mining: not allowed with family 'augment_and_reduce', whose bound needs an",
    ),
    "streaming frequencies for draws by count": (
        {"loss": {"frequencies": "streaming", "sampler": {"name": "popularity", "negatives": 5}}},
        "frequencies: expected 'counted' with sampler 'popularity', which draws by",
    ),
    "random features of inner products": (
        {"loss": {"sampler": {"name": "model", "negatives": 5, "features": 8}}, "model": {"similarity": "dot"}},
        r"loss\.sampler\.features: expected model\.similarity = 'cosine' with random",
    ),
    "exact features": (
        {"loss": {"sampler": {"name": "model", "negatives": 5, "exact": True, "features": 8}}},
        "sampler 'model': expected exact or features, not both, received model",
    ),
    "the least variance of no margin": (
        {"loss": {"sampler": {"name": "minimum_variance", "negatives": 5}}},
        "weight: expected importance, tail, logit_adjusted, equalised, adaptive",
    ),
    "the least variance of the hardest": (
        {"loss": {"sampler": {"name": "minimum_variance", "negatives": 5}, "weight": "tail", "mining": {"keep": 2}}},
        "sampler 'minimum_variance': expected no mining and no regularizer, for",
    ),
    "a regularised cosine": (
        {"loss": {"family": "contrastive", "regularizer": 0.1}, "model": {"similarity": "cosine", "temperature": 1}},
        "regularizer: not allowed with family 'contrastive', whose f is a cosine",
    ),
    "parameter of another weight": (
        {"loss": {"weight": {"name": "tail", "tau": 2}}}, "weight 'tail': expected no parameters, received 'tau'",
    ),
    "parameters of another weight": (
        {"loss": {"weight": {"name": "equalised", "exponent": 2}}},
        r"exponent\n  expected one of power, threshold, received an unknown key",
    ),
    "shared draws without every positive": (
        {"loss": {"sampler": SAMPLED | {"shared": True, "exclude_positive": True}}},
        "sampler 'uniform': expected shared = False with exclude_positive, which",
    ),
    "mining of nothing": ({"loss": {"mining": {}}}, "mining: expected keep, power, both or theta, received none"),
    "mining twice": (
        {"loss": {"mining": {"theta": [2, 1], "keep": 2}}},
        "mining: expected theta alone or keep and power, received keep = 2, theta =",
    ),
    "mining of the easier before the harder": (
        {"loss": {"mining": {"theta": [1, 2]}}},
        r"mining: expected a non-increasing ϑ .*, received \[1.0, 2.0\]",
    ),
    "theta of nothing": ({"loss": {"mining": {"theta": [0.0, 0.0]}}}, "begins above 0, received"),
    "epsilon above theta": (
        {"loss": {"mining": {"keep": 2, "epsilon": 0.6}}},
        r"mining: expected a non-increasing ϑ .*, received \[0.5, 0.5, 0.6\]",
    ),
    "epsilon beyond all": (
        {"loss": {"mining": {"power": 1, "epsilon": 0.1}}},
        "mining: epsilon = 0.1 needs keep or theta, as it weighs the ranks beyond them",
    ),
    "in-batch draws without replacement": (
        {"loss": {"sampler": {"name": "mixed", "negatives": 5, "replace": False}}},
        r"replace\n  expected one of negatives, received an unknown key",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"), [*IMPOSSIBLE.values(), *REFUSED.values()], ids=[*IMPOSSIBLE, *REFUSED]
)
def test_impossible_settings_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny.recipe(**sections)


TOO_MANY: dict[str, tuple[dict[str, Any], str]] = {
    "draws": ({"sampler": {"name": "uniform", "negatives": 6}}, "negatives: expected at most 5, .*received 6"),
    "draws but the positive": (
        {"sampler": {"name": "popularity", "negatives": 5, "exclude_positive": True}},
        "negatives: expected at most 4, the labels there are to draw, received 5",
    ),
    "of drawn ones": (
        {"sampler": {"name": "uniform", "negatives": 3}, "mining": {"keep": 4}},
        "mining.keep: expected at most 3, the negatives of a row, received 4",
    ),
    "of the batch": ({"mining": {"keep": 9}}, "mining.keep: expected at most 8, .*received 9"),
    "of both": (
        {"sampler": {"name": "mixed", "negatives": 2}, "mining": {"keep": 11}},
        "mining.keep: expected at most 10, .*received 11",
    ),
    "of all": ({"sampler": "full", "mining": {"keep": 6}}, "mining.keep: expected at most 5, .*received 6"),
    "ranks": (
        {"sampler": {"name": "uniform", "negatives": 3}, "mining": {"theta": [3, 2, 1, 1]}},
        "mining.theta: expected at most 3, the negatives of a row, received 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "message"), TOO_MANY.values(), ids=TOO_MANY)
def test_counts_above_the_labels_are_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"loss.(sampler.|){message}"):
        check_negatives(tiny.recipe(loss=loss), labels=5, batch_size=8)


def test_all_problems_are_named_at_once(path: Path) -> None:
    with pytest.raises(RecipeError, match=r"seed: .*; loss.weight: weight: expected one of .*, received 'heavy'"):
        load_recipe(path, ["seed=-1", "loss.weight=heavy"])
