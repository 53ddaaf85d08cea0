"""Label changes, which outlive a service and on which replicas agree, in SQLite or PostgreSQL."""

from longtail.state.errors import StoreCorruptError, StoreError, StoreVersionError
from longtail.state.labels import LabelPosition, LabelRead, LabelStore, copy_label_changes, read_label_changes
from longtail.state.place import Place, Postgres, read_place

__all__ = [
    "LabelPosition",
    "LabelRead",
    "LabelStore",
    "Place",
    "Postgres",
    "StoreCorruptError",
    "StoreError",
    "StoreVersionError",
    "copy_label_changes",
    "read_label_changes",
    "read_place",
]
