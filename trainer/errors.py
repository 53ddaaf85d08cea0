"""Errors of a training job. Every message names the expected and the found value, and their place."""

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
    """Base class of errors for users of this package, except for `DataError` of the tables it reads."""


class RecipeError(TrainerError):
    """Report an unknown key, an impossible value or an undefined combination in a recipe."""


class CheckpointError(TrainerError):
    """Report a checkpoint that belongs to another recipe or other data."""


class ProcessError(TrainerError):
    """Report missing devices, or missing processes of the job."""


class DivergedError(DataError):
    """Report a loss that is no finite number any more."""


class ExportError(TrainerError):
    """Report an exported tower whose outputs differ from those of the trained tower."""
