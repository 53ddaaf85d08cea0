"""What can be wrong with a table. Every message says what was expected, what was found, and where."""


class DataError(Exception):
    """A data file is missing, unreadable, or does not hold what its reader needs."""


class EmptyFileError(DataError):
    """A file has neither rows nor names of columns, such as one of an hour without events."""
