"""Count what the service did and what every bucket got, for Prometheus and for GET /v1/monitoring.

`Monitoring` counts every outcome once (outcomes) in a mapped file per worker (counters), which survives restarts. Its
minutes are the page's report (report); its totals are the series of /metrics (prometheus). One verdict compares the
report with the baseline and the release's offline evaluation (verdict, baseline).

Imports no web framework.
"""

from longtail.serving.monitoring.baseline import Baseline, OfflineFigures, Promises, measure_baseline
from longtail.serving.monitoring.outcomes import Monitoring
from longtail.serving.monitoring.records import AnsweredBatch, ArmAnswer, ChosenLabels, NamedIds

__all__ = [
    "AnsweredBatch",
    "ArmAnswer",
    "Baseline",
    "ChosenLabels",
    "Monitoring",
    "NamedIds",
    "OfflineFigures",
    "Promises",
    "measure_baseline",
]
