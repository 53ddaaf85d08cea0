"""What can be wrong with a training job. Every message says what was expected, what was found, and where."""

from longtail.tables.errors import DataError

__all__ = ["CheckpointError", "DataError", "DeviceError", "DivergedError", "ExportError", "RecipeError", "TrainerError"]


class TrainerError(Exception):
    """Base of what this package raises for its user, but for `DataError` of the tables that it reads."""


class RecipeError(TrainerError):
    """The recipe has an unknown key, an impossible value, or a combination that is not defined."""


class CheckpointError(TrainerError):
    """A checkpoint is of another recipe or other data."""


class DeviceError(TrainerError):
    """Devices or other processes of the job are not there."""


class DivergedError(DataError):
    """The loss is no number any more."""


class ExportError(TrainerError):
    """The exported tower does not compute what the trained one does."""
