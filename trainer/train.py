"""The training loop: batches, steps, validation, checkpoints.

Legend: `B` batch, `N` training pairs.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import keras
import numpy as np
from tensorboard.summary import Writer

from longtail.bundle import CurvePoint, log_frequencies
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.trainer import backend
from longtail.trainer.checkpoint import Checkpoints, identity_of
from longtail.trainer.config import Recipe
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.known import KnownPositives
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Noise
from longtail.trainer.evaluation.ranking import (
    LabelSide,
    bias_removal_curve,
    buckets_for,
    check_metric,
    log_proposal_of,
)
from longtail.trainer.history import TrainingHistory, best_of
from longtail.trainer.losses.implied_noise import implied_noise, name_of_noise, power_of_q, removes_all
from longtail.trainer.model.step import TrainStep, check_negatives
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.progress import Reporter
from longtail.trainer.sampling.conditional import TREE_DIMS, penalties_of
from longtail.trainer.sampling.proposal import FittedTree, fit_proposal, read_or_fit_proposal


@dataclass(frozen=True)
class Trained:
    """A trained model with what is needed to evaluate and export it.

    Attributes:
        recipe: the job.
        dataset: what it was trained on.
        encoding: the dataset's features as tower inputs.
        model: towers and tables.
        step: the optimisers' state, and what draws negatives.
        history: losses and validation metrics of the run.
    """

    recipe: Recipe
    dataset: Dataset
    encoding: Encoding
    model: TwoTower
    step: TrainStep
    history: TrainingHistory

    def label_side(self) -> LabelSide:
        """Embeddings, biases, log ν, log π and buckets of all labels, as the bundle will hold them."""
        counts = self.dataset.label_counts()
        log_pi = _log_frequencies(self.recipe, self.dataset)
        log_nu = self.log_noise()
        return LabelSide.of(
            self.model.embed_labels(),
            self.model.label_biases(),
            counts,
            training_queries=self.dataset.training_queries(),
            temperature=self.model.temperature,
            log_pn=log_nu.astype(np.float32),
            buckets=buckets_for(self.recipe.evaluation, counts),
            log_popularity=None if np.array_equal(log_nu, log_pi) else log_pi.astype(np.float32),
        )

    def log_noise(self) -> Float64:
        """log ν of every label, float64 [L], nats [METHODS §9]; log π beside a tree, which is the noise itself."""
        log_pi, sampler = _log_frequencies(self.recipe, self.dataset), self.step.sampler
        if self.model.proposal is not None:
            return log_pi
        log_q = sampler.log_q_L if sampler.q_of_pi is None else keras.ops.convert_to_numpy(sampler.q_of_pi(log_pi))
        log_miss = None
        if sampler.log_miss is not None:
            log_miss = keras.ops.convert_to_numpy(sampler.log_miss(keras.ops.convert_to_tensor(log_q)))
        loss = self.recipe.loss
        return implied_noise(loss.objective(), log_pi, log_q, log_miss, reweight=loss.reweight)

    def noise(self) -> Noise:
        """What the λ of this model removes."""
        shown = " of the draws, not of the impressions" if self.recipe.loss.impressions else ""
        if self.model.proposal is not None:
            return Noise(f"p_n(y|x){shown}", constant=False, apart=True)
        log_pi, log_nu = _log_frequencies(self.recipe, self.dataset), self.log_noise()
        apart = not np.array_equal(log_nu, log_pi)
        name = name_of_noise(log_nu, log_pi) + shown
        return Noise(name, constant=apart and bool(np.ptp(log_nu) == 0), apart=apart)

    def theory_s_bias_removal(self) -> float:
        """The λ that undoes the training where nothing was held out to choose one by [METHODS §9]."""
        objective = self.recipe.loss.objective()
        if self.model.proposal is not None:
            return max(removes_all(objective) * power_of_q(objective), 0.0)
        return 0.0 if self.noise().constant else removes_all(objective)

    def embed_queries(self, rows_B: Int32) -> Float32:
        """Embeddings of queries by `Pairs.askings`, int32 [B]; float32 [B, D]."""
        return self.model.embed_queries(self.encoding.query.of_queries(rows_B))


@dataclass(frozen=True)
class Run:
    """A run, fresh or restored from its newest checkpoint.

    Attributes:
        trained: model and history so far.
        checkpoints: where the run keeps its states.
        batch_size: B.
        steps_per_epoch: whole batches in what an epoch visits: the training pairs, or the training queries if
            one label is sampled for each.
        epoch, step: where to go on, from 0.
        loss: sum of the losses of the epoch's steps so far.
    """

    trained: Trained
    checkpoints: Checkpoints
    batch_size: int
    steps_per_epoch: int
    epoch: int
    step: int
    loss: float


def prepare_run(recipe: Recipe, dataset: Dataset, *, epochs: int, work: Path) -> Run:
    """Check the data, encode it, build the model, and load the newest checkpoint in `work` if there is one.

    Raises:
        DataError: too few training pairs, a metric over more labels than there are, or a feature's column that
            is missing or unreadable.
        CheckpointError: `work` holds checkpoints of another recipe or other data.
    """
    keras.utils.set_random_seed(recipe.seed)
    backend.make_deterministic()
    sampled = recipe.data.reduction == "sample"
    visits = dataset.training_queries() if sampled else len(dataset.train)
    batch_size = min(recipe.training.batch_size, visits)
    if batch_size < 2:
        raise DataError(f"training: expected at least 2 {'queries' if sampled else 'pairs'}, found {visits}")
    if len(dataset.label_ids) < 2:
        raise DataError("training: expected at least 2 labels, found 1: there is nothing to tell it from")
    if len(dataset.valid) or len(dataset.test):
        check_metric(recipe.evaluation, labels=len(dataset.label_ids))
    encoding = Encoding.fit(recipe, dataset)
    check_negatives(recipe, labels=len(dataset.label_ids), batch_size=batch_size)
    threshold = recipe.loss.weight.threshold or 0.0
    highest_frequency = float(np.exp(_log_frequencies(recipe, dataset).max()))
    if threshold > highest_frequency:
        raise DataError(
            f"loss.weight.threshold: expected at most {highest_frequency:.3g}, the frequency of the most frequent "
            f"label, beyond which there are no negatives, received {threshold}"
        )
    steps_per_epoch = visits // batch_size
    identity = identity_of(recipe, dataset)
    tree = _tree(recipe, dataset, encoding, work / f"proposal-{identity[:16]}.npz")
    model = TwoTower(recipe, encoding, len(dataset.label_ids), None if tree is None else tree.proposal)
    train_step = TrainStep(
        model,
        dataset.label_visits(one_label_per_query=sampled),
        batch_size=batch_size,
        total_steps=epochs * steps_per_epoch,
        pairs=len(dataset.train),
    )
    held_out = {} if tree is None else tree.held_out
    trained = Trained(recipe, dataset, encoding, model, train_step, TrainingHistory(tree_penalties=held_out))
    checkpoints = Checkpoints(work, f"{identity}-{epochs}")
    state = checkpoints.load("latest", train_step.variables)
    if state is None:
        return Run(trained, checkpoints, batch_size, steps_per_epoch, 0, 0, 0.0)
    metrics = {int(epoch): metric for epoch, metric in state["history"]["metrics"].items()}
    history = TrainingHistory(state["history"]["losses"], metrics, state["history"]["best_epoch"], held_out)
    trained = replace(trained, history=history)
    return Run(trained, checkpoints, batch_size, steps_per_epoch, state["epoch"], state["step"], state["loss"])


def train(recipe: Recipe, dataset: Dataset, *, epochs: int, work: Path, logs: Path, reporter: Reporter) -> Trained:
    """Train, going on from the newest checkpoint in `work` if there is one.

    Interrupted and resumed at any step, the result equals that of an uninterrupted run to the last bit
    (on one machine and backend).

    Args:
        recipe: the job.
        dataset: its data; validation runs if `valid` has pairs.
        epochs: how many to train, at most.
        work: directory of this run's checkpoints.
        logs: directory of TensorBoard logs.
        reporter: shows progress.

    Raises:
        DataError: as `prepare_run`, or the loss is no longer finite.
        CheckpointError: as `prepare_run`.
    """
    run = prepare_run(recipe, dataset, epochs=epochs, work=work)
    trained, checkpoints, batch_size, steps = run.trained, run.checkpoints, run.batch_size, run.steps_per_epoch
    train_step, history, validating = trained.step, trained.history, len(dataset.valid) > 0
    known = KnownPositives.of(dataset.train) if recipe.loss.resolved_hits == "mask_known" else None

    if history.tree_penalties:
        tried = ", ".join(f"{log_p:.4f} at {penalty:g}" for penalty, log_p in history.tree_penalties.items())
        reporter.say(f"Tree: λ_n by held-out log p_n, nats: {tried}")

    def save(kind: str, epoch: int, step: int, loss: float) -> None:
        checkpoints.save(
            kind, train_step.variables, {"epoch": epoch, "step": step, "loss": loss, "history": asdict(history)}
        )

    with closing(Writer(str(logs))) as board, reporter.training(recipe.name, epochs, steps * batch_size) as progress:
        for epoch in range(run.epoch, epochs):
            if _out_of_patience(recipe, history):
                break
            first, total = (run.step, run.loss) if epoch == run.epoch else (0, 0.0)
            progress.epoch(epoch, done=first * batch_size)
            if first == 0:
                train_step.begin_epoch()
            batches = epoch_batches(
                dataset.train,
                trained.encoding.query,
                batch_size=batch_size,
                one_label_per_query=recipe.data.reduction == "sample",
                seed=recipe.seed,
                epoch=epoch,
                first=first,
                known=known,
                impressions=dataset.impressions if recipe.loss.impressions else None,
            )
            for step, batch in batches:
                loss = float(train_step(batch))
                if not np.isfinite(loss):
                    raise DataError(
                        f"training: expected a finite loss, found {loss} at epoch {epoch + 1}, step {step + 1}"
                    )
                total += loss
                progress.advance(batch_size, loss=total / (step + 1))
                if (step + 1) % recipe.training.checkpoint_steps == 0 and step + 1 < steps:
                    save("latest", epoch, step + 1, total)
            history.losses.append(total / steps)
            board.add_scalar("train/loss", history.losses[-1], epoch + 1)
            if validating and ((epoch + 1) % recipe.training.evaluate_every == 0 or epoch + 1 == epochs):
                curve = _validate(trained)
                best = best_of(curve, recipe.evaluation.metric)
                metric = best.metrics[recipe.evaluation.metric].value
                history.metrics[epoch + 1] = metric
                board.add_scalar(f"valid/{recipe.evaluation.metric}", metric, epoch + 1)
                board.add_scalar("valid/best_bias_removal", best.bias_removal, epoch + 1)
                board.add_scalar("valid/best_popularity", best.popularity, epoch + 1)
                progress.validated(epoch, history.losses[-1], recipe.evaluation.metric, curve)
                if metric >= max(history.metrics.values()):
                    history.best_epoch = epoch + 1
                    save("best", epoch + 1, 0, 0.0)
            save("latest", epoch + 1, 0, 0.0)
    if validating:
        checkpoints.load("best", train_step.variables)
    else:
        history.best_epoch = len(history.losses)
    return trained


def _tree(recipe: Recipe, dataset: Dataset, encoding: Encoding, path: Path) -> FittedTree | None:
    """The tree that `adversarial` draws from, kept at `path`; None for any other sampler."""
    sampler = recipe.loss.sampler
    if sampler.name != "adversarial":
        return None
    rng = np.random.default_rng(recipe.seed)
    return read_or_fit_proposal(
        path,
        lambda: fit_proposal(
            recipe.query.features,
            lambda rows_B: encoding.query.of_pairs(rows_B, rng),
            dataset.train.labels,
            vocabulary_rows=encoding.vocabulary_rows,
            labels=len(dataset.label_ids),
            dims=sampler.dims or TREE_DIMS,
            penalties=penalties_of(sampler.penalty),
            query_id=recipe.data.query_id,
        ),
    )


def _validate(trained: Trained) -> list[CurvePoint]:
    """Valid at 0, ½ and 1 of the dial that moves, on at most `max_valid_queries` queries."""
    config = trained.recipe.evaluation
    return bias_removal_curve(
        trained.dataset.valid,
        trained.dataset.train,
        trained.embed_queries,
        trained.label_side(),
        config,
        queries=len(trained.dataset.query_ids),
        askers=trained.dataset.askers,
        seed=trained.recipe.seed,
        max_queries=config.max_valid_queries,
        settings=trained.noise().quick(),
        log_proposal=log_proposal_of(trained.model.proposal, trained.encoding.query),
        calibrated_at=trained.recipe.loss.calibrated_at,
    )


def _log_frequencies(recipe: Recipe, dataset: Dataset) -> Float64:
    """log π of what training visits, float64 [L], nats."""
    visits_L = dataset.label_visits(one_label_per_query=recipe.data.reduction == "sample")
    return log_frequencies(visits_L, smoothing=recipe.loss.smoothing)


def _out_of_patience(recipe: Recipe, history: TrainingHistory) -> bool:
    patience = recipe.training.patience
    if patience is None or not history.metrics:
        return False
    return sum(epoch > history.best_epoch for epoch in history.metrics) >= patience
