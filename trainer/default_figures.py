"""Figures of a trained model at its default λ and μ: groups of queries, baselines, examples, frontier.

Legend: `N` rows of a task, `K` list length, `L` labels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.baselines import Interactions, read_categories
from longtail.trainer.evaluation.comparison import choose_baselines, compare
from longtail.trainer.evaluation.cooccurrence import TowerLists
from longtail.trainer.evaluation.dial import Dial, Setting
from longtail.trainer.evaluation.examples import example_settings, example_task, examples
from longtail.trainer.evaluation.frontier import bonus_settings, frontier
from longtail.trainer.evaluation.groups import figures_by_group
from longtail.trainer.evaluation.ranking import tower_lists
from longtail.trainer.evaluation.report import DefaultFigures
from longtail.trainer.evaluation.task import VALID_QUERIES, Task
from longtail.trainer.progress import Reporter
from longtail.trainer.trained import Trained


def measure_default(
    trained: Trained, dataset: Dataset, dial: Dial, split: Literal["valid", "test"], reporter: Reporter
) -> DefaultFigures | None:
    """Measure groups of queries and compare the model with the recipe's baselines; None without held-out pairs.

    Baselines learn from the training pairs of the model, and read the same history of each request.
    """
    config, seed, labels = trained.recipe.evaluation, trained.recipe.seed, len(dataset.label_ids)
    if not len(getattr(dataset, split)):
        return None
    held_out, past = dataset.with_past(getattr(dataset, split), dataset.pairs_before(split), config.history)
    columns = read_categories(trained.recipe, dataset)

    def build_interactions(train: Pairs, past: Past) -> Interactions:
        forecast = trained.forecast(past.known_pairs)
        prior_L = None if forecast is None else np.exp(forecast.log_popularity(include_future=True))
        return Interactions(
            train, past, queries=len(dataset.query_ids), labels=labels, seed=seed, ordered=dataset.ordered,
            columns=columns, prior_L=prior_L,
        )  # fmt: skip

    tuning = None
    if len(dataset.valid):
        valid, past_of_valid = dataset.with_past(dataset.valid, dataset.train, config.history)
        task = Task.create(valid, past_of_valid, config, labels=labels, seed=seed, max_queries=VALID_QUERIES)
        tuning = task, build_interactions(dataset.train, past_of_valid)
    task = Task.create(held_out, past, config, labels=labels, seed=seed)
    model = trained.ranked_model(past)

    def rank_towers(task: Task, settings: list[Setting]) -> TowerLists:
        return tower_lists(task, model, [*dict.fromkeys(setting.of_towers for setting in settings)])[0]

    of_bonus = bonus_settings(dial.default)
    served, label_facts = [dial.default, *of_bonus], model.label_side.facts(config)
    ours_NK, *top_SNK = rank_towers(task, served).select_lists(served, trained.term(past))
    ways = frontier(dial, task, dict(zip(of_bonus, top_SNK, strict=True)), label_facts, int(config.k))
    few, two = example_task(task, seed), example_settings(dial.default)
    example_rows = examples(few, rank_towers(few, two), trained.term(past), two, dataset, trained.recipe.data.display)
    learnt = build_interactions(trained.dataset.train, past)
    if names := choose_baselines(config, learnt):
        reporter.say(f"Baselines on {split}: {', '.join(names)} …")
    groups = figures_by_group(config.groups, dataset, task, ours_NK, label_facts)
    return DefaultFigures(
        groups, example_rows, ways, *compare(task, ours_NK, label_facts, learnt, config, tuning=tuning)
    )
