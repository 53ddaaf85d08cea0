"""A whole training job: data → train → choose λ and μ → refit → evaluate → bundle."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
from rich.console import Console
from rich.markup import escape

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.sets import distinct
from longtail.bundle.store import refuse_existing, working_directory
from longtail.trainer.checkpoint import identity_of
from longtail.trainer.config import PLACES, EvaluationConfig, Recipe, load_recipe
from longtail.trainer.cooccurrence import in_words, made_again
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.devices import (
    WORLD,
    Cluster,
    check_same_inputs,
    first_before_others,
    join_processes,
    private_folder,
    wait_for_all,
)
from longtail.trainer.errors import CheckpointError
from longtail.trainer.evaluation.baselines import Interactions, categories_of
from longtail.trainer.evaluation.comparison import baselines_for, compare
from longtail.trainer.evaluation.cooccurrence import TowerLists
from longtail.trainer.evaluation.dial import Dial, Setting, floors_of, lines, missed
from longtail.trainer.evaluation.examples import example_settings, example_task, examples
from longtail.trainer.evaluation.frontier import bonus_settings, frontier
from longtail.trainer.evaluation.groups import figures_by_group, record_of
from longtail.trainer.evaluation.ranking import buckets_for, log_proposal_of, tower_lists
from longtail.trainer.evaluation.report import (
    DefaultFigures,
    baseline_table,
    evaluation_table,
    group_table,
    html_report,
    in_words_of_buckets,
    terminal_columns,
)
from longtail.trainer.evaluation.target import FILE, FoundByLabel
from longtail.trainer.evaluation.task import VALID_QUERIES, HeldOut, Task
from longtail.trainer.export.bundle import to_bundle
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.history import TrainingHistory
from longtail.trainer.limits import check_data, held_out_of, warn_of_future
from longtail.trainer.progress import Reporter
from longtail.trainer.temperature import with_temperature
from longtail.trainer.trackers import tracker_module
from longtail.trainer.train import train
from longtail.trainer.trained import Trained, choose_dial, found_by_label
from longtail.trainer.warm_start import WarmStart

_OF_THE_MACHINE = {*PLACES, "memory"}
"""Keys of `data` that the recipe in a bundle omits."""


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
    out, reporter = Path(out), reporter or Reporter(Console(quiet=True))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    refuse_existing(out)
    several = recipe.training.processes > 1
    if several or cluster != Cluster():
        join_processes(recipe, cluster)
    if WORLD.process:
        reporter = Reporter(Console(quiet=True))
    for name in track:
        tracker_module(name)
    try_own_layers(recipe)
    weights = None if warm_start is None else WarmStart.read(Path(warm_start))
    dataset = read_dataset(recipe)
    if several:
        check_same_inputs(facts_of(recipe, dataset, weights))
    check_data(recipe, dataset)
    describe(recipe, dataset, reporter)
    if weights is not None:
        weights.warn_of_learnt(dataset, reporter)
    with alone_in(out.with_name(f"{out.name}.work")) as work:
        recipe, temperatures = with_temperature(recipe, dataset, work, reporter, weights)
        trained = train(
            recipe,
            dataset,
            epochs=recipe.training.epochs,
            work=work / "select",
            logs=work / "logs" / "select",
            reporter=reporter,
            warm_start=weights,
            track=track,
        )
        found = found_by_label(trained)
        dial, term, towers = choose_dial(trained, dataset, found)
        trained = replace(trained, cooccurrence=term)
        say_of_term(recipe, dial, towers, reporter)
        warn_of_floor(recipe.evaluation, dial, reporter)
        say_of_grids(trained, dial, reporter)
        validated = None if len(dataset.test) else measure_default(trained, dataset, dial, "valid", reporter)
        selection = replace(trained.history, temperatures=temperatures)
        if recipe.training.refit and len(dataset.valid):
            reporter.say(f"Refit on train + valid for {trained.history.best_epoch:g} epochs, {dial.default}")
            trained = train(
                recipe,
                dataset.refit(),
                epochs=trained.history.best_epoch,
                work=work / "refit",
                logs=work / "logs" / "refit",
                reporter=reporter,
                warm_start=weights,
            )
            if term is not None:
                trained = replace(trained, cooccurrence=made_again(term, recipe, trained.dataset))
        bundle = finish(trained, dataset, dial, selection, reporter, out, validated, found, towers)
        for stage in () if WORLD.process else ("select", "refit"):
            shutil.rmtree(work / stage, ignore_errors=True)
        if several:
            wait_for_all("the end")
        reporter.say(f"[bold]Bundle[/] {out}  ·  report {out / 'report.html'}  ·  logs {work / 'logs'}")
        return bundle


def finish(
    trained: Trained, dataset: Dataset, dial: Dial, history: TrainingHistory, reporter: Reporter, out: Path,
    measured: DefaultFigures | None = None, by_label: FoundByLabel | None = None, towers: Setting | None = None,
) -> Bundle:  # fmt: skip
    """Evaluate on test if it has pairs, print the tables, and write the bundle.

    Args:
        history: history of the validated run, for the report.
        measured: figures of the validated model at its default λ and μ, for a recipe without test.
        by_label: figures of the validated model per label on valid.
        towers: the best setting on valid without the term of co-occurrence.
    """
    recipe, known = trained.recipe, dataset.before("test")
    if len(dataset.test):
        reporter.say("Evaluating on test, full catalogue …")
        weights = [0.0, *recipe.cooccurrence.weights] if recipe.cooccurrence and trained.cooccurrence else []
        settings = lines(recipe.evaluation, trained.noise(), dial.default, weights)
        settings += [towers] if towers is not None and towers not in settings else []
        curve = trained.curve(*dataset.with_past(dataset.test, known, recipe.evaluation.history), settings)
        dial = dial.measured("test", curve)
        measured = measure_default(trained, dataset, dial, "test", reporter)
    if dial.curve:
        title = f"{recipe.name}: {dial.bias_removal.curve_split}"
        reporter.console.print(evaluation_table(title, dial, recipe.evaluation.metric).rich())
    figures_at_default = measured or DefaultFigures()
    groups, _, ways, compared, left_out = figures_at_default
    columns = terminal_columns(recipe.evaluation.metric)
    if groups:
        reporter.console.print(group_table(groups, recipe.evaluation.metric, columns).rich())
    if compared:
        reporter.console.print(baseline_table(compared, columns).rich())
        reporter.say(f"[bold{' red' if compared.behind else ''}]{compared.sentence}[/]")
    for note in left_out if compared is None else compared.notes:
        reporter.say(escape(note))
    split = next((name for name in ("test", "valid") if len(getattr(dataset, name))), "train")
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
    if (forecast := trained.forecast(known)) is not None:
        fitted, days = forecast.settings, forecast.settings.horizon / 86_400
        nats = ", ".join(f"{kind} {value:.3f}" for kind, value in fitted.nats.items())
        parts = [f"{fitted.kind} of {days:.3g} days", f"nats a pair, last period: {nats}"]
        if (calendar := fitted.calendar) is not None:
            parts.append(f"calendar of {calendar.feature} {calendar.gain:+.3f}")
        if fitted.visits:
            parts.append("a visit's j-th label weighs 1/√j")
        facts["Prior"] = "; ".join([*parts, f"theory: {Setting(0.0, trained.slope)}"])
        reporter.say(f"Prior: {facts['Prior']}")
    if dial.cooccurrence is not None:
        facts["Co-occurrence"] = in_words(dial.cooccurrence)
    objectives = figures_by_objective(trained, dataset, dial)
    for name, found in objectives.items():
        facts[f"Objective {name}"] = found["in_words"]
        reporter.say(f"Objective {escape(name)}: {found['in_words']}")
    to_find = held_out_of(recipe, dataset)
    facts |= {f"{split.capitalize()} pairs": str(found) for split, found in to_find.items()}
    if lines_of_rows := dataset.report.lines()[:1]:
        facts["Rows"] = lines_of_rows[0]
    figures = dial.bias_removal.model_dump(mode="json")
    if forecast is not None:
        figures["forecast"] = forecast.settings.model_dump(include={"nats", "by_time"})
    figures["held_out"] = {split: asdict(found) for split, found in to_find.items()}
    figures |= {"groups": record_of(groups)} if groups else {}
    figures |= ({"objectives": objectives} if objectives else {}) | (compared.record() if compared else {})
    figures |= {"baseline_notes": left_out} if left_out else {}
    figures["frontier"] = {name: [point._asdict() for point in points] for name, points in ways.items()}
    reports = {
        "metrics.json": json.dumps(figures, indent=1, ensure_ascii=False).encode(),
        "history.json": json.dumps(asdict(history), indent=1).encode(),
        "recipe.json": recipe.model_dump_json(
            indent=1,
            by_alias=True,
            exclude={"data": _OF_THE_MACHINE, "tune": True},
        ).encode(),
    }
    if by_label is not None and by_label.found:
        reports[FILE] = by_label.to_bytes()
        facts |= by_label.facts()
    if dial.curve:
        counts = trained.dataset.label_counts()
        reports["report.html"] = html_report(
            recipe, dial, history, facts, figures_at_default,
            buckets=in_words_of_buckets(buckets_for(recipe.evaluation, counts), counts),
            by_time=[] if forecast is None else forecast.settings.by_time,
        )  # fmt: skip
    with private_folder() if WORLD.process else working_directory(out) as folder:
        kind = "fixed" if split == "train" else recipe.evaluation.history
        held_out, past = dataset.with_past(getattr(dataset, split), dataset.before(split), kind)
        made = to_bundle(trained, known, distinct(held_out.request_rows), past, dial, reports, folder)
        if WORLD.processes == 1:
            return made.write(out)
        with first_before_others("the bundle"):
            return Bundle.load(out) if WORLD.process else made.write(out)


@contextmanager
def alone_in(work: Path) -> Iterator[Path]:
    """Lock a job's directory; raises CheckpointError if another job holds it."""
    if WORLD.process:
        yield work
        return
    work.mkdir(parents=True, exist_ok=True)
    held = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise CheckpointError(f"{work}: expected no other job here, found one: wait, or give another OUT") from error
    try:
        yield work
    finally:
        os.close(held)


def figures_by_objective(trained: Trained, dataset: Dataset, dial: Dial) -> dict[str, dict[str, Any]]:
    """Measure the recipe's metric of the served score on the held-out pairs of each objective."""
    recipe, config, found = trained.recipe, trained.recipe.evaluation, dict[str, dict[str, Any]]()
    metric = config.metric
    split, held_out, known = "test", dataset.test, dataset.before("test")
    if not len(held_out):  # a model that was refitted on valid, without test, has nothing to be measured on
        split, held_out, known = "valid", trained.dataset.valid, dataset.train
    held_out, past = dataset.with_past(held_out, known, config.history)
    for at, (name, share) in enumerate(recipe.export_shares.items()):
        own = held_out if held_out.objectives is None else held_out.take(held_out.objectives == at)
        there = HeldOut.of(own, past, config, labels=len(dataset.label_ids))
        found[name] = {"share": share, "split": split, "pairs": there.measured, "metric": metric, "value": None}
        words = f"{share:.3g} of the score"
        if there.measured:
            (point,) = trained.curve(own, past, [dial.default])
            found[name] |= point.metrics[metric].model_dump()
            words += f"; {metric} {point.metrics[metric].value:.4f} of {there.measured:,} {split} pairs"
        found[name]["in_words"] = words
    return found


def measure_default(
    trained: Trained, dataset: Dataset, dial: Dial, split: Literal["valid", "test"], reporter: Reporter
) -> DefaultFigures | None:
    """Measure groups of queries and compare the model with the recipe's baselines; None without held-out pairs.

    Baselines learn from the training pairs of the model, and read the same history of each request.
    """
    config, seed, labels = trained.recipe.evaluation, trained.recipe.seed, len(dataset.label_ids)
    if not len(getattr(dataset, split)):
        return None
    held_out, past = dataset.with_past(getattr(dataset, split), dataset.before(split), config.history)
    columns = categories_of(trained.recipe, dataset)

    def learnt_from(train: Pairs, past: Past) -> Interactions:
        forecast = trained.forecast(past.known)
        prior_L = None if forecast is None else np.exp(forecast.log_popularity(include_future=True))
        return Interactions(
            train, past, queries=len(dataset.query_ids), labels=labels, seed=seed, ordered=dataset.ordered,
            columns=columns, prior_L=prior_L,
        )  # fmt: skip

    tuning = None
    if len(dataset.valid):
        valid, past_of_valid = dataset.with_past(dataset.valid, dataset.train, config.history)
        task = Task.of(valid, past_of_valid, config, labels=labels, seed=seed, max_queries=VALID_QUERIES)
        tuning = task, learnt_from(dataset.train, past_of_valid)
    task = Task.of(held_out, past, config, labels=labels, seed=seed)
    features, label_side = trained.encoding.query.with_history(past), trained.label_side(past.known)

    def lists_of(task: Task, settings: list[Setting]) -> TowerLists:
        lists, _ = tower_lists(
            task, lambda rows_B: trained.model.embed_queries(features.of_queries(rows_B)), label_side,
            [*dict.fromkeys(setting.of_towers for setting in settings)],
            log_proposal=log_proposal_of(trained.model.proposal, features), unknown=trained.unknown(features),
        )  # fmt: skip
        return lists

    of_bonus = bonus_settings(dial.default)
    served, label_facts = [dial.default, *of_bonus], label_side.facts(config)
    ours_NK, *top_SNK = lists_of(task, served).at(served, trained.term(past))
    ways = frontier(dial, task, dict(zip(of_bonus, top_SNK, strict=True)), label_facts, int(config.k))
    few, two = example_task(task, seed), example_settings(dial.default)
    shown = examples(few, lists_of(few, two), trained.term(past), two, dataset, trained.recipe.data.display)
    learnt = learnt_from(trained.dataset.train, past)
    if names := baselines_for(config, learnt):
        reporter.say(f"Baselines on {split}: {', '.join(names)} …")
    groups = figures_by_group(config.groups, dataset, task, ours_NK, label_facts)
    return DefaultFigures(groups, shown, ways, *compare(task, ours_NK, label_facts, learnt, config, tuning=tuning))


def say_of_grids(trained: Trained, dial: Dial, reporter: Reporter) -> None:
    """Report a chosen λ or μ at an end of its grid, and a grid of μ that is not measured."""
    config, noise = trained.recipe.evaluation, trained.noise()
    chosen, popularity = dial.default[:2]
    limits = {dial.bias_removal.minimum, dial.bias_removal.maximum}
    of_popularity = "bias_removal" if config.popularity is None else "popularity"
    grids = [
        ("λ", chosen, {point.bias_removal for point in dial.curve}, "bias_removal"),
        ("μ", popularity, {point.popularity for point in dial.curve if point.bias_removal == chosen}, of_popularity),
    ]
    for name, value, grid, key in grids:
        of_theory = value == 0 and (name == "μ" or noise.ahead)  # 0 is where the dial leaves the scores alone
        fixed = config.default_bias_removal is not None or len(grid) < 2
        if not fixed and not of_theory and value in {min(grid), max(grid)} - limits:
            reporter.say(f"{name} = {value:g}, the best on valid, is an end of evaluation.{key}: try a wider grid")
    if config.popularity is not None and not noise.apart:
        reporter.say(
            "evaluation.popularity is not measured: the noise ν of training equals π, so λ and μ have the same effect, "
            "and evaluation.bias_removal is the grid of both"
        )


def say_of_term(recipe: Recipe, dial: Dial, towers: Setting, reporter: Reporter) -> None:
    """Report the term of co-occurrence and its gain on valid by bucket, or that the gain is within chance."""
    if recipe.cooccurrence is None or not dial.curve:
        return
    if dial.cooccurrence is None:
        reporter.say("Co-occurrence: left out, because there is nothing to choose it from")
        return
    if not dial.default.cooccurrence:
        words = in_words(dial.cooccurrence)
        reporter.say(f"Co-occurrence on valid: its gain is within chance, so that requests alone set ω; {words}")
        return
    points = {Setting.of(point): point.metrics for point in dial.curve}
    k, before, after = recipe.evaluation.k, points[towers], points[dial.default]
    names = [recipe.evaluation.metric, *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES[:3])]
    gains = ", ".join(f"{name} {before[name].value:.4f} → {after[name].value:.4f}" for name in names)
    reporter.say(f"Co-occurrence on valid: {in_words(dial.cooccurrence)}; {towers} → {dial.default}: {gains}")


def warn_of_floor(config: EvaluationConfig, dial: Dial, reporter: Reporter) -> None:
    """Warn if no point of the curve on valid reaches the recipe's floors."""
    chosen = next((point for point in dial.curve if Setting.of(point) == dial.default), None)
    if chosen is None or not missed(chosen, floors := floors_of(dial.curve, config)):
        return
    found = ", ".join(f"{name} {chosen.metrics[name].value:.4f} (floor {least:.4g})" for name, least in floors.items())
    reporter.say(
        f"[bold red]No λ, μ or β reaches evaluation.floor on valid[/]: nearest is {dial.default}, {found}, "
        f"at {config.metric} {chosen.metrics[config.metric].value:.4f}"
    )


def facts_of(recipe: Recipe, dataset: Dataset, weights: WarmStart | None) -> dict[str, str]:
    """Return what all processes of a job have in common, by name."""
    splits = {"training pairs": dataset.train, "validation pairs": dataset.valid, "test pairs": dataset.test}
    sizes = {"query ids": dataset.query_ids, "label ids": dataset.label_ids} | splits
    return {
        **{name: f"{len(of):,}" for name, of in sizes.items()},
        "ids, pairs and feature tables (sha256)": dataset.fingerprint,
        "recipe and first weights (sha256)": identity_of(recipe, dataset, None if weights is None else weights.sha256),
    }


def describe(recipe: Recipe, dataset: Dataset, reporter: Reporter) -> None:
    """Print the numbers of training pairs, skipped rows, and held-out pairs."""
    reporter.say(
        f"[bold]{recipe.name}[/]: {len(dataset.query_ids):,} queries × {len(dataset.label_ids):,} labels; "
        f"{len(dataset.train):,} training, {len(dataset.valid):,} validation, {len(dataset.test):,} test pairs; "
        f"{recipe.loss}"
    )
    if dataset.requests is not None:
        reporter.say(
            f"{len(dataset.requests.queries):,} distinct requests, by context and attributes; each is ranked separately"
        )
    if (objectives := dataset.train.objectives) is not None:
        counts = np.bincount(objectives, minlength=len(recipe.objectives))
        each = ", ".join(f"{escape(name)} {count:,}" for name, count in zip(recipe.objectives, counts, strict=True))
        reporter.say(f"Objectives, by training pairs: {each}")
    if dataset.impressions is not None:
        reporter.say(
            f"{len(dataset.impressions.ids):,} impressions, of weight {recipe.loss.impressions:g} if not chosen"
        )
    paired = [pairs.queries for pairs in (dataset.train, dataset.valid, dataset.test)]
    if unpaired := len(dataset.query_ids) - len(distinct(np.concatenate(paired))):
        reporter.say(f"{unpaired:,} of the queries have no label: nothing is learned from them or measured on them")
    for line in [*dataset.report.lines(), *filter(None, [warn_of_future(dataset)])]:
        reporter.say(escape(line))
    for split, found in held_out_of(recipe, dataset).items():
        if found.measured < found.pairs:
            reporter.say(f"{split.capitalize()}: {found}")
