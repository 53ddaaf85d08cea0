"""A whole training job: data → train → choose λ and μ → refit → evaluate → bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import keras
import numpy as np
from rich.console import Console

from longtail.bundle import BiasRemoval, Bundle, CurvePoint, Popularity, refuse_existing
from longtail.trainer.config import EvaluationConfig, Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset, read_dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import CheckpointError
from longtail.trainer.evaluation.dial import Dial, Setting, best_dial, lines
from longtail.trainer.evaluation.ranking import bias_removal_curve, log_proposal_of
from longtail.trainer.evaluation.report import evaluation_table, html_report
from longtail.trainer.export.bundle import to_bundle
from longtail.trainer.history import TrainingHistory
from longtail.trainer.progress import Reporter
from longtail.trainer.train import Trained, prepare_run, train


def fit(
    recipe: Recipe | Path | str,
    out: Path | str,
    reporter: Reporter | None = None,
    *,
    overrides: Sequence[str] = (),
) -> Bundle:
    """Run a recipe: train, choose λ and μ on valid, evaluate on test, and write the bundle to `out`.

    Checkpoints and TensorBoard logs go to `OUT.work`; a killed job started again with the same recipe,
    data and `out` goes on where it was. Checkpoints are removed once the bundle is written. Figures repeat to the
    last digit on one machine and backend; `longtail-train` sets TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is loaded,
    and to have its very figures from Python, so must the caller.

    Args:
        recipe: a recipe, or the path of its TOML file.
        out: directory to write; must not exist.
        reporter: shows progress and the table of figures; `Reporter()` does on the terminal, None shows nothing.
        overrides: of a recipe that is a path, `KEY=VALUE`, such as `model.dim=32`.

    Returns:
        The bundle as written; `evaluate` gives its figures.

    Raises:
        BundleExistsError: `out` is already there; raised before any work.
        TrainerError: what is wrong with the recipe, the data, a checkpoint or the export.

    Example:
        >>> bundle = fit("recipe.toml", "runs/tiny", overrides=["training.epochs=1"])
        >>> bundle.manifest.labels, bundle.embeddings.shape
        (16, (16, 4))
    """
    out, reporter = Path(out), reporter or Reporter(Console(quiet=True))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    refuse_existing(out)
    dataset = read_dataset(recipe)
    _describe(recipe, dataset, reporter)
    work = work_directory(out)
    trained = train(
        recipe,
        dataset,
        epochs=recipe.training.epochs,
        work=work / "select",
        logs=work / "logs" / "select",
        reporter=reporter,
    )
    dial = choose_dial(trained, dataset)
    selection = trained.history
    if recipe.training.refit and len(dataset.valid):
        reporter.say(f"Refit on train + valid for {trained.history.best_epoch} epochs, {dial.default}")
        trained = train(
            recipe,
            dataset.refit(),
            epochs=trained.history.best_epoch,
            work=work / "refit",
            logs=work / "logs" / "refit",
            reporter=reporter,
        )
    bundle = finish(trained, dataset, dial, selection, reporter).write(out)
    for stage in ("select", "refit"):
        shutil.rmtree(work / stage, ignore_errors=True)
    reporter.say(f"[bold]Bundle[/] {out}  ·  report {out / 'report.html'}  ·  logs {work / 'logs'}")
    return bundle


def export_checkpoint(recipe: Recipe, work: Path, out: Path, reporter: Reporter) -> Bundle:
    """Write a bundle from the newest checkpoint of an unfinished job, as it stands.

    Args:
        recipe: of the job.
        work: the job's `OUT.work`.
        out: directory to write; must not exist.
        reporter: shows progress and the table of figures.

    Raises:
        BundleExistsError: `out` is already there; raised before any work.
        CheckpointError: there is no checkpoint, or it is of another recipe or other data.
        DataError, ExportError: what is wrong with the data, or with the export.
    """
    refuse_existing(out)
    dataset = read_dataset(recipe)
    run = prepare_run(recipe, dataset, epochs=recipe.training.epochs, work=work / "select")
    if run.epoch == run.step == 0:
        raise CheckpointError(f"{work / 'select'}: expected a checkpoint of this recipe, found none")
    trained = run.trained
    return finish(trained, dataset, choose_dial(trained, dataset), trained.history, reporter).write(out)


def choose_dial(trained: Trained, dataset: Dataset) -> Dial:
    """The λ, and the μ at that λ, of the best metric on valid, with the curve there.

    Without valid, μ is 0 and λ the recipe's, or else what undoes the training in theory [METHODS §9].

    Raises:
        DataError: as `curve_of`.
    """
    config, noise = trained.recipe.evaluation, trained.noise()
    curve: list[CurvePoint] = []
    if len(dataset.valid):
        chosen_by = f"valid {config.metric}"
        best, curve = best_dial(
            lambda settings: curve_of(trained, dataset.valid, known=dataset.train, config=config, settings=settings),
            config,
            noise,
        )
    elif config.default_bias_removal is not None:
        chosen_by, best = "the recipe, for want of validation data", Setting(config.default_bias_removal)
    else:
        chosen_by, best = "theory, for want of validation data", Setting(trained.theory_s_bias_removal())
    bias_removal = BiasRemoval(
        default=best.bias_removal,
        minimum=0.0 if trained.model.proposal is not None else -1.0,
        noise=noise.name,
        chosen_by=chosen_by,
        curve_split="valid" if curve else "none",
        curve=curve,
    )
    return Dial(bias_removal, Popularity(default=best.popularity))


def curve_of(
    trained: Trained,
    held_out: Pairs,
    *,
    known: Pairs,
    config: EvaluationConfig,
    settings: Sequence[Setting] | None = None,
) -> list[CurvePoint]:
    """Every metric at some settings of λ and μ, with histories and seen labels read from `known`.

    Args:
        trained: the model.
        held_out: pairs to find.
        known: what a query has seen.
        config: what to measure.
        settings: by default the grid of λ at μ = 0.

    Raises:
        DataError: no held-out pair is left to find, or a metric over more labels than there are.
    """
    features = trained.encoding.query.with_history(known)
    return bias_removal_curve(
        held_out,
        known,
        lambda rows_B: trained.model.embed_queries(features.of_queries(rows_B)),
        trained.label_side(),
        config,
        queries=len(trained.dataset.query_ids),
        askers=trained.dataset.askers,
        seed=trained.recipe.seed,
        settings=settings,
        log_proposal=log_proposal_of(trained.model.proposal, features),
        calibrated_at=trained.recipe.loss.calibrated_at,
    )


def finish(trained: Trained, dataset: Dataset, dial: Dial, history: TrainingHistory, reporter: Reporter) -> Bundle:
    """Evaluate on test where there is one, print the table, make the bundle (not yet written).

    Args:
        trained: the final model.
        dataset: with its splits as loaded.
        dial: λ and μ as chosen on valid.
        history: of the run that was validated, for the report.
        reporter: where to print.

    Raises:
        DataError: as `curve_of`.
        ExportError: a tower is too large for ONNX, or computes something else there.
    """
    recipe = trained.recipe
    if len(dataset.test):
        reporter.say("Evaluating on test, full catalogue …")
        known = dataset.train.followed_by(dataset.valid) if len(dataset.valid) else dataset.train
        settings = lines(recipe.evaluation, trained.noise(), dial.default.bias_removal)
        curve = curve_of(trained, dataset.test, known=known, config=recipe.evaluation, settings=settings)
        dial = dial.measured("test", curve)
    if dial.curve:
        title = f"{recipe.name}: {dial.bias_removal.curve_split}"
        reporter.console.print(evaluation_table(title, dial, recipe.evaluation.metric))
    held_out = next((pairs for pairs in (dataset.test, dataset.valid) if len(pairs)), dataset.train)
    facts = {
        "Labels": f"{len(dataset.label_ids):,}",
        "Queries": f"{len(dataset.query_ids):,}",
        "Training pairs": f"{len(trained.dataset.train):,}",
        "Loss": str(recipe.loss),
        "Model": f"{recipe.model.similarity}, d = {recipe.model.dim}, T = {trained.model.temperature:.3g}",
        "Epochs": f"{len(trained.history.losses)}, batches of {recipe.training.batch_size:,}",
        "Seed": str(recipe.seed),
        "Backend": f"Keras {keras.version()} on {keras.backend.backend()}",
    }
    reports = {
        "metrics.json": dial.bias_removal.model_dump_json(indent=1).encode(),
        "history.json": json.dumps(asdict(history), indent=1).encode(),
        "recipe.json": recipe.model_dump_json(
            indent=1, by_alias=True, exclude={"data": {"train", "valid", "test", "queries", "labels"}}
        ).encode(),
    }
    if dial.curve:
        reports["report.html"] = html_report(recipe, dial, history, facts)
    return to_bundle(trained, np.unique(held_out.askings), dial, reports)


def work_directory(out: Path) -> Path:
    """The directory of a job's checkpoints and logs, `OUT.work`."""
    return out.with_name(out.name + ".work")


def _describe(recipe: Recipe, dataset: Dataset, reporter: Reporter) -> None:
    reporter.say(
        f"[bold]{recipe.name}[/]: {len(dataset.query_ids):,} queries × {len(dataset.label_ids):,} labels; "
        f"{len(dataset.train):,} training, {len(dataset.valid):,} validation, {len(dataset.test):,} test pairs; "
        f"{recipe.loss}"
    )
    if dataset.asked is not None:
        reporter.say(
            f"Asked in {len(dataset.asked.queries):,} ways, by context and attributes; each is ranked by itself"
        )
    if dataset.impressions is not None:
        reporter.say(
            f"{len(dataset.impressions.ids):,} impressions, of weight {recipe.loss.impressions:g} if not chosen"
        )
    paired = [pairs.queries for pairs in (dataset.train, dataset.valid, dataset.test)]
    if unpaired := len(dataset.query_ids) - len(np.unique(np.concatenate(paired))):
        reporter.say(f"{unpaired:,} of the queries have no label: nothing is learned from them or measured on them")
