"""A training job: data → train → choose λ and μ → refit → evaluate → bundle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from longtail.bundle import Bundle
from longtail.bundle.store import refuse_existing
from longtail.trainer.check import examine, print_summary
from longtail.trainer.checkpoint import lock_folder, shared_facts
from longtail.trainer.choice import choose_dial, create_hit_counter
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.cooccurrence import rebuild_term
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.default_figures import measure_default
from longtail.trainer.devices import WORLD, Cluster, check_same_inputs, join_processes, wait_for_all
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.limits import check_sizes, find_refusals
from longtail.trainer.progress import Reporter
from longtail.trainer.results import Selection, finish, report_choice
from longtail.trainer.temperature import choose_temperature
from longtail.trainer.trackers import tracker_module
from longtail.trainer.train import train
from longtail.trainer.warm_start import WarmStart


def fit(
    recipe: Recipe | Path | str,
    out: Path | str,
    reporter: Reporter | None = None,
    *,
    overrides: Sequence[str] = (),
    warm_start: Path | str | None = None,
    track: Sequence[str] = (),
    cluster: Cluster = Cluster(),  # noqa: B008 (frozen)
) -> Bundle:
    """Run a recipe: train, choose λ and μ on valid, evaluate on test, and write the bundle to `out`.

    Checkpoints and TensorBoard logs go to `OUT.work`. An interrupted job resumes if it is started with the same recipe,
    data and `out`. Figures repeat to the last digit on one machine and backend. `longtail-train` sets
    TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is loaded; a caller from Python must do the same to get equal figures.

    Args:
        recipe: a recipe, or the path of its TOML file.
        out: directory to write; must not exist.
        reporter: shows progress and the table of figures; `Reporter()` prints to the terminal, None shows nothing.
        overrides: `KEY=VALUE`, such as `model.dim=32`, for a recipe given by its path.
        warm_start: bundle with initial weights, for rows of ids that still exist and for weights of the same shape.
        track: `mlflow`, `wandb`: records settings and figures of the validated run there as well.
        cluster: address of the processes of `training.processes`. Every process makes the same call, reads the same
            data and sees the folder of `out`; the first process writes.

    Raises:
        BundleExistsError: `out` already exists; raised before any work.
        TrainerError: a problem with the recipe, the data, a checkpoint, the export or an argument.

    Example:
        >>> bundle = fit("recipe.toml", "runs/tiny", overrides=["training.epochs=1"])
        >>> bundle.manifest.labels, bundle.embeddings.shape
        (16, (16, 4))
    """
    out, reporter = Path(out), reporter or Reporter(Console(quiet=True, force_jupyter=False))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    refuse_existing(out)
    several = recipe.training.processes > 1
    if several or cluster != Cluster():
        join_processes(recipe, cluster)
    # One process speaks for all.
    if WORLD.process:
        reporter = Reporter(Console(quiet=True, force_jupyter=False))
    for name in track:
        tracker_module(name)
    try_own_layers(recipe)
    weights = None if warm_start is None else WarmStart.read(Path(warm_start))
    dataset = read_dataset(recipe)
    if several:
        check_same_inputs(shared_facts(recipe, dataset, None if weights is None else weights.sha256))
    report = examine(recipe, dataset)
    if refusal := next(find_refusals(recipe, dataset, report.held_out), None):
        raise refusal
    print_summary(report, reporter.say)
    if weights is not None:
        weights.warn_of_learnt(dataset, reporter)
    lock = out.with_name(f"{out.name}.work")
    with nullcontext(lock) if WORLD.process else lock_folder(lock) as work:
        recipe, temperatures = choose_temperature(recipe, dataset, work, reporter, weights)
        trained = train(
            recipe, dataset, epochs=recipe.training.epochs, work=work / "select", logs=work / "logs" / "select",
            reporter=reporter, warm_start=weights, track=track,
        )  # fmt: skip
        by_label = create_hit_counter(trained)
        dial, term, towers = choose_dial(trained, dataset, by_label)
        trained = replace(trained, cooccurrence=term)
        report_choice(trained, dial, towers, reporter)
        figures = None if len(dataset.test) else measure_default(trained, dataset, dial, "valid", reporter)
        history = replace(trained.history, temperatures=temperatures)
        selection = Selection(dial, towers, history, figures, by_label)
        if recipe.training.refit and len(dataset.valid):
            epochs, all_pairs = trained.history.best_epoch, dataset.refit()
            check_sizes(recipe, all_pairs)
            reporter.say(f"Refit on train + valid for {epochs:g} epochs, {dial.default}")
            trained = train(
                recipe, all_pairs, epochs=epochs, work=work / "refit", logs=work / "logs" / "refit",
                reporter=reporter, warm_start=weights,
            )  # fmt: skip
            if term is not None:
                trained = replace(trained, cooccurrence=rebuild_term(term, recipe, trained.dataset))
        bundle = finish(trained, dataset, selection, report.held_out, reporter, out)
        # Checkpoints have served once the bundle is written; logs stay.
        for stage in () if WORLD.process else ("select", "refit"):
            shutil.rmtree(work / stage, ignore_errors=True)
        if several:
            wait_for_all("the end")
        reporter.say(f"[bold]Bundle[/] {out}  ·  report {out / 'report.html'}  ·  logs {work / 'logs'}")
        return bundle
