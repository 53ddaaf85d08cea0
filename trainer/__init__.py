"""Trains two-tower models with sampled negatives and writes bundles."""

from longtail.trainer.errors import CheckpointError, DataError, ExportError, RecipeError, TrainerError

__all__ = ["CheckpointError", "DataError", "ExportError", "RecipeError", "TrainerError"]
