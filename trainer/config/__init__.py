"""The recipe: everything a training job depends on, typed once and checked before any work starts."""

from trainer.config.data import Data, Split
from trainer.config.load import load_recipe
from trainer.config.loss import LossConfig
from trainer.config.recipe import Evaluation, Recipe
from trainer.config.towers import FeatureConfig, Model, Tower

__all__ = ["Data", "Evaluation", "FeatureConfig", "LossConfig", "Model", "Recipe", "Split", "Tower", "load_recipe"]
