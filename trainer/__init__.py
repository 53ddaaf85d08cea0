"""Training of two-tower models with sampled negatives, and export as bundles.

    from longtail.trainer import evaluate, fit, load_recipe

    recipe = load_recipe("recipe.toml", ["model.dim=32"])
    bundle = fit(recipe, "runs/demo")
    print(evaluate(bundle).value("recall@20"))

Names are loaded at their first use: `load_recipe`, `Recipe` and the registries need no Keras, while `fit` and
`evaluate` load the whole training stack.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longtail.trainer.errors import CheckpointError, DataError, ExportError, RecipeError, TrainerError

if TYPE_CHECKING:
    from longtail.trainer import register
    from longtail.trainer.config import Recipe, load_recipe
    from longtail.trainer.evaluation.bundle import EvaluationResult, evaluate
    from longtail.trainer.evaluation.report import plot_dial
    from longtail.trainer.job import fit
    from longtail.trainer.losses import LOSSES, WEIGHTS
    from longtail.trainer.progress import Reporter
    from longtail.trainer.sampling import SAMPLERS
    from longtail.trainer.study import TuneResult, tune

__all__ = [
    "LOSSES",
    "SAMPLERS",
    "WEIGHTS",
    "CheckpointError",
    "DataError",
    "EvaluationResult",
    "ExportError",
    "Recipe",
    "RecipeError",
    "Reporter",
    "TrainerError",
    "TuneResult",
    "evaluate",
    "fit",
    "load_recipe",
    "plot_dial",
    "register",
    "tune",
]

_HOMES = {
    "LOSSES": "losses",
    "SAMPLERS": "sampling",
    "WEIGHTS": "losses",
    "EvaluationResult": "evaluation.bundle",
    "Recipe": "config",
    "Reporter": "progress",
    "TuneResult": "study",
    "evaluate": "evaluation.bundle",
    "fit": "job",
    "load_recipe": "config",
    "plot_dial": "evaluation.report",
    "tune": "study",
}
"""Modules of the names that are loaded at their first use."""


if not TYPE_CHECKING:  # type checkers read the imports above, and refuse any other name

    def __getattr__(name: str) -> Any:
        if name == "register":
            return import_module(f"{__name__}.register")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
