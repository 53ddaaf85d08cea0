"""The recipe: everything a training job depends on, typed once and checked before any work starts.

Importing it loads no Keras, SciPy or matplotlib; of the rest of the trainer only its errors and the tables of losses,
samplers and optimisers.
"""

from longtail.trainer.config.loss import LossConfig
from longtail.trainer.config.recipe import Recipe, load_recipe
from longtail.trainer.config.sections import Data, Evaluation, Optimizer, Propensity, Split, Training
from longtail.trainer.config.towers import FeatureConfig, Model, Tower

__all__ = [
    "Data",
    "Evaluation",
    "FeatureConfig",
    "LossConfig",
    "Model",
    "Optimizer",
    "Propensity",
    "Recipe",
    "Split",
    "Tower",
    "Training",
    "load_recipe",
]
