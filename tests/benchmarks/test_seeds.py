"""The studies' arithmetic: intervals, the rule of verdicts, metrics per query, the search on validation, protocols."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.seeds.findings import (
    Estimate,
    Finding,
    estimate_of,
    findings,
    holm,
    learns,
    paired,
    verdict,
)
from benchmarks.seeds.measure import contributions
from benchmarks.seeds.run import Bench
from benchmarks.seeds.store import Record, Store, pack_values, protocol_of
from benchmarks.seeds.studies import studies
from benchmarks.seeds.study import FULL, POPULARITY, SEEDS, Method, Study
from longtail.trainer import recipes
from longtail.trainer.evaluation.metrics import Bootstrap, LabelFacts, Positives, compute_metrics

RECIPES = Path(recipes.__path__[0])
OF_RECIPES = [study for study in studies() if (RECIPES / f"{study.data}.toml").exists()]
"""Of data that the trainer has recipes for; the others are generated with recipes of their own."""


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (Estimate(0.02, 0.01, 0.03), "**reproduced**"),
        (Estimate(0.02, -0.01, 0.05), "not reproduced"),
        (Estimate(-0.02, -0.03, -0.01), "not reproduced, opposite"),
        (Estimate(0.02, 0.0, 0.04), "not reproduced"),
        (None, "not measured yet"),
    ],
)
def test_verdict_depends_on_the_interval(estimate: Estimate | None, words: str) -> None:
    assert verdict(estimate) == words


def test_interval_of_pairs_is_normal() -> None:
    """Differences of mean .1 and deviation 1 over 2,500 queries: .1 ± 1.96/50, whatever both methods share."""
    rng = np.random.default_rng(0)
    shared = 10 * rng.standard_normal(2_500)
    difference = rng.standard_normal(2_500)
    difference += 0.1 - difference.mean()

    estimate = paired((shared + difference / difference.std())[None], shared[None])

    assert estimate.lead == pytest.approx((difference / difference.std()).mean())
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 / 50, rel=0.1)


def test_disagreeing_seeds_widen_an_interval() -> None:
    """Leads of 0, 3 and 6 without noise over queries: 3 ± 4.3027 · 3/√3, where two degrees of freedom leave 95 %."""
    a_SN = np.repeat([[0.0], [3.0], [6.0]], 100, axis=1)

    estimate = paired(a_SN, np.zeros((1, 100)))

    assert estimate.lead == 3
    assert (estimate.low, estimate.high) == pytest.approx((3 - 4.302653 * 3**0.5, 3 + 4.302653 * 3**0.5))
    assert estimate.p == pytest.approx(1 - (3 / (3 + 2)) ** 0.5), "t = √3 of two degrees: 1 − t/√(t² + 2)"
    assert paired(a_SN[1:2], np.zeros((1, 100))) == Estimate(3, 3, 3, 0)


@pytest.mark.parametrize("of_seeds", [0.0, 0.02, 0.2, 2.0])
def test_interval_covers_the_truth(of_seeds: float) -> None:
    """A truth of 0 over three seeds and 400 queries of deviation 1: at least 92 % of 1,000 intervals."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(1_000):
        d_SN = of_seeds * rng.standard_normal((3, 1)) + rng.standard_normal(400) + 0.1 * rng.standard_normal((3, 400))
        estimate = paired(d_SN, np.zeros((1, 400)))
        covered += estimate.low <= 0 <= estimate.high
    assert covered >= 920


def test_p_values_are_adjusted_by_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_claims_of_no_paper_are_marked() -> None:
    by = [it.claimed_by for it in findings() if it.study]
    assert (by.count("us"), by.count("extension")) == (5, 9)


def record(method: str, seed: int, values: list[float], **more: object) -> Record:
    packed = {"precision@1@0": pack_values(np.array(values))}
    return Record(
        study="s", method=method, choice={}, seed=seed, protocol="", valid=0.0, bias_removal=0.0, seconds=10.0,
        labels=2, pairs=2, test={"0": {}}, values=packed, **more,
    )  # fmt: skip


def test_finding_is_the_lead_of_the_better_method() -> None:
    records = [
        record(method, seed, values) for method, values in (("a", [1, 0, 1, 1]), ("b", [0, 0, 1, 0])) for seed in SEEDS
    ]

    ahead = estimate_of(Finding("", "", "s", "a", "b", "precision@1"), records)
    behind = estimate_of(Finding("", "", "s", "b", "a", "precision@1"), records)

    assert ahead is not None
    assert behind is not None
    assert (ahead.lead, behind.lead) == (0.5, -0.5)
    assert estimate_of(Finding("", "", "s", "a", "c", "precision@1"), records) is None
    assert estimate_of(Finding("", "", "s", "a", "b", "precision@1"), records[:-1]) is None  # b lacks a seed


def test_study_needs_a_full_loss_above_popularity() -> None:
    study = replace(studies()[0], compare=("precision@1",))
    full = [record(FULL, seed, [1, 0, 1, 1] * 50) for seed in SEEDS]

    assert learns(study, [*full, record(POPULARITY, 0, [0, 0, 1, 0] * 50)])
    assert not learns(study, [*full, record(POPULARITY, 0, [1, 0, 1, 1] * 50)])
    assert not learns(study, full)


def test_contributions_average_to_the_trainers_metrics() -> None:
    """And by hand for a query that finds one of two labels; what [R21] calls Full is over pairs."""
    rng = np.random.default_rng(0)
    positives = Positives.collect(rng.integers(0, 30, 200), rng.integers(0, 50, 200), queries=30, labels=50)
    top_NK = np.stack([rng.permutation(50)[:10] for _ in range(30)]).astype(np.int32)
    buckets_L = rng.integers(0, 3, 50).astype(np.int8)

    shares = contributions(top_NK, positives, ks=[1, 10], buckets_L=buckets_L)
    metrics = compute_metrics(
        top_NK, positives, LabelFacts(np.ones(50, np.int64), buckets_L), ks=[1, 10],
        bootstrap=Bootstrap(30, resamples=10, seed=0),
    )  # fmt: skip

    assert set(shares) - set(metrics) == {"pair_recall@1", "pair_recall@10"}
    for name in set(shares) & set(metrics):
        assert shares[name].mean() == pytest.approx(metrics[name].value), name
    assert shares["pair_recall@10"].mean() == positives.hits(top_NK).sum() / len(positives.keys)


def test_findings_name_measured_methods() -> None:
    by_name = {study.name: study for study in studies()}
    for finding in findings():
        assert bool(finding.study) != bool(finding.reason)
        if finding.reason:
            continue
        study = by_name[finding.study]
        names = [method.name for method in study.methods]
        assert {finding.better, finding.worse} <= set(names), finding
        assert finding.metric in study.compare, finding


@pytest.mark.parametrize("study", OF_RECIPES, ids=lambda study: study.name)
def test_studies_use_recorded_recipes(study: Study, tmp_path: Path) -> None:
    """Whatever the recipes of their data say today: an id and a pooled history, a bag, and each method's own loss."""
    (tmp_path / study.data).mkdir()
    shutil.copy(RECIPES / f"{study.data}.toml", tmp_path / study.data / "recipe.toml")
    bench = Bench(study, tmp_path, Store(tmp_path, tmp_path), tmp_path, Console(quiet=True))
    for method in study.methods:
        recipe = bench.recipe(method, {}, 0)
        assert all(feature.encoder is None for feature in recipe.query.features)
        assert recipe.loss.negatives_per == "pair"
        if "loss.family" not in {**study.settings, **method.settings}:
            assert recipe.loss.family.name == "softmax"
        if "loss.hits" not in {**study.settings, **method.settings}:
            assert recipe.loss.hits is None


def test_mined_and_unmined_negatives_have_equal_total_weight() -> None:
    """Of 8 negatives at logit 0 the hinge costs 1 each: all of them, or the hardest k, cost 1 together."""
    import tensorflow as tf

    from longtail.trainer.config import LossConfig
    from longtail.trainer.losses.batch import SampledLogits

    zeros = tf.zeros((2, 8))
    logits = SampledLogits(
        tf.fill((2,), 5.0), zeros, tf.zeros((2, 8), tf.bool), tf.fill((2,), -9.0), tf.fill((8,), -9.0),
        tf.fill((2,), -9.0), tf.fill((8,), -9.0),
    )  # fmt: skip
    study = next(study for study in studies() if study.name == "re19.mixture-10k")
    for method in study.methods[2:]:
        mined = method.name.partition(",")[0].partition(" ")[2]
        config = LossConfig.model_validate(
            {"family": "hinge", "weight": method.settings["loss.weight"].strip('"')}
            | ({"mining": {"keep": min(int(mined), 8)}} if mined else {})
        )
        np.testing.assert_allclose(config.objective()(logits).numpy(), [1, 1], rtol=1e-3)


def test_record_of_another_protocol_is_ignored(tmp_path: Path) -> None:
    study = studies()[0]
    method = study.methods[1]
    store = Store(tmp_path / "fresh", tmp_path / "packed")
    stored = replace(
        record(method.name, 0, [1.0]), study=study.name, protocol=protocol_of(study, method), choice={"rate": 0.1}
    )  # fmt: skip

    store.put(stored)
    store.pack(study, {})  # one seed of three: its values are not left out
    (next((tmp_path / "fresh").glob("*/*.json"))).unlink()

    assert store.records(study) == {f"{method.name} | rate = 0.1 | seed 0": stored}
    assert store.records(replace(study, epochs=study.epochs + 1)) == {}
    assert protocol_of(study, method) != protocol_of(study, Method(method.name, {"loss.weight": '"unit"'}))
