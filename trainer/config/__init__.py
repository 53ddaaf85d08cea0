"""Define the recipe: all settings of a training job, typed once and checked before any work starts.

Importing it loads no Keras, SciPy or matplotlib; of the rest of the trainer only its errors and the tables of losses,
samplers and optimisers.
"""

from longtail.trainer.config.loss import LossConfig
from longtail.trainer.config.reading import load_recipe, recipe_toml
from longtail.trainer.config.recipe import Recipe
from longtail.trainer.config.rows import EventsConfig, ObjectiveConfig
from longtail.trainer.config.sections import (
    SOURCE_KEYS,
    CooccurrenceConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    PriorConfig,
    SplitConfig,
    TrainingConfig,
)
from longtail.trainer.config.towers import FeatureConfig, ModelConfig, TowerConfig
from longtail.trainer.config.tune import RangeConfig, TuneConfig

__all__ = [
    "SOURCE_KEYS",
    "CooccurrenceConfig",
    "DataConfig",
    "EvaluationConfig",
    "EventsConfig",
    "FeatureConfig",
    "LossConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PriorConfig",
    "RangeConfig",
    "Recipe",
    "SplitConfig",
    "TowerConfig",
    "TrainingConfig",
    "TuneConfig",
    "load_recipe",
    "recipe_toml",
]
