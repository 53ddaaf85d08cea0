"""Check custom rows by the examples of docs/extending.md."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.bundle import Bundle
from longtail.trainer import RecipeError, evaluate, fit, load_recipe, register
from longtail.trainer.checkpoint import hash_run
from longtail.trainer.config import Recipe
from longtail.trainer.losses import MASKED, LogWeight, Objective
from longtail.trainer.losses.implied_noise import implied_noise
from longtail.trainer.plugin_checks import check_custom_rows
from longtail.trainer.sampling import Sampler, SamplerSetup
from tests.trainer import tiny
from tests.trainer.page import page_toml

pytestmark = pytest.mark.usefixtures("tables")


PI = np.array([0.5, 0.25, 0.125, 0.125])


@pytest.mark.usefixtures("page")
def test_the_noise_of_a_weight_follows_from_its_terms() -> None:
    nu = implied_noise(Objective("softmax", "damped", weight_arguments={"power": 0.25}), np.log(PI), np.log(PI))

    expected = PI**0.75 / (PI**0.75).sum()
    np.testing.assert_allclose(np.exp(nu), expected, rtol=1e-5)


def test_custom_samplers_draw_by_their_log_q(page: SimpleNamespace) -> None:
    import keras

    sampler = page.blend(SamplerSetup(np.log(PI), batch_size=2), negatives=200_000, alpha=0.3)
    drawn = ops.convert_to_numpy(sampler.draw(keras.random.SeedGenerator(1), None))

    q = 0.7 * PI + 0.3 / 4
    np.testing.assert_allclose(np.exp(sampler.log_q_L), q, rtol=1e-5)
    errors = (np.bincount(drawn, minlength=4) / len(drawn) - q) / np.sqrt(q * (1 - q) / len(drawn))
    assert np.abs(errors).max() < 4


def test_a_family_by_hand(page: SimpleNamespace) -> None:
    """φ(1.5) = 0 of the positive; ½·φ(−1) = ½·1.5 of one negative, none of the masked one."""
    row = np.float32([1.5]), np.float32([[1, 9]]), np.float32([[np.log(0.5), MASKED]])
    assert float(page.smooth_hinge(*row)[0]) == pytest.approx(0.75)


@pytest.mark.slow
@pytest.mark.usefixtures("page")
def test_the_page_s_recipe_trains_measures_and_exports(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path, recipe=tiny.RECIPE.replace("[evaluation]", page_toml("[evaluation]")))
    bundle = fit(recipe, tmp_path / "out", overrides=["loss.sampler.negatives=8"])

    loaded = Bundle.load(tmp_path / "out")
    assert str(loaded.manifest.loss.weight) == "damped(power = 0.25)"
    assert loaded.manifest.software["family smooth_hinge"].startswith("page:smooth_hinge")
    pi, nu = (np.exp(column.astype(float)) for column in (loaded.labels.log_popularity, loaded.labels.log_pn))
    noise = (0.7 * pi + 0.3 / 16) ** 0.75
    np.testing.assert_allclose(nu, noise / noise.sum(), rtol=1e-4)
    measured = evaluate(bundle).curve[0].metrics["tail_rate@5"]
    assert measured.low is not None
    assert 0 <= measured.low <= measured.value <= 1


WRONG = {
    "unknown weight": (
        "loss.weight=damp",
        "weight: expected one of unit, .*received 'damp', which is neither registered nor an entry point of longtail",
    ),
    "a near one": ("loss.family=sofmax", "an entry point of longtail.families: did you mean 'softmax'"),
    "another library's": ("loss.family=bpr", "did you mean family 'logistic' with pairwise = true, weight 'unit'"),
    "unknown metric": ("evaluation.metrics=['other']", "metric: expected one of tail_rate, received 'other', which is"),
    "unknown parameter": (
        "loss.weight={name='damped', strength=1}", "expected one of power, received an unknown key",
    ),
    "wrong type": (
        "loss.family={name='smooth_hinge', scale='wide'}", "expected a number, received 'wide' .family 'smooth",
    ),
    "lacking": ("loss.sampler=blend", "negatives: expected a value, received none .sampler 'blend'"),
    "metric of none": ("evaluation.metric=tail_rate@5", r"metric: expected recall\|.* @ one of \[3, 5\]"),
    "of ours": ("loss.weight={name='unit', power=1}", "weight 'unit': expected no parameters, received 'power'"),
}  # fmt: skip


@pytest.mark.parametrize(("override", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.usefixtures("page")
def test_recipes_are_checked_against_the_row_s_parameters(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(tiny.write_job(tmp_path), [override])


def test_names_of_ours_and_other_signatures_are_refused() -> None:
    with pytest.raises(ValueError, match="weight 'unit': expected a name that is not Longtail's own"):
        register.weight("unit")
    with pytest.raises(ValueError, match="metric 'recall': expected a name that is not Longtail's own"):
        register.metric("recall")
    with pytest.raises(
        ValueError, match=r"family 'mine': expected 3 positional argument\(s\) .*received mine\(positive\)"
    ):

        @register.family("mine", link=1.0)
        def mine(positive):
            return positive

    with pytest.raises(ValueError, match="family 'mine': expected link > 0 or None, received 0"):
        register.family("mine", link=0)


def test_a_sampler_without_a_noise_is_refused() -> None:
    def check(sampler: object, weight: str = "unit") -> None:
        check_custom_rows("mine", sampler, Objective("softmax", weight), labels=4)

    def draw(*_):
        return ops.zeros(3, "int32")

    by_query = Sampler(None, in_batch=False, draw=draw, log_q=lambda _, labels: ops.zeros_like(labels))
    check(Sampler(np.log(PI).astype(np.float32), in_batch=False, draw=draw))
    check(by_query, "importance")
    with pytest.raises(RecipeError, match=r"weight 'unit' is not allowed.*weight that cancels q \(importance\)"):
        check(by_query)
    with pytest.raises(RecipeError, match=r"expected log_q_L.*received neither"):
        check(Sampler(None, in_batch=False, draw=draw))
    with pytest.raises(RecipeError, match=r"that sum to 1, received log_q_L that sum to 4"):
        check(Sampler(np.zeros(4, np.float32), in_batch=False, draw=draw))
    with pytest.raises(RecipeError, match="received neither: it has no negatives"):
        check(Sampler(np.log(PI).astype(np.float32), in_batch=False, draw=None))
    with pytest.raises(RecipeError, match="expected a Sampler, received NoneType"):
        check(None)


def test_a_weight_that_is_not_separable_is_refused() -> None:
    register.weight("mixed_up")(lambda log: LogWeight(log.m, log.q_negative * ops.mean(log.pi_positive)))
    register.weight("number")(lambda _: 1.0)
    register.weight("swapped")(lambda log: LogWeight(log.q_negative, log.q_positive))

    with pytest.raises(RecipeError, match="row of the positive alone and col of the negative alone"):
        check_custom_rows("uniform", None, Objective("softmax", "mixed_up"), labels=4)
    with pytest.raises(RecipeError, match="weight 'number': expected a LogWeight, received float"):
        check_custom_rows("uniform", None, Objective("softmax", "number"), labels=4)
    with pytest.raises(RecipeError, match=r"received \(3,\) and \(2,\)"):
        check_custom_rows("uniform", None, Objective("softmax", "swapped"), labels=4)


@pytest.mark.usefixtures("page")
def test_a_family_that_counts_masked_negatives_is_refused() -> None:
    register.family("counts", link=1.0)(lambda f, g, _: f + ops.sum(g, axis=1))
    register.family("total", link=1.0)(lambda f, _, __: ops.sum(f))

    check_custom_rows("uniform", None, Objective("smooth_hinge"), labels=4)
    with pytest.raises(RecipeError, match="no effect of negatives whose log-weight is MASKED"):
        check_custom_rows("uniform", None, Objective("counts"), labels=4)
    with pytest.raises(RecipeError, match=r"loss of every row, shape \(2,\)"):
        check_custom_rows("uniform", None, Objective("total"), labels=4)


@pytest.mark.usefixtures("page")
def test_identity_depends_on_the_source_of_custom_rows() -> None:
    data = tiny.dataset(tiny.pairs((0, 0), (1, 1)), queries=2, labels=2)
    recipe = tiny.recipe(loss={"weight": "damped"})
    before = hash_run(recipe, data)
    assert hash_run(recipe, data) == before

    @register.weight("damped")
    def damped(log, *, power: float = 0.5):
        return LogWeight(-log.m, -power * log.q_negative)

    assert hash_run(recipe, data) != before


def test_installed_packages_offer_rows_by_entry_points(page: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `shop` made here offers the page's rows; none is loaded before a recipe names it."""
    shop = {
        "losses": ("damped", "smooth_hinge"), "sampling": ("blend",), "metrics": ("tail_rate",),
        "layers": ("gated", "cyclic", "self_attention"),
    }  # fmt: skip
    for module, names in shop.items():
        monkeypatch.setitem(
            sys.modules, f"shop.{module}", SimpleNamespace(**{name: getattr(page, name) for name in names})
        )
    monkeypatch.setitem(sys.modules, "shop", SimpleNamespace())
    offered = [
        EntryPoint(name, value, group)
        for group, rows in tomllib.loads(page_toml("entry-points"))["project"]["entry-points"].items()
        for name, value in rows.items()
    ]
    offered.append(EntryPoint("gone", "shop.losses:gone", "longtail.weights"))
    monkeypatch.setattr(register, "entry_points", lambda **criteria: EntryPoints(offered).select(**criteria))
    for kind in register.GROUPS:
        for name in [name for name in register._TABLES[kind] if name not in register.BUILT_IN[kind]]:
            del register._TABLES[kind][name]

    recipe = tiny.recipe(loss={"weight": "damped", "sampler": {"name": "blend", "negatives": 2}}, evaluation={
        "metrics": ["tail_rate"], "metric": "tail_rate@2"}, label={"tower": "gated"})  # fmt: skip

    assert set(recipe.own_rows) == {"weight damped", "sampler blend", "metric tail_rate", "tower gated"}
    with pytest.raises(ValueError, match=r"weight 'gone': expected 'shop\.losses:gone' to load:"):
        tiny.recipe(loss={"weight": "gone"})
    with pytest.raises(
        ValueError, match=r"feature 'cyclic': expected 'shop\.layers:cyclic' to be a FeatureKind, found"
    ):
        tiny.recipe(query={"features": [{"name": "hour", "kind": "cyclic", "period": 24}]})


def test_the_page_s_loss_term_fades_pairs_by_age(page: SimpleNamespace) -> None:
    train = tiny.pairs((0, 0), (0, 1), (1, 0))
    term = page.FadeWithAge(replace(train, times=np.array([0.0, 5.0, 10.0])), half_life=5.0)
    columns = term.columns(np.array([0, 2]), {}, np.random.default_rng(0))
    rows = term.row_tensors(SimpleNamespace(batch=columns))
    losses_B = term.target(np.float32([1, 1]), SimpleNamespace(rows=rows))
    assert ops.convert_to_numpy(losses_B).tolist() == [0.25, 1.0]


@pytest.mark.usefixtures("tables")
def test_the_notebook_s_loss_equals_its_formula() -> None:
    text = (Path(__file__).parents[2] / "docs/tutorial_researcher.md").read_text()
    loss, checks, comparison = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    (recipe,) = re.findall(r"(?ms)^```toml\n(.*?)^```", text)
    names: dict[str, Any] = {"__name__": "my_losses"}
    exec(loss, names)
    exec(checks.replace("from my_losses import margin_softmax\n", ""), names)
    compile(comparison, "tutorial_researcher.md", "exec")
    (family,) = re.findall(r"\{ name = .margin_softmax.[^}]*\}", comparison)
    Recipe.model_validate(tomllib.loads(recipe.replace("[loss]", f"[loss]\nfamily = {family}")))
