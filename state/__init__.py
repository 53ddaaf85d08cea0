"""Store label changes and keys of answer ids, for all replicas."""

from longtail.state.answer_keys import AnswerKeys
from longtail.state.errors import StoreError
from longtail.state.labels import LabelPosition, LabelRead, LabelStore, copy_label_changes, read_label_changes
from longtail.state.location import Postgres, StateLocation, parse_location

__all__ = [
    "AnswerKeys",
    "LabelPosition",
    "LabelRead",
    "LabelStore",
    "Postgres",
    "StateLocation",
    "StoreError",
    "copy_label_changes",
    "parse_location",
    "read_label_changes",
]
