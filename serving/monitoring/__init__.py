"""Count outcomes for Prometheus and GET /v1/monitoring.

`Monitoring` counts every outcome once (outcomes) in a mapped file per worker (counters), which survives restarts. Its
minutes are the page's report (report); its totals are the series of /metrics (prometheus). One verdict compares the
report with the baseline and the release's offline evaluation (verdict, baseline).

Imports no web framework.
"""

from longtail.serving.monitoring.baseline import AnswerBaseline, OfflineFigures, Promises, measure_baseline
from longtail.serving.monitoring.outcomes import Monitoring
from longtail.serving.monitoring.records import AnsweredBatch, ArmAnswer, ChosenLabels, IdCounts

__all__ = [
    "AnswerBaseline",
    "AnsweredBatch",
    "ArmAnswer",
    "ChosenLabels",
    "IdCounts",
    "Monitoring",
    "OfflineFigures",
    "Promises",
    "measure_baseline",
]
