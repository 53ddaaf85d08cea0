"""λ and μ of a trained model: measured on held-out pairs, chosen on valid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longtail.bundle import BiasRemoval, CurvePoint, Popularity
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.evaluation.dial import Dial, Setting, best_dial, chosen_by
from longtail.trainer.evaluation.ranking import Watch, bias_removal_curve, log_proposal_of
from longtail.trainer.evaluation.target import FoundByLabel, settings_beyond
from longtail.trainer.losses.implied_noise import removes_all
from longtail.trainer.trained import Trained


def found_by_label(trained: Trained) -> FoundByLabel:
    """Return what `choose_dial` fills with what valid's lists find, at the k of the recipe's metric."""
    recipe, dataset = trained.recipe, trained.dataset
    labels = len(dataset.label_ids)
    k = min(int(recipe.evaluation.k), labels)
    return FoundByLabel(k, dataset.label_ids, np.exp(trained.log_visits()), labels, _theory(trained))


def _theory(trained: Trained) -> dict[str, Setting]:
    """Return the settings under which scores are the link times log p*(y|x), of the named priors [METHODS §9, label
    shift]."""
    link = removes_all(trained.recipe.loss.objective())
    if trained.model.proposal is not None or not link:
        return {}
    as_trained = Setting(trained.theoretical_bias_removal())
    uniform = Setting(as_trained.bias_removal, -link) if trained.noise().apart else Setting(0.0)
    return {"train": as_trained, "uniform": uniform}


def choose_dial(trained: Trained, dataset: Dataset, found: FoundByLabel | None = None) -> Dial:
    """Return the λ, and the μ at that λ, of the best metric on valid, with the curve there.

    Where the recipe names a target prior, the λ and μ of the best recall under it, of those of the curve and of μ < 0.
    Without valid, μ is 0 and λ the recipe's, or else what undoes the training in theory [METHODS §9].

    Args:
        found: of `found_by_label`, for a caller that keeps it; filled with what is found at every setting.
    """
    found = found or found_by_label(trained)
    config, noise = trained.recipe.evaluation, trained.noise()
    curve: list[CurvePoint] = []
    if len(dataset.valid):
        why = chosen_by(config)

        def measure(settings: list[Setting]) -> list[CurvePoint]:
            return curve_of(
                trained, dataset.valid, known=dataset.train, config=config, settings=settings, watch=found.see
            )

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


def curve_of(
    trained: Trained,
    held_out: Pairs,
    *,
    known: Pairs,
    config: EvaluationConfig,
    settings: Sequence[Setting] | None = None,
    watch: Watch | None = None,
) -> list[CurvePoint]:
    """Return every metric at some settings of λ and μ, with histories and seen labels read from `known`.

    Args:
        settings: by default the grid of λ at μ = 0.
        watch: as `bias_removal_curve` takes it.
    """
    features = trained.encoding.query.with_history(known, held_out)
    return bias_removal_curve(
        held_out,
        known,
        lambda rows_B: trained.model.embed_queries(features.of_queries(rows_B)),
        trained.label_side(),
        config,
        queries=len(trained.dataset.query_ids),
        request_queries=trained.dataset.request_queries,
        seed=trained.recipe.seed,
        settings=settings,
        log_proposal=log_proposal_of(trained.model.proposal, features),
        calibrated_at=trained.calibrated_at,
        described=trained.recipe.describes_labels,
        watch=watch,
    )
