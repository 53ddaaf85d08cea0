"""The end of a job: remarks on the choice on valid, figures on test, reports, and the bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import keras
from rich.markup import escape

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.sets import distinct
from longtail.bundle.store import working_directory
from longtail.trainer.config import SOURCE_KEYS, EvaluationConfig, Recipe
from longtail.trainer.cooccurrence import describe_term
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.default_figures import measure_default
from longtail.trainer.devices import WORLD, first_before_others, private_folder
from longtail.trainer.evaluation.dial import Dial, Setting, compute_floors, lines, missed
from longtail.trainer.evaluation.groups import list_records
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.evaluation.report import DefaultFigures, html_report
from longtail.trainer.evaluation.tables import (
    baseline_table,
    describe_buckets,
    evaluation_table,
    group_table,
    terminal_columns,
)
from longtail.trainer.evaluation.target import FILE, HitsByLabel
from longtail.trainer.evaluation.task import HeldOut
from longtail.trainer.export.bundle import to_bundle
from longtail.trainer.history import TrainingHistory
from longtail.trainer.progress import Reporter
from longtail.trainer.trained import Trained


class Selection(NamedTuple):
    """Hold what valid has chosen.

    Attributes:
        towers: the best setting without the term of co-occurrence.
        history: history of the validated run.
        figures: figures of the validated model at its default λ and μ, for a recipe without test.
        by_label: figures of the validated model per label.
    """

    dial: Dial
    towers: Setting
    history: TrainingHistory
    figures: DefaultFigures | None
    by_label: HitsByLabel


def report_choice(trained: Trained, dial: Dial, towers: Setting, reporter: Reporter) -> None:
    """Print remarks on co-occurrence, floors and grids."""
    _report_term(trained.recipe, dial, towers, reporter)
    _warn_of_floor(trained.recipe.evaluation, dial, reporter)
    report_grids(trained, dial, reporter)


def finish(
    trained: Trained, dataset: Dataset, selection: Selection, held_out: Mapping[str, HeldOut], reporter: Reporter,
    out: Path,
) -> Bundle:  # fmt: skip
    """Evaluate on test, print the tables, write the bundle.

    Args:
        held_out: by split, numbers of pairs that can be found.
    """
    recipe, known_pairs = trained.recipe, dataset.pairs_before("test")
    dial, towers, history, measured, by_label = selection
    if len(dataset.test):
        reporter.say("Evaluating on test, full catalogue …")
        weights = [0.0, *recipe.cooccurrence.weights] if recipe.cooccurrence and trained.cooccurrence else []
        settings = lines(recipe.evaluation, trained.noise(), dial.default, weights)
        settings += [towers] if towers not in settings else []
        curve = trained.curve(*dataset.with_past(dataset.test, known_pairs, recipe.evaluation.history), settings)
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
    if (forecast := trained.forecast(known_pairs)) is not None:
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
        facts["Co-occurrence"] = describe_term(dial.cooccurrence)
    objectives = _figures_by_objective(trained, dataset, dial)
    for name, row in objectives.items():
        facts[f"Objective {name}"] = row["in_words"]
        reporter.say(f"Objective {escape(name)}: {row['in_words']}")
    facts |= {f"{name.capitalize()} pairs": str(counts) for name, counts in held_out.items()}
    if row_lines := dataset.report.lines()[:1]:
        facts["Rows"] = row_lines[0]
    figures = dial.bias_removal.model_dump(mode="json")
    if forecast is not None:
        figures["forecast"] = forecast.settings.model_dump(include={"nats", "by_time"})
    figures["held_out"] = {name: asdict(counts) for name, counts in held_out.items()}
    figures |= {"groups": list_records(groups)} if groups else {}
    figures |= ({"objectives": objectives} if objectives else {}) | (compared.record() if compared else {})
    figures |= {"baseline_notes": left_out} if left_out else {}
    figures["frontier"] = {name: [point._asdict() for point in points] for name, points in ways.items()}
    reports = {
        "metrics.json": json.dumps(figures, indent=1, ensure_ascii=False).encode(),
        "history.json": json.dumps(asdict(history), indent=1).encode(),
        "recipe.json": recipe.model_dump_json(
            indent=1, by_alias=True, exclude={"data": {*SOURCE_KEYS, "memory"}, "tune": True}
        ).encode(),
    }
    if by_label.hits:
        reports[FILE] = by_label.to_bytes()
        facts |= by_label.facts()
    if dial.curve:
        counts = trained.dataset.label_counts()
        reports["report.html"] = html_report(
            recipe, dial, history, facts, figures_at_default,
            buckets=describe_buckets(define_buckets(recipe.evaluation, counts), counts),
            by_time=[] if forecast is None else forecast.settings.by_time,
        )  # fmt: skip
    # All processes compute the bundle, in step with each other, and the first writes it.
    with private_folder() if WORLD.process else working_directory(out) as folder:
        kind = "fixed" if split == "train" else recipe.evaluation.history
        pairs, past = dataset.with_past(getattr(dataset, split), dataset.pairs_before(split), kind)
        bundle = to_bundle(trained, known_pairs, distinct(pairs.request_rows), past, dial, reports, folder)
        if WORLD.processes == 1:
            return bundle.write(out)
        with first_before_others("the bundle"):
            return Bundle.load(out) if WORLD.process else bundle.write(out)


def _figures_by_objective(trained: Trained, dataset: Dataset, dial: Dial) -> dict[str, dict[str, Any]]:
    """Measure the served score on held-out pairs of each objective."""
    recipe, config, figures = trained.recipe, trained.recipe.evaluation, dict[str, dict[str, Any]]()
    metric = config.metric
    split, held_out, known_pairs = "test", dataset.test, dataset.pairs_before("test")
    if not len(held_out):  # a model that was refitted on valid, without test, has nothing to be measured on
        split, held_out, known_pairs = "valid", trained.dataset.valid, dataset.train
    held_out, past = dataset.with_past(held_out, known_pairs, config.history)
    for objective, (name, share) in enumerate(recipe.export_shares.items()):
        pairs = held_out if held_out.objectives is None else held_out.take(held_out.objectives == objective)
        measured = HeldOut.count(pairs, past, config, labels=len(dataset.label_ids)).measured
        row = figures[name] = {"share": share, "split": split, "pairs": measured, "metric": metric, "value": None}
        words = f"{share:.3g} of the score"
        if measured:
            (point,) = trained.curve(pairs, past, [dial.default])
            row |= point.metrics[metric].model_dump()
            words += f"; {metric} {point.metrics[metric].value:.4f} of {measured:,} {split} pairs"
        row["in_words"] = words
    return figures


def report_grids(trained: Trained, dial: Dial, reporter: Reporter) -> None:
    """Report λ or μ at its grid's end, and an unmeasured grid of μ."""
    config, noise = trained.recipe.evaluation, trained.noise()
    chosen, popularity = dial.default[:2]
    limits = {dial.bias_removal.minimum, dial.bias_removal.maximum}
    popularity_key = "bias_removal" if config.popularity is None else "popularity"
    grids = [
        ("λ", chosen, {point.bias_removal for point in dial.curve}, "bias_removal"),
        ("μ", popularity, {point.popularity for point in dial.curve if point.bias_removal == chosen}, popularity_key),
    ]
    for name, value, grid, key in grids:
        is_theory = value == 0 and (name == "μ" or noise.ahead)  # 0 is where the dial leaves the scores alone
        fixed = len(grid) < 2
        if not fixed and not is_theory and value in {min(grid), max(grid)} - limits:
            reporter.say(f"{name} = {value:g}, the best on valid, is an end of evaluation.{key}: try a wider grid")
    if config.popularity is not None and not noise.separate_prior:
        reporter.say(
            "evaluation.popularity is not measured: the noise ν of training equals π, so λ and μ have the same effect, "
            "and evaluation.bias_removal is the grid of both"
        )


def _report_term(recipe: Recipe, dial: Dial, towers: Setting, reporter: Reporter) -> None:
    """Report the gain by co-occurrence on valid, or that it is within chance."""
    if recipe.cooccurrence is None or not dial.curve:
        return
    if dial.cooccurrence is None:
        reporter.say("Co-occurrence: left out, because there is nothing to choose it from")
        return
    if not dial.default.cooccurrence:
        words = describe_term(dial.cooccurrence)
        reporter.say(f"Co-occurrence on valid: its gain is within chance, so that requests alone set ω; {words}")
        return
    points = {Setting.read_point(point): point.metrics for point in dial.curve}
    k, towers_metrics, default_metrics = recipe.evaluation.k, points[towers], points[dial.default]
    names = [recipe.evaluation.metric, *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES[:3])]
    gains = ", ".join(f"{name} {towers_metrics[name].value:.4f} → {default_metrics[name].value:.4f}" for name in names)
    reporter.say(f"Co-occurrence on valid: {describe_term(dial.cooccurrence)}; {towers} → {dial.default}: {gains}")


def _warn_of_floor(config: EvaluationConfig, dial: Dial, reporter: Reporter) -> None:
    """Warn if no point of the curve on valid reaches the recipe's floors."""
    chosen = next((point for point in dial.curve if Setting.read_point(point) == dial.default), None)
    if chosen is None or not missed(chosen, floors := compute_floors(dial.curve, config)):
        return
    figures = ", ".join(
        f"{name} {chosen.metrics[name].value:.4f} (floor {least:.4g})" for name, least in floors.items()
    )
    reporter.say(
        f"[bold red]No λ, μ or β reaches evaluation.floor on valid[/]: nearest is {dial.default}, {figures}, "
        f"at {config.metric} {chosen.metrics[config.metric].value:.4f}"
    )
