"""Prepare a run: encode its data, build its model, load its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import keras
import numpy as np

from longtail.trainer import backend
from longtail.trainer.checkpoint import Checkpoints, SharedCheckpoints, hash_run
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.devices import WORLD, first_before_others, use_devices
from longtail.trainer.history import TrainingHistory
from longtail.trainer.loss_terms import build_loss_terms
from longtail.trainer.loss_terms.queries import NegativesPerQuery
from longtail.trainer.model.step import TrainStep
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.sampling.conditional import list_penalties
from longtail.trainer.sampling.proposal import FittedTree, fit_proposal, read_or_fit_proposal
from longtail.trainer.trained import Trained
from longtail.trainer.warm_start import CarriedOver, WarmStart


@dataclass(frozen=True)
class Run:
    """Hold a run, new or restored from its newest checkpoint.

    Attributes:
        steps_per_epoch: number of whole batches in an epoch, which visits the training pairs, or the training queries
            if one label is sampled for each.
        loss: sum of the losses of the epoch's steps so far.
        carried: weights that a new model has from a warm start.
    """

    trained: Trained
    checkpoints: Checkpoints
    batch_size: int
    steps_per_epoch: int
    epoch: int
    step: int
    loss: float
    carried: CarriedOver | None = None


def prepare_run(
    recipe: Recipe, dataset: Dataset, *, epochs: float, work: Path, warm_start: WarmStart | None = None
) -> Run:
    """Check and encode the data, build the model, and load `work`'s newest checkpoint."""
    if recipe.training.devices == "all" or keras.distribution.distribution() is not None:
        use_devices(recipe)
    # Before the model, whose layers and tables draw initial weights.
    keras.utils.set_random_seed(recipe.seed)
    backend.make_deterministic()
    sampled = recipe.data.reduction == "sample"
    visits = dataset.count_visits(one_label_per_query=sampled)
    parts = recipe.training.accumulate
    batch_size = min(recipe.training.batch_size, visits) // parts * parts  # parts of a batch have equal sizes
    encoding = Encoding.fit(recipe, dataset)
    steps_per_epoch = visits // batch_size
    identity = hash_run(recipe, dataset, None if warm_start is None else warm_start.sha256)
    tree = None
    if recipe.loss.sampler.name == "adversarial":
        # One process fits the tree, and the others read its file.
        with first_before_others("proposal"):
            tree = fit_tree(recipe, dataset, encoding, work / f"proposal-{identity[:16]}.npz")
    model = TwoTower(recipe, encoding, len(dataset.label_ids), None if tree is None else tree.proposal)
    carried = None if warm_start is None else warm_start.carry_over(model, encoding.vocabularies, dataset.label_ids)
    # Terms come before the step, whose offset depends on the pairs that share negatives.
    terms = build_loss_terms(recipe, dataset, encoding)
    train_step = TrainStep(
        model,
        dataset.label_visits(one_label_per_query=sampled),
        weighted_counts_L=dataset.label_visits(one_label_per_query=sampled, weighted=True),
        batch_size=batch_size,
        total_steps=round(epochs * steps_per_epoch),
        pairs=len(dataset.train),
        pairs_per_query=next((term.pairs_per_query for term in terms if isinstance(term, NegativesPerQuery)), 1.0),
        terms=terms,
    )
    held_out = {} if tree is None else tree.held_out
    trained = Trained(recipe, dataset, encoding, model, train_step, TrainingHistory(tree_penalties=held_out))
    # Schedules depend on the number of epochs, so another number is another run.
    checkpoints = (Checkpoints if WORLD.processes == 1 else SharedCheckpoints)(work, f"{identity}-{epochs}")
    state = checkpoints.load("latest", train_step.variables) if work.exists() else None
    if state is None:
        return Run(trained, checkpoints, batch_size, steps_per_epoch, 0, 0, 0.0, carried)
    saved = state["history"]
    metrics, shortfalls = ({int(epoch): value for epoch, value in saved[key].items()} for key in ("metrics", "missed"))
    history = TrainingHistory(
        saved["losses"], metrics, saved["best_epoch"], held_out, runs=saved.get("runs", {}), missed=shortfalls
    )
    trained = replace(trained, history=history)
    return Run(trained, checkpoints, batch_size, steps_per_epoch, state["epoch"], state["step"], state["loss"])


def fit_tree(recipe: Recipe, dataset: Dataset, encoding: Encoding, path: Path) -> FittedTree:
    """Read the tree of sampler `adversarial` from `path`, or fit it."""
    sampler = recipe.loss.sampler
    rng = np.random.default_rng(recipe.seed)
    return read_or_fit_proposal(
        path,
        lambda: fit_proposal(
            [feature for feature in recipe.query.features if feature.in_tree],
            lambda rows_B: encoding.query.pair_inputs(rows_B, rng),
            dataset.train.labels,
            vocabulary_rows=encoding.vocabulary_rows,
            labels=len(dataset.label_ids),
            dims=sampler.argument("dims"),
            penalties=list_penalties(sampler.argument("penalty")),
            query_id=recipe.data.query_id,
        ),
    )
