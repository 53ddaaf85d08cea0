"""Read tables of every kind by one set of rules: find their files, open them in DuckDB, type their columns.

`database.py` and `table.py` need DuckDB, and are imported by their names.
"""

from longtail.tables.errors import DataError, EmptyFileError
from longtail.tables.files import DataFile, as_source, find_files, is_query

__all__ = ["DataError", "DataFile", "EmptyFileError", "as_source", "find_files", "is_query"]
