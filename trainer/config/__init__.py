"""The recipe: everything a training job depends on, typed once and checked before any work starts."""

from longtail.trainer.config.data import Data, Split
from longtail.trainer.config.load import load_recipe
from longtail.trainer.config.loss import LossConfig
from longtail.trainer.config.recipe import Evaluation, Recipe
from longtail.trainer.config.towers import FeatureConfig, Model, Tower

__all__ = ["Data", "Evaluation", "FeatureConfig", "LossConfig", "Model", "Recipe", "Split", "Tower", "load_recipe"]
