"""Errors of a training job. Every message names a key, file or row, the value expected there and the value found."""

from longtail.tables.errors import DataError

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergedError",
    "ExportError",
    "ProcessError",
    "RecipeError",
    "TrainerError",
]


class TrainerError(Exception):
    """Base class of user errors, except `DataError` of tables."""


class RecipeError(TrainerError):
    """Report an impossible key, value or combination in a recipe."""


class CheckpointError(TrainerError):
    """Report a checkpoint that belongs to another recipe or other data."""


class ProcessError(TrainerError):
    """Report missing devices, or missing processes of the job."""


class DivergedError(DataError):
    """Report a loss that is no finite number any more."""


class ExportError(TrainerError):
    """Report an exported tower whose outputs differ from those of the trained tower."""
