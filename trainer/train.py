"""The training loop: batches, steps, validation, checkpoints.

Legend: `B` batch, `N` training pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from longtail.bundle import BONUS_BUCKETS
from longtail.trainer.choice import create_hit_counter
from longtail.trainer.config import Recipe
from longtail.trainer.data.batches import Visits, epoch_batches, one_per_query, one_period_per_batch, prefetch
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.devices import WORLD, describe_devices
from longtail.trainer.errors import DivergedError
from longtail.trainer.evaluation.dial import Setting, best_point, compute_floors, missed
from longtail.trainer.evaluation.target import list_tail_settings
from longtail.trainer.evaluation.task import VALID_QUERIES
from longtail.trainer.history import TrainingHistory
from longtail.trainer.progress import Reporter
from longtail.trainer.run import prepare_run
from longtail.trainer.trackers import trackers
from longtail.trainer.trained import Trained
from longtail.trainer.warm_start import WarmStart


def train(
    recipe: Recipe,
    dataset: Dataset,
    *,
    epochs: int,
    work: Path,
    logs: Path,
    reporter: Reporter,
    warm_start: WarmStart | None = None,
    track: Sequence[str] = (),
    judge: Callable[[TrainingHistory], None] | None = None,
) -> Trained:
    """Train from the newest checkpoint in `work`, if any; a resumed run equals an uninterrupted one.

    Args:
        dataset: the data; validation runs if `valid` has pairs.
        epochs: largest number of epochs.
        warm_start: initial weights, if there is no checkpoint.
        judge: function that is called with the history before each epoch; an error from it ends the run.
    """
    run = prepare_run(recipe, dataset, epochs=epochs, work=work, warm_start=warm_start)
    trained, checkpoints, batch_size, steps = run.trained, run.checkpoints, run.batch_size, run.steps_per_epoch
    train_step, history, validating = trained.step, trained.history, len(dataset.valid) > 0
    every = recipe.training.evaluate_every
    held_out, past = dataset.with_past(dataset.valid, dataset.train, recipe.evaluation.history)
    features = trained.encoding.query if past.ends is None else trained.encoding.query.with_history(past)
    visits: Visits | None = partial(one_per_query, dataset.train) if recipe.data.reduction == "sample" else None
    if recipe.training.periods > 1:
        visits = one_period_per_batch(dataset.train, recipe.training.periods, batch_size, visits)
    inputs = trained.encoding.query if recipe.training.accumulate == 1 else trained.encoding.query.unpacked()
    if recipe.training.devices == "all":
        reporter.say(describe_devices())
    for line in [] if run.carried is None else run.carried.lines():
        reporter.say(f"Warm start: {line}")
    if history.tree_penalties:
        tried = ", ".join(f"{log_p:.4f} at {penalty:g}" for penalty, log_p in history.tree_penalties.items())
        reporter.say(f"Tree: λ_n by held-out log p_n, nats: {tried}")

    def save(kind: str, epoch: int, step: int, loss: float) -> None:
        checkpoints.save(
            kind, train_step.variables, {"epoch": epoch, "step": step, "loss": loss, "history": asdict(history)}
        )

    def validate(epoch: int, loss: float) -> None:
        """Validate after an epoch (from 1), and keep the best model so far.

        λ is the best of 0, ½ and 1 that reaches the floors, or comes nearest.
        """
        config, noise, by_label = recipe.evaluation, trained.noise(), None
        settings = noise.quick()
        if config.target_prior is not None:
            by_label, settings = (
                create_hit_counter(trained),
                [*settings, *list_tail_settings(settings, separate_prior=noise.separate_prior)],
            )
        with train_step.updates.use_averages():
            curve = trained.curve(
                held_out,
                past,
                settings,
                features=features,
                max_queries=VALID_QUERIES,
                watch=None if by_label is None else by_label.count_hits,
            )
        # A floor of torso, tail or new is reached by β after training: an epoch is not judged by it.
        floors = {
            name: least for name, least in compute_floors(curve, config).items() if not name.endswith(BONUS_BUCKETS)
        }
        point = best_point(curve, config, floors)
        best, metric = Setting.read_point(point), point.metrics[config.metric].value
        if by_label is not None and config.target_prior is not None:
            best, metric = by_label.best(config.target_prior)
        history.metrics[epoch] = metric
        if floors and config.target_prior is None:
            history.missed[epoch] = missed(point, floors)
        figures = {config.measure: metric, "best_bias_removal": best.bias_removal, "best_popularity": best.popularity}
        record({f"valid/{name}": value for name, value in figures.items()}, epoch)
        progress.print_validation(epoch, loss, config.measure, metric, best)
        # Of equal epochs the later one counts.
        if history.rank(epoch) >= history.best_rank():
            history.best_epoch = epoch
            save("best", epoch, 0, 0.0)

    with (
        trackers(None if WORLD.process else logs, recipe, track, history.runs) as record,
        reporter.training(recipe.name, epochs, steps * batch_size) as progress,
    ):
        for epoch in range(run.epoch, epochs):
            if history.out_of_patience(recipe.resolved_patience):
                break
            if judge is not None:
                judge(history)
            # A resumed epoch goes on with its loss so far, so that its mean is that of all steps.
            start, total = (run.step, run.loss) if epoch == run.epoch else (0, 0.0)
            progress.epoch(epoch, done=start * batch_size)
            if start == 0:
                train_step.begin_epoch()
            for term in train_step.terms:
                term.begin_epoch(epoch, checkpoints, trained.embed_queries, trained.label_side, within=start > 0)
            batches = epoch_batches(
                dataset.train,
                inputs,
                train_step.terms,
                batch_size=batch_size,
                seed=recipe.seed,
                epoch=epoch,
                first=start,
                visits=visits,
            )
            for step, batch in prefetch(batches):
                loss = float(train_step(batch))
                if not np.isfinite(loss):
                    raise DivergedError(
                        f"training: expected a finite loss, found {loss} at epoch {epoch + 1}, step {step + 1}"
                    )
                total += loss
                done = step + 1
                progress.advance(batch_size, loss=total / done)
                # The last step is saved below, after the epoch's validation.
                if done % recipe.training.checkpoint_steps == 0 and done < steps:
                    save("latest", epoch, done, total)
            history.losses.append(total / steps)
            record({"train/loss": history.losses[-1]}, epoch + 1)
            if validating and ((epoch + 1) % every == 0 or epoch + 1 == epochs):
                validate(epoch + 1, history.losses[-1])
            save("latest", epoch + 1, 0, 0.0)
    if validating:
        checkpoints.load("best", train_step.variables)
    else:
        history.best_epoch = len(history.losses)
    # Last, because the averages are those of the checkpoint that was loaded.
    train_step.updates.take_averages()
    return trained
