"""What a job is told of its model: the baselines beside it, a floor that no λ reaches, and a grid that is of no use."""

from __future__ import annotations

from typing import Literal

from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.evaluation.baselines import Interactions
from longtail.trainer.evaluation.comparison import Comparison, compare
from longtail.trainer.evaluation.dial import Dial, Setting, floors_of, missed
from longtail.trainer.evaluation.ranking import log_proposal_of, rank
from longtail.trainer.evaluation.task import VALID_QUERIES, Task
from longtail.trainer.progress import Reporter
from longtail.trainer.trained import Trained


def compare_with_baselines(
    trained: Trained, dataset: Dataset, dial: Dial, split: Literal["valid", "test"], reporter: Reporter
) -> Comparison | None:
    """Compare the model at its default λ and μ with the recipe's baselines; None without baselines or held-out pairs.

    Baselines learn from the pairs that the model was trained on, and know of a query what its history holds.
    """
    config, seed, labels = trained.recipe.evaluation, trained.recipe.seed, len(dataset.label_ids)
    held_out, known = (dataset.test, before_test(dataset)) if split == "test" else (dataset.valid, dataset.train)
    if not config.baselines or not len(held_out):
        return None
    reporter.say(f"Baselines on {split}: {', '.join(config.baselines)} …")

    def learnt_from(train: Pairs, known: Pairs) -> Interactions:
        return Interactions(train, known, queries=len(dataset.query_ids), labels=labels, seed=seed)

    tuning = None
    if len(dataset.valid):
        task = Task.of(
            dataset.valid, dataset.train, config, labels=labels, seed=seed, max_queries=VALID_QUERIES,
            request_queries=dataset.request_queries,
        )  # fmt: skip
        tuning = task, learnt_from(dataset.train, dataset.train)
    task = Task.of(held_out, known, config, labels=labels, seed=seed, request_queries=dataset.request_queries)
    features, label_side = trained.encoding.query.with_history(known, held_out), trained.label_side()
    (ours_NK,), _ = rank(
        task.rows_N, lambda rows_B: trained.model.embed_queries(features.of_queries(rows_B)), label_side,
        task.seen_keys, [dial.default], k=task.k, queries_N=task.queries_N,
        log_proposal=log_proposal_of(trained.model.proposal, features),
    )  # fmt: skip
    learnt = learnt_from(trained.dataset.train, known)
    return compare(task, ours_NK, label_side, learnt, config, tuning=tuning)


def before_test(dataset: Dataset) -> Pairs:
    """Return what a query is known by when test begins."""
    return dataset.train.followed_by(dataset.valid) if len(dataset.valid) else dataset.train


def say_of_prior(trained: Trained, reporter: Reporter) -> None:
    """Say so where the recipe has a grid of μ that nothing is measured on."""
    if trained.recipe.evaluation.popularity is not None and not trained.noise().apart:
        reporter.say(
            "evaluation.popularity is not measured: training's noise ν is π, so that λ and μ are one dial, and "
            "evaluation.bias_removal is its grid"
        )


def warn_of_floor(config: EvaluationConfig, dial: Dial, reporter: Reporter) -> None:
    """Say so where no point of the curve on valid reaches the recipe's floor."""
    chosen = next((point for point in dial.curve if Setting.of(point) == dial.default), None)
    if chosen is None or not missed(chosen, floors := floors_of(dial.curve, config)):
        return
    found = ", ".join(f"{name} {chosen.metrics[name].value:.4f} (floor {least:.4g})" for name, least in floors.items())
    reporter.say(
        f"[bold red]No λ or μ reaches evaluation.floor on valid[/]: nearest is {dial.default}, {found}, "
        f"at {config.metric} {chosen.metrics[config.metric].value:.4f}"
    )
