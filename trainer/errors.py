"""What can be wrong with a training job. Every message says what was expected, what was found, and where."""


class TrainerError(Exception):
    """Base of everything this package raises for its user."""


class RecipeError(TrainerError):
    """The recipe has an unknown key, an impossible value, or a combination that is not defined."""


class DataError(TrainerError):
    """A data file is missing, unreadable, or does not hold what the recipe says."""


class CheckpointError(TrainerError):
    """A checkpoint is of another recipe or other data."""


class DeviceError(TrainerError):
    """Devices or other processes of the job are not there."""


class ExportError(TrainerError):
    """The exported tower does not compute what the trained one does."""
