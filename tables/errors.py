"""Define the errors of data files."""


class DataError(Exception):
    """A data file is missing, unreadable or lacks required data."""


class EmptyFileError(DataError):
    """A file with neither rows nor column names."""
