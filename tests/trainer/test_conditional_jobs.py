"""Run whole jobs with query-dependent samplers and stateful losses, interrupted ones included."""

from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.trainer.config import TrainingConfig, load_recipe
from longtail.trainer.errors import RecipeError
from longtail.trainer.evaluation.bundle import evaluate
from longtail.trainer.evaluation.dial import Dial, Setting
from longtail.trainer.job import fit
from longtail.trainer.progress import EpochProgress
from tests.trainer import tiny

ADVERSARIAL = ["loss.family=logistic", 'loss.sampler={name="adversarial", negatives=3, dims=4}']
JOBS = {
    "adversarial": [*ADVERSARIAL, "loss.regularizer=0.001", "evaluation.log_likelihood=true"],
    "model": ['loss.sampler={name="model", negatives=3, features=16}', "loss.weight=importance"],
    "augment and reduce": [
        "loss.family=augment_and_reduce", "loss.weight=importance", 'loss.sampler={name="uniform", negatives=3}',
    ],
    "all that draws or keeps": [
        "loss.frequencies=streaming", "loss.weight=relative", "data.reduction=sample", "training.batch_size=6",
        "query.dropout=0.5", "query.input_activation=relu", "label.dropout=0.25", "optimizer.average=0.9",
        "loss.retrieved_negatives={negatives=2, depth=4}",
    ],
    "mined": ["loss.family={name='hinge', pairwise=true}", "loss.mining={keep=2, power=0.5, draw=3}"],
}  # fmt: skip


def run(folder: Path, settings: list[str], name: str = "out") -> Bundle:
    path = folder / "recipe.toml"
    if not path.exists():
        tiny.write_job(folder)
    return fit(load_recipe(path, settings), folder / name)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", JOBS.values(), ids=JOBS)
def test_an_interrupted_job_equals_an_uninterrupted_one(
    tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*settings, "training.epochs=2", "evaluation.baselines=[]"]
    monkeypatch.setattr(TrainingConfig, "checkpoint_steps", 3)
    uninterrupted = run(tmp_path, settings, "whole")
    advance, steps = EpochProgress.advance, iter(range(12))

    def breaks(self: EpochProgress, examples: int, *, loss: float) -> None:
        advance(self, examples, loss=loss)
        if next(steps) == 11:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EpochProgress, "advance", breaks)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, settings, "broken")
    again = run(tmp_path, settings, "broken")

    np.testing.assert_array_equal(again.embeddings, uninterrupted.embeddings)
    np.testing.assert_array_equal(again.labels.bias, uninterrupted.labels.bias)
    assert again.manifest.bias_removal == uninterrupted.manifest.bias_removal


@pytest.mark.slow
def test_bundles_hold_the_tree_and_the_measured_dial(tmp_path: Path) -> None:
    written = run(tmp_path, JOBS["adversarial"])
    bundle = Bundle.load(tmp_path / "out")

    assert bundle.manifest.loss.sampler == "adversarial(negatives = 3, dims = 4)"
    assert bundle.proposal is not None
    assert sorted(bundle.proposal.projection) == ["history"], "the query's own id would need a direction per query"
    curve = bundle.manifest.bias_removal.curve
    assert len({point.metrics["recall@3"].value for point in curve}) > 1, "the dial moves"
    likely = {point.bias_removal: point.metrics.get("log_likelihood") for point in curve if not point.popularity}
    assert [value is None for value in likely.values()] == [True, True, False], "of log-probabilities: at λ = 1 alone"
    assert likely[1.0].value < 0

    again = evaluate(tmp_path / "out", tmp_path / "recipe.toml", overrides=JOBS["adversarial"])
    manifest = bundle.manifest
    assert (manifest.bias_removal.noise, manifest.bias_removal.minimum) == ("p_n(y|x)", 0)
    assert bundle.labels.log_popularity is None, "the one column is log π, and μ has it"
    assert {point.bias_removal for point in curve if point.popularity} == {manifest.bias_removal.default}
    with pytest.raises(RecipeError, match=r"expected λ >= 0 for .*out, which has a tree, received -0\.5"):
        evaluate(tmp_path / "out", tmp_path / "recipe.toml", overrides=["evaluation.bias_removal=[-0.5, 0.0]"])
    stored = Dial(written.manifest.bias_removal, written.manifest.popularity)
    assert again.dial.default == stored.default
    for point, other in zip(again.dial.curve, stored.curve, strict=True):
        assert Setting.read_point(point) == Setting.read_point(other)
        figures, others = dict(point.metrics), dict(other.metrics)
        if (likelihood := figures.pop("log_likelihood", None)) is not None:
            assert likelihood.value == pytest.approx(others.pop("log_likelihood").value, abs=1e-4), "ONNX, not Keras"
        assert figures == others
