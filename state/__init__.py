"""What outlives a service, and what its replicas agree on: label changes, in SQLite or PostgreSQL, and what replicas
that share a database tell each other.
"""

from longtail.state.errors import StoreCorruptError, StoreError, StoreVersionError
from longtail.state.labels import LabelPosition, LabelRead, LabelStore, copy_label_changes, read_label_changes
from longtail.state.place import Place, Postgres, of_model, read_place
from longtail.state.replicas import FigureRow, Interval, ReplicaStore, Told, replica_id
from longtail.state.sole import SoleProcess

__all__ = [
    "FigureRow",
    "Interval",
    "LabelPosition",
    "LabelRead",
    "LabelStore",
    "Place",
    "Postgres",
    "ReplicaStore",
    "SoleProcess",
    "StoreCorruptError",
    "StoreError",
    "StoreVersionError",
    "Told",
    "copy_label_changes",
    "of_model",
    "read_label_changes",
    "read_place",
    "replica_id",
]
