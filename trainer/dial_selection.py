"""λ and μ of a trained model: measured on held-out pairs, chosen on valid."""

from __future__ import annotations

import numpy as np

from longtail.bundle import BiasRemoval, CurvePoint, Popularity
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.evaluation.dial import Dial, Setting, best_dial, chosen_by
from longtail.trainer.evaluation.target import FoundByLabel, settings_beyond
from longtail.trainer.trained import Trained


def found_by_label(trained: Trained) -> FoundByLabel:
    """Return what `choose_dial` fills with what valid's lists find, at the k of the recipe's metric."""
    recipe, dataset = trained.recipe, trained.dataset
    labels = len(dataset.label_ids)
    k = min(int(recipe.evaluation.k), labels)
    return FoundByLabel(k, dataset.label_ids, np.exp(trained.log_visits()), labels, _theory(trained))


def _theory(trained: Trained) -> dict[str, Setting]:
    """Get the settings under which scores are the slope times log p*(y|x), of the named priors [METHODS §9]."""
    if trained.model.proposal is not None or not trained.slope:
        return {}
    as_trained = Setting(trained.theoretical_bias_removal())
    uniform = Setting(as_trained.bias_removal, -trained.slope) if trained.noise().apart else Setting(0.0)
    return {"train": as_trained, "uniform": uniform}


def choose_dial(trained: Trained, dataset: Dataset, found: FoundByLabel | None = None) -> Dial:
    """Choose the λ, and the μ at that λ, of the best metric on valid, with the curve there.

    Where the recipe names a target prior, those of the best recall under it, of the curve's and of μ < 0. Without
    valid, μ is 0 and λ the recipe's, or else what undoes the training in theory [METHODS §9].

    Args:
        found: of `found_by_label`; filled with what is found at every setting.
    """
    found = found or found_by_label(trained)
    config, noise = trained.recipe.evaluation, trained.noise()
    curve: list[CurvePoint] = []
    if len(dataset.valid):
        why = chosen_by(config)

        def measure(settings: list[Setting]) -> list[CurvePoint]:
            return trained.curve(dataset.valid, dataset.train, settings, watch=found.see)

        best, curve = best_dial(measure, config, noise)
        of_curve = [Setting.of(point) for point in curve]
        found.keep(of_curve)
        beyond = settings_beyond(of_curve, apart=noise.apart)
        measured = measure(beyond) if beyond else []
        if config.target_prior is not None:
            best, _ = found.best(config.target_prior)
            why = f"target prior {config.target_prior} and valid recall@{found.k}"
            curve += [point for point in measured if Setting.of(point) == best]
    elif config.default_bias_removal is not None:
        why, best = "the recipe, for want of validation data", Setting(config.default_bias_removal)
    else:
        why, best = "theory, for want of validation data", Setting(trained.theoretical_bias_removal())
    bias_removal = BiasRemoval(
        default=best.bias_removal,
        minimum=0.0 if trained.model.proposal is not None else -1.0,
        noise=noise.name,
        chosen_by=why,
        curve_split="valid" if curve else "none",
        curve=curve,
    )
    return Dial(bias_removal, Popularity(default=best.popularity))
