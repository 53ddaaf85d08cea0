"""Count outcomes for Prometheus and GET /v1/monitoring.

`Monitoring` counts every outcome once (outcomes) in a mapped file per worker (counters), which survives restarts. Its
minutes are the page's report (report); its totals are the series of /metrics (prometheus). One verdict compares the
report with the baseline and the release's offline evaluation (verdict, baseline).

Imports no web framework.
"""

from longtail.serving.monitoring.baseline import (
    AnswerBaseline,
    CalibrationCandidates,
    OfflineFigures,
    Promises,
    measure_baseline,
)
from longtail.serving.monitoring.outcomes import Monitoring
from longtail.serving.monitoring.records import (
    AnsweredBatch,
    ArmAnswer,
    Basis,
    ChosenLabels,
    IdCounts,
    IdKind,
    Restriction,
)

__all__ = [
    "AnswerBaseline",
    "AnsweredBatch",
    "ArmAnswer",
    "Basis",
    "CalibrationCandidates",
    "ChosenLabels",
    "IdCounts",
    "IdKind",
    "Monitoring",
    "OfflineFigures",
    "Promises",
    "Restriction",
    "measure_baseline",
]
