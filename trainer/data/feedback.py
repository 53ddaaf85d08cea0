"""Files that `longtail-serve export-feedback` writes: known by their columns, which stand for those of a log."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from longtail.trainer.config import DataConfig

WEIGHT, IMPRESSIONS, TIME, EVENT = "debiased_weight", "impressions", "time", "event"
OWN = (
    "answer", "idempotency_key", EVENT, "weight", "propensity", WEIGHT, "position", "bias_removal", "popularity",
    "release", "source", TIME, "arm", "run", "unit", IMPRESSIONS,
)  # fmt: skip
"""What the service knows of a choice. A query's feature of such a name is the column `feature_NAME`."""


def is_feedback(names: Collection[str]) -> bool:
    """Return whether a file of these columns is an export of feedback."""
    return {"answer", "propensity", "source", WEIGHT, EVENT, TIME, IMPRESSIONS} <= set(names)


def sources_of(data: DataConfig, features: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """Return the column of an export that is read for each column a recipe names, where that is another.

    Args:
        features: columns that the recipe reads a query's id and features from.
        names: the export's columns.
    """
    roles = {
        data.label_id: "label_id",
        data.timestamp: TIME,
        data.weight: WEIGHT,
        data.impressions: IMPRESSIONS,
        data.events.column if data.events else None: EVENT,
    }
    found = {name: own for name, own in roles.items() if name is not None and name not in names}
    return found | {name: f"feature_{name}" for name in features if name in OWN and name not in roles}
