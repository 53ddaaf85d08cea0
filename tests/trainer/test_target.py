"""Another prior of labels than the data's: recall there from valid pairs, and the λ and μ that are chosen for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from typer.testing import CliRunner

from longtail.trainer import cli, evaluate, fit
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.metrics import Positives
from longtail.trainer.evaluation.target import FILE, HitsByLabel
from tests.trainer import tiny

IDS = pa.array(["a", "b", "c", "d"])
PI = np.array([0.5, 0.25, 0.125, 0.125])
TOP = {Setting(0.0): np.int32([[0, 1], [2, 3], [1, -1]]), Setting(1.0): np.int32([[0, 1], [0, 1], [0, 1]])}
TEST_PAIRS = [(0, 0), (0, 3), (1, 0), (1, 2), (2, 1), (2, 0)]


def counted_hits() -> HitsByLabel:
    hits = HitsByLabel(2, IDS, PI, 4, {"uniform": Setting(0.0)})
    queries, labels = np.array(TEST_PAIRS).T
    for setting, top_NK in TOP.items():
        hits.count_hits(setting, top_NK, Positives.collect(queries, labels, queries=3, labels=4))
    return hits


def test_recall_under_a_prior_by_hand(tmp_path: Path) -> None:
    """Of a, three pairs, b, c and d one each: found are a 1, b 1, c 1 at λ = 0, and a 3, b 1 at λ = 1."""
    market = tmp_path / "market.csv"
    market.write_text("label,share\nd,3\nb,1\nunknown,4\n")
    expected: dict[str, tuple[list[float], float]] = {
        "train": ([3 / 6, 4 / 6], 1.0),
        "uniform": ([(2 + 4 + 8) / (6 + 4 + 8 + 8), (6 + 4) / 26], 1.0),
        str(market): ([4 / (4 + 24), 4 / 28], 0.5),
    }

    for prior, (values, covered) in expected.items():
        recalls, share = counted_hits().recall(prior)
        assert [measured.setting for measured in recalls] == list(TOP)
        assert [measured.recall.value for measured in recalls] == pytest.approx(values)
        assert all(measured.recall.low <= measured.recall.value <= measured.recall.high for measured in recalls)
        assert share == pytest.approx(covered)
    assert counted_hits().best("train") == (Setting(1.0), pytest.approx(4 / 6))
    assert counted_hits().best("uniform") == (Setting(0.0), pytest.approx(14 / 26))


def test_figures_survive_a_bundle(tmp_path: Path) -> None:
    hits = HitsByLabel(2, IDS, PI, 4, {"uniform": Setting(0.0)})
    few = Positives.collect(np.array([0, 1]), np.array([0, 2]), queries=3, labels=4)
    hits.count_hits(Setting(0.5, -1.0), TOP[Setting(0.0)], few)
    (tmp_path / FILE).write_bytes(hits.to_bytes())
    again = HitsByLabel.read(tmp_path)

    assert again.ids.to_pylist() == ["a", "c"]
    assert (again.k, again.theory) == (2, {"uniform": Setting(0.0)})
    for prior in ("train", "uniform"):
        assert again.recall(prior) == hits.recall(prior)
    assert again.recall("uniform")[1] == 0.5
    assert again.recall("train")[1] == pytest.approx(0.625)
    with pytest.raises(DataError, match=f"expected {FILE}, which longtail-train fit writes where it validates"):
        HitsByLabel.read(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("label,weight\na,1\n", "market.csv: expected a column 'share', found label, weight"),
        ("label,share\na,-1\n", "market.csv: column 'share': expected finite numbers >= 0, found others"),
        ("label,share\nz,1\n", "expected a share of some label with held-out pairs, found none"),
    ],
)
def test_invalid_prior_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "market.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        counted_hits().recall(str(tmp_path / "market.csv"))
    with pytest.raises(DataError, match="expected train, uniform, or a file with columns label and share, received "):
        counted_hits().recall(str(tmp_path / "nowhere.csv"))


def test_valid_pairs_predict_recall_under_label_shift() -> None:
    """Pairs of a known p(x|y), some with labels drawn by π and some uniformly: the first, reweighed, have the recall of
    the second at every λ, and the λ that is best there, 0, is neither the first's own, 1, nor looked up."""
    rng = np.random.default_rng(0)
    labels, kinds, pairs, k = 60, 200, 200_000, 5
    pi_L = 1 / np.arange(1, labels + 1) ** 1.2
    pi_L /= pi_L.sum()
    of_label_LX = rng.gamma(0.08, size=(labels, kinds))
    of_label_LX /= of_label_LX.sum(axis=1, keepdims=True)
    joint_XL = (of_label_LX * pi_L[:, None]).T
    scores_XL = np.log(joint_XL / joint_XL.sum(axis=1, keepdims=True) + 1e-12) - np.log(pi_L)

    def drawn(prior_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.choice(labels, pairs, p=prior_L)
        cumulative_LX = of_label_LX.cumsum(axis=1)
        kinds_N = (rng.random(pairs)[:, None] > cumulative_LX[chosen]).sum(axis=1)
        return np.minimum(kinds_N, kinds - 1), chosen

    grid = np.arange(0, 1.25, 0.25)
    counted = HitsByLabel(k, pa.array([str(label) for label in range(labels)]), pi_L, labels)
    shifted = []
    valid, test = drawn(pi_L), drawn(np.full(labels, 1 / labels))
    for strength in grid:
        top_XK = np.argsort(-(scores_XL + strength * np.log(pi_L)), axis=1)[:, :k].astype(np.int32)
        positives = Positives.collect(np.arange(pairs), valid[1], queries=pairs, labels=labels)
        counted.count_hits(Setting(float(strength)), top_XK[valid[0]], positives)
        shifted.append((top_XK[test[0]] == test[1][:, None]).any(axis=1).mean())

    recalls, covered = counted.recall("uniform")
    assert covered == 1
    np.testing.assert_allclose([measured.recall.value for measured in recalls], shifted, atol=0.01)
    assert counted.best("uniform")[0].bias_removal == grid[np.argmax(shifted)] == 0
    assert counted.best("train")[0].bias_removal == 1


LOSSES: dict[str, tuple[list[str], Setting, str]] = {
    "ν is π": ([], Setting(0.0), "π"),
    "ν is uniform": (['loss.sampler={name="uniform",negatives=8}'], Setting(0.0, -1.0), "uniform"),
    "scores are ½ log p": (['loss.sampler={name="model",negatives=8}'], Setting(0.0, -0.5), "exp(f)"),
}


@pytest.mark.parametrize(
    ("loss", "theory", "noise"),
    [
        pytest.param(*case, id=name, marks=() if name == "ν is uniform" else pytest.mark.nightly)
        for name, case in LOSSES.items()
    ],
)
def test_job_uses_the_target_prior(loss: list[str], theory: Setting, noise: str, tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    overrides = [*loss, "training.epochs=2", "training.refit=true", "evaluation.target_prior=uniform"]
    bundle = fit(recipe, tmp_path / "out", overrides=overrides)
    stored = HitsByLabel.read(tmp_path / "out")
    settings = {Setting(float(at)) for at in (0, 0.5, 1)}
    if loss:
        settings = {Setting(0.0, at) for at in (-1.0, -0.75, -0.5, -0.25, 0.0, 0.5, 1.0)}

    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert max(history["metrics"].values()) == pytest.approx(stored.best("uniform")[1]), "epochs are chosen by it too"
    assert bundle.manifest.bias_removal.noise == noise
    assert set(stored.hits) == settings
    assert stored.theory["uniform"] == theory
    assert stored.best("uniform")[0] == Setting(
        bundle.manifest.bias_removal.default, bundle.manifest.popularity.default
    )
    assert bundle.manifest.bias_removal.chosen_by == "target prior uniform and valid recall@5"
    assert evaluate(tmp_path / "out").value() > 0, "what is served is a point of the curve"
    assert evaluate(tmp_path / "out", recipe, overrides=overrides).value() == evaluate(tmp_path / "out").value()
    printed = CliRunner().invoke(cli.app, ["evaluate", str(tmp_path / "out"), "--target-prior", "uniform"])
    assert printed.exit_code == 0, printed.output
    words = " ".join(printed.output.split())
    assert "valid, labels drawn as uniform, top 5" in words
    assert f"▶ best; theory: {theory};" in words
    assert words.count("▶") == 2, "the best, and the caption that says so"
    report = (tmp_path / "out" / "report.html").read_text()
    assert (
        "<dt>Best if all labels are chosen equally often</dt>"
        f"<dd>{stored.best('uniform')[0]} (theory: {theory}), recall@5" in report
    )


def test_unusable_prior_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.trainer.job.train", lambda *_, **__: pytest.fail("trains"))
    recipe = tiny.write_job(tmp_path)
    (tmp_path / "market.csv").write_text("label,share\n1,many\n")
    with pytest.raises(DataError, match=r"market\.csv: column 'share': expected finite numbers"):
        fit(recipe, tmp_path / "out", overrides=["evaluation.target_prior=market.csv"])
    alone = ["evaluation.target_prior=uniform", 'data.split={strategy="random",valid=0,test=0.1}']
    with pytest.raises(DataError, match="expected valid pairs to choose λ on for uniform, found none"):
        fit(recipe, tmp_path / "out", overrides=alone)
