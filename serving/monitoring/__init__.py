"""Count what the service did and what every bucket got, for Prometheus and for GET /v1/monitoring.

`Monitoring` receives every outcome once (live_figures) and counts it in two places: in the multiprocess files of
Prometheus (prometheus), which adds up replicas; and for the page of this host in one ring of minutes per worker (ring)
and one file of shown labels per release, which survive restarts. The report is computed from the latter (report), and
one verdict compares the report with the baseline and the release's offline evaluation (verdict, baseline).

Imports no web framework.
"""

from longtail.serving.monitoring.baseline import Baseline, OfflineFigures, Promises, measure_baseline
from longtail.serving.monitoring.live_figures import LiveFigures, Monitoring
from longtail.serving.monitoring.records import AnsweredBatch, ArmAnswer, ChosenLabels, NamedIds

__all__ = [
    "AnsweredBatch",
    "ArmAnswer",
    "Baseline",
    "ChosenLabels",
    "LiveFigures",
    "Monitoring",
    "NamedIds",
    "OfflineFigures",
    "Promises",
    "measure_baseline",
]
